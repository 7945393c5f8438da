"""int8 keys and values: how far they are from the real ones, what is clipped, and that every policy runs on them."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import toys
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax.cache.attention import decode_attention
from kvjax.cache.continuation import concatenate
from kvjax.cache.packing import store
from kvjax.cache.pool import append_token, empty_layer, keys_and_values, read_slots
from kvjax.cache.quantisation import LEVELS, Storage, parse_storage
from kvjax.cache.regions import put_pages, take_pages
from kvjax.errors import UsageError
from kvjax.policies import Full
from kvjax.policies.empty_cache import empty_cache

INT8 = Storage("int8")
PROMPT = "a prompt of some length, so that a policy has something to drop: " * 3


def stored(k, v, length, pages=(2, 2), headroom=1.25):
    cache = empty_layer(k.shape[0], pages, k.shape[-1], jnp.float32, storage=Storage("int8", headroom))
    return store(cache, jnp.asarray(k), jnp.asarray(v), jnp.asarray(length), pages)


def random_rows(seed, tokens=50):
    rng = np.random.default_rng(seed)
    scale = rng.uniform(0.1, 30, 8)
    k, v = rng.standard_normal((2, 2, 2, tokens, 8)).astype(np.float32)
    return (k * scale).astype(np.float32), v


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**16), used=st.integers(1, 50))
def test_a_row_is_within_half_a_level_of_itself(seed, used):
    k, v = random_rows(seed)
    length = np.array([[50, used], [used, 50]])
    got_k, got_v = (np.asarray(x) for x in keys_and_values(stored(k, v, length)))
    for b, h in np.ndindex(2, 2):
        n = length[b, h]
        norm = np.hypot(k[b, h, :n, :4], k[b, h, :n, 4:]).max(axis=0)
        step = np.tile(norm, 2) * (1 + 0.25 * np.sqrt(256 / n)) / LEVELS
        assert (np.abs(got_k[b, h, :n] - k[b, h, :n]) <= step * 0.501).all()
        step = np.abs(v[b, h, :n]).max(axis=1, keepdims=True) / LEVELS
        assert (np.abs(got_v[b, h, :n] - v[b, h, :n]) <= step * 0.501).all()


def test_keys_after_rotary_embedding_stay_within_the_scales_of_their_first_rows():
    """A channel of a slow rotary pair is small at first, and its partner's size a few hundred tokens later."""
    angle = np.arange(300)[:, None] * np.array([0.001, 0.004, 0.02, 0.3])
    after_rope = np.concatenate([np.cos(angle), np.sin(angle)], axis=-1) * np.tile([1, 8, 3, 0.1], 2)
    k = np.broadcast_to(after_rope, (1, 1, 300, 8)).astype(np.float32)
    cache = stored(k[:, :, :20], k[:, :, :20], np.full((1, 1), 20), pages=(10,), headroom=1.01)
    assert (np.asarray(cache.scales.k)[:, :, None] * LEVELS >= np.abs(k)).all()


def test_the_fewer_rows_there_are_the_more_room_is_left():
    k, v = random_rows(5, 400)
    k[:, :, 0] = 40  # the largest is among the first
    for count in (1, 16, 256, 400):
        cache = stored(k[:, :, :count], v[:, :, :count], np.full((2, 2), count), pages=(13, 13))
        room = np.asarray(cache.scales.k) * LEVELS / np.tile(np.hypot(k[..., :4], k[..., 4:])[:, :, :count].max(2), 2)
        np.testing.assert_allclose(room, 1 + 0.25 * np.sqrt(256 / count), rtol=1e-5)


def test_what_is_beyond_the_length_does_not_set_the_scale():
    k, v = random_rows(0)
    poisoned = k.copy()
    poisoned[:, :, 20:] = 1e30
    clean, dirty = stored(k, v, np.full((2, 2), 20)), stored(poisoned, v, np.full((2, 2), 20))
    assert (np.asarray(clean.scales.k) == np.asarray(dirty.scales.k)).all()


def test_later_rows_are_clipped_to_the_scale_and_counted():
    k, v = random_rows(1)
    cache = stored(k, v, np.full((2, 2), 50))
    limit = np.asarray(cache.scales.k) * LEVELS
    cache = cache.replace(next=jnp.full((2, 2), 50))
    loud = np.asarray(k[:, :, 0] * 0.5)
    loud[0, 1, 3] = limit[0, 1, 3] * 3
    cache = append_token(cache, jnp.asarray(loud), jnp.asarray(v[:, :, 0]), jnp.asarray([True, True]))
    assert np.asarray(cache.scales.clipped).tolist() == [[0, 1], [0, 0]]
    got, _ = read_slots(cache, jnp.full((2, 2), 50))
    np.testing.assert_allclose(got[0, 1, 3], limit[0, 1, 3], rtol=1e-6)
    # A row that is not active writes nothing, and counts nothing.
    again = append_token(cache, jnp.asarray(loud), jnp.asarray(v[:, :, 0]), jnp.asarray([False, False]))
    assert np.asarray(again.scales.clipped).tolist() == [[0, 1], [0, 0]]


def test_packing_again_changes_no_stored_number_unless_something_larger_comes_in():
    k, v = random_rows(2)
    length = jnp.full((2, 2), 50)
    cache = stored(k, v, length)
    again = store(cache, *keys_and_values(cache), length, cache.pages)
    same_bits = lambda a, b: (np.asarray(a) == np.asarray(b)).all()  # noqa: E731
    assert same_bits(again.kv.k, cache.kv.k) and same_bits(again.kv.v, cache.kv.v)
    region, first = take_pages(cache, jnp.int32(1), jnp.int32(3), 20)
    same = put_pages(cache, jnp.int32(1), first, region)
    assert same_bits(same.kv.k, cache.kv.k) and same_bits(same.kv.v, cache.kv.v)
    louder = store(cache, jnp.asarray(k) * 50, jnp.asarray(v), length, cache.pages)
    assert (np.asarray(louder.scales.k) > np.asarray(cache.scales.k)).all()


@pytest.mark.parametrize("pages", [(2, 2), (3, 2)], ids=["uniform", "ragged"])
def test_attention_reads_int8_rows_as_the_numbers_they_stand_for(pages):
    k, v = random_rows(3)
    length = jnp.asarray([[50, 33], [1, 50]])
    cache = stored(k / 10, v, length, pages)
    plain = empty_layer(2, pages, 8, jnp.float32)
    plain = store(plain, *keys_and_values(cache), length, pages)
    q = jnp.asarray(np.random.default_rng(4).standard_normal((2, 2, 3, 8)), jnp.float32)
    got, logits = decode_attention(q, cache, scale=0.3, with_logits=True)
    wanted, wanted_logits = decode_attention(q, plain, scale=0.3, with_logits=True)
    np.testing.assert_allclose(got, wanted, atol=2e-6)
    np.testing.assert_allclose(logits, wanted_logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "policy",
    [
        "lagkv:ratio=0.5,lag=16,sink=4",
        *(pytest.param(policy, marks=pytest.mark.slow) for policy in ("full", "streamingllm:budget=40")),
    ],
)
def test_generating_on_int8_rows_counts_its_bytes_and_a_row_is_itself_alone(policy):
    lm = toys.tiny_model()
    options = {"policy": policy, "storage": "int8", "chat": False, "max_new_tokens": 12, "stop_token_ids": ()}
    together = kvjax.generate(lm, [PROMPT, "short"], **options)
    alone = kvjax.generate(lm, "short", **options)
    assert alone.tokens == together[1].tokens and alone.stats.retained == together[1].stats.retained
    plan = kvjax.plan(lm, prompt_tokens=len(PROMPT), policy=policy, storage="int8", max_new_tokens=12)
    whole = kvjax.generate(lm, PROMPT, **options)
    assert plan.cache_bytes == whole.cache.nbytes
    # 8 channels: 16 bytes of numbers and 4 of the value's scale a slot, against 64.
    kept = sum(sum(heads) for heads in whole.stats.retained)
    assert whole.stats.live_cache_bytes == 20 * kept == whole.cache.live_nbytes
    full = kvjax.generate(lm, PROMPT, **(options | {"storage": None}))
    assert whole.stats.cache_bytes < 0.45 * full.stats.cache_bytes


def test_a_continued_cache_keeps_its_storage():
    lm = toys.tiny_model()
    first = kvjax.generate(lm, PROMPT, storage=Storage("int8", 2.0), chat=False, max_new_tokens=4)
    assert first.cache.storage == Storage("int8", 2.0)
    second = kvjax.generate(lm, "and more", cache=first.cache, chat=False, max_new_tokens=4)
    assert second.cache.storage == first.cache.storage
    with pytest.raises(UsageError, match="stored as int8"):
        kvjax.generate(lm, "and more", cache=first.cache, storage="model", chat=False)


def test_caches_of_different_storage_make_no_batch():
    made = [empty_cache(toys.tiny_config(), Full(), 1, 64, 32, jnp.float32, storage) for storage in (Storage(), INT8)]
    with pytest.raises(UsageError, match="share their storage"):
        concatenate(made)


@pytest.mark.parametrize("bad", ["int4", 8, Storage])
def test_unknown_storage_is_one_sentence(bad):
    with pytest.raises(UsageError, match="storage is") as error:
        parse_storage(bad)
    assert "\n" not in str(error.value)
    with pytest.raises(UsageError, match="headroom"):
        dataclasses.replace(INT8, headroom=0.5)

"""ThinK: which channels of keys stay, that queries see exactly these, and that the others take no byte."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from hypothesis import given, settings
from hypothesis import strategies as st
from support import peer_cases
from support.driver import Driver, config_for, random_kv

import kvjax
from kvjax.cache.attention import decode_attention
from kvjax.cache.layout import Layout
from kvjax.cache.packing import resize, store
from kvjax.cache.pool import append_token, empty_layer, keys_and_values, read_slots, with_key_channels
from kvjax.cache.quantisation import Storage
from kvjax.cache.regions import put_pages, take_pages
from kvjax.errors import UsageError
from kvjax.policies import (
    AdaptiveHeads,
    KeyDiff,
    LagKV,
    Policy,
    Razor,
    SnapKV,
    StreamingLLM,
    ThinK,
    format_policy,
    parse,
)
from kvjax.policies.think import key_channels
from pallas_kernels import dispatch


def channels_by_equation_6(q: np.ndarray, k: np.ndarray, kept: int) -> list[int]:
    """Of one head: q [G, W, D] the window's queries, k [T, D]; the norms of the outer products Q_i K_i, spelled out."""
    scores = np.zeros(k.shape[1])
    for i in range(k.shape[1]):
        for queries in q.astype(np.float64):
            scores[i] += np.linalg.norm(np.outer(queries[:, i], k[:, i].astype(np.float64))) ** 2
    return sorted(np.argsort(scores, kind="stable")[len(scores) - kept :].tolist())


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=2, max_size=2),
    window=st.integers(1, 12),
    channels=st.sampled_from([0.1, 0.5, 0.6]),
    seed=st.integers(0, 10**6),
)
def test_the_channels_of_equation_6(lengths, window, channels, seed):
    policy, (batch, heads, group, tokens, dim) = ThinK(channels=channels, window=window), (2, 2, 2, 50, 16)
    k, v = random_kv(seed, batch, heads, tokens, dim)
    q = np.random.default_rng(seed).standard_normal((batch, heads, group, tokens, dim)).astype(np.float32)
    q *= np.random.default_rng(seed + 1).uniform(0.2, 2, dim).astype(np.float32)
    driver = Driver(policy, config_for(heads, dim), batch, 64, 64).read(k, v, lengths, q=q)
    kept = math.ceil(channels * dim / 2 - 1e-9) * 2
    for row, head in np.ndindex(batch, heads):
        own = slice(max(lengths[row] - window, 0), lengths[row])
        wanted = channels_by_equation_6(q[row, head, :, own], k[row, head, : lengths[row]], kept)
        assert driver.cache.channels[row, head].tolist() == wanted


@pytest.mark.parametrize("case", range(len(peer_cases.KEYS)), ids=lambda i: str(peer_cases.KEYS[i]))
def test_the_channels_that_kvpress_keeps(case):
    tokens, dim, window, leaves, seed = peer_cases.KEYS[case]
    q, k = peer_cases.queries_and_keys(tokens, dim, window, seed)
    squares = np.square(q.astype(np.float64)).mean(axis=2).reshape(1, peer_cases.KEY_HEADS, peer_cases.GROUP, dim)
    kept = ThinK(channels=1 - leaves).kept_channels(toys.tiny_config(head_dim=dim))
    found = key_channels(jnp.asarray(squares, jnp.float32), jnp.asarray(k), jnp.asarray([tokens]), kept)
    assert found[0].tolist() == peer_cases.recorded()["keys"][case]


def test_equal_scores_keep_the_later_channels():
    ones = jnp.ones((1, 1, 1, 8))
    assert key_channels(ones, jnp.ones((1, 1, 5, 8)), jnp.asarray([5]), 3).tolist() == [[[5, 6, 7]]]


LAYOUTS = [Layout("columns", 16), Layout("stacked", 16), Layout("stacked", 128, 128), Layout("lanes", 64)]


def assert_pool_holds_only_its_channels(layout, kind, by_row=False):
    """Everything a pool can do beside one that holds keys whose other channels are 0."""
    rng = np.random.default_rng(0)
    (batch, heads, dim, tokens), count = (2, 3, 16, 70), 6
    k, v = (jnp.asarray(rng.standard_normal((batch, heads, tokens, dim)), jnp.float32) for _ in range(2))
    pages = (-(-160 // layout.page_size),) * heads
    whole = empty_layer(batch, pages, dim, jnp.float32, storage=Storage(kind, layout=layout), by_row=by_row)
    channels = np.sort(np.array([[rng.permutation(dim)[:count] for _ in range(heads)] for _ in range(batch)]), axis=-1)
    held = np.zeros((batch, heads, 1, dim), np.float32)
    np.put_along_axis(held, channels[:, :, None], 1, axis=-1)
    cut = with_key_channels(whole, count).replace(channels=jnp.asarray(channels, jnp.int32))
    assert cut.slot_nbytes < whole.slot_nbytes or layout.page_size == 128
    lengths, active = jnp.asarray([[70, 33, 1], [5, 64, 20]]), jnp.asarray([True, False])
    k1, v1, q = (jnp.asarray(rng.standard_normal((batch, heads, dim)), jnp.float32) for _ in range(3))
    zeroed = k * held, k1 * held[:, :, 0]
    # int8 scales are of whole keys, so those of a pool of zeroed ones would differ: they are compared to the numbers.
    exact = kind == "model"
    found = []
    for pool, (keys, key) in ((cut, (k, k1)), (whole, zeroed if exact else (k, k1))):
        pool = append_token(store(pool, keys, v, lengths, pages), key, v1, active)
        if not by_row:
            region, first = take_pages(pool, jnp.int32(0), jnp.int32(3), 20)
            pool = put_pages(pool, jnp.int32(0), first, {**region, "v": 2 * region["v"]})
        pool = resize(pool, tuple(2 * n for n in pages))
        queries = q if pool.channels is not None else q * held[:, :, 0]
        out, logits = decode_attention(queries[:, :, None], pool, scale=0.3, with_logits=True)
        there = (jnp.arange(80) < pool.length[..., None])[..., None]
        both = [jnp.where(there, x[:, :, :80], 0) for x in keys_and_values(pool)]
        both[0], first_k = (x * m for x, m in ((both[0], held), (read_slots(pool, lengths - 1)[0], held[:, :, 0])))
        found.append([*both, first_k, out, logits.max(axis=(1, 3))])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=2e-6)


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        (LAYOUTS[1], "model"),
        *(
            pytest.param(layout, kind, marks=pytest.mark.slow)
            for layout in LAYOUTS
            for kind in ("model", "int8")
            if (layout, kind) != (LAYOUTS[1], "model")
        ),
    ],
    ids=str,
)
def test_a_pool_holds_only_its_channels(layout, kind):
    assert_pool_holds_only_its_channels(layout, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model", "int8"])
def test_a_pool_whose_heads_share_slots_holds_only_its_channels(kind):
    assert_pool_holds_only_its_channels(Layout("columns", 16), kind, by_row=True)


INNER = {
    "all": None,
    "snapkv": SnapKV(ratio=0.5, window=4),
    "adaptive": AdaptiveHeads(ratio=0.5, inner=KeyDiff()),
    "ring": StreamingLLM(sink=2, window=30),
    "lagkv": LagKV(ratio=0.5, lag=8, sink=4),
}


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["model", "int8"])
@pytest.mark.parametrize("inner", INNER)
def test_rows_equal_rows_alone_over_turns_in_fewer_bytes(inner, storage):
    lm = toys.tiny_model(num_layers=2)
    inner: Policy | None = INNER[inner]
    policy, plain = ThinK(channels=0.5, window=4, inner=inner), inner or kvjax.Full()
    prompts, more = [[i * step % 97 for i in range(n)] for step, n in ((1, 150), (7, 60))], {"storage": storage}
    more |= {"max_new_tokens": 4, "logprobs": True, "stop_token_ids": ()}
    both = kvjax.generate(lm, prompts, policy=policy, **more)
    for ids, output in zip(prompts, both, strict=True):
        alone = kvjax.generate(lm, ids, policy=policy, **more)
        plan = kvjax.plan(lm, prompt_tokens=len(ids), policy=policy, max_new_tokens=4, storage=storage)
        assert plan.cache_bytes == alone.cache.nbytes
        assert alone.tokens == output.tokens
        np.testing.assert_allclose(alone.logprobs, output.logprobs, atol=2e-5)
        # The tokens that stay are those of the inner policy alone: prompts are read with whole keys.
        other = kvjax.generate(lm, ids, policy=plain, **more)
        assert output.stats.retained == other.stats.retained
        for pool, whole in zip(alone.cache.pools, other.cache.pools, strict=True):
            dim = lm.config.head_dim
            assert pool.kv.key_dim == dim // 2 and pool.slot_nbytes < whole.slot_nbytes
            leaves = [sum(leaf.nbytes for leaf in jax.tree.leaves(x.kv)) for x in (pool, whole)]
            assert leaves[0] * 4 == leaves[1] * 3
        turn = [kvjax.generate(lm, "And now?", cache=each.cache, **more) for each in (alone, output)]
        assert turn[0].tokens == turn[1].tokens
        # Channels stay what they were.
        for before, after in zip(alone.cache.pools, turn[0].cache.pools, strict=True):
            assert np.array_equal(before.channels, after.channels)


def test_kept_keys_are_the_prompts_own():
    """Bit for bit in the stored channels, and 0 in the others, as the full cache has them."""
    lm, ids = toys.tiny_model(num_layers=1), [5 * i % 83 for i in range(90)]
    cut = kvjax.generate(lm, ids, policy=ThinK(channels=0.5), max_new_tokens=0).cache.pools[0]
    full = kvjax.generate(lm, ids, max_new_tokens=0).cache.pools[0]
    found, want = (np.asarray(keys_and_values(pool)[0])[:, :, :90] for pool in (cut, full))
    held = np.zeros((1, found.shape[1], 1, found.shape[3]), bool)
    np.put_along_axis(held, np.asarray(cut.channels)[:, :, None], True, axis=-1)
    np.testing.assert_array_equal(found, np.where(held, want, 0))
    np.testing.assert_array_equal(*(np.asarray(keys_and_values(pool)[1])[:, :, :90] for pool in (cut, full)))


@pytest.mark.slow
def test_it_has_the_properties_that_every_policy_has():
    found = kvjax.check_policy(ThinK(channels=0.5, window=4, inner=SnapKV(budget=40, window=4)), toys.tiny_model())
    assert {"plan", "row alone", "int8"} < set(found.holds)


@pytest.mark.slow
def test_a_saved_cache_is_the_same(tmp_path):
    lm, ids = toys.tiny_model(num_layers=2), [3 * i % 97 for i in range(70)]
    policy = ThinK(channels=0.5, inner=SnapKV(budget=30, window=4))
    assert parse(format_policy(policy)) == policy
    output = kvjax.generate(lm, ids, policy=policy, storage="int8", max_new_tokens=3, stop_token_ids=())
    kvjax.save_cache(tmp_path / "talk", output.cache, lm)
    back = kvjax.load_cache(tmp_path / "talk", lm)
    turns = [kvjax.generate(lm, ids[:20], cache=x, max_new_tokens=4, logprobs=True) for x in (output.cache, back)]
    assert turns[0].tokens == turns[1].tokens and turns[0].logprobs == turns[1].logprobs


def test_a_tpu_saves_whole_registers_only(monkeypatch):
    for platform, saved in (("cpu", (64, 80, 96, 128)), ("gpu", (64, 80, 96, 128)), ("tpu", (80, 96))):
        monkeypatch.setattr(dispatch, "platform", lambda platform=platform: platform)
        for dim in (64, 80, 96, 128):
            config = toys.tiny_config(head_dim=dim)
            notice = ThinK(channels=0.3).notice(config, 1000)
            assert ThinK(channels=0.3).useless(config, 1000) == (dim not in saved)
            over = ThinK(channels=0.3, inner=SnapKV(ratio=0.5))  # which saves tokens whatever a row takes
            assert not over.useless(config, 1000) and over.notice(config, 1000) == notice
            assert (notice is None) == (dim in saved), (platform, dim, notice)
            if notice is not None:
                assert "128 lanes" in notice


def test_what_it_cannot_do_is_one_sentence():
    with pytest.raises(UsageError, match=r"channels is 1\.5"):
        ThinK(channels=1.5)
    with pytest.raises(UsageError, match="window is 0"):
        ThinK(window=0)
    with pytest.raises(UsageError, match="give a policy of tokens"):
        ThinK(inner=Razor())
    with pytest.raises(
        UsageError, match=r"channels=0\.95 of 16 is all of them, in multiples of 2; give at most 0\.875"
    ):
        kvjax.generate(toys.tiny_model(head_dim=16), "Hi", policy=ThinK(channels=0.95))

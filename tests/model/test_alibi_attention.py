"""ALiBi's biases in attention itself, against float64 NumPy: decode, later turns, signals, and positions far out."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from support import bloom_oracle

from kvjax.cache.attention import decode_attention, kept_tokens
from kvjax.cache.buckets import block_of
from kvjax.cache.groups import HeadGroups
from kvjax.cache.packing import store
from kvjax.cache.pool import LayerCache, by_head, empty_layer, keys_and_values, mark_by_head
from kvjax.cache.quantisation import MODEL, Storage
from kvjax.model.alibi import query_bias, slopes
from kvjax.model.decoder import random_decoder
from kvjax.policies import Full
from kvjax.policies.signals import Signals
from kvjax.runtime.decode import forward_step
from kvjax.runtime.prefill_layer import read_layer
from kvjax.runtime.programs import ONE_DEVICE
from kvjax.runtime.signal_collector import SignalCollector

CONFIG = toys.tiny_config(positional="alibi", norm="layer", mlp="gelu", embedding_norm=True)  # 4 heads on 2 KV heads
SLOPES = np.reshape(bloom_oracle.slopes(4), (2, 2))
FAR = 1_000_000


def filled(pages: tuple[int, ...], length: np.ndarray, first: int = 0, storage: Storage = MODEL) -> LayerCache:
    """Random rows [B, H] of these lengths, at positions that rise from ``first`` in steps of 1 to 3."""
    random = np.random.default_rng(1)
    shape = (*length.shape, max(pages) * 32)
    k, v = random.standard_normal((2, *shape, 8)).astype(np.float32)
    position = first + random.integers(1, 4, shape).cumsum(axis=-1)
    empty = empty_layer(length.shape[0], pages, 8, jnp.float32, marks=("position",), storage=storage)
    marks = {"position": jnp.asarray(position, jnp.int32)}
    return store(empty, jnp.asarray(k), jnp.asarray(v), jnp.asarray(length, jnp.int32), pages, marks)


def dense(scores: np.ndarray, keys: np.ndarray, query: int) -> np.ndarray:
    """Softmax [H, G, C] of scores [H, G, C] of keys at positions [H, C]; -inf stays out."""
    scores = scores - SLOPES[:, :, None] * (query - keys[:, None].astype(np.float64))
    weight = np.exp(scores - scores.max(-1, keepdims=True))
    return weight / weight.sum(-1, keepdims=True)


@pytest.mark.parametrize(
    ("pages", "first", "storage"), [((2, 2), 0, "model"), ((1, 3), FAR, "model"), ((2, 2), FAR, "int8")]
)
def test_decode_is_softmax_with_a_bias_for_every_slots_distance(pages, first, storage):
    length = np.minimum([[40, 33], [3, 64]], np.array(pages) * 32)
    cache = filled(pages, length, first, Storage(storage))
    q = np.random.default_rng(0).standard_normal((2, 2, 2, 8)).astype(np.float32)
    query = np.array([first + 200, first + 210], np.int32)
    out, logits = decode_attention(
        jnp.asarray(q), cache, scale=0.4, slopes=slopes(CONFIG), position=jnp.asarray(query), with_logits=True
    )
    k, v = (np.asarray(x, np.float64) for x in keys_and_values(cache))
    position, given = np.asarray(mark_by_head(cache, "position")), np.asarray(by_head(cache, logits))
    for row in range(2):
        scores = 0.4 * np.einsum("hgd,hcd->hgc", q[row], k[row])
        valid = np.arange(k.shape[2]) < length[row][:, None]
        weight = dense(np.where(valid[:, None], scores, -np.inf), position[row], query[row])
        np.testing.assert_allclose(out[row], np.einsum("hgc,hcd->hgd", weight, v[row]), atol=2e-6)
        # What an evicting policy reads has the bias in it.
        read = np.where(valid[:, None], np.exp(given[row] - given[row].max(-1, keepdims=True)), 0)
        np.testing.assert_allclose(read / read.sum(-1, keepdims=True), weight, atol=2e-6)


def test_heads_in_groups_have_their_own_slopes():
    length = np.array([[40, 33]])
    cache = filled((2, 2), length)
    swapped = [filled((2, 2), length) for _ in range(2)]
    groups = [
        dataclasses.replace(
            pool,
            kv=jax.tree.map(lambda x, head=head: x[:, 2 * head : 2 * head + 2], pool.kv),
            length=pool.length[:, head : head + 1],
            next=pool.next[:, head : head + 1],
            pages=(2,),
            marks={"position": pool.marks["position"][:, 2 * head : 2 * head + 2]},
        )
        for head, pool in zip((1, 0), swapped, strict=True)
    ]
    layer = HeadGroups(tuple(groups), ((1,), (0,)))
    q = jnp.asarray(np.random.default_rng(0).standard_normal((1, 2, 2, 8)), jnp.float32)
    given = dict(scale=0.4, slopes=slopes(CONFIG), position=jnp.asarray([100]))
    np.testing.assert_allclose(
        decode_attention(q, layer, **given)[0], decode_attention(q, cache, **given)[0], atol=1e-6
    )
    whole, split = (kept_tokens(x, 32, jnp.asarray([100])) for x in (cache, layer))
    np.testing.assert_array_equal(whole.position, split.position)
    assert kept_tokens(cache, 32).position is None


def test_queries_of_a_model_with_rotary_embedding_have_no_bias():
    assert query_bias(toys.tiny_config(), jnp.zeros((1, 4), jnp.int32)) is None
    bias = query_bias(CONFIG, jnp.asarray([[5, 6, 5, 6]]))
    # Two tokens, then the same two under the group's other head.
    distance = np.array([[-2, 1], [-3, 0], [-2, 1], [-3, 0]])
    want = distance * SLOPES[1].repeat(2)[:, None]
    np.testing.assert_allclose(bias(jnp.asarray([[[3, 6]]]))[0, 1], want, rtol=1e-6)


def shifted(cache, by: int):
    """The cache as if ``by`` tokens more had come before it, and gone."""
    layers = tuple(x.replace(marks={"position": x.marks["position"] + by}) for x in cache.layers)
    return cache.replace(layers=layers, seen=cache.seen + by)


def test_a_million_tokens_change_no_bit():
    """Only distances count, and they are whole numbers: nothing is rounded away far from the start."""
    params = random_decoder(CONFIG)
    random = np.random.default_rng(0)
    tokens, more = (jnp.asarray(random.integers(0, 250, (1, 64)), jnp.int32) for _ in range(2))
    rooms = dict(prompt_capacity=128, new_capacity=8)
    count, total = jnp.asarray([50]), jnp.asarray([50])
    cache, _ = ONE_DEVICE.fresh(params, tokens, count, total, policy=Full(), dtype=jnp.float32, **rooms)
    results = []
    for start in (cache, shifted(cache, FAR)):
        after, logits = ONE_DEVICE.onto(params, start, more, count, start.seen + count, **rooms)
        _, following = jax.jit(forward_step)(params, after, jnp.asarray([7]), jnp.asarray([True]))
        results.append((np.asarray(logits), np.asarray(following)))
    for near, far in zip(*results, strict=True):
        np.testing.assert_array_equal(near, far)


def reference_mass(q, k, position, query, scale, windows) -> np.ndarray:
    """[H, G, C] attention of the queries in ``windows``; q [T, H, G, D], keys [H, C, D] at [H, C], query [T]."""
    total = np.zeros((*q.shape[1:3], k.shape[1]))
    for t in windows:
        scores = scale * np.einsum("hgd,hcd->hgc", q[t].astype(np.float64), k)
        visible = position <= query[t]
        total += dense(np.where(visible[:, None], scores, -np.inf), position, query[t])
    return total


@pytest.mark.parametrize("later", [False, True])
def test_signals_count_attention_with_the_bias(later):
    """Mass of kept and new keys, of a window of queries under its own scale and of all queries."""
    tokens, count, seen, window = 64, 50, (200 if later else 0), 6
    layer = random_decoder(dataclasses.replace(CONFIG, num_layers=1)).layers[0]
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, tokens, CONFIG.hidden_size)), jnp.float32)
    cache = filled((2, 2), np.array([[40, 33]]))
    kept = kept_tokens(cache, 64, jnp.asarray([seen])) if later else None
    array = jnp.asarray([seen]), jnp.asarray([count]), jnp.asarray([count - window])
    collector = SignalCollector(Signals(window=window, columns=True), CONFIG, *array, jnp.asarray([0.2]), window)
    _, new_k, _, signals = read_layer(
        layer, x, None, kept, jnp.int32(tokens // block_of(tokens)), jnp.int32(0), collector
    )
    q = np.asarray(layer.project(x)[0])[0]
    k = np.asarray(new_k, np.float64)[0]
    position = np.broadcast_to(seen + np.arange(tokens), k.shape[:2])
    if later:
        slots, _ = keys_and_values(cache)
        places = np.asarray(mark_by_head(cache, "position"))[0]
        # Slots that hold nothing are where no query can see them.
        places = np.where(np.arange(64) < np.array([[40], [33]]), places, 10**6)
        k, position = np.concatenate([slots[0], k], axis=1), np.concatenate([places, position], axis=1)
    query = seen + np.arange(tokens)
    for mass, scale, of in (
        (signals.window, 0.2, range(count - window, count)),
        (signals.columns, CONFIG.head_dim**-0.5, range(count)),
    ):
        want = reference_mass(q, k, position, query, scale, of)
        ours = np.asarray(mass.new)[0] if not later else np.concatenate([mass.kept[0], mass.new[0]], axis=-1)
        np.testing.assert_allclose(ours, want, atol=2e-5)

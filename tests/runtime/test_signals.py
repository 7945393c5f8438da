"""The signals attention hands a policy, against dense attention computed in NumPy from the same queries and keys."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from kvjax.cache.quantisation import MODEL
from kvjax.model.rope import angles, rotate
from kvjax.policies.base import Policy
from kvjax.policies.signals import QueryStats, Signals
from kvjax.runtime.programs import ONE_DEVICE, PREFILL_FRESH
from kvjax.runtime.signal_collector import stats_of
from kvjax.sharding.compile import OneDevice

SHARED = {"dtype": jnp.dtype("float32"), "new_capacity": 32}


@dataclasses.dataclass(frozen=True)
class Spy(Policy):
    """Keeps every token, and what attention handed over in its state."""

    asked: Signals = dataclasses.field(default_factory=Signals)
    scale: float | None = None

    @property
    def signals(self):
        return self.asked

    def window_scale(self, config, total):
        return super().window_scale(config, total) if self.scale is None else jnp.full(total.shape, self.scale)

    def select(self, layer, cache, candidates, chunk):
        chosen = super().select(layer, cache, candidates, chunk)
        return dataclasses.replace(chosen, state=candidates.signals)


# State of another structure than init_state's is refused of somebody's own policy.
Spy.__module__ = "kvjax.spy"


def projected(lm, ids):
    """Layer 0's queries before rotary [T, H, G, D], and its queries and keys after it, by the book."""
    config, layer = lm.config, lm.params.layers[0]
    q, k, _ = (np.asarray(x[0], np.float64) for x in layer.project(lm.params.embed(jnp.asarray([ids]))))
    cos, sin = angles(config, jnp.arange(len(ids))[None], jnp.asarray([len(ids)]))
    q_after_rope = np.asarray(
        rotate(jnp.asarray(q, jnp.float32), cos[0, :, None, None], sin[0, :, None, None]), np.float64
    )
    k_after_rope = np.asarray(rotate(jnp.asarray(k, jnp.float32), cos[0, :, None], sin[0, :, None]), np.float64)
    return q, q_after_rope, k_after_rope


def dense(lm, ids, scale):
    """Layer 0's queries before rotary [T, H, G, D] and its attention [H, G, T, T]."""
    config, layer = lm.config, lm.params.layers[0]
    q, q_after_rope, k_after_rope = projected(lm, ids)
    scores = np.einsum("thgd,shd->hgts", q_after_rope, k_after_rope) * scale
    scores = np.where(np.tril(np.ones((len(ids), len(ids)), bool)), scores, -np.inf)
    weight = np.exp(scores)
    total = weight.sum(axis=-1, keepdims=True)
    if config.attention_sinks:  # a logit more in each head's softmax, at the same temperature
        sinks = np.asarray(layer.sinks[...], np.float64).reshape(config.num_kv_heads, -1)
        total = total + np.exp(sinks * scale / config.attention_scale)[..., None, None]
    return q, weight / total


def read(lm, policy, rows, cache=None, room=512):
    tokens = np.zeros((len(rows), max(64, -(-max(map(len, rows)) // 256) * 256)), np.int32)
    for i, ids in enumerate(rows):
        tokens[i, : len(ids)] = ids
    count = jnp.asarray([len(ids) for ids in rows])
    if cache is None:
        return ONE_DEVICE.fresh(lm.params, tokens, count, count, policy=policy, prompt_capacity=room, **SHARED)[0]
    total = cache.seen + count
    return ONE_DEVICE.onto(lm.params, cache, tokens, count, total, prompt_capacity=room, new_capacity=32)[0]


def ids_of(seed, count):
    return np.random.default_rng(seed).integers(0, 250, count).tolist()


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=["MHA", "GQA", "MQA"])
def test_window_mass_and_columns_are_dense_attention_summed(heads):
    lm = toys.tiny_model(num_heads=heads[0], num_kv_heads=heads[1])
    rows = [ids_of(1, 300), ids_of(2, 20), ids_of(3, 33)]
    cache = read(lm, Spy(Signals(window=32, columns=True)), rows)
    got = cache.layers[0].state
    by_keys = read(lm, Spy(Signals(window=32, window_by_keys=True)), rows).layers[0].state
    for row, ids in enumerate(rows):
        _, weight = dense(lm, ids, lm.config.head_dim**-0.5)
        size = len(ids)
        np.testing.assert_allclose(got.window[row, :, :, :size], weight[:, :, -32:].sum(axis=2), atol=2e-5)
        np.testing.assert_allclose(got.columns[row, :, :, :size], weight.sum(axis=2), atol=1e-4)
        counted = (weight * np.arange(1, size + 1)[:, None])[:, :, -32:].sum(axis=2)
        np.testing.assert_allclose(by_keys.window[row, :, :, :size], counted, rtol=2e-3, atol=2e-3)
        for mass in (got.window, got.columns):
            assert not np.asarray(mass[row, :, :, size:]).any()


@pytest.mark.parametrize("scaled", [True, False])
def test_noncausal_mass_is_attention_in_both_directions_within_chunks(scaled):
    lm = toys.tiny_model()
    scale = lm.config.head_dim**-0.5 if scaled else 1.0
    first, second = [ids_of(1, 270), ids_of(2, 10), ids_of(5, 3)], [ids_of(3, 40), ids_of(4, 7), ids_of(6, 9)]
    policy = Spy(Signals(noncausal=16, noncausal_scaled=scaled, noncausal_first=6, noncausal_last=2))
    cache = read(lm, policy, first)
    before, after = cache.layers[0].state, read(lm, policy, second, cache).layers[0].state
    for row in range(3):
        ids, start = first[row] + second[row], len(first[row])
        _, q, k = projected(lm, ids)
        for got, begin, end, place in ((before, 0, start, 0), (after, start, len(ids), start)):
            want = np.ones((q.shape[1], q.shape[2], end - begin))
            for at in range(max(6, begin), end - 2, 16):
                part = slice(at, min(at + 16, end - 2))
                weight = np.exp(np.einsum("thgd,shd->hgts", q[part], k[part]) * scale)
                weight /= weight.sum(axis=-1, keepdims=True)
                lacking = (16 - (part.stop - part.start)) / 16
                want[:, :, part.start - begin : part.stop - begin] = weight.sum(axis=2) + lacking
            np.testing.assert_allclose(got.noncausal[row, :, :, place : place + end - begin], want, atol=1e-4)


def with_sinks(lm):
    """Sinks near the largest scores, so that they take much of the softmaxes of some heads."""
    for layer in lm.params.layers:
        layer.sinks[...] = jnp.asarray([2.0, 4.0, -1.0, 3.0])
    return lm


def test_rows_that_are_read_in_turns_have_the_sinks_of_their_heads():
    """Two rows of two blocks: a CPU reads one after the other."""
    lm, rows = with_sinks(toys.tiny_model(attention_sinks=True)), [ids_of(8, 300), ids_of(9, 280)]
    policy = Spy(Signals(window=8, columns=True))
    together = read(lm, policy, rows)
    for row, ids in enumerate(rows):
        for mine, other in zip(read(lm, policy, [ids]).layers, together.layers, strict=True):
            for name in ("window", "columns"):
                one, both = getattr(mine.state, name)[0], getattr(other.state, name)[row]
                np.testing.assert_allclose(one, both, atol=2e-5)


@pytest.mark.parametrize("scale", [None, 0.9])
def test_masses_of_softmaxes_with_sinks_are_what_keys_bring_to_the_result(scale):
    lm = with_sinks(toys.tiny_model(attention_sinks=True))
    first, second = ids_of(8, 280), ids_of(9, 30)
    policy = Spy(Signals(window=8, columns=True, columns_scaled=True), scale=scale)
    cache = read(lm, policy, [second], read(lm, policy, [first]))
    _, weight = dense(lm, first + second, scale or lm.config.attention_scale)
    assert weight.sum(axis=-1).max() < 1 and weight.sum(axis=-1).min() < 0.3
    got, size = cache.layers[0].state, len(first + second)
    np.testing.assert_allclose(got.window[0, :, :, :size], weight[:, :, -8:].sum(axis=2), atol=2e-5)
    np.testing.assert_allclose(got.columns[0, :, :, :size], weight[:, :, -len(second) :].sum(axis=2), atol=1e-4)


def test_a_later_turns_signals_cover_kept_and_new_keys():
    lm = toys.tiny_model()
    first, second = [ids_of(1, 270), ids_of(2, 10)], [ids_of(3, 40), ids_of(4, 7)]
    policy = Spy(Signals(window=16, columns=True, queries=True))
    cache = read(lm, policy, second, read(lm, policy, first))
    got = cache.layers[0].state
    for row in range(2):
        ids, new = first[row] + second[row], len(second[row])
        q, weight = dense(lm, ids, lm.config.head_dim**-0.5)
        take = min(16, new)
        np.testing.assert_allclose(got.window[row, :, :, : len(ids)], weight[:, :, -take:].sum(axis=2), atol=2e-5)
        np.testing.assert_allclose(got.columns[row, :, :, : len(ids)], weight[:, :, -new:].sum(axis=2), atol=1e-4)
        np.testing.assert_allclose(got.queries.mean[row], q[-new:].mean(axis=0), atol=1e-5)


def test_the_softmax_of_the_window_has_its_own_scale_and_columns_have_it_on_request():
    lm = toys.tiny_model()
    ids = ids_of(5, 290)
    for scaled in (False, True):
        cache = read(lm, Spy(Signals(window=8, columns=True, columns_scaled=scaled), scale=0.9), [ids])
        got = cache.layers[0].state
        _, own = dense(lm, ids, 0.9)
        _, plain = dense(lm, ids, lm.config.head_dim**-0.5)
        np.testing.assert_allclose(got.window[0, :, :, : len(ids)], own[:, :, -8:].sum(axis=2), atol=2e-5)
        wanted = (own if scaled else plain).sum(axis=2)
        np.testing.assert_allclose(got.columns[0, :, :, : len(ids)], wanted, atol=1e-4)


def test_a_window_can_be_a_share_of_the_row():
    lm = toys.tiny_model()
    rows = [ids_of(6, 290), ids_of(7, 100)]
    got = read(lm, Spy(Signals(window_share=0.1)), rows).layers[0].state
    for row, ids in enumerate(rows):
        _, weight = dense(lm, ids, lm.config.head_dim**-0.5)
        wanted = weight[:, :, -(len(ids) // 10) :].sum(axis=2)
        np.testing.assert_allclose(got.window[row, :, :, : len(ids)], wanted, atol=2e-5)


@pytest.mark.slow
def test_on_a_later_turn_the_share_is_of_all_the_rows_tokens():
    lm = toys.tiny_model()
    policy = Spy(Signals(window_share=0.1))
    first, second = [ids_of(1, 250), ids_of(2, 60)], [ids_of(3, 30), ids_of(4, 60)]
    got = read(lm, policy, second, read(lm, policy, first)).layers[0].state
    for row, queries in enumerate((28, 12)):  # a tenth of 280 and of 120
        ids = first[row] + second[row]
        _, weight = dense(lm, ids, lm.config.head_dim**-0.5)
        wanted = weight[:, :, -queries:].sum(axis=2)
        np.testing.assert_allclose(got.window[row, :, :, : len(ids)], wanted, atol=2e-5)


def test_query_statistics_skip_the_first_positions():
    lm = toys.tiny_model()
    rows = [ids_of(8, 300), ids_of(9, 12)]
    stats = read(lm, Spy(Signals(queries=True, query_skip=4)), rows).layers[0].state.queries
    for row, ids in enumerate(rows):
        q, _ = dense(lm, ids, 1.0)
        used = q[4:]
        assert stats.count[row] == len(used)
        np.testing.assert_allclose(stats.mean[row], used.mean(axis=0), atol=1e-5)
        centred = used - used.mean(axis=0)
        wanted = np.einsum("thgd,thge->hgde", centred, centred) / len(used)
        np.testing.assert_allclose(stats.covariance[row], wanted, atol=1e-5)


def test_merged_statistics_are_those_of_all_queries_even_far_from_zero():
    rng = np.random.default_rng(0)
    q = (1e3 + rng.standard_normal((2, 50, 1, 2, 4))).astype(np.float32)
    counts = np.ones((2, 50), bool)
    counts[1, 30:] = False
    halves = [stats_of(jnp.asarray(q[:, part]), jnp.asarray(counts[:, part])) for part in (slice(0, 20), slice(20, 50))]
    merged = QueryStats.none(2, 1, 2, 4).merge(halves[0]).merge(halves[1])
    for row, size in ((0, 50), (1, 30)):
        used = q[row, :size].astype(np.float64)
        np.testing.assert_allclose(merged.mean[row], used.mean(axis=0), rtol=1e-6)
        centred = used - used.mean(axis=0)
        wanted = np.einsum("thgd,thge->hgde", centred, centred) / size
        np.testing.assert_allclose(merged.covariance[row], wanted, atol=2e-3)
    assert isinstance(jax.tree.leaves(merged)[0], jax.Array)


def test_nothing_declared_costs_nothing():
    lm = toys.tiny_model()
    tokens, count = jnp.zeros((1, 512), jnp.int32), jnp.asarray([300])

    def cost(policy):
        device = OneDevice(lm.config, policy)
        given = lm.params, tokens, count, count
        program = PREFILL_FRESH.lower(device, *given, prompt_capacity=512, storage=MODEL, **SHARED)
        return program.compile().cost_analysis()["flops"]

    plain = cost(Spy())
    assert cost(Spy(Signals(decode_logits=True))) == plain < cost(Spy(Signals(window=8)))

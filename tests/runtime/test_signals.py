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

    def select(self, layer, cache, candidates, turn):
        chosen = super().select(layer, cache, candidates, turn)
        return dataclasses.replace(chosen, state=candidates.signals)


def dense(lm, ids, scale):
    """Layer 0's queries before rotary [T, H, G, D] and its attention [H, G, T, T], by the book."""
    config, layer = lm.config, lm.params.layers[0]
    q, k, _ = (np.asarray(x[0], np.float64) for x in layer.project(lm.params.embed(jnp.asarray([ids]))))
    cos, sin = angles(config, jnp.arange(len(ids))[None], jnp.asarray([len(ids)]))
    turned_q = np.asarray(rotate(jnp.asarray(q, jnp.float32), cos[0, :, None, None], sin[0, :, None, None]), np.float64)
    turned_k = np.asarray(rotate(jnp.asarray(k, jnp.float32), cos[0, :, None], sin[0, :, None]), np.float64)
    scores = np.einsum("thgd,shd->hgts", turned_q, turned_k) * scale
    scores = np.where(np.tril(np.ones((len(ids), len(ids)), bool)), scores, -np.inf)
    weight = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return q, weight / weight.sum(axis=-1, keepdims=True)


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
    for row, ids in enumerate(rows):
        _, weight = dense(lm, ids, lm.config.head_dim**-0.5)
        size = len(ids)
        np.testing.assert_allclose(got.window[row, :, :, :size], weight[:, :, -32:].sum(axis=2), atol=2e-5)
        np.testing.assert_allclose(got.columns[row, :, :, :size], weight.sum(axis=2), atol=1e-4)
        for mass in (got.window, got.columns):
            assert not np.asarray(mass[row, :, :, size:]).any()


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

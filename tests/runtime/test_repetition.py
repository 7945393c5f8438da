"""What keys get when their prompt is repeated, against the whole sequence read densely in NumPy (KVzip)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import toys

import kvjax
from kvjax.cache.pool import keys_and_values as slots
from kvjax.model.alibi import slopes
from kvjax.model.rope import angles, apply_rope
from kvjax.policies.base import Policy
from kvjax.policies.signals import Repetition, Signals
from kvjax.policies.window_layers import for_model
from kvjax.runtime.programs import ONE_DEVICE, PREFILL_FRESH

FIRST, LATER, END = (7, 8, 9), (11, 12), (5, 6)
ASKED = Repetition(chunk=24, sink=3, first=FIRST, later=LATER, end=END, overlap=4)
LONGEST = 160
SHARED = {"dtype": jnp.dtype("float32"), "new_capacity": 32}


@dataclasses.dataclass(frozen=True)
class Spy(Policy):
    """Keeps every token, and what the repetition handed over in its state."""

    asked: Repetition = ASKED

    @property
    def signals(self):
        return Signals(repeat=self.asked)

    def select(self, layer, cache, candidates, chunk):
        chosen = super().select(layer, cache, candidates, chunk)
        return dataclasses.replace(chosen, state=candidates.signals.repeat)


# State of another structure than init_state's is refused of somebody's own policy.
Spy.__module__ = "kvjax.spy"


def read(lm, rows, cache=None, policy=None, room=512):
    tokens = np.zeros((len(rows), 256), np.int32)
    for i, ids in enumerate(rows):
        tokens[i, : len(ids)] = ids
    count = np.array([len(ids) for ids in rows], np.int32)
    if cache is None:
        policy = for_model(policy or Spy(), lm.config)
        return ONE_DEVICE.fresh(lm.params, tokens, count, count, policy=policy, prompt_capacity=room, **SHARED)[0]
    total = np.asarray(cache.seen) + count
    return ONE_DEVICE.onto(lm.params, cache, tokens, count, total, prompt_capacity=room, new_capacity=32)[0]


def dense(lm, ids):
    """Of each layer, (q [N, H, G, D], k [N, H, D], biases [H, G, N, N]) of one sequence, every score at once.

    N is :data:`LONGEST`, whose shapes are compiled once: what stands behind a sequence is seen by none of its tokens.
    """
    count, order = LONGEST, np.arange(LONGEST)
    x, found = lm.params.embed(jnp.asarray([[*ids, *[0] * (count - len(ids))]])), []
    for layer in lm.params.layers:
        c = layer.config
        rope = angles(c, jnp.arange(count)[None], jnp.asarray([len(ids)])) if c.positional == "rope" else None
        q, k, v = layer.project(x)
        q, k = (np.asarray(apply_rope(a, rope)[0], np.float64) for a in (q, k))
        bias = np.zeros((c.num_kv_heads, c.group_size, 1, 1))
        if c.positional == "alibi":
            bias = slopes(c).astype(np.float64)[..., None, None] * (order[None] - order[:, None])
        score = scored(c, q, k) + bias
        behind = order[:, None] - order[None]
        seen = (behind >= 0) & (behind < (c.window or count))
        weight = np.where(seen, np.exp(np.where(seen, score, 0)), 0)
        total = weight.sum(axis=-1, keepdims=True) + extra(layer)
        out = np.einsum("hgts,shd->thgd", weight / total, np.asarray(v[0], np.float64))
        x = layer.finish(x, jnp.asarray(out, jnp.float32)[None])
        found.append((q, k, bias))
    return found


def scored(config, q, k):
    score = np.einsum("thgd,shd->hgts", q, k) * config.attention_scale
    cap = config.attention_soft_cap
    return score if cap is None else cap * np.tanh(score / cap)


def extra(layer):
    """What a head's sink logit adds to its softmax's sum."""
    sinks = layer.sink_logits
    return 0 if sinks is None else np.exp(np.asarray(sinks, np.float64))[..., None, None]


def oracle(lm, before, prompt, asked=ASKED):
    """[layer][H, 1, tokens of the prompt]: the formula as in NVIDIA's kvpress, on one whole sequence a chunk."""
    whole, result = [*before, *prompt], [[] for _ in lm.params.layers]
    for start in range(0, len(prompt), asked.chunk):
        chunk = prompt[start : start + asked.chunk]
        request = [*asked.first, *asked.end]
        if start:
            request = [*asked.later, *prompt[start - asked.overlap : start], *asked.end]
        fed = [*request, *chunk]
        first = len(before) + start
        sink = min(asked.sink, first)
        keys = np.array([*range(sink), *range(first, first + len(chunk)), *range(len(whole), len(whole) + len(fed))])
        queries = np.arange(len(whole), len(whole) + len(fed))
        for layer, (q, k, bias), into in zip(lm.params.layers, dense(lm, [*whole, *fed]), result, strict=True):
            score = scored(layer.config, q[queries], k[keys])
            if bias.shape[-1] > 1:
                score = score + bias[:, :, queries[:, None], keys]
            weight = np.where(keys <= queries[:, None], np.exp(score), 0)
            weight = weight / (weight.sum(axis=-1, keepdims=True) + extra(layer))
            into.append(weight[..., sink : sink + len(chunk)].max(axis=2).max(axis=1, keepdims=True))
    return [np.concatenate(parts, axis=-1) for parts in result]


def ids_of(seed, count):
    return np.random.default_rng(seed).integers(20, 250, count).tolist()


MODELS = {
    "rope": {},
    "alibi": dict(positional="alibi", norm="layer", mlp="gelu"),
    "all_else": dict(num_layers=3, windows=(None, 16, None), attention_soft_cap=3.0, attention_sinks=True),
}


def model(kind):
    lm = toys.tiny_model(**MODELS[kind])
    for i, layer in enumerate(lm.params.layers):
        if layer.config.attention_sinks:
            layer.sinks[...] = jnp.linspace(-1.0, 2.0, layer.config.num_heads) + i
    return lm


@pytest.mark.parametrize("kind", ["alibi", "all_else", pytest.param("rope", marks=pytest.mark.slow)])
def test_the_largest_probability_of_every_key_is_the_equations(kind):
    """Prompts of one chunk, of several, and on a chunk's edge; then a later turn, and a row that has none."""
    lm = model(kind)
    rows = [ids_of(1, 5), ids_of(2, 24), ids_of(3, 61), ids_of(4, 49)]
    cache = read(lm, rows)
    later = [ids_of(5, 30), ids_of(6, 3), [], ids_of(7, 24)]
    second = read(lm, later, cache)
    for row, (ids, more) in enumerate(zip(rows, later, strict=True)):
        for got, before, prompt in ((cache, [], ids), (second, ids, more)):
            wanted = oracle(lm, before, prompt) if prompt else []
            for layer, mine in zip(lm.params.layers, got.layers, strict=True):
                if layer.config.window is None and prompt:
                    found = np.asarray(mine.state)[row, :, :, len(before) : len(before) + len(prompt)]
                    index = list(lm.params.layers).index(layer)
                    np.testing.assert_allclose(found, wanted[index], rtol=2e-4, atol=1e-6)


def test_the_cache_and_the_logits_are_those_of_a_prompt_that_was_not_repeated():
    lm, rows = toys.tiny_model(), [ids_of(1, 5), ids_of(3, 61)]
    tokens = np.zeros((2, 256), np.int32)
    for i, ids in enumerate(rows):
        tokens[i, : len(ids)] = ids
    count = np.array([5, 61], np.int32)
    sizes = dict(prompt_capacity=256, **SHARED)
    mine, logits = ONE_DEVICE.fresh(lm.params, tokens, count, count, policy=Spy(), **sizes)[:2]
    full, wanted = ONE_DEVICE.fresh(lm.params, tokens, count, count, policy=kvjax.Full(), **sizes)[:2]
    np.testing.assert_array_equal(logits, wanted)
    for one, other in zip(mine.layers, full.layers, strict=True):
        for a, b in zip(slots(one), slots(other), strict=True):
            for row, ids in enumerate(rows):
                np.testing.assert_array_equal(a[row, :, : len(ids)], b[row, :, : len(ids)])
    np.testing.assert_array_equal(mine.seen, full.seen)


def test_other_lengths_and_other_words_of_as_many_tokens_compile_nothing_more():
    lm = toys.tiny_model()
    read(lm, [ids_of(1, 5), ids_of(3, 61)])
    compiled = PREFILL_FRESH.compilations()
    read(lm, [ids_of(1, 200), ids_of(3, 1)])
    assert PREFILL_FRESH.compilations() == compiled


@pytest.mark.slow
def test_a_row_is_the_row_alone():
    lm, rows = toys.tiny_model(), [ids_of(1, 5), ids_of(3, 61), ids_of(2, 24)]
    together = read(lm, rows)
    for row, ids in enumerate(rows):
        alone = read(lm, [ids])
        for mine, other in zip(alone.layers, together.layers, strict=True):
            n = len(ids)
            np.testing.assert_allclose(mine.state[0, :, :, :n], other.state[row, :, :, :n], rtol=1e-4, atol=1e-7)


def test_tokens_of_the_passes():
    assert ASKED.tokens(0) == 0 and ASKED.tokens(24) == 24 + 5 and ASKED.tokens(25) == 25 + 5 + 8

"""The policies that choose by attention and statistics, through generation: what holds for every one of them."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
import toys
from support import oracles

import kvjax
from kvjax.cache.pool import keys_and_values
from kvjax.policies import (
    NACL,
    ChunkKV,
    Compactor,
    CriticalKV,
    ExpectedAttention,
    Finch,
    KeyDiff,
    KVzip,
    Merged,
    PyramidKV,
    SlimKV,
    SnapKV,
)
from kvjax.runtime.compilation import compile_clock


def policies(**size):
    return [
        SnapKV(window=8, **size),
        PyramidKV(window=8, beta=4, **size),
        SlimKV(window=8, **size),
        Finch(window=8, chunk=16, **size),
        NACL(**size),
        KeyDiff(**size),
        ExpectedAttention(future=32, **size),
        Compactor(chunk=32, **size),
        KVzip(chunk=64, **size),
        CriticalKV(inner=KVzip(chunk=64), **size),
        ChunkKV(inner=Compactor(chunk=32), **size),
        Merged(inner=SnapKV(window=8), **size),
    ]


def name(policy) -> str:
    return type(policy).__name__


RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, 256, size).tolist() for size in (200, 60, 5)]
PLAIN = dict(repetition_penalty=1.5)  # random weights repeat themselves


@pytest.fixture(scope="module")
def endless(tiny_model):
    """The tiny model, with nothing that ends its answers."""
    return dataclasses.replace(tiny_model, stop_token_ids=())


@pytest.fixture(scope="module")
def whole(endless):
    return kvjax.generate(endless, PROMPTS, max_new_tokens=1)


@pytest.mark.parametrize("policy", policies(budget=256), ids=name)
def test_a_budget_that_covers_the_prompt_is_the_full_cache(policy, whole, endless):
    """What prefill leaves is bitwise what it leaves without a policy; decoding is the same code from there."""
    outputs = kvjax.generate(endless, PROMPTS, policy=policy, max_new_tokens=1)
    for mine, full in zip(outputs, whole, strict=True):
        assert mine.tokens == full.tokens and mine.stats.retained == full.stats.retained
    for layer, full in zip(outputs[0].cache.layers, whole[0].cache.layers, strict=True):
        for mine, reference in zip(keys_and_values(layer), keys_and_values(full), strict=True):
            np.testing.assert_array_equal(mine[:, :, :200], reference[:, :, :200])


#: One of each kind by default: queries of a window, random draws, moments of queries, chunks, a repetition.
KINDS = (SlimKV, NACL, ExpectedAttention, ChunkKV, KVzip)


@pytest.mark.parametrize(
    "policy",
    [pytest.param(p, marks=() if isinstance(p, KINDS) else pytest.mark.slow) for p in policies(budget=40)],
    ids=name,
)
def test_batches_alone_and_on_a_later_turn(policy, endless):
    """A row of a batch is the row alone; 3 x the budget is decoded; a second batch compiles nothing."""
    options = dict(policy=policy, max_new_tokens=125, **PLAIN)
    together = kvjax.generate(endless, PROMPTS, **options)
    with compile_clock() as clock:
        kvjax.generate(endless, [prompt[::-1] for prompt in PROMPTS], **options)
    assert clock.programs == 0 and {len(output.tokens) for output in together} == {125}
    for prompt, output in zip(PROMPTS, together, strict=True):
        kept = np.array(output.stats.retained) - 124  # decoded tokens all stay
        assert kept.mean() == min(len(prompt), 40)
        assert isinstance(policy, PyramidKV) or (kept == kept[0, 0]).all()
    alone = kvjax.generate(endless, PROMPTS[1], **options)
    assert alone.tokens == together[1].tokens and alone.stats.retained == together[1].stats.retained
    oracles.same_caches(alone.cache, together[1].cache)
    later = kvjax.generate(endless, PROMPTS[0][:30], cache=alone.cache, max_new_tokens=8, **PLAIN)
    assert (np.array(later.stats.retained) - 7).mean() == 40 and later.stats.seen == 60 + 125 + 30 + 7
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(later.cache.layers))


#: One by default; the others differ in what they choose, which toy models show.
READERS = [
    pytest.param(policy, marks=() if type(policy) is SnapKV else pytest.mark.slow) for policy in policies(budget=96)
]


@pytest.mark.slow
@pytest.mark.parametrize("policy", READERS, ids=name)
def test_the_default_model_reads_a_prompt(policy, default_model):
    """Its shapes and lengths; decoding is the same for all of them, so one decodes."""
    rules = "Visitors may take pictures in every hall, but not of the guards. " * 12
    prompt = f"{rules}What is the capital of France? Answer in one sentence."
    new = 8 if isinstance(policy, SnapKV) and not isinstance(policy, PyramidKV) else 1
    output = kvjax.generate(default_model, prompt, policy=policy, max_new_tokens=new)
    assert output.stats.prompt_tokens > 150
    assert (np.array(output.stats.retained) - new + 1).mean() == 96
    assert output.text.strip().startswith("The capital of France"[: 3 if new == 1 else None])


def test_of_two_tokens_keydiff_keeps_the_same_whatever_is_beside_them():
    """Both are equally close to their mean; rounding, which depends on the batch, must not choose."""
    lm = toys.tiny_model()
    pairs = [np.random.default_rng(seed).integers(0, 256, 2).tolist() for seed in range(12)]
    long = np.random.default_rng(99).integers(0, 256, 270).tolist()
    options = {"policy": "keydiff:ratio=0.5", "max_new_tokens": 4, "chat": False}
    together = kvjax.generate(lm, [*pairs, long], **options)
    for pair, output in zip(pairs, together, strict=False):
        assert output.tokens == kvjax.generate(lm, pair, **options).tokens, pair

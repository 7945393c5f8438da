"""Conversations of rounds on a tiny model: against the full cache, the paper's equations, and rows alone."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from support.round_talks import BELOW, NEW, TURNS, ids_of, talk
from support.rounds_oracle import dense_layers, q_att, taken

import kvjax
from kvjax.policies import RoundAttention
from kvjax.runtime.compilation import compile_clock


@pytest.mark.slow
def test_all_rounds_selected_is_the_full_cache(full, everything):
    for wanted, found in zip(full, everything, strict=True):
        for one, other in zip(wanted, found, strict=True):
            assert other.tokens == one.tokens
            np.testing.assert_allclose(other.logprobs, one.logprobs, atol=2e-4)
            assert other.stats.live_cache_bytes == one.stats.live_cache_bytes
            assert other.stats.seen == one.stats.seen == other.stats.rounds.tokens_used


def test_attention_and_selection_are_the_papers(lm, one_of_ten):
    for row in range(2):
        ids = ids_of(one_of_ten, row)
        at = dense_layers(lm, ids, BELOW)[BELOW - 1]
        rounds = one_of_ten[-1][row].cache.rounds[0]
        edges = [(part.start, part.start + part.tokens) for part in rounds]
        assert edges[0][0] == 4 and edges[-1][1] == len(ids)
        for turn in range(1, len(TURNS)):
            stats = one_of_ten[turn][row].stats.rounds
            start = edges[turn][0]
            question = (start, start + len(TURNS[turn][row]) + 1)  # its first token ended the answer before
            wanted = q_att(at, edges[:turn], question)
            np.testing.assert_allclose(stats.attention, wanted, atol=1e-5)
            assert set(stats.selected) == taken("topk", wanted.tolist(), 0.1, 0.1, 3.0)


@pytest.mark.slow
def test_a_row_selects_as_it_does_alone(lm, one_of_ten):
    for row in (0, 1):
        alone = talk(lm, [[turn[row]] for turn in TURNS], RoundAttention(watershed=BELOW))
        for turn, said in zip(one_of_ten, alone, strict=True):
            assert said[0].tokens == turn[row].tokens
            assert said[0].stats.rounds.selected == turn[row].stats.rounds.selected
            np.testing.assert_allclose(said[0].logprobs, turn[row].logprobs, atol=2e-4)


def test_a_later_turn_in_the_same_buckets_compiles_nothing(lm, everything):
    caches = [output.cache for output in everything[-2]]
    options = {"max_new_tokens": NEW, "logprobs": True}
    kvjax.generate(lm, TURNS[3], cache=caches, **options)
    with compile_clock() as clock:
        again = kvjax.generate(lm, [ids[::-1] for ids in TURNS[3]], cache=caches, **options)
        same = kvjax.generate(lm, TURNS[3], cache=[cache.to_host() for cache in caches], **options)
    assert clock.programs == 0
    assert again[0].logprobs != same[0].logprobs
    assert [one.tokens for one in same] == [one.tokens for one in everything[-1]]


def test_a_conversation_is_a_value_wherever_it_is(lm, one_of_ten):
    cache = one_of_ten[-2][0].cache
    away = cache.to_host()
    assert {x.sharding.memory_kind for x in jax.tree.leaves(away.lower)} == {"pinned_host"}
    back = away.to_device()
    for x, y in zip(jax.tree.leaves(back.lower), jax.tree.leaves(cache.lower), strict=True):
        assert x.sharding.memory_kind == "device"
        np.testing.assert_array_equal(x, y)
    assert back.to_device() is not None and cache.row(0).batch == 1
    with pytest.raises(kvjax.UsageError, match="no row 1"):
        cache.row(1)
    samples = kvjax.generate(lm, TURNS[3][0], cache=cache, n=2, max_new_tokens=NEW, logprobs=True)
    assert samples[0].tokens == samples[1].tokens == one_of_ten[-1][0].tokens
    assert samples[1].cache.rounds[0][0].upper is cache.rounds[0][0].upper  # shared, not copied


def test_another_strategy_may_go_on_with_the_same_rounds(lm, one_of_ten, everything):
    cache = one_of_ten[-2][0].cache
    for strategy in ("fixed", "adaptive", "above_mean"):
        policy = RoundAttention(strategy, watershed=BELOW)
        stats = kvjax.generate(
            lm, TURNS[3][0], cache=cache.replace(policy=policy), max_new_tokens=2, logprobs=True
        ).stats.rounds
        assert set(stats.selected) == taken(strategy, list(stats.attention), 0.1, 0.1, 3.0)


def test_single_tokens_may_be_selected_instead(lm, one_of_ten, everything):
    cache = everything[-2][0].cache
    every = cache.replace(policy=RoundAttention(granularity="token", watershed=BELOW, top=1.0))
    same = kvjax.generate(lm, TURNS[3][0], cache=every, max_new_tokens=NEW, logprobs=True)
    assert same.tokens == everything[-1][0].tokens
    few = cache.replace(policy=RoundAttention("above_mean", "token", watershed=BELOW))
    stats = kvjax.generate(lm, TURNS[3][0], cache=few, max_new_tokens=NEW, logprobs=True).stats
    ids = ids_of(everything, 0)
    start = cache.lower.seen.item()
    at = dense_layers(lm, ids, BELOW)[BELOW - 1]
    weights = at.attention()[:, :, start : start + len(TURNS[3][0]) + 1, 4:start].sum(axis=(0, 1, 2))
    wanted = int((weights > weights.mean()).sum())
    assert stats.rounds.tokens_used == 4 + wanted + stats.seen - start


@pytest.mark.slow
def test_the_upper_layers_are_compiled_once_however_long_the_conversation(lm):
    from kvjax.rounds.round_programs import UPPER

    cache = kvjax.generate(lm, TURNS[1][0], policy=RoundAttention(watershed=BELOW, top=0.01), max_new_tokens=1).cache
    compiled = []
    for _ in range(6):
        cache = kvjax.generate(lm, [7] * 50, cache=cache, max_new_tokens=1).cache
        compiled.append(UPPER.compilations())
    assert len(cache.rounds[0]) == 7 and cache.lower.prompt_capacity >= 320
    assert compiled[1:] == compiled[1:2] * 5

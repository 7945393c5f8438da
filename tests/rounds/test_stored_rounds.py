"""Where the rounds of a conversation are, in what form, and what of them is freed."""

from __future__ import annotations

import gc

import jax
import numpy as np
import pytest
from support.choosing import best, pooled
from support.choosing_heads import SlimHead
from support.lagkv_oracle import OracleHead
from support.round_talks import BELOW, LAYERS, NEW, TURNS, talk
from support.rounds_oracle import dense_layers

import kvjax
from kvjax.cache.buckets import MEDIUM, RESERVE
from kvjax.cache.pool import keys_and_values
from kvjax.policies import RoundAttention


def test_device_bytes_are_equation_2(one_of_ten):
    """M_round / M_full = L_w / L + K / T (1 - L_w / L), K / T the share of tokens the upper layers see."""
    for turn in one_of_ten[1:]:
        for output in turn:
            assert turn is one_of_ten[1] or output.stats.rounds.tokens_used < output.stats.seen
            stats, chosen = output.stats, output.cache.rounds[0]
            used = 4 + sum(chosen[i].tokens for i in stats.rounds.selected) + chosen[-1].tokens
            assert stats.rounds.tokens_used == used <= stats.seen
            share = BELOW / LAYERS + used / stats.seen * (1 - BELOW / LAYERS)
            assert stats.live_cache_bytes == pytest.approx(share * stats.full_cache_bytes, rel=1e-12)
            # Allocated: the same in whole buckets, with what is reserved, 256 tokens of room for the answer, counters.
            slot = stats.full_cache_bytes / stats.seen
            room = RESERVE + 2 * 256 + 256
            assert stats.live_cache_bytes < stats.cache_bytes <= stats.live_cache_bytes + room * slot + 64 * LAYERS


def test_rounds_are_whole_arrays_in_pinned_host_memory_and_nothing_else_is(one_of_ten, lm):
    cache = one_of_ten[-1][1].cache
    (parts,) = cache.rounds
    assert len(parts) == len(TURNS)
    for part in parts:
        assert part.upper.kv.sharding.memory_kind == "pinned_host"
        assert part.upper.kv.shape[:3] == (LAYERS - BELOW, 2, 2) and part.upper.kv.shape[4] == 8
        assert part.upper.kv.shape[3] >= part.tokens and (part.held == part.tokens).all()
        assert not np.asarray(part.upper.kv)[:, :, :, part.tokens :].any()
    lower = jax.tree.leaves(cache.lower)
    assert {x.sharding.memory_kind for x in lower} == {"device"}
    assert len(cache.lower.layers) == BELOW
    assert cache.nbytes == sum(x.nbytes for x in lower) + cache.prefix[0].upper.nbytes
    assert cache.host_nbytes == one_of_ten[-1][1].stats.rounds.host_bytes


def device_bytes() -> int:
    """Bytes in the device's memory; two arrays may be one buffer."""
    gc.collect()
    arrays = [x for x in jax.live_arrays() if x.sharding.memory_kind == "device"]
    return sum({x.unsafe_buffer_pointer(): x.nbytes for x in arrays}.values())


def test_nothing_of_the_upper_layers_stays_on_the_device(lm):
    policy = RoundAttention(watershed=BELOW)
    cache = kvjax.generate(lm, TURNS[0][0], policy=policy, max_new_tokens=2, logprobs=True).cache
    before = device_bytes()
    after = kvjax.generate(lm, TURNS[1][0], cache=cache, max_new_tokens=2, logprobs=True)
    new, host = after.cache, after.stats.rounds.host_bytes
    del after
    assert host > 0 and device_bytes() - before <= new.lower.nbytes + 4096


def test_idle_rounds_are_deleted_from_all_layers(lm):
    policy = RoundAttention(watershed=BELOW, drop_after=2)
    said = talk(lm, TURNS, policy)
    last_used = [{}, {}]
    for number, turn in enumerate(said, 1):
        for row, output in enumerate(turn):
            here = last_used[row]
            alive = sorted(here)
            for i in output.stats.rounds.selected:
                here[alive[i]] = number
            here[number] = number
            for start in [start for start, used in here.items() if number - used >= 2]:
                del here[start]
            (parts,) = output.cache.rounds
            assert len(parts) == len(here)
            held = 4 + sum(part.tokens for part in parts)
            assert all((np.asarray(layer.length) == held).all() for layer in output.cache.lower.layers)
            assert output.stats.seen == output.cache.seen.item() >= held
    assert any(len(used) < len(TURNS) for used in last_used), "no round was ever idle: the test says nothing"
    # What stays is where it was: the keys of the last round are those of a conversation that dropped nothing.
    whole = talk(lm, TURNS[:2], RoundAttention(watershed=BELOW))
    for row in range(2):
        (kept,), (wanted,) = said[1][row].cache.rounds, whole[1][row].cache.rounds
        np.testing.assert_array_equal(kept[-1].upper.kv, wanted[-1].upper.kv)


@pytest.mark.slow
def test_int8_rounds_come_back_as_they_were_stored(lm, full):
    policy = RoundAttention(watershed=BELOW, top=1.0)
    said = talk(lm, [[turn[0]] for turn in TURNS[:2]], policy, storage="int8")
    cache = said[0][0].cache
    part = cache.rounds[0][0].upper
    assert part.kv.dtype == np.int8 and part.kv.sharding.memory_kind == "pinned_host"
    exact = talk(lm, [[TURNS[0][0]]], policy)[0][0].cache.rounds[0][0].upper
    restored = np.asarray(part.kv) * np.stack(
        [np.broadcast_to(np.asarray(part.k_scale)[:, :, None], (2, 2, *part.kv.shape[3:])),
         np.broadcast_to(np.asarray(part.v_scale)[..., None], (2, 2, *part.kv.shape[3:]))], axis=1)  # fmt: skip
    held = cache.rounds[0][0].tokens
    error = np.abs(restored - np.asarray(exact.kv))[:, :, :, :held].max()
    assert error < 0.02 * np.abs(np.asarray(exact.kv)).max()
    assert part.nbytes < exact.nbytes / 2
    for one, other in zip(said, full, strict=False):
        np.testing.assert_allclose(one[0].logprobs[0], other[0].logprobs[0], atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("inner", [kvjax.LagKV(partition_ratio=0.25, lag=8, sink=2), kvjax.SlimKV(budget=24, window=4)])
def test_an_inner_policy_compresses_each_round_by_itself(lm, everything, inner):
    policy = RoundAttention(watershed=BELOW, top=1.0, inner=inner)
    (packed, second) = talk(lm, TURNS[:2], policy)
    for row, (one, other) in enumerate(zip(everything[0], packed, strict=True)):
        assert one.tokens == other.tokens  # a round is whole until it ends
        ids = [*TURNS[0][row], *one.tokens][:-1]
        part, whole = other.cache.rounds[0][0], one.cache.rounds[0][0]
        assert part.tokens == whole.tokens == len(ids) - 4 > part.held.max()
        layers = dense_layers(lm, ids, LAYERS)
        for layer, head in np.ndindex(LAYERS, 2):
            wanted = kept_tokens(inner, layers[layer], head, 4)
            assert part.held[layer, head] == len(wanted)
            if layer < BELOW:
                found = np.asarray(keys_and_values(other.cache.lower.layers[layer])[0])[0, head, 4 : 4 + len(wanted)]
            else:
                found = np.asarray(part.upper.kv)[layer - BELOW, 0, head, : len(wanted)]
            np.testing.assert_allclose(found, layers[layer].k[head][wanted], atol=2e-4)
    for output in second:
        stats, (parts,) = output.stats, output.cache.rounds
        assert stats.rounds.tokens_used < stats.seen and len(parts) == 2
        assert parts[1].start == parts[0].start + parts[0].tokens
    if isinstance(inner, kvjax.LagKV):  # the other costs half a minute of compilation
        alone = talk(lm, [[turn[0]] for turn in TURNS[:2]], policy)
        assert [turn[0].tokens for turn in alone] == [packed[0].tokens, second[0].tokens]


def kept_tokens(inner, dense, head: int, prefix: int) -> list[int]:
    """Positions that the policy keeps of the tokens after the opening, by its own oracle."""
    own = list(range(prefix, dense.k.shape[1]))
    if isinstance(inner, kvjax.LagKV):
        keep = int(inner.partition_ratio * inner.lag)
        lag = OracleHead(dense.k[head][own], dense.v[head][own], inner.sink, inner.lag, keep=keep)
        lag.give(len(own))
        return [own[i] for i in lag.kept]
    oracle = SlimHead(dense.q[head], dense.k[head], dense.v[head])
    everything = list(range(dense.k.shape[1]))
    s1 = oracle.mass(everything, everything[-inner.window :]).sum(axis=0)[prefix:]
    s2 = np.abs(dense.v[head][own]).max(axis=1)
    prefix = len(own) - inner.window
    scores = pooled(list((s1 * s2)[:prefix]), inner.kernel, inner.pooling)
    chosen = best(scores, inner.budget - inner.window)
    return [own[i] for i in chosen] + own[prefix:]


def test_a_consumed_conversation_gives_several_samples(lm, one_of_ten):
    options = {"n": 2, "temperature": 1.0, "seed": 3, "max_new_tokens": NEW}
    kept = kvjax.generate(lm, TURNS[1][0], cache=one_of_ten[0][0].cache, **options)
    given = one_of_ten[0][0].cache
    consumed = kvjax.generate(lm, TURNS[1][0], cache=given, consume_cache=True, **options)
    assert [sample.tokens for sample in consumed] == [sample.tokens for sample in kept]
    assert consumed[0].cache.asked == kept[0].cache.asked == (2,)


def test_a_consumed_conversation_holds_its_lower_layers_once(lm):
    policy = RoundAttention(watershed=BELOW)
    cache = kvjax.generate(lm, TURNS[0][0], policy=policy, max_new_tokens=NEW, reserve_tokens=RESERVE).cache
    lower = cache.lower.nbytes
    value, consumed = (
        kvjax.generate(lm, TURNS[1][0], cache=cache, consume_cache=consume, max_new_tokens=NEW).stats
        for consume in (False, True)
    )
    for stats in (value, consumed):
        assert stats.rounds.allocated == stats.device_cache_bytes <= stats.rounds.peak == stats.device_peak_bytes
    assert 0.9 * lower < value.device_peak_bytes - consumed.device_peak_bytes <= lower
    # Beside what the answer is generated on, the selected rounds as they came and the buffer they were placed in.
    staging = (LAYERS - BELOW) * 2 * 2 * MEDIUM * 8 * 4
    assert consumed.device_peak_bytes < consumed.device_cache_bytes + consumed.rounds.moved_bytes + staging


@pytest.mark.slow
def test_a_lower_layer_grows_after_the_one_before_it_was_freed(lm):
    policy = RoundAttention(watershed=BELOW)
    caches = [kvjax.generate(lm, TURNS[1][0], policy=policy, max_new_tokens=NEW).cache for _ in range(2)]
    old = caches[0].lower
    value = kvjax.generate(lm, TURNS[0][0], cache=caches[0], max_new_tokens=NEW, logprobs=True)
    grown = kvjax.generate(lm, TURNS[0][0], cache=caches[1], consume_cache=True, max_new_tokens=NEW, logprobs=True)
    assert grown.cache.lower.layers[0].pages > old.layers[0].pages
    assert grown.tokens == value.tokens and grown.logprobs == value.logprobs
    assert value.stats.device_peak_bytes - grown.stats.device_peak_bytes >= old.nbytes // 2

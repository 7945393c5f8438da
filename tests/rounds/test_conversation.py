"""Conversations of rounds on a tiny model: against the full cache, the paper's equations, and rows alone.

All prompts are ids, so that lengths are known: a first one of a few hundred tokens puts every later turn in the same
buckets, and so in the same programs.
"""

from __future__ import annotations

import dataclasses
import gc

import jax
import numpy as np
import pytest
import toys
from support.choosing import best, pooled
from support.choosing_heads import SlimHead
from support.lagkv_oracle import OracleHead
from support.rounds_oracle import dense_layers, q_att, taken

import kvjax
from kvjax.cache.buckets import MEDIUM, RESERVE
from kvjax.cache.pool import rows
from kvjax.policies import RoundAttention
from kvjax.runtime.compilation import compile_clock

RNG = np.random.default_rng(4)
LAYERS, BELOW = 4, 2
#: Two rows; turn by turn. The first turn is long, the others fit its bucket.
SIZES = ((300, 290), (20, 31), (33, 12), (15, 40))
TURNS = [[RNG.integers(0, 256, size).tolist() for size in sizes] for sizes in SIZES]
NEW = 6


@pytest.fixture(scope="module")
def lm():
    return toys.tiny_model(num_layers=LAYERS, max_position=1024)


def talk(lm, turns, policy, cache=None, **options):
    """Outputs of every turn, a list a turn."""
    said = []
    for prompts in turns:
        options = {"max_new_tokens": NEW, "logprobs": True, **options}
        outputs = kvjax.generate(lm, prompts, policy=policy if cache is None else None, cache=cache, **options)
        cache = [output.cache for output in outputs]
        said.append(outputs)
    return said


@pytest.fixture(scope="module")
def full(lm):
    return talk(lm, TURNS, None)


@pytest.fixture(scope="module")
def everything(lm):
    return talk(lm, TURNS, RoundAttention(watershed=BELOW, top=1.0))


@pytest.fixture(scope="module")
def one_of_ten(lm):
    return talk(lm, TURNS, RoundAttention(watershed=BELOW))


def ids_of(outputs, row: int) -> list[int]:
    """Every token a row was fed, turn by turn joined, the last answer's last token left out."""
    fed = [token for turn, said in zip(TURNS, outputs, strict=False) for token in (*turn[row], *said[row].tokens)]
    return fed[:-1]


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


def test_nothing_of_the_upper_layers_stays_on_the_device(lm):
    policy = RoundAttention(watershed=BELOW)
    cache = kvjax.generate(lm, TURNS[0][0], policy=policy, max_new_tokens=2, logprobs=True).cache
    gc.collect()
    before = sum(x.nbytes for x in jax.live_arrays() if x.sharding.memory_kind == "device")
    after = kvjax.generate(lm, TURNS[1][0], cache=cache, max_new_tokens=2, logprobs=True)
    new, host = after.cache, after.stats.rounds.host_bytes
    del after
    gc.collect()
    now = sum(x.nbytes for x in jax.live_arrays() if x.sharding.memory_kind == "device")
    assert host > 0 and now - before <= new.lower.nbytes + 4096


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
                found = np.asarray(rows(other.cache.lower.layers[layer])[0])[0, head, 4 : 4 + len(wanted)]
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


def test_a_history_is_the_conversation_that_was_held(lm):
    from kvjax import read_history

    tokenizer = lm.tokenizer
    messages = [
        {"role": role, "content": f"{role} {turn}. " * 5} for turn in range(3) for role in ("user", "assistant")
    ]
    policy = RoundAttention(watershed=BELOW)
    read = read_history(lm, messages, policy=policy)
    assert [part.tokens for part in read.rounds[0]] and len(read.rounds[0]) == 3
    text = tokenizer.render(messages)
    whole = tokenizer.encode(text[: text.rindex(messages[-1]["content"]) + len(messages[-1]["content"])])
    assert read.seen.item() == len(whole) == read.prefix[0].tokens + sum(part.tokens for part in read.rounds[0])
    cache = kvjax.generate(lm, whole, max_new_tokens=0).cache
    for layer, held in enumerate(cache.layers[BELOW:]):
        k, v = (np.asarray(x)[0] for x in rows(held))
        for part in read.rounds[0]:
            found = np.asarray(part.upper.kv)[layer, :, :, : part.tokens]
            np.testing.assert_allclose(found[0], k[:, part.start : part.start + part.tokens], atol=1e-5)
            np.testing.assert_allclose(found[1], v[:, part.start : part.start + part.tokens], atol=1e-5)
    question = [{"role": "user", "content": "And?"}]
    wanted = kvjax.generate(lm, question, cache=cache, max_new_tokens=4, logprobs=True).tokens
    every = read.replace(policy=dataclasses.replace(policy, top=1.0))
    assert kvjax.generate(lm, question, cache=every, max_new_tokens=4, logprobs=True).tokens == wanted
    with pytest.raises(kvjax.UsageError, match="in turns"):
        read_history(lm, messages[:-1], policy=policy)
    with pytest.raises(kvjax.UsageError, match="RoundAttention without inner"):
        read_history(lm, messages, policy="full")


def test_no_round_of_a_history_has_been_left_out_yet(lm):
    """Questions that do not select a round are counted from the history's end."""
    from kvjax import read_history

    roles = ("user", "assistant")
    messages = [{"role": role, "content": f"{role} {turn}"} for turn in range(6) for role in roles]
    policy = RoundAttention(watershed=BELOW, drop_after=3)
    before = read_history(lm, messages, policy=policy)
    assert {part.used for part in before.rounds[0]} == set(before.asked) == {6}
    output = kvjax.generate(lm, [{"role": "user", "content": "next"}], cache=before, max_new_tokens=3)
    assert len(output.cache.rounds[0]) == 7, "after one question none has gone"


@pytest.mark.parametrize(
    "messages",
    ["hello", [1, 2], None, [{"role": "user", "content": "x"}, {"role": "assistant"}],
     [{"role": "user", "content": "x"}, {"role": "assistant", "content": None}]],
)  # fmt: skip
def test_histories_of_something_else_are_refused(lm, messages):
    from kvjax import read_history

    with pytest.raises(kvjax.UsageError, match=r"Messages are a list|A message needs"):
        read_history(lm, messages, policy=RoundAttention(watershed=BELOW))
    with pytest.raises(kvjax.UsageError, match="The model is a str"):
        read_history("lm", messages, policy=RoundAttention(watershed=BELOW))


def test_a_chat_of_rounds(lm):
    system = "Be brief. " * 28  # so long that all turns are in one bucket
    options = {"max_new_tokens": 5, "system": system, "logprobs": True}
    sent, streamed, whole = (
        kvjax.Chat(lm, policy=policy, **options) for policy in ["round:watershed=2"] * 2 + ["round:watershed=2,top=1"]
    )
    plain = kvjax.Chat(lm, **options)
    for text in ("one", "two", "three"):
        output = sent.send(text)
        pieces = list(streamed.stream(text))
        assert pieces[-1].output.tokens == output.tokens
        streamed.park()
        assert whole.send(text).tokens == plain.send(text).tokens
        plain.park()
        plain.park()
    assert output.stats.rounds.rounds == 2 and len(output.stats.rounds.selected) == 1
    prefix = sent.cache.prefix[0].tokens
    assert prefix == len(lm.tokenizer.encode(f"<|start|>system\n{system}<|end|>\n<|start|>user\n"))
    before = sent.cache
    with pytest.raises(kvjax.UsageError):
        sent.send("x" * 2000)
    next(iter(sent.stream("abandoned")))
    assert sent.cache is before
    told = kvjax.Chat(lm, policy="round:watershed=2", context="Facts. " * 3, **options)
    first = told.send("What?")
    assert first.stats.rounds.rounds == 1 and first.stats.rounds.selected == (0,)


@pytest.mark.parametrize(
    "policy, says",
    [
        ("round", "kvjax calibrate watershed"),
        ("round:watershed=4", "give 1 to 3"),
        ("round:watershed=2,inner=slimkv(budget=2)", "budget"),
    ],
)
def test_models_it_cannot_run_on(lm, policy, says):
    with pytest.raises(kvjax.UsageError, match=says):
        kvjax.generate(lm, "x", policy=policy)


def test_what_does_not_belong_together_is_refused(lm, one_of_ten, full):
    cache, other = one_of_ten[0][0].cache, full[0][0].cache
    for caches, says in (([cache, other], "cannot be one batch"), (cache, "1 rows and|policy")):
        with pytest.raises(kvjax.UsageError, match=says):
            kvjax.generate(lm, [[1], [2]], cache=caches, policy="full")
    with pytest.raises(kvjax.UsageError, match="another model"):
        kvjax.generate(toys.tiny_model(num_layers=5), [1], cache=cache)


def test_rounds_too_large_for_the_device_are_refused_before_they_come(lm, one_of_ten, monkeypatch):
    cache = one_of_ten[0][0].cache
    monkeypatch.setattr("kvjax.rounds.turn.device_limit", lambda limit: 300_000)
    with pytest.raises(kvjax.DoesNotFit, match="rounds this question selects make"):
        kvjax.generate(lm, TURNS[1][0], cache=cache, logprobs=True)


def test_the_upper_layers_are_compiled_once_however_long_the_conversation(lm):
    from kvjax.rounds.programs import UPPER

    cache = kvjax.generate(lm, TURNS[1][0], policy=RoundAttention(watershed=BELOW, top=0.01), max_new_tokens=1).cache
    compiled = []
    for _ in range(6):
        cache = kvjax.generate(lm, [7] * 50, cache=cache, max_new_tokens=1).cache
        compiled.append(UPPER.compilations())
    assert len(cache.rounds[0]) == 7 and cache.lower.prompt_capacity >= 320
    assert compiled[1:] == compiled[1:2] * 5


def test_a_first_question_too_large_for_the_device_is_refused(lm, monkeypatch):
    monkeypatch.setattr("kvjax.rounds.turn.device_limit", lambda limit: 300_000)
    with pytest.raises(kvjax.DoesNotFit, match="first question, which is read with all layers"):
        kvjax.generate(lm, TURNS[0][0], policy=RoundAttention(watershed=BELOW))


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


def test_a_lower_layer_grows_after_the_one_before_it_was_freed(lm):
    policy = RoundAttention(watershed=BELOW)
    caches = [kvjax.generate(lm, TURNS[1][0], policy=policy, max_new_tokens=NEW).cache for _ in range(2)]
    old = caches[0].lower
    value = kvjax.generate(lm, TURNS[0][0], cache=caches[0], max_new_tokens=NEW, logprobs=True)
    grown = kvjax.generate(lm, TURNS[0][0], cache=caches[1], consume_cache=True, max_new_tokens=NEW, logprobs=True)
    assert grown.cache.lower.layers[0].pages > old.layers[0].pages
    assert grown.tokens == value.tokens and grown.logprobs == value.logprobs
    assert value.stats.device_peak_bytes - grown.stats.device_peak_bytes >= old.nbytes // 2

"""AdaptiveHeads over policies that drop a token at each step: the oracle in NumPy, bytes, and what the runtime adds."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
import toys
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from policies.test_adaptive import PROMPTS, QUESTIONS
from policies.test_ahakv import oracle_of as ahakv_oracle
from policies.test_h2o import oracle_of as h2o_oracle
from support.eviction_oracle import NARROW, SharedRow
from support.evictor import ROOM, Evictor, compare, layer_config, random_qkv

import kvjax
from kvjax.cache import runs
from kvjax.cache.layout import Layout
from kvjax.cache.pool import PAGE_SIZE
from kvjax.cache.quantisation import Storage
from kvjax.errors import UsageError
from kvjax.policies import H2O, TOVA, AdaptiveHeads, AhaKV, CriticalKV, Evicting, LagKV, Merged, format_policy, parse
from kvjax.runtime.compilation import compile_clock

BUDGET = 12
H2O_SHARED = AdaptiveHeads(budget=BUDGET, inner=H2O())
AHAKV_SHARED = AdaptiveHeads(budget=BUDGET, inner=AhaKV(recent=4))
each_policy = pytest.mark.parametrize("policy", [H2O_SHARED, AHAKV_SHARED], ids=["h2o", "ahakv"])


def oracle_of(policy: AdaptiveHeads):
    inner: Any = policy.scoring
    oracle = h2o_oracle(inner) if isinstance(inner, H2O) else ahakv_oracle(inner)
    return lambda q, k, v: SharedRow(oracle(q, k, v).heads, policy.floor)


def agrees(policy: AdaptiveHeads, lengths: list[int], events: list[tuple[str, int]], **how: Any) -> float:
    return compare(policy, oracle_of(policy), lengths, events, **{"heads": 3, "group": 2, **how})


@each_policy
def test_prompt_and_every_step_keep_what_the_oracle_keeps(policy):
    lengths = [1, BUDGET - 1, BUDGET, BUDGET + 1, 40]
    assert agrees(policy, lengths, [("steps", 1), ("steps", 1), ("steps", 30)], seed=1, spread=1.0) > NARROW


@pytest.mark.parametrize(
    "policy",
    [
        AdaptiveHeads(budget=10, inner=H2O(recent=2), floor=0.5),
        AdaptiveHeads(ratio=0.4, inner=H2O(), floor=0.0),
        pytest.param(AdaptiveHeads(ratio=0.3, inner=AhaKV(recent=5), floor=1.0), marks=pytest.mark.slow),
    ],
    ids=["half", "none", "all"],
)
def test_later_turns_divide_the_budget_anew(policy):
    events = [("steps", 9), ("turn", 1), ("steps", 2), ("turn", 25), ("steps", 9)]
    assert agrees(policy, [30, 4], events, seed=5) > NARROW


@settings(max_examples=10, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=2, max_size=2),
    policy=st.sampled_from(
        [
            AdaptiveHeads(ratio=0.3, inner=H2O(), floor=0.1),
            AdaptiveHeads(budget=9, inner=H2O(recent=0), floor=0.0),
            AdaptiveHeads(budget=9, inner=H2O(recent=8)),
            AdaptiveHeads(budget=9, inner=AhaKV(recent=1, kernel=1), floor=0.4),
        ]
    ),
    seed=st.integers(0, 10**6),
)
def test_any_lengths_sizes_and_windows(lengths, policy, seed):
    assume(agrees(policy, lengths, [("steps", 20)], seed=seed, spread=1.0) > NARROW)


def parts_of(q: np.ndarray, k: np.ndarray, v: np.ndarray):
    return lambda start, end: (q[..., start:end, :], k[..., start:end, :], v[..., start:end, :])


def uneven(seed: int, batch: int, tokens: int, heads: int = 3, dim: int = 8):
    """Queries, keys and values of heads that attend to fewer tokens the higher their number, the last to one or two."""
    q, k, v = random_qkv(seed, batch, heads, 2, tokens, dim)
    q[:, 0] *= 0.1
    q[:, -1] = 6
    return q, k, v


@each_policy
def test_a_head_keeps_what_it_was_given_and_a_short_row_grows_evenly(policy):
    q, k, v = uneven(3, 2, 130)
    part = parts_of(q, k, v)
    evictor = Evictor(policy, layer_config(3, 2, 8), 2, ROOM).turn(*part(0, 60), [60, 5])
    given_ = np.asarray(policy.retained(evictor.cache))
    assert given_[0].sum() == 3 * BUDGET and np.ptp(given_[0]) > 3, "heads differ"
    assert (given_[1] == 5).all()
    recent = 6 if policy is H2O_SHARED else 4
    assert (given_[0] >= recent).all()
    evictor.steps(*part(60, 63))
    np.testing.assert_array_equal(policy.retained(evictor.cache), [given_[0], [8, 8, 8]])
    evictor.steps(*part(63, 120))
    np.testing.assert_array_equal(policy.retained(evictor.cache), [given_[0], [BUDGET] * 3])
    assert all(set(range(120 - recent, 120)) <= set(head) for head in evictor.kept(k, 0))
    # Runs are those of the selection: nothing was moved, and each has room for the token that is in before one leaves.
    pool = evictor.cache
    room = np.asarray(runs.ends(pool.row_starts, pool.kv.shape[1]) - pool.row_starts) * PAGE_SIZE
    assert (room >= np.asarray(pool.length)).all() and (np.asarray(pool.length) == policy.retained(pool) + 1).all()


@each_policy
def test_rows_that_are_done_or_read_nothing_stay_as_they_are(policy):
    q, k, v = uneven(4, 2, 110)
    part, kept = parts_of(q, k, v), []
    for turn in (True, False):
        evictor = Evictor(policy, layer_config(3, 2, 8), 2, ROOM).turn(*part(0, 50), [50, 30]).steps(*part(50, 60))
        if turn:
            evictor.turn(*part(60, 80), [20, 0])
        kept.append(evictor.steps(*part(80, 110)).kept(k, 1))
    assert kept[0] == kept[1]
    active = np.array([[True, False]] * 30)
    before = jax.tree.map(lambda x: np.asarray(x[1]), evictor.cache)
    evictor.steps(*part(80, 110), active)
    after = jax.tree.map(lambda x: np.asarray(x[1]), evictor.cache)
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))


def test_a_floor_of_one_is_the_inner_policy():
    lm, options = toys.tiny_model(), {"max_new_tokens": 40, "logprobs": True, "stop_token_ids": ()}
    for prompt in (PROMPTS[0], PROMPTS[1][:20]):
        found, wanted = (
            kvjax.generate(lm, prompt, policy=policy, **options)
            for policy in ("adaptive:budget=40,floor=1,inner=h2o", "h2o:budget=40")
        )
        assert found.tokens == wanted.tokens and found.stats.retained == wanted.stats.retained
        np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=2e-5)


@pytest.mark.parametrize("storage", ["model", pytest.param("int8", marks=pytest.mark.slow)])
def test_the_bytes_are_those_of_equal_heads_and_a_page_a_head(storage):
    lm, tokens = toys.tiny_model(max_position=1024), 700
    prompts = [[(i * step) % 97 for i in range(tokens)] for step in (1, 7, 31)]
    given_ = {"storage": storage, "max_new_tokens": 12}
    equal = kvjax.generate(lm, prompts, policy="h2o:ratio=0.25", **given_)
    found = kvjax.generate(lm, prompts, policy="adaptive:ratio=0.25,floor=0.1,inner=h2o", **given_)
    for output in found:
        assert all(sum(heads) == len(heads) * (tokens // 4) for heads in output.stats.retained)
    assert any(len(set(heads)) > 1 for output in found for heads in output.stats.retained), "heads differ"
    cache, other = found[0].stats.cache_bytes, equal[0].stats.cache_bytes
    heads = lm.config.num_layers * lm.config.num_kv_heads
    a_page = found[0].cache.page_size * found[0].cache.pools[0].slot_nbytes
    # Beside the pages, where each head's run begins and its budget.
    assert cache <= 1.06 * other + heads * (a_page + 8)
    plan = kvjax.plan(lm, prompt_tokens=tokens, batch=3, policy="adaptive:ratio=0.25,inner=h2o", **given_)
    assert plan.cache_bytes == 4 * cache  # three prompts run as a batch of four


SHARED = ["adaptive:ratio=0.25,floor=0.1,inner=h2o", "adaptive:budget=48,inner=ahakv(recent=8)"]
OPTIONS: dict[str, Any] = {"max_new_tokens": 40, "logprobs": True, "stop_token_ids": ()}


def assert_as(found: Any, wanted: Any) -> None:
    assert found.tokens == wanted.tokens and found.stats.retained == wanted.stats.retained
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=2e-5)


@pytest.mark.parametrize("text", [SHARED[0], pytest.param(SHARED[1], marks=pytest.mark.slow)])
def test_rows_are_the_rows_alone_and_go_on_together(text):
    lm = toys.tiny_model()
    alone = [kvjax.generate(lm, one, policy=text, **OPTIONS) for one in PROMPTS]
    for found, wanted in zip(kvjax.generate(lm, PROMPTS, policy=text, **OPTIONS), alone, strict=True):
        assert_as(found, wanted)
    together = kvjax.generate(lm, QUESTIONS, cache=[output.cache for output in alone], **OPTIONS)
    for question, output, found in zip(QUESTIONS, alone, together, strict=True):
        assert_as(found, kvjax.generate(lm, question, cache=output.cache, **OPTIONS))


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [8, 32, 64])
@pytest.mark.parametrize("kind", ["model", "int8"])
@pytest.mark.parametrize("text", SHARED)
def test_what_was_saved_in_other_pages_goes_on(text, kind, page_size, tmp_path):
    lm, storage = toys.tiny_model(), Storage(kind, layout=Layout("columns", page_size))
    for prompt in (PROMPTS[0], PROMPTS[1][:20]):
        read = kvjax.generate(lm, prompt, policy=text, storage=storage, **OPTIONS).cache
        kvjax.save_cache(tmp_path / "saved", read, lm)
        loaded = kvjax.load_cache(tmp_path / "saved", lm)
        assert loaded.page_size == PAGE_SIZE and read.page_size == page_size
        found, wanted = (kvjax.generate(lm, QUESTIONS[0], cache=cache, **OPTIONS) for cache in (loaded, read))
        assert_as(found, wanted)


def test_decoding_far_beyond_the_budget_neither_compiles_nor_grows():
    lm, options = toys.tiny_model(), {"policy": "adaptive:budget=24,inner=h2o", "stop_token_ids": ()}
    first = kvjax.generate(lm, "warm the programs", max_new_tokens=72, **options)
    with compile_clock() as clock:
        again = kvjax.generate(lm, "and once more ...", max_new_tokens=72, **options)
    assert clock.programs == 0 and first.cache.nbytes == again.cache.nbytes
    assert all(sum(heads) == 2 * 24 for heads in again.stats.retained)


@pytest.mark.slow
@each_policy
def test_it_has_the_properties_that_every_policy_has(policy):
    found = kvjax.check_policy(policy, toys.tiny_model(num_kv_heads=4, num_heads=8))
    assert {"plan", "row alone", "later turn", "int8", "composition"} < set(found.holds)


@dataclasses.dataclass(frozen=True)
class OwnAppend(H2O):
    """An evicting policy that writes tokens in a way of its own."""

    def append(self, layer, cache, k, v, step):
        return super().append(layer, cache, k, v, step)


def test_text_and_refusals():
    policy = AdaptiveHeads(ratio=0.25, inner=H2O(recent=8), floor=0.3)
    assert parse(format_policy(policy)) == policy and isinstance(policy.scoring, Evicting)
    assert policy.scoring.ratio == 0.25 and not policy.grows
    sentences = {
        "drops the same token in all heads of a layer": lambda: AdaptiveHeads(inner=TOVA()),
        "keeps equally many tokens of each partition": lambda: AdaptiveHeads(inner=LagKV()),
        "does not choose by a score of each token": lambda: AdaptiveHeads(inner=OwnAppend()),
        'drops a token at each decode step .* give AdaptiveHeads scope="layer"': lambda: AdaptiveHeads(
            inner=H2O(), scope="model"
        ),
        "inner is AdaptiveHeads, which does not choose once": lambda: Merged(inner=AdaptiveHeads(inner=H2O())),
        "inner is H2O, which does not choose once": lambda: Merged(inner=H2O()),
        "inner is AdaptiveHeads, which does not choose once, by": lambda: CriticalKV(inner=AdaptiveHeads(inner=H2O())),
        "cannot compress a finished round": lambda: kvjax.RoundAttention(
            watershed=1, inner=AdaptiveHeads(inner=AhaKV())
        ),
    }
    for sentence, make in sentences.items():
        with pytest.raises(UsageError, match=sentence):
            make()
    with pytest.raises(UsageError, match="holds a turn's last tokens already; leave out keep_turn"):
        kvjax.plan(toys.tiny_config(), prompt_tokens=40, policy=AdaptiveHeads(inner=H2O(), keep_turn=4))

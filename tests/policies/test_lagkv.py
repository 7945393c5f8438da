"""LagKV against the paper's equations in NumPy, against the official code's choices, and its identities."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np
import pytest
import toys
from hypothesis import given, settings
from hypothesis import strategies as st
from support.driver import Driver, config_for, random_kv
from support.lagkv_cases import DIM, HEADS, LagCase, load_cases
from support.lagkv_oracle import OracleHead

import kvjax
from kvjax.cache.pool import keys_and_values
from kvjax.errors import UsageError
from kvjax.policies import LagKV
from kvjax.policies.lagkv import count_better, rank_descending
from kvjax.policies.window_layers import for_model


def assert_same(policy: LagKV, lengths: list[int], decoded: int, seed: int, heads: int, dim: int, oracle_args) -> None:
    batch, longest = len(lengths), max(lengths)
    room = -(-(longest + 5) // 64) * 64
    k, v = random_kv(seed, batch, heads, room + decoded, dim)
    # Rows' own tokens: prompt positions 0 .. length - 1, then what is decoded.
    driver = Driver(policy, config_for(heads, dim), batch, prompt_capacity=room, new_capacity=decoded)
    driver.read(k[:, :, :room], v[:, :, :room], lengths)
    new_k, new_v = k[:, :, room:], v[:, :, room:]
    if decoded:
        driver.decode(new_k, new_v)
    for row, length in enumerate(lengths):
        kept = driver.kept(k, row)
        for head in range(heads):
            own = [*range(length), *range(room, room + decoded)]
            oracle = OracleHead(k[row, head][own], v[row, head][own], **oracle_args)
            oracle.give(length)
            for _ in range(decoded):
                oracle.give(1)
            assert kept[head] == [own[i] for i in oracle.kept], (row, head)


@pytest.mark.parametrize("variant", ["lag", "local"])
@pytest.mark.parametrize("heads", [1, 3])
def test_choices_are_the_papers_around_every_boundary(variant, heads):
    sink, lag = 3, 6
    policy = LagKV(partition_ratio=0.5, sink=sink, lag=lag, variant=variant)
    edges = [1, sink, sink + 1, sink + 2 * lag - 1, sink + 2 * lag, sink + 2 * lag + 1, sink + 3 * lag, 40]
    for first in range(0, len(edges), 4):
        assert_same(
            policy, edges[first : first + 4], 0, first, heads, 6, dict(sink=sink, lag=lag, variant=variant, keep=3)
        )


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=2, max_size=2),
    ratio=st.sampled_from([0.1, 0.25, 0.5, 0.8, 1.0]),
    sink=st.sampled_from([0, 3]),
    seed=st.integers(0, 10**6),
)
def test_overall_ratio_is_solved_from_each_rows_own_length(lengths, ratio, sink, seed):
    policy = LagKV(ratio=ratio, sink=sink, lag=5)
    assert_same(policy, lengths, 0, seed, 2, 4, dict(sink=sink, lag=5, ratio=ratio))


@settings(max_examples=12, deadline=None)
@given(length=st.integers(1, 40), other=st.integers(1, 40), seed=st.integers(0, 10**6))
def test_decoding_compresses_each_time_the_rest_reaches_two_partitions(length, other, seed):
    policy = LagKV(ratio=0.5, sink=2, lag=5)
    assert_same(policy, [length, other], 33, seed, 2, 4, dict(sink=2, lag=5, ratio=0.5))


def _room(case: LagCase) -> int:
    """One allocation for all cases of a setting, so that they share their compiled programs."""
    return case.sink + 10 * case.lag


@pytest.mark.parametrize("case", load_cases(), ids=lambda case: case.name)
def test_official_code_keeps_the_same_tokens(case: LagCase):
    layer = 2 if case.variant == "l2" else 0
    policy = LagKV(partition_ratio=case.ratio, sink=case.sink, lag=case.lag, variant=case.variant)
    config = config_for(HEADS, DIM, layers=layer + 1)
    driver = Driver(policy, config, 1, prompt_capacity=_room(case), new_capacity=1, layer=layer)
    driver.read(case.k[:, :, : case.prompt], case.v[:, :, : case.prompt], case.prompt)
    if case.step == 1 and case.steps:
        driver.decode(case.k[:, :, case.prompt :], case.v[:, :, case.prompt :])
    else:
        for start in range(case.prompt, case.tokens, case.step):
            end = min(start + case.step, case.tokens)
            driver.read(case.k[:, :, start:end], case.v[:, :, start:end], end - start)
    kept = driver.kept(case.k)
    assert [sorted(head) for head in kept] == case.kept.tolist()
    assert all(head == sorted(head) for head in kept), "kept tokens stay in order of position"


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 400),
    sink=st.integers(0, 20),
    lag=st.integers(2, 40),
    r=st.sampled_from([0.1, 0.25, 0.5, 1.0]),
)
def test_retained_length_is_equation_12(length, sink, lag, r):
    policy = LagKV(partition_ratio=r, sink=sink, lag=lag)
    config = config_for(1, 4)
    kept = int(policy.budgets(config, 0, np.array([length]))[0, 0])
    if length < sink + 2 * lag:
        assert kept == length
    else:
        parts = (length - sink) // lag
        assert kept == sink + int(r * lag) * (parts - 1) + lag + (length - sink) % lag
    assert kept <= policy.capacities(config, length, 0)[0][0]


@settings(max_examples=60, deadline=None)
@given(length=st.integers(300, 4000), ratio=st.floats(0.1, 1.0), lag=st.sampled_from([16, 64, 128]))
def test_ratio_is_the_overall_share_where_it_can_be_reached(length, ratio, lag):
    policy = LagKV(ratio=ratio, sink=4, lag=lag)
    kept = int(policy.budgets(config_for(1, 4), 0, np.array([length]))[0, 0])
    window = 4 + lag + (length - 4) % lag
    parts = (length - 4) // lag - 1
    assert kept == window or kept <= ratio * length + 1e-3
    assert kept >= min(ratio * length - parts - 1, length), "less than one token a partition is lost to the floor"
    assert kept >= min(window, length)


def notices(policy: LagKV, totals: Iterable[int]) -> list[int]:
    return [total for total in totals if policy.notice(config_for(1, 4), total)]


@pytest.mark.slow
def test_rows_that_keep_nothing_between_sinks_and_window_are_named_with_what_works():
    """At a quarter most short prompts, the last of 1,039 tokens; at an eighth all, and some up to 2,191 tokens."""
    assert len(notices(LagKV(ratio=0.25), range(272, 1000))) == 555
    assert notices(LagKV(ratio=0.25), [*range(1000, 1100), *range(1100, 3000, 19)])[-1] == 1039
    assert notices(LagKV(ratio=0.125), [*range(2150, 2250), *range(2250, 3000, 19)])[-1] == 2191
    assert notices(LagKV(ratio=0.125), range(271, 1000, 7)) == [*range(278, 1000, 7)]


TOY = config_for(1, 4)


@settings(max_examples=60, deadline=None)
@given(
    total=st.integers(1, 1500),
    size=st.sampled_from([{"ratio": 0.05}, {"ratio": 0.25}, {"budget": 144}, {"partition_ratio": 0.007}]),
    sink=st.sampled_from([0, 16]),
)
def test_a_notice_is_true_and_so_is_its_way_out(total, size, sink):
    policy = LagKV(**size, sink=sink)
    sentence, kept = policy.notice(TOY, total), int(policy.budgets(TOY, 0, np.array([total]))[0, 0])
    window = 128 + (total - sink) % 128
    assert (sentence is not None) == (total - sink >= 256 and kept == sink + window)
    assert policy.useless(TOY, total) == (sentence is not None)
    if sentence is None:
        return
    assert f"a window of {window} in" in sentence and sentence.endswith(".") and len(sentence) < 280
    for name, value in re.findall(r"(\w+)=([\d.]+\d)", sentence):
        other = dataclasses.replace(policy, **{name: float(value) if "." in value else int(value)})
        assert other.notice(TOY, total) is None
        assert int(other.budgets(TOY, 0, np.array([total]))[0, 0]) > 0


def test_it_is_said_once_and_stands_in_plans(tiny_model, capsys):
    policy = LagKV(ratio=0.1, lag=24)
    for seed in (0, 1):
        kvjax.generate(tiny_model, np.random.default_rng(seed).integers(0, 256, 90).tolist(), policy=policy)
    assert capsys.readouterr().err.count("LagKV keeps none of the") == 1
    plan = kvjax.plan(tiny_model, prompt_tokens=90, policy=policy)
    assert plan.notice and plan.notice in plan.table()
    assert kvjax.plan(tiny_model, prompt_tokens=90, policy="lagkv:ratio=0.9,lag=24").notice is None
    inner = kvjax.Razor(heads="0.0", inner=policy)
    assert inner.notice(tiny_model.config, 90) == plan.notice and inner.useless(tiny_model.config, 90)
    windows = toys.tiny_config(windows=(8, None))
    assert for_model(policy, windows).notice(windows, 90) and for_model(policy, windows).useless(windows, 90)


@pytest.mark.parametrize("prompt_capacity, new", [(64, 256), (300, 40), (20, 500)])
@pytest.mark.parametrize("policy", [LagKV(ratio=0.3, sink=4, lag=8), LagKV(partition_ratio=0.25, sink=0, lag=16)])
def test_no_row_outgrows_its_capacity(policy, prompt_capacity, new):
    config = config_for(1, 4)
    bound = policy.capacities(config, prompt_capacity, new)[0][0]
    longest = 0
    for length in range(1, prompt_capacity + 1, 7):
        keep = None if policy.ratio else int(policy.partition_ratio * policy.lag)
        k, v = random_kv(length, 1, 1, length + new, 4)
        oracle = OracleHead(k[0, 0], v[0, 0], policy.sink, policy.lag, keep=keep, ratio=policy.ratio)
        oracle.give(length)
        longest = max(longest, len(oracle.kept))
        for _ in range(new):
            longest = max(longest, len(oracle.kept) + 1)
            oracle.give(1)
    assert longest <= bound <= longest + policy.lag + 8, "enough, and no more than a partition too much"


@settings(max_examples=60, deadline=None)
@given(
    ratio=st.sampled_from([0.1, 0.5, 0.75]),
    lag=st.sampled_from([2, 4, 16]),
    sink=st.sampled_from([0, 4, 16]),
    events=st.lists(st.tuples(st.integers(1, 200), st.booleans()), min_size=1, max_size=5),
    seed=st.integers(0, 100),
)
def test_no_row_outgrows_its_capacity_over_turns_and_chunks(ratio, lag, sink, events, seed):
    """Prompts read whole or in chunks and decoding, in any order: the allocation for all tokens is always enough."""
    policy = LagKV(ratio=ratio, sink=sink, lag=lag)
    total = sum(count for count, _ in events)
    k, v = random_kv(seed, 1, 1, total, 4)
    oracle = OracleHead(k[0, 0], v[0, 0], sink, lag, ratio=ratio)
    longest = 0
    for count, chunked in events:
        end = oracle.seen + count
        while oracle.seen < end:
            # A chunk of a prompt knows the prompt's whole length; a decoded token only what was seen.
            oracle.give(min(lag, end - oracle.seen) if chunked else end - oracle.seen, total=end)
            longest = max(longest, len(oracle.kept))
    while oracle.seen < total:
        longest = max(longest, len(oracle.kept) + 1)
        oracle.give(1)
    assert longest <= policy.capacities(config_for(1, 4), total, 0)[0][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ratio", "sink", "lag", "turns"), [(0.75, 4, 16, [(3000, "chunked")]), (0.5, 16, 4, [(200, ""), (1500, "")])]
)
def test_allocations_that_were_once_too_small(ratio, sink, lag, turns):
    policy = LagKV(ratio=ratio, sink=sink, lag=lag, prefill="chunked" if turns[0][1] else "whole")
    lm = toys.tiny_model(max_position=4096)
    cache, ids = None, np.random.default_rng(0).integers(0, 255, 3000).tolist()
    for tokens, _ in turns:
        options = {"policy": policy} if cache is None else {"cache": cache}
        output = kvjax.generate(lm, ids[:tokens], max_new_tokens=40, stop_token_ids=(), **options)
        cache = output.cache
        for layer in cache.layers:
            assert (np.asarray(layer.length) <= np.array(layer.slots)).all()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"ratio": 0.5}, {"partition_ratio": 0.25}, {"prefill": "chunked"}])
def test_a_lag_longer_than_everything_keeps_everything(options):
    """The paper's lag of 1,024 on a prompt of a few tokens: nothing to compress, and nothing to trip over."""
    lm = toys.tiny_model()
    whole, long = (
        kvjax.generate(lm, "hello", policy=policy, max_new_tokens=5, stop_token_ids=())
        for policy in (None, LagKV(lag=1024, **options))
    )
    assert long.tokens == whole.tokens and long.stats.retained == whole.stats.retained


def test_chunked_prefill_never_exceeds_its_capacity_and_ends_near_the_ratio():
    policy = LagKV(ratio=0.4, sink=4, lag=8, prefill="chunked")
    config = config_for(2, 4)
    first, step = policy.chunks(config)
    assert (first, step) == (20, 8)
    lengths = np.array([150, 61, 12])
    k, _ = random_kv(0, 3, 2, 160, 4)
    driver = Driver(policy, config, 3, prompt_capacity=160, new_capacity=16)
    start, size = 0, first
    while start < 150:
        count = np.clip(lengths - start, 0, size)
        padded = np.zeros((3, 2, size, 4), np.float32)
        for row in range(3):
            padded[row, :, : count[row]] = k[row, :, start : start + count[row]]
        driver.read(padded, padded, count, lengths)
        assert (np.asarray(driver.cache.length) <= np.array(driver.cache.slots)).all()
        start, size = start + size, step
    held = np.asarray(driver.cache.length)[:, 0]
    assert held[2] == 12
    assert (np.abs(held[:2] - 0.4 * lengths[:2]) <= 2 * 8).all(), held
    assert all(head == sorted(head) for head in driver.kept(k, 0))


def test_a_channel_whose_reference_does_not_vary_counts_as_zero():
    k, v = random_kv(1, 1, 1, 24, 4)
    k[..., 2] = 7.0
    driver = Driver(LagKV(partition_ratio=0.5, sink=0, lag=8), config_for(1, 4), 1, prompt_capacity=24, new_capacity=1)
    driver.read(k, v, 24)
    oracle = OracleHead(k[0, 0], v[0, 0], 0, 8, keep=4)
    oracle.give(24)
    assert driver.kept(k)[0] == oracle.kept


def test_equal_scores_keep_the_later_token():
    scores = jnp.array([[1.0, 3.0, 3.0, 1.0, 3.0, 0.0]])
    expected = [[4, 2, 1, 3, 0, 5]]
    assert rank_descending(scores).tolist() == expected
    assert count_better(scores).tolist() == expected


def test_l2_leaves_the_first_two_layers_whole():
    policy = LagKV(ratio=0.25, sink=0, lag=4, variant="l2")
    config = config_for(1, 4, layers=3)
    k, v = random_kv(2, 1, 1, 60, 4)
    held = [
        int(
            Driver(policy, config, 1, prompt_capacity=60, new_capacity=4, layer=layer).read(k, v, 60).cache.length[0, 0]
        )
        for layer in range(3)
    ]
    assert held[:2] == [60, 60] and held[2] <= 15 + 4
    with pytest.raises(UsageError, match="compress nothing"):
        policy.check(config_for(1, 4, layers=2))


def test_rows_that_are_done_keep_their_cache_bit_for_bit():
    policy = LagKV(ratio=0.5, sink=2, lag=5)
    k, v = random_kv(3, 2, 2, 60, 4)
    driver = Driver(policy, config_for(2, 4), 2, prompt_capacity=30, new_capacity=30).read(
        k[:, :, :30], v[:, :, :30], 30
    )
    before = [np.asarray(x[1]) for x in keys_and_values(driver.cache)]
    length = np.asarray(driver.cache.length[1])
    active = np.zeros((30, 2), bool)
    active[:, 0] = True
    driver.decode(k[:, :, 30:], v[:, :, 30:], active)
    after = [np.asarray(x[1]) for x in keys_and_values(driver.cache)]
    assert all((a == b).all() for a, b in zip(before, after, strict=True))
    assert (np.asarray(driver.cache.length[1]) == length).all() and driver.seen.tolist() == [60, 30]


@pytest.mark.parametrize(
    "bad", [dict(ratio=0), dict(ratio=1.5), dict(ratio=float("nan")), dict(lag=1), dict(sink=-1), dict(lag=2.5),
            dict(ratio=0.5, partition_ratio=0.5), dict(variant="cosine"), dict(prefill="never"), dict(ratio="half")],
)  # fmt: skip
def test_bad_parameters_are_one_sentence(bad):
    with pytest.raises(UsageError) as error:
        LagKV(**bad)
    assert "\n" not in str(error.value) and str(error.value).endswith(".")

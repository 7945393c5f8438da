"""DuoAttention: which heads keep everything, what the others keep, and real bytes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import toys
from hypothesis import given, settings
from hypothesis import strategies as st
from support import peer_cases
from support.driver import Driver, config_for, random_kv
from support.scorers import random_gates, random_scorer

import kvjax
from kvjax.calibrate import load_profile, save_profile
from kvjax.errors import UsageError
from kvjax.policies import DuoAttention, KeyDiff, Learned, Razor, StreamingLLM, format_policy, parse
from kvjax.policies.profile import GateProfile
from kvjax.policies.profile_files import packaged


def model():
    return toys.tiny_model(num_layers=3, num_heads=8, num_kv_heads=4)


def chosen(profile, count):
    """(layer, head) of the highest gates."""
    table = np.array(profile.gates)
    order = np.argsort(-table.ravel(), kind="stable")[:count]
    return sorted((int(i) // table.shape[1], int(i) % table.shape[1]) for i in order)


def pairs(heads):
    return [(layer, head) for layer, own in enumerate(heads) for head in own]


@settings(max_examples=30, deadline=None)
@given(ratio=st.floats(0.05, 0.95), seed=st.integers(0, 1000))
def test_a_ratio_is_of_the_whole_cache(ratio, seed):
    config = toys.tiny_config(num_layers=3, num_heads=8, num_kv_heads=4)
    profile = random_gates(config, seed)
    policy, total = DuoAttention(profile=profile, ratio=ratio, sink=2), np.array([4096], np.int32)
    rings = 0.2 * ratio
    count = int((ratio - rings) / (1 - rings) * 12 + 1e-9)
    assert pairs(policy.protected(config)) == chosen(profile, count)
    kept = sum(np.asarray(policy.budgets(config, layer, total)).sum() for layer in range(3))
    assert ratio * 12 * 4096 - 12 <= kept <= ratio * 12 * 4096 + 12


@pytest.mark.slow
def test_without_a_ratio_gates_above_a_half_keep_everything_and_the_others_sinks_and_recent():
    lm = model()
    profile, ids = random_gates(lm.config), [7 * i % 97 for i in range(200)]
    policy = DuoAttention(profile=profile, sink=2, recent=20)
    output = kvjax.generate(lm, ids, policy=policy, max_new_tokens=6, logprobs=True, stop_token_ids=())
    full = [(layer, head) for layer in range(3) for head in range(4) if profile.gates[layer][head] > 0.5]
    assert pairs(policy.protected(lm.config)) == full and 0 < len(full) < 12
    wanted = [[205 if (layer, head) in full else 22 for head in range(4)] for layer in range(3)]
    assert np.array_equal(output.stats.retained, wanted)
    # The same heads, named to RazorAttention, over the same rings.
    named = "+".join(f"{layer}.{head}" for layer, head in full)
    razor = Razor(heads=named, inner=StreamingLLM(sink=2, window=20))
    other = kvjax.generate(lm, ids, policy=razor, max_new_tokens=6, logprobs=True, stop_token_ids=())
    assert output.tokens == other.tokens and output.cache.nbytes == other.cache.nbytes
    np.testing.assert_array_equal(output.logprobs, other.logprobs)
    plan = kvjax.plan(lm, prompt_tokens=200, policy=policy, max_new_tokens=6)
    assert plan.cache_bytes == output.cache.nbytes


@pytest.mark.parametrize("case", range(len(peer_cases.GATES)), ids=lambda i: str(peer_cases.GATES[i]))
def test_heads_are_those_that_the_official_code_keeps_whole(case):
    """But for ties, which it breaks by noise of 1e-6, and one head where its quantile and our rounding differ."""
    layers, heads, seed, sparsity = peer_cases.GATES[case]
    gates = peer_cases.gates(layers, heads, seed)
    config = toys.tiny_config(num_layers=layers, num_heads=2 * heads, num_kv_heads=heads)
    profile = dataclasses.replace(random_gates(config), gates=tuple(map(tuple, gates.tolist())))
    official = np.array(list(peer_cases.recorded()["gates"][case])) == "1"
    own = np.zeros((layers, heads), bool)
    for layer, head in pairs(DuoAttention(profile=profile, heads=1 - sparsity).protected(config)):
        own[layer, head] = True
    assert abs(int(official.sum()) - int(own.sum())) <= (0 < sparsity < 1)
    differing = official != own.ravel()
    # Between the lowest gate that stays and the highest that leaves there is nothing else.
    if differing.any():
        edge = gates.ravel()[own.ravel()].min()
        between = gates.ravel()[differing]
        one = abs(int(official.sum()) - int(own.sum()))
        assert (np.abs(between - edge) <= 1e-6).sum() >= len(between) - one


def test_rings_that_a_ratio_sizes_have_fewer_sinks():
    """Of a ring of 70 tokens, for prompts of 700, 64 sinks would leave 6 recent ones."""
    assert DuoAttention().unsized == StreamingLLM(sink=64, window=256)
    assert DuoAttention(ratio=0.5).unsized == StreamingLLM(sink=16)
    assert DuoAttention(ratio=0.5, sink=4).unsized == StreamingLLM(sink=4)
    # What earlier versions saved beside an inner policy was their default.
    assert DuoAttention(sink=64, inner=kvjax.KeyDiff()).unsized == kvjax.KeyDiff()


@pytest.mark.parametrize("case", range(len(peer_cases.STREAMS)), ids=lambda i: str(peer_cases.STREAMS[i]))
def test_the_others_see_what_the_official_mask_shows_them(case):
    """Each token that is decoded, and the last of a prompt, as the next would without it."""
    tokens, sink, recent = peer_cases.STREAMS[case]
    policy = DuoAttention(profile=random_gates(model().config), sink=sink, recent=recent).unsized
    k, v = random_kv(case, 1, 1, tokens, 4)
    driver, seen = Driver(policy, config_for(1, 4), 1, 128, 32), peer_cases.recorded()["streams"][case]
    before = 0
    for query, visible in seen.items():
        after = int(query) + 1
        part = slice(before, after)
        driver.decode(k[:, :, part], v[:, :, part]) if before else driver.read(k[:, :, part], v[:, :, part], after)
        assert sorted(driver.kept(k)[0]) == visible, query
        before = after


def _inner(name, config):
    return {"rings": None, "keydiff": KeyDiff(), "learned": Learned(profile=random_scorer(config))}[name]


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["model", "int8"])
@pytest.mark.parametrize("inner", ["rings", "keydiff", "learned"])
def test_rows_equal_rows_alone_over_turns_and_within_it_other_policies(inner, storage):
    lm = model()
    profile, prompts = random_gates(lm.config), [[i * step % 97 for i in range(n)] for step, n in ((1, 150), (7, 60))]
    inner = _inner(inner, lm.config)
    policy = DuoAttention(profile=profile, ratio=0.5, inner=inner, **({"sink": 4} if inner is None else {}))
    given = {"storage": storage, "max_new_tokens": 4, "logprobs": True}
    both = kvjax.generate(lm, prompts, policy=policy, **given)
    for ids, output in zip(prompts, both, strict=True):
        alone = kvjax.generate(lm, ids, policy=policy, **given)
        assert alone.tokens == output.tokens
        assert np.array_equal(alone.stats.retained, output.stats.retained)
        assert np.mean(output.stats.retained) <= 0.5 * len(ids) + 4 + 1
        turn = kvjax.generate(lm, "And now?", cache=output.cache, **given)
        assert np.isfinite(turn.logprobs).all()


@pytest.mark.slow
def test_all_heads_or_none():
    lm = model()
    ids = [3 * i % 89 for i in range(120)]
    profile, given = random_gates(lm.config), {"max_new_tokens": 5, "logprobs": True}
    every = kvjax.generate(lm, ids, policy=DuoAttention(profile=profile, heads=1.0), **given)
    full = kvjax.generate(lm, ids, **given)
    assert every.tokens == full.tokens
    np.testing.assert_allclose(every.logprobs, full.logprobs, atol=1e-5)
    none = kvjax.generate(lm, ids, policy=DuoAttention(profile=profile, heads=0.0, sink=2, recent=9), **given)
    rings = kvjax.generate(lm, ids, policy=StreamingLLM(sink=2, window=9), **given)
    assert none.tokens == rings.tokens
    np.testing.assert_allclose(none.logprobs, rings.logprobs, atol=1e-5)


@pytest.mark.slow
def test_a_ratio_of_one_keeps_everything():
    lm = model()
    profile, ids = random_gates(lm.config), [3 * i % 89 for i in range(120)]
    for inner in (None, KeyDiff()):
        policy = DuoAttention(profile=profile, ratio=1, inner=inner)
        output = kvjax.generate(lm, ids, policy=policy, max_new_tokens=2, stop_token_ids=())
        assert np.mean(output.stats.retained) == 121
    with pytest.raises(UsageError, match="nothing that a ratio could size"):
        DuoAttention(profile=profile, ratio=0.5, heads=1.0).check(lm.config)


@pytest.mark.slow
def test_its_profile_is_the_same_after_its_file_and_a_saved_cache(tmp_path):
    lm, profile = model(), random_gates(model().config)
    save_profile(profile, tmp_path / "toy.yaml")
    assert load_profile(tmp_path / "toy.yaml") == profile
    policy = parse(f"duoattention:sink=2,recent=9,profile={tmp_path / 'toy.yaml'}")
    assert policy == DuoAttention(profile=profile, sink=2, recent=9)
    output = kvjax.generate(lm, [5] * 60, policy=policy, max_new_tokens=1)
    kvjax.save_cache(tmp_path / "cache", output.cache, lm)
    assert kvjax.load_cache(tmp_path / "cache", lm).policy == policy
    assert format_policy(DuoAttention(ratio=0.5, sink=4)) == "duo:sink=4,ratio=0.5"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"profile": 7}, "profile is 7"),
        ({"ratio": 0.5, "recent": 9}, "ratio sizes the rings"),
        ({"heads": 2}, "heads"),
        ({"recent": 0}, "recent"),
        ({"inner": KeyDiff(), "sink": 3}, "leave them out"),
        ({"inner": KeyDiff(budget=9), "ratio": 0.5}, "leave out one"),
        ({"inner": Razor()}, "policy of tokens"),
        ({"inner": StreamingLLM(positions="cache")}, "renumbers"),
    ],
)
def test_what_it_cannot_be_is_one_sentence(options, said):
    with pytest.raises(UsageError, match=said):
        DuoAttention(**options)


def test_models_that_it_has_no_gates_of_are_one_sentence():
    lm = model()
    with pytest.raises(UsageError, match="kvjax calibrate gates"):
        kvjax.generate(lm, [65] * 30, policy="duo")
    other = random_gates(dataclasses.replace(lm.config, num_layers=2))
    with pytest.raises(UsageError, match="belongs to another model"):
        kvjax.generate(lm, [65] * 30, policy=DuoAttention(profile=other))
    high = DuoAttention(profile=random_gates(lm.config), heads=0.9, ratio=0.5)
    with pytest.raises(UsageError, match="hold alone"):
        kvjax.generate(lm, [65] * 30, policy=high)


@pytest.mark.model
def test_the_default_models_gates_come_along(default_model):
    found = packaged(GateProfile, default_model.config)
    assert found is not None and np.array(found.gates).shape == (30, 3)

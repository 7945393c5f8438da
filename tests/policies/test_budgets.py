"""Equal budgets are equal tokens and equal bytes of keys and values, whichever policy chooses them."""

from __future__ import annotations

import numpy as np
import pytest
import toys

import kvjax
from kvjax.memory_needs import full_cache_bytes
from kvjax.policies import format_policy, parse, registry

#: What each policy needs besides its size, on a prompt of 400 tokens.
EXTRA = {"lagkv": "lag=16,sink=4", "razor": "heads=0.1", "pyramidkv": "beta=4"}
OTHERS = {"full", "razor", "round", "qfilters", "learned", "duo", "think"}  # the last four: see their tests
SIZED = sorted(set(registry()) - OTHERS)
TOKENS = 400


def named(name: str, size: str) -> str:
    return f"{name}:{size},{EXTRA[name]}" if name in EXTRA else f"{name}:{size}"


def planned(policy: str, **options) -> kvjax.Plan:
    return kvjax.plan(toys.tiny_config(), prompt_tokens=TOKENS, policy=policy, max_new_tokens=8, **options)


@pytest.mark.parametrize("name", SIZED)
@pytest.mark.parametrize("size", ["budget=100", "ratio=0.25"])
def test_every_policy_takes_tokens_or_a_ratio_and_retains_as_many(name, size):
    plan = planned(named(name, size))
    mean = np.mean(plan.retained)
    # LagKV keeps whole numbers of each partition: at most one token less of each.
    assert 100 - (TOKENS // 16 if name == "lagkv" else 0) <= mean <= 100
    assert plan.retained_fraction == pytest.approx(mean / TOKENS)
    assert f"{plan.retained_fraction:.1%}" in plan.table() and f"{plan.retained[0][0]} retained" in plan.table()
    assert parse(format_policy(parse(named(name, size)))) == parse(named(name, size))


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["model", "int8"])
def test_equal_budgets_are_equal_bytes_of_keys_and_values(storage):
    lm = toys.tiny_model()
    prompt = list(range(200))
    found = {}
    for name in ("streamingllm", "snapkv", "slimkv", "keydiff", "tova", "compensated"):
        output = kvjax.generate(lm, prompt, policy=named(name, "budget=50"), storage=storage, max_new_tokens=0)
        slots = sum(sum(heads) for heads in output.stats.retained)
        marks = sum(4 for _ in output.cache.layers[0].marks) * slots
        found[name] = output.stats.live_cache_bytes - marks
    assert len(set(found.values())) == 1, found
    if storage == "model":
        assert found["snapkv"] == full_cache_bytes(lm.config, 50, lm.params.dtype)


def test_razors_ratio_is_of_the_whole_cache_its_protected_heads_included():
    plan = planned("razor:heads=0.1,ratio=0.5")
    assert plan.retained_fraction == pytest.approx(0.5, abs=0.01)
    assert plan.retained[0][1] == TOKENS

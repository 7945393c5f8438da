"""Every option of every registered policy does something: changing it changes what is kept, or it is refused.

``TABLE`` gives each option another value; a policy or an option that is missing from it fails. Options are tried on a
rotary and on an ALiBi model. What counts as a change: other capacities or budgets, another way of reading a prompt, or
other tokens in the cache after two prompts and some decoding; of Round Attention, other rounds or another conversation.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import toys
from support.driver import Driver, config_for, random_kv
from support.filters import random_filters
from support.scorers import random_gates, random_scorer, random_statistics

import kvjax
from kvjax.cache.pool import keys_and_values
from kvjax.errors import UsageError
from kvjax.policies import KeyDiff, LagKV, Policy, RoundAttention, SnapKV, registry
from kvjax.policies.parsing import options_of
from kvjax.policies.profile import HeadProfile, ModelShape, ScopeProfile, WatershedProfile
from kvjax.rounds.selection import select

LAYERS, HEADS, DIM = 3, 2, 8
CONFIGS = {
    "rope": config_for(HEADS, DIM, LAYERS, max_position=32768),
    "alibi": config_for(HEADS, DIM, LAYERS, max_position=32768, positional="alibi", norm="layer", mlp="gelu"),
}


def table_of(seed: int) -> tuple[tuple[float, ...], ...]:
    numbers = np.random.default_rng(seed).uniform(0.1, 1.0, (LAYERS, 2 * HEADS)).round(3)
    return tuple(map(tuple, numbers.tolist()))


def heads_profile(seed: int) -> HeadProfile:
    return HeadProfile("toy", ModelShape.of(CONFIGS["rope"]), 8, 4, 0, table_of(seed), table_of(seed + 1))


def scope_profile(seed: int) -> ScopeProfile:
    return ScopeProfile("toy", ModelShape.of(CONFIGS["alibi"]), table_of(seed), table_of(seed + 1), table_of(seed + 2))


def watershed_profile(layer: int) -> WatershedProfile:
    return WatershedProfile("toy", ModelShape.of(CONFIGS["rope"]), layer, 1, 8, 0.5, (0.2, 0.1, 0.0))


@dataclasses.dataclass(frozen=True)
class Other:
    """Another value of an option, and options that it and the value it is compared with both have."""

    value: Any
    beside: dict[str, Any] = dataclasses.field(default_factory=dict)


SIZE = {"budget": Other(20), "ratio": Other(0.5)}
SIZED = {**SIZE, "keep_turn": Other(12, {"budget": 24})}
WINDOW = {"budget": 16, "window": 4}
CRITICAL = {"budget": 20, "inner": SnapKV(window=3)}
SNAP = {**SIZED, "window": Other(6, {"budget": 16}), "kernel": Other(3, WINDOW), "pooling": Other("max", WINDOW)}
DRAWN = {"budget": 20, "sink": 2}
AHA = {"budget": 16, "recent": 4}

#: For each policy the options it is made with on both kinds of model, and another value of each.
TABLE: dict[str, tuple[dict[str, Any], dict[str, Other]]] = {
    "full": ({}, {}),
    "streamingllm": ({}, {
        "sink": Other(2), "window": Other(100), **SIZE, "positions": Other("cache"),
    }),
    "lagkv": ({"sink": 2, "lag": 4}, {
        **SIZE, "partition_ratio": Other(0.9), "sink": Other(5), "lag": Other(6), "variant": Other("local"),
        "prefill": Other("chunked"),
    }),
    "h2o": ({}, {**SIZE, "keep_turn": Other(12, {"budget": 24, "recent": 3}), "recent": Other(3, {"budget": 16})}),
    "tova": ({}, SIZED),
    "ahakv": ({}, {
        **SIZED, "recent": Other(8, {"budget": 16}), "kernel": Other(3, AHA),
        "recent_accumulation": Other(False, AHA), "step_gain": Other(False, AHA), "value_prior": Other(False, AHA),
    }),
    "razor": ({}, {
        "profile": Other(None), "inner": Other(LagKV(lag=16)), "induction_share": Other(0.5),
        "echo_share": Other(0.5), "share_of": Other("kv", {"induction_share": 0.4}),
        "heads": Other(((0, 1), (2, 0)), {"profile": None}), "ratio": Other(0.7), "budget": Other(64),
        "sink": Other(3), "threshold": Other(100), "compression": Other(2.0), "compensation": Other(False),
        "bound": Other("safe"), "eps": Other(0.01),
    }),
    "round": ({}, {
        "strategy": Other("above_mean"), "granularity": Other("token"), "watershed": Other(2), "top": Other(0.5),
        "threshold": Other(0.3, {"strategy": "fixed"}), "std": Other(0.5, {"strategy": "adaptive"}),
        "inner": Other(LagKV(sink=2, lag=4)), "drop_after": Other(1), "profile": Other(watershed_profile(2)),
    }),
    "compensated": ({}, {
        "sink": Other(3), "threshold": Other(100), "compression": Other(2.0), **SIZE, "compensation": Other(False),
        "lengths": Other(((50, 60),) * LAYERS),
    }),
    "snapkv": ({}, {**SNAP, "group": Other("max", WINDOW)}),
    # The last layer, which is looked at, must have something to choose.
    "pyramidkv": ({"beta": 2}, {**SNAP, "group": Other("max", WINDOW), "beta": Other(20)}),
    "slimkv": ({}, {**SNAP, "score": Other("s2", WINDOW)}),
    "finch": ({}, {
        **SIZED, "keep_turn": Other(12, {"budget": 24, "window": 4}), "window": Other(6, {"budget": 16}),
        "chunk": Other(5, WINDOW),
    }),
    "nacl": ({}, {
        **SIZED, "proxy": Other(0.5, DRAWN), "random": Other(0.0, DRAWN), "protect": Other(0.4, DRAWN),
        "sink": Other(1, {"budget": 20}), "seed": Other(7, DRAWN), "group": Other("max", DRAWN | {"random": 0.0}),
    }),
    "keydiff": ({}, {**SIZED, "profile": Other(random_statistics(CONFIGS["rope"], 5), {"budget": 16})}),
    "expected_attention": ({}, {
        **SIZED, "sink": Other(1, {"budget": 16}), "future": Other(4, {"budget": 16}),
        "epsilon": Other(0.5, {"budget": 16}), "covariance": Other(False, {"budget": 16}),
        "values": Other(False, {"budget": 16}),
        "profile": Other(random_statistics(CONFIGS["rope"], 5), {"budget": 16}),
    }),
    "chunkkv": ({}, {
        **SIZED, "inner": Other(SnapKV(window=3), {"budget": 16}), "chunk": Other(3, {"budget": 16}),
        "together": Other(False, {"budget": 16}),
    }),
    "compactor": ({}, {
        **SIZED, "blend": Other(5.0, {"budget": 20}), "sink": Other(1, {"budget": 20}),
        "recent": Other(7, {"budget": 20}), "chunk": Other(5, {"budget": 20}), "sketch": Other(2, {"budget": 20}),
        "seed": Other(7, {"budget": 20, "sketch": 3}), "scaled": Other(True, {"budget": 20}),
    }),
    "qfilters": ({}, {**SIZED, "profile": Other(random_filters(CONFIGS["rope"], 5), {"budget": 16})}),
    "criticalkv": ({}, {
        **SIZED, "inner": Other(SnapKV(window=3), {"budget": 40}), "first": Other(0.0, CRITICAL),
        "epsilon": Other(5.0, CRITICAL),
    }),
    "adaptive": ({}, {
        **SIZED, "inner": Other(SnapKV(window=3), {"budget": 16}),
        "floor": Other(1.0, {"budget": 16, "inner": KeyDiff()}), "scope": Other("model"),
    }),
    "duo": ({"heads": 0.25, "sink": 2, "recent": 20}, {
        "profile": Other(random_gates(CONFIGS["rope"], 5)), "sink": Other(5), "recent": Other(9),
        "ratio": Other(0.6, {"recent": 256}), "heads": Other(0.75),
        "inner": Other(SnapKV(budget=16, window=3), {"sink": 64, "recent": 256}),
    }),
    "learned": ({}, {
        **SIZED, "sink": Other(1, {"budget": 16}), "profile": Other(random_scorer(CONFIGS["rope"], 5), {"budget": 16}),
    }),
    "merged": ({}, {
        **SIZED, "inner": Other(SnapKV(window=3), {"budget": 16}), "threshold": Other(0.8, {"budget": 16}),
    }),
    "think": ({}, {
        "channels": Other(0.4), "window": Other(3), "inner": Other(SnapKV(budget=16, window=3)),
    }),
    "kvzip": ({}, {**SIZED, "sink": Other(1, {"budget": 16}), "chunk": Other(5, {"budget": 16})}),
}  # fmt: skip
#: Options that a policy cannot do without on one kind of model.
NEEDED: dict[tuple[str, str], dict[str, Any]] = {
    ("razor", "rope"): {"profile": heads_profile(0)},
    ("razor", "alibi"): {"profile": scope_profile(0)},
    ("round", "rope"): {"watershed": 1},
    **{("qfilters", kind): {"profile": random_filters(CONFIGS["rope"])} for kind in ("rope", "alibi")},
    **{("duo", kind): {"profile": random_gates(CONFIGS["rope"])} for kind in ("rope", "alibi")},
    **{("learned", kind): {"profile": random_scorer(CONFIGS["rope"])} for kind in ("rope", "alibi")},
    ("compensated", "alibi"): {"compensation": False},
}
#: Where these belong to, the value that stands for "another" depends on the kind of model.
BY_MODEL: dict[tuple[str, str, str], Other] = {
    ("razor", "profile", "rope"): Other(heads_profile(5)),
    ("razor", "profile", "alibi"): Other(scope_profile(5)),
    ("round", "profile", "rope"): Other(watershed_profile(2), {"watershed": None}),
    ("compensated", "compensation", "alibi"): Other(True),
}


def test_the_table_names_every_policy_and_every_option():
    found = {name: {field.name for field in options_of(cls)} for name, cls in registry().items()}
    assert {name: set(options) for name, (_, options) in TABLE.items()} == {name: found[name] for name in TABLE}
    assert set(TABLE) == set(found), "give the policy's options other values here"


def made(name: str, positional: str, options: dict[str, Any]) -> Policy | str:
    """The policy, or the sentence it is refused with."""
    try:
        policy = registry()[name](**options)
        policy.check(CONFIGS[positional])
    except UsageError as error:
        return str(error)
    return policy


def plans(policy: Policy, positional: str) -> Any:
    """All that is known before a token is read."""
    config, totals = CONFIGS[positional], np.array([3, 30, 70, 400, 9000], np.int32)
    capacities = [policy.capacities(config, prompt, new) for prompt, new in ((40, 10), (400, 50), (9000, 1))]
    budgets = [np.asarray(policy.budgets(config, layer, totals)).tolist() for layer in range(LAYERS)]
    return capacities, budgets, policy.chunks(config), policy.beyond_context, policy.shares_layers


@functools.cache
def contents(policy: Policy, positional: str, whole: bool) -> Any:
    """What attention sees of the last layer after a prompt; of the ``whole``, after some steps and another prompt."""
    config, tokens = CONFIGS[positional], 40 + 6 + 12
    k, v = random_kv(0, 2, HEADS, tokens, DIM)
    q = 1.5 * np.random.default_rng(1).standard_normal((2, HEADS, 2, tokens, DIM)).astype(np.float32)
    driver = Driver(policy, config, 2, prompt_capacity=64, new_capacity=64, layer=LAYERS - 1)
    driver.read(k[:, :, :40], v[:, :, :40], [40, 33], q=q[:, :, :, :40])
    if whole:
        driver.decode(k[:, :, 40:46], v[:, :, 40:46], q=q[:, :, :, 40:46])
        driver.read(k[:, :, 46:], v[:, :, 46:], [12, 9], q=q[:, :, :, 46:])
    held = keys_and_values(driver.cache)
    slots = np.arange(held[0].shape[2]) < np.asarray(driver.cache.length)[..., None]
    return tuple(np.where(slots[..., None], x, 0).tobytes() for x in held)


@functools.cache
def conversation(policy: RoundAttention) -> Any:
    """The answers to three questions in a conversation of rounds, and the bytes it then holds."""
    lm = toys.tiny_model(num_layers=LAYERS)
    cache, said = None, []
    for size in (30, 20, 15):
        prompt = np.random.default_rng(size).integers(0, 256, size).tolist()
        options = {"policy": policy} if cache is None else {"cache": cache}
        output = kvjax.generate(lm, prompt, max_new_tokens=2, stop_token_ids=(), logprobs=True, **options)
        cache = output.cache
        said.append((output.tokens, np.round(output.logprobs, 5).tolist(), output.stats.rounds.tokens_used))
    return said, cache.host_nbytes


ATTENTION = np.array([0.02, 0.3, 0.05, 0.01, 0.15, 0.02, 0.12, 0.2, 0.03, 0.04, 0.06])

CASES = [(name, field, kind) for name, (_, options) in TABLE.items() for field in options for kind in CONFIGS]


@pytest.mark.parametrize(("name", "field", "positional"), CASES)
def test_every_option_changes_something_or_is_refused(name, field, positional):
    base, options = TABLE[name]
    other = BY_MODEL.get((name, field, positional), options[field])
    shared = {**base, **NEEDED.get((name, positional), {}), **other.beside}
    policy = made(name, positional, shared)
    if isinstance(policy, str):
        # The whole policy is refused, or an option that this one is tried beside.
        assert (name, positional) == ("round", "alibi") or other.beside, policy
        return
    changed = made(name, positional, {**shared, field: other.value})
    if isinstance(changed, str):
        assert changed.endswith(".") and "\n" not in changed
        return
    assert getattr(policy, field) != getattr(changed, field)
    if plans(policy, positional) != plans(changed, positional):
        return
    if isinstance(policy, RoundAttention):
        assert isinstance(changed, RoundAttention)
        if select(policy, ATTENTION).tolist() == select(changed, ATTENTION).tolist():
            assert conversation(policy) != conversation(changed)
        return
    assert any(contents(policy, positional, whole) != contents(changed, positional, whole) for whole in (False, True))


@pytest.mark.parametrize(
    ("name", "positional", "options", "unused"),
    [
        *(("razor", "alibi", {field: TABLE["razor"][1][field].value}, field)
          for field in TABLE["razor"][1] if field not in ("profile", "bound", "eps")),
        ("razor", "rope", {"bound": "paper"}, "bound"),
        ("razor", "rope", {"eps": 0.1}, "eps"),
        ("razor", "rope", {"heads": "0.1"}, "profile"),
        ("razor", "rope", {"heads": "0.1", "profile": None, "echo_share": 0.5}, "echo_share"),
        ("razor", "rope", {"budget": 64, "threshold": 100}, "threshold"),
        ("compensated", "rope", {"budget": 64, "compression": 2.0}, "compression"),
        ("round", "rope", {"threshold": 0.2}, "threshold"),
        ("round", "rope", {"std": 1.0, "strategy": "fixed"}, "std"),
        ("ahakv", "rope", {"value_prior": False, "kernel": 3}, "kernel"),
        ("expected_attention", "rope", {"values": False, "epsilon": 0.1}, "epsilon"),
        ("expected_attention", "alibi", {"future": 4}, "future"),
        ("compactor", "rope", {"sketch": 0, "seed": 3}, "seed"),
        ("h2o", "rope", {"keep_turn": 3}, "keep_turn"),
    ],
)  # fmt: skip
def test_an_option_that_nothing_would_read_is_refused_by_name(name, positional, options, unused):
    said = made(name, positional, {**NEEDED.get((name, positional), {}), **options})
    assert isinstance(said, str) and f"leave out {unused}" in said


def test_defaults_are_refused_nowhere():
    for name, positional in ((name, kind) for name in TABLE for kind in CONFIGS):
        policy = made(name, positional, {**TABLE[name][0], **NEEDED.get((name, positional), {})})
        assert isinstance(policy, Policy) or (name, positional) == ("round", "alibi"), policy

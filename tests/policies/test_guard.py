"""A policy of one's own that is wrong: one sentence that names the method, before there is an answer."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import pytest
import toys
from support.scorers import random_gates

import kvjax
from kvjax.policies import (
    Candidates,
    DuoAttention,
    Policy,
    Selecting,
    Signals,
    guard,
    names,
    numpy_or_jax,
    parse,
    per_head,
    selection,
)


@dataclasses.dataclass(frozen=True)
class Recent(Policy):
    """The ``window`` last tokens; each mistake below is one change of it."""

    window: int = 24

    def budgets(self, config, layer, total):
        return per_head(numpy_or_jax(total).minimum(total, self.window), config)

    def select(self, layer, cache, candidates: Candidates, chunk):
        index = jnp.arange(candidates.k.shape[2])
        keep = index >= candidates.length[..., None] - self.window
        return selection(cache, candidates, keep & candidates.valid)


@dataclasses.dataclass(frozen=True)
class FewSlots(Recent):
    window: int = 150

    def capacities(self, config, prompt, new):
        return ((8,) * config.num_kv_heads,) * config.num_layers


@dataclasses.dataclass(frozen=True)
class FewSlotsUnplanned(FewSlots):
    """What it keeps is only found when it has kept it."""

    budgets = Policy.budgets


@dataclasses.dataclass(frozen=True, eq=False)
class AnyClass(Recent):
    def __eq__(self, other):
        return vars(self) == vars(other)

    def __hash__(self):
        return hash(self.window)


@dataclasses.dataclass(frozen=True)
class StateOfSelect(Recent):
    def init_state(self, config, layer, batch, slots):
        return jnp.zeros((batch, 3))

    def select(self, layer, cache, candidates, chunk):
        return dataclasses.replace(super().select(layer, cache, candidates, chunk), state=jnp.zeros((3,)))


@dataclasses.dataclass(frozen=True)
class Mask(Recent):
    def select(self, layer, cache, candidates, chunk):
        return super().select(layer, cache, candidates, chunk).keep


@dataclasses.dataclass(frozen=True)
class Numbers(Recent):
    def select(self, layer, cache, candidates, chunk):
        found = super().select(layer, cache, candidates, chunk)
        return dataclasses.replace(found, keep=found.keep.astype(jnp.int32))


@dataclasses.dataclass(frozen=True)
class NoSlots(Recent):
    def capacities(self, config, prompt, new):
        return ((0,) * config.num_kv_heads,) * config.num_layers


@dataclasses.dataclass(frozen=True)
class Beyond(Recent):
    def select(self, layer, cache, candidates, chunk):
        keep = jnp.arange(candidates.k.shape[2]) % 4 == 0
        return selection(cache, candidates, jnp.broadcast_to(keep, candidates.valid.shape))

    budgets = Policy.budgets


@dataclasses.dataclass(frozen=True)
class TooMany(Recent):
    def retained(self, cache):
        return cache.length + 1000


@dataclasses.dataclass(frozen=True)
class Budgets(Recent):
    def budgets(self, config, layer, total):
        return per_head(total + self.window, config)


@dataclasses.dataclass(frozen=True)
class Nothing(Recent):
    def select(self, layer, cache, candidates, chunk):
        return selection(cache, candidates, jnp.zeros_like(candidates.valid))


@dataclasses.dataclass(frozen=True)
class State(Recent):
    def init_state(self, config, layer, batch, slots) -> Any:
        return {"good": jnp.zeros((batch, 3)), "bad": jnp.zeros((config.num_kv_heads, batch))}


class Plain(Recent):
    """No dataclass of its own."""


@dataclasses.dataclass(frozen=True)
class Hidden(Recent):
    def __post_init__(self):
        object.__setattr__(self, "extra", 3)


@dataclasses.dataclass(frozen=True)
class Alike(Recent):
    sink: int = dataclasses.field(default=0, compare=False)


@dataclasses.dataclass(frozen=True)
class Equal(Recent):
    def __eq__(self, other):
        return isinstance(other, Equal)

    def __hash__(self):
        return 0


@dataclasses.dataclass(frozen=True, eq=False)
class Itself(Recent):
    __eq__, __hash__ = object.__eq__, object.__hash__


@dataclasses.dataclass(frozen=True)
class Unhashable(Recent):
    table: Any = None


@dataclasses.dataclass(frozen=True)
class NoCapacities(Recent):
    def capacities(self, config, prompt, new):
        """Forgets its result."""


@dataclasses.dataclass(frozen=True)
class OneLayer(Recent):
    def capacities(self, config, prompt, new):
        return super().capacities(config, prompt, new)[:1]


@dataclasses.dataclass(frozen=True)
class Fractions(Recent):
    def budgets(self, config, layer, total):
        return super().budgets(config, layer, total) * np.nan


@dataclasses.dataclass(frozen=True)
class OneChunk(Recent):
    def chunks(self, config):
        return 32


@dataclasses.dataclass(frozen=True)
class NothingRetained(Recent):
    def retained(self, cache):
        """Forgets its result."""


@dataclasses.dataclass(frozen=True)
class NoMarks(Recent):
    def select(self, layer, cache, candidates, chunk):
        return dataclasses.replace(super().select(layer, cache, candidates, chunk), marks=None)


@dataclasses.dataclass(frozen=True)
class NoSignals(Recent):
    signals = None


@dataclasses.dataclass(frozen=True)
class Marks(Recent):
    marks: ClassVar[Any] = ["score"]


@dataclasses.dataclass(frozen=True)
class AlwaysDue(Recent):
    maintains: ClassVar[bool] = True

    def due(self, layers, config):
        return jnp.ones(layers[0].length.shape[0], bool)

    def maintain(self, layer, cache, config, row, seen):
        return cache


@dataclasses.dataclass(frozen=True)
class DueOnce(AlwaysDue):
    def due(self, layers, config):
        return jnp.bool_(False)


@dataclasses.dataclass(frozen=True)
class OtherAppend(Recent):
    def append(self, layer, cache, k, v, step):
        return super().append(layer, cache, k, v, step).replace(state=jnp.zeros((3,)))


@dataclasses.dataclass(frozen=True)
class OtherObserve(Recent):
    def observe(self, layer, cache, logits, step):
        return cache.replace(length=cache.length.astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class OtherMaintain(AlwaysDue):
    def due(self, layers, config):
        return layers[0].length[:, 0] > 60

    def maintain(self, layer, cache, config, row, seen):
        return cache.replace(length=cache.length[:, :1])


@dataclasses.dataclass(frozen=True)
class Next(Recent):
    def append(self, layer, cache, k, v, step):
        cache = super().append(layer, cache, k, v, step)
        return cache.replace(next=jnp.full_like(cache.next, -5))


@dataclasses.dataclass(frozen=True)
class OtherV(Recent):
    def select(self, layer, cache, candidates, chunk):
        return dataclasses.replace(super().select(layer, cache, candidates, chunk), v=candidates.v[:, :, :3])


@dataclasses.dataclass(frozen=True)
class NanV(Recent):
    def select(self, layer, cache, candidates, chunk):
        return dataclasses.replace(super().select(layer, cache, candidates, chunk), v=candidates.v * jnp.nan)


@dataclasses.dataclass(frozen=True)
class Unmarked(Recent):
    marks = ("position",)

    def select(self, layer, cache, candidates, chunk):
        return dataclasses.replace(super().select(layer, cache, candidates, chunk), marks={})


@dataclasses.dataclass(frozen=True)
class OneScore(Selecting):
    budget: int | None = 24

    def scores(self, layer, cache, candidates, chunk):
        return candidates.valid[..., :1].astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class NoScore(OneScore):
    def scores(self, layer, cache, candidates, chunk):
        return None


@dataclasses.dataclass(frozen=True)
class Unwritten(Selecting):
    budget: int | None = 24


@dataclasses.dataclass(frozen=True)
class Twice(Recent):
    marks = ("position", "position")


@dataclasses.dataclass(frozen=True)
class Unweighed(Recent):
    signals = Signals(hidden=True)


@dataclasses.dataclass(frozen=True)
class TextState(Recent):
    def init_state(self, config, layer, batch, slots):
        return {"a": "text"}


@dataclasses.dataclass(frozen=True)
class Kinds(Recent):
    def layer_kind(self, config, layer):
        return [layer]


@dataclasses.dataclass(frozen=True)
class Notice(Recent):
    def notice(self, config, total):
        return 5


@dataclasses.dataclass(frozen=True)
class JaxSlots(Recent):
    def capacities(self, config, prompt, new):
        return ((jnp.int32(prompt + new),) * config.num_kv_heads,) * config.num_layers


@dataclasses.dataclass(frozen=True)
class Below(Recent):
    def retained(self, cache):
        return -5 * numpy_or_jax(cache.length).ones_like(cache.length)


@dataclasses.dataclass(frozen=True)
class NoRoom(Recent):
    """Nothing is left for the tokens that are decoded."""

    window: int = 32

    def capacities(self, config, prompt, new):
        return ((min(prompt, self.window),) * config.num_kv_heads,) * config.num_layers


#: Mistakes that are seen before anything runs, and those that what was kept shows.
BEFORE = {
    "few slots": (FewSlots(), "FewSlots.capacities gives 8 slots in layer 0, head 0, and budgets keeps 96 of 96"),
    "no slots": (NoSlots(), "NoSlots.capacities gives 0 slots in layer 0"),
    "budgets": (Budgets(), "Budgets.budgets keeps 25 of 1 tokens"),
    "state": (State(), r"State.init_state gives an array of shape \(2, 13\) for 13 rows"),
    "no dataclass": (Plain(), "Plain is no frozen dataclass"),
    "hidden": (Hidden(), "Hidden keeps 'extra' beside"),
    "class": (AnyClass(), "AnyClass equals a policy of another class"),
    "alike": (Alike(), "Alike equals one with another sink"),
    "equal": (Equal(), "Equal equals one with another window"),
    "itself": (Itself(), "Two Itself of the same fields are not equal"),
    "unhashable": (Unhashable(table=[1]), "Unhashable.table holds a list"),
    "no capacities": (NoCapacities(), "NoCapacities.capacities gives None; give for each of the 2 layers a tuple of 2"),
    "one layer": (OneLayer(), r"OneLayer.capacities gives \(\(.*; give for each of the 2 layers"),
    "fractions": (Fractions(), "Fractions.budgets gives float64 numbers such as nan in layer 0"),
    "one chunk": (OneChunk(), "OneChunk.chunks gives 32; give two whole numbers of at least 1, or None"),
    "no signals": (NoSignals(), "NoSignals.signals is a NoneType; give a kvjax.policies.Signals"),
    "marks": (Marks(), r"Marks.marks is \['score'\]; give a tuple of names"),
    "marks twice": (Twice(), r"Twice.marks is \('position', 'position'\); give names that differ"),
    "no weights": (Unweighed(), "Unweighed.signals asks for hidden states; write Unweighed.hidden_weights"),
    "state of text": (TextState(), "TextState.init_state gives 'text'; give arrays"),
    "kinds": (Kinds(), r"Kinds.layer_kind gives \[0\], which cannot be hashed"),
    "notice": (Notice(), "Notice.notice gives 5; give a sentence, or None"),
    "arrays of slots": (JaxSlots(), "JaxSlots.capacities gives .* slots in layer 0; give whole numbers"),
    "an array": (Unhashable(table=np.zeros(3)), "Unhashable.table holds a ndarray"),
}
AFTER = {
    "few slots": (FewSlotsUnplanned(), r"FewSlotsUnplanned.capacities gives 32 slots .* and 150 tokens are kept"),
    "beyond": (Beyond(), "Beyond.select keeps what is beyond candidates.length in layer 0, head 0"),
    "too many": (TooMany(), "TooMany.retained has 1024 tokens in layer 0, head 0, and 150 were seen"),
    "nothing retained": (NothingRetained(), r"NothingRetained.retained gives None; give \[B, H\] whole numbers"),
    "retained below 0": (Below(), "Below.retained gives -5 in layer 0, head 0; give the slots that hold a token"),
    "values that are none": (NanV(), "NanV.select gives values in layer 0, head 0 that are no numbers"),
    "nothing": (Nothing(), "Nothing.select keeps nothing of 150 tokens"),
}
PROMPT = [number % 200 for number in range(150)]


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (StateOfSelect(), r"StateOfSelect\.select gives state whose array is float32\[3\] in place of float32\[1, 3\]"),
        (OtherAppend(), r"OtherAppend\.append gives a cache of another structure"),
        (OtherObserve(), r"OtherObserve\.observe gives a cache whose length is float32\[1, 2\] in place of int32"),
        (
            OtherMaintain(),
            r"OtherMaintain\.maintain gives a cache whose length is int32\[1, 1\] in place of int32\[1, 2",
        ),
        (DueOnce(), r"DueOnce\.due gives bool numbers of shape \(\); give \[B\] booleans, 1 here"),
        (Mask(), r"Mask\.select gives a \w+; give a kvjax\.policies\.Selection"),
        (NoMarks(), r"NoMarks\.select gives marks of type NoneType; give candidates.marks"),
        (
            OtherV(),
            r"OtherV\.select gives a v of float32 numbers of shape .*; give floats of the shape of cand",
        ),
        (Unmarked(), r"Unmarked\.select gives marks of another structure; give candidates\.marks"),
        (OneScore(), r"OneScore\.scores gives float32 numbers of shape \(1, 2, 1\); give numbers of the shape"),
        (NoScore(), r"NoScore\.scores gives a NoneType; give numbers of the shape"),
        (Unwritten(), r"Unwritten has no scores; write the method, or select"),
        (Numbers(), r"Numbers\.select gives a mask of int32 numbers of shape .*; give booleans of the shape"),
    ],
)
def test_what_a_selection_shows_is_seen_while_it_is_traced(tiny_model, policy, says):
    with pytest.raises(kvjax.UsageError, match=says):
        kvjax.generate(tiny_model, "hello", policy=policy, max_new_tokens=2)


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (AlwaysDue(), r"AlwaysDue\.maintain leaves a row due; compact it so that AlwaysDue\.due is false of it"),
        (
            NoRoom(),
            r"A step of NoRoom leaves a next slot .* capacities has slots for the tokens to come",
        ),
        (Next(), r"A step of Next leaves a next slot in layer 0, head 0 that is none of its \d+ slots"),
        (kvjax.RazorAttention(inner=AlwaysDue(), heads=((0, 1),)), r"AlwaysDue\.maintain leaves a row due"),
        (kvjax.RazorAttention(inner=Next(), heads=((0, 1),)), "A step of Next leaves a next slot in layer 0, head 0"),
    ],
)
def test_what_a_step_leaves_is_refused_and_no_loop_is_endless(tiny_model, policy, says):
    with pytest.raises(kvjax.UsageError, match=says) as caught:
        kvjax.generate(tiny_model, [PROMPT, PROMPT[:40]], policy=policy, max_new_tokens=4)
    assert len(str(caught.value)) < 300
    with kvjax.Engine(tiny_model, policy, slots=2, prompt_tokens=200, new_tokens=8) as engine:
        handles = [engine.submit(ids, max_new_tokens=4, chat=False) for ids in (PROMPT, PROMPT[:40])]
        for handle in handles:
            with pytest.raises(kvjax.UsageError, match=says):
                handle.result(100)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("window", -5),
        ("window", 1.5),
        ("window", None),
        ("window", "x"),
        ("window_share", float("nan")),
        ("window_share", -3.0),
        ("noncausal", -3),
        ("squares", True),
        ("query_skip", 2**70),
        ("columns", 5),
        ("outputs", "yes"),
        ("repeat", "x"),
    ],
)
def test_signals_are_numbers_that_can_be_asked_for(option, value):
    with pytest.raises(kvjax.UsageError, match=rf"Signals\.{option} is "):
        Signals(**{option: value})


@pytest.mark.parametrize(("policy", "says"), BEFORE.values(), ids=BEFORE.keys())
def test_what_is_seen_before_anything_runs(tiny_model, monkeypatch, policy, says):
    monkeypatch.setattr("kvjax.runtime.reading.read_prompts", lambda *_, **__: pytest.fail("something ran"))
    for ask in (
        lambda: kvjax.generate(tiny_model, PROMPT, policy=policy, max_new_tokens=4),
        lambda: kvjax.plan(tiny_model, prompt_tokens=150, policy=policy),
        lambda: kvjax.check_policy(policy, tiny_model),
    ):
        with pytest.raises(kvjax.UsageError, match=says) as caught:
            ask()
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize(("policy", "says"), AFTER.values(), ids=AFTER.keys())
def test_what_the_prompt_shows_comes_before_the_first_token(tiny_model, policy, says):
    stream = kvjax.stream_generate(tiny_model, [PROMPT, PROMPT[:40]][0], policy=policy, max_new_tokens=4)
    with pytest.raises(kvjax.UsageError, match=says) as caught:
        next(iter(stream))
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(("policy", "says"), AFTER.values(), ids=AFTER.keys())
def test_what_the_prompt_shows_is_what_an_engine_and_a_batch_say(tiny_model, tmp_path, policy, says):
    with (
        kvjax.Engine(tiny_model, policy, slots=2, prompt_tokens=200, new_tokens=8) as engine,
        pytest.raises(kvjax.UsageError, match=says),
    ):
        engine.submit(PROMPT, max_new_tokens=4, chat=False).result(100)
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": 150 * "a"}))
    report = kvjax.batch.run(tiny_model, tmp_path / "in.jsonl", tmp_path / "out", policy=policy, max_new_tokens=4)
    assert (report.answered, report.failed) == (0, 1)
    assert re.search(says.replace("150", "[0-9]+"), report.files[0].read_text())


@pytest.mark.parametrize(
    ("policy", "says"),
    [(policy, says) for policy, says in BEFORE.values() if not isinstance(policy, FewSlots)],
    ids=[name for name in BEFORE if name != "few slots"],
)
def test_a_policy_within_another_is_seen_before_anything_runs(tiny_model, policy, says):
    outer = kvjax.RazorAttention(inner=policy, heads=((0, 0),))
    says = says.replace("2, 13", "., 13").replace("a tuple of 2", "a tuple of .")
    for ask in (
        lambda: kvjax.generate(tiny_model, PROMPT, policy=outer, max_new_tokens=4),
        lambda: kvjax.Engine(tiny_model, outer, prompt_tokens=200, new_tokens=8),
    ):
        with pytest.raises(kvjax.UsageError, match=says):
            ask()


def test_a_policy_within_another_is_named_by_what_it_kept(tiny_model):
    for policy, says in ((Beyond(), "Beyond.select keeps what is beyond"), (Nothing(), "Nothing.select keeps nothing")):
        with pytest.raises(kvjax.UsageError, match=f"{says}.* in layer 0, head 1"):
            kvjax.generate(tiny_model, PROMPT, policy=kvjax.RazorAttention(inner=policy, heads=((0, 0),)))


def test_a_policy_that_is_right_passes(tiny_model):
    found = kvjax.check_policy(Recent(), tiny_model)
    assert {"full", "row alone", "later turn", "int8", "composition"} <= set(found.holds)
    assert set(found.skipped) <= {"mesh"} and "row alone" in str(found)


@pytest.mark.parametrize("name", names.POLICIES)
def test_every_policy_of_kvjax_keeps_to_it(name, monkeypatch):
    text = {"razor": "razor:heads=0.0+1.1,ratio=0.9"}.get(name, name)
    policy, config = parse(text), toys.tiny_config(num_layers=4)
    if isinstance(policy, DuoAttention):
        policy = dataclasses.replace(policy, profile=random_gates(config))
    guard.check_value(policy)
    monkeypatch.setattr(guard, "is_own", lambda policy: True)
    for prompt in (64, 512):
        guard.check_sizes.__wrapped__(policy, config, prompt, 256)


def test_the_checks_are_cheap():
    policy, config = Recent(), toys.tiny_config()
    guard.check_sizes(policy, config, 64, 256)
    kept, seen = [np.full((8, 2), 9)] * 30, np.full(8, 10)
    began = time.process_time()
    for _ in range(100):
        guard.check_value(policy)
        guard.check_sizes(policy, config, 64, 256)
        guard.check_kept(policy, (), kept, seen)
    assert time.process_time() - began < 100 * 5e-3


@dataclasses.dataclass(frozen=True)
class SeesItsNeighbours(Recent):
    """Keeps by the batch's longest row: a row's answer hangs on what else is in the batch."""

    def select(self, layer, cache, candidates, chunk):
        index = jnp.arange(candidates.k.shape[2])
        keep = index >= candidates.length.max() - self.window - 1
        last = index == candidates.length[..., None] - 1
        return selection(cache, candidates, (keep | last) & candidates.valid)

    budgets = Policy.budgets


@dataclasses.dataclass(frozen=True)
class SaysAnotherBudget(Recent):
    def budgets(self, config, layer, total):
        return per_head(numpy_or_jax(total).minimum(total, self.window + 7), config)


@dataclasses.dataclass(frozen=True)
class NeverAppends(Recent):
    def append(self, layer, cache, k, v, config, **_):
        return cache


@dataclasses.dataclass(frozen=True)
class NotNumbers(Recent):
    def select(self, layer, cache, candidates, chunk):
        chosen = super().select(layer, cache, candidates, chunk)
        return dataclasses.replace(chosen, v=candidates.v * jnp.nan)


@dataclasses.dataclass(frozen=True)
class Raises(Recent):
    def select(self, layer, cache, candidates, chunk):
        if chunk.total[0] > 3:
            raise AssertionError
        return super().select(layer, cache, candidates, chunk)


@dataclasses.dataclass(frozen=True)
class NoSelection(Recent):
    def select(self, layer, cache, candidates, chunk):
        return candidates.valid


@dataclasses.dataclass(frozen=True)
class NoChunks(Recent):
    def chunks(self, config):
        return (0, 0)


@dataclasses.dataclass(frozen=True)
class TextMarks(Recent):
    marks: ClassVar[Any] = "position"


@dataclasses.dataclass(frozen=True)
class AlwaysDue(Recent):
    maintains: ClassVar[bool] = True


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (NeverAppends(), r"NeverAppends: it keeps 5 tokens and the first of its answer, and answers .* look at append"),
        (NotNumbers(), r"NotNumbers\.select gives values in layer 0, head 0 that are no numbers"),
        (Raises(), "Raises.select raises TracerBoolConversionError: "),
        (NoSelection(), "NoSelection.select gives a DynamicJaxprTracer; give a kvjax.policies.Selection"),
        (NoChunks(), r"NoChunks.chunks gives \(0, 0\); give two whole numbers of at least 1"),
        (TextMarks(), "TextMarks.marks is 'position'; give a tuple of names"),
        (AlwaysDue(), "AlwaysDue.maintains is true, and nothing makes a row due no more"),
        (SeesItsNeighbours(), "SeesItsNeighbours: a row of a batch is not the row alone"),
        (SaysAnotherBudget(), "SaysAnotherBudget.budgets keeps 31 of 150 tokens .* and 24 are kept"),
    ],
)
def test_a_property_that_does_not_hold_is_said(tiny_model, policy, says):
    with pytest.raises(kvjax.UsageError, match=says):
        kvjax.check_policy(policy, tiny_model)


def test_what_is_no_policy_is_refused(tiny_model):
    with pytest.raises(kvjax.UsageError, match="is not a policy"):
        kvjax.check_policy(3, tiny_model)  # type: ignore[arg-type]
    with pytest.raises(kvjax.UsageError, match=r"kvjax\.load"):
        kvjax.check_policy(Recent(), "model")  # type: ignore[arg-type]

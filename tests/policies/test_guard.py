"""A policy of one's own that is wrong: one sentence that names the method, before there is an answer."""

from __future__ import annotations

import dataclasses
import json
import re
import time

import numpy as np
import pytest
import toys
from support.scorers import random_gates
from support.wrong_policies import (
    Alike,
    AllProtected,
    AlwaysDue,
    AnyClass,
    Below,
    Beyond,
    Budgets,
    DueOnce,
    Equal,
    FewSlots,
    FewSlotsUnplanned,
    FewWeights,
    Fractions,
    Hidden,
    Itself,
    JaxSlots,
    Kinds,
    Marks,
    Mask,
    NanScores,
    NanV,
    NanWeights,
    Next,
    NoCapacities,
    NoMarks,
    NoMask,
    NoRoom,
    NoRoomToGrow,
    NoScore,
    NoSignals,
    NoSize,
    NoSlots,
    Nothing,
    NothingChosen,
    NothingCompressed,
    NothingDue,
    NothingRetained,
    NothingSorted,
    Notice,
    NoWeights,
    Numbers,
    OneChunk,
    OneHeadRetained,
    OneLayer,
    OneScore,
    OtherAppend,
    OtherMaintain,
    OtherObserve,
    OtherV,
    Plain,
    Ragged,
    Recent,
    State,
    StateOfSelect,
    TextState,
    TooMany,
    Twice,
    TwoAppended,
    Unhashable,
    Unmarked,
    Unweighed,
    Unwritten,
)

import kvjax
from kvjax.policies import DuoAttention, Signals, guard, names, parse

#: Mistakes that are seen before anything runs, and those that what was kept shows.
BEFORE = {
    "few slots": (FewSlots(), "FewSlots.capacities gives 8 slots in layer 0, head 0, and budgets keeps 96 of 96"),
    "no room to grow": (NoRoomToGrow(window=500), r"NoRoomToGrow.capacities gives .* decoded ones, and budgets keeps"),
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
    "no signals": (NoSignals(), "NoSignals.signals is None; give a kvjax.policies.Signals"),
    "marks": (Marks(), r"Marks.marks is \['score'\]; give a tuple of names"),
    "marks twice": (Twice(), r"Twice.marks is \('position', 'position'\); give names that differ"),
    "no weights": (Unweighed(), "Unweighed.signals asks for hidden states; write Unweighed.hidden_weights"),
    "state of text": (TextState(), "TextState.init_state gives 'text'; give arrays"),
    "kinds": (Kinds(), r"Kinds.layer_kind gives \[0\], which cannot be hashed"),
    "no weights of hidden states": (NoWeights(), "NoWeights.hidden_weights gives None in layer 0; give .H, M . 1."),
    "few weights": (FewWeights(), r"FewWeights.hidden_weights gives an array of shape \(2, 32\) in layer 0"),
    "weights that are none": (NanWeights(), "NanWeights.hidden_weights gives weights in layer 0 that are not finite"),
    "notice": (Notice(), "Notice.notice gives 5; give a sentence, or None"),
    "arrays of slots": (JaxSlots(), "JaxSlots.capacities gives .* slots in layer 0; give whole numbers"),
    "nothing chosen": (NothingChosen(), "NothingChosen.shares_layers is true; write NothingChosen.weigh"),
    "ragged": (Ragged(), "Ragged.budgets gives lists of unequal lengths; give .B, H. numbers"),
    "no size": (NoSize(), "NoSize.size gives None in layer 0; give whole numbers of tokens"),
    "an array": (Unhashable(table=np.zeros(3)), "Unhashable.table holds a ndarray"),
}
AFTER = {
    "few slots": (FewSlotsUnplanned(), r"FewSlotsUnplanned.capacities gives 32 slots .* and 150 tokens are kept"),
    "beyond": (Beyond(), "Beyond.select keeps what is beyond candidates.length in layer 0, head 0"),
    "too many": (TooMany(), "TooMany.retained has 1024 tokens in layer 0, head 0, and 150 were seen"),
    "nothing retained": (NothingRetained(), r"NothingRetained.retained gives None; give \[B, H\] whole numbers"),
    "retained of one head": (OneHeadRetained(), r"OneHeadRetained.retained gives .*; give \[B, H\] whole numbers"),
    "retained below 0": (Below(), "Below.retained gives -5 in layer 0, head 0; give the slots that hold a token"),
    "scores that are none": (NanScores(), "NanScores.scores gives scores in layer 0, head 0 that are no numbers"),
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
        (NoScore(), r"NoScore\.scores gives None; give numbers of the shape"),
        (Unwritten(), r"Unwritten has no scores; write the method, or select"),
        (Numbers(), r"Numbers\.select gives a mask of int32 numbers of shape .*; give booleans of the shape"),
        (NoMask(), r"NoMask\.select gives a mask of None; give booleans of the shape"),
        (AllProtected(), r"AllProtected\.protected gives None; give booleans of the shape"),
        (NothingCompressed(), r"NothingCompressed\.compress gives None; give the layer's cache"),
        (NothingDue(), r"NothingDue\.due gives None; give \[B\] booleans, 1 here"),
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


def test_what_decoding_leaves_is_not_put_down_to_the_choice_of_a_prompt(tiny_model):
    policy = TwoAppended(window=500)
    with pytest.raises(kvjax.UsageError, match=r"TwoAppended\.append has 46 tokens .*, and 43 were seen"):
        kvjax.generate(tiny_model, PROMPT[:40], policy=policy, max_new_tokens=4)


def test_a_cache_that_a_policy_within_another_forgets_is_missed(tiny_model):
    outer = kvjax.RazorAttention(inner=NothingCompressed(), heads=((0, 0),))
    with pytest.raises(kvjax.UsageError, match=r"NothingCompressed\.compress gives None; give the layer's cache"):
        kvjax.generate(tiny_model, PROMPT, policy=outer, max_new_tokens=4)


def test_slots_that_a_later_turn_does_not_find_are_refused(tiny_model):
    cache = kvjax.generate(tiny_model, "hello", policy=NothingSorted(), max_new_tokens=1).cache
    with pytest.raises(kvjax.UsageError, match=r"NothingSorted\.sort_slots gives a cache of another structure"):
        kvjax.generate(tiny_model, "there", cache=cache, max_new_tokens=1)


@pytest.mark.parametrize(("policy", "says"), BEFORE.values(), ids=BEFORE.keys())
def test_what_is_seen_before_anything_runs(tiny_model, monkeypatch, policy, says):
    monkeypatch.setattr("kvjax.runtime.prefill_batches.read_prompts", lambda *_, **__: pytest.fail("something ran"))
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
    [(policy, says) for policy, says in BEFORE.values() if not isinstance(policy, (FewSlots, NothingChosen))],
    ids=[name for name in BEFORE if name not in ("few slots", "nothing chosen")],
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

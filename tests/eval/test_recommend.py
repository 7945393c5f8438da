"""Passages of a user's texts with their needles, and the choice among caches that were measured."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import tiny_model

import kvjax
from kvjax.cache.quantisation import parse_storage
from kvjax.errors import UsageError
from kvjax.eval.entries import entries
from kvjax.eval.recommend import passages
from kvjax.eval.recommend.choice import Goal, choose, figure, report, sentence
from kvjax.eval.recommend.measure import Measured, Request, measure, within
from kvjax.eval.recommend.passages import CONTINUATION, make_passages, read_texts

LM = tiny_model(max_position=1024)
TEXT = " ".join(f"The {word} of chapter {i} is green. It grows." for i, word in enumerate(["river", "hill"] * 80))


@settings(max_examples=15, deadline=None)
@given(st.integers(500, 900), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**31))
def test_passages_hold_their_needles_and_are_followed_by_the_text(tokens, count, needles, seed):
    made = make_passages(LM, [TEXT, TEXT[::-1]], tokens=tokens, passages=count, needles=needles, seed=seed)
    assert len(made) == count
    stream = (TEXT + TEXT[::-1]).replace("\n", "")
    for passage in made:
        assert tokens - 120 < len(passage.context) <= tokens and len(passage.continuation) == CONTINUATION
        text = LM.tokenizer.decode(passage.context)
        assert len(passage.questions) == len(passage.outputs) == needles
        for question, value in zip(passage.questions, passage.outputs, strict=True):
            asked = LM.tokenizer.decode(question)
            key = asked.partition("number for ")[2].partition(" mentioned")[0]
            assert f"One of the special magic numbers for {key} is: {value}." in text
            assert asked.endswith(f"The special magic number for {key} mentioned in the provided text is")
        rest = LM.tokenizer.decode(passage.continuation)
        if rest in stream:  # it crosses no border of two texts: the passage ends where it begins
            assert re.sub(r"One of the special magic numbers for \S+ is: \d{7}\. ", "", text)[-10:] + rest in stream


def test_the_same_seed_gives_the_same_passages():
    make = lambda seed: make_passages(LM, [TEXT], tokens=500, passages=2, needles=2, seed=seed)  # noqa: E731
    assert make(1) == make(1) and make(1) != make(2)


def test_texts_that_are_none(tmp_path):
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.md").write_text("more words")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    os.mkfifo(tmp_path / "pipe")  # reading it would not end
    assert read_texts([tmp_path]) == ["words", "more words"]
    assert read_texts([tmp_path], without=[tmp_path / "deep" / "." / "b.md"]) == ["words"]
    with pytest.raises(UsageError, match=r"picture\.png is no UTF-8 text"):
        read_texts([tmp_path / "picture.png"])
    with pytest.raises(UsageError, match="names nothing that is there"):
        read_texts([tmp_path / "missing"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="There is no text in"):
        read_texts([tmp_path / "empty"])
    with pytest.raises(UsageError, match="tokens, and 9 passages need"):
        make_passages(LM, ["short"], tokens=500, passages=9, needles=1, seed=0)
    with pytest.raises(UsageError, match="leave no room for text"):
        make_passages(LM, [TEXT], tokens=100, passages=1, needles=1, seed=0)


def test_a_file_without_end_is_read_in_part(tmp_path, monkeypatch):
    monkeypatch.setattr(passages, "_MOST_CHARACTERS", 101)
    (tmp_path / "a.txt").write_text("é" * 80)
    assert read_texts([tmp_path / "a.txt"]) == ["é" * 50]
    with pytest.raises(UsageError, match="zero is no UTF-8 text"):
        read_texts([Path("/dev/zero")])
    (tmp_path / "b.txt").write_bytes("é".encode()[:1])
    with pytest.raises(UsageError, match="is no UTF-8 text"):
        read_texts([tmp_path / "b.txt"])


def row(policy: str, size: int, found: float, loss: float, refused: str | None = None) -> Measured:
    return Measured(policy, size, (found,), (loss,), refused)


ROWS = [
    row("full", 1000, 1.0, 2.0),
    row("keydiff:ratio=0.5", 500, 1.0, 2.01),
    row("keydiff:ratio=0.25", 250, 0.5, 2.015),
    row("lagkv:ratio=0.25", 260, 0.95, 2.019),
    row("snapkv:ratio=0.25", 240, 0.0, 2.5),
    Measured("razor:ratio=0.1", refused="It protects too much."),
]


def test_a_cache_no_smaller_than_the_full_one_is_none_to_recommend():
    rows = [row("full", 1000, 1.0, 2.0), row("keydiff:ratio=1.0", 1000, 1.0, 2.0), row("tova", 1020, 1.0, 2.0)]
    assert choose(rows, Goal(loss=1.0)) is None and "keep the full one" in sentence(rows, Goal(loss=1.0))


def test_a_budget_is_filled_as_far_as_fractions_go():
    from kvjax.cli.recommend import _within
    from kvjax.eval.entries import Entry
    from kvjax.eval.recommend.measure import Request, cache_bytes

    asked = Request(900, 1, parse_storage("model"))
    most = cache_bytes(LM, kvjax.policies.parse("keydiff:ratio=0.9"), asked)
    for typed, wanted in ((None, 0.9), ([0.5, 0.25], 0.5)):
        assert _within(LM, [Entry("keydiff", 0.5)], asked, most, typed) == [Entry("keydiff", wanted)]


def test_a_model_that_finds_no_needle_is_said_to_leave_the_choice_to_its_loss():
    rows = [Measured("full", 100, (0.0, 0.0), (1.0,)), Measured("lagkv:ratio=0.5", 50, (0.0, 0.0), (1.0,))]
    assert "so the loss alone decided" in sentence(rows, Goal(loss=0.1)) and choose(rows, Goal(loss=0.1)) is rows[1]
    found = [Measured(row.policy, row.cache_bytes, (1.0, 0.0), row.losses) for row in rows]
    assert "alone" not in sentence(found, Goal(loss=0.1))


@pytest.mark.parametrize(
    ("goal", "wanted"),
    [
        (Goal(), "lagkv:ratio=0.25"),
        (Goal(loss=0.005), "keydiff:ratio=0.5"),
        (Goal(loss=0.001), None),
        (Goal(budget=2000), "full"),
        (Goal(budget=500), "keydiff:ratio=0.5"),
        (Goal(budget=260), "lagkv:ratio=0.25"),
        (Goal(budget=250), "keydiff:ratio=0.25"),
        (Goal(budget=100), None),
    ],
)
def test_the_choice(goal, wanted):
    found = choose(ROWS, goal)
    assert (found and found.policy) == wanted
    said = sentence(ROWS, goal)
    assert f"--policy {wanted}" in said if wanted else "cache that was measured" in said
    made = report(ROWS, goal, ["facts"], "p.png")
    assert made.data["recommended"] == wanted and "It protects too much." in made.markdown()
    left, right, _ = figure(ROWS, goal, 1024, 32000).axes
    for axes in (left, right):
        assert axes.get_title() == "passages of at most 1,024 tokens"
        assert "prompts of 32,000 tokens" in axes.get_xlabel()


def test_a_budget_takes_the_largest_fraction_that_fits():
    request = Request(900, 2, parse_storage(None))
    plan = lambda policy: kvjax.plan(LM, prompt_tokens=900, batch=2, policy=policy, max_new_tokens=1)  # noqa: E731
    budget = plan("keydiff:ratio=0.25").cache_bytes
    assert budget < plan("keydiff:ratio=0.5").cache_bytes
    found = within(LM, entries("keydiff;streamingllm:ratio=0.9", [0.5]), request, budget, [0.5, 0.25, 0.125])
    assert [(one.name, one.retained) for one in found] == [
        ("full", None), ("keydiff", 0.25), ("streamingllm:ratio=0.9", None),
    ]  # fmt: skip


def test_a_budget_below_every_cache_is_said_before_anything_is_measured():
    request = Request(900, 1, parse_storage(None))
    least = kvjax.plan(LM, prompt_tokens=900, policy="keydiff:ratio=0.125", max_new_tokens=1).cache_bytes
    given = LM, entries("keydiff", [0.5]), request
    assert [one.retained for one in within(*given, least, [0.5, 0.125])] == [None, 0.125]
    with pytest.raises(UsageError, match=r"No cache of 900 tokens .*; the smallest, keydiff:ratio=0.125, takes "):
        within(*given, least - 1, [0.5, 0.125])


@pytest.mark.slow
def test_what_is_measured_is_what_the_library_gives():
    """Loss and needles of a entry by the public functions, and a row that was measured before is kept."""
    made = make_passages(LM, [TEXT], tokens=400, passages=2, needles=1, seed=3)
    wanted = entries("keydiff;kvzip", [0.5])
    request, saved = Request(400, 1, parse_storage(None)), []
    rows = measure(LM, made, wanted, request, save=lambda found: saved.append(list(found)))
    policies = ["full", "keydiff:ratio=0.5", "kvzip:ratio=0.5"]  # the last of which reads the model, and no record
    assert [row.policy for row in rows] == policies and [len(found) for found in saved] == [1, 2, 3]
    for row, policy in zip(rows, policies, strict=True):
        for i, passage in enumerate(made):
            cache = kvjax.generate(LM, passage.context, policy=policy, max_new_tokens=0, chat=False).cache
            scored = kvjax.score(LM, passage.continuation[:1], passage.continuation[1:], cache=cache, chat=False)
            np.testing.assert_allclose(row.losses[i], -np.mean(scored.logprobs), rtol=1e-4)
        assert row.cache_bytes == kvjax.plan(LM, prompt_tokens=400, policy=policy, max_new_tokens=1).cache_bytes
        assert set(row.found) <= {0.0, 1.0} and len(row.found) == 2
    kept = [Measured(policy, 1, (1.0,), (1.0,)) for policy in policies]
    assert measure(LM, made, wanted, request, done=kept) == kept


def test_a_caution_is_said_and_only_a_useless_policy_is_refused():
    """KVzip repeats more than the model knows, and is measured; LagKV chooses nothing at the length, and is not."""
    made = make_passages(LM, [TEXT], tokens=400, passages=1, needles=1, seed=3)
    rows = measure(LM, made, entries("kvzip;lagkv", [0.25]), Request(1000, 1, parse_storage(None)))
    full, kvzip, lagkv = rows
    assert full.notice is None and kvzip.refused is None and kvzip.losses
    assert str(kvzip.notice).startswith("KVzip repeats 1,000 tokens behind themselves")
    assert str(lagkv.refused).startswith("LagKV keeps none of the") and not lagkv.losses
    assert f"kvzip:ratio=0.25: {kvzip.notice}" in report(rows, Goal(), [], None).markdown()
    assert "within 1% of the full cache's loss" in sentence([full, lagkv], Goal())


def test_keys_are_words_of_the_text():
    from kvjax.eval.recommend.passages import _keys

    assert set(_keys("a cat saw Elephants and elephants in rivers", 2, random.Random(0))) == {"elephants", "rivers"}
    assert _keys("", 2, random.Random(0)) == ["number-0", "number-1"]

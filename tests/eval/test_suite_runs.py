"""Runs of a suite on a toy model: answers, and runs that are gone on with."""

from __future__ import annotations

import dataclasses

import pytest
import toys
from support.suite_runs import CACHES, ITEMS, SETTINGS, answer, journal_at, question, without_times

import kvjax
from kvjax import progress
from kvjax.errors import UsageError
from kvjax.eval.entries import Entry
from kvjax.eval.suites import estimate
from kvjax.eval.suites.item import Item
from kvjax.eval.suites.journal import Journal
from kvjax.eval.suites.prompts import Prepared, prepare
from kvjax.eval.suites.runner import AFTER, IN_VIEW, Runner, batches, digest
from kvjax.policies import AdaptiveHeads, Full, KVzip


@pytest.fixture(scope="module")
def lm():
    """The toy model; compiled programs, which a long run lets go of, serve the next test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jax.clear_caches", lambda: None)
        yield toys.tiny_model()


def run(lm, path, mode=AFTER, stop_at=None):
    """A run that ends with Ctrl-C once it has kept ``stop_at`` answers of this start."""
    journal = Journal(path, dataclasses.replace(SETTINGS, mode=mode))
    runner = Runner(lm, ITEMS, journal)
    journal.begin(digest(ITEMS))
    kept, add = [], journal.add

    def counted(one):
        if len(kept) == stop_at:
            raise KeyboardInterrupt
        add(one)
        kept.append(one)

    journal.add = counted
    try:
        runner.run(CACHES)
    finally:
        journal.close()
    assert not runner.refused
    return journal


@pytest.fixture(scope="module")
def whole(lm, tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "answers.jsonl"
    run(lm, path)
    return path


def test_answers_under_another_profile_are_forgotten_and_replaced(tmp_path):
    path = tmp_path / "answers.jsonl"
    journal = journal_at(path)
    journal.add(answer(ITEMS[0]))
    journal.add(dataclasses.replace(answer(ITEMS[0], "learned"), profile="old"))
    journal.close()
    again = journal_at(path)
    again.forget_others({("full", None): "", ("learned", 0.5): "new"})
    assert [one.policy for one in again.answers.values()] == ["full"]
    again.add(dataclasses.replace(answer(ITEMS[0], "learned", "blue"), profile="new"))
    again.close()
    last = journal_at(path)
    last.forget_others({("learned", 0.5): "new"})
    assert [one.text for one in last.answers.values()] == ["red", "blue"]
    last.close()


def test_a_run_goes_on_with_answers_of_its_weights_and_profiles_alone(lm, tmp_path):
    path = tmp_path / "answers.jsonl"
    first = Runner(lm, ITEMS, (journal := Journal(path, SETTINGS)))
    first.begin(CACHES)
    journal.add(answer(ITEMS[0]))
    journal.add(dataclasses.replace(answer(ITEMS[1]), profile="another's"))
    journal.close()
    again = Runner(lm, ITEMS, (journal := Journal(path, SETTINGS)))
    again.begin(CACHES)
    assert [one.item for one in journal.answers.values()] == [ITEMS[0].id]
    journal.close()
    with pytest.raises(UsageError, match="the answers of one report share their settings"):
        Runner(toys.tiny_model(seed=9), ITEMS, Journal(path, SETTINGS)).begin(CACHES)


def test_every_question_is_answered_by_every_cache(whole, lm):
    rows = without_times(whole)[1:]
    assert {(row["policy"], row["item"]) for row in rows} == {(c.name, i.id) for c in CACHES for i in ITEMS}
    assert all(row["tokens"] <= 3 and 0 < row["live_bytes"] <= row["allocated_bytes"] for row in rows)
    for row in rows:
        assert (row["live_bytes"] == row["full_bytes"]) == (row["policy"] == "full")


def test_answers_are_those_of_generate(whole, lm):
    rows = {(row["policy"], row["item"]): row for row in without_times(whole)[1:]}
    one = prepare(lm, ITEMS[2])
    for policy in ("full", "streamingllm:ratio=0.5"):
        cache = kvjax.read(lm, one.context, policy=policy)
        text = kvjax.generate(lm, one.question, cache=cache, max_new_tokens=3).text
        assert rows[policy.split(":")[0], "a/2"]["text"] == text


@pytest.mark.parametrize("stop_at", range(10))
def test_a_run_killed_at_any_row_ends_as_one_that_was_not(whole, lm, tmp_path, stop_at):
    path = tmp_path / "answers.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(lm, path, stop_at=stop_at)
    assert len(without_times(path)) == 1 + stop_at
    run(lm, path)
    assert without_times(path) == without_times(whole)


def test_progress_counts_what_is_asked_for_now(lm, tmp_path):
    path, events = tmp_path / "answers.jsonl", []
    with pytest.raises(KeyboardInterrupt):
        run(lm, path, stop_at=4)
    with progress.showing(events.append):
        run(lm, path)
    told = [event for event in events if event.stage == "job"]
    assert (told[0].done, told[0].total, told[-1].done, told[-1].finished) == (0, 6, 6, True)
    assert "streamingllm at 0.5" in str(told[-1])


def test_the_time_is_estimated(lm, monkeypatch):
    rows = batches([prepare(lm, item) for item in ITEMS], 2)
    one = estimate.seconds(lm, rows, [Full()])
    assert 0 < one < 60 and estimate.seconds(lm, rows, [Full()] * 1000) > 100 * one
    # A policy that has the contexts repeated reads them twice, once more with all before, and the questions once.
    monkeypatch.setattr(estimate, "_speeds", lambda dtype: (1e9, 1e12))
    once, twice = (estimate.seconds(lm, rows, [policy]) for policy in (Full(), AdaptiveHeads(inner=KVzip())))
    assert 1.6 * once < twice < 2.2 * once
    # What questions share is read once.
    talks = [Item(f"{n}", "a", "The stone is red. " * 9, "What?", ("x",), "F1", 0, shares="s") for n in range(3)]
    contexts, onto = estimate.readings(batches([prepare(lm, item) for item in talks], 2))
    assert [one.rows for one in contexts] == [1] and len(onto) == 3 and onto[2].seen == contexts[0].tokens
    apart = [dataclasses.replace(item, shares="") for item in talks]
    contexts, onto = estimate.readings(batches([prepare(lm, item) for item in apart], 2))
    assert [one.rows for one in onto] == [2, 1] and [one.rows for one in contexts] == [2], "one context, read by two"
    chosen = [dataclasses.replace(item, choices=("a", "bcd"), earlier=(("So?", "No."),) * 2) for item in apart[:1]]
    contexts, onto = estimate.readings(batches([prepare(lm, item) for item in chosen], 2))
    prepared = prepare(lm, chosen[0])
    assert [one.rows for one in onto] == [1, 1, 2] and onto[2].tokens == len(prepared.question) + 3
    assert onto[2].seen == prepared.tokens - len(prepared.question)
    assert [estimate.in_words(seconds) for seconds in (0.1, 80, 600, 9000)] == ["1 s", "80 s", "10 min", "2.5 h"]


def test_in_view_is_another_run(whole, lm, tmp_path):
    path = tmp_path / "answers.jsonl"
    run(lm, path, mode=IN_VIEW)
    with pytest.raises(UsageError, match="mode in view, and after is asked for"):
        Journal(path, SETTINGS)
    found = {(row["policy"], row["item"]): row for row in without_times(path)[1:]}
    after = {(row["policy"], row["item"]): row for row in without_times(whole)[1:]}
    assert all(found[key]["text"] == after[key]["text"] for key in found if key[0] == "full")
    assert found["streamingllm", "a/0"]["live_bytes"] != after["streamingllm", "a/0"]["live_bytes"]


def test_batches_are_of_one_answer_length():
    rows = [
        Prepared(dataclasses.replace(question(n), max_new_tokens=room), [1] * length, [1])
        for n, (room, length) in enumerate([(3, 9), (5, 1), (3, 2), (3, 4), (5, 7)])
    ]
    found = [[(one.item.max_new_tokens, one.tokens) for one in batch] for batch in batches(rows, 2)]
    assert found == [[(3, 3), (3, 5)], [(3, 10)], [(5, 2), (5, 8)]]
    assert batches(rows[::-1], 2) == batches(rows, 2)


def test_what_a_policy_refuses_stands_in_the_report(lm, tmp_path):
    journal = Journal(tmp_path / "answers.jsonl", SETTINGS)
    runner = Runner(lm, ITEMS[:1], journal)
    journal.begin("x")
    runner.run([Entry("full"), Entry("alisa:ratio=0.5,layers=3")])
    journal.close()
    assert len(journal.answers) == 1 and len(runner.refused) == 1


def test_a_batch_that_does_not_fit_is_asked_by_halves(lm, tmp_path, monkeypatch):
    from kvjax.errors import DoesNotFit
    from kvjax.eval.suites import asker as module

    real, sizes = module.generate, []

    def small(lm, prompts, **options):
        sizes.append(len(prompts))
        if len(prompts) > 1:
            raise DoesNotFit("too much")
        return real(lm, prompts, **options)

    monkeypatch.setattr(module, "generate", small)
    path = tmp_path / "answers.jsonl"
    journal = Journal(path, SETTINGS)
    runner = Runner(lm, ITEMS[:2], journal)
    journal.begin("x")
    runner.run(CACHES[:1])
    journal.close()
    assert sizes == [2, 1, 1, 1, 1] and len(journal.answers) == 2


def test_an_answer_that_ctrl_c_cut_off_is_not_kept(lm, tmp_path, monkeypatch):
    from kvjax.eval.suites import asker as module

    real = module.generate

    def cut_off(lm, prompts, **options):
        found = real(lm, prompts, **options)
        return [
            dataclasses.replace(one, finish_reason="interrupted") if options["max_new_tokens"] else one for one in found
        ]

    monkeypatch.setattr(module, "generate", cut_off)
    with pytest.raises(KeyboardInterrupt):
        run(lm, tmp_path / "answers.jsonl")
    assert len(without_times(tmp_path / "answers.jsonl")) == 1

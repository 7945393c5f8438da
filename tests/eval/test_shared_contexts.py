"""Several questions about one context, as turns of a dialogue and as requests of their own, on a toy model."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
import toys
from support.suite_runs import CACHES, SETTINGS, without_times

import kvjax
from kvjax.errors import UsageError
from kvjax.eval.suites import asker
from kvjax.eval.suites.item import Item
from kvjax.eval.suites.journal import Journal
from kvjax.eval.suites.metrics import score
from kvjax.eval.suites.prompts import prepare
from kvjax.eval.suites.runner import AFTER, IN_VIEW, Runner, batches, digest

CONTEXTS = ["The stone is red. The river is blue. ", "The cloud is white and the garden is wide. ", "It is late. "]
TURNS = [("What is red?", "the stone"), ("What is blue?", "the river"), ("And then?", "nothing")]


def dialogue(number: int, requests: bool = False, turns: int = 3) -> list[Item]:
    return [
        Item(
            f"{number}/{turn}", "a", CONTEXTS[number], TURNS[turn][0], (TURNS[turn][1],), "string_match_all", 3,
            earlier=() if requests else tuple(TURNS[:turn]), shares=f"dialogue {number}",
        )
        for turn in range(turns)
    ]  # fmt: skip


DIALOGUES = [item for number in range(3) for item in dialogue(number)]
REQUESTS = [item for number in range(3) for item in dialogue(number, requests=True)]
CHOICES = [
    Item(f"{n}/c", "c", CONTEXTS[n], "It is", (str(n % 2),), "accuracy", 0, choices=(" red", " blue one"))
    for n in (0, 1)
]


@pytest.fixture(scope="module")
def lm():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jax.clear_caches", lambda: None)
        yield toys.tiny_model()


def run(lm, path, items, mode=AFTER, stop_at=None):
    journal = Journal(path, dataclasses.replace(SETTINGS, mode=mode))
    runner = Runner(lm, items, journal)
    journal.begin(digest(items))
    add, kept = journal.add, []

    def counted(one):
        if len(kept) == stop_at:
            raise KeyboardInterrupt
        kept.append(one)
        add(one)

    journal.add = counted
    try:
        runner.run(CACHES)
    finally:
        journal.close()
    assert not runner.refused and not runner._asker._held, "no cache is held after a run"
    return {(row["policy"], row["item"]): row for row in without_times(path)[1:]}


def calls(monkeypatch):
    """The prompts of every call of ``generate``, with whether it read alone."""
    made, real = [], asker.generate

    def noted(lm, prompts, **options):
        made.append((len(prompts), options["max_new_tokens"], "policy" in options))
        return real(lm, prompts, **options)

    monkeypatch.setattr(asker, "generate", noted)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("items", [DIALOGUES, REQUESTS], ids=["dialogues", "requests"])
def test_a_context_is_compressed_once(lm, tmp_path, monkeypatch, items):
    made = calls(monkeypatch)
    rows = run(lm, tmp_path / "answers.jsonl", items)
    assert len(rows) == 2 * 9
    fresh = [rows for rows, _, compresses in made if compresses]
    assert fresh == [2, 1] * 2, "two batches of contexts, of each of two caches"
    for row in rows.values():
        first = row["item"].endswith("/0")
        assert (row["read_tokens"] == row["prompt_tokens"]) == first, "what is shared is read with the first question"


@pytest.mark.parametrize("policy", ["full", "streamingllm"])
def test_turns_are_those_of_a_conversation(lm, tmp_path, policy):
    rows = run(lm, tmp_path / "answers.jsonl", DIALOGUES)
    kind = "full" if policy == "full" else "streamingllm:ratio=0.5"
    last = prepare(lm, DIALOGUES[2])
    cache = kvjax.read(lm, last.context, policy=kind)
    for piece in last.earlier:
        cache = kvjax.generate(lm, piece, cache=cache, max_new_tokens=0).cache
    output = kvjax.generate(lm, last.question, cache=cache, max_new_tokens=3)
    row = rows[policy, "0/2"]
    assert row["text"] == output.text and row["live_bytes"] == output.stats.live_cache_bytes
    whole = lm.tokenizer.decode(
        [*last.context, *itertools.chain(*last.earlier), *last.question], skip_special_tokens=False
    )
    for said in (CONTEXTS[0].strip(), *(words for turn in TURNS[:2] for words in turn), TURNS[2][0]):
        assert said in whole
    assert whole.count("<|start|>assistant") == 3


def test_requests_know_nothing_of_each_other(lm, tmp_path):
    together = run(lm, tmp_path / "together.jsonl", REQUESTS)
    alone = run(lm, tmp_path / "alone.jsonl", [one for one in REQUESTS if one.id.endswith("/2")])
    for key, row in alone.items():
        assert row["text"] == together[key]["text"] and row["live_bytes"] == together[key]["live_bytes"]


@pytest.mark.parametrize("stop_at", [2, 7, 10])
def test_a_dialogue_killed_in_any_turn_ends_as_one_that_was_not(lm, tmp_path, stop_at):
    items = DIALOGUES[:6]
    whole = run(lm, tmp_path / "whole.jsonl", items)
    with pytest.raises(KeyboardInterrupt):
        run(lm, tmp_path / "cut.jsonl", items, stop_at=stop_at)
    again = run(lm, tmp_path / "cut.jsonl", items)
    plain = [{name: value for name, value in row.items() if name != "read_tokens"} for row in whole.values()]
    assert plain == [{name: value for name, value in row.items() if name != "read_tokens"} for row in again.values()]


def test_in_view_the_first_question_is_part_of_what_is_compressed(lm, tmp_path):
    rows = run(lm, tmp_path / "answers.jsonl", DIALOGUES[:3], mode=IN_VIEW)
    one = prepare(lm, DIALOGUES[1])
    cache = kvjax.read(lm, one.context + one.earlier[0], policy="streamingllm:ratio=0.5")
    assert rows["streamingllm", "0/1"]["text"] == kvjax.generate(lm, one.question, cache=cache, max_new_tokens=3).text
    after = run(lm, tmp_path / "after.jsonl", DIALOGUES[:3])
    assert all(rows["full", f"0/{turn}"]["text"] == after["full", f"0/{turn}"]["text"] for turn in range(3))


@pytest.mark.parametrize("mode", [AFTER, IN_VIEW])
def test_choices_are_scored_as_by_score(lm, tmp_path, mode):
    rows = run(lm, tmp_path / "answers.jsonl", CHOICES, mode=mode)
    for item in CHOICES:
        one = prepare(lm, item)
        one = one.in_view() if mode == IN_VIEW else one
        cache = kvjax.read(lm, one.context, policy="streamingllm:ratio=0.5")
        expected = kvjax.score(lm, one.question, list(one.choices), cache=cache)
        held = json.loads(rows["streamingllm", item.id]["text"])
        assert [found["logprob"] for found in held] == pytest.approx([one.total for one in expected], rel=1e-4)
        assert [found["tokens"] for found in held] == list(map(len, one.choices))
        best = max(range(2), key=lambda place: expected[place].total)
        assert score(rows["streamingllm", item.id]["text"], item) == (str(best) in item.answers)
    assert all(row["tokens"] == 0 and row["live_bytes"] > 0 for row in rows.values())


def test_metrics_of_choices_worked_out_by_hand():
    answer = json.dumps(
        [{"logprob": -2.0, "tokens": 4, "likeliest": 3}, {"logprob": -3.0, "tokens": 2, "likeliest": 0}]
    )
    item = dataclasses.replace(CHOICES[0], answers=("1",), choices=(" ab", " abcdef"))
    assert score(answer, item) == 0 and score(answer, dataclasses.replace(item, answers=("0", "1"))) == 1
    # -2 / 2 characters against -3 / 6.
    assert score(answer, item, "accuracy by length") == 1
    assert score(answer, item, "next tokens") == 0.75
    assert score(answer, item, "mean probability") == pytest.approx(2.718281828 ** (-0.5))


def test_batches_go_through_the_questions_of_some_contexts_together(lm):
    found = batches([prepare(lm, item) for item in DIALOGUES], 2)
    named = [[one.item.id for one in batch] for batch in found]
    # The context of 2 is the shortest, that of 1 the longest.
    assert named == [["2/0", "0/0"], ["2/1", "0/1"], ["2/2", "0/2"], ["1/0"], ["1/1"], ["1/2"]]
    uneven = [*dialogue(0, turns=1), *dialogue(1, turns=2)]
    named = [[one.item.id for one in batch] for batch in batches([prepare(lm, item) for item in uneven], 2)]
    assert named == [["0/0"], ["1/0"], ["1/1"]]


def test_a_plain_model_reads_answers_and_questions_as_text(lm):
    item = dataclasses.replace(DIALOGUES[2], chat=False)
    found = prepare(lm, item)
    decode = lm.tokenizer.decode
    assert decode(found.context) == item.context and decode(found.earlier[0]) == "What is red?"
    assert (
        decode(found.earlier[1]) == "the stone\n\nWhat is blue?" and decode(found.question) == "the river\n\nAnd then?"
    )


def test_a_question_without_words_is_refused(lm):
    with pytest.raises(UsageError, match="has a question or a choice without any token"):
        prepare(lm, dataclasses.replace(CHOICES[0], chat=False, choices=("", "a")))

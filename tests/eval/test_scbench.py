"""SCBench's contexts and questions: drawn at any length, and of files in the benchmark's form."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
import toys

from kvjax.errors import UsageError
from kvjax.eval.suites.data import DataFolder
from kvjax.eval.suites.metrics import score
from kvjax.eval.suites.prompts import prepare
from kvjax.eval.suites.registry import SUITES, asked_of
from kvjax.eval.suites.scbench_draws import DRAWS
from kvjax.eval.suites.scbench_prompts import TASKS

FUNCTIONS = ["def add(a, b):\n    return a + b\n", "def sub(a, b):\n    return a - b\n"]


def asked(question: str, answer: object, **more: object) -> dict[str, object]:
    return {"input": question, "answer": answer, **more}


ROWS = {
    "kv": ("JSON data:\n{...}", [asked('Key: "a"', "1")]),
    "prefix_suffix": ("Dictionary = [ab]", [asked("Prefix: a", "ab")]),
    "vt": ("VAR A = 1", [asked("Find all.", ["A", "B"])] * 2),
    "repoqa": ("code", [asked(f"Function {n}", code, name=str(n)) for n, code in enumerate(FUNCTIONS)]),
    "qa_eng": ("A book.", [asked("Who {x}?", "Anna"), asked("Why?", "So")]),
    "qa_chn": ("书", [asked("谁？", "安娜")]),
    "choice_eng": ("A book.", [asked("Who?", "Eve", options=["Al", "Eve", "Bo", "Jo"])]),
    "many_shot": ("shots", [asked("Which?", "(B)")]),
    "summary": ("A paper.", [asked("Summarise.", "It is.")] * 2),
    "mf": ([3, 1, 2], [asked(f"Say one. The {n} number of the list is: ", 3) for n in ("largest", "smallest")]),
    "summary_with_needles": (
        "p",
        [asked("S", "s", task="scbench_summary"), asked("K", "77", task="scbench_passkey")],
    ),
    "repoqa_and_kv": ("c", [asked("F", FUNCTIONS[0], task="scbench_repoqa"), asked("K", "v", task="scbench_kv")]),
}


@pytest.fixture(scope="module")
def lm():
    return toys.needle_model(max_position=4096)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    (path / "scbench").mkdir()
    for task, (context, turns) in ROWS.items():
        row = {"input" if task == "vt" else "context": context, "multi_turns": turns, "id": 0, "repo": "r", "lang": "x"}
        (path / "scbench" / f"scbench_{task}.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n")
    return DataFolder(path)


def items(lm, data, name, **asked):
    suite = SUITES[name]
    found = suite.items(lm, data, asked_of(suite, data, **asked))
    assert len({item.id for item in found}) == len(found)
    return found


@pytest.mark.parametrize("name", ["scbench", "scbench-requests"])
@pytest.mark.parametrize("task", DRAWS)
def test_drawn_contexts_fill_the_length(lm, name, task):
    found = items(lm, DataFolder(None), name, tasks=(task,), length=1800, limit=2)
    assert len(found) == 2 * 5 and len({item.context for item in found}) == 2
    longest = max(prepare(lm, item).tokens + item.max_new_tokens for item in found)
    assert 1500 < longest <= 1800
    for item in found:
        assert score(" ".join(item.answers), item) == 1 and score("no", item) == 0
        assert all(answer in item.context for answer in item.answers)
    turns = [len(item.earlier) for item in found]
    assert turns == ([0] * 10 if "requests" in name else [0, 1, 2, 3, 4] * 2)


def test_drawn_questions_have_one_answer():
    for seed in range(5):
        context, asked = DRAWS["prefix_suffix"][0](random.Random(seed), 60, 5)
        words = context.removeprefix("Dictionary = [").removesuffix("]").split(", ")
        assert len(words) == 60
        for question, answer in asked:
            start, end = question.split("Prefix: ")[1][:3], question.split("Suffix: ")[1][:3]
            assert [word for word in words if word.startswith(start) and word.endswith(end)] == [answer]
            assert sum(word.startswith(start) for word in words) > 1 and sum(word.endswith(end) for word in words) > 1
        context, asked = DRAWS["mf"][0](random.Random(seed), 30, 5)
        numbers = sorted(json.loads(context))
        assert [int(answer) for _, answer in asked] == [numbers[place] for place in (-1, 0, -2, 1, -3)]
        context, asked = DRAWS["vt"][0](random.Random(seed), 12, 3)
        for question, names in asked:
            value, names_of = question.split("value ")[1].split()[0], []
            for line in context.split("\n"):
                name, _, held = line.removeprefix("VAR ").partition(" = ")
                if line.startswith("VAR") and (held == value or held.removeprefix("VAR ") in names_of):
                    names_of.append(name)
            assert names_of == names


def test_files_are_asked_in_the_benchmarks_words(lm, folder):
    found = {item.id: item for item in items(lm, folder, "scbench", length=3000)}
    assert {item.task.split(":")[0] for item in found.values()} == set(TASKS)
    kv, qa, choice = found["kv/0/0"], found["qa_eng/0/1"], found["choice_eng/0/0"]
    assert kv.context.startswith(
        "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON"
    )
    assert qa.question == "Question: Why?\nAnswer:" and qa.earlier == (("Question: Who {x}?\nAnswer:", "Anna"),)
    assert choice.question.endswith("A. Al\nB. Eve\nC. Bo\nD. Jo\n\nThe the correct answer is")
    assert choice.answers == ("Eve", "B")
    assert found["vt/0/1"].earlier[0][1] == "A, B" and found["vt/0/1"].answers == ("A", "B")
    assert found["repoqa/0/1"].classes == tuple(FUNCTIONS) and found["repoqa/0/1"].max_new_tokens == 1024
    # The numbers' prompt begins with the question of the first turn, which then asks in the benchmark's words alone.
    assert found["mf/0/0"].context == "What is the largest number of the list?\n\n[3, 1, 2]\n\n"
    assert found["mf/0/0"].question.startswith("Say one.") and found["mf/0/1"].question.startswith(
        "What is the smallest"
    )
    assert found["summary/0/1"].answer_prefix == "This paper" and found["summary/0/0"].answer_prefix == ""
    mixed = [found["summary_with_needles/0/0"], found["summary_with_needles/0/1"]]
    assert [(one.task, one.max_new_tokens, one.metric) for one in mixed] == [
        ("summary_with_needles: summary", 800, "ROUGE-Lsum"),
        ("summary_with_needles: passkey", 15, "first digits"),
    ]
    assert found["repoqa_and_kv/0/0"].classes == (FUNCTIONS[0],) and found["repoqa_and_kv/0/1"].classes == ()
    requests = {item.id: item for item in items(lm, folder, "scbench-requests", tasks=("mf", "kv"), length=3000)}
    assert requests["kv/0/0"].context.endswith("{...}") and requests["mf/0/1"].earlier == ()
    assert requests["mf/0/0"].context.startswith("Say one. The largest number of the list is: \n\n[3")


def test_later_choices_without_a_chat_template_have_words_of_their_own(lm, tmp_path):
    (tmp_path / "scbench").mkdir()
    turns = [asked(who, "Eve", options=["Al", "Eve", "Bo", "Jo"]) for who in ("Who?", "And who?")]
    row = {"context": "A book.", "multi_turns": turns}
    (tmp_path / "scbench" / "scbench_choice_eng.jsonl").write_text(json.dumps(row))
    plain = dataclasses.replace(lm, tokenizer=type(lm.tokenizer)(lm.tokenizer._backend))
    first, later = "\nD. Jo\n\nThe the correct answer is", "\nD. Jo\n\nThe letter of the correct answer is"
    for model, name, end in ((plain, "scbench", later), (plain, "scbench-requests", first), (lm, "scbench", first)):
        found = items(model, DataFolder(tmp_path), name, tasks=("choice_eng",), length=3000)
        assert found[0].question.endswith(first) and found[1].question.endswith(end)


def test_a_context_that_exceeds_the_length_loses_its_middle(lm, tmp_path):
    (tmp_path / "scbench").mkdir()
    words = " ".join(f"word{number}" for number in range(900))
    row = {"context": words, "multi_turns": [{"input": "First?", "answer": "word0"}, {"input": "Last?", "answer": "x"}]}
    (tmp_path / "scbench" / "scbench_qa_eng.jsonl").write_text(json.dumps(row))
    found = items(lm, DataFolder(tmp_path), "scbench", tasks=("qa_eng",), length=800)
    assert max(prepare(lm, item).tokens + item.max_new_tokens for item in found) in range(780, 801)
    for item in found:
        assert "word0 " in item.context and "word899" in item.context and "word450" not in item.context
    with pytest.raises(UsageError, match="60 tokens are too few for the questions of qa_eng/0"):
        items(lm, DataFolder(tmp_path), "scbench", tasks=("qa_eng",), length=60)


def test_what_is_missing_is_said_with_what_to_give(monkeypatch, tmp_path, lm):
    def refuse(*args, **kwargs):
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    with pytest.raises(UsageError, match=r"scbench/scbench_repoqa\.jsonl.* or ask --tasks kv,prefix_suffix,vt,mf"):
        asked_of(SUITES["scbench"], DataFolder(None))
    with pytest.raises(UsageError, match="200 tokens are too few for the task kv"):
        items(lm, DataFolder(None), "scbench", tasks=("kv",), length=200)
    (tmp_path / "scbench").mkdir()
    broken = [
        ("kv", {"context": "c", "multi_turns": []}, "row 1 has no context or no questions"),
        ("kv", {"multi_turns": [{"input": "a", "answer": "b"}]}, "row 1 has no context or no questions"),
        ("choice_eng", {"context": "c", "multi_turns": [{"input": "a", "answer": "b"}]}, "four options"),
        ("repoqa_and_kv", {"context": "c", "multi_turns": [{"input": "a", "answer": "b"}]}, "task is one of scbench"),
        ("kv", {"context": "c", "multi_turns": [{"input": 3}]}, "line 1 is no row"),
        ("vt", {"context": "c", "multi_turns": [{"input": "a", "answer": []}]}, "row 1: a question's answer is empty"),
        ("kv", {"context": "c", "multi_turns": [{"input": "a", "answer": " "}]}, "row 1: a question's answer is empty"),
        ("repoqa", {"context": "c", "multi_turns": [{"input": "a", "answer": ["x", ""]}]}, "answer is empty"),
    ]  # fmt: skip
    for task, row, sentence in broken:
        (tmp_path / "scbench" / f"scbench_{task}.jsonl").write_text(json.dumps(row))
        with pytest.raises(UsageError, match=sentence):
            asked_of(SUITES["scbench"], DataFolder(tmp_path), tasks=(task,))


def test_reports_say_of_both_modes_how_questions_are_asked():
    # With the question in view there is no compressed context that all of them share.
    assert "compressed" not in SUITES["scbench-requests"].about

"""Files of benchmarks that are broken or missing are refused before anything is asked, with their place."""

from __future__ import annotations

import json
import sys

import pytest

from kvjax.errors import KvjaxError, UsageError
from kvjax.eval.suites import text_metrics
from kvjax.eval.suites.data import DataFolder
from kvjax.eval.suites.registry import SUITES, asked_of
from kvjax.eval.suites.ruler_suite import WITHOUT_DATA

BROKEN = {
    "longbench/trec.jsonl": (
        b'{"input": "a", "context": "b", "answers": ["c"]}\n{"input": 3}\n',
        "longbench",
        "line 2",
    ),
    "longbench/narrativeqa.jsonl": (
        b'{"input": "a", "context": "b", "answers": []}',
        "longbench",
        "row 1 of narrativeqa has no answers, and cannot be scored",
    ),
    "longbench/lsht.jsonl": (
        b'{"input": "a", "context": "b", "answers": ["c"]}',
        "longbench",
        "row 1 of lsht has no all_classes",
    ),
    "longbench/lcc.jsonl": (b"\n\n{nonsense\n", "longbench", "line 3"),
    "longbench/qasper.jsonl": (b"", "longbench", "holds no rows"),
    "longbench/samsum.jsonl": (b"[1]\n", "longbench", "line 1 is no row of this benchmark: it is no JSON object"),
    "longchat/topics_5.jsonl": (b'{"prompt": "x", "topics": []}', "rounds", "row 1 is no record of topics"),
    "longmemeval/longmemeval_s.json": (b'[{"question_id": "a"}]', "longmemeval", "row 1 is no row"),
    "longbench_v2/data.json": (b'{"a": 1}', "longbench-v2", "is not what it should be"),
    "longmemeval/longmemeval_s_cleaned.json": (b"[]", "longmemeval", "holds no question that is scored"),
    "longbench_v2/data.jsonl": (b'{"domain": "x"}', "longbench-v2", "line 1"),
    "ruler/squad.json": (b"[]", "ruler", "no file of SQuAD 2.0 questions"),
    "ruler/hotpotqa.json": (b"[]", "ruler", "holds no questions"),
}


def test_chinese_words_are_needed_by_metrics_of_words_alone(tmp_path, monkeypatch):
    (tmp_path / "longbench").mkdir()
    for task in ("passage_retrieval_zh", "dureader"):
        row = {"input": "a", "context": "b", "answers": ["段落3"]}
        (tmp_path / "longbench" / f"{task}.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.setitem(sys.modules, "jieba", None)
    monkeypatch.setattr(text_metrics, "_jieba", text_metrics._jieba.__wrapped__)
    asked_of(SUITES["longbench"], DataFolder(tmp_path), tasks=("passage_retrieval_zh",))
    with pytest.raises(KvjaxError, match="the package jieba"):
        asked_of(SUITES["longbench"], DataFolder(tmp_path), tasks=("passage_retrieval_zh", "dureader"))


_SQUAD = '{"data": [{"paragraphs": [{"context": CONTEXT, "qas": [ASKED, ASKED]}]}]}'
_ASKED = '{"question": QUESTION, "is_impossible": false, "answers": ANSWERS}'


@pytest.mark.parametrize(
    ("question", "answers", "context", "sentence"),
    [
        ("null", '[{"text": "t"}]', '"c"', "question 1 lacks its text or an answer"),
        ('"q"', '[{"text": 5}]', '"c"', "question 1 lacks its text or an answer"),
        ('"q"', "[]", '"c"', "question 1 lacks its text or an answer"),
        ('"q"', '[{"text": "t"}]', "5", "holds a document that is no text"),
    ],
)
def test_questions_without_text_are_refused_before_any_is_asked(question, answers, context, sentence, tmp_path):
    asked = _ASKED.replace("QUESTION", question).replace("ANSWERS", answers)
    path = tmp_path / "ruler" / "squad.json"
    path.parent.mkdir()
    path.write_text(_SQUAD.replace("ASKED", asked).replace("CONTEXT", context))
    with pytest.raises(UsageError, match=sentence) as caught:
        asked_of(SUITES["ruler"], DataFolder(tmp_path), tasks=("qa_1",))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("ruler/hotpotqa.json", [{"question": "q", "answer": "a", "context": []}], "question 1 lacks the documents"),
        (
            "scbench/scbench_kv.jsonl",
            {"context": "c", "multi_turns": [{"input": " ", "answer": "a"}]},
            "row 1: a question has no words",
        ),
    ],
)
def test_questions_without_documents_or_words_are_refused_before_any_is_asked(name, content, sentence, tmp_path):
    path = tmp_path / name
    path.parent.mkdir()
    path.write_text(json.dumps(content))
    suite, task = ("ruler", "qa_2") if "ruler" in name else ("scbench", "kv")
    with pytest.raises(UsageError, match=sentence) as caught:
        asked_of(SUITES[suite], DataFolder(tmp_path), tasks=(task,))
    assert str(path) in str(caught.value)


def test_two_questions_of_one_id_are_refused(tmp_path):
    names = ("question_id", "question_type", "question", "answer", "question_date")
    row = dict.fromkeys(names, "multi-session") | {"haystack_dates": [], "haystack_sessions": []}
    path = tmp_path / "longmemeval" / "longmemeval_sample_adit.json"
    path.parent.mkdir()
    path.write_text(json.dumps([row, row]))
    with pytest.raises(UsageError, match="has two questions with the id 'multi-session'"):
        asked_of(SUITES["longmemeval"], DataFolder(tmp_path))


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_named_with_their_line(name, tmp_path):
    content, suite, sentence = BROKEN[name]
    path = tmp_path / name
    path.parent.mkdir()
    path.write_bytes(content)
    task = {"ruler/squad.json": "qa_1", "ruler/hotpotqa.json": "qa_2"}.get(name) or path.stem
    tasks = (task,) if task in SUITES[suite].tasks else ()
    with pytest.raises(UsageError, match=sentence) as caught:
        asked_of(SUITES[suite], DataFolder(tmp_path), tasks=tasks)
    assert str(path) in str(caught.value)


def test_a_list_of_no_questions_is_refused_before_a_model_is_loaded(tmp_path):
    path = tmp_path / "longbench_v2" / "data.json"
    path.parent.mkdir()
    path.write_text("[]")
    with pytest.raises(UsageError, match="holds no rows"):
        asked_of(SUITES["longbench-v2"], DataFolder(tmp_path))


def test_what_is_missing_is_said_with_what_to_give(monkeypatch):
    def refuse(*args, **kwargs):
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    nothing = DataFolder(None)
    with pytest.raises(UsageError, match=f"--tasks {','.join(WITHOUT_DATA)}"):
        asked_of(SUITES["ruler"], nothing)
    asked_of(SUITES["ruler"], nothing, tasks=WITHOUT_DATA)
    with pytest.raises(UsageError, match="Missing: the text of qa_1; give --data DIR with ruler/squad_dev"):
        asked_of(SUITES["ruler"], nothing, tasks=("qa_1",))
    for name in ("passkey", "needle-map"):
        with pytest.raises(UsageError, match="give --data DIR with paulgraham"):
            asked_of(SUITES[name], nothing)
    for name in ("longbench-v2", "longmemeval"):
        with pytest.raises(UsageError, match=r"could .* be downloaded from the hub \(ConnectionError\)"):
            asked_of(SUITES[name], nothing)
    with pytest.raises(UsageError, match=r"longbench/lcc\.jsonl or longbench/minilongbench_237\.jsonl"):
        asked_of(SUITES["longbench"], nothing, tasks=("lcc",))

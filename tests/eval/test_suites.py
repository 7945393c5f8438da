"""Every suite's questions on a toy model: what they hold, that they fit, and what is refused before a model loads."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import toys
from support.benchmarks import LONGBENCH, chats, write_benchmarks

from kvjax.errors import UsageError
from kvjax.eval.suites import data as data_files
from kvjax.eval.suites import longbench, longmemeval_files
from kvjax.eval.suites.data import DataFolder
from kvjax.eval.suites.item import Asked, Item, limited
from kvjax.eval.suites.longbench_prompts import TASKS
from kvjax.eval.suites.metrics import score
from kvjax.eval.suites.passkey import spaced
from kvjax.eval.suites.prompts import prepare
from kvjax.eval.suites.registry import SUITES, asked_of, find_suite

SHARED = Path(os.environ.get("KVJAX_EVAL_DATA", "/nowhere"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return DataFolder(write_benchmarks(tmp_path_factory.mktemp("data")))


@pytest.fixture(scope="module")
def lm():
    return toys.needle_model(max_position=4096)


def items(lm, folder, name, **asked):
    suite = find_suite(name)
    return suite.items(lm, folder, asked_of(suite, folder, **asked))


def fits(lm, found, length):
    assert len({item.id for item in found}) == len(found)
    for item in found:
        assert prepare(lm, item).tokens + item.max_new_tokens <= length


def test_ruler_has_thirteen_tasks(lm, folder):
    found = items(lm, folder, "ruler", length=1800, limit=1)
    fits(lm, found, 1800)
    assert [item.task for item in found] == list(SUITES["ruler"].tasks) and len(found) == 13
    for item in found:
        assert item.context.endswith("\n") and item.question[:4] in ("What", "Ques", "Answ")
    assert {item.metric for item in found if item.task in ("qa_1", "qa_2")} == {"string_match_part"}


def test_pass_keys_at_every_length_and_depth(lm, folder):
    found = items(lm, folder, "passkey", length=1500, quick=True, limit=2)
    fits(lm, found, 1500)
    assert len(found) == 2 * 3 * 2
    keys = set()
    for item in found:
        (key,) = item.answers
        keys.add(key)
        needle = f"The pass key is {key}. Remember it. {key} is the pass key."
        assert re.fullmatch(r"\d{64}", key) and item.context.count(needle) == 1
        before = item.context.split("important information there.\n")[1].split(needle)[0].split()
        count, depth = item.cell
        assert len(before) == int(count * depth / 100)
        assert len(item.context.split(needle)[1].split()) == count - len(before)
    assert len(keys) == len(found), "every prompt has a key of its own"


def test_lengths_without_room_are_one_sentence(lm, folder):
    for name, length in (("passkey", 300), ("needle-map", 100), ("longbench", 40), ("longmemeval", 120)):
        with pytest.raises(UsageError, match=r"too few|no room") as caught:
            items(lm, folder, name, length=length, tasks=("trec",) if name == "longbench" else ())
        assert "too few" not in str(caught.value) or str(caught.value).startswith(f"{length} tokens")


def test_the_whole_grid_is_the_benchmarks():
    assert spaced(512, 20480, 10) == [512, 2730, 4949, 7168, 9386, 11605, 13824, 16042, 18261, 20480]
    assert spaced(0, 100, 3) == [0, 50, 100] and spaced(5, 5, 4) == spaced(2, 5, 1) == [5]


def test_needles_of_the_map_stand_at_their_depth(lm, folder):
    from kvjax.eval.suites.needle_map import NEEDLE

    found = items(lm, folder, "needle-map", length=1200)
    fits(lm, found, 1200)
    assert len(found) == 8 * 11
    with pytest.raises(UsageError, match="at least") as caught:
        items(lm, folder, "needle-map", length=100)
    least = re.search(r"at least (\d+)", str(caught.value))
    few = items(lm, folder, "needle-map", length=int(least[1]) + 3)
    assert len({item.id for item in few}) == len(few) < 8 * 11, "lengths so close to each other are fewer"
    with pytest.raises(UsageError, match="asks one question a cell; leave it out"):
        items(lm, folder, "needle-map", length=1200, limit=2)
    for item in found:
        length, depth = item.cell
        before, after = item.context.split("<book> ")[1].split(" </book>")[0].split(NEEDLE)
        share = len(lm.tokenizer.encode(before)) / len(lm.tokenizer.encode(before + after))
        assert share == pytest.approx(depth / 100, abs=0.05)
        used = prepare(lm, item).tokens + item.max_new_tokens
        assert length - 40 < used <= length


def test_longbench_has_the_benchmarks_prompts(lm, folder):
    found = items(lm, folder, "longbench", tasks=("hotpotqa", "trec"), length=1000)
    fits(lm, found, 1000)
    first, second, third = found
    assert first.context == TASKS["hotpotqa"].prompt.partition("{context}")[0] + LONGBENCH["hotpotqa"][0]["context"]
    assert first.question.endswith("Question: Who keeps the key?\nAnswer:") and first.chat and first.metric == "F1"
    assert second.answers == ("far", "away") and len(second.context) < len(LONGBENCH["hotpotqa"][1]["context"])
    assert third.classes == ("Human", "Human being", "Entity") and not third.chat and third.groups == ("few-shot",)
    assert len(items(lm, folder, "longbench", tasks=("hotpotqa",), length=1000, limit=1)) == 1


def test_a_set_without_a_template_fills_its_length(lm, tmp_path):
    (tmp_path / "longbench").mkdir()
    row = LONGBENCH["trec"][0] | {"context": LONGBENCH["trec"][0]["context"] * 40}
    (tmp_path / "longbench/trec.jsonl").write_text(json.dumps(row))
    (item,) = items(lm, DataFolder(tmp_path), "longbench", tasks=("trec",), length=1000)
    assert 1000 - 4 <= prepare(lm, item).tokens + item.max_new_tokens <= 1000


@pytest.mark.parametrize("task", TASKS)
def test_whole_prompts_are_cut_where_their_question_begins(task):
    opening = TASKS[task].opening
    row = longbench.Row(f"{opening} what?" if opening else "what?", "The text.\n\nMore.", ("a",))
    context, question = longbench.parts(task, row)
    if task == "repobench-p":  # nothing marks where its own input begins
        context, question = context + row.input, question.removeprefix(row.input)
    assert longbench.split_prompt(task, context + question) == (context, question)


def test_a_whole_prompt_may_have_a_misprint_put_right():
    prompt = TASKS["narrativeqa"].prompt.replace("asconcisely", "as concisely").replace("{input}", "Who?")
    context, question = longbench.split_prompt("narrativeqa", prompt.replace("{context}", "A story."))
    assert context.endswith("Story: A story.") and question.startswith("\n\nNow, answer") and "Who?" in question
    other = "Read this.\n\nThe text.\n\nSay it shortly.\n\nQuestion: Who?\nAnswer:"
    assert longbench.split_prompt("qasper", other)[1] == "\n\nQuestion: Who?\nAnswer:"
    with pytest.raises(UsageError, match="does not hold what LongBench's does after the context"):
        longbench.split_prompt("narrativeqa", "A story. Who?")


def test_a_file_of_whole_prompts_stands_in(lm, tmp_path):
    (tmp_path / "longbench").mkdir()
    prompt = TASKS["lcc"].prompt.replace("{context}", "x = 1\n")
    row = {"dataset": "lcc", "prompt": prompt, "answers": ["y = 2"], "all_classes": None, "idx": 3}
    (tmp_path / longbench.WHOLE).write_text(json.dumps(row) + "\n")
    (item,) = items(lm, DataFolder(tmp_path), "longbench", tasks=("lcc",))
    assert item.context.endswith("x = 1\n") and item.question == "Next line of code:\n"


def test_a_byte_order_mark_is_no_text_and_an_option_is_one_of_four(lm, folder, tmp_path):
    (wanted,) = items(lm, folder, "longbench-v2", length=1500)
    (row,) = json.loads(folder.find("longbench_v2/data.json").read_text())
    path = tmp_path / "longbench_v2" / "data.json"
    path.parent.mkdir()
    path.write_text(json.dumps([row]), encoding="utf-8-sig")
    assert items(lm, DataFolder(tmp_path), "longbench-v2", length=1500) == [wanted]
    path.write_text(json.dumps([row | {"answer": "E"}]))
    with pytest.raises(UsageError, match=r"row 1 is no row of this benchmark: .*answer"):
        items(lm, DataFolder(tmp_path), "longbench-v2", length=1500)


def test_longbench_v2_and_longmemeval(lm, folder, monkeypatch, tmp_path):
    (item,) = items(lm, folder, "longbench-v2", length=1500)
    assert item.answers == ("B",) and item.groups == ("difficulty: easy", "length: short", "domain: Law")
    assert "(C) option C\n" in item.question
    found = items(lm, folder, "longmemeval", length=1500)
    fits(lm, found, 1500)
    read = []
    own = longmemeval_files.history
    monkeypatch.setattr(longmemeval_files, "history", lambda row: read.append(row) or own(row))
    twice = folder.find("longmemeval/longmemeval_oracle.json")
    more = [row | {"question_id": f"{row['question_id']} again"} for row in chats()]
    folder = DataFolder(tmp_path)
    (tmp_path / "longmemeval").mkdir()
    (tmp_path / "longmemeval/longmemeval_s.json").write_text(json.dumps([*json.loads(twice.read_text()), *more]))
    assert [one.id for one in items(lm, folder, "longmemeval", length=1500, limit=1, tasks=(found[0].task,))] == ["q4"]
    assert len(read) == 1, "what is beyond the limit is not made a text of"
    # Neither the preference nor the question that cannot be answered; the oldest chat comes first.
    assert [(item.id, item.answers) for item in found] == [("q4", ("Ran",)), ("q1", ("5",))]
    assert "has_answer" not in found[0].context
    assert found[0].context.index("2023/05/20") < found[0].context.index("2023/05/21")
    assert found[0].question.endswith("Current Date: 2023/05/30\nQuestion: What did I do?\nAnswer:")


def _memories(folder, name, content):
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    return DataFolder(folder)


def test_ready_prompts_of_notes_are_read_where_no_whole_file_is_there(lm, tmp_path):
    notes = "I will give you chats.\n\n### Session 1:\nHe ran 5 km.\n\n" + "### Session 2:\nempty\n\n" * 200
    kinds = {"q1": "multi-session", "q2_abs": "multi-session", "q3": "single-session-preference"}
    rows = [
        {
            "question_id": name,
            "question_type": kind,
            "prompt": f"{notes}\n\nCurrent Date: 2023/05/30\nQuestion: How far?\nAnswer (step by step):",
            "correct_answer": 5,
        }
        for name, kind in kinds.items()
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    data = _memories(tmp_path, longmemeval_files.NOTES, lines)
    (item,) = items(lm, data, "longmemeval")
    assert (item.id, item.answers, item.task) == ("q1", ("5",), "multi-session") and item.context == notes
    assert item.question == "\n\nCurrent Date: 2023/05/30\nQuestion: How far?\nAnswer (step by step):"
    (cut,) = items(lm, data, "longmemeval", length=1000)
    fits(lm, [cut], 1000)
    assert cut.question == item.question and notes.startswith(cut.context) and len(cut.context) < len(notes)
    assert data.found == [longmemeval_files.NOTES]
    with pytest.raises(UsageError, match="row 1 is no prompt whose question begins with"):
        items(lm, _memories(tmp_path, longmemeval_files.NOTES, lines.replace("Current Date", "Date")), "longmemeval")
    whole = _memories(tmp_path, "longmemeval/longmemeval_oracle.json", json.dumps(chats()))
    assert [one.id for one in items(lm, whole, "longmemeval")] == ["q4", "q1"]


def test_of_records_of_several_questions_the_benchmarks_own_is_asked(lm, tmp_path):
    row, *_ = chats()
    common = {name: row[name] for name in row if name not in ("question", "answer")}
    evidence = [["b"], ["answer_1", "answer_2"], ["answer_3"]]
    several = {"questions": ["Who?", "How far?", "Which?"], "answers": ["Anna", 5, "Yes"]}
    rows = [
        common | several | {"answer_session_ids": evidence},
        common | several | {"answer_session_ids": [["b"], ["a"], []], "question_id": "q9"},
    ]
    data = _memories(tmp_path, longmemeval_files.SUBSET, json.dumps(rows))
    (item,) = items(lm, data, "longmemeval")  # the second record has none that the benchmark asks
    assert (item.id, item.answers) == ("q1", ("5",)) and "Question: How far?\n" in item.question
    assert item.context.index("2023/05/20") < item.context.index("2023/05/21")
    broken = json.dumps([rows[0] | {"answers": ["Anna"]}])
    with pytest.raises(UsageError, match="row 1 has not an answer and its chats for each of its questions"):
        items(lm, _memories(tmp_path, longmemeval_files.SUBSET, broken), "longmemeval")


@pytest.mark.parametrize(("name", "count"), [(longmemeval_files.NOTES, 212), (longmemeval_files.SUBSET, 2)])
def test_the_files_that_users_have_are_read(lm, name, count, tmp_path):
    if not (SHARED / name).is_file():
        pytest.skip(f"KVJAX_EVAL_DATA names no folder with {name}")
    (tmp_path / "longmemeval").symlink_to(SHARED / "longmemeval")
    data = DataFolder(tmp_path)
    only = DataFolder(tmp_path)
    only.find = lambda *names: data.find(name)  # whatever else is beside it
    found = items(lm, only, "longmemeval", length=2000, limit=200)
    fits(lm, found, 2000)
    assert len(found) == count


def test_an_empty_reference_scores_as_by_the_benchmarks_own_code(lm, tmp_path):
    (tmp_path / "longbench").mkdir()
    row = {"input": "Who?", "context": "A text.", "answers": [""], "all_classes": ["Human"]}
    for task in TASKS:
        if "zh" in TASKS[task].metric:
            continue
        (tmp_path / f"longbench/{task}.jsonl").write_text(json.dumps(row))
        (item,) = items(lm, DataFolder(tmp_path), "longbench", tasks=(task,))
        assert score("Human 3", item) == 0.0
        # fuzzywuzzy calls two empty lines equal; the other metrics have nothing in common with nothing.
        assert score("", item) == (TASKS[task].metric == "code similarity")
    (tmp_path / "longbench/trec.jsonl").write_text(json.dumps(row | {"answers": []}))
    with pytest.raises(UsageError, match="row 1 of trec has no answers"):
        items(lm, DataFolder(tmp_path), "longbench", tasks=("trec",))


def test_the_first_topic_of_a_dialogue(lm, folder, tmp_path):
    (item,) = items(lm, folder, "rounds", tasks=("topics_5",))  # the other record exceeds the context
    fits(lm, [item], 4096)
    assert item.question == "Now the record ends. What is the first topic we discussed?"
    assert item.answers == ("tides of the sea",) and "topic of The tides" in item.context
    # A limit counts what fits.
    assert items(lm, folder, "rounds", tasks=("topics_5",), limit=1) == [item]
    rows = data_files.read_text(folder.need("LongEval", "longchat/topics_5.jsonl")).splitlines()
    (tmp_path / "longchat").mkdir()
    (tmp_path / "longchat" / "topics_5.jsonl").write_text("\n".join([rows[1], rows[0], rows[0]]))
    found = items(lm, DataFolder(tmp_path), "rounds", tasks=("topics_5",), limit=1)
    assert [one.context for one in found] == [item.context], "the first row does not fit, and the third is beyond"
    with pytest.raises(UsageError, match="No record of topics_5 is within 100 tokens"):
        items(lm, folder, "rounds", tasks=("topics_5",), length=100)
    with pytest.raises(UsageError, match=r"Missing: LongEval's file of topics_10; .* has no longchat/topics_10"):
        items(lm, folder, "rounds")


def test_the_hub_has_what_the_folder_has_not(monkeypatch, tmp_path, lm):
    import zipfile

    def download(repo, name, repo_type, revision):
        assert (repo, name, repo_type, revision) == ("THUDM/LongBench", "data.zip", "dataset", None)
        with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
            archive.writestr("data/trec.jsonl", json.dumps(LONGBENCH["trec"][0]) + "\n")
        return str(tmp_path / "data.zip")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    (item,) = items(lm, DataFolder(None), "longbench", tasks=("trec",))
    assert item.answers == ("Human being",)
    hub = DataFolder(None)
    items(lm, hub, "longbench", tasks=("trec",))
    assert hub.found == ["THUDM/LongBench/data.zip"]
    with pytest.raises(data_files.KvjaxError, match=r"holds no lcc\.jsonl"):
        items(lm, DataFolder(None), "longbench", tasks=("lcc",))


def test_a_limit_is_of_each_task():
    found = [Item(str(number), task, "c", "q", (), "F1", 8) for number, task in enumerate("aabab")]
    assert [item.id for item in limited(found, 2)] == ["0", "1", "2", "4"]
    assert limited(found, None) == found


def test_bad_requests_are_one_sentence(folder):
    with pytest.raises(UsageError, match="no suite 'x'; known are ruler, passkey"):
        find_suite("x")
    ruler = SUITES["ruler"]
    with pytest.raises(UsageError, match="has no task 'x'; it has niah_single_1"):
        asked_of(ruler, folder, tasks=("x",))
    with pytest.raises(UsageError, match="named twice"):
        asked_of(ruler, folder, tasks=("vt", "vt"))
    for bad in ({"length": 0}, {"limit": 0}, {"seed": -1}):
        with pytest.raises(UsageError, match="give a whole number"):
            asked_of(ruler, folder, **bad)
    assert asked_of(ruler, folder, quick=True, limit=5) == Asked(ruler.tasks, 1024, 5, 42, True)


@pytest.mark.skipif(not SHARED.is_dir(), reason="KVJAX_EVAL_DATA names no folder of benchmarks")
def test_the_benchmarks_own_prompts_are_cut(lm):
    folder = DataFolder(SHARED)
    for task in TASKS:
        if (SHARED / f"longbench/{task}.jsonl").exists() or not TASKS[task].prompt.isascii():
            continue
        for item in items(lm, folder, "longbench", tasks=(task,), length=3000, limit=3):
            assert 0 < len(item.question) < 6000

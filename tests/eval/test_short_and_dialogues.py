"""Short questions with choices and dialogues of several rounds: what is asked, and what is refused."""

from __future__ import annotations

import json

import pytest
import toys

from kvjax.errors import UsageError
from kvjax.eval.entries import Entry
from kvjax.eval.suites import data, short
from kvjax.eval.suites.data import DataFolder
from kvjax.eval.suites.journal import Journal, RunSettings
from kvjax.eval.suites.prompts import prepare
from kvjax.eval.suites.registry import SUITES, asked_of
from kvjax.eval.suites.runner import AFTER, Runner, digest
from kvjax.eval.suites.scores import lines
from kvjax.eval.suites.short_tasks import TASKS

#: A row of each data set on the hub, and lm-evaluation-harness's text, choices and number of the right one.
ROWS = {
    "openbookqa": (
        {"question_stem": "The sun is", "choices": {"text": ["hot", "cold"], "label": ["A", "B"]}, "answerKey": "A"},
        ("The sun is", (" hot", " cold"), 0),
    ),
    "arc_easy": (
        {"question": "Why?", "choices": {"text": ["a", "b", "c"], "label": ["1", "2", "3"]}, "answerKey": "3"},
        ("Question: Why?\nAnswer:", (" a", " b", " c"), 2),
    ),
    "wic": (
        {
            "sentence1": "He drew a gun.",
            "sentence2": "Draw it!",
            "word": "draw",
            "start1": 3,
            "end1": 7,
            "label": 1,
        },
        (
            "Sentence 1: He drew a gun.\nSentence 2: Draw it!\nQuestion: Is the word 'drew' used in the same way in "
            "the two sentences above?\nAnswer:",
            (" no", " yes"),
            1,
        ),
    ),
    "winogrande": (
        {"sentence": "Anna helped Eve, so _ was glad.", "option1": "Anna", "option2": "Eve", "answer": "2"},
        ("Anna helped Eve, so", (" Anna was glad.", " Eve was glad."), 1),
    ),
    "copa": (
        {"premise": "It rained.", "choice1": "I stayed.", "choice2": "I left.", "question": "effect", "label": 0},
        ("It rained therefore", (" i stayed.", " i left."), 0),
    ),
    "piqa": (
        {"goal": "Open it", "sol1": "pull", "sol2": "push", "label": 1},
        ("Question: Open it\nAnswer:", (" pull", " push"), 1),
    ),
    "rte": (
        {"sentence1": "It is so.", "sentence2": "It is.", "label": 0},
        ("It is so.\nQuestion: It is. True or False?\nAnswer:", (" True", " False"), 0),
    ),
    "mathqa": (
        {"Problem": "2 + 2", "options": "a ) 3 , b ) 4 , c ) 5 , d ) 6 , e ) none", "correct": "b"},
        ("Question: 2 + 2\nAnswer:", (" 3", " 4", " 5", " 6", " none"), 1),
    ),
}


@pytest.fixture(scope="module")
def lm():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jax.clear_caches", lambda: None)
        yield toys.tiny_model(max_position=2048)


@pytest.fixture
def folder(tmp_path):
    for task, (row, _) in ROWS.items():
        path = tmp_path / "short" / f"{task}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text((json.dumps(row) + "\n") * 8)
    return tmp_path


def rounds(task: str, number: int, count: int, words: str = "") -> dict[str, object]:
    history = [{"user": f"Say {n}{words}.", "bot": f"It is {n}{words}."} for n in range(count)]
    return {"task": task, "id": number, "history": history}


@pytest.fixture
def talks(tmp_path):
    path = tmp_path / "mtbench101.jsonl"
    rows = [rounds("CM", 1, 3), rounds("CM", 2, 2, " and on" * 200), rounds("CM", 3, 2), rounds("GR", 1, 2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataFolder(tmp_path)


def items(lm, data, name, **asked):
    return SUITES[name].items(lm, data, asked_of(SUITES[name], data, **asked))


@pytest.mark.parametrize("task", TASKS)
def test_rows_are_asked_in_the_harness_words(task):
    row, (text, choices, right) = ROWS[task]
    found = TASKS[task].read(row)
    assert (found.text, found.choices, found.right) == (text, choices, right)


def test_a_sentence_that_begins_with_its_gap_is_scored_after_the_examples(lm, folder):
    row = {"sentence": "_ was glad.", "option1": "Anna", "option2": "Eve", "answer": "2"}
    (folder / "short" / "winogrande.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "short" / "winogrande.train.jsonl").write_text(json.dumps(ROWS["winogrande"][0]) + "\n")
    (found,) = items(lm, DataFolder(folder), "short", tasks=("winogrande",))
    assert found.choices == ("Anna was glad.", "Eve was glad.")
    assert (found.context, found.question) == ("Anna helped Eve, so Eve was glad.", "\n\n")
    assert prepare(lm, found).tokens > 0


def test_worked_examples_are_the_context(lm, folder):
    found = items(lm, DataFolder(folder), "short", tasks=("copa", "arc_easy"), limit=2)
    assert [item.id for item in found] == ["copa/0", "copa/1", "arc_easy/0", "arc_easy/1"]
    assert found[0].context == "It rained therefore i stayed.\n\n" * 5 and not found[0].chat
    assert found[2].context == "Question: Why?\nAnswer: c\n\n" * 5 and found[2].answers == ("2",)
    assert len(items(lm, DataFolder(folder), "short", tasks=("copa",))) == 3, "five of eight rows are examples"
    (folder / "short" / "copa.train.jsonl").write_text(json.dumps(ROWS["copa"][0] | {"premise": "It snowed!"}))
    found = items(lm, DataFolder(folder), "short", tasks=("copa",))
    assert len(found) == 8 and found[0].context == "It snowed therefore i stayed.\n\n"
    (short_one,) = items(lm, DataFolder(folder), "short", tasks=("rte",), limit=1, length=200)
    assert 1 <= short_one.context.count("It is so.") < 5 and prepare(lm, short_one).tokens <= 200
    with pytest.raises(UsageError, match="100 tokens leave no room for a worked example of rte"):
        items(lm, DataFolder(folder), "short", tasks=("rte",), limit=1, length=100)


def test_choices_are_scored_under_every_cache(lm, folder, tmp_path):
    found = items(lm, DataFolder(folder), "short", tasks=("copa", "piqa"), limit=3)
    settings = RunSettings("tiny", None, None, "short", ("copa", "piqa"), None, 3, False, 42, AFTER, "model", 2)
    journal = Journal(tmp_path / "answers.jsonl", settings)
    caches = [Entry("full"), Entry("streamingllm", 0.5)]
    runner = Runner(lm, found, journal)
    journal.begin(digest(found))
    runner.run(caches)
    journal.close()
    full, other = lines(found, journal, caches, runner.refused)
    assert len(full.scored) == len(other.scored) == 6 and full.also is not None
    assert full.live_fraction == 1 and other.live_fraction is not None and other.live_fraction < 0.6
    assert other.gap is not None and 0 <= full.score.mean <= 1 and full.decode_rate == 0 < full.read_rate


def test_rows_that_are_none_are_refused(folder):
    for content, sentence in (
        ('{"premise": "x"}', "row 1 is no row of copa"),
        *((json.dumps(ROWS["copa"][0] | {"label": no}), "row 1 is no row of copa") for no in (7, True, 0.5, "0", -1)),
        ("{nonsense", "line 1 is no JSON"),
        ("", "holds no rows"),
        (json.dumps(ROWS["copa"][0]), "holds no more than its 5 worked examples"),
    ):
        (folder / "short" / "copa.jsonl").write_text(content)
        short._read.cache_clear()
        with pytest.raises(UsageError, match=sentence):
            asked_of(SUITES["short"], DataFolder(folder), tasks=("copa",))


def test_a_letter_is_one_letter():
    for letter in ("", "ab"):
        with pytest.raises(ValueError, match="list"):
            TASKS["mathqa"].read(ROWS["mathqa"][0] | {"correct": letter})


def test_the_hub_has_what_the_folder_has_not(monkeypatch, tmp_path, lm):
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")

    asked_for = []

    def download(repo, name, repo_type, revision):
        asked_for.append((repo, name, revision))
        path = tmp_path / f"{len(asked_for)}.parquet"
        parquet.write_table(pyarrow.Table.from_pylist([ROWS["openbookqa"][0]] * 6), path)
        return str(path)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    suite = SUITES["short"]
    found = items(lm, DataFolder(None), "short", tasks=("openbookqa",))
    assert len(found) == 6 and found[0].context.count("The sun is hot") == 5
    revision = "refs/convert/parquet"
    assert set(asked_for) == {
        ("allenai/openbookqa", "main/test/0000.parquet", revision),
        ("allenai/openbookqa", "main/train/0000.parquet", revision),
    }

    def refuse(*args, **kwargs):
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    with pytest.raises(UsageError, match=r"The data set copa is neither in --data \(as short/copa.train.jsonl\)"):
        asked_of(suite, DataFolder(None), tasks=("copa",))
    with pytest.raises(UsageError, match="Missing: MT-Bench-101; give --data DIR with"):
        asked_of(SUITES["dialogues"], DataFolder(None))


def test_replies_are_scored_from_the_second_round_on(lm, talks):
    found = items(lm, talks, "dialogues", tasks=("CM",))
    assert [item.id for item in found] == ["CM/1/1", "CM/1/2", "CM/3/1"], "one exceeds the context"
    first = prepare(lm, found[1])
    decode = lm.tokenizer.decode
    assert decode(first.earlier[0]).startswith("Say 0.") and "It is 0." in decode(first.earlier[1])
    assert decode(first.question).endswith("Say 2.\nassistant\n") and found[1].choices == ("It is 2.",)
    assert len(items(lm, talks, "dialogues", limit=1)) == 3
    with pytest.raises(UsageError, match="No dialogue of GR is within 20 tokens"):
        items(lm, talks, "dialogues", tasks=("GR",), length=20)
    plain = toys.tiny_model(max_position=2048)
    plain = type(plain)("t", plain.config, plain.params, type(plain.tokenizer)(plain.tokenizer._backend), (1,))
    (item,) = items(plain, talks, "dialogues", tasks=("GR",))
    assert item.context == "A dialogue between a user and an assistant.\n\n"
    assert item.question == "USER: Say 1.\nASSISTANT:" and item.choices == (" It is 1.",)


def test_a_file_without_an_end_is_not_read_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_MOST_BYTES", 1_000_000)
    (tmp_path / "mtbench101.jsonl").symlink_to("/dev/zero")
    with pytest.raises(UsageError, match=r"mtbench101.jsonl has more than 1 MB; give a smaller file\.$"):
        asked_of(SUITES["dialogues"], DataFolder(tmp_path))


def test_lines_end_as_their_system_ends_them(tmp_path):
    path = tmp_path / "rows.txt"
    path.write_bytes("\ufeffone\r\ntwo\rthree\n".encode())
    assert data.read_text(path) == "one\ntwo\nthree\n"


def test_dialogues_that_are_none_are_refused(tmp_path):
    (tmp_path / "mtbench101.jsonl").write_text(json.dumps(rounds("CM", 1, 1)))
    with pytest.raises(UsageError, match="row 1 is no dialogue of two rounds or more"):
        asked_of(SUITES["dialogues"], DataFolder(tmp_path))
    rows = [rounds("CM", 1, 2), rounds("GR", 1, 2), rounds("CM", 1, 3)]
    (tmp_path / "mtbench101.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UsageError, match="row 3 has the task and id of row 1"):
        asked_of(SUITES["dialogues"], DataFolder(tmp_path))
    (tmp_path / "mtbench101.jsonl").write_text(json.dumps(rows[0]))
    with pytest.raises(UsageError, match="jsonl has no dialogue of GR, SI"):
        asked_of(SUITES["dialogues"], DataFolder(tmp_path), tasks=("GR", "SI"))

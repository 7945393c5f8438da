"""RULER's tasks in essays, documents and lists of words: the benchmark's own samples, and what all samples have."""

from __future__ import annotations

import hashlib
import json
import pathlib
import re
from collections import Counter

import pytest
from support.benchmarks import essays, write_benchmarks

from kvjax.errors import UsageError
from kvjax.eval.suites import documents_qa, needles, tracking, word_lists
from kvjax.eval.suites import essays as essay_files
from kvjax.eval.suites.data import DataFolder
from kvjax.eval.suites.haystack_size import largest

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "golden" / "ruler_tasks.json").read_text())


class Words:
    """A tokenizer whose tokens are words, as the golden samples were made with."""

    def encode(self, text: str) -> list[int]:
        return [0] * len(text.split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_benchmarks(tmp_path_factory.mktemp("data"))


def make(task, folder, length, samples, seed=42, template=0):
    given = (Words(), length, samples, seed, template)
    if task == "vt":
        return tracking.tracking_samples(*given)
    if task == "cwe":
        return word_lists.common_samples(*given, None)
    if task == "fwe":
        return word_lists.frequent_samples(*given)
    if task in documents_qa.PLACES:
        path = next(folder / place for place in documents_qa.PLACES[task] if (folder / place).exists())
        return documents_qa.document_samples(Words(), task, path, *given[1:])
    return needles.needle_samples(Words(), task, essays(), *given[1:])


@pytest.mark.parametrize("record", GOLDEN, ids=lambda record: f"{record['task']}-{record['length']}")
def test_samples_are_the_benchmarks(record, folder):
    """The digests are of what RULER's own scripts write of the same text, with this tokenizer."""
    samples = make(record["task"], folder, record["length"], 2)
    for sample, golden in zip(samples, record["samples"], strict=True):
        text = sample.context + sample.question
        assert hashlib.sha256(text.encode()).hexdigest() == golden["sha256"]
        assert sample.answer_prefix == golden["answer_prefix"]
        assert list(sample.outputs) == golden["outputs"]
        assert sample.length == golden["length"]


@pytest.mark.parametrize("task", sorted({record["task"] for record in GOLDEN}))
@pytest.mark.parametrize("length", [900, 1700])
def test_a_sample_stays_within_its_length_and_the_seed_decides(task, length, folder):
    samples = make(task, folder, length, 3, seed=7, template=20)
    reserved = {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}.get(task, 128)
    assert len(samples) == 3
    for sample in samples:
        assert sample.length == len(Words().encode(sample.prompt)) + reserved + 20 <= length
        assert sample.length > 0.5 * length
    assert (
        samples
        == make(task, folder, length, 3, seed=7, template=20)
        != make(task, folder, length, 3, seed=8, template=20)
    )


def test_needles_stand_in_the_essay_where_they_were_put():
    for task in needles.ESSAY_TASKS:
        kind = needles.ESSAY_TASKS[task]
        for sample in make(task, None, 1500, 2):
            found = re.findall(r"One of the special magic \w+ for \S+ is: (\S+)\.", sample.context)
            assert len(found) == kind.keys * kind.values
            assert set(sample.outputs) <= set(found) and len(sample.outputs) == kind.queries * kind.values
            # Taken out again, what remains is the essay's beginning.
            rest = re.sub(r" ?One of the special magic \w+ for \S+ is: \S+\.", "", sample.context)
            body = rest.split("afterwards.\n", 1)[1].strip()
            assert " ".join(essay_files.essay_words(essays())).startswith(body)


def test_a_chain_is_defined_before_it_is_used():
    for sample in make("vt", None, 900, 3):
        text = sample.context.rsplit("Memorize", 1)[1]
        value = re.search(r"the value (\d{5})", sample.question)[1]
        places = [text.index(f"VAR {sample.outputs[0]} = {value}")]
        for old, new in zip(sample.outputs, sample.outputs[1:], strict=False):
            places.append(text.index(f"VAR {new} = VAR {old}"))
        assert places == sorted(places) and len(sample.outputs) == 5


def test_common_words_are_the_most_common():
    for sample in make("cwe", None, 1500, 2):
        words = Counter(re.findall(r"\d+\. (\S+)", sample.context.rsplit("Below", 1)[1]))
        assert {word for word, _ in words.most_common(10)} == set(sample.outputs)
        assert {words[word] for word in sample.outputs} == {6}
    for sample in make("fwe", None, 1500, 2):
        words = Counter(sample.context.split("coded words. ")[1].split())
        ranked = [word for word, _ in words.most_common(4)]
        assert ranked[0] == "..." and tuple(ranked[1:]) == sample.outputs


def test_the_answer_is_among_the_documents(folder):
    for sample in make("qa_1", folder, 1500, 3):
        assert f"The keeper is {sample.outputs[0]}." in sample.context
    for sample in make("qa_2", folder, 1500, 3):
        assert f"{sample.outputs[0]} 9\n" in sample.context, "all of a question's own documents are there"


def test_too_short_lengths_are_one_sentence(folder):
    for task in ("vt", "cwe", "qa_1", "qa_2", "niah_single_2"):
        with pytest.raises(UsageError, match="too few"):
            make(task, folder, 70, 1)
    for task in ("vt", "cwe"):
        with pytest.raises(UsageError, match=f"70 tokens are too few for the task {task}; its smallest") as caught:
            make(task, folder, 70, 1)
        least = int(str(caught.value).rstrip(".").split()[-1])
        assert make(task, folder, least + 40, 1), "random names and numbers take a few tokens more or less"
    with pytest.raises(UsageError, match="60 tokens are too few for the task fwe"):
        make("fwe", folder, 60, 1)


def test_sentences_are_cut_at_their_ends_alone():
    text = 'Mr. Stone came. He said "wait." J. K. left at 3.5 p.m. today! Why? (Nobody knows.) End'
    pieces = essay_files.sentences(text)
    assert pieces == [
        "Mr. Stone came.",
        'He said "wait."',
        "J. K. left at 3.5 p.m. today!",
        "Why?",
        "(Nobody knows.)",
        "End",
    ]
    assert " ".join(pieces) == text
    assert essay_files.sentences("") == []


def test_essays_come_from_a_file_or_a_folder(tmp_path):
    (tmp_path / "paulgraham" / "PaulGrahamEssays").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"holds no \.txt files"):
        essay_files.essay_text(essay_files.need_essays(DataFolder(tmp_path), "hide it"))
    for name, text in (("b.txt", "second"), ("a.txt", "first")):
        (tmp_path / "paulgraham" / "PaulGrahamEssays" / name).write_text(text)
    assert essay_files.essay_text(tmp_path / "paulgraham" / "PaulGrahamEssays") == "first\nsecond"
    (tmp_path / "x.json").write_text('{"text": 3}')
    with pytest.raises(UsageError, match="holds no essays"):
        essay_files.essay_text(tmp_path / "x.json")
    with pytest.raises(UsageError, match=r"give --data DIR with paulgraham/PaulGrahamEssays\.json"):
        essay_files.need_essays(DataFolder(None), "hide it")


@pytest.mark.parametrize("room", [0, 3, 50, 99, 1000])
def test_the_largest_size_that_fits(room):
    assert largest(lambda size: size * 2, room, 5, 60) == max(5, min(room // 2, 60))

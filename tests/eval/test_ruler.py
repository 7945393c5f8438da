"""RULER's generator against the benchmark's own samples, and its scorer."""

from __future__ import annotations

import hashlib
import json
import pathlib
import random

import pytest

from kvjax.errors import UsageError
from kvjax.eval import ruler
from kvjax.eval.words import WordPairs, word_pairs

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "golden" / "ruler.json").read_text())


class Words:
    """A tokenizer whose tokens are words, as the golden samples were made with."""

    def encode(self, text: str) -> list[int]:
        return [0] * len(text.split())


@pytest.mark.parametrize("record", GOLDEN, ids=lambda r: f"{r['task']['haystack']}-{r['task']['value']}-{r['length']}")
def test_samples_are_the_benchmarks(record):
    task = ruler.NeedleTask(**record["task"])
    samples = ruler.make_samples(Words(), task, length=record["length"], samples=len(record["samples"]))
    for sample, golden in zip(samples, record["samples"], strict=True):
        assert sample.question == golden["question"]
        assert sample.answer_prefix == golden["answer_prefix"]
        assert list(sample.outputs) == golden["outputs"]
        assert sample.length == golden["length"]
        text = sample.context + sample.question
        assert hashlib.sha256(text.encode()).hexdigest() == golden["sha256"]


@pytest.mark.parametrize("task", ruler.TASKS)
@pytest.mark.parametrize("length", [400, 1500])
def test_a_sample_holds_its_answer_and_fills_its_length(task, length):
    for sample in ruler.make_samples(Words(), task, length=length, samples=3, seed=7, max_new_tokens=16):
        assert all(f"is: {output}.\n" in sample.context for output in sample.outputs)
        assert length - 40 < sample.length <= length
        assert sample.length == len(Words().encode(sample.prompt)) + 16


def test_the_seed_decides_and_a_template_takes_room():
    def ask(**options):
        return ruler.make_samples(Words(), length=600, samples=2, **options)

    assert ask(seed=1) == ask(seed=1) != ask(seed=2)
    assert len(ask(template_tokens=200)[0].context) < len(ask()[0].context)
    assert ask(template_tokens=200)[0].length <= 600


def test_grammar_of_one_and_of_many():
    one = ruler.make_samples(Words(), length=600, samples=1)[0]
    assert one.context.startswith("A special magic number is hidden within the following text.")
    assert one.question.startswith("What is the special magic number for ")
    assert one.answer_prefix.endswith(" mentioned in the provided text is")
    task = ruler.NeedleTask("noise", keys=4, values=2, queries=3)
    many = ruler.make_samples(Words(), task, length=600, samples=1)[0]
    assert many.context.startswith("Some special magic numbers are hidden")
    assert many.question.count(", ") == 2 and ", and " in many.question
    assert len(many.outputs) == 6 and len(set(many.outputs)) == 6


def test_bad_requests_are_one_sentence():
    with pytest.raises(UsageError, match="no task 'niah'; known are niah_single_1"):
        ruler.make_samples(Words(), "niah", length=600, samples=1)
    with pytest.raises(UsageError, match="50 tokens are too few"):
        ruler.make_samples(Words(), length=50, samples=1)
    with pytest.raises(UsageError, match="samples is 0"):
        ruler.make_samples(Words(), length=600, samples=0)
    with pytest.raises(UsageError, match="as many keys as queries"):
        ruler.NeedleTask("noise", keys=1, queries=2)
    with pytest.raises(UsageError, match="one answer for each sample"):
        ruler.string_match_all(["a"], [])


def test_scores():
    assert ruler.post_process(" a\tb\x00c\n") == "a\nb\nc"
    assert ruler.match_all("It is 1234567, or ABC.", ["1234567", "abc", "9"]) == pytest.approx(2 / 3)
    # The benchmark matches substrings: a longer number that contains the right one counts.
    assert ruler.match_all("91234567", ["1234567"]) == 1
    assert ruler.string_match_all(["1 2", "3", "no"], [["1", "2"], ["3", "4"], ["5"]]) == 50.0
    assert ruler.string_match_all(["x", "", "y"], [["x"], ["x"], ["x"]]) == 33.33


def test_word_pairs_equal_the_sorted_set():
    adjectives, nouns = ["well", "well-off", "a", "aback", "well-", "a-b"], ["x", "off-x", "b-c", "c", "x", "Zoo"]
    whole = sorted({f"{a}-{n}" for a in adjectives for n in nouns})
    pairs = WordPairs(adjectives, nouns)
    assert len(pairs) == len(whole) and list(pairs) == whole
    assert pairs[-1] == whole[-1] and pairs[2:9:3] == whole[2:9:3]
    with pytest.raises(IndexError):
        pairs[len(whole)]
    assert random.Random(3).choice(pairs) == random.Random(3).choice(whole)
    assert len(WordPairs([], nouns)) == 0


def test_wonderwords_gives_the_benchmarks_lists():
    assert len(word_pairs()) > 6_000_000
    assert word_pairs()[0] < word_pairs()[len(word_pairs()) // 2] < word_pairs()[-1]

"""Metrics against values worked out by hand, and ROUGE-L against those of the package it follows."""

from __future__ import annotations

import dataclasses
import difflib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.eval.suites import text_metrics as metrics
from kvjax.eval.suites.item import Item
from kvjax.eval.suites.metrics import METRICS, score
from kvjax.eval.suites.rouge import rouge_l


def item(metric: str, *answers: str, classes: tuple[str, ...] = ()) -> Item:
    return Item("x", "x", "c", "q", answers, metric, 8, classes=classes)


def test_f1_of_normalised_words():
    assert metrics.normalised("The  Cat, an A.B. (thing)!") == "cat ab thing"
    # {cat, sat} against {cat, sat, down}: precision 1, recall 2/3.
    assert metrics.qa_f1("The cat sat.", "cat sat down") == pytest.approx(0.8)
    assert metrics.qa_f1("dog", "cat") == 0 and metrics.qa_f1("", "cat") == 0
    # Bags: one of two "no" is matched once.
    assert metrics.qa_f1("no no", "no") == pytest.approx(2 / 3)
    assert score("blue", item("F1", "red", "blue sky")) == pytest.approx(2 / 3), "the best of the references"


#: (answer, reference, F of ROUGE-L), as ``Rouge().get_scores(answer, reference)`` of the package rouge 1.0.1 has them.
ROUGE = [
    ("the cat sat on the mat", "the cat lay on the mat", 0.7999999950000002),
    ("a b c. d e f", "a c. f x", 0.5999999952),
    ("One two. Two three.  Four", "two four. three one", 0.4444444395061729),
    ("same words here", "same words here", 0.999999995),
    ("no overlap", "at all", 0.0),
    # Of two longest subsequences of equal length the package finds the one whose words other sentences lack.
    ("a a c d. a c d c b d", "c a a a d", 0.5714285665306124),
    ("a b. . c", "a. c b", 0.8571428522448981),
]


@pytest.mark.parametrize("answer, reference, expected", ROUGE)
def test_rouge_l_is_the_packages(answer, reference, expected):
    assert rouge_l(answer, reference) == pytest.approx(expected, abs=1e-12)


def test_rouge_l_of_nothing():
    assert rouge_l("", "words") == rouge_l("...", "words") == rouge_l("words", "") == 0


def test_classification_walks_through_the_list_it_changes():
    classes = ("A", "AB", "ABC", "D")
    assert metrics.classification("it is D", "D", classes) == 1
    assert metrics.classification("it is D or A", "D", classes) == 0.5
    # Of A, AB and ABC the first is taken out, so the second is passed over and stays.
    assert metrics.classification("ABC", "ABC", classes) == 0.5
    assert metrics.classification("nothing", "D", classes) == 0
    assert score("\nD\nA", item("classification", "D", classes=classes)) == 1, "the first line alone"


def test_numbers():
    assert metrics.count_share("5, or 7, or 5", "5") == pytest.approx(2 / 3)
    assert metrics.count_share("none", "5") == 0
    assert metrics.paragraph_share("Paragraph 3 and 4", "Paragraph 3") == 0.5
    assert metrics.paragraph_share("段落12", "段落12") == 1
    assert metrics.paragraph_share("Paragraph 3", "no number") == 0


def test_code_is_compared_by_its_first_plain_line():
    answer = "\n```python\n# note\nreturn x + 1\nreturn y"
    assert metrics.code_similarity(answer, "return x + 1") == 1
    # 11 of 12 characters each: 2 * 11 / 24.
    assert metrics.code_similarity("return x + 2", "return x + 1") == 0.92
    assert metrics.code_similarity("# only a note", "x") == 0


def test_digits_by_the_longest_run():
    key = "0123456789" * 6 + "0123"
    assert metrics.longest_run(f"The key is {key}.", key) == 1
    assert metrics.longest_run("4567 and 89", key) == 4 / 64
    assert metrics.longest_run("", key) == 0
    # In a long answer no digit is taken for noise, as Python's matcher would.
    assert metrics.longest_run("1357924680" * 30 + key, key) == 1
    assert score(f"The pass key is {key}", item("exact match", key)) == 1
    assert score(key[:-1], item("exact match", key)) == 0


@given(st.text("01", min_size=1, max_size=12), st.text("01", max_size=30))
def test_the_longest_run_is_the_longest_substring(key, answer):
    runs = [
        size
        for start in range(len(key))
        for size in range(1, len(key) - start + 1)
        if key[start : start + size] in answer
    ]
    assert metrics.longest_run(answer, key) == max(runs, default=0) / len(key)


@pytest.mark.parametrize(
    "answer, letter",
    [
        ("The correct answer is (B)", "B"),
        ("**The correct answer is (C)**", "C"),
        ("The correct answer is D.", "D"),
        ("The correct answer is A or The correct answer is (B)", "B"),
        ("Answer: B", None),
        ("The correct answer is (E)", None),
    ],
)
def test_options(answer, letter):
    assert metrics.option_letter(answer) == letter
    assert score(answer, item("option", "B")) == float(letter == "B")


def test_strings_all_and_any():
    assert score("It is ONE,\ttwo", item("string_match_all", "one", "two", "three")) == pytest.approx(2 / 3)
    assert score("It is ONE", item("string_match_part", "three", "one")) == 1
    assert score("It is one", item("string_match_part", "THREE", "One")) == 1
    assert score("It is", item("string_match_part", "three", "one")) == 0


def test_containment_ignores_case_and_marks():
    assert score("Well: 5 Kilometres!", item("containment", "5 kilometres.")) == 1
    assert score("five", item("containment", "5")) == 0
    assert score("anything", item("containment", "...")) == 0, "nothing is contained in nothing"


def test_first_lines():
    assert score("\n\nblue\nred", item("F1, first line", "red")) == 0
    assert score("\n\nblue\nred", item("F1, first line", "blue")) == 1


def test_chinese_words():
    pytest.importorskip("jieba", reason="Chinese needs the package jieba")
    assert metrics.qa_f1_zh("北京。", "北京") == 1
    assert metrics.rouge_l_zh("我 在 北京", "北京") > 0


#: Metrics of continuations that were scored: their answers are JSON.
OF_SCORES = {"accuracy", "accuracy by length", "next tokens", "mean probability"}


@given(
    st.sampled_from(sorted(set(METRICS) - {"F1 zh", "ROUGE-L zh"} - OF_SCORES)),
    st.text(max_size=30),
    st.text(min_size=1, max_size=20),
)
def test_scores_are_fractions(metric, answer, reference):
    assert 0 <= score(answer, item(metric, reference, classes=(reference,))) <= 1


@given(
    st.sampled_from(sorted(OF_SCORES)),
    st.lists(st.tuples(st.floats(-1e4, 0), st.integers(1, 9), st.floats(0, 1)), min_size=1, max_size=5),
)
def test_scores_of_continuations_are_fractions(metric, found):
    facts = [{"logprob": logprob, "tokens": n, "likeliest": int(part * n)} for logprob, n, part in found]
    asked = dataclasses.replace(item(metric, "0"), choices=("a choice",) * len(found))
    assert 0 <= score(json.dumps(facts), asked) <= 1


def test_fuzzy_ratio_is_pythons_matcher():
    line, wanted = "for i in range(3):", "for j in range(33):"
    ratio = round(100 * difflib.SequenceMatcher(None, line, wanted).ratio()) / 100
    assert metrics.code_similarity(line, wanted) == ratio != 1

"""SCBench's metrics of one answer (Li et al. 2024, arXiv:2412.10319), as the benchmark's own code counts them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

from kvjax.eval.suites.bleu import bleu
from kvjax.eval.suites.text_metrics import CHINESE_MARKS, PUNCTUATION, token_f1

#: The similarity from which RepoQA counts a function as found.
SIMILAR = 0.8
_NUMBER = re.compile(r"\d+\.\d+|\d+", re.ASCII)
_PREFIXES = ("answer is:", "answer:", "answer is", "option is")
_BLOCK = re.compile(r"^```(?:\w+)?\s*\n(.*?)(?=^```)```", re.DOTALL | re.MULTILINE)


def holds(prediction: str, references: Sequence[str]) -> float:
    """1 where the answer has the reference in it, letter for letter."""
    return float(any(wanted in prediction for wanted in references))


def holds_any_case(prediction: str, references: Sequence[str]) -> float:
    """1 where the answer has any of the references in it, in upper or lower case."""
    said = prediction.strip().upper()
    return float(any(wanted.upper() in said for wanted in references))


def names_found(prediction: str, references: Sequence[str]) -> float:
    """The fraction of the references in the answer, rounded to hundredths."""
    said = prediction.lower()
    return round(sum(wanted.lower() in said for wanted in references) / len(references), 2)


def first_digits(prediction: str, reference: str) -> float:
    """1 where the answer's first run of digits is the reference."""
    found = re.search(r"[0-9]+", prediction)
    return float(found is not None and found[0] == reference)


def first_number(prediction: str, reference: str) -> float:
    """1 where the answer's first number is the reference; of a whole one decimals are cut off."""
    found, wanted = _NUMBER.search(prediction), _NUMBER.fullmatch(reference.strip())
    if found is None or wanted is None:
        return 0.0
    value = Decimal(found[0])
    return float((value if "." in reference else int(value)) == Decimal(wanted[0]))


def option_named(prediction: str, references: Sequence[str]) -> float:
    """1 where the answer names the right option by its letter or its words; ``references`` are both."""
    said = prediction.strip()
    if not said:
        return 0.0
    if said[0] in "ABCD":
        return float(said[0] in references)
    if said in references:
        return 1.0
    said = re.sub(" +", " ", re.sub(r"[\n\"'.,?!{}]", " ", said))
    for prefix in _PREFIXES:
        if (place := said.find(prefix)) >= 0:
            rest = said[place + len(prefix) + 1 :]
            return float(bool(rest) and any(rest.startswith(wanted) for wanted in references))
    letter = next((word for word in said.split() if word in "ABCD"), None)
    return float(letter is not None and letter in references)


def character_f1(prediction: str, reference: str) -> float:
    """F1 of the characters of Chinese text, without punctuation and white space."""

    def characters(text: str) -> str:
        bare = "".join(char for char in text.lower() if char not in PUNCTUATION and char not in CHINESE_MARKS)
        return "".join(bare.split())

    return token_f1(characters(prediction), characters(reference))


def function_code(answer: str) -> str:
    """The first block of code in an answer; the answer itself where it has none."""
    blocks = _BLOCK.findall(answer.strip())
    return blocks[0] if blocks else answer.strip()


def function_found(prediction: str, reference: str, others: Sequence[str]) -> float:
    """1 where the answer is like the described function, and like it more than like any other of the repository."""
    said = re.split(r"\s+", function_code(prediction).strip())
    best, most = None, 0.0
    for code in others:
        similar = bleu(said, re.split(r"\s+", code.strip()))
        if similar > most:
            best, most = code, similar
    return float(best == reference and most >= SIMILAR)

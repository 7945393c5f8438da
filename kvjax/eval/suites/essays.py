"""Essays as a haystack: where they are, their words, and their sentences."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from kvjax.errors import UsageError
from kvjax.eval.suites.data import DataFolder, read_json, read_text

PLACES = ("paulgraham/PaulGrahamEssays.json", "paulgraham/PaulGrahamEssays")
#: After a sentence's end and a space: what may begin the next one. Abbreviations and initials end none.
_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]*[A-Z0-9])")
_ABBREVIATION = re.compile(r"(?:^|[\s(\"'])(?:[A-Z]|Mr|Mrs|Ms|Dr|Prof|St|vs|e\.g|i\.e|etc|cf|No|Inc|Jr|Sr|U\.S)\.$")


def need_essays(data: DataFolder, what: str, instead: str = "") -> Path:
    """The path of the essays; a UsageError says what to give."""
    return data.need(f"the essays that {what}", *PLACES, instead=instead)


@functools.lru_cache(maxsize=2)
def essay_text(path: Path) -> str:
    """The essays: the ``text`` of a JSON file as RULER has it, or a folder's .txt files in their sorted order."""
    if path.is_dir():
        files = sorted(path.glob("*.txt"))
        if not files:
            raise UsageError(f"{path} holds no .txt files.")
        return "\n".join(read_text(file) for file in files)
    found = read_json(path)
    if not isinstance(found, dict) or not isinstance(found.get("text"), str) or not found["text"].strip():
        raise UsageError(f'{path} holds no essays; it is a JSON object with them as "text".')
    return found["text"]


def essay_words(text: str) -> list[str]:
    """Words as RULER counts them: all white space is one space."""
    return re.sub(r"\s+", " ", text).split(" ")


def cycled(words: list[str], count: int) -> list[str]:
    """The first ``count`` words, of the text repeated where it is shorter."""
    return (words * -(-count // len(words)))[:count]


def sentences(text: str) -> list[str]:
    """The text cut after each sentence; joined with spaces they are the text again.

    RULER cuts with NLTK's trained model, which this rule equals but for rare abbreviations: where they differ a needle
    stands a sentence earlier or later.
    """
    found, start = [], 0
    for match in _END.finditer(text):
        piece = text[start : match.end()].rstrip()
        if _ABBREVIATION.search(piece):
            continue
        found.append(piece)
        start = match.end()
    return [*found, text[start:]] if text[start:] else found

"""The exceptions kvjax raises on purpose, each one sentence on what was wrong and what is accepted; and notices."""

from __future__ import annotations

import difflib
import functools
import re
import reprlib
import sys
from collections.abc import Iterable
from typing import Any

#: Characters of a piece of input that a sentence quotes.
QUOTED = 80
#: Characters of a sentence.
SENTENCE = 280


class KvjaxError(Exception):
    """A failure while doing what was asked (a corrupt file, a full disk, a missing model); the CLI exits with 1."""

    def __init__(self, sentence: object = ""):
        super().__init__(one_sentence(str(sentence)))


class UsageError(KvjaxError, ValueError):
    """A request that makes no sense as stated (an unknown policy, a ratio of 3); the CLI exits with 2."""


def missing_extra(what: str, extra: str) -> str:
    """A sentence on what a package that is not there is needed for; kvjax is installed from a clone."""
    return f"{what}; install the extra {extra}, in the clone of kvjax: pip install '.[{extra}]'."


class DoesNotFit(KvjaxError):
    """The planned bytes exceed the device's memory; the sentence names a request that would fit.

    Attributes:
      plan: the :class:`kvjax.Plan` that exceeds it, where one was made.
      batch: rows that would fit together; 0 where not even one does, or their number is not what is too large.
    """

    plan: Any = None
    batch: int = 0


class WeightsError(KvjaxError):
    """A model's file is missing, truncated, corrupt, or does not hold exactly the weights the model needs."""


def one_sentence(text: str) -> str:
    """Text on one line, short enough to be read whole: words that are too long lose their middle, then the text does.

    A path or a name of usual length stays as it is; one of thousands of characters tells nothing by its middle.
    """
    if len(text) <= SENTENCE and not re.search(r"[\n\r\0]", text):
        return text
    text = " ".join(text.replace("\0", "\\0").split())
    if len(text) > SENTENCE:
        text = re.sub(rf"\S{{{QUOTED + 1},}}", lambda word: cut(word[0]), text)
    return cut(text, SENTENCE)


def cut(text: str, most: int = QUOTED) -> str:
    """Text of at most so many characters, dots in place of its middle."""
    if len(text) <= most:
        return text
    end = (most - 3) // 2
    return f"{text[: most - 3 - end]}...{text[-end:]}"


def listed(names: Iterable[str], most: int = 160) -> str:
    """Names as a sentence lists them: as many whole ones as ``most`` characters hold, and how many more there are."""
    names = list(names)
    shown = 0
    while shown < len(names) and len(", ".join(names[: shown + 1])) <= most:
        shown += 1
    more = f" and {len(names) - shown} more" if shown < len(names) else ""
    return ", ".join(names[:shown]) + more


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The question whether another name was meant, with a space before it; empty where none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" did you mean {near[0]!r}?" if near else ""


class _Quoting(reprlib.Repr):
    """The ``repr`` of a value that may be deep, endless or a whole number beyond what Python writes."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother, self.maxlong = 4, 2 * QUOTED, 2 * QUOTED, 2 * QUOTED
        for kind in ("list", "tuple", "dict", "set", "frozenset", "deque", "array"):
            setattr(self, f"max{kind}", 24)

    def repr_int(self, x: int, level: int) -> str:
        bits = x.bit_length()
        return repr(x) if bits < 512 else f"<a whole number of {round(bits * 0.30103):,} digits>"

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:  # reprlib's own sorts the keys
        if level <= 0:
            return "{...}"
        items = [f"{self.repr1(key, level - 1)}: {self.repr1(value, level - 1)}" for key, value in list(x.items())[:24]]
        return "{" + ", ".join(items) + (", ...}" if len(x) > 24 else "}")


_quoting = _Quoting()


def quoted(value: Any) -> str:
    """A piece of input as a sentence quotes it: its ``repr`` on one line, cut to 80 characters."""
    return cut(" ".join(_quoting.repr(value).splitlines()))


def kind_of(value: Any) -> str:
    """The kind of a value with its article, as a sentence says it: "an int", "None"."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


@functools.cache
def say_once(sentence: str) -> None:
    """A sentence on standard error, the first time in a process."""
    print(f"kvjax: {sentence}", file=sys.stderr)

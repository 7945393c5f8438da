"""Passages of a user's texts with needles in them, and the text that follows each passage."""

from __future__ import annotations

import codecs
import dataclasses
import random
import re
from collections.abc import Sequence
from pathlib import Path

from kvjax.checkpoints.load import LanguageModel
from kvjax.errors import UsageError
from kvjax.eval.needle_prompts import prompt_ids
from kvjax.eval.ruler import ANSWER_PREFIX, INTRODUCTION, NEEDLE, QUESTION, Sample
from kvjax.files import check_local
from kvjax.tables import counted

#: Tokens of the text that follows each passage, whose loss is measured.
CONTINUATION = 64
#: Tokens of an answer, which is one number.
ANSWER_TOKENS = 16
#: Tokens by which a word of the texts may be longer than a numbered key.
_LONGER = 8
#: Characters of the texts, and bytes of a file, that are read at most: many times what is measured.
_MOST_CHARACTERS = 50_000_000


@dataclasses.dataclass(frozen=True)
class Passage:
    """A piece of the texts.

    Attributes:
      context: ids of what is compressed: a chat template's beginning, the task, and the passage with its needles.
      continuation: ids of the text that follows.
      questions: ids of each question, up to the beginning of its answer. outputs: what each right answer contains.
    """

    context: list[int]
    continuation: list[int]
    questions: tuple[list[int], ...]
    outputs: tuple[str, ...]


def read_texts(paths: Sequence[Path], without: Sequence[Path] = ()) -> list[str]:
    """The texts of files, and of all files in folders; of a folder, what is no UTF-8 text is left out.

    Args:
      paths: files and folders. without: files that are left out of folders, such as those that an earlier run wrote.

    Raises:
      UsageError: a path that is not there, a file that is no text, or no text at all.
    """
    found: list[str] = []
    characters, left_out = 0, {path.resolve() for path in without}
    for path in paths:
        check_local("--text", path)
        if not path.exists():
            raise UsageError(f"--text names nothing that is there: {path}.")
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_dir() or characters > _MOST_CHARACTERS:
                continue
            if path.is_dir() and (not file.is_file() or file.resolve() in left_out):  # a pipe has no end
                continue
            text = _text(file)
            if text is None and not path.is_dir():
                raise UsageError(f"{file} is no UTF-8 text; give text files, or folders of them.")
            if text and text.strip():
                found.append(text)
                characters += len(text)
    if not found:
        raise UsageError(f"There is no text in {', '.join(map(str, paths))}; give text files, or folders of them.")
    return found


def _text(file: Path) -> str | None:
    try:
        with file.open("rb") as stream:  # a device has no end, and a dump none that memory holds
            data = stream.read(_MOST_CHARACTERS)
            whole = not stream.read(1)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}.") from error
    try:
        # The last bytes of a part may be half a character.
        return None if b"\0" in data else codecs.getincrementaldecoder("utf-8-sig")().decode(data, final=whole)
    except UnicodeDecodeError:
        return None


def make_passages(
    lm: LanguageModel, texts: Sequence[str], *, tokens: int, passages: int, needles: int, seed: int
) -> list[Passage]:
    """Pieces from all over the texts, in each of which ``needles`` numbers are hidden, at all depths.

    Args:
      tokens: of each context, template and needles included, as nearly as words allow and never more; fewer where the
        model's context has no room for a question and its answer after them.

    Raises:
      UsageError: the texts are shorter than what is asked for, or ``tokens`` leave no room for text.
    """
    rng = random.Random(seed)
    (empty, *questions), _ = _with_needles(lm, "", _keys("", needles, rng), rng)
    after = max(max(map(len, questions)) + _LONGER + ANSWER_TOKENS, CONTINUATION)
    tokens = min(tokens, lm.config.max_position - after)
    room = tokens - len(empty) - _LONGER * needles
    if room < 64:
        raise UsageError(
            f"{tokens} tokens leave no room for text beside {counted(needles, 'needle')}; measure longer passages."
        )
    each = room + CONTINUATION
    ids = _stream(lm, texts, 4 * passages * each, rng)
    if len(ids) < passages * each:
        raise UsageError(
            f"The texts have {len(ids):,} tokens, and {counted(passages, 'passage needs', 'passages need')} "
            f"{passages * each:,}; give more text, "
            "fewer passages or shorter ones."
        )
    starts = [i * (len(ids) // passages) for i in range(passages)]
    return [_passage(lm, ids[start : start + each], room, tokens, needles, rng) for start in starts]


def _stream(lm: LanguageModel, texts: Sequence[str], most: int, rng: random.Random) -> list[int]:
    """Ids of the texts one after another, in random order, until they suffice."""
    ids: list[int] = []
    order = list(texts)
    rng.shuffle(order)
    for text in order:
        ids += lm.tokenizer.encode(text.strip() + "\n\n")
        if len(ids) >= most:
            break
    return ids


def _passage(
    lm: LanguageModel, ids: Sequence[int], room: int, tokens: int, needles: int, rng: random.Random
) -> Passage:
    continuation = list(ids[room : room + CONTINUATION])
    state = rng.getstate()
    while True:  # what begins within a character, or a word, is encoded anew to other tokens
        text = lm.tokenizer.decode(list(ids[:room])).lstrip("\ufffd")
        rng.setstate(state)
        pairs, values = _with_needles(lm, text, _keys(text, needles, rng), rng)
        context = pairs[0]
        if len(context) <= tokens:
            return Passage(context, continuation, tuple(pairs[1:]), tuple(values))
        ids = ids[len(context) - tokens :]  # the text's first tokens go, so that the continuation still follows
        room -= len(context) - tokens


def _keys(text: str, count: int, rng: random.Random) -> list[str]:
    """Words of the text that a needle is named after; numbered ones where it has too few."""
    words = sorted({word.lower() for word in re.findall(r"[^\W\d_]{4,12}", text)})
    chosen = rng.sample(words, min(count, len(words)))
    return chosen + [f"number-{i}" for i in range(count - len(chosen))]


def _with_needles(
    lm: LanguageModel, text: str, keys: Sequence[str], rng: random.Random
) -> tuple[list[list[int]], list[str]]:
    """(ids of the context, then those of each question; the values that were hidden)."""
    values = [str(rng.randint(1_000_000, 9_999_999)) for _ in keys]
    ends = [found.end() for found in re.finditer(r"[.!?][\"')\]]*\s+|\n+", text)] or [
        found.end() for found in re.finditer(r"\s+", text)
    ]
    places = []
    for i in range(len(keys)):
        wanted = len(text) * (i + rng.random()) / len(keys)
        places.append(min(ends, key=lambda end: abs(end - wanted)) if ends else int(wanted))
    for place, key, value in sorted(zip(places, keys, values, strict=True), reverse=True):
        needle = NEEDLE.format(kind="numbers", key=key, value=value)
        text = f"{text[:place]}{needle} {text[place:]}"
    begins = _singular(INTRODUCTION) if len(keys) == 1 else INTRODUCTION.format(kind="numbers")
    pairs: list[list[int]] = []
    for key, value in zip(keys, values, strict=True):
        question = _singular(QUESTION, key)
        sample = Sample(0, begins + text, f"\n{question}", _singular(ANSWER_PREFIX, key), (value,), 0)
        context, asked = prompt_ids(lm, sample)
        pairs += [asked] if pairs else [context, asked]
    return pairs, values


def _singular(template: str, key: str = "") -> str:
    """RULER's sentence for one number."""
    for old, new in (("Some", "A"), ("are all", "is"), ("are", "is")):
        template = template.replace(old, new)
    return template.format(kind="number", query=key)

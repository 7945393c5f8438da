"""Reads command-line values: prompts from standard input, text from files, lists of numbers, amounts of memory."""

from __future__ import annotations

import contextlib
import fractions
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax.checks import MOST, MOST_BYTES, MOST_SLOTS, read_number, read_whole_number, stripped, whole_number
from kvjax.errors import DoesNotFit, UsageError, quoted
from kvjax.files import read_all, read_bytes, reason

if TYPE_CHECKING:
    from pallas_kernels.bench.decode_inputs import Sizes

#: The most bytes of a prompt: more than any model reads, and devices have no end.
_MOST_TEXT = 100_000_000

#: Heads, channels or rows of a kernel's problem at most.
MOST_SIZE = 2**16
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def decode_utf8(data: bytes, origin: str) -> str:
    """The text of ``data``, or one sentence that says where it stops being UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        bad = data[error.start]
        raise UsageError(f"{origin} is not UTF-8 text (byte 0x{bad:02x} at offset {error.start}).") from error


def _checked_argument(text: str, origin: str) -> str:
    # Python hands over undecodable argument bytes as lone surrogates.
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise UsageError(f"{origin} is not UTF-8 text.")
    return text


def prompts(values: Sequence[str]) -> list[str]:
    """The prompts, each as :func:`text` reads it."""
    refuse_stdin_twice(*values)
    return [text(value, "The prompt") for value in values]


def refuse_stdin_twice(*values: str | None) -> None:
    """Refuse (UsageError) more than one `-` among the texts of a command."""
    if values.count("-") > 1:
        raise UsageError("Standard input can be read once, but `-` was given several times.")


def text(value: str, name: str) -> str:
    """``value`` itself, the text of FILE where it is ``@FILE``, or for `-` standard input, less its last newline."""
    if value == "-":
        data = read_all(sys.stdin.buffer, _MOST_TEXT, "Standard input")
        return decode_utf8(data, "Standard input").removesuffix("\n")
    if not value.startswith("@"):
        if _names_a_file(value):
            print(
                f"kvjax: {name} is {quoted(value)} itself; write @{value} for the text of that file.", file=sys.stderr
            )
        return _checked_argument(value, name)
    try:
        data = read_bytes(Path(value[1:]), _MOST_TEXT)
    except UsageError:
        raise
    except (OSError, ValueError) as error:
        raise UsageError(f"{name} names a file that cannot be read: {value[1:]} ({reason(error)}).") from error
    return decode_utf8(data, value[1:])


def _names_a_file(value: str) -> bool:
    try:
        return "." in value and Path(value).is_file()
    except (OSError, ValueError):  # too long for a name, or with a character that none has
        return False


def integers(value: str | None, name: str) -> tuple[int, ...] | None:
    """``"1,8"`` as ``(1, 8)``; ``None`` stays ``None``."""
    if value is None:
        return None
    if not value.strip():
        return ()
    try:
        return tuple(read_whole_number(part) for part in value.split(","))
    except ValueError as error:
        raise UsageError(
            f"{name} takes whole numbers separated by commas, at most {MOST} each, not {quoted(value)}."
        ) from error


def numbers(value: str, name: str) -> tuple[float, ...]:
    """``"0.5,0.25"`` as ``(0.5, 0.25)``."""
    if not value.strip():
        return ()
    try:
        return tuple(read_number(part) for part in value.split(","))
    except ValueError as error:
        raise UsageError(f"{name} takes numbers separated by commas, not {quoted(value)}.") from error


def names(value: str, name: str) -> tuple[str, ...]:
    """``"a, b"`` as ``("a", "b")``; none of an empty text."""
    return tuple(stripped(name, value.split(","))) if value.strip() else ()


def byte_count(value: str | None, name: str = "--memory-limit") -> int | None:
    """``"8GB"``, ``"512MiB"`` or plain bytes as a number of bytes."""
    if value is None:
        return None
    match = re.fullmatch(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([kmgt]i?)?b?\s*", value.lower())
    count = int(fractions.Fraction(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if not 0 < count <= MOST_BYTES:
        raise UsageError(f"{name} takes bytes, such as 8GB, 512MiB or 1000000, not {quoted(value)}.")
    return count


@contextlib.contextmanager
def naming_flags(*keywords: str) -> Iterator[None]:
    """Name the flag where a value is refused inside that the library knows by one of these keywords."""
    try:
        yield
    except UsageError as error:
        keyword, between, rest = str(error).partition(" is ")
        if not between or keyword not in keywords:
            raise
        raise UsageError(f"--{keyword.replace('_', '-')} is {rest}") from error


def problem_sizes(**sizes: Any) -> Sizes:
    """A kernel's problem by its sizes; one sentence where it is none, or larger than the memory (DoesNotFit)."""
    with naming_flags(*sizes):
        return _problem_of(sizes)


def _problem_of(sizes: Mapping[str, Any]) -> Sizes:
    from kvjax.device_memory import device_limit
    from kvjax.tables import human_bytes
    from pallas_kernels.bench.decode_inputs import Sizes, stored_dtype

    counts = {name: value for name, value in sizes.items() if isinstance(value, int)}
    for name, value in counts.items():
        whole_number(name, value, 1, MOST_SLOTS if name == "mean" else MOST_SIZE)
    try:
        problem = Sizes(**sizes)
        itemsize = stored_dtype(problem.dtype).itemsize
    except (ValueError, TypeError, SyntaxError) as error:  # NumPy reads text as a structure's fields
        raise UsageError(str(error)) from error
    need, limit = 2 * itemsize * problem.batch * problem.heads * problem.mean * problem.head_dim, device_limit(None)
    if limit is not None and need > limit:
        raise DoesNotFit(f"Keys and values take {human_bytes(need)} and the limit is {human_bytes(limit)}; ask less.")
    return problem

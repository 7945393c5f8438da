"""Reads command-line values: prompts from standard input, text from files, lists of numbers, amounts of memory."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax.errors import KvjaxError, UsageError

if TYPE_CHECKING:
    from pallas_kernels.bench.decode_inputs import Sizes

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
    """The prompts, with `-` replaced by all of standard input (once), less the newline that ends it."""
    if list(values).count("-") > 1:
        raise UsageError("Standard input can be read once, but `-` was given several times.")
    return [
        decode_utf8(sys.stdin.buffer.read(), "Standard input").removesuffix("\n")
        if value == "-"
        else _checked_argument(value, "The prompt")
        for value in values
    ]


def text_or_file(value: str | None, name: str) -> str | None:
    """``value`` itself, or the text of FILE when it is written ``@FILE``."""
    if value is None or not value.startswith("@"):
        return value if value is None else _checked_argument(value, name)
    try:
        data = Path(value[1:]).read_bytes()
    except OSError as error:
        raise UsageError(f"{name} names a file that cannot be read: {value[1:]} ({error.strerror}).") from error
    return decode_utf8(data, value[1:])


def integers(value: str | None, name: str) -> tuple[int, ...] | None:
    """``"1,8"`` as ``(1, 8)``; ``None`` stays ``None``."""
    if value is None:
        return None
    try:
        return tuple(int(part) for part in value.split(",") if part.strip())
    except ValueError as error:
        raise UsageError(f"{name} takes whole numbers separated by commas, not {value!r}.") from error


def numbers(value: str, name: str) -> tuple[float, ...]:
    """``"0.5,0.25"`` as ``(0.5, 0.25)``."""
    try:
        return tuple(float(part) for part in value.split(",") if part.strip())
    except ValueError as error:
        raise UsageError(f"{name} takes numbers separated by commas, not {value!r}.") from error


def names(value: str) -> tuple[str, ...]:
    """``"a, b"`` as ``("a", "b")``."""
    return tuple(part.strip() for part in value.split(",") if part.strip())


def byte_count(value: str | None) -> int | None:
    """``"8GB"``, ``"512MiB"`` or plain bytes as a number of bytes."""
    if value is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", value.lower())
    if not match:
        raise UsageError(f"--memory-limit takes bytes, such as 8GB, 512MiB or 1000000, not {value!r}.")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def output_folder(out: Path) -> None:
    """Make the folder for results, or say in one sentence why it cannot be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out names a folder that cannot be made: {out} ({error.strerror}).") from error
    if not os.access(out, os.W_OK):
        raise KvjaxError(f"--out names a folder that cannot be written to: {out}.")


def problem_sizes(**sizes: Any) -> Sizes:
    """A kernel's problem by its sizes; one sentence where it is none."""
    from pallas_kernels.bench.decode_inputs import Sizes

    try:
        return Sizes(**sizes)
    except ValueError as error:
        raise UsageError(str(error)) from error

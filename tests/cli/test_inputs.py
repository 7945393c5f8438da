"""Small readers of what was typed."""

from __future__ import annotations

import io

import pytest

from kvjax import tables
from kvjax.cli import inputs
from kvjax.errors import UsageError


@pytest.mark.parametrize(
    ("text", "count"),
    [("8GB", 8 * 10**9), ("512MiB", 512 * 2**20), ("1.5g", 1_500_000_000), ("1000", 1000), ("1 kB", 1000)],
)
def test_byte_counts(text, count):
    assert inputs.byte_count(text) == count


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1e9", "8 XB"])
def test_what_is_no_byte_count(text):
    with pytest.raises(UsageError):
        inputs.byte_count(text)


def test_names():
    assert inputs.names("a, b", "--tasks") == ("a", "b") and inputs.names(" ", "--tasks") == ()
    for text in ("a,", ",a", "a,,b", " , "):
        with pytest.raises(UsageError, match=r"^--tasks has an empty item; .*\.$"):
            inputs.names(text, "--tasks")


def test_integers():
    assert inputs.integers("1,8", "--batch") == (1, 8)
    assert inputs.integers(None, "--batch") is None
    with pytest.raises(UsageError, match="--batch"):
        inputs.integers("1;8", "--batch")


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1_509_949_440, "1.51 GB"), (999_999, "1 MB")]
)
def test_human_bytes(count, text):
    assert tables.human_bytes(count) == text


def test_a_text_is_itself_a_file_or_standard_input(tmp_path, monkeypatch):
    (tmp_path / "question.txt").write_text("From a file?\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Piped?\n"), encoding="utf-8"))
    assert inputs.prompts(["Plain?", "@question.txt", "-"]) == ["Plain?", "From a file?\n", "Piped?"]
    with pytest.raises(UsageError, match=r"The prompt names a file that cannot be read: nofile \(No such file"):
        inputs.prompts(["@nofile"])
    with pytest.raises(UsageError, match="Standard input can be read once"):
        inputs.refuse_stdin_twice("-", "What?", "-")


def test_a_text_without_an_end_is_not_read_to_it(monkeypatch):
    monkeypatch.setattr(inputs, "_MOST_TEXT", 2_000_000)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b" " * 2_000_001), encoding="utf-8"))
    for word, name in (("@/dev/zero", "/dev/zero"), ("-", "Standard input")):
        with pytest.raises(UsageError, match=f"^{name} has more than 2 MB; give a smaller file.$"):
            inputs.text(word, "The prompt")


def test_a_text_of_the_most_bytes_is_read(monkeypatch):
    monkeypatch.setattr(inputs, "_MOST_TEXT", 3)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"abc"), encoding="utf-8"))
    assert inputs.text("-", "The prompt") == "abc"

"""Tables on terminals of different widths: nothing is lost, no word and no number is broken."""

from __future__ import annotations

import random
import re

import pytest

from kvjax.tables import Column, Report, Table, counted, print_text

WORDS = "a remark of several words that is rather long for one cell".split()


def _table(seed: int, columns: int, notes: bool) -> Table:
    draw = random.Random(seed)
    rows = [
        {
            "policy": draw.choice(["full", "lagkv:ratio=0.25,sink=16,lag=128", "razor:inner=lagkv"]),
            "tokens": f"{draw.randrange(10**6):,}",
            **{str(i): f"{draw.random() * 10 ** draw.randrange(7):,.2f}" for i in range(columns)},
            "remark": " ".join(draw.sample(WORDS, draw.randrange(1, 9))),
            "refused": "it is too large for this device" if notes and draw.random() < 0.4 else None,
        }
        for _ in range(6)
    ]
    numbers = [Column(f"number {'of many words' if i % 3 else 'x'} {i}", str(i), right=True) for i in range(columns)]
    named = [Column("tokens", "tokens"), Column("policy", "policy")]
    return Table([*named, *numbers, Column("remark", "remark")], rows, "Numbers", lambda row: row["refused"], labels=2)


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize(("columns", "notes"), [(1, False), (6, True), (12, False), (20, True)])
def test_every_cell_is_there_whole_and_no_line_is_too_long(capsys, width, columns, notes):
    table = _table(columns, columns, notes)
    Report([table, "A footnote, [bold] or not: " + "word " * 30]).print(width=width)
    text = capsys.readouterr().out
    drawn = [line for line in text.splitlines() if line[:1] in "┏┃┡│└"]
    assert drawn and all(len(line) <= width for line in drawn)
    assert "[bold]" in text and "Numbers" in text
    words = set(re.split(r"[\s│┃]+", text))
    for row, cells in zip(table.rows, table.cells, strict=True):
        shown = cells if row["refused"] is None else [*cells[:2], row["refused"]]
        assert {word for cell in shown for word in cell.split()} <= words
    assert {word for column in table.columns for word in column.name.split()} <= words


def test_a_table_that_fits_is_one(capsys):
    table = _table(1, 2, False)
    Report([table]).print(width=200)
    text = capsys.readouterr().out
    assert text.count("┏") == 1 and "continued" not in text
    Report([table]).print(width=60)
    text = capsys.readouterr().out
    assert text.count("┏") > 1 and "Numbers, continued" in text
    assert text.count("tokens") == text.count("┏")  # each piece says whose rows they are


def test_a_table_in_a_pipe_is_as_wide_as_columns_says(capsys, monkeypatch):
    numbers = Table([Column(f"column {i}", str, right=True) for i in range(9)], [1, 2])
    for asked, lines in ((None, 1), ("60", 2), ("many", 1)):
        if asked is not None:
            monkeypatch.setenv("COLUMNS", asked)
        Report([numbers]).print(width=200)
        text = capsys.readouterr().out
        assert text.count("┏") == lines and max(map(len, text.splitlines())) <= (60 if lines > 1 else 200)


@pytest.mark.parametrize("said", ["0", "1", "\u0663", "-5", "wide", ""])
def test_columns_that_hold_no_table_are_none(capsys, monkeypatch, said):
    monkeypatch.setenv("COLUMNS", said)
    Report([_table(1, 2, False)]).print(width=200)
    text = capsys.readouterr().out
    assert text.count("┏") == 1 and "remark" in text
    Report([_table(1, 2, False)]).print()
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_long_lines_go_on_indented_on_a_terminal(capsys, monkeypatch):
    line = "  0-5  " + ", ".join(["2,336"] * 30)
    print_text(line)
    assert capsys.readouterr().out == line + "\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    print_text(line)
    parts = capsys.readouterr().out.splitlines()
    assert all(len(part) <= 80 for part in parts) and parts[1].startswith("      2,336")
    assert sum(part.count("2,336") for part in parts) == 30


def test_a_count_agrees_with_what_is_counted():
    found = [counted(count, "question") for count in (0, 1, 2, 2000)]
    assert found == ["0 questions", "1 question", "2 questions", "2,000 questions"]
    assert counted(1, "batch", "batches") == "1 batch" and counted(3, "batch", "batches") == "3 batches"

"""Refusals in the words of the command line, and what is said of values that look like something else."""

from __future__ import annotations

import pytest

from kvjax.cli import main  # noqa: F401  it registers the commands, whose flags these are
from kvjax.cli.in_flags import in_flags


@pytest.mark.parametrize(
    ("given", "sentence", "said"),
    [
        ("generate hi", "so leave policy= out or give the same.", "so leave --policy out or give the same."),
        ("generate hi", "load it without weights='int4'.", "load it without --weights int4."),
        (
            "generate hi",
            "It had weights=None, and x has weights='int8'.",
            "It had no --weights, and x has --weights int8.",
        ),
        ("read hi", "It is chosen again, so once=True is not for it.", "It is chosen again, so --once is not for it."),
        ("generate hi", "pass it as text, or chat=False.", "pass it as text, or --no-chat."),
        ("read hi", "leave once=False out.", "leave once=False out."),  # no flag says that
        ("plan", "prompt_tokens is 0; give more.", "--prompt-tokens is 0; give more."),
        ("generate hi", "max_new_tokens=5 is one.", "max_new_tokens=5 is one."),  # what somebody typed
        ("generate hi", "It was compressed by lagkv:policy=,x.", "It was compressed by lagkv:policy=,x."),
        ("generate hi", "/data/prompt_tokens/a.json has none.", "/data/prompt_tokens/a.json has none."),
        ("policies", "leave policy= out.", "leave policy= out."),  # no flag of this command
        ("nothing", "leave policy= out.", "leave policy= out."),
    ],
)
def test_keywords_become_the_flags_of_the_command(given, sentence, said):
    assert in_flags(sentence, given.split()) == said


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["plan", "--prompt-tokens", "4k"], "--prompt-tokens is '4k'; give a whole number."),
        (["plan", "--prompt-tokens", "0"], "--prompt-tokens is 0; give a whole number of at least 1."),
        (["generate", "hi", "--temperature", "-1"], "--temperature is -1.0; give a number of at least 0."),
        (["generate", "hi", "--seed", "-1"], "--seed is -1; give a whole number of at least 0"),
        (["generate", "hi", "--policy", "nacl:ratio=0.5,seed=-1"], "kvjax: seed is -1; give a whole number"),
        (["compare", "--out", "out", "--samples", "0"], "--samples is 0; give a whole number of at least 1."),
        (["picture", "razor-heads", "--out", "x.png", "--seed", "-1"], "--seed is -1; give a whole number"),
        (["picture", "retained-positions", "--out", "x.png", "--ratio", "0"], "--ratio is 0.0; give a number above 0"),
        (["bench", "kernels", "--rounds", "0"], "--rounds is 0; give a whole number of at least 1."),
        (["bench", "kernels", "--heads", "0"], "--heads is 0; give a whole number of at least 1"),
        (["bench", "decode", "--shape", "tiny", "--rounds", "0"], "--rounds is 0; give a whole number of at least 1."),
        (["bench", "decode", "--shape", "tiny", "--context", ""], "--context is empty; give at least one number."),
        (["bench", "--batch", "", "--prefill", ""], "Nothing is to be measured: give --batch and --context"),
        (["bench", "engine", "--simulate", "--step-ms", "x"], "--step-ms is 'x'; give a number."),
        (["bench", "engine", "--simulate", "--step-ms", "0"], "--step-ms is 0.0; give a number above 0."),
        (["bench", "engine", "--simulate", "--step-ms", "inf"], "--step-ms is inf; give a finite number above 0."),
        (["bench", "engine", "--simulate", "--new", "1e9,1,1e9"], "three numbers of at least 1 and at most 16777216,"),
        (["bench", "engine", "--simulate", "--prompt", "80,0,90"], "give three numbers of at least 1, such as"),
        (["bench", "engine", "--simulate", "--model", "other"], "--model is of a measurement"),
        (["bench", "engine", "--simulate", "--static"], "--static is of a measurement"),
        (["bench", "engine", "--shards", "2"], "--shards is of a simulation"),
        (["bench", "engine", "--simulate", "--out", "slots.jpg"], "give a name that ends in .png"),
        (["picture", "razor-heads", "--out", "heads.PDF"], "--out is heads.PDF; pictures are written as PNG"),
        (["bench", "engine", "--out", "slots.txt"], "--out is slots.txt; pictures are written as PNG"),
        (["bench", "engine", "--simulate", "--slots", "16", "--shards", "3"], "give a multiple of the shards"),
    ],
)
def test_bad_values_are_said_as_they_were_typed(cli, command, sentence):
    ran = cli(*command)
    assert ran.code == 2 and sentence in ran.err and ran.out == ""


def test_a_file_named_without_its_mark_is_told(tmp_path, monkeypatch, capsys):
    from kvjax.cli import inputs

    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("What the file says.")
    assert inputs.text("notes.txt", "The prompt") == "notes.txt"
    assert "write @notes.txt for the text of that file" in capsys.readouterr().err
    assert inputs.text("@notes.txt", "The prompt") == "What the file says."
    for text in ("no such file.txt", "x." * 5000, "a.\0b", "."):
        assert inputs.text(text, "The prompt") == text
    assert capsys.readouterr().err == ""

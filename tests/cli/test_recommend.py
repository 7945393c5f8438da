"""``kvjax recommend`` from the command line: one run, how it goes on, and what it refuses."""

from __future__ import annotations

import json

import pytest
from support.long_commands import assert_refused, run_through

TEXT = "The river is green. It grows in the hills of the north. " * 60


@pytest.fixture
def asked(tmp_path):
    text, out = tmp_path / "corpus", tmp_path / "deep" / "out"
    text.mkdir()
    (text / "a.txt").write_text(TEXT)
    words = ["recommend", "--text", str(text), "--out", str(out), "--context", "450", "--passages", "2"]
    return [*words, "--needles", "1", "--policies", "streamingllm", "--retained", "0.5", "--no-compile-cache"], out


def test_a_run_and_what_it_leaves(cli, asked, monkeypatch):
    words, out = asked
    names = ["measured.json", "recommendation.json", "recommendation.md", "recommendation.png"]
    ran = run_through(cli, monkeypatch, [*words, "--loss", "100%"], out, names)
    assert "caches to measure: 2, about " in ran.err and "streamingllm:ratio=0.5" in ran.out
    measured = (out / "measured.json").read_bytes()
    again = cli(*words, "--budget", "1GB")  # another goal, and nothing is measured again but what it adds
    assert again.code == 0 and "caches kept of an earlier run: 2" in again.err
    assert json.loads((out / "recommendation.json").read_text())["goal"] == {"budget": 10**9, "loss": None}
    assert (out / "measured.json").read_bytes() == measured
    other = cli(*words, "--seed", "3")
    assert other.code == 2 and "with --seed 0, and 3 is asked for" in other.sentence
    assert "with --measured-tokens 450, and 400 is asked for" in cli(*words, "--measured-tokens", "400").sentence
    (out / "measured.json").write_text("{}")
    other = cli(*words)
    assert other.code == 2 and "was not written by this command" in other.sentence


def test_a_folder_within_the_texts_is_none_of_them(cli, tmp_path, monkeypatch):
    """``--text . --out recommendation`` resumes: what it wrote is not read as a text."""
    from kvjax.eval.recommend import measure, passages

    read = []
    monkeypatch.setattr(passages, "make_passages", lambda lm, texts, **_: read.append(texts))
    monkeypatch.setattr(measure, "within", lambda *_: [])
    monkeypatch.setattr(measure, "measure", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    monkeypatch.setattr(measure, "expected_seconds", lambda *_: 1.0)
    (tmp_path / "a.txt").write_text(TEXT)
    out = tmp_path / "out"
    out.mkdir()
    for name in ("recommendation.md", "recommendation.json"):
        (out / name).write_text("{}")
    (out / "notes.md").write_text("Mine.")
    words = ["recommend", "--text", str(tmp_path), "--out", str(out), "--context", "450", "--no-compile-cache"]
    ran = cli(*words)
    assert ran.code == 130 and "nothing was measured yet" in ran.err
    assert read == [[TEXT, "Mine."]]


REFUSED = {
    ("--loss", "1%", "--budget", "1GB"): "ask for two things",
    ("--loss", "much"): "--loss is 'much'; give a fraction",
    ("--budget", "-1"): "--budget takes bytes",
    ("--context", "0"): "--context is 0",
    ("--batch", "0"): "--batch is 0",
    ("--needles", "0"): "--needles is 0",
    ("--passages", "0"): "--passages is 0",
    ("--measured-tokens", "0"): "--measured-tokens is 0",
    ("--policies", "nothing"): "nothing",
    ("--retained", "1.5"): "--retained holds 1.5",
    ("--storage", "int3"): "storage",
    ("--text", "no/such"): "--text names nothing that is there: no/such",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_makes_no_sense_is_one_sentence(cli, asked, flags, monkeypatch):
    words, out = asked
    assert_refused(cli, monkeypatch, [*words, *flags], out, REFUSED[flags])


def test_a_context_beyond_the_models(cli, asked):
    words, out = asked
    ran = cli(*words, "--context", "513")
    assert ran.code == 2 and ran.sentence == "--context is 513, and this model's context is 512." and not out.exists()

"""``kvjax calibrate``: a profile on disk, its picture beside it, and failures before any work."""

from __future__ import annotations

import json

import pytest

from kvjax.calibrate import (
    GateProfile,
    HeadProfile,
    ScorerProfile,
    WatershedProfile,
    load_profile,
    query_filters,
    retrieval_heads,
    text_statistics,
)


def test_retrieval_heads_writes_the_profile(cli, tiny_model, tmp_path):
    out = tmp_path / "toy.yaml"
    ran = cli("calibrate", "retrieval-heads", "--out", str(out), "--tokens", "20", "--seed", "2", "--no-picture")
    assert ran.code == 0 and "KV heads protected" in ran.out
    assert ran.err == ""  # a pipe is told nothing of what goes on
    assert load_profile(out) == retrieval_heads(tiny_model, tokens=20, seed=2)
    assert [file.name for file in tmp_path.iterdir()] == ["toy.yaml"]


def test_the_picture_is_beside_it(cli, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra eval has it")
    out = tmp_path / "toy.yaml"
    assert cli("calibrate", "retrieval-heads", "--out", str(out), "--tokens", "20").code == 0
    assert (tmp_path / "toy.png").read_bytes().startswith(b"\x89PNG")
    assert isinstance(load_profile(out), HeadProfile)


def test_a_picture_without_matplotlib_is_one_sentence(cli, tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    ran = cli("calibrate", "retrieval-heads", "--out", str(tmp_path / "toy.yaml"))
    assert ran.code == 1 and "matplotlib" in ran.sentence
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("retrieval-heads", "--out", "nowhere/toy.yaml"), "does not exist"),
        (("retrieval-heads", "--out", "toy.json"), ".yaml"),
        (("retrieval-heads", "--out", "toy.yaml", "--no-picture", "--tokens", "9999"), "at most 127"),
        (("retrieval-heads", "--out", "toy.yaml", "--no-picture", "--repeats", "1"), "--repeats is 1"),
        (("retrieval-heads",), "--out"),
        (("watershed-lane",), "watershed-lane"),
    ],
)
def test_bad_requests_are_one_sentence(cli, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    ran = cli("calibrate", *arguments)
    assert ran.code == 2 and said in ran.sentence
    assert not list(tmp_path.iterdir())


def test_a_watershed_and_its_curve(cli, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra eval has it")
    told = tmp_path / "told.jsonl"
    messages = [{"role": role, "content": f"{role} {i}."} for i in range(3) for role in ("user", "assistant")]
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    sharegpt = [{"from": names[m["role"]], "value": m["content"]} for m in messages]
    told.write_text("\n".join(json.dumps(x) for x in (
        {"messages": [*messages, {"role": "user", "content": "Well?"}]},
        {"conversations": [*sharegpt, {"from": "human", "value": "So?"}, {"from": "gpt", "value": "So."}]},
        {"messages": [{"role": "user", "content": "Too short."}]},
    )))  # fmt: skip
    out, drawn = tmp_path / "toy.yaml", tmp_path / "toy.png"
    options = ("--out", str(out), "--dialogues", str(told), "--least-rounds", "3", "--picture", str(drawn))
    ran = cli("calibrate", "watershed", *options)
    assert ran.code == 0 and "the watershed is layer" in ran.out and ran.err == ""
    found = load_profile(out)
    assert isinstance(found, WatershedProfile) and (found.dialogues, found.rounds) == (2, 6)
    assert drawn.read_bytes().startswith(b"\x89PNG")
    before = out.read_bytes()
    assert cli("calibrate", "watershed", *options).code == 0 and out.read_bytes() == before
    for change, says in (
        (("--dialogues", str(tmp_path / "none.json")), "does not exist"),
        (("--least-rounds", "9"), "9 rounds"),
        (("--picture", str(tmp_path / "no" / "x.png")), "--picture"),
    ):
        ran = cli("calibrate", "watershed", *options, *change)
        assert ran.code == 2 and says in ran.sentence


def test_alibi_scopes_are_for_alibi_models(cli, tmp_path, monkeypatch):
    import toys

    import kvjax
    from kvjax.calibrate import alibi_scopes

    out = tmp_path / "toy.yaml"
    ran = cli("calibrate", "alibi-scopes", "--out", str(out))
    assert ran.code == 2 and "rotary" in ran.sentence
    lm = toys.tiny_model(positional="alibi", norm="layer", mlp="gelu")
    monkeypatch.setattr(kvjax, "load", lambda name, **_: lm)
    ran = cli("calibrate", "alibi-scopes", "--out", str(out))
    assert ran.code == 0 and "safe bound" in ran.out
    assert load_profile(out) == alibi_scopes(lm)


def test_filters_of_texts(cli, tiny_model, tmp_path):
    text, out = tmp_path / "book.txt", tmp_path / "toy.yaml"
    text.write_text("It was a dark and stormy night. " * 6)
    ran = cli("calibrate", "qfilters", "--texts", str(text), "--out", str(out), "--tokens", "64")
    assert ran.code == 0 and "filters of 2 layers, from 192 tokens" in ran.out
    assert load_profile(out) == query_filters(tiny_model, [text.read_text()], tokens=64)
    ran = cli("calibrate", "qfilters", "--texts", str(tmp_path / "none.txt"), "--out", str(out))
    assert ran.code == 2 and "does not exist" in ran.sentence


def test_statistics_of_texts(cli, tiny_model, tmp_path):
    text, out = tmp_path / "book.txt", tmp_path / "toy.yaml"
    text.write_text("It was a dark and stormy night. " * 6)
    asked = ("calibrate", "statistics", "--texts", str(text), "--out", str(out))
    ran = cli(*asked, "--tokens", "40", "--most", "3", "--sink", "2", "--seed", "1")
    assert ran.code == 0 and "statistics of 2 layers, from 120 tokens" in ran.out
    assert load_profile(out) == text_statistics(tiny_model, [text.read_text()], tokens=40, most=3, sink=2, seed=1)
    for flags, said in (
        (("--sink", "500"), "first 500 tokens"), (("--sink", "-1"), "--sink is -1"), (("--seed", "-1"), "--seed is -1"),
        (("--tokens", "1"), "--tokens is 1"), (("--most", "0"), "--most is 0"), (("--out", "toy.txt"), ".yaml file"),
    ):  # fmt: skip
        ran = cli(*asked, *flags)
        assert ran.code == 2 and said in ran.sentence
    # Pieces are short where --tokens says so, however long the text is.
    assert "the longest has 4." in cli(*asked, "--tokens", "4").sentence


def test_a_byte_order_mark_is_no_text(cli, tmp_path):
    marked, out = tmp_path / "marked.txt", tmp_path / "toy.yaml"
    marked.write_bytes(b"\xef\xbb\xbfabcdef")
    ran = cli("calibrate", "qfilters", "--texts", str(marked), "--out", str(out))
    assert ran.code == 0 and "from 6 tokens" in ran.out


def test_a_scorer_and_gates_with_the_curve_of_their_losses(cli, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="the extra eval has it")
    text, out = tmp_path / "book.txt", tmp_path / "toy.yaml"
    text.write_text("It was a dark and stormy night. " * 30)
    short = ("--texts", str(text), "--out", str(out), "--steps", "2")
    keys = ("--tokens", "500", "--keys", "1", "--words", "2")
    for command, kind, numbers, said in (
        ("scorer", ScorerProfile, ("--tokens", "60", "--most", "3", "--sampled", "8"), "correlation"),
        ("gates", GateProfile, keys, "gates above 0.5"),
    ):
        ran = cli("calibrate", command, *short, *numbers)
        assert ran.code == 0 and said in ran.out and ran.err == "", ran.err
        found = load_profile(out)
        assert isinstance(found, kind) and found.steps == 2
        assert sorted(file.name for file in tmp_path.iterdir()) == ["book.txt", "toy.png", "toy.yaml"]
        for file in (out, tmp_path / "toy.png"):
            file.unlink()
        with monkeypatch.context() as patch:
            patch.setattr("kvjax.cli.first_steps.load", lambda *_, **__: pytest.fail("the model was loaded"))
            for folder, says in ((str(text), "is a file"), (str(tmp_path), "something else than a training")):
                ran = cli("calibrate", command, *short, *numbers, "--training", folder)
                assert ran.code == 2 and says in ran.sentence
        for change, says in (
            (("--texts", str(tmp_path / "none.txt")), "does not exist"),
            (("--steps", "0"), "--steps is 0"),
            (("--learning-rate", "0"), "--learning-rate is 0.0; give a number above 0"),
            (("--seed", "-1"), "--seed is -1"),
            (("--training", str(text)), "--training"),
        ):
            ran = cli("calibrate", command, *short, *numbers, *change)
            assert ran.code == 2 and says in ran.sentence
        assert [file.name for file in tmp_path.iterdir()] == ["book.txt"]

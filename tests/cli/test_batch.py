"""``kvjax batch``: what is typed, printed and returned; the jobs themselves are tested in ``tests/batch``."""

from __future__ import annotations

import json

import pytest

ALONE = ("--num-processes", "1", "--batch-size", "2", "--max-new-tokens", "4")


@pytest.fixture
def rows(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "one"}\n{"prompt": ""}\n{"prompt": "two", "id": "b"}\n')
    return "batch", "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out"), *ALONE


def test_answers_and_says_so(cli, rows, tmp_path):
    ran = cli(*rows, "--policy", "streamingllm:window=8")
    assert ran.code == 0 and ran.out == ""
    assert "2 answered; 1 refused, each with its error in the output; " in ran.err and "1 file in" in ran.err
    shards = sorted((tmp_path / "out").glob("part-*.jsonl"))
    lines = [line for shard in shards for line in shard.read_text().splitlines()]
    assert [json.loads(line)["id"] for line in lines] == [0, 1, "b"]
    again = cli(*rows, "--policy", "streamingllm:window=8")
    assert again.code == 0 and "0 answered; 3 written by earlier runs" in again.err
    other = cli(*rows)
    assert other.code == 2 and "its policy is 'streamingllm:window=8', and 'full' is asked for" in other.sentence


def test_ctrl_c_says_how_to_go_on(cli, rows, monkeypatch):
    from kvjax.batch import work

    def pressed(*given, **keywords):
        raise KeyboardInterrupt

    monkeypatch.setattr(work, "EngineCore", pressed)
    ran = cli(*rows)
    assert ran.code == 130 and "the same command goes on from there" in ran.err


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (("--policy", "lagkw"), "did you mean 'lagkv'"),
        (("--mesh", "data=two"), "'data=two' is no part of a mesh; write \"data=4,model=2\", each at most once"),
        (("--mesh", "rows=2"), "'rows=2' is no part of a mesh"),
        (("--mesh", "data=2,model=0"), "each from 1 to"),
        (("--mesh", "data=4,model=400"), "needs 1600 devices a process"),
        (("--process-id", "1"), "--process-id is 1; give"),
        (("--order", "size"), "order is 'size'; choose 'input' or 'id'."),
    ],
)
def test_what_makes_no_sense_is_one_sentence(cli, rows, flags, sentence):
    ran = cli(*rows, *flags)
    assert ran.code == 2 and sentence in ran.sentence


def test_an_input_that_is_not_there(cli, rows, tmp_path):
    (tmp_path / "in.jsonl").unlink()
    assert cli(*rows).sentence == f"--input names no file: {tmp_path / 'in.jsonl'}."

"""``kvjax read`` and what continues its folder: ``generate --cache`` and ``chat --load``."""

from __future__ import annotations

import json

import pytest

import kvjax
from kvjax.tables import human_bytes

TEXT = "The lighthouse of Alma stands on a rock, and was lit by hand."
POLICY = "lagkv:ratio=0.5,lag=8,sink=4"


@pytest.fixture
def folder(cli, tmp_path):
    """A folder of what was read from a file."""
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    ran = cli("read", f"@{tmp_path / 'text.txt'}", "--out", str(tmp_path / "kept"), "--policy", POLICY, "--json")
    assert ran.code == 0, ran.err
    said = json.loads(ran.out)
    assert said["folder"] == str(tmp_path / "kept") and said["tokens"] > len(TEXT) and said["policy"] == POLICY
    return tmp_path / "kept"


def test_the_bytes_said_are_the_folders(cli, tmp_path):
    out = tmp_path / "out"
    ran = cli("read", TEXT, "--out", str(out), "--policy", POLICY)
    held = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    assert ran.code == 0 and f"{human_bytes(held)} of cache kept in" in ran.err


def answers(ran) -> list[list[int]]:
    assert ran.code == 0, ran.err
    return [output["tokens"] for output in json.loads(ran.out)["outputs"]]


@pytest.mark.slow
def test_questions_get_the_answers_of_context(cli, folder):
    asked = ("generate", "Where is it?", "Who lit it?", "--max-new-tokens", "6", "--json")
    found = cli(*asked, "--cache", str(folder))
    assert answers(found) == answers(cli(*asked, "--context", TEXT, "--policy", POLICY))
    assert json.loads(found.out)["policy"] == kvjax.policies.format_policy(kvjax.policies.parse(POLICY))
    streamed = cli(*asked[:2], *asked[3:5], "--cache", str(folder))
    assert streamed.code == 0 and streamed.out.strip("\n") == json.loads(found.out)["outputs"][0]["text"].strip("\n")


def test_a_chat_goes_on_with_it(cli, folder, tiny_model):
    ran = cli("chat", "--load", str(folder), "--max-new-tokens", "6", "--json", stdin=b"Where is it?\n")
    assert ran.code == 0, ran.err
    wanted = kvjax.generate(tiny_model, "Where is it?", context=TEXT, policy=POLICY, max_new_tokens=6)
    assert json.loads(ran.out)["tokens"] == list(wanted.tokens)


@pytest.mark.slow
def test_messages_from_standard_input(cli, tmp_path, tiny_model):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    given = json.dumps(messages).encode()
    ran = cli("read", "-", "--messages", "--out", str(tmp_path / "talk"), stdin=given)
    assert ran.code == 0 and "tokens are read" in ran.err
    found = cli("generate", "Why?", "--cache", str(tmp_path / "talk"), "--max-new-tokens", "4", "--json")
    wanted = kvjax.generate(tiny_model, [*messages, {"role": "user", "content": "Why?"}], max_new_tokens=4)
    assert answers(found) == [list(wanted.tokens)]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("read", "x"), "--out"),
        (("read", "", "--out", "{new}"), "The prompt is empty"),
        (("read", "@nowhere.txt", "--out", "{new}"), "names a file that cannot be read"),
        (("read", "x", "--out", "{kept}"), "holds a conversation already"),
        (("read", "x", "--messages", "--out", "{new}"), "--messages takes JSON"),
        (("read", "[1, 2]", "--messages", "--out", "{new}"), "[1, 2]' is no list of messages"),
        (("read", '{{"role": "user"}}', "--messages", "--out", "{new}"), "is no list of messages"),
        (("read", "x", "--policy", "lagk", "--out", "{new}"), "lagk"),
        (("generate", "x", "--cache", "{new}"), "There is no saved conversation"),
        (("generate", "x", "--cache", "{kept}", "--policy", "full"), "was compressed by"),
        (("generate", "x", "--cache", "{kept}", "--context", "y"), "not both"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(cli, folder, tmp_path, arguments, sentence):
    ran = cli(*(part.format(new=tmp_path / "new", kept=folder) for part in arguments))
    assert ran.code == 2 and sentence in ran.err
    assert "Unexpected" not in ran.err

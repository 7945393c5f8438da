"""``kvjax chat --save`` and ``--load``: no whole turn is lost, and none of another conversation is written over."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from types import SimpleNamespace

import pytest

import kvjax
from kvjax import tables
from kvjax.cli import chat as command
from kvjax.session import Session

TURN = ("--max-new-tokens", "4", "--json")
POLICY = ("--policy", "streamingllm:budget=32", "--storage", "int8")


def answers(ran) -> list:
    assert ran.code == 0, ran.err
    return [json.loads(line)["tokens"] for line in ran.out.splitlines()]


def seen(folder, lm) -> int:
    return int(kvjax.load_cache(folder, lm).seen[0])


@pytest.mark.slow
def test_a_conversation_goes_on_in_another_run(cli, tmp_path):
    folder = str(tmp_path / "talk")
    whole = answers(cli("chat", *TURN, *POLICY, "--system", "Be brief.", stdin=b"hello you\nand then?\nmore\n"))
    kept = answers(cli("chat", *TURN, *POLICY, "--system", "Be brief.", "--save", folder, stdin=b"hello you\n"))
    later = cli("chat", *TURN, "--load", folder, "--save", folder, stdin=b"and then?\n")
    assert "goes on after" in later.err and "streamingllm:budget=32" in later.err
    # What was loaded has its own policy and storage, which may be repeated.
    last = cli("chat", *TURN, *POLICY, "--load", folder, stdin=b"more\n")
    assert kept + answers(later) + answers(last) == whole


@pytest.mark.slow
def test_rounds_go_on_in_another_run(cli, tmp_path):
    folder, policy = str(tmp_path / "talk"), ("--policy", "round:watershed=1,top=0.4")
    whole = answers(cli("chat", *TURN, *policy, stdin=b"hello you\nand then?\n"))
    kept = answers(cli("chat", *TURN, *policy, "--save", folder, stdin=b"hello you\n"))
    assert kept + answers(cli("chat", *TURN, *policy, "--load", folder, stdin=b"and then?\n")) == whole


def test_another_policy_or_storage_is_one_sentence(cli, tmp_path):
    folder = str(tmp_path / "talk")
    cli("chat", *TURN, *POLICY, "--save", folder, stdin=b"hello\n")
    ran = cli("chat", "--load", folder, "--policy", "full")
    assert ran.code == 2 and "--policy streamingllm:budget=32; leave --policy out" in ran.sentence
    ran = cli("chat", "--load", folder, "--storage", "model")
    assert ran.code == 2 and "--storage int8; leave --storage out" in ran.sentence
    ran = cli("chat", "--load", folder, "--system", "Be brief.")
    assert ran.code == 2 and "--system is told before that" in ran.sentence


def test_a_conversation_over_a_context_that_was_read_once_is_refused_before_it_is_answered(cli, tmp_path):
    text, talk, policy = str(tmp_path / "text"), str(tmp_path / "talk"), ("--policy", "snapkv:ratio=0.5")
    assert cli("read", "A text to ask about. " * 8, *policy, "--once", "--out", text).code == 0
    ran = cli("chat", *TURN, "--load", text, "--save", talk, stdin=b"hello\n")
    assert ran.code == 2 and "leave --save out" in ran.err and not ran.out
    ran = cli("chat", *TURN, *policy, "--load", text, stdin=b"hello\n/save " + talk.encode() + b"\n")
    assert ran.code == 2 and "leave /save out" in ran.err and len(ran.out.splitlines()) == 1


def test_folders_that_will_not_do_are_refused_before_the_model_is_loaded(cli, tiny_model, tmp_path, monkeypatch):
    folder = tmp_path / "talk"
    cli("chat", *TURN, *POLICY, "--save", str(folder), stdin=b"hello\n")
    tokens = seen(folder, tiny_model)
    (tmp_path / "notes.txt").write_text("mine")
    monkeypatch.setattr(kvjax, "load", None)  # calling it would be another error
    refused = {
        ("--save", str(folder)): (2, f"--load {folder}"),
        ("--save", str(folder), "--load", str(tmp_path / "none")): (2, "There is no saved conversation at"),
        ("--load", str(tmp_path)): (2, "something else than a saved conversation"),
        ("--save", str(tmp_path)): (2, "something else than a saved conversation"),
        ("--save", str(tmp_path / "notes.txt" / "talk")): (1, "cannot be made"),
    }
    for arguments, (code, words) in refused.items():
        ran = cli("chat", *arguments, stdin=b"hello\n")
        assert ran.code == code and words in ran.sentence
    monkeypatch.undo()
    assert seen(folder, tiny_model) == tokens


def test_ctrl_c_while_a_turn_is_written_waits_for_it(cli, tiny_model, tmp_path, monkeypatch):
    folder, real = tmp_path / "talk", kvjax.Chat.save

    def pressed(chat, path):
        os.kill(os.getpid(), signal.SIGINT)
        real(chat, path)

    monkeypatch.setattr(kvjax.Chat, "save", pressed)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts without
    try:
        ran = cli("chat", *TURN, *POLICY, "--save", str(folder), stdin=b"hello you\nnever asked\n")
    finally:
        signal.signal(signal.SIGINT, previous)
    assert ran.code == 130 and len(ran.out.splitlines()) == 1
    assert seen(folder, tiny_model) == json.loads(ran.out)["stats"]["seen"]


@pytest.mark.parametrize("ending", [KeyboardInterrupt, RuntimeError])
def test_what_comes_between_a_turn_and_its_writing_loses_nothing(cli, tiny_model, tmp_path, monkeypatch, ending):
    folder, real = tmp_path / "talk", tables.write_text

    def cut(text):
        if text == "\n":
            raise ending
        real(text)

    monkeypatch.setattr(tables, "write_text", cut)
    ran = cli("chat", *TURN[:2], *POLICY, "--save", str(folder), stdin=b"hello you\n")
    assert ran.code == (130 if ending is KeyboardInterrupt else 1)
    direct = kvjax.Chat(tiny_model, policy=POLICY[1], storage="int8", max_new_tokens=4)
    direct.send("hello you")
    assert seen(folder, tiny_model) == int(direct.cache.seen[0])


def test_reset_begins_anew_in_the_same_folder(cli, tiny_model, tmp_path):
    ran = cli("chat", *TURN, *POLICY, "--save", str(tmp_path / "talk"), stdin=b"hello you\n/reset\nhi\n")
    assert "replaces the one in" in ran.err
    assert seen(tmp_path / "talk", tiny_model) == json.loads(ran.out.splitlines()[1])["stats"]["seen"]


def test_save_within_the_chat_keeps_what_there_is_and_what_comes(cli, tiny_model, tmp_path, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    ran = cli("chat", *TURN, *POLICY, stdin=f"hello\n/save {first}\nmore\n/save {second}\nand more\n".encode())
    counts = [json.loads(line)["stats"]["seen"] for line in ran.out.splitlines()]
    assert [seen(first, tiny_model), seen(second, tiny_model)] == counts[1:]
    assert cli("chat", *TURN, *POLICY, stdin=f"hello\n/save {first}\n".encode()).code == 2
    # At a terminal a folder that will not do ends nothing.
    monkeypatch.setattr(command.chat_prompt, "typed_turns", lambda: iter([f"/save {tmp_path}", "hello"]))
    monkeypatch.setattr(command, "sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True), stderr=sys.stderr))
    ran = cli("chat", *TURN, *POLICY)
    assert ran.code == 0 and "something else than a saved conversation" in ran.err and ran.out


def test_a_typed_turn_that_is_refused_ends_nothing(cli, tiny_model, monkeypatch):
    turns = ["hello", "x" * tiny_model.config.max_position, "are you there?"]
    monkeypatch.setattr(command.chat_prompt, "typed_turns", lambda: iter(turns))
    monkeypatch.setattr(command, "sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True), stderr=sys.stderr))
    ran = cli("chat", *TURN)
    first, second = (json.loads(line)["stats"] for line in ran.out.splitlines())
    assert ran.code == 0 and "so shorten it" in ran.err
    assert second["seen"] == first["seen"] + second["prompt_tokens"] + second["generated_tokens"] - 1


def test_ctrl_c_as_a_typed_turn_is_done_ends_no_more_than_the_answer(cli, tmp_path, monkeypatch):
    collect = Session._collect

    def pressed(self, *args):
        os.kill(os.getpid(), signal.SIGINT)
        return collect(self, *args)

    monkeypatch.setattr(Session, "_collect", pressed)
    monkeypatch.setattr(command.chat_prompt, "typed_turns", lambda: iter(["hello", "are you there?"]))
    monkeypatch.setattr(command, "sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True), stderr=sys.stderr))
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        ran = cli("chat", "--max-new-tokens", "1", "--json", *POLICY, "--save", str(tmp_path / "talk"))
        time.sleep(0.1)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert ran.code == 0 and len(ran.out.splitlines()) == 2

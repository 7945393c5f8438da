"""What is typed in the chat, by a real pseudo-terminal: paste, history, Ctrl-C, the banner and the commands."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import shutil
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from kvjax.cli import chat_prompt

ROOT = Path(__file__).resolve().parents[2]
#: What a terminal is told when the prompt begins to read keys.
READY = "\x1b[?2004h"
#: The command on the toy model, whose answers are replaced: what is typed is the test.
_CHAT = """
    import sys
    sys.path.insert(0, "tests")
    import kvjax, toys
    from kvjax.cli import chat
    from kvjax.cli.main import main
    kvjax.load = lambda *_, **__: lm
    lm = toys.tiny_model()
    chat._turn = lambda conversation, text, *_: print(f"asked {text!r}")
    sys.exit(main(["chat", "--no-compile-cache", "--policy", "lagkv:ratio=0.5"]))
"""


class Talk:
    """A chat in a terminal of 80 by 24."""

    def __init__(self, state: Path):
        self._leader, follower = pty.openpty()
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "XDG_STATE_HOME": str(state)}
        environment |= {"COLUMNS": "80", "LINES": "24", "PROMPT_TOOLKIT_NO_CPR": "1", "HOME": str(state)}
        command = [sys.executable, "-c", textwrap.dedent(_CHAT)]
        streams = {"stdin": follower, "stdout": follower, "stderr": follower}
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **streams)
        os.close(follower)
        self.seen = ""

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def type(self, keys: str, expected: str) -> str:
        """Type, and read until something appears, and the next prompt if that ended one; what appeared."""
        before = len(self.seen)
        os.write(self._leader, keys.encode())
        self.read(expected, before)
        if keys[-1] in "\r\x03":
            self.read(READY, self.seen.index(expected, before))
        return self.seen[before:]

    def leave(self, keys: str) -> int:
        """Type what ends the chat; its exit status."""
        os.write(self._leader, keys.encode())
        with contextlib.suppress(OSError):  # the terminal is gone when its process is
            while chunk := os.read(self._leader, 4096):
                self.seen += chunk.decode(errors="replace")
        os.close(self._leader)
        return self._process.wait(timeout=30)

    def read(self, expected: str, before: int = 0) -> str:
        until = time.monotonic() + 60
        while expected not in self.seen[before:]:
            assert time.monotonic() < until, self.seen[before:]
            if select.select([self._leader], [], [], 0.2)[0]:
                self.seen += os.read(self._leader, 4096).decode(errors="replace")
        return self.seen[before:]


def test_a_talk_at_a_terminal(tmp_path):
    pasted = "first paragraph\n\nsecond one"
    with Talk(tmp_path) as talk:
        banner = talk.read(READY)
        assert "kvjax chat with tiny\r\npolicy lagkv:ratio=0.5; 512 tokens of context left\r\n/help lists" in banner
        assert "pasted text" in talk.type("/help\r", "pasted text")
        talk.type(f"\x1b[200~{pasted}\x1b[201~", "second one")
        talk.type("\r", f"asked {pasted!r}")
        talk.type("half a mess\x03", "once more to leave")
        talk.type("a message\r", "asked 'a message'")  # typing on takes the question back
        talk.type("\x03", "once more to leave")
        talk.type("and another\x03", "once more to leave")  # so does what is dropped
        assert talk.leave("\x03") == 0
    history = tmp_path / "kvjax" / "chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    with Talk(tmp_path) as again:
        again.read(READY)
        again.type("\x1b[A", "a message")
        again.type("\x1b[A", "second one")
        again.type("\r", f"asked {pasted!r}")
        assert again.leave("\x04") == 0


def test_typed_bytes_that_are_no_text_end_nothing(capsys):
    typed = iter(["\udcff", "hello", EOFError()])

    def ask() -> str:
        item = next(typed)
        if isinstance(item, Exception):
            raise item
        return item

    assert list(chat_prompt.typed_turns(ask)) == ["hello"]
    assert "not UTF-8 text" in capsys.readouterr().err


def test_a_state_folder_that_cannot_be_written_is_said_once(tmp_path, monkeypatch, capsys):
    (tmp_path / "kvjax").write_text("")
    monkeypatch.setattr(chat_prompt, "state_folder", lambda: tmp_path / "kvjax")
    chat_prompt._history().append_string("hello")
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("What is typed is not kept: ")


@pytest.mark.parametrize("terminal", [True, False])
def test_help_fits_a_terminal_and_is_there_for_pipes(cli, capsys, terminal):
    if terminal:
        chat_prompt.show_help()
        shown = capsys.readouterr().err
    else:
        shown = cli("chat", stdin=b"/help\n").err
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert all(name in shown for name in ("/help", "/reset", "/stats", "/save DIR", "/exit", "Ctrl-C"))


def test_a_mistyped_command_in_a_pipe_is_told_and_not_sent(cli):
    ran = cli("chat", "--max-new-tokens", "2", stdin=b"/stat\n/load talk\n/save\n/etc/hosts is what?\n")
    assert ran.err.count("Unknown command") == 2 and "Unknown command /stat; /help lists" in ran.err
    assert "Unknown command /load talk" in ran.err and "/save takes a folder" in ran.err
    assert ran.out.count("\n") == 1, "one answer, to the line that is no command"


def test_a_history_that_can_no_longer_be_written_is_said_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    history = chat_prompt._history()
    history.append_string("one")
    shutil.rmtree(tmp_path / "kvjax")
    for text in ("two", "three"):
        history.append_string(text)
    said = capsys.readouterr().err
    assert said.count("What is typed is not kept") == 1 and "No such file" in said
    assert history.get_strings()[-3:] == ["one", "two", "three"]

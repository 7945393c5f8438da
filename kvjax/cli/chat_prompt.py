"""The chat's prompt: lines are edited and remembered over sessions, and a pasted text is one message."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvjax.checks import is_unicode
from kvjax.files import state_folder

if TYPE_CHECKING:
    from prompt_toolkit.history import History

#: The commands and what they do.
COMMANDS = {
    "/help": "lists these commands",
    "/reset": "starts over",
    "/stats": "shows the last turn's numbers and the context that is left",
    "/save DIR": "keeps the conversation there from now on",
    "/exit": "leaves, as Ctrl-D does",
}


def show_help() -> None:
    """The commands and keys, on standard error."""
    keys = {
        "Up, Down": "bring back earlier messages, of earlier sessions too",
        "Ctrl-C": "ends the answer; at the prompt, asks whether to leave",
        "pasted text": "is one message, however many lines it has",
    }
    for name, what in {**COMMANDS, **keys}.items():
        print(f"  {name:<12} {what}", file=sys.stderr)


def typed_turns(ask: Any = None) -> Iterator[str]:
    """Messages typed at a terminal until Ctrl-D, or Ctrl-C twice with nothing typed between.

    Args:
      ask: gives the next message, by default from the prompt; its KeyboardInterrupt may hold what had been typed.
    """
    ask = ask or _prompt()
    asked = False
    while True:
        try:
            text = ask()
        except KeyboardInterrupt as pressed:
            if asked and not any(pressed.args):
                return
            asked = True
            print("Press Ctrl-C once more to leave, or type on.", file=sys.stderr)
            continue
        except EOFError:
            return
        asked = False
        if is_unicode(text):
            yield text
        else:
            print("What was typed is not UTF-8 text.", file=sys.stderr)


def _prompt() -> Any:
    """A function that asks for one message; the prompt goes to standard error, which is no part of the answers."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.output import create_output

    stream = sys.stderr if sys.stderr.isatty() else sys.stdout
    session: PromptSession[str] = PromptSession(history=_history(), output=create_output(stream))

    def ask() -> str:
        try:
            return session.prompt("\n> ")
        except KeyboardInterrupt as pressed:
            raise KeyboardInterrupt(session.default_buffer.text) from pressed

    return ask


def _history() -> History:
    """The input of earlier sessions, in a file that only its user can read."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class Kept(FileHistory):
        written = True

        def store_string(self, string: str) -> None:
            try:
                super().store_string(string)
            except OSError as error:
                if self.written:  # said once
                    _not_kept(error)
                self.written = False

    def _not_kept(error: OSError) -> None:
        print(f"What is typed is not kept: {path} cannot be written ({error.strerror}).", file=sys.stderr)

    path = state_folder() / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        with path.open("ab"):
            return Kept(path)
    except OSError as error:
        _not_kept(error)
        return InMemoryHistory()

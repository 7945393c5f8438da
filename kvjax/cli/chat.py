"""``kvjax chat``: a conversation over one compressed cache, typed at a terminal or piped one turn a line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvjax.cli import inputs, render, session

if TYPE_CHECKING:
    import kvjax
    from kvjax import Output

COMMANDS = "/reset starts over, /stats shows the last turn's numbers, /exit (or Ctrl-D) leaves"


def _typed_turns() -> Iterator[str]:
    """Lines typed at a terminal, with editing and history where the system has readline."""
    try:
        import readline  # noqa: F401  importing it is what gives input() line editing
    except ImportError:
        print("(no line editing on this system)", file=sys.stderr)
    print(COMMANDS, file=sys.stderr)
    while True:
        try:
            yield input("\n> ")
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return


def _piped_turns() -> Iterator[str]:
    for number, line in enumerate(sys.stdin.buffer, 1):
        yield inputs.decode_utf8(line, f"Line {number} of standard input").rstrip("\r\n")


def run(
    *,
    model: str,
    dtype: str | None,
    keywords: dict[str, Any],
    as_json: bool,
    compile_cache: bool,
    mesh: str | None = None,
) -> int:
    """Converse until the input ends or /exit; 130 when Ctrl-C cut a piped turn short."""
    import kvjax

    kvjax.policies.parse(keywords["policy"])
    if compile_cache:
        session.enable_compile_cache()
    lm = session.load(model, dtype, mesh)
    terminal = sys.stdin.isatty()
    conversation, last = kvjax.Chat(lm, **keywords), None
    for line in _typed_turns() if terminal else _piped_turns():
        text = line.strip()
        if not text:
            continue
        if text == "/exit":
            break
        if text == "/reset":
            conversation, last = kvjax.Chat(lm, **keywords), None
            print("A new conversation.", file=sys.stderr)
        elif text == "/stats":
            render.print_stats(last) if last else print("Nothing was generated yet.", file=sys.stderr)
        elif text.startswith("/") and " " not in text and terminal:
            print(f"Unknown command {text}: {COMMANDS}.", file=sys.stderr)
        else:
            last = _turn(conversation, line, as_json)
            if last.finish_reason == "interrupted" and not terminal:
                return 130
    return 0


def _turn(conversation: kvjax.Chat, text: str, as_json: bool) -> Output:
    if as_json:
        output = conversation.send(text)
        render.print_json(render.as_dict(output))
        return output
    output = None
    for piece in conversation.stream(text):
        render.write_text(piece.text)
        output = piece.output or output
    assert output is not None, "a turn ends with a piece that carries the output"
    render.write_text("\n")
    if output.finish_reason in ("context", "interrupted"):
        print(f"(ended by {output.finish_reason})", file=sys.stderr)
    return output

"""``kvjax chat``: a conversation over one compressed cache, typed at a terminal or piped one turn a line."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax import tables
from kvjax.cli import chat_prompt, first_steps, inputs, saved_chat
from kvjax.cli import options as flag
from kvjax.cli.app import INTERRUPTED, app
from kvjax.interrupt import disregard

if TYPE_CHECKING:
    import kvjax
    from kvjax import Output


def _piped_turns() -> Iterator[str]:
    for number, line in enumerate(sys.stdin.buffer, 1):
        yield inputs.decode_utf8(line, f"Line {number} of standard input").rstrip("\r\n")


@app.command()
# A conversation that is loaded has its own policy and storage; None tells that none was typed.
@flag.generation(without=("chat",), policy=None, storage=None, max_new_tokens=512)
def chat(
    *,
    model: flag.Model = flag.DEFAULT_MODEL,
    config: flag.Config = None,
    dtype: flag.Dtype = None,
    weights: flag.Weights = None,
    save: Annotated[
        Path | None, typer.Option("--save", help="Write the conversation to this folder after every turn.")
    ] = None,
    load: Annotated[
        Path | None,
        typer.Option("--load", help="Continue the conversation of this folder; give --save DIR to save it again."),
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="The system message.")] = None,
    options: dict[str, Any],
    mesh: flag.Mesh = None,
    json: flag.Json = False,
    compile_cache: flag.CompileCache = True,
) -> int:
    """Chat with a model; the cache stays compressed.

    With --policy round past rounds are in host memory.

    At a terminal a pasted text is one message, what was typed is remembered, and /help lists the commands. Piped input
    is one turn a line.
    """
    keywords = {**options, "system": system}
    import kvjax

    first_steps.check_policy(keywords["policy"])
    saved_chat.check(save, load, keywords["system"])
    lm = first_steps.load(model, dtype, mesh, compile_cache=compile_cache, weights=weights)
    conversation = kvjax.Chat(lm, **keywords) if load is None else saved_chat.continued(lm, load, keywords)
    if save is not None:
        saved_chat.check_can_be_kept(conversation, "--save")
    record = saved_chat.Record(save)
    if save is not None and load is not None and save.resolve() == load.resolve():
        record.written = conversation.changes
    try:
        return _converse(conversation, record, json)
    finally:
        # Whatever ended it, Ctrl-C between a turn and its writing too: the last complete turn is kept.
        record.keep(conversation)


def _converse(conversation: kvjax.Chat, record: saved_chat.Record, as_json: bool) -> int:
    terminal, last = sys.stdin.isatty(), None
    if terminal:
        _greet(conversation)
    for line in chat_prompt.typed_turns() if terminal else _piped_turns():
        text = line.strip()
        if not text:
            continue
        if text == "/exit":
            break
        if text == "/help":
            chat_prompt.show_help()
            continue
        if text == "/reset":
            conversation.reset()
            last = None
            kept = f"; its first turn replaces the one in {record.folder}" if record.folder else ""
            print(f"A new conversation{kept}.", file=sys.stderr)
        elif text == "/stats":
            tables.print_stats(last) if last else print("Nothing was generated yet.", file=sys.stderr)
            print(_context_left(conversation), file=sys.stderr)
        elif text == "/save":
            print("/save takes a folder, as in /save talk.", file=sys.stderr)
        elif text.startswith("/save "):
            _save_to(Path(text.removeprefix("/save ").strip()), record, conversation, terminal)
        elif re.fullmatch(r"/\w+(\s+\S+)?", text):
            print(f"Unknown command {text}; /help lists those there are.", file=sys.stderr)
        else:
            output = _turn(conversation, line, as_json, terminal)
            if output is None:
                continue
            last = output
            if terminal:
                disregard()  # it was to end the answer, which has ended
            stopped = record.keep(conversation)
            if not terminal and (stopped or last.finish_reason == "interrupted"):
                return INTERRUPTED
    return 0


def _greet(conversation: kvjax.Chat) -> None:
    """The model, the policy and the context that is left."""
    from kvjax.policies import format_policy

    policy = conversation.policy
    print(f"kvjax chat with {conversation.lm.name}", file=sys.stderr)
    print(
        f"policy {'full' if policy is None else format_policy(policy)}; {_context_left(conversation)}", file=sys.stderr
    )
    print("/help lists commands, Ctrl-D leaves.", file=sys.stderr)


def _context_left(conversation: kvjax.Chat) -> str:
    left = conversation.context_left
    return "no limit to the context" if left is None else f"{left:,} tokens of context left"


def _save_to(folder: Path, record: saved_chat.Record, conversation: kvjax.Chat, terminal: bool) -> None:
    """``/save``; an unusable folder does not end a conversation that is typed."""
    from kvjax.errors import KvjaxError

    try:
        record.move(folder, conversation)
    except KvjaxError as error:
        if not terminal:
            raise
        print(error, file=sys.stderr)
    else:
        print(f"The conversation is kept in {folder}.", file=sys.stderr)


def _turn(conversation: kvjax.Chat, text: str, as_json: bool, terminal: bool) -> Output | None:
    """One turn, printed; None where it was refused or broken off, which does not end a typed conversation."""
    from kvjax.errors import KvjaxError
    from kvjax.interrupt import BrokenOff

    try:
        return _answered(conversation, text, as_json)
    except BrokenOff:
        if not terminal:
            raise
        print("\n(interrupted before the answer began; the conversation is as it was)", file=sys.stderr)
        return None
    except KvjaxError as error:
        if not terminal:
            raise
        print(error, file=sys.stderr)
        return None


def _answered(conversation: kvjax.Chat, text: str, as_json: bool) -> Output:
    if as_json:
        output = conversation.send(text)
        tables.print_json(tables.as_dict(output))
        return output
    output = None
    for piece in conversation.stream(text):
        tables.write_text(piece.text)
        output = piece.output or output
    assert output is not None, "a turn ends with a piece that carries the output"
    tables.write_text("\n")
    if output.finish_reason in ("context", "memory", "interrupted"):
        print(f"(ended by {output.finish_reason})", file=sys.stderr)
    return output

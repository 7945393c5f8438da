"""``kvjax read``: a text is read and compressed once, and kept in a folder that questions continue."""

from __future__ import annotations

import json as json_module
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax import tables
from kvjax.cli import first_steps, inputs
from kvjax.cli import options as flag
from kvjax.cli.app import app

if TYPE_CHECKING:
    from kvjax import Cache, Conversation


@app.command()
@flag.generation("policy", "storage", "chat", "memory_limit")
def read(
    *,
    text: Annotated[str, typer.Argument(help="Text, or @FILE; `-` reads standard input.")],
    out: Annotated[Path, typer.Option("--out", help="The folder to save the cache in.")],
    model: flag.Model = flag.DEFAULT_MODEL,
    config: flag.Config = None,
    dtype: flag.Dtype = None,
    weights: flag.Weights = None,
    messages: Annotated[
        bool, typer.Option("--messages", help="The text is JSON: a list of messages with role and content.")
    ] = False,
    once: flag.Once = False,
    options: dict[str, Any],
    mesh: flag.Mesh = None,
    json: flag.Json = False,
    compile_cache: flag.CompileCache = True,
) -> None:
    """Read and compress a text once, for many questions.

    Questions continue it: `kvjax generate QUESTION --cache DIR`, or `kvjax chat --load DIR`, answer as if the text
    stood before the first question, and read no more than the question.
    """
    prompt: Any = inputs.text(text, "The text")
    if messages:
        prompt = _messages(prompt)
    import kvjax
    from kvjax.policies.best import resolve

    kvjax.policies.parse(options["policy"])
    _check_folder(out)
    lm = first_steps.load(model, dtype, mesh, compile_cache=compile_cache, weights=weights)
    cache = kvjax.read(lm, prompt, once=once, **options)
    kvjax.save_cache(out, cache, lm)
    found = resolve(kvjax.policies.parse(options["policy"]), lm.config, later=True)
    named = options["policy"] if found.line is None else kvjax.policies.format_policy(found.policy)
    _say(out, cache, named, found.line, json)


def _check_folder(out: Path) -> None:
    """Refuse a folder that will not do before anything is read; it is made when there is something to keep."""
    from kvjax.errors import KvjaxError, UsageError
    from kvjax.files import check_local
    from kvjax.saving import holds_conversation

    check_local("--out", out)
    if holds_conversation(out):
        raise UsageError(f"{out} holds a conversation already; name another folder.")
    above = next((folder for folder in (out, *out.parents) if folder.exists()), Path())
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise KvjaxError(f"--out names a folder that cannot be made: {above} is no folder that can be written to.")


def _messages(text: str) -> list[dict[str, Any]]:
    from kvjax.errors import UsageError, quoted

    said = '--messages takes JSON, such as [{"role": "user", "content": "..."}]'
    try:
        found = json_module.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{said}.") from error
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise UsageError(f"{said}; {quoted(text)} is no list of messages.")
    return found


def _say(out: Path, cache: Cache | Conversation, policy: str, choice: str | None, as_json: bool) -> None:
    tokens = int(cache.seen[0])
    if as_json:
        found = {"folder": str(out), "tokens": tokens, "policy": policy, "cache_bytes": cache.nbytes}
        tables.print_json(found if choice is None else found | {"choice": choice})
    else:
        if choice is not None:
            print(choice, file=sys.stderr)
        # What is kept is less than what is allocated, which has room for later tokens.
        size = tables.human_bytes(sum(file.stat().st_size for file in out.rglob("*") if file.is_file()))
        print(f"{tokens:,} tokens are read, and {size} of cache kept in {out}.", file=sys.stderr)

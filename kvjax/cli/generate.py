"""``kvjax generate``: one prompt streams its text; several prompts or samples print when all are done."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax import tables
from kvjax.cli import first_steps, inputs, saved_chat
from kvjax.cli import options as flag
from kvjax.cli.app import INTERRUPTED, app
from kvjax.interrupt import disregard

if TYPE_CHECKING:
    from kvjax import LanguageModel, Output


@app.command()
# What is continued has its own policy and storage; None tells that none was typed.
@flag.generation(policy=None, storage=None)
def generate(
    *,
    prompt: Annotated[list[str], typer.Argument(help="One or several; @FILE is a file's text, `-` standard input.")],
    model: flag.Model = flag.DEFAULT_MODEL,
    config: flag.Config = None,
    dtype: flag.Dtype = None,
    weights: flag.Weights = None,
    context: Annotated[
        str | None, typer.Option("--context", help="Text (or @FILE) that is compressed once and shared by all prompts.")
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option("--cache", help="Continue a cache saved by `kvjax read --out DIR` or `chat --save DIR`."),
    ] = None,
    options: dict[str, Any],
    n: Annotated[int, typer.Option("--n", help="Samples of each prompt.")] = 1,
    mesh: flag.Mesh = None,
    json: flag.Json = False,
    compile_cache: flag.CompileCache = True,
) -> int:
    """Answer prompts.

    Text goes to standard output as it is made; progress and a table of stats go to standard error.
    """
    inputs.refuse_stdin_twice(context, *prompt)
    prompts = inputs.prompts(prompt)
    keywords = {**options, "context": None if context is None else inputs.text(context, "--context"), "n": n}
    first_steps.check_policy(keywords["policy"])
    saved_chat.check(None, cache, None)
    lm = first_steps.load(model, dtype, mesh, compile_cache=compile_cache, weights=weights)
    if cache is None:
        keywords |= {"policy": keywords["policy"] or "full", "storage": keywords["storage"] or "model"}
        named = keywords["policy"]
    else:
        import kvjax
        from kvjax import policies

        keywords["cache"] = kvjax.load_cache(cache, lm, memory_limit=keywords["memory_limit"])
        named = policies.format_policy(keywords["cache"].policy)
    streamed = len(prompts) == 1 and keywords["n"] == 1 and not json
    outputs = [_stream(lm, prompts[0], keywords)] if streamed else _all(lm, prompts, keywords)
    if json:
        tables.print_json(
            {"model": lm.name, "policy": named, "outputs": [tables.as_dict(output) for output in outputs]}
        )
    elif not streamed:
        _print_outputs(outputs)
    return INTERRUPTED if any(output.finish_reason == "interrupted" for output in outputs) else 0


def _stream(lm: LanguageModel, prompt: str, keywords: dict[str, Any]) -> Output:
    import kvjax

    output, options = None, {name: value for name, value in keywords.items() if name != "n"}
    for piece in kvjax.stream_generate(lm, prompt, **options):
        tables.write_text(piece.text)
        output = piece.output or output
    assert output is not None, "stream_generate ends with a piece that carries the output"
    disregard()  # of a whole answer nothing is left to end
    tables.write_text("\n")
    tables.print_stats(output)
    return output


def _all(lm: LanguageModel, prompts: Sequence[str], keywords: dict[str, Any]) -> list[Output]:
    import kvjax

    result = kvjax.generate(lm, list(prompts), **keywords)
    disregard()
    return [output for row in result for output in (row if isinstance(row, list) else [row])]


def _print_outputs(outputs: list[Output]) -> None:
    for number, output in enumerate(outputs, 1):
        if len(outputs) > 1:
            print(f"--- {number} of {len(outputs)}", file=sys.stderr)
        tables.write_text(output.text + "\n")
    tables.print_stats(outputs[-1])

"""``kvjax plan``: every byte of a request before it is made."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from kvjax import tables
from kvjax.cli import options as flag
from kvjax.cli.app import app


@app.command()
@flag.generation("policy", "storage", "max_new_tokens", "memory_limit", "reserve_tokens")
def plan(
    *,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", help="Tokens of the longest prompt.")],
    context_tokens: Annotated[
        int, typer.Option("--context-tokens", help="Tokens before every prompt, which are read once.")
    ] = 0,
    model: flag.Model = flag.DEFAULT_MODEL,
    config: flag.Config = None,
    dtype: flag.Dtype = None,
    weights: flag.Weights = None,
    batch: Annotated[int, typer.Option("--batch", help="Prompts answered together.")] = 1,
    options: dict[str, Any],
    mesh: flag.Mesh = None,
    json: flag.Json = False,
) -> None:
    """Say every byte a request would allocate."""
    import kvjax

    kvjax.policies.parse(options["policy"])
    # The weights stay where they are: a plan needs their shapes alone, in the dtype they would be loaded in.
    from kvjax.checkpoints.load import weights_dtype

    asked: dict[str, Any] = dict(
        prompt_tokens=prompt_tokens, context_tokens=context_tokens, batch=batch, weights=weights, mesh=mesh, **options
    )
    planned = kvjax.plan(kvjax.load_config(model), dtype=weights_dtype(dtype), **asked)
    if json:
        tables.print_json(dataclasses.asdict(planned))
    else:
        tables.print_text(str(planned))

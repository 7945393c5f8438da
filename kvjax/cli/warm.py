"""``kvjax warm``: programs compiled before they are needed."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from kvjax import tables
from kvjax.cli import first_steps, inputs
from kvjax.cli import options as flag
from kvjax.cli.app import app
from kvjax.errors import UsageError


@app.command()
@flag.generation("storage", "memory_limit")
def warm(
    *,
    model: flag.Model = flag.DEFAULT_MODEL,
    config: flag.Config = None,
    dtype: flag.Dtype = None,
    weights: flag.Weights = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            help="Policy to compile for, such as lagkv:ratio=0.25; may be given several times; full by default.",
        ),
    ] = None,
    lengths: Annotated[str, typer.Option("--lengths", help="Comma-separated prompt lengths in tokens.")] = "256,2048",
    batch: Annotated[str, typer.Option("--batch", help="Comma-separated batch sizes.")] = "1",
    conversation: Annotated[
        bool, typer.Option("--conversation", help="Also compile what the turns of `kvjax chat` need.")
    ] = False,
    context: Annotated[
        str | None,
        typer.Option("--context", help="Text (or @FILE) as long as those that the prompts will share, if they will."),
    ] = None,
    options: dict[str, Any],
    mesh: flag.Mesh = None,
    json: flag.Json = False,
) -> None:
    """Compile ahead what later `generate` and `chat` commands will need.

    Programs are kept on disk ($KVJAX_CACHE, ~/.cache/kvjax by default) for every later process. Those that read a
    prompt onto a shared text are others: --context names such a text. So are those of `batch` and `eval`, which their
    first run compiles.
    """
    sizes = inputs.integers(lengths, "--lengths") or (), inputs.integers(batch, "--batch") or ()
    if not all(sizes):
        raise UsageError("--lengths and --batch take at least one number each.")
    policies = tuple(policy or ("full",))
    if context is not None:
        options |= {"context": inputs.text(context, "--context")}
    for each in policies:
        first_steps.check_policy(each)
    lm = first_steps.load(model, dtype, mesh, weights=weights)
    from kvjax.warming import warm as compile_ahead

    with inputs.naming_flags("lengths", "batch"):
        found = compile_ahead(lm, lengths=sizes[0], batch=sizes[1], policy=policies, chat=conversation, **options)
    if json:
        tables.print_json([dataclasses.asdict(each) for each in found])
        return
    columns = (
        tables.Column("policy", "policy"),
        tables.Column("batch", lambda each: each.batch or "conversation", right=True),
        tables.Column("tokens", "tokens", "{:,}".format, right=True),
        tables.Column("programs", "programs", right=True),
        tables.Column("seconds", "seconds", "{:.1f}".format, right=True),
    )
    tables.Report([tables.Table(columns, found, labels=1)]).print()

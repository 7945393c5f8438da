"""``kvjax tune``: the fastest block sizes of the kernels on this accelerator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvjax.cli import inputs
from kvjax.cli.app import app
from kvjax.errors import KvjaxError, UsageError
from kvjax.files import check_writable


@app.command()
def tune(
    file: Annotated[Path, typer.Argument(help="The JSON file to write; its entries for other problems are kept.")],
    operation: Annotated[
        list[str] | None,
        typer.Option(
            "--operation",
            help="ragged_decode, prefill, log_sum_exp or attention_mass; may be given several times, else all of them.",
        ),
    ] = None,
    mean: Annotated[int, typer.Option("--mean", help="Mean slots per head; for ragged_decode.")] = 2048,
    batch: Annotated[
        int, typer.Option("--batch", help="Prompts in the batch; for ragged_decode, the others take one.")
    ] = 16,
    heads: Annotated[int, typer.Option("--heads", help="KV heads.")] = 8,
    group: Annotated[int, typer.Option("--group", help="Query heads that share a KV head.")] = 4,
    head_dim: Annotated[int, typer.Option("--head-dim", help="Head dimension.")] = 128,
    dtype: Annotated[str, typer.Option("--dtype", help="Dtype of keys and values.")] = "bfloat16",
    queries: Annotated[
        str | None,
        typer.Option(
            "--queries", help="Comma-separated queries in a chunk; by default those typical of each operation."
        ),
    ] = None,
    tokens: Annotated[
        str, typer.Option("--tokens", help="Comma-separated prompt lengths; a chunk is the end of its prompt.")
    ] = "4096,32768",
) -> None:
    """Find the fastest kernel block sizes on this accelerator.

    They are saved as they are found.

    Block sizes are measured and kept by operation, device, head size, queries a KV head and dtype; ragged_decode's also
    by page size, the others' by whether the queries are a window's 16, 32 or 64, or 128, 256, 512 and more, and whether
    there are 8,192 keys. kvjax uses them where PALLAS_KERNELS_TUNED names the file; what the file does not list follows
    the kernels' own rules.
    """
    from pallas_kernels.tunable import OPERATIONS, cases
    from pallas_kernels.tune import NothingToTune
    from pallas_kernels.tune import run as search

    check_writable("The file", file)
    sizes = dict(mean=mean, batch=batch, heads=heads, group=group, head_dim=head_dim, dtype=dtype)
    problem = inputs.problem_sizes(**sizes)
    asked = inputs.integers(queries, "--queries") or (), inputs.integers(tokens, "--tokens") or ()
    try:
        given = cases(tuple(operation or OPERATIONS), problem, queries=asked[0], tokens=asked[1])
    except ValueError as error:
        raise UsageError(str(error)) from error
    try:
        search(file, given)
    except (NothingToTune, ValueError) as error:
        raise KvjaxError(str(error)) from error

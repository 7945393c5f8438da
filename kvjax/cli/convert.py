"""``kvjax convert``: writes a model in the form that loads fastest."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvjax.cli import options as flag
from kvjax.cli.app import app


@app.command()
def convert(
    model: Annotated[
        str, typer.Argument(help="A built-in name, a GGUF file, a Hugging Face folder or hub id.")
    ] = flag.DEFAULT_MODEL,
    *,
    out: Annotated[Path, typer.Option("--out", help="A folder that does not exist yet.")],
    weights: flag.Weights = None,
    dtype: flag.Dtype = None,
) -> None:
    """Write a model as kvjax stores it.

    Prints the folder, which every command takes as --model and loads without converting anything.
    """
    import kvjax
    from kvjax.model.quantised import check_weights

    print(kvjax.convert(model, out, weights=check_weights(weights), dtype=dtype))

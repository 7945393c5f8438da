"""``kvjax fetch``: puts a model in the user's cache ahead of time."""

from __future__ import annotations

from typing import Annotated

import typer

from kvjax.cli import options as flag
from kvjax.cli.app import app


@app.command()
def fetch(
    model: Annotated[
        str, typer.Argument(help="A built-in name, a hub id, or one with :FILE.gguf.")
    ] = flag.DEFAULT_MODEL,
) -> None:
    """Download a model into the cache folder.

    Downloads nothing when it is there already ($KVJAX_CACHE, ~/.cache/kvjax by default); prints its path.
    """
    from kvjax.checkpoints import hub

    print(hub.fetch(model))

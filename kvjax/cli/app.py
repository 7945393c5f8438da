"""The application; the module of each command adds the command to it. Nothing heavy is imported until one runs."""

import functools
from typing import Annotated, Any

import typer

import kvjax

INTERRUPTED = 130  # what a shell reports for a process ended by SIGINT

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,  # main.py prints one sentence instead
    rich_markup_mode=None,
)


@functools.cache
def root_command() -> Any:
    """The application as click's command, made once a process: lines are parsed by it, and refusals name its flags."""
    return typer.main.get_command(app)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"kvjax {kvjax.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Generate with language models whose KV cache is really compressed."""

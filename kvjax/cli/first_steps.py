"""The first steps that commands share: checks before anything is loaded, loading, and log lines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax.errors import UsageError
from kvjax.files import check_folder
from kvjax.progress import stage

if TYPE_CHECKING:
    from kvjax.checkpoints.load import LanguageModel
    from kvjax.sharding.mesh import Mesh


def load(
    model: str,
    dtype: str | None,
    mesh: Mesh | str | None = None,
    *,
    weights: str | None = None,
    compile_cache: bool = True,
) -> LanguageModel:
    """The model by name, path or hub id; the command shows what goes on."""
    asked = {"dtype": dtype, "weights": weights, "mesh": mesh}
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    with stage("load", model, unit="bytes"):  # JAX's import among it
        import kvjax

        return kvjax.load(model, compile_cache=compile_cache, **given)


def check_policy(policy: str | None) -> None:
    """Report a misspelt policy before the model is loaded."""
    if policy is None:
        return
    with stage("load", "libraries"):
        from kvjax import policies

        policies.parse(policy)


def check_results(out: Path) -> None:
    """Refuse, before anything is measured, a folder that cannot be written to and a missing matplotlib."""
    from kvjax.figures import require_matplotlib

    require_matplotlib()
    check_folder("--out", out)


def within_context(model: str, length: int | None) -> int | None:
    """A length that nobody typed, or the model's context if that is less."""
    import kvjax

    return None if length is None else min(length, kvjax.load_config(model).max_position)


def check_length(model: str, length: int | None) -> None:
    """Refuse a length beyond the model's context before its weights are read."""
    import kvjax

    most = kvjax.load_config(model).max_position
    if length is not None and length > most:
        raise UsageError(f"The length {length} is beyond the model's context of {most} tokens.")


def say(command: str, what: str) -> None:
    """A line about how a long command goes on, on standard error."""
    print(f"kvjax {command}: {what}", file=sys.stderr, flush=True)

"""First steps of every command that runs a model: the compilation cache, and loading with progress on stderr."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from kvjax.progress import stage

if TYPE_CHECKING:
    from kvjax.checkpoints.load import LanguageModel
    from kvjax.sharding.mesh import Mesh

# Programs of a 135M model take about a megabyte each; the oldest are dropped beyond this.
COMPILE_CACHE_BYTES = 2 * 2**30


def enable_compile_cache() -> None:
    """Keep compiled programs in the user's cache folder, so that a second process starts fast.

    ``JAX_COMPILATION_CACHE_DIR`` names another. JAX trusts what it reads there, so the folder is the user's own.
    """
    import jax

    from kvjax.files import cache_folder

    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
        jax.config.update("jax_compilation_cache_max_size", COMPILE_CACHE_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def load(model: str, dtype: str | None, mesh: Mesh | str | None = None) -> LanguageModel:
    """The model by name, path or hub id; the command shows what goes on."""
    given: dict[str, Any] = {name: value for name, value in (("dtype", dtype), ("mesh", mesh)) if value is not None}
    with stage("load", model, unit="bytes"):  # JAX's import among it
        import kvjax

        return kvjax.load(model, **given)


def check_policy(policy: str | None) -> None:
    """A misspelt policy is said before the model is loaded."""
    if policy is None:
        return
    with stage("load", "libraries"):
        from kvjax import policies

        policies.parse(policy)

"""What every command that runs a model does first: the compilation cache, and loading with progress on stderr."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from kvjax.errors import UsageError

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from kvjax.model.load import LanguageModel

# Programs of a 135M model take about a megabyte each; the oldest are dropped beyond this.
COMPILE_CACHE_BYTES = 2 * 2**30


def enable_compile_cache() -> None:
    """Keep compiled programs in the user's cache folder, so that a second process starts fast.

    ``JAX_COMPILATION_CACHE_DIR`` names another. JAX trusts what it reads there, so the folder is the user's own.
    """
    import jax

    from kvjax.model.fetch import cache_folder

    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
        jax.config.update("jax_compilation_cache_max_size", COMPILE_CACHE_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def load(model: str, dtype: str | None, mesh: tuple[int, int] | None = None) -> LanguageModel:
    """The model by name, path or hub id, over a mesh of (data, model) devices; progress goes to standard error."""
    import kvjax

    keywords: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    if mesh is not None:
        keywords["mesh"] = local_mesh(*mesh)
    return kvjax.load(model, **keywords)


def local_mesh(data: int, model: int) -> Mesh:
    """This process' part of a mesh over the devices of all: ``data`` is divided among processes, ``model`` is not."""
    import jax
    import numpy as np
    from jax.sharding import Mesh

    processes, devices = jax.process_count(), jax.local_devices()
    if data % processes:
        raise UsageError(f"--mesh has data={data}, which {processes} processes do not divide; give a multiple of them.")
    here = data // processes
    if here * model > len(devices):
        raise UsageError(
            f"--mesh data={data},model={model} needs {here * model} devices a process and this one has {len(devices)}; "
            "model is split over the devices of one process, data over all."
        )
    return Mesh(np.array(devices[: here * model]).reshape(here, model), ("data", "model"))

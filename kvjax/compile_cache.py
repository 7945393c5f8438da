"""Keeps compiled programs in the user's cache folder, so that a second process starts fast."""

from __future__ import annotations

import os

from kvjax.environment import switched

#: Programs of a 135M model take about a megabyte each; the oldest are dropped beyond this.
MOST_BYTES = 2 * 2**30
#: Switches it off where it is 0.
SWITCH = "KVJAX_COMPILE_CACHE"
#: JAX's settings of what is worth keeping: here everything, as a start is made of many small programs too.
_WORTH = {"jax_persistent_cache_min_compile_time_secs": 0.0, "jax_persistent_cache_min_entry_size_bytes": 0}


def keep_compiled_programs() -> None:
    """Keep what JAX compiles from here on, of this whole process, in the folder ``xla`` of kvjax's cache.

    JAX trusts what it reads there, so the folder is the user's own. A user's own setting wins: a folder that JAX was
    given (``JAX_COMPILATION_CACHE_DIR`` or ``jax_compilation_cache_dir``) stays, and so does any of its limits that is
    in the environment. ``KVJAX_COMPILE_CACHE=0`` keeps nothing.
    """
    if not switched(SWITCH, True):
        return
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    from kvjax.files import cache_folder

    for name, value in _WORTH.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    if jax.config.jax_compilation_cache_dir:  # pyright: ignore[reportAttributeAccessIssue]
        return
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    if "JAX_COMPILATION_CACHE_MAX_SIZE" not in os.environ:
        jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
    # JAX looks for a folder at its first compilation and no more; what was compiled before stays compiled.
    compilation_cache.reset_cache()

"""Compiles a jitted function in a thread, so that the caller is told what goes on and Ctrl-C is answered.

Only the first call of a form comes here with work to do: a call whose form is there runs as any jitted function does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.monitoring
import numpy as np

from kvjax import progress, waiting
from kvjax.interrupt import breakably
from kvjax.waiting import in_thread, wait_for_abandoned

#: The seconds that a call waited for its own compilation, which had begun before.
_WAITED = "/jax/core/compile/kvjax_waited"


class _NotCompiled(Exception):
    """A call would have to be traced first."""


_probing = threading.local()
#: Functions that may be traced and not compiled: their shapes were asked for, or their compilation was broken off. A
#: call of one would compile it unseen.
_traced: set[Any] = set()
#: Functions that are being compiled for a later call, with what waits for it; and all forms for which that was begun.
_ahead: dict[Any, Callable[[], Any]] = {}
_begun: set[Any] = set()


def on_trace() -> None:
    """To be called first by a function that :func:`call` calls: tells that it is being traced."""
    if getattr(_probing, "on", False):
        _probing.on = False
        raise _NotCompiled


def start(jitted: Any, *arguments: Any, **static: Any) -> None:
    """Begin to compile for arguments like these, arrays or their shapes, while the caller does something else.

    The next :func:`call` waits for it. A form that was begun once is not begun again.
    """
    leaves, tree = jax.tree.flatten((arguments, static))
    form = jitted, tree, tuple((np.shape(leaf), getattr(leaf, "dtype", leaf)) for leaf in leaves)
    if form in _begun or jitted in _ahead or jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        return
    _begun.add(form)
    _traced.add(jitted)
    _ahead[jitted] = waiting.start(jitted.lower(*arguments, **static).compile)


def call(jitted: Any, name: str, *arguments: Any, **static: Any) -> Any:
    """Call ``jitted(*arguments, **static)``.

    Raises:
      BrokenOff: Ctrl-C was pressed while it was traced or compiled; nothing has run, and nothing was donated.
    """
    if jitted not in _traced:
        _probing.on = True
        try:
            return jitted(*arguments, **static)
        except _NotCompiled:
            pass
        finally:
            _probing.on = False
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arguments)):
        _traced.add(jitted)
    elif not jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        _compile(jitted, name, arguments, static)
    return jitted(*arguments, **static)


def _compile(jitted: Any, name: str, arguments: Any, static: dict[str, Any]) -> None:
    """Trace here, where JAX's settings of this thread hold, and compile in another thread."""
    with progress.compiling(name):
        _traced.add(jitted)
        if (wait := _ahead.pop(jitted, None)) is not None:
            began = time.perf_counter()
            breakably(wait)
            jax.monitoring.record_event_duration_secs(_WAITED, time.perf_counter() - began)
        breakably(wait_for_abandoned)
        lowered = breakably(lambda: jitted.lower(*arguments, **static))
        breakably(lambda: in_thread(lowered.compile))
        _traced.discard(jitted)

"""Programs to compile: a function, its arguments' shapes, and limits for the compiled program."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

#: Modules with a function ``cases()``, in the order of the report; one that is not installed is left out.
MODULES = (
    "tools.aot.cases_decode",
    "tools.aot.cases_decode_gpu",
    "tools.aot.cases_mass",
    "tools.aot.cases_matmul",
    "tools.aot.cases_prefill",
    "tools.aot.cases_pages",
    "tools.aot.cases_step",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One program.

    Attributes:
      name: unique within the operation.
      operation: heading under which it is reported.
      function: called with ``arguments``, a tuple of pytrees of ``jax.ShapeDtypeStruct``.
      cache_bytes: bytes of the cache that it reads; temporary memory must be below ``temp_limit`` times these.
      platforms: "tpu", "gpu". targets: the only ones, where not all of the platform can run it.
      kernels: names of the kernels, as given to ``pallas_call``, that limits apply to; by default the operation's on
        TPU, where XLA's own programs are profiled too, and all on GPU.
      donated: positions of donated arguments.
      layouts: by position of an argument, a function of (target name, leaf) that returns a layout, or None for the
        default.
      block_bytes: by target, bytes that one iteration of the kernel's loop reads, to compare its cycles with.
      bundles: by target, most instructions of an iteration of the kernel's loop.
      spills: most registers spilled.
      temp_limits: by target, where its compiler needs more than ``temp_limit``.
    """

    name: str
    operation: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    cache_bytes: int
    platforms: tuple[str, ...] = ("tpu", "gpu")
    targets: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    donated: tuple[int, ...] = ()
    layouts: Mapping[int, Callable[[str, Any], Any]] = dataclasses.field(default_factory=dict)
    block_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    bundles: Mapping[str, int] = dataclasses.field(default_factory=dict)
    spills: int = 0
    temp_limit: float = 0.01
    temp_limits: Mapping[str, float] = dataclasses.field(default_factory=dict)


def collect(modules: Sequence[str] = MODULES) -> list[Case]:
    """Cases of these modules."""
    found = [importlib.import_module(name) for name in modules if _exists(name)]
    return [case for module in found for case in module.cases()]


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False

"""A bare accelerator machine has JAX and NumPy; the kernels' annotations name jaxtyping, and nothing else of it."""

from __future__ import annotations

import sys
import types
from typing import Any


class _Shaped:
    """``Float[Array, "B H"]`` is its array."""

    def __class_getitem__(cls, item: Any) -> Any:
        return item[0]


def stand_in() -> None:
    """Where jaxtyping is not installed, put empty annotations in its place."""
    try:
        import jaxtyping  # noqa: F401
    except ImportError:
        _install()


def _install() -> None:
    import jax

    module = types.ModuleType("jaxtyping")
    names: dict[str, Any] = {"Array": jax.Array, **dict.fromkeys(("Float", "Int", "Bool", "Shaped"), _Shaped)}
    module.__dict__.update(names)
    sys.modules["jaxtyping"] = module

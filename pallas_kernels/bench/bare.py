"""A stand-in for jaxtyping on machines with JAX and NumPy alone: the kernels use it only in annotations."""

from __future__ import annotations

import sys
import types
from typing import Any


class _Shaped:
    """``Float[Array, "B H"]`` is ``Array``."""

    def __class_getitem__(cls, item: Any) -> Any:
        return item[0]


def stand_in() -> None:
    """Install the stand-in where jaxtyping cannot be imported."""
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

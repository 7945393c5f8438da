"""Which implementation of an operation runs: the first of the platform's that fits, XLA last.

An implementation that cannot do what it is asked raises ``NotImplementedError`` while it is traced, before anything
runs, and the next is tried. One that was named by the caller fails loudly instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax


def platform() -> str:
    """Platform compiled for: the abstract device's, when compiling ahead of time, else the default backend's."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    name = device.platform if device is not None and device.platform else jax.default_backend()
    return "gpu" if name in ("cuda", "rocm") else name


def run(
    operation: str,
    implementations: Mapping[str, Callable[..., Any]],
    order: Mapping[str, Sequence[str]],
    implementation: str | None,
    *args: Any,
    **keywords: Any,
) -> Any:
    """Call the first implementation of this platform's order that fits.

    Args:
      operation: its name, for messages.
      implementations: by name; "xla" is among them.
      order: names to try for each platform, before "xla".
      implementation: the only one to try, or ``None``.
      keywords: options of the implementation that is named; another knows none of them, or takes them for its own.

    Raises:
      ValueError: ``implementation`` is not one of them, or there are options and it is not named.
      NotImplementedError: the one that was named does not fit.
    """
    if implementation is not None:
        if implementation not in implementations:
            names = ", ".join(implementations)
            raise ValueError(f"{operation} has no implementation {implementation!r}; there are {names}.")
        return implementations[implementation](*args, **keywords)
    if keywords:
        names = ", ".join(keywords)
        raise ValueError(f"{operation} was given {names} for no implementation; name the one that is meant.")
    for name in order.get(platform(), ()):
        try:
            return implementations[name](*args, **keywords)
        except NotImplementedError:
            continue
    return implementations["xla"](*args, **keywords)

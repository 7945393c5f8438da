"""Chooses an operation's implementation: the platform's first that supports the problem, with XLA as the fallback.

An implementation that cannot do what it is asked raises ``NotImplementedError`` while it is traced, before anything
runs, and the next one is tried. One that the caller names is the only one tried, and its error is the caller's.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax


def abstract_device() -> Any:
    """The device that is compiled for ahead of time, or ``None`` where it is one of this process's own."""
    return getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)


def platform() -> str:
    """Platform compiled for: the abstract device's, when compiling ahead of time, else the default backend's."""
    device = abstract_device()
    name = device.platform if device is not None and device.platform else jax.default_backend()
    return "gpu" if name in ("cuda", "rocm") else name


def device_kind() -> str:
    """``device_kind`` of the device compiled for; "" where an abstract device has none."""
    return (abstract_device() or jax.devices()[0]).device_kind or ""


class Implementations:
    """The implementations of one operation by name, and the order in which each platform tries them.

    Attributes:
      operation: its name, for messages.
      functions: by name; "xla" is among them and is tried last on every platform.
      order: names to try for each platform, before "xla".
    """

    def __init__(self, operation: str, package: str, function: str, order: Mapping[str, Sequence[str]]) -> None:
        """Implementation ``name`` is the function of module ``package.name``, imported when it is first tried.

        So a machine without a GPU never loads a GPU's compiler.
        """
        self.operation = operation
        self.order = {platform: tuple(names) for platform, names in order.items()}
        names = [name for some in self.order.values() for name in some]
        self.functions = {name: _imported(f"{package}.{name}", function) for name in (*names, "xla")}

    def __getitem__(self, name: str) -> Callable[..., Any]:
        """Look up an implementation.

        Raises:
          ValueError: there is none of this name.
        """
        if name not in self.functions:
            names = ", ".join(self.functions)
            raise ValueError(f"{self.operation} has no implementation {name!r}; there are {names}.")
        return self.functions[name]

    def register(self, name: str, function: Callable[..., Any], platforms: Sequence[str] = ()) -> None:
        """Add an implementation.

        Args:
          name: how callers name it.
          function: takes the operation's ``Problem`` and its own options; raises ``NotImplementedError`` while it is
            traced where it cannot do what is asked.
          platforms: "cpu", "gpu" or "tpu", where it is tried first from now on; elsewhere it runs only if it is named.

        Raises:
          ValueError: there is one of this name.
        """
        if name in self.functions:
            raise ValueError(f"{self.operation} already has an implementation {name!r}.")
        self.functions[name] = function
        for platform in platforms:
            self.order[platform] = (name, *self.order.get(platform, ()))

    def run(self, implementation: str | None, *args: Any, **options: Any) -> Any:
        """Call the implementation that is named, or the first of this platform's order that can do what is asked.

        Args:
          implementation: the only one to try, or ``None``.
          options: of the implementation that is named.

        Raises:
          ValueError: there is none of this name, or there are options and none is named.
          NotImplementedError: the one that is named cannot do what is asked.
        """
        if implementation is not None:
            return self[implementation](*args, **options)
        if options:
            names = ", ".join(options)
            raise ValueError(f"{self.operation} was given {names} for no implementation; name the one that is meant.")
        for name in self.order.get(platform(), ()):
            try:
                return self.functions[name](*args)
            except NotImplementedError:
                continue
        return self.functions["xla"](*args)


def _imported(module: str, function: str) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        return getattr(importlib.import_module(module), function)(*args, **options)

    return run

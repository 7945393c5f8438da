"""A mesh of devices, and the one table that says which axis of it each logical axis of an array goes over.

Rows of a batch go over "data"; KV heads, MLP channels and vocabulary go over "model". The model axis is cut into its
prime factors, as axes of the JAX mesh, because an array may take some of them for one thing and the rest for another:
3 KV heads on 6 devices are sharded over the factor 3, and the pages of each head over the factor 2
(``cache/page_sharding.py``).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType
from jax.sharding import Mesh as JaxMesh

from kvjax.checks import read_whole_number, whole_number
from kvjax.errors import UsageError, quoted

#: Devices along an axis; the largest machines have fewer.
MOST_DEVICES = 2**16
#: Logical axis of weights and caches -> axis of the mesh. A size that the axis does not divide is not sharded.
RULES = {"batch": "data", "kv_heads": "model", "mlp": "model", "vocab": "model"}


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Devices in ``data`` rows of ``model``: "data=4,model=2" as text.

    Attributes:
      data: how many ways the rows of a batch are divided.
      model: how many ways the weights, and each row's cache, are divided.
      devices: these devices, data-major; by default the first ``data * model`` that JAX has, in the order in which
        neighbours along the model axis are close.
    """

    data: int = 1
    model: int = 1
    devices: tuple[Any, ...] | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        whole_number("data", self.data, 1, MOST_DEVICES)
        whole_number("model", self.model, 1, MOST_DEVICES)
        if self.devices is not None and not isinstance(self.devices, (tuple, list)):
            raise UsageError(f"devices is {quoted(self.devices)}; give a tuple of JAX's devices.")
        if self.devices is not None and len(self.devices) != self.size:
            raise UsageError(f"The mesh {self} needs {self.size} devices; {len(self.devices)} were given.")

    @property
    def size(self) -> int:
        return self.data * self.model

    @property
    def factors(self) -> tuple[tuple[str, int], ...]:
        """Name and size of the axes that the model axis is cut into; none when it is 1."""
        return tuple((f"model{i}", size) for i, size in enumerate(_primes(self.model)))

    @property
    def model_axes(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(name for name, _ in self.factors)

    def axes_dividing(self, count: int) -> tuple[str, ...]:
        """The axes, of all subsets of the factors, over most devices whose number divides ``count``."""
        taken = []
        for name, size in self.factors:  # primes: whether one divides does not hang on the others
            if count % size == 0:
                count //= size
                taken.append(name)
        return tuple(taken)

    def parts(self, axes: tuple[str, ...]) -> int:
        """Devices along these axes."""
        sizes = dict(self.factors)
        return math.prod(sizes[name] for name in axes)

    @property
    def jax(self) -> JaxMesh:
        """The JAX mesh; UsageError when there are too few devices."""
        return _jax_mesh(self)

    def rows(self, batch: int) -> int:
        """Rows with the padding that makes ``data`` divide them."""
        return -(-batch // self.data) * self.data

    def __str__(self) -> str:
        return f"data={self.data},model={self.model}"


def parse_mesh(value: Any) -> Mesh | None:
    """A mesh from its text form ("data=4,model=2"), or from a JAX mesh with axes called so; None and a Mesh pass.

    Raises:
      UsageError: another form, an unknown axis, or a size that is not a whole number of at least 1.
    """
    if value is None or isinstance(value, Mesh):
        return value
    if isinstance(value, JaxMesh):
        if not set(value.axis_names) <= {"data", "model"}:
            names = ", ".join(map(str, value.axis_names))
            raise UsageError(f"The mesh has the axes {names}; name them data and model.")
        order = sorted(range(value.devices.ndim), key=lambda i: value.axis_names[i])
        return Mesh(**dict(value.shape), devices=tuple(value.devices.transpose(order).flat))
    if not isinstance(value, str):
        raise UsageError(f'mesh is {quoted(value)}; give a kvjax.Mesh or text such as "data=4,model=2".')
    sizes: dict[str, int] = {}
    for part in (item.strip() for item in value.split(",")):
        name, _, size = (piece.strip() for piece in part.partition("="))
        try:
            if name not in ("data", "model") or name in sizes:
                raise ValueError
            sizes[name] = read_whole_number(size, 1, MOST_DEVICES)
        except ValueError as error:
            raise UsageError(
                f'{quoted(part)} is no part of a mesh; write "data=4,model=2", each at most once, each from 1 to '
                f"{MOST_DEVICES}."
            ) from error
    return Mesh(sizes.get("data", 1), sizes.get("model", 1))


def _primes(number: int) -> list[int]:
    found, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return found


@functools.lru_cache(maxsize=32)
def _jax_mesh(mesh: Mesh) -> JaxMesh:
    shape = (mesh.data, *(size for _, size in mesh.factors))
    names = ("data", *mesh.model_axes)
    if mesh.devices is not None:
        return JaxMesh(np.array(mesh.devices).reshape(shape), names, axis_types=(AxisType.Auto,) * len(names))
    there = jax.devices()
    if len(there) < mesh.size:
        raise UsageError(f"The mesh {mesh} needs {mesh.size} devices and this machine has {len(there)}.")
    grid = near_grid(mesh.data, mesh.model, there[: mesh.size])
    return JaxMesh(grid.reshape(shape), names, axis_types=(AxisType.Auto,) * len(names))


def near_grid(data: int, model: int, devices: Sequence[Any]) -> np.ndarray:
    """[data, model] devices such that neighbours along the model axis are close in the machine."""
    return mesh_utils.create_device_mesh((data, model), devices, allow_split_physical_axes=True)

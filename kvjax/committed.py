"""Arrays that are committed to their device, in JAX's word.

A program is compiled once for committed arguments and once for others, and what takes part with a committed array is
committed. What comes from host memory or from a file always is. So that a conversation needs each program once wherever
it has been in between, weights are committed from the start, and so is what is put beside them.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax

Tree = TypeVar("Tree")


def committed(tree: Tree) -> Tree:
    """The same arrays, committed to where they are."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, jax.device_put(leaves, [leaf.sharding for leaf in leaves]))


def put_beside(other: Any, values: Tree) -> Tree:
    """NumPy's arrays on the device, committed if ``other``, an array or its shape, is committed to one.

    Beside what is on a mesh they are not: there the program says where they go.
    """
    return jax.device_put(values, _device_of(other))


def shapes_beside(other: Any, shapes: Tree) -> Tree:
    """The shapes of arrays that are where :func:`put_beside` would put them."""
    where = _device_of(other)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes)


def _device_of(array: Any) -> jax.sharding.SingleDeviceSharding | None:
    """The one device that an array, or the shape of one, is committed to; None if there is none."""
    where = getattr(array, "sharding", None)
    alone = isinstance(where, jax.sharding.SingleDeviceSharding) and getattr(array, "committed", True)
    return where if alone else None

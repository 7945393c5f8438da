"""Between device memory and pinned host memory: whole arrays, each where its own sharding says."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.waiting import ready

HOST, DEVICE = "pinned_host", "device"

Tree = TypeVar("Tree")


def to_host(tree: Tree) -> Tree:
    """Every array of a tree in pinned host memory, by one call; what is there stays."""
    return _move(tree, HOST)


def to_device(tree: Tree) -> Tree:
    """Every array of a tree in its devices' memory, by one call; what is there stays."""
    return _move(tree, DEVICE)


def _move(tree: Any, kind: str) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    # A counter may be NumPy's, which is nowhere yet; and a row's rounds may be another process's.
    here = [isinstance(leaf, jax.Array) and len(leaf.addressable_shards) > 0 for leaf in leaves]
    away = [i for i, leaf in enumerate(leaves) if here[i] and leaf.sharding.memory_kind != kind]
    if not away:
        return tree
    moved = jax.device_put([leaves[i] for i in away], [leaves[i].sharding.with_memory_kind(kind) for i in away])
    for i, leaf in zip(away, moved, strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(structure, leaves)


def sendable(tree: Any, where: Any) -> Any:
    """Arrays that one ``jax.device_put`` brings to ``where`` (a sharding, or a tree of them).

    An array that several devices have whole is sent from NumPy's when it goes to other devices: to some of its own, JAX
    would hand on the buffer that is there, whatever memory that is in.
    """
    there = where if not isinstance(where, jax.sharding.Sharding) else jax.tree.map(lambda _: where, tree)

    def sent(leaf: Any, target: jax.sharding.Sharding) -> Any:
        here = leaf.sharding.device_set if isinstance(leaf, jax.Array) else ()
        return np.asarray(leaf) if len(here) > 1 and here != target.device_set else leaf

    return jax.tree.map(sent, tree, there)


def device_bytes(arrays: Iterable[Any]) -> int:
    """Bytes of arrays on each device that has some of them; on a mesh all devices hold equally many."""
    here = (x for x in arrays if isinstance(x, jax.Array))  # a counter may be NumPy's
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in here)


def live_on_device() -> list[jax.Array]:
    """All arrays that exist in this process, those in host memory left out."""
    arrays = (x for x in jax.live_arrays() if not x.is_deleted() and x.sharding.memory_kind != HOST)
    return [x for x in arrays if not jnp.issubdtype(x.dtype, jax.dtypes.extended)]


def live_device_bytes() -> int:
    """Bytes on each device of all arrays that exist in this process, those in host memory left out."""
    return device_bytes(live_on_device())


def as_numpy(x: Any) -> np.ndarray:
    """An array's numbers on this host, whichever processes hold its parts."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable and not x.is_fully_replicated:
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(ready(x))

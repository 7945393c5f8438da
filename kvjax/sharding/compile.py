"""Compiles a program, declared once, for one device or for all devices of a mesh.

A :class:`Program` is a pure function of a device and of arrays, its static arguments, and what it donates. On one
device it is jitted as it is. On a mesh every device runs it under ``jax.shard_map``, on its own rows, heads and
weights; what goes where follows from the *types* of the arguments and results:

* a ``Decoder`` or one of its layers: its weights' logical axes (``placement.py``), handed to the function as this
  device's part of it; a layer is that of the number that the device has (``Partition.at``);
* a ``Cache``: the sharding of each of its pools, handed over with the static fields of one device; what its rows
  share is handed over too, never donated, and is no result;
* anything with a ``logical_axes`` method: axes by name, "batch", "kv_head" and "slot";
* other arrays: batch rows first, and scalars everywhere.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from kvjax.cache.cache import Cache, attach, detach
from kvjax.cache.groups import Layer
from kvjax.cache.page_sharding import UNSHARDED, PageSharding
from kvjax.cache.pool import layout_for
from kvjax.cache.quantisation import Storage
from kvjax.cache.shared_context import SharedContext
from kvjax.model.config import ModelConfig
from kvjax.model.decoder import Decoder, DecoderLayer
from kvjax.policies.base import Policy
from kvjax.policies.empty_cache import empty_cache
from kvjax.policies.page_capacities import page_capacities
from kvjax.sharding import compile_thread
from kvjax.sharding.exchange import local_decoder, local_layer
from kvjax.sharding.mesh import Mesh
from kvjax.sharding.partition import Partition
from kvjax.sharding.placement import ROWS, cache_specs, context_specs, leaves_of, weight_specs

Tree = TypeVar("Tree")

#: Results as :attr:`Program.results` names them: an array that leads with batch rows, and a scalar.
ROW, SCALAR = jax.ShapeDtypeStruct((1,), np.int32), jax.ShapeDtypeStruct((), np.int32)


@dataclasses.dataclass(frozen=True)
class OneDevice:
    """The device of a program without a mesh; :class:`kvjax.sharding.partition.Partition` is that of one with it.

    Attributes:
      config: the model. policy: of the cache that the program makes or continues.
    """

    config: ModelConfig
    policy: Policy
    mesh: ClassVar[Mesh | None] = None
    head_sharding: ClassVar[PageSharding] = UNSHARDED
    #: Sums counts of rows over the devices of the data axis; there is nothing to sum here.
    over_rows: ClassVar[None] = None

    @property
    def local_config(self) -> ModelConfig:
        return self.config

    @property
    def local_policy(self) -> Policy:
        return self.policy

    def at(self, layer: int) -> OneDevice:
        return self

    def pages(
        self, prompt_capacity: int, new_capacity: int, storage: Storage, own_capacity: int | None = None
    ) -> tuple[tuple[int, ...], ...]:
        page_size = layout_for(storage, self.config.head_dim).page_size
        return page_capacities(self.policy, self.config, prompt_capacity, new_capacity, page_size, own_capacity)

    def empty_layer(self, layer: int, batch: int, pages: tuple[int, ...], dtype: Any, storage: Storage) -> Layer:
        return self.policy.init_layer(self.config, layer, batch, pages, dtype, storage)

    def empty(self, batch: int, *capacities: Any, **more: Any) -> Cache:
        return empty_cache(self.config, self.policy, batch, *capacities, **more)

    def local(self, cache: Cache) -> Cache:
        return cache


Device = OneDevice | Partition


def device_of(mesh: Mesh | None, config: ModelConfig, policy: Policy) -> Device:
    """The device that programs of this model and policy are compiled for."""
    return OneDevice(config, policy) if mesh is None else Partition(mesh, config, policy)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Named:
    """An array with named axes: "batch", "kv_head", "slot" (where devices share heads: of their pages), or None."""

    values: Any
    axes: tuple[str | None, ...] = dataclasses.field(metadata={"static": True})

    def logical_axes(self) -> list[tuple[str | None, ...]]:
        return [self.axes]


@dataclasses.dataclass(frozen=True)
class Program:
    """A pure function to be compiled.

    Attributes:
      function: ``function(device, *arrays, **static)``; a tree of arrays.
      results: ``results(device, arrays, static)``: a tree like the results, from which alone their types matter; None
        of a program that no mesh runs.
      static: names of the static arguments. donates: places of the arguments whose buffers the results take over: a
        cache's keys and values, and all arrays of what holds no cache.
    """

    function: Callable[..., Any]
    results: Callable[[Any, Sequence[Any], dict[str, Any]], Any] | None = None
    static: tuple[str, ...] = ()
    donates: tuple[int, ...] = ()

    def __call__(self, device: Device, *arguments: Any, donate: bool = True, **static: Any) -> Any:
        """Run on the device or mesh; what is donated is consumed unless ``donate`` is False."""
        split = self._split(_put(device, arguments))
        jitted = _compiled(self, donate and bool(self.donates))
        found = compile_thread.call(jitted, self.function.__name__, *split, device=device, **static)
        contexts = _contexts(arguments)
        return _map_nodes({Cache: lambda cache: cache.replace(context=contexts[0])}, found) if contexts else found

    def onto(self, device: Device, *arguments: Any, cache: Cache, pages: Any, consume: bool, **static: Any) -> Any:
        """Run on a cache that will hold ``pages``; where it is to be consumed, its buffers are reused if they fit."""
        fits = pages == tuple(layer.pages for layer in device.local(cache).layers)
        found = self(device, *arguments, donate=consume and fits, **static)
        if consume and not fits:
            for pool in jax.tree.leaves(take_pools(cache)[0]):
                pool.delete()
        return found

    def compile_ahead(self, device: Device, *arguments: Any, **static: Any) -> None:
        """Begin to compile it for arguments like these, arrays or their shapes; the next call waits for it."""
        compile_thread.start(_compiled(self, bool(self.donates)), *self._split(arguments), device=device, **static)

    def lower(self, device: Device, *arguments: Any, donate: bool = True, **static: Any) -> Any:
        """As ``jax.jit(...).lower``: to compile ahead of time, or to look at what XLA makes of it."""
        return _compiled(self, donate and bool(self.donates)).lower(*self._split(arguments), device=device, **static)

    def trace(self, device: Device, *arguments: Any, **static: Any) -> Any:
        """As ``jax.jit(...).trace``."""
        return _compiled(self, bool(self.donates)).trace(*self._split(arguments), device=device, **static)

    def compilations(self) -> int:
        """How many forms of it this process has compiled and still holds."""
        return sum(_compiled(self, donate)._cache_size() for donate in {False, bool(self.donates)})

    def _split(self, arguments: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """(what may be donated, the rest).

        A cache's counters stay with the rest: they may share a buffer (two equal outputs of a program do), and a buffer
        is donated only once.
        """
        donated, rest = [], list(arguments)
        for place in self.donates:
            pools, rest[place] = take_pools(arguments[place])
            donated.append(pools if pools else arguments[place])
            rest[place] = rest[place] if pools else None
        return donated, rest

    def _joined(self, donated: Sequence[Any], rest: Sequence[Any]) -> list[Any]:
        arguments = list(rest)
        for place, pools in zip(self.donates, donated, strict=True):
            arguments[place] = pools if rest[place] is None else put_pools(pools, rest[place])
        return arguments


@functools.cache
def _compiled(program: Program, donate: bool) -> Any:
    def run(donated: list[Any], rest: list[Any], *, device: Device, **static: Any) -> Any:
        compile_thread.on_trace()
        arguments = program._joined(donated, rest)
        if isinstance(device, OneDevice):
            return _own(program.function(device, *arguments, **static))
        return _on_mesh(program, device, arguments, static)

    run.__name__ = program.function.__name__
    names = ("device", *program.static)
    return jax.jit(run, static_argnames=names, donate_argnames=("donated",) if donate else ())


def _on_mesh(program: Program, device: Partition, arguments: Sequence[Any], static: dict[str, Any]) -> Any:
    """The program on every device, of each argument its shard."""
    local = _map_nodes({Cache: device.local}, list(arguments))
    leaves, tree = jax.tree.flatten(local)
    made: list[Any] = []
    assert program.results is not None, f"{program.function.__name__} is a program of one device"

    def run(shards: list[Array]) -> list[Array]:
        parts: dict[type, Any] = {
            Decoder: lambda params: local_decoder(params, device),
            DecoderLayer: lambda layer: local_layer(layer, device),
        }
        given = _map_nodes(parts, jax.tree.unflatten(tree, shards))
        found, structure = jax.tree.flatten(_own(program.function(device, *given, **static)))
        made[:] = [structure]
        return found

    wanted = specs_of(_own(program.results(device, arguments, static)), device)
    mapped = jax.shard_map(
        run, mesh=device.mesh.jax, in_specs=(specs_of(list(arguments), device),), out_specs=wanted, check_vma=False
    )
    found = mapped(leaves)
    return _map_nodes({Cache: device.all, SharedContext: device.all_shared}, jax.tree.unflatten(made[0], found))


# --- by type ------------------------------------------------------------------------------------------------------


def _map_nodes(functions: dict[type, Callable[[Any], Any]], tree: Tree) -> Tree:
    """Nodes of these types replaced, wherever they are in a tree."""

    def mapped(node: Any) -> Any:
        return functions.get(type(node), lambda same: same)(node)

    return jax.tree.map(mapped, tree, is_leaf=lambda node: type(node) in functions)


def _contexts(tree: Any) -> list[SharedContext]:
    """The contexts that the caches of a tree share."""
    found: list[SharedContext] = []

    def noted(cache: Cache) -> Cache:
        found.extend([] if cache.context is None else [cache.context])
        return cache

    _map_nodes({Cache: noted}, tree)
    return found


def _own(tree: Tree) -> Tree:
    """The caches of a tree without the contexts that they share: a program that returned them would copy them."""
    return _map_nodes({Cache: lambda cache: cache.replace(context=None)}, tree)


def take_pools(tree: Tree) -> tuple[list[Any], Tree]:
    """The keys and values of all caches of a tree, and the tree without them."""
    pools: list[Any] = []

    def without(cache: Cache) -> Cache:
        kv, rest = detach(cache)
        pools.append(kv)
        return rest

    rest = _map_nodes({Cache: without}, tree)
    return pools, rest


def put_pools(pools: Sequence[Any], tree: Tree) -> Tree:
    """Undo :func:`take_pools`."""
    remaining = iter(pools)
    return _map_nodes({Cache: lambda rest: attach(next(remaining), rest)}, tree)


def specs_of(tree: Any, device: Device) -> list[PartitionSpec]:
    """The PartitionSpec of every leaf of a tree, by the types in it."""
    sharding = device.head_sharding
    names = {"batch": "data", "kv_head": sharding.head_axes or None, "slot": sharding.page_axes or None, None: None}

    def node_specs(node: Any) -> list[PartitionSpec]:
        if type(node) in (Decoder, DecoderLayer):
            assert device.mesh is not None
            return weight_specs(node, device.mesh, device.config)
        if type(node) is Cache:
            return leaves_of(cache_specs(node))
        if type(node) is SharedContext:
            return leaves_of(context_specs(node))
        if hasattr(node, "logical_axes"):
            return [PartitionSpec(*(names[axis] for axis in axes)) for axes in node.logical_axes()]
        return [ROWS if node.ndim else PartitionSpec()]

    def typed(node: Any) -> bool:
        return type(node) in (Decoder, DecoderLayer, Cache, SharedContext) or hasattr(node, "logical_axes")

    return [spec for node in jax.tree.leaves(tree, is_leaf=typed) for spec in node_specs(node)]


def shardings_of(tree: Tree, device: Partition) -> Tree:
    """Where every leaf of a tree goes on a mesh, by the types in it."""
    leaves = [NamedSharding(device.mesh.jax, spec) for spec in specs_of(tree, device)]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _put(device: Device, arguments: Sequence[Any]) -> Sequence[Any]:
    """Arguments for a program over several hosts: what every host has becomes one array of all hosts' devices."""
    if device.mesh is None or jax.process_count() == 1:
        return arguments  # the program places them
    return put(device, list(arguments))


def put(device: Device, tree: Tree) -> Tree:
    """Arrays that every host has, on the device or on all devices of a mesh, as programs take them."""
    if device.mesh is None:
        return jax.device_put(tree)
    leaves, structure = jax.tree.flatten(tree)
    wanted = zip(leaves, specs_of(tree, device), strict=True)
    return jax.tree.unflatten(structure, [_put_leaf(x, NamedSharding(device.mesh.jax, spec)) for x, spec in wanted])


def _put_leaf(x: Any, where: NamedSharding) -> Any:
    if isinstance(x, jax.Array) and len(x.sharding.device_set) > 1:
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.jit(jax.random.wrap_key_data)(_put_leaf(np.asarray(jax.random.key_data(x)), where))
    values = np.asarray(x)
    return jax.make_array_from_callback(values.shape, where, lambda i: values[i])

"""The compiled programs of generation on a mesh: those of one device, run by every device under ``jax.shard_map``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.cache import Cache, Pools, attach, detach
from kvjax.cache.quantisation import Storage
from kvjax.model.decoder import Decoder
from kvjax.runtime.decode import Controls, DecodeState, begin, chunk
from kvjax.runtime.grow import grown
from kvjax.runtime.prefill import read_fresh, read_onto
from kvjax.runtime.stopping import StopTable
from kvjax.sharding.decoder import local_decoder
from kvjax.sharding.mesh import Mesh
from kvjax.sharding.partition import Partition
from kvjax.sharding.placement import ROWS, cache_specs, leaves_of, weight_specs

_EVERYWHERE = PartitionSpec()


def on_devices(
    mesh: Mesh, f: Callable[..., tuple[Any, ...]], arguments: Sequence[tuple[Any, Any]], results: Sequence[Any]
) -> tuple[Any, ...]:
    """``f`` on every device, of each argument its share.

    Args:
      mesh: the devices.
      f: takes the arguments as a device sees them, gives a tuple of trees.
      arguments: (tree, its specs: one of all leaves, a list of each leaf's, or a tree of them).
      results: specs of the results, in the same forms; their leaves must be known beforehand, their structure need not.

    Returns:
      The results as trees of the arrays of all devices, static fields as the devices had them.
    """
    flat = [jax.tree.flatten(tree) for tree, _ in arguments]
    specs = [_specs(spec, len(leaves)) for (_, spec), (leaves, _) in zip(arguments, flat, strict=True)]
    made: list[Any] = []

    def run(*lists: list[Array]) -> tuple[list[Array], ...]:
        trees = [jax.tree.unflatten(tree, leaves) for (_, tree), leaves in zip(flat, lists, strict=True)]
        out = [jax.tree.flatten(result) for result in f(*trees)]
        made[:] = [tree for _, tree in out]
        return tuple(leaves for leaves, _ in out)

    wanted = tuple(spec if isinstance(spec, PartitionSpec) else _specs(spec, -1) for spec in results)
    mapped = jax.shard_map(run, mesh=mesh.jax, in_specs=tuple(specs), out_specs=wanted, check_vma=False)
    found = mapped(*(leaves for leaves, _ in flat))
    return tuple(jax.tree.unflatten(tree, leaves) for tree, leaves in zip(made, found, strict=True))


def _specs(spec: Any, count: int) -> list[PartitionSpec]:
    if isinstance(spec, PartitionSpec):
        return [spec] * count
    return spec if isinstance(spec, list) else leaves_of(spec)


def controls_specs(controls: Controls) -> Controls:
    """Of a request's controls: the random keys and the limits are of rows."""
    everywhere = jax.tree.map(lambda _: _EVERYWHERE, dataclasses.replace(controls.sampling, keys=None))
    sampling = dataclasses.replace(everywhere, keys=ROWS)
    return Controls(sampling, StopTable(_EVERYWHERE, _EVERYWHERE), ROWS, _EVERYWHERE)  # type: ignore[arg-type]


def _state_specs(state: DecodeState) -> DecodeState:
    rest = jax.tree.map(lambda _: ROWS, dataclasses.replace(state, cache=None))  # type: ignore[arg-type]
    return dataclasses.replace(rest, cache=cache_specs(state.cache))


def _pool_specs(cache: Cache) -> list[PartitionSpec]:
    return leaves_of(detach(cache_specs(cache))[0])


@functools.partial(jax.jit, static_argnames=("part", "prompt_capacity", "new_capacity", "dtype", "storage"))
def sharded_fresh(
    params: Decoder,
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    total: Int[Array, " B"],
    *,
    part: Partition,
    prompt_capacity: int,
    new_capacity: int,
    dtype: Any,
    storage: Storage,
) -> tuple[Cache, Float[Array, "B V"]]:
    """``prefill.prefill_fresh`` on a mesh; its data axis divides B."""
    batch = tokens.shape[0] // part.mesh.data
    rooms = (prompt_capacity, new_capacity, dtype, storage)
    like = jax.eval_shape(lambda: part.empty(batch, *rooms))

    def run(params: Decoder, tokens: Array, count: Array, total: Array) -> tuple[Any, ...]:
        return read_fresh(local_decoder(params, part), part.empty(batch, *rooms), tokens, count, total)

    arguments = [(params, weight_specs(params, part.mesh)), (tokens, ROWS), (count, ROWS), (total, ROWS)]
    cache, logits = on_devices(part.mesh, run, arguments, [cache_specs(like), ROWS])
    return part.all(cache), logits


def _onto(
    params: Decoder,
    pools: Pools,
    rest: Cache,
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    total: Int[Array, " B"],
    *,
    part: Partition,
    prompt_capacity: int,
    new_capacity: int,
) -> tuple[Pools, Cache, Float[Array, "B V"]]:
    specs = cache_specs(attach(pools, rest))
    pool_specs, rest_specs = leaves_of(detach(specs)[0]), detach(specs)[1]

    def run(params: Decoder, pools: Pools, rest: Cache, *new: Array) -> tuple[Any, ...]:
        local = local_decoder(params, part)
        return read_onto(local, pools, rest, *new, prompt_capacity=prompt_capacity, new_capacity=new_capacity)

    arguments = [
        (params, weight_specs(params, part.mesh)),
        (pools, pool_specs),
        (part.local(rest), rest_specs),
        (tokens, ROWS),
        (count, ROWS),
        (total, ROWS),
    ]
    pools, rest, logits = on_devices(part.mesh, run, arguments, [pool_specs, rest_specs, ROWS])
    return pools, part.all(rest), logits


_ONTO = ("part", "prompt_capacity", "new_capacity")
sharded_onto = jax.jit(_onto, static_argnames=_ONTO)
sharded_onto_consuming = jax.jit(_onto, static_argnames=_ONTO, donate_argnames=("pools",))


@functools.partial(jax.jit, static_argnames=("part", "logprobs"))
def sharded_begin(
    rest: Cache,
    logits: Float[Array, "B V"],
    present: Bool[Array, "B V"],
    controls: Controls,
    live: Bool[Array, " B"],
    *,
    part: Partition,
    logprobs: bool,
) -> DecodeState:
    """``decode.begin`` on a mesh."""
    specs = cache_specs(rest)

    def run(rest: Cache, *others: Any) -> tuple[DecodeState, ...]:
        return (begin(rest, *others, logprobs=logprobs),)

    like = jax.eval_shape(lambda *args: run(*args)[0], rest, logits, present, controls, live)
    arguments = [
        (part.local(rest), specs),
        (logits, ROWS),
        (present, ROWS),
        (controls, controls_specs(controls)),
        (live, ROWS),
    ]
    (state,) = on_devices(part.mesh, run, arguments, [_state_specs(like)])
    return dataclasses.replace(state, cache=part.all(state.cache))


@functools.partial(jax.jit, static_argnames=("part",), donate_argnames=("pools",))
def sharded_chunk(
    params: Decoder, pools: Pools, state: DecodeState, controls: Controls, steps: Int[Array, ""], *, part: Partition
) -> tuple[Pools, DecodeState, Int[Array, ""]]:
    """``decode.compiled_chunk`` on a mesh."""
    pool_specs = _pool_specs(attach(pools, state.cache))
    state_specs = _state_specs(state)

    def agree(flag: Bool[Array, ""]) -> Bool[Array, ""]:
        return jax.lax.pmax(flag.astype(jnp.int32), "data") > 0

    def run(params: Decoder, *rest: Any) -> tuple[Any, ...]:
        return chunk(local_decoder(params, part), *rest, agree=agree)

    arguments = [
        (params, weight_specs(params, part.mesh)),
        (pools, pool_specs),
        (dataclasses.replace(state, cache=part.local(state.cache)), state_specs),
        (controls, controls_specs(controls)),
        (steps, _EVERYWHERE),
    ]
    results = [pool_specs, state_specs, _EVERYWHERE]
    pools, state, made = on_devices(part.mesh, run, arguments, results)
    return pools, dataclasses.replace(state, cache=part.all(state.cache)), made


@functools.partial(jax.jit, static_argnames=("part", "new_capacity"))
def sharded_grow(cache: Cache, *, part: Partition, new_capacity: int) -> Cache:
    """``grow.grow`` on a mesh."""
    specs = cache_specs(cache)

    def run(cache: Cache) -> tuple[Cache, ...]:
        return (grown(cache, part.config_of(0), new_capacity),)

    (cache,) = on_devices(part.mesh, run, [(part.local(cache), specs)], [specs])
    return part.all(cache)

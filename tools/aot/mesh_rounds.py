"""Compile a question under Round Attention, as a mesh runs it, for a TPU topology; used by ``tools.aot.mesh``."""

from __future__ import annotations

import dataclasses
from typing import Any

#: Rows of the batch, tokens of a conversation so far, of the rounds a question selects, of a round and of a question.
BATCH, SEEN, SELECTED, ROUND, QUESTION = 16, 32768, 4096, 512, 512


def compile_rounds(topology: str, data: int, model: int, layers: int) -> dict[str, Any]:
    """XLA's analysis of each program of a turn, half of the layers below the watershed."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies

    from kvjax.bench.shapes import shapes
    from kvjax.cache.buckets import NEW_TOKENS, prompt_bucket
    from kvjax.cache.host_memory import DEVICE, HOST
    from kvjax.cache.layout import layout_on
    from kvjax.cache.quantisation import Storage
    from kvjax.model.decoder import abstract_decoder
    from kvjax.policies.split_cache import SplitCache
    from kvjax.rounds import round_programs
    from kvjax.rounds.conversation import UpperRows
    from kvjax.rounds.steps import empty_stage
    from kvjax.sharding.collectives import collectives
    from kvjax.sharding.compile import Named, specs_of
    from kvjax.sharding.mesh import Mesh, near_grid
    from kvjax.sharding.partition import Partition
    from kvjax.sharding.placement import ROWS, cache_specs, of_all, weight_specs

    config, below = dataclasses.replace(shapes()["llama-3.1-8b"], num_layers=layers), layers // 2
    grid = near_grid(data, model, topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    mesh, row = Mesh(data, model, tuple(grid.flat)), Mesh(1, model, tuple(grid[0]))
    storage = Storage(layout=layout_on("tpu", config.head_dim))
    dtype, heads, dim = jnp.dtype("bfloat16"), config.num_kv_heads, config.head_dim

    def array(on: Mesh, shape: tuple[int, ...], dtype: Any, spec: Any, memory: str = DEVICE) -> jax.ShapeDtypeStruct:
        where = jax.sharding.NamedSharding(on.jax, spec, memory_kind=memory)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    def ints(*shape: int, on: Mesh = mesh, spec: Any = ROWS) -> jax.ShapeDtypeStruct:
        return array(on, shape, jnp.int32, spec)

    def cache_of(placed: SplitCache, room: int, on: Mesh, first: int, last: int) -> Any:
        part = Partition(on, config, placed)
        rows = BATCH // data
        local = jax.eval_shape(lambda: part.empty(rows, room, NEW_TOKENS, dtype, storage))
        local = local.replace(layers=local.layers[first:last])
        return part, part.all(of_all(local, cache_specs(local), on))

    leaves, tree = jax.tree.flatten(abstract_decoder(config, dtype))
    specs = weight_specs(jax.tree.unflatten(tree, leaves), mesh)
    params = jax.tree.unflatten(
        tree, [array(mesh, x.shape, x.dtype, spec) for x, spec in zip(leaves, specs, strict=True)]
    )
    room = prompt_bucket(SEEN)
    lower_part, lower = cache_of(SplitCache(below), room, mesh, 0, below)
    upper_part = Partition(mesh, config, SplitCache(below, SELECTED))
    row_part, answered = cache_of(SplitCache(below, SELECTED), room, row, below, layers)
    kinds = {"dtype": dtype, "storage": storage}
    stage = jax.eval_shape(lambda: empty_stage((layers - below, 2, BATCH, heads, SELECTED, dim), dtype, False))
    one = jax.eval_shape(lambda: empty_stage((layers - below, 2, BATCH // data, heads, SELECTED, dim), dtype, False))

    def placed(part: Partition, tree: Any, memory: str = DEVICE) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        arrays = zip(leaves, specs_of(tree, part), strict=True)
        return jax.tree.unflatten(structure, [array(part.mesh, x.shape, x.dtype, s, memory) for x, s in arrays])

    staged, row_staged = placed(upper_part, stage), placed(row_part, one)
    shape: Any = jax.ShapeDtypeStruct((layers - below, 2, heads, ROUND, dim), dtype)
    there, here = (placed(row_part, UpperRows(shape), memory) for memory in (HOST, DEVICE))
    counts = jax.ShapeDtypeStruct((layers - below, BATCH, heads), jnp.int32)
    slots = placed(upper_part, Named(counts, (None, "batch", "kv_head")))
    scalar, offset = np.int32(0), Named(np.zeros((1, 1), np.int32), ())
    edges = Named(np.zeros((layers - below, heads), np.int32), (None, "kv_head"))
    with jax.sharding.use_abstract_mesh(mesh.jax.abstract_mesh):
        wide = {
            "lower layers": round_programs.LOWER_ONTO.lower(
                lower_part, params, lower, ints(BATCH, QUESTION), ints(BATCH), capacity=room
            ),
            "upper layers": round_programs.UPPER.lower(
                upper_part, params, array(mesh, (BATCH, QUESTION, config.hidden_size), dtype, ROWS),
                ints(BATCH), ints(BATCH), staged, slots, **kinds,
            ),
        }  # fmt: skip
    with jax.sharding.use_abstract_mesh(row.jax.abstract_mesh):
        move = jax.jit(lambda x: jax.device_put(x, here.kv.sharding), out_shardings=here.kv.sharding)
        narrow = {
            "one round to the device": move.lower(there.kv),
            "one round into place": round_programs.PLACE_ROUND.lower(row_part, row_staged, here, scalar, offset),
            "one round cut out": round_programs.CUT_ROUND.lower(row_part, answered, scalar, edges, edges, size=ROUND),
        }
    found: dict[str, Any] = {}
    for name, lowered in (wide | narrow).items():
        compiled = lowered.compile()
        memory = compiled.memory_analysis()
        found[name] = {
            "host": memory.host_argument_size_in_bytes,
            "arguments": memory.argument_size_in_bytes,
            "results": memory.output_size_in_bytes,
            "aliased": memory.alias_size_in_bytes,
            "temporary": memory.temp_size_in_bytes,
            "collectives": collectives(compiled.as_text()),
        }
    return {"round_share": here.kv.size * dtype.itemsize // model, "programs": found}

"""A decode program compiled for a mesh of 8 virtual CPU devices, and what XLA says of it: a line of JSON a policy."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import toys

from kvjax.cache.cache import detach
from kvjax.cache.quantisation import MODEL
from kvjax.model.decoder import random_decoder
from kvjax.planning import plan
from kvjax.policies import parse
from kvjax.runtime.programs import DECODE_CHUNK
from kvjax.runtime.synthetic import benchmark_controls, decode_state
from kvjax.sharding.hlo_collectives import collectives
from kvjax.sharding.mesh import Mesh
from kvjax.sharding.partition import Partition
from kvjax.sharding.placement import cache_specs, of_all, place_weights

BATCH, ROOM = 4, 8192


def compiled(policy: str, kv_heads: int) -> dict[str, Any]:
    config = toys.tiny_config(num_heads=2 * kv_heads, num_kv_heads=kv_heads, vocab_size=264, max_position=ROOM)
    mesh = Mesh(2, 4)
    part = Partition(mesh, config, parse(policy))
    params = place_weights(random_decoder(config), mesh)
    local = jax.eval_shape(lambda: part.empty(BATCH // mesh.data, ROOM, 256, jnp.dtype("float32"), MODEL))
    cache = part.all(of_all(local, cache_specs(local), mesh))
    state = jax.eval_shape(lambda cache: decode_state(config, cache), cache)
    state = dataclasses.replace(state, cache=cache)
    controls = benchmark_controls(config, BATCH)
    program = DECODE_CHUNK.lower(part, params, state, controls, jnp.int32(4)).compile()
    memory = program.memory_analysis()
    planned = plan(config, prompt_tokens=ROOM, batch=BATCH, policy=part.policy, max_new_tokens=1, mesh=mesh)
    return {
        "pool_bytes": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(detach(local)[0])),
        "planned_bytes": planned.weights_bytes + planned.cache_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "collectives": collectives(program.as_text()),
    }


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        chosen, _, heads = argument.rpartition("/")
        print(json.dumps(compiled(chosen, int(heads))), flush=True)

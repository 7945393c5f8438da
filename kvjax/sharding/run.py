"""Generation on a mesh: its programs, and arrays on their way to the devices."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from kvjax.cache.cache import Cache, attach, detach
from kvjax.model.config import ModelConfig
from kvjax.model.decoder import Decoder
from kvjax.policies.base import Policy
from kvjax.runtime.decode import Controls, DecodeState
from kvjax.runtime.prefill import pages_onto
from kvjax.sharding.mesh import Mesh
from kvjax.sharding.partition import Partition
from kvjax.sharding.placement import ROWS, leaves_of
from kvjax.sharding.programs import (
    controls_specs,
    sharded_begin,
    sharded_chunk,
    sharded_fresh,
    sharded_grow,
    sharded_onto,
    sharded_onto_consuming,
)


@dataclasses.dataclass(frozen=True)
class OnMesh:
    """The programs of a model on a mesh; see :class:`kvjax.runtime.programs.Programs`."""

    mesh: Mesh
    config: ModelConfig

    def rows(self, batch: int) -> int:
        return self.mesh.rows(batch)

    def fresh(self, params: Decoder, *read: np.ndarray, policy: Policy, **options: Any) -> tuple[Cache, jax.Array]:
        part = Partition(self.mesh, self.config, policy)
        return sharded_fresh(params, *self._rows(*read), part=part, **options)

    def onto(
        self, params: Decoder, cache: Cache, *read: np.ndarray, prompt_capacity: int, new_capacity: int, consume: bool
    ) -> tuple[Cache, jax.Array]:
        part = Partition(self.mesh, self.config, cache.policy)
        old, rest = detach(cache)
        rooms = {"prompt_capacity": prompt_capacity, "new_capacity": new_capacity}
        local = part.local(cache)
        reusable = pages_onto(part.config_of(0), local, **rooms) == tuple(layer.pages for layer in local.layers)
        run = sharded_onto_consuming if consume and reusable else sharded_onto
        pools, rest, logits = run(params, old, rest, *self._rows(*read), part=part, **rooms)
        if consume and not reusable:
            jax.tree.map(lambda pool: pool.delete(), old)
        return attach(pools, rest), logits

    def first(
        self, cache: Cache, logits: jax.Array, present: np.ndarray, controls: Controls, *, logprobs: bool
    ) -> DecodeState:
        live = np.arange(cache.batch) < len(present)
        present = np.pad(present, ((0, cache.batch - len(present)), (0, 0)))
        pools, rest = detach(cache)
        part = Partition(self.mesh, self.config, cache.policy)
        rows = self._rows(present, live)
        state = sharded_begin(rest, logits, rows[0], self._controls(controls), rows[1], part=part, logprobs=logprobs)
        return dataclasses.replace(state, cache=attach(pools, state.cache))

    def chunk(
        self, params: Decoder, state: DecodeState, controls: Controls, steps: int
    ) -> tuple[DecodeState, jax.Array]:
        pools, rest = detach(state.cache)
        part = Partition(self.mesh, self.config, state.cache.policy)
        count = put(self.mesh, np.int32(steps), PartitionSpec())
        state = dataclasses.replace(state, cache=rest)
        pools, state, made = sharded_chunk(params, pools, state, self._controls(controls), count, part=part)
        return dataclasses.replace(state, cache=attach(pools, state.cache)), made

    def grow(self, cache: Cache, *, config: ModelConfig, new_capacity: int) -> Cache:
        return sharded_grow(cache, part=Partition(self.mesh, config, cache.policy), new_capacity=new_capacity)

    # --- arrays -----------------------------------------------------------------------------------------------

    def _rows(self, *read: np.ndarray) -> list[Any]:
        return put_rows(self.mesh, *read)

    def _controls(self, controls: Controls) -> Controls:
        if jax.process_count() == 1:
            return controls
        leaves, tree = jax.tree.flatten(controls)
        specs = leaves_of(controls_specs(controls))
        return jax.tree.unflatten(tree, [put(self.mesh, x, spec) for x, spec in zip(leaves, specs, strict=True)])


def put(mesh: Mesh, x: Any, spec: PartitionSpec) -> Any:
    """An array every host has, as one array of all hosts' devices."""
    if jax.process_count() == 1:
        return x  # the program places it
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.jit(jax.random.wrap_key_data)(put(mesh, np.asarray(jax.random.key_data(x)), spec))
    values = np.asarray(x)
    return jax.make_array_from_callback(values.shape, NamedSharding(mesh.jax, spec), lambda i: values[i])


def put_rows(mesh: Mesh, *arrays: np.ndarray, spec: PartitionSpec = ROWS) -> list[Any]:
    """:func:`put` of arrays of rows."""
    return [put(mesh, x, spec) for x in arrays]

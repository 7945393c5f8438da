"""A round is cut out of a cache as it is stored, by NumPy where the host has the memory and by a program elsewhere."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.layout import Layout
from kvjax.cache.packing import store
from kvjax.cache.pool import by_head, empty_layer, stored_keys_and_values
from kvjax.cache.quantisation import Storage
from kvjax.rounds.steps import cut

ROWS, HEADS, DIM, SLOTS = 2, 3, 8, 90
STORAGES = [Storage(kind, layout=Layout(form, 16)) for kind in ("model", "int8") for form in ("columns", "stacked")]


def layers(storage: Storage, count: int):
    """Layers of random keys and values, heads of different capacities, all of them full."""
    draw = np.random.default_rng(3)
    pages = (6, 7, 6)
    for _ in range(count):
        empty = empty_layer(ROWS, pages, DIM, jnp.float32, storage=storage)
        k, v = (jnp.asarray(draw.standard_normal((ROWS, HEADS, SLOTS, DIM)), jnp.float32) for _ in range(2))
        yield store(empty, k, v, jnp.full((ROWS, HEADS), SLOTS, jnp.int32), pages)


@pytest.mark.parametrize("size", [16, 64, 256])
@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_numpys_and_the_programs_are_the_stored_slots(storage, size):
    given = tuple(layers(storage, 2))
    held = np.array([[16, 3, 0], [1, 15, 7]], np.int32)
    start = SLOTS - held - np.array([[0, 20, 0], [89, 1, 0]], np.int32)
    start[1, 0] = 0
    row = 1
    compiled = jax.jit(functools.partial(cut, size=size))(given, jnp.int32(row), jnp.asarray(start), jnp.asarray(held))
    by_numpy = cut(jax.tree.map(np.asarray, given), row, start, held, size)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(by_numpy))
    jax.tree.map(np.testing.assert_array_equal, by_numpy, compiled)
    for i, layer in enumerate(given):
        for head in range(HEADS):
            count, slots = held[i, head], slice(start[i, head], start[i, head] + held[i, head])
            for part, rows in enumerate(stored_keys_and_values(layer)):
                found = by_numpy.kv[i, part, head]
                np.testing.assert_array_equal(found[:count], rows[row, head, slots])
                assert not found[count:].any()
            if storage.quantised:
                scales = by_head(layer, layer.scales.v)[row, head, slots]
                np.testing.assert_array_equal(by_numpy.v_scale[i, head, :count], scales)
                np.testing.assert_array_equal(by_numpy.k_scale[i], layer.scales.k[row])

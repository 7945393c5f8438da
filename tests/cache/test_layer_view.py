"""A layer's part of a pool that all layers share: its own slots, and no write into the next layer's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.layer_view import joined_views, layer_views, with_pages_of
from kvjax.cache.layout import Layout
from kvjax.cache.packing import store
from kvjax.cache.pool import LayerCache, append_token, empty_layer, keys_and_values
from kvjax.cache.quantisation import Storage

PAGE, LAYERS, HEADS, DIM = 4, 3, 2, 8
LENGTHS = np.array([[1, 14, 6, 9, 0, 12], [7, 7, 7, 7, 7, 7]], np.int32)


def filled(dtype: str) -> LayerCache:
    """A pool of three layers of two heads."""
    storage = Storage(dtype, layout=Layout("columns", PAGE))
    k, v = jax.random.normal(jax.random.key(0), (2, 2, LAYERS * HEADS, 16, DIM))
    pages = (4,) * (LAYERS * HEADS)
    pool = empty_layer(2, pages, DIM, jnp.float32, storage=storage, by_row=True)
    pool = store(pool, k, v, jnp.asarray(LENGTHS), pages).replace(model_layers=LAYERS)
    return pool


@pytest.mark.parametrize("dtype", ["model", "int8"])
def test_views_hold_their_layers_slots_and_join_to_the_pool(dtype):
    pool = filled(dtype)
    views = layer_views(pool, tokens=16)
    whole = [np.asarray(x) for x in keys_and_values(pool)]
    for i, view in enumerate(views):
        own = slice(i * HEADS, (i + 1) * HEADS)
        for found, wanted in zip(keys_and_values(view), whole, strict=True):
            for row in range(2):
                for head, count in enumerate(LENGTHS[row, own]):
                    got, want = np.asarray(found)[row, head, :count], wanted[row, own][head, :count]
                    np.testing.assert_array_equal(got, want)
    jax.tree.map(np.testing.assert_array_equal, joined_views(pool, views), pool)


def test_a_token_is_written_in_its_layer_and_none_beyond_it():
    pool = filled("model")
    before = [np.asarray(x) for x in keys_and_values(pool)]
    starts = np.asarray(pool.row_starts)
    views, ones = [], jnp.ones((2, HEADS, DIM))
    for i, view in enumerate(layer_views(pool, tokens=16)):
        view = with_pages_of(view, views[-1]) if views else view
        if i == 0:  # its last head is full in row 0: the next slot would be the next layer's
            view = view.replace(next=view.next.at[0, 1].set(int(starts[0, 2] - starts[0, 1]) * PAGE))
        views.append(append_token(view, ones, ones, jnp.ones(2, bool)))
    after = [np.asarray(x) for x in keys_and_values(joined_views(pool, views))]
    for was, now in zip(before, after, strict=True):
        for row in range(2):
            for head, count in enumerate(LENGTHS[row]):
                np.testing.assert_array_equal(now[row, head, :count], was[row, head, :count])
                if (row, head) != (0, 1):
                    np.testing.assert_array_equal(now[row, head, count], np.ones(DIM))

"""Runs of pages that differ by row: every head has room, pages have one owner, and slots keep their rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.cache import runs
from kvjax.cache.layout import Layout
from kvjax.cache.packing import resize, store
from kvjax.cache.page_sharding import PageSharding
from kvjax.cache.pool import (
    append_token,
    by_head,
    by_page,
    empty_layer,
    keys_and_values,
    mark_by_head,
    read_slots,
    stored_keys_and_values,
)
from kvjax.cache.pool_sharding import shard, unshard
from kvjax.cache.quantisation import Storage

PAGE = 4
COLUMNS = Layout("columns", PAGE)


def held(starts: np.ndarray, pages: int) -> np.ndarray:
    """Pages of each head's run."""
    return np.diff(np.concatenate([starts, np.full((len(starts), 1), pages)], axis=1))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(0, 30), min_size=3, max_size=3), min_size=1, max_size=3),
    new=st.integers(0, 17),
    parts=st.sampled_from([1, 2, 3]),
)
def test_every_head_has_room_for_as_many_more(lengths, new, parts):
    budget = -(-max(map(sum, lengths)) // 3)
    equal = -(-(budget + new) // PAGE) + 1  # what a plan gives: whole pages, and one more
    (equal,) = PageSharding((), ("model",), 1, parts, by_row=True).rounded((equal,))
    length = jnp.asarray(lengths, jnp.int32)
    starts = np.asarray(runs.fitted(length, 3 * equal, PAGE, parts))
    own = held(starts, 3 * equal)
    assert (own >= 1).all() and (starts % parts == 0).all() and (starts[:, 0] == 0).all()
    assert (own * PAGE >= np.asarray(lengths) + new).all()


def test_pages_know_their_heads():
    starts = jnp.asarray([[0, 1, 4], [0, 3, 5]])
    owner, nth = runs.owners(starts, 6)
    assert owner.tolist() == [[0, 1, 1, 1, 2, 2], [0, 0, 0, 1, 1, 2]]
    assert nth.tolist() == [[0, 0, 1, 2, 0, 1], [0, 1, 2, 0, 1, 0]]
    index, inside = runs.of_heads(starts, runs.ends(starts, 6), 3)
    assert index[0].tolist() == [[0, 0, 0], [1, 2, 3], [4, 5, 0]]
    assert inside[1].tolist() == [[True] * 3, [True, True, False], [True, False, False]]


LENGTHS = np.array([[1, 14, 6], [9, 0, 12], [7, 7, 7]], np.int32)


def filled(storage: Storage, pages: tuple[int, ...] = (3, 3, 3)):
    k, v = jax.random.normal(jax.random.key(0), (2, 3, 3, 16, 8))
    position = jnp.broadcast_to(jnp.arange(16), (3, 3, 16))
    empty = empty_layer(3, pages, 8, jnp.float32, marks=("position",), storage=storage, by_row=True)
    pool = jax.jit(store, static_argnums=4)(empty, k, v, LENGTHS, pages, {"position": position})
    return pool, np.asarray(k), np.asarray(v)


def assert_holds(pool, k: np.ndarray, v: np.ndarray, lengths: np.ndarray, atol: float) -> None:
    found_k, found_v = (np.asarray(x) for x in keys_and_values(pool))
    places = np.asarray(mark_by_head(pool, "position"))
    assert (np.asarray(pool.length) == lengths).all()
    for row, head in np.ndindex(lengths.shape):
        count = lengths[row, head]
        np.testing.assert_allclose(found_k[row, head, :count], k[row, head, :count], atol=atol)
        np.testing.assert_allclose(found_v[row, head, :count], v[row, head, :count], atol=atol)
        assert (places[row, head, :count] == np.arange(count)).all()


@pytest.mark.parametrize("kind", ["columns", "stacked", "lanes"])
@pytest.mark.parametrize("storage", ["model", "int8"])
def test_a_pool_gives_back_what_it_was_given(kind, storage):
    atol = 0 if storage == "model" else 0.05
    pool, k, v = filled(Storage(storage, layout=Layout(kind, PAGE)))
    assert pool.kv.shape[1] == 9 and max(pool.most_slots) == 7 * PAGE
    assert_holds(pool, k, v, LENGTHS, atol)
    assert_holds(resize(pool, (5, 5, 5)), k, v, LENGTHS, atol)
    numbers = np.asarray(by_head(pool, pool.marks["position"]))
    assert (np.asarray(by_page(pool, jnp.asarray(numbers))) == np.asarray(pool.marks["position"])).all()
    assert stored_keys_and_values(pool)[0].shape == (3, 3, 28, 8)


def test_tokens_are_written_where_they_belong_and_nowhere_else():
    pool, k, v = filled(Storage(layout=COLUMNS))
    new = np.asarray(jax.random.normal(jax.random.key(1), (3, 3, 8)))
    active = jnp.asarray([True, False, True])
    after = append_token(pool, jnp.asarray(new), jnp.asarray(2 * new), active)
    grown = LENGTHS + np.asarray(active)[:, None]
    assert (np.asarray(after.length) == grown).all()
    found_k, found_v = (np.asarray(x) for x in read_slots(after, jnp.asarray(LENGTHS)))
    for row in (0, 2):
        np.testing.assert_array_equal(found_k[row], new[row])
        np.testing.assert_array_equal(found_v[row], 2 * new[row])
    assert_holds(after.replace(length=pool.length), k, v, LENGTHS, 0)
    # A slot beyond a head's run is another head's: nothing is written.
    beyond = after.replace(next=jnp.full((3, 3), 9 * PAGE - 1), length=pool.length)
    written = append_token(beyond, jnp.asarray(new) + 9, jnp.asarray(new) + 9, active)
    assert_holds(written.replace(length=pool.length), k, v, LENGTHS, 0)


@pytest.mark.parametrize("parts", [2, 3])
def test_devices_take_turns_whatever_a_row_chose(parts):
    pool, k, v = filled(Storage(layout=COLUMNS), (6, 6, 6))
    sharding = PageSharding((), ("model",), 1, parts, by_row=True)
    sharded = shard(pool, sharding)
    assert (np.asarray(sharded.row_starts) % parts == 0).all()
    assert_holds(unshard(sharded), k, v, LENGTHS, 0)

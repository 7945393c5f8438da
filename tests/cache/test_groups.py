"""Heads split into groups behave as the same heads in one pool."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.attention import decode_attention, kept_tokens
from kvjax.cache.groups import HeadGroups, pages_by_group, slot_bytes
from kvjax.cache.packing import resize, store
from kvjax.cache.pool import by_head, by_page, empty_layer, mark_by_head, read_slots, write
from pallas_kernels.prefill.xla import attend_rows, running_start

PAGES = (1, 3, 2)
HEADS = ((2, 0), (1,))


def layers():
    """The same three heads in one ragged pool, and in two groups out of order."""
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(x, jnp.float32) for x in rng.standard_normal((2, 2, 3, 96, 8)))
    length = jnp.asarray([[20, 96, 40], [1, 7, 64]])
    whole = store(empty_layer(2, PAGES, 8, jnp.float32), k, v, length, PAGES)
    groups = []
    for heads in HEADS:
        index, pages = np.asarray(heads), tuple(PAGES[h] for h in heads)
        groups.append(store(empty_layer(2, pages, 8, jnp.float32), k[:, index], v[:, index], length[:, index], pages))
    return whole, HeadGroups(tuple(groups), HEADS)


def test_attention_over_groups_is_attention_over_one_pool():
    whole, split = layers()
    q = jnp.asarray(np.random.default_rng(1).standard_normal((2, 3, 2, 8)), jnp.float32)
    wanted, _ = decode_attention(q, whole, scale=0.35)
    got, logits = decode_attention(q, split, scale=0.35, with_logits=True)
    np.testing.assert_allclose(got, wanted, atol=1e-6)
    assert [x.shape[1] for x in logits] == [3, 3]


def test_a_later_turns_queries_see_the_same_slots():
    whole, split = layers()
    q = jnp.asarray(np.random.default_rng(2).standard_normal((2, 3, 5, 8)), jnp.float32)

    def attended(layer):
        _, mass, out = attend_rows(running_start(2, 3, 5, 8), q, kept_tokens(layer, 64), scale=0.35)
        return out / mass[..., None]

    np.testing.assert_allclose(attended(split), attended(whole), atol=1e-6)


def test_sizes_are_told_in_the_layers_order():
    whole, split = layers()
    assert split.pages == whole.pages and split.slots == whole.slots
    assert (np.asarray(split.length) == np.asarray(whole.length)).all()
    assert slot_bytes(split) == slot_bytes(whole)
    assert pages_by_group(split, (7, 8, 9)) == [(9, 7), (8,)]


def test_a_head_belongs_to_one_group():
    _, split = layers()
    with pytest.raises(ValueError, match="every head once"):
        dataclasses.replace(split, heads=((0, 1), (1,)))


@pytest.mark.parametrize("pages", [(2, 2), (1, 3)], ids=["uniform", "ragged"])
def test_numbers_a_slot_move_with_their_rows(pages):
    cache = empty_layer(1, pages, 4, jnp.float32, marks=("position", "score"))
    rng = np.random.default_rng(3)
    k, v = (jnp.asarray(x, jnp.float32) for x in rng.standard_normal((2, 1, 2, 30, 4)))
    position = jnp.broadcast_to(jnp.arange(30) * 7, (1, 2, 30))
    length = jnp.full((1, 2), 30)
    cache = store(cache, k, v, length, pages, {"position": position})
    assert (np.asarray(mark_by_head(cache, "position"))[:, :, :30] == np.asarray(position)).all()
    slots, new = jnp.asarray([[[3], [29]]]), k[:, :, :1] + 1
    cache = write(cache, new, new, slots, jnp.ones((1, 1, 1), bool), {"score": jnp.full((1, 2, 1), 2.5)})
    score, position = mark_by_head(cache, "score"), mark_by_head(cache, "position")
    assert score[0, 0, 3] == score[0, 1, 29] == 2.5 and np.asarray(score).sum() == 5
    assert position[0, 0, 3] == position[0, 1, 29] == 0  # a mark that is not given is 0
    got, _ = read_slots(cache, slots[..., 0])
    np.testing.assert_array_equal(got, new[:, :, 0])
    bigger = resize(cache, tuple(n + 1 for n in pages))
    kept = mark_by_head(bigger, "score")[:, :, : score.shape[2]]
    for head, count in enumerate(cache.slots):
        assert (np.asarray(kept)[0, head, :count] == np.asarray(score)[0, head, :count]).all()
    again = by_page(cache, by_head(cache, cache.marks["score"]))
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), again, cache.marks["score"]))

"""The paged pool: packing, writing in place, resizing, and what attention reads from it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.cache.attention import decode_attention
from kvjax.cache.layout import Layout
from kvjax.cache.packing import pack, resize
from kvjax.cache.pool import PAGE_SIZE, append_token, empty_layer, keys_and_values, pages_for, write
from kvjax.cache.quantisation import Storage
from pallas_kernels.softmax import NEG

LAYOUTS = pytest.mark.parametrize(
    "layout", [None, Layout("stacked", 16), Layout("stacked", 16, 128), Layout("lanes", 16)], ids=str
)
RAGGED = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


def filled(rng, batch: int, pages: tuple[int, ...], dim: int, lengths=None, dtype=jnp.float32, layout=None):
    """A pool with random rows and the rows themselves, [B, H, longest, D]."""
    longest = max(pages) * PAGE_SIZE
    k, v = (rng.standard_normal((batch, len(pages), longest, dim)).astype(np.float32) for _ in range(2))
    capacity = np.array(pages) * PAGE_SIZE
    if lengths is None:
        lengths = rng.integers(1, capacity + 1, (batch, len(pages)))
    cache = empty_layer(batch, pages, dim, dtype, storage=Storage(layout=layout))
    packed = pack(jnp.asarray(k), jnp.asarray(v), pages, cache.kv)
    return cache.replace(kv=packed, length=jnp.asarray(lengths, jnp.int32)), k, v


@settings(max_examples=18, deadline=None)
@given(pages=RAGGED, seed=st.integers(0, 1000))
def test_packing_and_reading_back_is_bitwise(pages, seed):
    cache, k, v = filled(np.random.default_rng(seed), 2, pages, 4)
    back_k, back_v = keys_and_values(cache)
    for head, slots in enumerate(cache.slots):
        assert (back_k[:, head, :slots] == k[:, head, :slots]).all()
        assert (back_v[:, head, :slots] == v[:, head, :slots]).all()
        assert not back_k[:, head, slots:].any()


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(pages=RAGGED, extra=st.integers(0, 2), seed=st.integers(0, 1000))
def test_growing_keeps_contents_and_adds_zeros(pages, extra, seed):
    cache, k, _ = filled(np.random.default_rng(seed), 1, pages, 4)
    bigger = resize(cache, tuple(n + extra for n in pages))
    back, _ = keys_and_values(bigger)
    for head, slots in enumerate(cache.slots):
        assert (back[:, head, :slots] == k[:, head, :slots]).all()
        assert not back[:, head, slots:].any()
    assert bigger.length is cache.length


def test_writes_reach_their_slots_and_rows_that_are_not_valid_nothing():
    cache, k, v = filled(np.random.default_rng(0), 3, (2, 1), 4)
    new = jnp.full((3, 2, 2, 4), 9.0)
    slots = jnp.asarray([[[40, 3], [31, 0]]] * 3)
    written = write(cache, new, -new, slots, jnp.asarray([True, False, True])[:, None, None])
    back_k, back_v = keys_and_values(written)
    k[[0, 2], 0, 40] = k[[0, 2], 0, 3] = k[[0, 2], 1, 31] = k[[0, 2], 1, 0] = 9.0
    assert (back_k[:, 0] == k[:, 0]).all() and (back_k[:, 1, :32] == k[:, 1, :32]).all()
    assert back_v[0, 0, 40, 0] == -9.0 and (back_v[1, 0, :64] == v[1, 0, :64]).all()


def test_appending_counts_only_new_slots():
    cache, _, _ = filled(np.random.default_rng(0), 2, (1,), 4, lengths=np.array([[5], [5]]))
    token = jnp.ones((2, 1, 4))
    longer = append_token(cache.replace(next=jnp.asarray([[5], [5]])), token, token, jnp.asarray([True, False]))
    assert longer.length.tolist() == [[6], [5]]
    replaced = append_token(cache.replace(next=jnp.asarray([[2], [2]])), token, token, jnp.asarray([True, True]))
    assert replaced.length.tolist() == [[5], [5]]


def dense_attention(q, k, v, length, scale, log_mass=None):
    """Float64 softmax attention of one head group: q [G, D], k and v [S, D]."""
    scores = q.astype(np.float64) @ k[:length].astype(np.float64).T * scale
    if log_mass is not None:
        scores[:, 0] += log_mass
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ v[:length].astype(np.float64), scores


@settings(max_examples=14, deadline=None)
@given(
    pages=RAGGED, group=st.sampled_from([1, 2, 3, 8]), mass=st.booleans(), seed=st.integers(0, 1000),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)  # fmt: skip
def test_decode_attention_is_softmax_over_each_heads_own_slots(pages, group, mass, seed, dtype):
    rng = np.random.default_rng(seed)
    cache, k, v = filled(rng, 2, pages, 8, dtype=jnp.dtype(dtype))
    k, v = (np.asarray(jnp.asarray(x).astype(dtype).astype(jnp.float32)) for x in (k, v))
    log_mass = rng.uniform(0, 6, (2, len(pages))).astype(np.float32) if mass else None
    if log_mass is not None:
        cache = cache.replace(log_mass=jnp.asarray(log_mass))
    q = rng.standard_normal((2, len(pages), group, 8)).astype(np.float32)
    # One program an example instead of thirty small ones.
    out, logits = jax.jit(lambda q, cache: decode_attention(q, cache, scale=0.3, with_logits=True))(q, cache)
    for row in range(2):
        for head in range(len(pages)):
            length = int(cache.length[row, head])
            bias = None if log_mass is None else log_mass[row, head]
            want, scores = dense_attention(q[row, head], k[row, head], v[row, head], length, 0.3, bias)
            np.testing.assert_allclose(out[row, head], want, atol=2e-6 if dtype == "float32" else 2e-2)
            first, count = cache.starts[head], pages[head]
            got = np.asarray(logits[row, first : first + count]).swapaxes(0, 1).reshape(group, -1)
            np.testing.assert_allclose(got[:, :length], scores, atol=1e-4)
            assert (got[:, length:] == np.float32(NEG)).all()


def test_what_lies_beyond_the_length_does_not_matter():
    cache, _, _ = filled(np.random.default_rng(0), 1, (2, 2), 8, lengths=np.array([[33, 5]]))
    q = jnp.ones((1, 2, 2, 8))
    slot = jnp.arange(2 * PAGE_SIZE)
    beyond = jnp.broadcast_to(slot >= cache.length[..., None], (1, 2, 64))
    poisoned = write(cache, *(jnp.full((1, 2, 64, 8), 1e30),) * 2, jnp.broadcast_to(slot, (1, 2, 64)), beyond)
    assert (decode_attention(q, cache, scale=1.0)[0] == decode_attention(q, poisoned, scale=1.0)[0]).all()


def test_a_slot_that_stands_for_many_equal_tokens_weighs_as_many():
    """papers.md's identity: dropped keys and values all equal, N dropped -> exactly the full cache's output."""
    rng = np.random.default_rng(5)
    k, v = rng.standard_normal((2, 1, 1, 40, 8)).astype(np.float32)
    k[:, :, :30], v[:, :, :30] = k[:, :, :1], v[:, :, :1]
    k, v = jnp.asarray(k), jnp.asarray(v)
    full = empty_layer(1, (2,), 8, jnp.float32)
    full = full.replace(kv=pack(k, v, (2,), full.kv), length=jnp.asarray([[40]]))
    merged = empty_layer(1, (1,), 8, jnp.float32, log_mass=True)
    rest, mass = pack(k[:, :, 29:], v[:, :, 29:], (1,), merged.kv), jnp.log(jnp.asarray([[30.0]]))
    merged = merged.replace(kv=rest, length=jnp.asarray([[11]]), log_mass=mass)
    q = jnp.asarray(rng.standard_normal((1, 1, 3, 8)), jnp.float32)
    a, b = (decode_attention(q, cache, scale=0.35)[0] for cache in (full, merged))
    np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("tokens, pages", [(0, 1), (1, 1), (32, 1), (33, 2)])
def test_pages(tokens, pages):
    assert pages_for(tokens) == pages


@LAYOUTS
def test_no_copy_of_the_pool_is_made_to_write_one_token(layout):
    cache = empty_layer(2, (8, 8), 16, jnp.float32, storage=Storage(layout=layout))
    token = jnp.ones((2, 2, 16))
    step = jax.jit(
        lambda kv, length: append_token(cache.replace(kv=kv, next=length), token, token, jnp.ones(2, bool)).kv,
        donate_argnums=(0,),
    )
    analysis = step.lower(cache.kv, cache.next).compile().memory_analysis()
    nbytes = sum(x.nbytes for x in jax.tree.leaves(cache.kv))
    assert analysis.alias_size_in_bytes == nbytes
    assert analysis.temp_size_in_bytes < nbytes // 16

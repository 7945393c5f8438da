"""XLA form: runs everywhere.

Its products were chosen by measurement on 2 CPU cores (SmolLM2 float32, columns), for machines without ``native.py``.
Scores are a multiply-reduce over the pages: XLA rewrites a ``dot_general`` with pages among its free axes into one that
needs a transposed copy of the whole cache (41 of 103 ms per step). A batch of one uses one product per page, and one
per head for the values (3 to 4 % of a step), but only on float32 pages, as others would be copied to float32 for it (8
heads of 128 channels, 4,096 slots of int8: 36 MB beside 8, and 6.5 ms instead of 1.8). Keys and values are not
gathered: queries are broadcast to the pages, and only page-sized partial results are gathered by head.

Where runs are by row, queries and partial results are by page, and heads' pages are known by 0/1 matrices. Beside equal
runs of as many bytes (3 heads of 3 queries and 64 channels, 256 to 4,096 slots a head, pages of 32; in turns within one
process, medians), a batch of one takes 1.00 to 1.06 times as long in float32, and 1.1 to 1.4 times in bfloat16 and
int8. 8 rows take 1.05 to 1.25 times as long at 256 slots and 1.2 to 1.5 times from 1,024 on, where unequal runs that
are the same for all rows take 1.6 to 1.9 times: queries and results by page are a tenth of a float32 cache's bytes and
a third of an int8 one's. Forms that took less copied the cache, int8 pages to float32 or rows one at a time.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.pages import Columns
from pallas_kernels.ragged_decode.decode_problem import Decoded, Problem
from pallas_kernels.softmax import NEG, capped, merge


def decode(p: Problem, *, config: None = None) -> Decoded:
    """See :func:`pallas_kernels.ragged_decode.ragged_decode`; there is nothing to configure."""
    del config
    p = p.own_rows()
    return _part(p) if p.part else _whole(p)


#: Pages of each row that are copied out at a time of a pool in which other heads have pages, too.
PART = 32


def _part(p: Problem) -> Decoded:
    """Heads whose pages are a few of each row's: a block of these at a time, as many as the longest row has."""
    assert p.starts is not None
    (batch, total, page_size, dim), starts = p.pages.shape, p.starts.astype(jnp.int32)
    size = min(PART, total)
    first, last = starts[:, 0], starts[:, -1] + (p.length[:, -1] + page_size - 1) // page_size
    shape = (*p.q.shape[:3], dim)

    def block(i: Array, done: tuple[Array, Array]) -> tuple[Array, Array]:
        wanted = first + i * size
        begin = jnp.clip(wanted, 0, total - size)  # earlier where it would reach past the row's end

        def own(x: Array) -> Array:
            if batch == 1:
                return jax.lax.dynamic_slice_in_dim(x, begin[0], size, axis=1)
            return jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, size))(x, begin)

        pages, v_scale, position = jax.tree.map(own, (p.pages, p.v_scale, p.position))
        given = {"pages": pages, "v_scale": v_scale, "position": position, "first_visible": wanted - begin}
        more = _whole(dataclasses.replace(p, q=p.q.astype(jnp.float32), starts=starts - begin[:, None], **given))
        return merge(*done, more.out, more.lse)

    empty = jnp.zeros(shape, jnp.float32), jnp.full(shape[:3], NEG, jnp.float32)
    out, lse = jax.lax.fori_loop(0, (jnp.max(last - first) + size - 1) // size, block, empty)
    return Decoded(out.astype(p.q.dtype), lse, None)


def _whole(p: Problem) -> Decoded:
    q = p.q.astype(jnp.float32)
    if p.k_scale is not None:
        q = q * p.k_scale[:, :, None]
    visible, bias = p.visible(), _bias(p)
    raw = _page_scores(p, q * p.scale)
    scores = _masked(p, raw, bias, visible)
    logits = scores
    if p.logits_scale is not None:
        logits = _masked(p, raw * (p.logits_scale / p.scale), bias, visible)
    softmax = _uniform if p.uniform else _by_row if p.by_row else _ragged
    out, peak, mass = softmax(p, scores)
    # An empty head has a peak of NEG, and exp(NEG - NEG) = 1 for its masked slots.
    full = peak > NEG
    lse = jnp.where(full, peak + jnp.log(mass), NEG)
    out = jnp.where(full[..., None], out / mass[..., None], 0.0)
    return Decoded(out.astype(p.q.dtype), lse, logits if p.with_logits else None)


def _bias(p: Problem) -> Float[Array, "B P #G R"] | None:
    bias = None
    if p.slopes is not None and p.position is not None and p.query_position is not None:
        distance = p.position - p.query_position[:, None, None]
        owner = p.owner
        slopes = jnp.asarray(p.slopes[owner] if isinstance(owner, np.ndarray) else jnp.asarray(p.slopes)[owner])
        bias = slopes[..., None] * distance[:, :, None]
    if p.log_mass is not None:
        mass = jnp.where(p.slots() == 0, p.by_page(p.log_mass)[:, :, None], 0.0)[:, :, None]
        bias = mass if bias is None else bias + mass
    return bias


def _masked(p: Problem, scores: Array, bias: Array | None, visible: Array) -> Float[Array, "B P G R"]:
    scores = capped(scores, p.soft_cap)
    if bias is not None:
        scores = scores + bias
    return jnp.where(visible[:, :, None], scores, NEG)


def _page_scores(p: Problem, q: Float[Array, "B H G K"]) -> Float[Array, "B P G R"]:
    """q.k of every slot, reading each page of keys once."""
    batch, total, page_size, _ = p.pages.shape
    if not isinstance(p.pages, Columns):
        keys = p.pages.keys().astype(jnp.float32)
        return jnp.einsum("bpgd,bprd->bpgr", p.by_page(q), keys, precision="highest")
    keys = p.pages.k.astype(jnp.float32)
    if p.by_row:
        return _scores_by_row(p, q, keys)
    if _by_products(p):
        return _one_row_scores(p, q[0], keys[0])[None]
    if p.uniform:
        heads, count = q.shape[1], p.runs[0]
        keys = keys.reshape(batch, heads, count, 1, p.pages.key_dim, page_size)
        scores = jnp.sum(q[:, :, None, :, :, None] * keys, axis=4)
        return scores.reshape(batch, total, -1, page_size)
    return jnp.sum(p.by_page(q)[..., None] * keys[:, :, None], axis=3)


def _by_products(p: Problem) -> bool:
    """Whether pages are multiplied as they are stored: a batch of one in float32."""
    return p.pages.shape[0] == 1 and p.pages.dtype == jnp.float32


def _one_row_scores(p: Problem, q: Float[Array, "H G K"], keys: Float[Array, "P K R"]) -> Float[Array, "P G R"]:
    """:func:`_page_scores` of a batch of one, whose pages are too few for a multiply-reduce on all cores.

    Queries are copied to their pages by a product with a constant 0/1 matrix, which is exact: XLA would fuse a
    broadcast with the rotary embedding before it, and compute that again for every page.
    """
    heads, group, dim = q.shape
    member = jnp.asarray(p.owner[:, None] == np.arange(heads), jnp.float32)
    each = jnp.matmul(member, q.reshape(heads, -1), precision="highest").reshape(-1, group, dim)
    return jnp.einsum("pgd,pdr->pgr", each, keys, precision="highest")


def _scores_by_row(p: Problem, q: Float[Array, "B H G K"], keys: Float[Array, "B P K R"]) -> Float[Array, "B P G R"]:
    """:func:`_page_scores` where runs are by row: queries are copied to their pages as in :func:`_one_row_scores`."""
    each = jnp.einsum("bhp,bhgd->bpgd", _members(p), q, precision="highest")
    if p.pages.dtype == jnp.float32:
        return jnp.einsum("bpgd,bpdr->bpgr", each, keys, precision="highest")
    # As products, other pages would be copied to float32.
    return jnp.sum(each[..., None] * keys[:, :, None], axis=3)


def _members(p: Problem) -> Float[Array, "B H P"]:
    """1 where a page is of a head, else 0; traced."""
    heads = jnp.arange(len(p.runs), dtype=jnp.int32)
    return (jnp.asarray(p.owner)[:, None] == heads[:, None]).astype(jnp.float32)


def _values(p: Problem) -> Array:
    """Values [B, P, R, D] as operands of a product: int8 and float8 as floats; their scale is in the weights."""
    values = p.pages.values()
    return values.astype(jnp.float32) if values.dtype.itemsize == 1 else values


def _precision(p: Problem) -> str | None:
    """The precision of products with values: full for float32 and 8 bits, where a GPU by default rounds to TF32."""
    return None if p.pages.dtype.itemsize == 2 else "highest"


def _uniform(p: Problem, scores: Array) -> tuple[Array, Array, Array]:
    """Unnormalised output, peak and mass when all heads own equally many pages."""
    batch, heads, group, _ = p.q.shape
    (_, _, page_size, dim), count = p.pages.shape, p.runs[0]
    # A batch of one has too few pages for a product each: a head's pages are one product.
    pages = count if _by_products(p) else 1
    shape, slots = (batch, heads, count // pages), pages * page_size
    by_head = scores.reshape(*shape, pages, group, page_size).swapaxes(3, 4).reshape(*shape, group, slots)
    peak = by_head.max(axis=(2, 4), keepdims=True)
    weight = jnp.exp(by_head - peak)
    mass = weight.sum(axis=(2, 4))
    if p.v_scale is not None:
        weight = weight * p.v_scale.reshape(*shape, 1, slots)
    values = _values(p).reshape(*shape, slots, dim)
    summed = jnp.einsum(
        "bhpgr,bhprd->bhpgd", weight, values, precision=_precision(p), preferred_element_type=jnp.float32
    )
    return summed.sum(axis=2), peak[:, :, 0, :, 0], mass


def _ragged(p: Problem, scores: Array) -> tuple[Array, Array, Array]:
    """Unnormalised output, peak and mass when heads own different numbers of pages.

    Only page-sized partial results are gathered by head; the pool itself is read in place.
    """
    heads, longest, owner = len(p.runs), max(p.runs), p.owner
    index = p.first_page[:, None] + np.arange(longest)
    index = np.where(np.arange(longest) < np.asarray(p.runs)[:, None], index, owner.shape[0])
    page_peak = jnp.pad(scores.max(axis=3), ((0, 0), (0, 1), (0, 0)), constant_values=NEG)
    peak = page_peak[:, index].max(axis=2)
    weight = jnp.exp(scores - peak[:, owner][..., None])
    # The pages of a head are summed by a constant 0/1 matrix: as exact as a loop over heads, and one product.
    member = jnp.asarray(owner == np.arange(heads)[:, None], jnp.float32)
    mass = jnp.einsum("hp,bpg->bhg", member, weight.sum(axis=3), precision=jax.lax.Precision.HIGHEST)
    if p.v_scale is not None:
        weight = weight * p.v_scale[:, :, None]
    parts = jnp.einsum(
        "bpgr,bprd->bpgd", weight, _values(p), precision=_precision(p), preferred_element_type=jnp.float32
    )
    return jnp.einsum("hp,bpgd->bhgd", member, parts, precision=jax.lax.Precision.HIGHEST), peak, mass


def _by_row(p: Problem, scores: Array) -> tuple[Array, Array, Array]:
    """:func:`_ragged` where runs are by row: a head's pages are known by a traced 0/1 matrix alone."""
    member = _members(p)
    peak = jnp.where(member[..., None] > 0, scores.max(axis=3)[:, None], NEG).max(axis=2)
    weight = jnp.exp(scores - p.by_page(peak)[..., None])
    mass = jnp.einsum("bhp,bpg->bhg", member, weight.sum(axis=3), precision="highest")
    if p.v_scale is not None:
        weight = weight * p.v_scale[:, :, None]
    values = p.pages.values().astype(jnp.float32)
    if p.pages.dtype == jnp.float32:
        parts = jnp.einsum("bpgr,bprd->bpgd", weight, values, precision="highest")
    else:  # As products, they would be copied to float32.
        parts = jnp.sum(weight[..., None] * values[:, :, None], axis=3)
    # By a product: XLA (jaxlib 0.10.2) makes NaN of a masked sum that it fuses with the products before it.
    return jnp.einsum("bhp,bpgd->bhgd", member, parts, precision="highest"), peak, mass

"""The second pass on TPUs: the mass of every key.

* XLA transposes the normalisers so that a block's queries are along the sublanes, as in the scores; the kernel copies
  their lane to all others while the first products of a block below the diagonal run.
* The queries of a group are one matrix product. Masses are summed per head, in 8 sublanes until the last block.
* Masks are applied only in blocks that the diagonal crosses, in a loop that ends at the diagonal, whose iterations are
  so small that scores and masks fit the registers. There each head has a product and a copy of the offset of its own:
  the compiler would keep the masks of one head for the next.
* A block's scores are computed in parts of 256 keys and used as they leave the matrix units.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.attention_mass.mass_problem import Counting, Problem, log2_normaliser
from pallas_kernels.softmax import LOG2E, NEG, capped_log2
from pallas_kernels.tpu import float32_scores, tiles
from pallas_kernels.tpu.tiles import LANES, SUBLANES, Tiles

#: Most rows of queries in an iteration of the loop over a block that the diagonal crosses.
_ROWS = 512


def _each_part(
    t: Tiles,
    first_query: Array,
    first_key: Array,
    run: Any,
    most: int,
    begin: Any = lambda _: None,
    rows: int = _ROWS,
) -> None:
    """Call ``run(part, first head, heads, masked)`` for the parts of a block, of ``most`` rows or, if masked, ``rows``.

    Below the diagonal for every part; where the diagonal crosses the block for the parts up to it, in a loop over few
    heads at a time, as masks take registers. ``begin(heads)`` is called once before.
    """
    group = t.shape[2]
    below = t.whole(first_query, first_key)

    def run_all(heads: slice) -> None:
        begin(heads)
        for part in range(t.parts):
            run(part, heads.start, heads.stop - heads.start, False)

    for heads in tiles.steps(group, t.heads_in(most)):
        tiles.scheduling_barrier(below, functools.partial(run_all, heads))

    count = t.heads_in(rows)
    strips = jnp.int32(group // count)

    def iteration(at: Any, _: Any) -> None:
        run(jax.lax.div(at, strips), jax.lax.rem(at, strips) * jnp.int32(count), count, True)

    last = jax.lax.div(jnp.maximum(first_query + jnp.int32(t.queries - 1) - first_key, 0), jnp.int32(t.part))
    crossed = jnp.logical_and(t.touched(first_query, first_key), jnp.logical_not(below))
    iterations = jnp.where(crossed, jnp.minimum(last + 1, t.parts) * strips, 0)
    pl.when(crossed)(functools.partial(begin, slice(0, group)))
    jax.lax.fori_loop(jnp.int32(0), iterations, iteration, None)


def _pieces(t: Tiles) -> list[slice]:
    """A head's queries in pieces of 128, so that masks and normalisers of no more are live at once."""
    return [slice(at, min(at + LANES, t.queries)) for at in range(0, t.queries, LANES)]


class _Mask(NamedTuple):
    """The mask of a piece: key minus query, both counted within their blocks, exceeds ``most`` or leaves the window.

    ``before`` are the weights of an earlier piece. Masks depend on them through a zero that the compiler cannot know to
    be one; otherwise it computes the masks of all pieces at once, and spills them.
    """

    distance: Array
    most: Array
    before: Array | None
    window: int | None

    def apply(self, scores: list[Array]) -> list[Array]:
        most = self.most
        if self.before is not None:
            zero = jnp.where(self.before < 0, jnp.int32(1), jnp.int32(0))
            most += jnp.concatenate([zero] * (self.distance.shape[0] // SUBLANES))
        places = [most - jnp.int32(at * LANES) for at in range(len(scores))]
        seen = [tiles.visible(self.distance, at, self.window) for at in places]
        return [jnp.where(some, x, jnp.float32(NEG)) for some, x in zip(seen, scores, strict=True)]


def _weights(scores: Array, normaliser: Array, mask: _Mask | None) -> list[Float[Array, "8 128"]]:
    """Attention of a piece's queries summed by key, in groups of 128 keys and 8 sublanes."""
    found = tiles.lanes(scores)
    if mask is not None:
        found = mask.apply(found)
    return [jnp.exp2(x - normaliser).reshape(-1, SUBLANES, LANES).sum(axis=0) for x in found]


def _lanes_of_block(t: Tiles) -> int:
    """Lanes of normalisers per block: one for each piece of each head, rounded up to a power of two."""
    return 1 << (t.shape[2] * len(_pieces(t)) - 1).bit_length()


def _normaliser_columns(x: Float[Array, "B H G N"], t: Tiles) -> Float[Array, "B H R L"]:
    """Transpose normalisers: a piece's queries along the sublanes, as in the scores; pieces, heads and blocks in lanes.

    XLA transposes; the kernel only copies one lane to all others, which costs less than transposing there.
    """
    batch, heads, group, _, _ = t.shape
    pieces, rows = len(_pieces(t)), min(t.queries, LANES)
    x = tiles.padded(x.reshape(batch, heads, group, t.query_blocks, t.queries), 4, rows)
    x = x.reshape(batch, heads, group, t.query_blocks, pieces, rows).swapaxes(2, 3)
    x = tiles.padded(x.reshape(batch, heads, t.query_blocks, group * pieces, rows), 3, _lanes_of_block(t))
    return tiles.padded(x.reshape(batch, heads, -1, rows), 2, LANES).swapaxes(2, 3)


def _spread(beside: Any, normaliser: Any, block: Array, piece: Any, t: Tiles) -> None:
    """Copy the normalisers of a piece of a block's queries to ``beside``, the same in every lane."""
    rows, width = beside.shape[0], normaliser.shape[1]
    lane = jax.lax.rem(block * jnp.int32(_lanes_of_block(t)), jnp.int32(width)) + piece
    column = normaliser[:rows]
    if width > LANES:
        tile = pl.multiple_of(jax.lax.div(lane, jnp.int32(LANES)) * LANES, LANES)
        column, lane = normaliser[:rows, pl.ds(tile, LANES)], lane - tile
    index = jnp.broadcast_to(lane, column.shape)
    beside[...] = jnp.take_along_axis(column, index, axis=1, mode="promise_in_bounds")


@dataclasses.dataclass(frozen=True)
class _Block:
    """A block of queries against a block of keys, and the buffers of their masses.

    Attributes:
      b, i: the batch row, and the number of the block of queries. first_key: of the block of keys.
      total: [parts, G, 8, part], masses in 8 sublanes. beside: [G, queries, 128], normalisers, the same in every lane.
      distance: [queries of a piece, 128], key minus query. products: of float32 rows, or None.
    """

    t: Tiles
    soft_cap: float | None
    b: Array
    i: Array
    first_key: Array
    offset: Any
    factor: Any
    q: Any
    normaliser: Any
    k: Any
    total: Any
    beside: Any
    distance: Any
    products: Any

    def begin(self) -> None:
        """Start sums of no queries."""
        self.total[...] = jnp.zeros_like(self.total)
        query, key = (jax.lax.broadcasted_iota(jnp.int32, self.distance.shape, axis) for axis in (0, 1))
        self.distance[...] = key - query

    def spread(self, heads: slice) -> None:
        """Copy the normalisers of some heads to all lanes."""
        pieces = _pieces(self.t)
        for g in range(heads.start, heads.stop):
            for piece, at in enumerate(pieces):
                _spread(self.beside.at[g, at], self.normaliser, self.i, g * len(pieces) + piece, self.t)

    def add_chunk(self, chunk: slice, part: Any, first: Any, count: int, _: bool) -> None:
        """Add the products of a chunk of the channels."""
        self.products.add(pl.ds(first, count), slice(0, self.t.queries), part, chunk)

    def add(self, part: Any, first: Any, count: int, masked: bool) -> None:
        """Add the masses of one part of the keys from ``count`` heads, from ``first`` on."""
        t = self.t
        keys = t.keys_of(self.k, part)
        ahead = self.i * jnp.int32(t.queries) - self.first_key - part * jnp.int32(t.part)
        # If masked or capped, at most 128 rows at once; of masked ones the third product waits for the first's weights.
        few = masked or self.soft_cap is not None
        together, step = (t.heads_in(LANES), LANES) if few else (count, t.queries)
        done: list[Any] = []
        for heads in tiles.steps(count, together):
            before, weight = done[0] if masked and len(done) == 2 and heads.stop == count else None, None
            for rows in tiles.steps(t.queries, step):
                scores = self._scores(keys, part, pl.ds(first + heads.start, heads.stop - heads.start), rows)
                scores = scores.reshape(-1, rows.stop - rows.start, t.part)
                for g in range(heads.start, heads.stop):
                    for piece in tiles.steps(rows.stop - rows.start, LANES):
                        at = slice(rows.start + piece.start, rows.start + piece.stop)
                        own = scores[g - heads.start, piece]
                        most = self.offset[self.b * t.shape[2] + first + g] + ahead + at.start
                        mask = _Mask(self.distance[: at.stop - at.start], most, before, t.window) if masked else None
                        weight = self._add_piece(part, first, g, at, own, mask)
            done.append(weight)

    def _scores(self, keys: Any, part: Any, heads: Any, at: slice) -> Array:
        t = self.t
        if self.products:
            return capped_log2(self.products.last(heads, at, part).reshape(-1, t.part), self.soft_cap)
        return capped_log2(tiles.scores(self.q[heads, at], keys, t.columns) * self.factor[self.b], self.soft_cap)

    def _add_piece(self, part: Any, first: Any, g: int, at: slice, scores: Array, mask: _Mask | None) -> Array:
        """Add the masses from a piece of head ``first + g``; returns those of the first keys."""
        weights = _weights(scores, self.beside[first + g, at], mask)
        for lane, weight in enumerate(weights):
            self.total[part, first + g, :, lane * LANES : (lane + 1) * LANES] += weight
        return weights[0]


def _kernel(offset, factor, live, q, normaliser, k, onto, out, total, beside, distance, *float32, t: Tiles, soft_cap):
    b, block, i = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    first_query, first_key = offset[b * t.shape[2]] + i * jnp.int32(t.queries), block * jnp.int32(t.keys)
    products: Any = float32_scores.Products(t, *float32) if float32 else None
    own = _Block(t, soft_cap, b, i, first_key, offset, factor, q, normaliser, k, total, beside, distance, products)
    pl.when(i == 0)(own.begin)
    # Where products are slow, many rows of them are scheduled as a region of their own.
    slow = products is not None or tiles.matrix_unit() == LANES
    each_part = functools.partial(_each_part, t, first_query, first_key, most=2 * _ROWS if slow else t.rows)
    if t.window is not None or soft_cap is not None:  # masks of two sides, and hyperbolic tangents, take registers too
        each_part = functools.partial(each_part, rows=LANES)
    alive = live[b * pl.num_programs(3) + i] != 0
    if products:
        # The only block of queries is split once for all keys; several are split again for each block of keys.
        again = jnp.logical_and(alive, t.touched(first_query, first_key)) if t.query_blocks > 1 else block == 0
        pl.when(i == 0)(functools.partial(products.take_keys, k))
        pl.when(again)(functools.partial(products.take_queries, q, factor[b]))
        for chunk in products.first_chunks():
            tiles.scheduling_barrier(alive, functools.partial(each_part, functools.partial(own.add_chunk, chunk)))

    @pl.when(alive)
    def _():
        each_part(own.add, begin=own.spread)

    @pl.when(i == pl.num_programs(3) - 1)
    def _():
        for part in range(t.parts):
            at = slice(part * t.part, (part + 1) * t.part)
            out[:, at] = onto[:, at] + total[part].sum(axis=1)


def _memory(t: Tiles, itemsize: int) -> int | None:
    """VMEM limit for normalisers, sums, blocks in flight and bfloat16 parts."""
    group, dim = t.shape[2], max(t.shape[4], LANES)
    needed = 4 * (t.rows * LANES + group * t.keys * (SUBLANES + 4)) + 2 * itemsize * dim * (t.rows + t.keys)
    return tiles.vmem_limit(needed + (float32_scores.scratch_bytes(float32_scores.scratch(t)) if itemsize == 4 else 0))


def call(p: Problem, c: Counting, t: Tiles, onto: Array, interpret: Any) -> Float[Array, "B H G T"]:
    """Run the kernel over the queries of ``t``, and add their masses to ``onto``."""
    batch, heads, group, _, dim = t.shape
    weight = jnp.ones((batch, t.count), jnp.float32) if c.weight is None else c.weight
    weight = tiles.padded(weight.astype(jnp.float32), 1, t.queries)
    live = (weight > 0).reshape(batch * t.query_blocks, t.queries).any(axis=1).astype(jnp.int32)
    normaliser = _normaliser_columns(log2_normaliser(t.query_rows(c.lse), weight), t)
    width = max(LANES, _lanes_of_block(t))
    offset = jnp.repeat(p.offset, group)

    def of_queries(*tail):
        return lambda b, h, block, i, offset, *_: ((b, h, 0, t.query_block(offset[b * group], block, i), *tail))

    def of_normaliser(b, h, block, i, offset, *_):
        i = t.query_block(offset[b * group], block, i)
        return b, h, 0, jax.lax.div(i * jnp.int32(_lanes_of_block(t)), jnp.int32(width))

    mass = pl.BlockSpec((None, None, group, t.keys), lambda b, h, block, i, *_: (b, h, 0, block))
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=3,
        grid=(batch, heads, t.key_blocks(p.offset), t.query_blocks),
        in_specs=[
            pl.BlockSpec((None, None, group, t.queries, dim), of_queries(0)),
            pl.BlockSpec((None, None, min(t.queries, LANES), width), of_normaliser),
            t.key_spec(lambda b, h, block, *_: (b, h, block)),
            mass,
        ],
        out_specs=mass,
        scratch_shapes=[
            pltpu.VMEM((t.parts, group, SUBLANES, t.part), jnp.float32),
            pltpu.VMEM((group, t.queries, LANES), jnp.float32),
            pltpu.VMEM((min(t.queries, LANES), LANES), jnp.int32),
            *(float32_scores.scratch(t) if p.k.dtype == jnp.float32 else ()),
        ],
    )
    return pl.pallas_call(
        functools.partial(_kernel, t=t, soft_cap=p.soft_cap),
        grid_spec=grid,
        out_shape=jax.ShapeDtypeStruct(onto.shape, jnp.float32),
        # Blocks of keys after the last query are not visited, and keep the masses of ``onto``.
        input_output_aliases={6: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=_memory(t, p.k.dtype.itemsize),
        ),
        cost_estimate=t.cost(p.k.dtype.itemsize, 1, 4 * (normaliser.size + 2 * onto.size)),
        name="attention_mass",
        interpret=interpret,
    )(
        offset,
        p.scale * jnp.float32(LOG2E),
        live,
        t.query_rows(p.q),
        normaliser,
        t.key_rows(p.k),
        onto,
    )

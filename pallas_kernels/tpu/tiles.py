"""Blocks of queries and keys of the causal TPU kernels, and operations on tiles of them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import argument_checks, dispatch
from pallas_kernels.softmax import NEG
from pallas_kernels.tuned import MANY_KEYS

LANES, SUBLANES = 128, 8
#: Keys whose scores are computed together: a part's scores are stored before the next part's need registers.
_PART = 512


@dataclasses.dataclass(frozen=True)
class Config:
    """Block sizes, all of them upper limits.

    Attributes:
      queries: queries of each head in a block; a multiple of 128.
      keys: keys in a block; a power of two, at least 128.
      part: keys whose scores are computed together; a power of two, at least 128.
    """

    queries: int = 128
    keys: int = 1024
    part: int = _PART

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for sizes that the kernels cannot take."""
        argument_checks.at_least("queries", self.queries, LANES)
        if self.queries % LANES:
            raise ValueError(f"queries is {self.queries}; give a multiple of {LANES}.")
        argument_checks.block_size("keys", self.keys, LANES)
        argument_checks.block_size("part", self.part, LANES)

    @classmethod
    def default(cls, group: int, count: int, tokens: int, dtype: DTypeLike) -> Config:
        """Sizes for ``count`` queries of ``group`` heads against ``tokens`` keys.

        About 512 rows of queries against 1,024 keys, 2 MB of scores; the few rows of a window against up to 2,048 keys.
        Twice as many scores for prompts so long that the masked half of blocks on the diagonal is little of the work.

        Chosen from compiled schedules, not timed on a device: for 4 queries per head the larger blocks take 12 % (v5e,
        v5p) to 22 % (v6e, tpu7x) fewer cycles per score, for 16 queries of 256 channels 12 to 31 %; float32 products
        gain little. A window of 32 queries of 4 heads issues for 0.53 us on v5e against 2,048 keys, which take 0.64 us
        to read: it is bound by one read of the keys.
        """
        queries = LANES * max(1, 4 // group)
        rows = min(count, queries) * group
        scores = (1 if tokens < MANY_KEYS or jnp.dtype(dtype) == jnp.float32 else 2) * 512 * 1024
        return cls(queries, min(2048, max(256, 1 << (scores // rows).bit_length() - 1)))


@dataclasses.dataclass(frozen=True)
class Tiles:
    """A problem's division into blocks.

    Keys of a head size that is not a multiple of 128 lanes are read transposed, tokens along the lanes. As rows they
    would be padded to twice their bytes or more, which copies them (268 MB of temporary memory for 134 MB of keys of
    size 64, compiled for v5e); XLA by itself lays such arrays out with the longer axis along the lanes.

    Attributes:
      shape: shape of the queries [B, H, G, N, D], N padded to whole blocks.
      count: queries before padding. tokens: keys, padded to whole blocks.
      queries, keys: sizes of a block.
      columns: whether keys are transposed.
      part_keys: most keys of a part of a block.
      window: keys that a query attends to, its own included; None for all up to it.
    """

    shape: tuple[int, ...]
    count: int
    tokens: int
    queries: int
    keys: int
    columns: bool
    part_keys: int = _PART
    window: int | None = None

    @classmethod
    def of(
        cls,
        q: Array,
        k: Array,
        config: Config | None,
        part_keys: int | None = None,
        count: int | None = None,
        window: int | None = None,
    ) -> Tiles:
        """Divide the first ``count`` queries, all by default, and their keys."""
        batch, heads, group, every, dim = q.shape
        count = count or every
        config = config or Config.default(group, count, k.shape[2], k.dtype)
        queries = min(config.queries, -(-count // 16) * 16)
        keys = config.keys
        while keys > LANES and k.shape[2] % keys:
            keys //= 2
        padded, tokens = -(-count // queries) * queries, -(-k.shape[2] // keys) * keys
        shape, part = (batch, heads, group, padded, dim), part_keys or config.part
        return cls(shape, count, tokens, queries, keys, dim % LANES != 0, part, window)

    @property
    def rows(self) -> int:
        """Rows of scores of a block: its queries times the heads of the group."""
        return self.shape[2] * self.queries

    def heads_in(self, rows: int) -> int:
        """The most heads, a divisor of the group, whose queries in a block are at most ``rows`` rows; at least 1."""
        group = self.shape[2]
        return max(x for x in range(1, group + 1) if group % x == 0 and (x == 1 or x * self.queries <= rows))

    @property
    def part(self) -> int:
        """Keys of a block whose scores are computed together."""
        return min(self.keys, self.part_keys)

    @property
    def parts(self) -> int:
        """Parts of a block of keys."""
        return self.keys // self.part

    @property
    def query_blocks(self) -> int:
        return self.shape[3] // self.queries

    def key_blocks(self, offset: Int[Array, " B"]) -> Int[Array, ""]:
        """Blocks of keys up to the last query's, at least 1; traced, so that a chunk's offset changes no shape."""
        last = jnp.max(offset) + jnp.int32(self.count - 1)
        return jnp.clip(last // jnp.int32(self.keys) + 1, 1, self.tokens // self.keys)

    def key_steps(self, offset: Int[Array, " B"]) -> Int[Array, ""]:
        """The most blocks of keys that a block of queries attends to, at least 1."""
        every = self.key_blocks(offset)
        return every if self.window is None else jnp.minimum(every, (self.queries + self.window - 2) // self.keys + 2)

    def query_rows(self, x: Array) -> Array:
        """Pad [B, H, G, N, ...] with zeros to whole blocks of queries; unchanged where it holds more than these."""
        return x if x.shape[3] > self.shape[3] else padded(x, 3, self.queries)

    def key_rows(self, x: Float[Array, "B H T D"]) -> Array:
        """Keys or values as the kernels read them: padded to whole blocks, transposed if ``columns``."""
        x = padded(x, 2, self.keys)
        return x.swapaxes(2, 3) if self.columns else x

    def key_spec(self, block_of: Any) -> pl.BlockSpec:
        """Block spec of keys or values; ``block_of`` maps the grid's indices to (batch row, head, block)."""
        dim = self.shape[4]
        if not self.columns:
            return pl.BlockSpec((None, None, self.keys, dim), lambda *at: (*block_of(*at), 0))

        def index(*at: Any) -> Any:
            b, h, block = block_of(*at)
            return b, h, 0, block

        return pl.BlockSpec((None, None, dim, self.keys), index)

    def keys_of(self, block: Any, part: Any) -> Array:
        """One part of a block of keys or values, as stored; ``part`` may be traced."""
        if isinstance(part, int):
            at = slice(part * self.part, (part + 1) * self.part)
        else:
            at = pl.ds(pl.multiple_of(part * jnp.int32(self.part), self.part), self.part)
        return block[:, at] if self.columns else block[at]

    def first_key_block(self, first_query: Array) -> Array:
        """The first block of keys that a block of queries, from this place on, attends to."""
        if self.window is None:
            return jnp.int32(0)
        return jax.lax.div(jnp.maximum(first_query - jnp.int32(self.window - 1), 0), jnp.int32(self.keys))

    def key_block(self, offset: Array, block: Array, step: Array) -> Array:
        """The block of keys that a block of queries reads in this step; the last one again where there are no more."""
        first = self.first_key_block(offset + block * jnp.int32(self.queries))
        return jnp.minimum(first + step, self.last_key_block(offset, block))

    def last_key_block(self, offset: Array, block: Array) -> Array:
        """The last block of keys that this block of queries attends to; later ones are not read."""
        last = jnp.maximum(offset + (block + 1) * jnp.int32(self.queries) - 1, 0)
        return jax.lax.div(last, jnp.int32(self.keys))

    def first_query_block(self, offset: Array, block: Array) -> Array:
        """The first block of queries that attends to this block of keys; earlier ones are not read."""
        first = jax.lax.div(jnp.maximum(block * jnp.int32(self.keys) - offset, 0), jnp.int32(self.queries))
        return jnp.minimum(first, jnp.int32(self.query_blocks - 1))

    def query_block(self, offset: Array, block: Array, step: Array) -> Array:
        """The block of queries that a block of keys reads in this step; one that attends to it where this does not."""
        found = jnp.maximum(step, self.first_query_block(offset, block))
        if self.window is None:
            return found
        last = block * jnp.int32(self.keys) + jnp.int32(self.keys + self.window - 2) - offset
        return jnp.minimum(found, jax.lax.div(jnp.maximum(last, 0), jnp.int32(self.queries)))

    def touched(self, first_query: Array, first_key: Array) -> Bool[Array, ""]:
        """Whether some query of a block attends to some key of a block."""
        causal = first_query + jnp.int32(self.queries - 1) >= first_key
        if self.window is None:
            return causal
        return jnp.logical_and(causal, first_query - first_key < jnp.int32(self.window + self.keys - 1))

    def whole(self, first_query: Array, first_key: Array) -> Bool[Array, ""]:
        """Whether every query of a block attends to every key of a block."""
        causal = first_query >= first_key + jnp.int32(self.keys - 1)
        if self.window is None:
            return causal
        return jnp.logical_and(causal, first_query - first_key < jnp.int32(self.window - self.queries + 1))

    def cost(self, itemsize: int, products: int, other_bytes: int) -> pl.CostEstimate:
        """Cost estimate without causality, as of a prompt's last queries; ``products``: 1 (scores), 2 (and values)."""
        batch, heads, group, padded, dim = self.shape
        scores = batch * heads * group * padded * self.tokens
        moved = itemsize * dim * batch * heads * (group * padded + products * self.tokens)
        return pl.CostEstimate(
            flops=(2 * dim * products + 4) * scores, transcendentals=scores, bytes_accessed=moved + other_bytes
        )


def matrix_unit() -> int:
    """Side of the matrix unit of the chip compiled for; 128 for an unknown chip."""
    return 256 if any(name in dispatch.device_kind().lower() for name in ("v6", "tpu7")) else 128


def sums_in_unit() -> bool:
    """Whether the chip's matrix unit accumulates the partial products of a longer contraction by itself."""
    return "tpu7" in dispatch.device_kind().lower()


def check_dtype(dtype: DTypeLike) -> None:
    """Raise ``NotImplementedError`` for keys that the matrix unit does not multiply."""
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"The TPU kernels read float32 or bfloat16 keys, not {jnp.dtype(dtype).name}.")


def vmem_limit(needed: int) -> int | None:
    """VMEM limit for a kernel that needs ``needed`` bytes; ``None`` where the default of 16 MB (v5e) is enough.

    A quarter more than needed, for what the compiler adds, and no more: XLA keeps small arrays in the rest. The chip
    with the least has 64 MB.

    Raises:
      NotImplementedError: the kernel needs more.
    """
    if needed > 62 * 2**20:
        raise NotImplementedError(f"a block of this group and head size needs {needed >> 20} MB of VMEM, of 64.")
    return None if needed < 12 * 2**20 else min(60 * 2**20, needed * 5 // 4)


def padded(x: Array, axis: int, size: int) -> Array:
    """Pad ``axis`` with zeros to a multiple of ``size``."""
    fill = -x.shape[axis] % size
    if not fill:
        return x
    return jnp.pad(x, [(0, fill if i == axis else 0) for i in range(x.ndim)])


def dot(a: Float[Array, "M K"], b: Array, contracted: int) -> Float[Array, "M N"]:
    """Product over ``b``'s axis ``contracted``, with float32 sums; float32 operands are not rounded to bfloat16."""
    exact = jax.lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    axes = (((1,), (contracted,)), ((), ()))
    return jax.lax.dot_general(a.astype(b.dtype), b, axes, precision=exact, preferred_element_type=jnp.float32)


def scores(q: Float[Array, "G N D"], k: Array, columns: bool) -> Float[Array, "M S"]:
    """q . k of a block, all heads of the group in one product."""
    return dot(q.reshape(-1, q.shape[-1]), k, 0 if columns else 1)


def steps(size: int, step: int) -> list[slice]:
    """Slices of ``step`` along an axis of this size; the last may be shorter."""
    return [slice(at, min(at + step, size)) for at in range(0, size, step)]


def lanes(x: Float[Array, "M S"]) -> list[Float[Array, "M 128"]]:
    """Columns of ``x`` in groups of 128 lanes."""
    return [x[:, at : at + LANES] for at in range(0, x.shape[1], LANES)]


def across(x: Float[Array, "M 128"], width: int) -> Float[Array, "M D"]:
    """Repeat a value per row, which is the same in all 128 lanes, over rows of another width."""
    return jnp.concatenate([x] * -(-width // LANES), axis=1)[:, :width]


def visible(distance: Array, most: Array, window: int | None) -> Bool[Array, "S L"]:
    """Whether keys at these distances from the queries are seen: at most ``most``, and within the window.

    The two in one comparison, of numbers without a sign: masks have few registers.
    """
    if window is None:
        return distance <= most
    return jax.lax.bitcast_convert_type(most - distance, jnp.uint32) < jnp.uint32(window)


def masked(x: Float[Array, "M S"], ahead: list[Array], window: int | None = None) -> Float[Array, "M S"]:
    """Scores with ``NEG`` where a query is before its key, or its window after it.

    ``ahead`` is, for each head, the position of its first query minus that of the first key. The matrix of distances
    is made for 64 queries and used for all, so that it stays in registers. Each head passes a scalar of its own: from
    the same one the compiler would keep the masks of a head for the next, and spill them.
    """
    queries = x.shape[0] // len(ahead)
    step = math.gcd(queries, 64)
    distance = jax.lax.broadcasted_iota(jnp.int32, (step, LANES), 1)
    distance -= jax.lax.broadcasted_iota(jnp.int32, (step, LANES), 0)
    strips = []
    for at in range(0, x.shape[0], step):
        most = ahead[at // queries] + jnp.int32(at % queries)
        groups = enumerate(lanes(x[at : at + step]))
        places = [visible(distance, most - jnp.int32(i * LANES), window) for i in range(x.shape[1] // LANES)]
        seen = [jnp.where(places[i], y, jnp.float32(NEG)) for i, y in groups]
        strips.append(jnp.concatenate(seen, axis=1))
    return jnp.concatenate(strips)


def scheduling_barrier(condition: Bool[Array, ""], run: Any) -> None:
    """Call ``run()`` where the condition holds, and keep the compiler from scheduling it together with other code.

    Implemented as a loop of at most one iteration. The compiler merges consecutive branches; values that the first
    stores for the second then stay in registers, and spill.
    """

    def iteration(_: Any, __: Any) -> None:
        run()

    jax.lax.fori_loop(jnp.int32(0), condition.astype(jnp.int32), iteration, None)


def each_strip(t: Tiles, condition: Bool[Array, ""], run: Any, most: int = LANES) -> None:
    """Loop over a block's rows, at most ``most`` at a time: ``run(head, queries of the head, rows of the block)``.

    Few rows at a time take few registers.
    """
    step = math.gcd(t.queries, most)
    strips = jnp.int32(t.queries // step)

    def iteration(at: Any, _: Any) -> None:
        head, first = jax.lax.div(at, strips), jax.lax.rem(at, strips) * jnp.int32(step)
        rows = pl.multiple_of(at * jnp.int32(step), step)
        run(head, pl.ds(pl.multiple_of(first, step), step), pl.ds(rows, step))

    iterations = jnp.where(condition, jnp.int32(t.shape[2]) * strips, 0)
    jax.lax.fori_loop(jnp.int32(0), iterations, iteration, None)


def masked_or_not(t: Tiles, first_query: Array, first_key: Array, run: Any) -> None:
    """Call ``run(True)`` for a block that queries see in part, ``run(False)`` for one they all see whole."""
    whole = t.whole(first_query, first_key)
    pl.when(whole)(lambda: run(False))
    pl.when(jnp.logical_and(t.touched(first_query, first_key), jnp.logical_not(whole)))(lambda: run(True))


def store_by_head(out: Any, column: Float[Array, "M 128"]) -> None:
    """Write one value per query, given the same in every lane, to ``out`` [G, N] with queries along the lanes.

    An array [..., 1] would be padded to 128 lanes (134 MB for a quarter of a million queries).
    """
    group, count = out.shape
    transposed = jnp.transpose(column)
    for g in range(group):
        out[g : g + 1] = transposed[:1, g * count : (g + 1) * count]

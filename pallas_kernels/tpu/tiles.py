"""Blocks of queries and keys as the causal TPU kernels take them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import checks, dispatch
from pallas_kernels.softmax import NEG
from pallas_kernels.tuned import MANY_KEYS

LANES, SUBLANES = 128, 8
#: Keys whose scores are multiplied at once, each part's results stored before the next part's need registers.
_PART = 512


@dataclasses.dataclass(frozen=True)
class Config:
    """Block sizes.

    Attributes:
      queries: of each head a block holds at most; a multiple of 128.
      keys: a block holds at most; a power of two, at least 128.
      part: keys whose scores are computed together, at most; a power of two, at least 128.
    """

    queries: int = 128
    keys: int = 1024
    part: int = _PART

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for sizes of another kind."""
        checks.at_least("queries", self.queries, LANES)
        if self.queries % LANES:
            raise ValueError(f"queries is {self.queries}; give a multiple of {LANES}.")
        checks.block_size("keys", self.keys, LANES)
        checks.block_size("part", self.part, LANES)

    @classmethod
    def default(cls, group: int, count: int, tokens: int, dtype: DTypeLike) -> Config:
        """About 512 rows of queries against 1,024 keys, 2 MB of scores; a window's few rows against up to 2,048 keys.
        Twice as many scores where there are keys enough for what a block on the diagonal computes in vain to be little.

        Not timed on a device. Scheduled for 4 queries a head, the larger blocks take 12 % (v5e, v5p) to 22 % (v6e,
        tpu7x) fewer cycles a score, and for 16 queries of 256 channels 12 to 31 %; float32 products gain little. A
        window of 32 queries of 4 heads takes v5e 0.53 us of issue slots for 2,048 keys, whose bytes take 0.64: one read
        of the keys is what it costs.
        """
        queries = LANES * max(1, 4 // group)
        rows = min(count, queries) * group
        scores = (1 if tokens < MANY_KEYS or jnp.dtype(dtype) == jnp.float32 else 2) * 512 * 1024
        return cls(queries, min(2048, max(256, 1 << (scores // rows).bit_length() - 1)))


@dataclasses.dataclass(frozen=True)
class Tiles:
    """A problem cut into blocks.

    Keys of a head size below 128 lanes are taken transposed, tokens along the lanes. As rows they would be padded to
    twice their bytes or more, and an array that is not would be copied (268 MB of temporary memory for 134 MB of keys
    of size 64, compiled for v5e); XLA lays such arrays out with the longer axis along the lanes by itself.

    Attributes:
      shape: of the queries, with N padded to whole blocks.
      count: queries asked for. tokens: keys, padded to whole blocks.
      queries, keys: of a block.
      columns: whether keys are transposed.
      part_keys: of a part of a block, at most.
    """

    shape: tuple[int, ...]
    count: int
    tokens: int
    queries: int
    keys: int
    columns: bool
    part_keys: int = _PART

    @classmethod
    def of(
        cls, q: Array, k: Array, config: Config | None, part_keys: int | None = None, count: int | None = None
    ) -> Tiles:
        """Of the first ``count`` queries, all by default."""
        batch, heads, group, every, dim = q.shape
        count = count or every
        config = config or Config.default(group, count, k.shape[2], k.dtype)
        queries = min(config.queries, -(-count // 16) * 16)
        keys = config.keys
        while keys > LANES and k.shape[2] % keys:
            keys //= 2
        padded, tokens = -(-count // queries) * queries, -(-k.shape[2] // keys) * keys
        shape, part = (batch, heads, group, padded, dim), part_keys or config.part
        return cls(shape, count, tokens, queries, keys, dim % LANES != 0, part)

    @property
    def rows(self) -> int:
        """Of a block's queries, of all heads of the group."""
        return self.shape[2] * self.queries

    def heads_in(self, rows: int) -> int:
        """Of how many heads, a divisor of the group's, a block's queries are at most so many rows; 1 at least."""
        group = self.shape[2]
        return max(x for x in range(1, group + 1) if group % x == 0 and (x == 1 or x * self.queries <= rows))

    @property
    def part(self) -> int:
        """Keys of a block whose scores are computed together."""
        return min(self.keys, self.part_keys)

    @property
    def parts(self) -> int:
        """Of a block of keys."""
        return self.keys // self.part

    @property
    def query_blocks(self) -> int:
        return self.shape[3] // self.queries

    def key_blocks(self, offset: Int[Array, " B"]) -> Int[Array, ""]:
        """Blocks of keys that some query sees, at least 1; traced: a chunk's place changes no shape."""
        last = jnp.max(offset) + jnp.int32(self.count - 1)
        return jnp.clip(last // jnp.int32(self.keys) + 1, 1, self.tokens // self.keys)

    def query_rows(self, x: Array) -> Array:
        """[B, H, G, N, ...] with zeros up to whole blocks of queries; as it is where there are more."""
        return x if x.shape[3] > self.shape[3] else padded(x, 3, self.queries)

    def key_rows(self, x: Float[Array, "B H T D"]) -> Array:
        """Keys or values as the kernels take them."""
        x = padded(x, 2, self.keys)
        return x.swapaxes(2, 3) if self.columns else x

    def key_spec(self, block_of: Any) -> pl.BlockSpec:
        """Of a block of keys or values; ``block_of`` gives (row, head, block) from the grid's indices."""
        dim = self.shape[4]
        if not self.columns:
            return pl.BlockSpec((None, None, self.keys, dim), lambda *at: (*block_of(*at), 0))

        def index(*at: Any) -> Any:
            b, h, block = block_of(*at)
            return b, h, 0, block

        return pl.BlockSpec((None, None, dim, self.keys), index)

    def keys_of(self, block: Any, part: Any) -> Array:
        """That part of a block of keys or values, as it lies in memory; a number or a traced one."""
        if isinstance(part, int):
            at = slice(part * self.part, (part + 1) * self.part)
        else:
            at = pl.ds(pl.multiple_of(part * jnp.int32(self.part), self.part), self.part)
        return block[:, at] if self.columns else block[at]

    def last_key_block(self, offset: Array, block: Array) -> Array:
        """The last block of keys that this block of queries sees; later ones are not read."""
        last = jnp.maximum(offset + (block + 1) * jnp.int32(self.queries) - 1, 0)
        return jax.lax.div(last, jnp.int32(self.keys))

    def first_query_block(self, offset: Array, block: Array) -> Array:
        """The first block of queries that sees this block of keys; earlier ones are not read."""
        first = jax.lax.div(jnp.maximum(block * jnp.int32(self.keys) - offset, 0), jnp.int32(self.queries))
        return jnp.minimum(first, jnp.int32(self.query_blocks - 1))

    def touched(self, first_query: Array, first_key: Array) -> Bool[Array, ""]:
        """Whether a query of the block sees a key of the block."""
        return first_query + jnp.int32(self.queries - 1) >= first_key

    def cost(self, itemsize: int, products: int, other_bytes: int) -> pl.CostEstimate:
        """Of the whole rectangle, as for queries that are the last, with 1 or 2 products a score, each of an array."""
        batch, heads, group, padded, dim = self.shape
        scores = batch * heads * group * padded * self.tokens
        moved = itemsize * dim * batch * heads * (group * padded + products * self.tokens)
        return pl.CostEstimate(
            flops=(2 * dim * products + 4) * scores, transcendentals=scores, bytes_accessed=moved + other_bytes
        )


def matrix_unit() -> int:
    """The side of the matrix unit of the chip compiled for; of one that is not known, the smaller."""
    return 256 if any(name in dispatch.device_kind().lower() for name in ("v6", "tpu7")) else 128


def sums_in_unit() -> bool:
    """Whether the matrix unit of the chip compiled for adds the products of a longer contraction up by itself."""
    return "tpu7" in dispatch.device_kind().lower()


def vmem_limit(needed: int) -> int | None:
    """VMEM to ask for where v5e's default of 16 MB would be little: a quarter more, for what the compiler adds.

    No more than is needed: it is XLA's loss, which keeps small arrays there. The least that a chip has is 64 MB.

    Raises:
      NotImplementedError: that is less than is needed.
    """
    if needed > 62 * 2**20:
        raise NotImplementedError(f"a block of this group and head size needs {needed >> 20} MB of VMEM, of 64.")
    return None if needed < 12 * 2**20 else min(60 * 2**20, needed * 5 // 4)


def padded(x: Array, axis: int, size: int) -> Array:
    """With zeros up to whole blocks; nothing where it is whole already."""
    fill = -x.shape[axis] % size
    if not fill:
        return x
    return jnp.pad(x, [(0, fill if i == axis else 0) for i in range(x.ndim)])


def dot(a: Float[Array, "M K"], b: Array, contracted: int) -> Float[Array, "M N"]:
    """Product over ``b``'s axis ``contracted``; float32 numbers are multiplied as such, not in bfloat16 passes."""
    exact = jax.lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    axes = (((1,), (contracted,)), ((), ()))
    return jax.lax.dot_general(a.astype(b.dtype), b, axes, precision=exact, preferred_element_type=jnp.float32)


def scores(q: Float[Array, "G N D"], k: Array, columns: bool) -> Float[Array, "M S"]:
    """q . k of a block, the group's queries one product."""
    return dot(q.reshape(-1, q.shape[-1]), k, 0 if columns else 1)


def steps(size: int, step: int) -> list[slice]:
    """All of an axis in pieces, the last as long as is left."""
    return [slice(at, min(at + step, size)) for at in range(0, size, step)]


def lanes(x: Float[Array, "M S"]) -> list[Float[Array, "M 128"]]:
    """The columns of ``x`` in groups of 128."""
    return [x[:, at : at + LANES] for at in range(0, x.shape[1], LANES)]


def across(x: Float[Array, "M 128"], width: int) -> Float[Array, "M D"]:
    """A number a row, which is the same in every lane, for rows of another width."""
    return jnp.concatenate([x] * -(-width // LANES), axis=1)[:, :width]


def masked(x: Float[Array, "M S"], ahead: list[Array]) -> Float[Array, "M S"]:
    """``NEG`` where a query does not see; ``ahead`` is how far each head's first query is ahead of the first key.

    Distances of 64 queries serve all, so that they stay in registers. What serves several heads must be computed from
    different numbers: masks of one would be kept for the next.
    """
    queries = x.shape[0] // len(ahead)
    step = math.gcd(queries, 64)
    distance = jax.lax.broadcasted_iota(jnp.int32, (step, LANES), 1)
    distance -= jax.lax.broadcasted_iota(jnp.int32, (step, LANES), 0)
    strips = []
    for at in range(0, x.shape[0], step):
        most = ahead[at // queries] + jnp.int32(at % queries)
        groups = enumerate(lanes(x[at : at + step]))
        seen = [jnp.where(distance <= most - jnp.int32(i * LANES), y, jnp.float32(NEG)) for i, y in groups]
        strips.append(jnp.concatenate(seen, axis=1))
    return jnp.concatenate(strips)


def apart(condition: Bool[Array, ""], run: Any) -> None:
    """``run()`` where the condition holds, never scheduled together with what follows.

    A loop of one turn: branches in a row are joined, and what the first stores for the second is then kept in
    registers, of which there are too few.
    """

    def turn(_: Any, __: Any) -> None:
        run()

    jax.lax.fori_loop(jnp.int32(0), condition.astype(jnp.int32), turn, None)


def each_strip(t: Tiles, condition: Bool[Array, ""], run: Any, most: int = LANES) -> None:
    """``run(head, its queries, their rows of the block)`` for few rows at a time, which take few registers."""
    step = math.gcd(t.queries, most)
    strips = jnp.int32(t.queries // step)

    def turn(at: Any, _: Any) -> None:
        head, first = jax.lax.div(at, strips), jax.lax.rem(at, strips) * jnp.int32(step)
        rows = pl.multiple_of(at * jnp.int32(step), step)
        run(head, pl.ds(pl.multiple_of(first, step), step), pl.ds(rows, step))

    turns = jnp.where(condition, jnp.int32(t.shape[2]) * strips, 0)
    jax.lax.fori_loop(jnp.int32(0), turns, turn, None)


def each_way(t: Tiles, first_query: Array, first_key: Array, run: Any) -> None:
    """``run(masked)`` for a block the diagonal crosses or one below it; nothing for one above."""
    below = first_query >= first_key + jnp.int32(t.keys - 1)
    pl.when(below)(lambda: run(False))
    pl.when(jnp.logical_and(t.touched(first_query, first_key), jnp.logical_not(below)))(lambda: run(True))


def store_by_head(out: Any, column: Float[Array, "M 128"]) -> None:
    """Write one number a query, the same in every lane, into ``out`` [G, N]: along the lanes, as it lies in memory.

    As [..., 1] in memory it would be padded to 128 lanes (134 MB for a quarter of a million queries).
    """
    group, count = out.shape
    turned = jnp.transpose(column)
    for g in range(group):
        out[g : g + 1] = turned[:1, g * count : (g + 1) * count]

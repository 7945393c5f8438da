"""``ragged_decode`` over head sizes, groups, dtypes, page sizes, and each of its options alone."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.pages import Lanes, Pages, Stacked
from pallas_kernels.ragged_decode import ragged_decode
from pallas_kernels.ragged_decode.decode_problem import Problem
from pallas_kernels.ragged_decode.tpu_sizes import TpuConfig, blocks_together, fit, row_lanes
from tools.aot.cases import Case

BATCH, HEADS = 8, 8
#: Slots of the heads: as many as eight heads of 4096, and no two the same.
SLOTS = (1024, 2048, 3072, 3584, 4608, 5120, 6144, 7168)
#: One page less: 255 pages of 128 slots per row.
ODD_SLOTS = (*SLOTS[:-1], SLOTS[-1] - 128)
#: Most bundles of blocks of 512 slots, 8 queries, D = 128, bfloat16: the best without a software pipeline.
BUNDLES = {"v5e": 175, "v6e": 147, "tpu7x": 150}
#: ``device_kind`` of the targets.
KINDS = {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "tpu7x": "TPU7x"}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a decode step; with ``by_row`` the runs differ from row to row, up to the longest of ``slots``."""

    head_dim: int = 128
    group: int = 8
    dtype: Any = jnp.bfloat16
    page_size: int = 128
    log_mass: bool = False
    window: int | None = None
    by_position: bool = False
    alibi: bool = False
    soft_cap: float | None = None
    with_logits: bool = False
    logits_scale: float | None = None
    batch: int = BATCH
    slots: tuple[int, ...] = SLOTS
    by_row: bool = False
    key_dim: int | None = None

    @property
    def runs(self) -> tuple[int, ...]:
        runs = tuple(slots // self.page_size for slots in self.slots)
        return (max(runs),) * HEADS if self.by_row else runs

    @property
    def total(self) -> int:
        """Pages of a row."""
        return sum(slots // self.page_size for slots in self.slots)

    @property
    def one_byte(self) -> bool:
        return jnp.dtype(self.dtype).itemsize == 1

    def pages(self) -> Pages:
        """Shapes of the pool."""
        head = (self.batch, self.total)
        if self.key_dim is not None:
            lanes = -(-(self.key_dim + self.head_dim) // 128) * 128
            row = jax.ShapeDtypeStruct((*head, self.page_size, lanes), self.dtype)
            return Lanes(row, (self.key_dim, self.head_dim))  # pyright: ignore
        if self.head_dim == 64:
            return Lanes(jax.ShapeDtypeStruct((*head, self.page_size, 128), self.dtype))  # pyright: ignore
        lanes = -(-self.head_dim // 128) * 128
        return Stacked(jax.ShapeDtypeStruct((*head, 2, self.page_size, lanes), self.dtype), self.head_dim)  # pyright: ignore

    def arrays(self) -> dict[str, Any]:
        """Shapes of the other arguments."""
        shape = jax.ShapeDtypeStruct
        query = jnp.bfloat16 if self.one_byte else self.dtype
        slots = (self.batch, self.total, self.page_size)
        arrays: dict[str, Any] = {
            "q": shape((self.batch, HEADS, self.group, self.key_dim or self.head_dim), query),
            "length": shape((self.batch, HEADS), jnp.int32),
        }
        if self.by_row:
            arrays["starts"] = shape((self.batch, HEADS), jnp.int32)
        if self.log_mass:
            arrays["log_mass"] = shape((self.batch, HEADS), jnp.float32)
        if self.one_byte:
            arrays["k_scale"] = shape((self.batch, HEADS, self.key_dim or self.head_dim), jnp.float32)
            arrays["v_scale"] = shape(slots, jnp.float32)
        if self.by_position or self.alibi:
            arrays["position"] = shape(slots, jnp.int32)
            arrays["query_position"] = shape((self.batch,), jnp.int32)
        return arrays


def _step(pages: Pages, arrays: dict[str, Any], *, shape: Shape, implementation: str, options: dict[str, Any]) -> Any:
    slopes = np.exp2(-np.arange(1, 1 + HEADS * shape.group) / shape.group).astype(np.float32)
    rest = dict(arrays)
    return ragged_decode(
        rest.pop("q"),
        pages,
        rest.pop("length"),
        runs=shape.runs,
        scale=shape.head_dim**-0.5,
        window=shape.window,
        soft_cap=shape.soft_cap,
        slopes=slopes.reshape(HEADS, shape.group) if shape.alibi else None,
        with_logits=shape.with_logits,
        logits_scale=shape.logits_scale,
        implementation=implementation,
        **rest,
        **options,
    )


def case(name: str, shape: Shape, implementation: str, platforms: tuple[str, ...], **keywords: Any) -> Case:
    """A decode step with this implementation; ``options`` are its own, other keywords the case's."""
    options = keywords.pop("options", {})
    pages = shape.pages()
    return Case(
        name,
        "ragged_decode",
        functools.partial(_step, shape=shape, implementation=implementation, options=options),
        (pages, shape.arrays()),
        cache_bytes=shape.batch * shape.total * shape.page_size * pages.slot_nbytes,
        platforms=platforms,
        **keywords,
    )


def _tpu(name: str, shape: Shape, rows: int = 0, **keywords: Any) -> Case:
    """A case with blocks of ``rows`` slots on every chip, or with each chip's default."""
    if rows:
        keywords["options"] = {"config": TpuConfig(rows=rows, buffers=8)}
    pages = shape.pages()
    arrays = shape.arrays()
    problem = Problem(arrays["q"], pages, arrays["length"], shape.runs, scale=1.0)
    block_bytes = {}
    for target, kind in KINDS.items():
        own = TpuConfig.default(kind, shape.page_size, row_lanes(problem) // 2, pages.dtype)
        config = keywords["options"]["config"] if rows else own
        count, _, strips = fit(config, problem, kind)
        block_bytes[target] = count * shape.page_size * pages.slot_nbytes * blocks_together(config, problem) // strips
    return case(name, shape, "tpu", ("tpu",), block_bytes=block_bytes, **keywords)


def cases() -> list[Case]:
    """Every case."""
    found = [_tpu(f"G = 8, D = 128, bfloat16, blocks of {rows}", Shape(), rows) for rows in (256, 1024, 2048)]
    found.insert(1, _tpu("G = 8, D = 128, bfloat16, blocks of 512", Shape(), 512, bundles=BUNDLES))
    found += [_tpu(f"… pages of {size}", Shape(page_size=size), 512, bundles=BUNDLES) for size in (16, 32, 64)]
    for dtype in (jnp.bfloat16, jnp.int8, jnp.float32):
        for head_dim in (64, 80, 96, 128, 256):
            name = f"G = 4, D = {head_dim}, {jnp.dtype(dtype).name}"
            # The unmerged results of v5p's two cores are more than 1 % of the smallest cache.
            limit = 0.02 if (head_dim, dtype) == (64, jnp.int8) else 0.01
            found.append(_tpu(name, Shape(head_dim, 4, dtype), 512, temp_limit=limit))
    for dtype in (jnp.bfloat16, jnp.int8, jnp.float32):
        for key_dim, head_dim in ((48, 80), (128, 256)):  # in one register of lanes, and in three
            name = f"G = 4, keys of {key_dim} channels, values of {head_dim}, {jnp.dtype(dtype).name}"
            found.append(_tpu(name, Shape(head_dim, 4, dtype, key_dim=key_dim), 512, temp_limit=0.02))
    found.append(
        _tpu("default blocks, G = 4, keys of 128 channels, values of 256, bfloat16", Shape(256, 4, key_dim=128))
    )
    fp8 = Shape(dtype=jnp.float8_e4m3fn)
    found.append(_tpu("G = 8, D = 128, float8_e4m3fn", fp8, targets=("tpu7x",)))
    found += [_tpu(f"G = {group}, D = 128, bfloat16", Shape(group=group), 512) for group in (1, 2, 16)]
    options = {
        "log_mass": Shape(log_mass=True),
        "window by slot": Shape(window=1000),
        "window by position": Shape(window=1000, by_position=True),
        "soft_cap": Shape(soft_cap=50.0),
        "slopes": Shape(alibi=True),
        "with_logits": Shape(with_logits=True),
        "with_logits, logits_scale, log_mass": Shape(with_logits=True, logits_scale=1.0, log_mass=True),
        "all but logits, int8": Shape(
            dtype=jnp.int8, log_mass=True, window=1000, by_position=True, soft_cap=50.0, alibi=True
        ),
    }
    options |= {
        "runs by row": Shape(by_row=True),
        "runs by row, window by slot, with_logits, log_mass": Shape(
            by_row=True, window=1000, with_logits=True, log_mass=True
        ),
        "runs by row, all but logits, int8": dataclasses.replace(options["all but logits, int8"], by_row=True),
    }
    found += [_tpu(f"G = 8, D = 128, {name}", shape, 512) for name, shape in options.items()]
    alone = dataclasses.replace(options["all but logits, int8"], group=1)
    found.append(_tpu("G = 1, D = 128, all but logits, int8", alone, 512))
    # A TPU lays [8, 255, 128] out with the 8 in the sublanes, where the kernel needs the 255: scales are copied.
    odd = Shape(dtype=jnp.int8, slots=ODD_SLOTS)
    found.append(_tpu("G = 8, D = 128, int8, pages of a row not a multiple of 8", odd, 512, temp_limit=0.03))
    found += [
        _tpu("default blocks, G = 8, D = 128, bfloat16", Shape()),
        _tpu("default blocks, G = 8, D = 128, int8", Shape(dtype=jnp.int8)),
        _tpu("default blocks, G = 4, D = 64, bfloat16", Shape(64, 4)),
        _tpu("default blocks, G = 4, D = 256, bfloat16", Shape(256, 4)),
        _tpu("default blocks, G = 8, D = 128, float32", Shape(dtype=jnp.float32)),
        _tpu("default blocks, G = 32, D = 128, bfloat16", Shape(group=32), temp_limit=0.02),
        _tpu("default blocks, G = 64, D = 128, bfloat16", Shape(group=64), temp_limit=0.02),
        _tpu("default blocks, 256 rows, G = 4, D = 128, bfloat16", Shape(group=4, batch=256)),
        _tpu("default blocks, runs by row, G = 4, D = 64, bfloat16", Shape(64, 4, by_row=True)),
        _tpu("default blocks, runs by row, G = 4, D = 128, float32", Shape(group=4, dtype=jnp.float32, by_row=True)),
    ]
    return found

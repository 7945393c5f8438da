"""``ragged_decode`` on GPUs: both kernels over head sizes, groups, dtypes and layouts, and each option alone."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.pages import Lanes, Stacked
from pallas_kernels.ragged_decode import ragged_decode
from pallas_kernels.ragged_decode.mosaic_gpu import WIDEST
from tools.aot.cases import Case

BATCH, HEADS = 64, 8
#: Slots of the heads: 4,096 on average, and no two the same.
SLOTS = (1024, 2048, 3072, 3584, 4608, 5120, 6144, 7168)


@dataclasses.dataclass(frozen=True)
class Shape:
    """A decode step by its sizes; ``uniform`` heads are all of the mean length."""

    head_dim: int = 128
    group: int = 4
    dtype: Any = jnp.bfloat16
    page_size: int = 64
    layout: str = "stacked"
    uniform: bool = False
    log_mass: bool = False
    window: int | None = None
    placed: bool = False
    alibi: bool = False
    soft_cap: float | None = None
    with_logits: bool = False
    logits_scale: float | None = None

    @property
    def runs(self) -> tuple[int, ...]:
        slots = (sum(SLOTS) // HEADS,) * HEADS if self.uniform else SLOTS
        return tuple(n // self.page_size for n in slots)

    def arrays(self) -> dict[str, Any]:
        """Shapes of the arguments that are arrays, by name."""
        shape, total, dtype = jax.ShapeDtypeStruct, sum(self.runs), jnp.dtype(self.dtype)
        slots = (BATCH, total, self.page_size)
        lanes = 128 if self.layout == "padded" else self.head_dim
        pages = (
            Lanes(shape((*slots, 2 * self.head_dim), dtype))  # pyright: ignore
            if self.layout == "lanes"
            else Stacked(shape((BATCH, total, 2, self.page_size, lanes), dtype), self.head_dim)  # pyright: ignore
        )
        arrays: dict[str, Any] = {
            "q": shape((BATCH, HEADS, self.group, self.head_dim), jnp.bfloat16 if dtype.itemsize == 1 else dtype),
            "pages": pages,
            "length": shape((BATCH, HEADS), jnp.int32),
        }
        if self.log_mass:
            arrays["log_mass"] = shape((BATCH, HEADS), jnp.float32)
        if dtype.itemsize == 1:
            arrays |= {
                "k_scale": shape((BATCH, HEADS, self.head_dim), jnp.float32),
                "v_scale": shape(slots, jnp.float32),
            }
        if self.placed or self.alibi:
            arrays |= {"position": shape(slots, jnp.int32), "query_position": shape((BATCH,), jnp.int32)}
        return arrays


def _step(arrays: dict[str, Any], *, shape: Shape, implementation: str) -> Any:
    slopes = np.exp2(-np.arange(1, 1 + HEADS * shape.group) / shape.group).astype(np.float32)
    return ragged_decode(
        **arrays,
        runs=shape.runs,
        scale=shape.head_dim**-0.5,
        window=shape.window,
        soft_cap=shape.soft_cap,
        slopes=slopes.reshape(HEADS, shape.group) if shape.alibi else None,
        with_logits=shape.with_logits,
        logits_scale=shape.logits_scale,
        implementation=implementation,
    )


def _case(implementation: str, name: str, shape: Shape, targets: tuple[str, ...] = ()) -> Case:
    arrays = shape.arrays()
    return Case(
        f"{implementation}: {name}",
        "ragged_decode",
        functools.partial(_step, shape=shape, implementation=implementation),
        (arrays,),
        cache_bytes=BATCH * sum(shape.runs) * shape.page_size * arrays["pages"].row_nbytes,
        platforms=("gpu",),
        kernels=(f"ragged_decode_{implementation}",),
        targets=targets,
        temp_limit=_temp_limit(shape),
    )


def _temp_limit(shape: Shape) -> float:
    """1 %, but for the results of 64 queries a head before they are merged, and a flag a slot beside 8-bit rows."""
    if shape.group > 16:
        return 0.03
    return 0.02 if shape.with_logits and jnp.dtype(shape.dtype).itemsize == 1 else 0.01


def cases() -> list[Case]:
    """Every case; what only Hopper has is compiled for sm_90 alone."""
    both = {f"D = {dim}, bfloat16": Shape(dim) for dim in (64, 80, 96, 128, 256)}
    both |= {f"G = {group}, D = 128, bfloat16": Shape(group=group) for group in (1, 3, 8, 16, 64)}
    both |= {
        "D = 128, float16": Shape(dtype=jnp.float16),
        "D = 80 padded to 128, bfloat16": Shape(80, layout="padded"),
        "uniform heads": Shape(uniform=True),
        "log_mass": Shape(log_mass=True),
        "window by slot": Shape(window=1000),
        "soft_cap": Shape(soft_cap=50.0),
        "with_logits": Shape(with_logits=True),
        "all of these, D = 256": Shape(
            256, log_mass=True, window=1000, soft_cap=50.0, with_logits=True, logits_scale=1.0
        ),
    }
    only_triton = {
        f"D = {dim}, {jnp.dtype(t).name}": Shape(dim, dtype=t)
        for t in (jnp.int8, jnp.float32)
        for dim in (64, 128, 256)
    }
    only_triton |= {
        "D = 128, float8_e5m2": Shape(dtype=jnp.float8_e5m2),
        "D = 64 in lanes, bfloat16": Shape(64, layout="lanes"),
        "pages of 16": Shape(page_size=16),
        "window by position": Shape(window=1000, placed=True),
        "slopes": Shape(alibi=True),
        "all options, int8": Shape(
            dtype=jnp.int8, log_mass=True, window=1000, alibi=True, soft_cap=50.0, with_logits=True, logits_scale=1.0
        ),
    }
    # Wider rows than this JAX lowers are refused, and Triton takes them.
    found = [_case("mosaic_gpu", name, shape, ("sm_90",)) for name, shape in both.items() if shape.head_dim <= WIDEST]
    found += [_case("triton", name, shape) for name, shape in (both | only_triton).items()]
    e4m3 = Shape(dtype=jnp.float8_e4m3fn)
    return [*found, _case("triton", "D = 128, float8_e4m3fn", e4m3, ("sm_90", "sm_100"))]

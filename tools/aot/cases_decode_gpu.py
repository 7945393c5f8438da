"""``ragged_decode`` on GPUs: both kernels over head sizes, groups, dtypes and layouts, and each option alone."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.pages import Lanes, Pages, Stacked
from pallas_kernels.ragged_decode.mosaic_gpu import WIDEST
from tools.aot import cases_decode
from tools.aot.cases import Case
from tools.aot.cases_decode import HEADS


@dataclasses.dataclass(frozen=True)
class Shape(cases_decode.Shape):
    """Sizes of a decode step; ``uniform`` heads all have the mean length."""

    group: int = 4
    page_size: int = 64
    batch: int = 64
    layout: str = "stacked"
    uniform: bool = False

    @property
    def runs(self) -> tuple[int, ...]:
        return (sum(self.slots) // HEADS // self.page_size,) * HEADS if self.uniform else super().runs

    def pages(self) -> Pages:
        """Shapes of the pool."""
        shape, slots, dtype = jax.ShapeDtypeStruct, (self.batch, self.total, self.page_size), jnp.dtype(self.dtype)
        if self.layout == "lanes":
            if self.key_dim is None:
                return Lanes(shape((*slots, 2 * self.head_dim), dtype))  # pyright: ignore
            channels = (self.key_dim, self.head_dim)
            return Lanes(shape((*slots, sum(channels)), dtype), channels)  # pyright: ignore
        lanes = 128 if self.layout == "padded" else self.head_dim
        return Stacked(shape((*slots[:2], 2, self.page_size, lanes), dtype), self.head_dim)  # pyright: ignore


def _case(implementation: str, name: str, shape: Shape, targets: tuple[str, ...] = ()) -> Case:
    return cases_decode.case(
        f"{implementation}: {name}",
        shape,
        implementation,
        ("gpu",),
        kernels=(f"ragged_decode_{implementation}",),
        targets=targets,
        temp_limit=_temp_limit(shape),
    )


def _temp_limit(shape: Shape) -> float:
    """1 %, but more for the unmerged results of 64 queries per head, for a flag per slot beside 8-bit rows, and beside
    8-bit rows whose keys have fewer channels.
    """
    if shape.group > 16:
        return 0.03
    if shape.key_dim is not None:
        return 0.02
    return 0.02 if shape.with_logits and jnp.dtype(shape.dtype).itemsize == 1 else 0.01


def cases() -> list[Case]:
    """Every case; kernels for Hopper are compiled for sm_90 alone."""
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
        "runs by row": Shape(by_row=True),
        "runs by row, log_mass, window by slot, with_logits": Shape(
            by_row=True, log_mass=True, window=1000, with_logits=True
        ),
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
        "keys of 40 channels, values of 64, bfloat16": Shape(64, key_dim=40, layout="lanes"),
        "keys of 80 channels, values of 128, bfloat16": Shape(128, key_dim=80, layout="lanes"),
        "keys of 80 channels, values of 128, int8": Shape(128, key_dim=80, dtype=jnp.int8, layout="lanes"),
        "pages of 16": Shape(page_size=16),
        "window by position": Shape(window=1000, by_position=True),
        "slopes": Shape(alibi=True),
        "all options, int8": Shape(
            dtype=jnp.int8, log_mass=True, window=1000, alibi=True, soft_cap=50.0, with_logits=True, logits_scale=1.0
        ),
    }
    only_triton["runs by row, all options, int8"] = dataclasses.replace(only_triton["all options, int8"], by_row=True)
    # Rows wider than this JAX lowers are refused by Mosaic GPU and left to Triton.
    found = [_case("mosaic_gpu", name, shape, ("sm_90",)) for name, shape in both.items() if shape.head_dim <= WIDEST]
    found += [_case("triton", name, shape) for name, shape in (both | only_triton).items()]
    e4m3 = Shape(dtype=jnp.float8_e4m3fn)
    return [*found, _case("triton", "D = 128, float8_e4m3fn", e4m3, ("sm_90", "sm_100"))]

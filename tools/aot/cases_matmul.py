"""``quantised_matmul``: matrices of Llama 3.1 8B's MLP, in groups as they are rounded here and as files have them."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.quantised_matmul import quantised_matmul, tpu
from pallas_kernels.quantised_matmul.matmul_problem import Problem
from tools.aot.cases import Case
from tools.aot.targets import TPU_TARGETS

IMPLEMENTATIONS = {"tpu": "tpu", "gpu": "triton"}
HIDDEN, INNER = 4096, 14336


def _product(x: Any, weight: tuple[Any, ...], *, implementation: str, fp4: bool) -> Any:
    return quantised_matmul(x, *weight, implementation=implementation, fp4=fp4)


def _case(
    platform: str,
    name: str,
    *,
    outputs: int = 2 * INNER,
    inputs: int = HIDDEN,
    bits: int = 4,
    group: int = 128,
    scale: Any = jnp.bfloat16,
    minimum: bool = False,
    fp4: bool = False,
    rows: int = 8,
    dtype: Any = jnp.bfloat16,
) -> Case:
    values: Any = jax.ShapeDtypeStruct((inputs // 128, outputs * bits // 8, 128), jnp.uint8 if bits == 4 else jnp.int8)
    scales: Any = jax.ShapeDtypeStruct((inputs // group, outputs), scale)
    weight = (values, scales, *([scales] if minimum else []))
    x: Any = jax.ShapeDtypeStruct((rows, inputs), dtype)
    block = tpu.UNROLLED * 128 * tpu.Config.default(Problem(x, values, scales, None)).outputs * bits // 8
    return Case(
        name,
        "quantised_matmul",
        functools.partial(_product, implementation=IMPLEMENTATIONS[platform], fp4=fp4),
        (x, weight),
        sum(math.prod(x.shape) * x.dtype.itemsize for x in weight),
        (platform,),
        block_bytes={target.name: block for target in TPU_TARGETS},
        temp_limits={"v5p": 0.02} if rows == 1 else {},  # the result, as 8 rows
        kernels=("quantised_matmul", "quantised_matmul_triton"),
    )


def cases() -> list[Case]:
    """Every case."""
    file = {"group": 32, "scale": jnp.int16}
    shapes: dict[str, dict[str, Any]] = {
        "8 rows, 4,096 x 28,672, int4": {},
        "1 row, 4,096 x 28,672, int4": {"rows": 1},
        "32 rows, 4,096 x 28,672, int4": {"rows": 32},
        "8 rows, 14,336 x 4,096, int4": {"outputs": HIDDEN, "inputs": INNER},
        "8 rows, 4,096 x 6,144, int4": {"outputs": 6144},
        "8 rows, 4,096 x 28,672, Q4_0": file,
        "8 rows, 4,096 x 28,672, Q4_1": file | {"minimum": True},
        "8 rows, 14,336 x 4,096, Q4_K": {
            "group": 32, "scale": jnp.float32, "minimum": True, "outputs": HIDDEN, "inputs": INNER
        },
        "8 rows, 4,096 x 28,672, Q8_0": file | {"bits": 8},
        "8 rows, 4,096 x 28,672, Q5_K": {"bits": 8, "group": 32, "scale": jnp.float32, "minimum": True},
        "8 rows, 14,336 x 4,096, Q6_K": {
            "bits": 8, "group": 16, "scale": jnp.float32, "outputs": HIDDEN, "inputs": INNER
        },
        "8 rows, 4,096 x 28,672, MXFP4": {"group": 32, "fp4": True},
        "8 rows, 4,096 x 6,144, Q4_K and Q6_K": {
            "bits": 8, "group": 16, "scale": jnp.float32, "minimum": True, "outputs": 6144
        },
        "8 rows of float32, 4,096 x 28,672, int4": {"dtype": jnp.float32},
    }  # fmt: skip
    return [_case(platform, name, **shape) for platform in IMPLEMENTATIONS for name, shape in shapes.items()]

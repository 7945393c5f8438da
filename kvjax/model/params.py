"""Weights with logical axes, stored as matrices."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from kvjax.model.group_quantised import GroupFormat, format_of, group_quantised
from kvjax.model.quantised import NUMBERS, Weights, dequantised, quantised


def new_param(
    rngs: nnx.Rngs | None,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    dtype: DTypeLike,
    inputs: int = 1,
    transposed: bool = False,
    stacked: int = 0,
    weights: Weights | GroupFormat | None = None,
    looked_up: bool = False,
    fine: bool = False,
) -> nnx.Param:
    """A weight with its logical shape and axes; random values serve tests, and zeros those who ask for shapes alone.

    It is stored as a matrix, the first ``inputs`` axes against the others (or, without any, as a vector); if
    ``transposed``, the others against the first (``matmul.py`` says which is faster to read when). The short axes of
    heads and halves would each be padded to a tile of a TPU's memory, four times the bytes where the last axis but one
    is 2, and a product would copy the weight into another layout at every step. The first ``stacked`` axes stay apart:
    it is as many matrices.

    With ``weights`` it is quantised, and its matrices are transposed, but for one that is ``looked_up``: an embedding,
    whose rows are scaled. It is a :class:`QuantisedArray`, with ``fine`` as there, or, with a format of groups and for
    "int4" where they fit, a :class:`GroupQuantised`.
    """
    transposed = transposed if weights is None else not looked_up
    form = (shape, jnp.dtype(dtype), inputs, transposed, stacked, weights, fine)
    if rngs is None:
        values: Any = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), _shapes(*form))
    else:
        fan_in = shape[stacked] if len(shape) > 1 else 1
        drawn = (jax.random.normal(rngs.params(), shape, jnp.float32) * fan_in**-0.5).astype(dtype)
        values = _stored(drawn, *form)
    kind: dict[str, Any] = {"logical": shape, "inputs": inputs, "transposed": transposed, "stacked": stacked}
    return nnx.Param(values, axes=axes, **kind)


def _stored(
    values: jax.Array,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    inputs: int,
    transposed: bool,
    stacked: int,
    weights: Weights | GroupFormat | None,
    fine: bool,
) -> Any:
    """A weight with its logical axes, as it is stored."""
    matrix = (math.prod(shape[stacked : stacked + inputs]), -1) if inputs else (-1,)
    values = values.reshape(*shape[:stacked], *matrix)
    if transposed:
        values = values.swapaxes(-1, -2)
    if weights is None:
        return values
    groups = format_of(weights, *values.shape[-2:])
    if groups is not None:
        return group_quantised(values, groups, dtype)
    return quantised(values, dtype, fine, NUMBERS["fp8" if weights == "fp8" else "int8"])


@functools.cache
def _shapes(shape: tuple[int, ...], dtype: Any, *form: Any) -> Any:
    """Shapes of :func:`_stored`; a model has few kinds of weights, and tracing each one takes half a second."""
    return jax.eval_shape(lambda values: _stored(values, shape, dtype, *form), jax.ShapeDtypeStruct(shape, dtype))


def logical(param: nnx.Variable) -> jax.Array:
    """A weight's numbers with its logical axes, see :class:`DecoderLayer`."""
    return logical_view(param, dequantised(param.get_value()))


def logical_view(param: nnx.Variable, stored: Any) -> Any:
    """A weight as it is stored, an array of JAX or NumPy, with its logical axes; in NumPy without a copy."""
    shape, inputs = param.get_metadata("logical", stored.shape), param.get_metadata("inputs", 1)
    if not param.get_metadata("transposed", False):
        return stored.reshape(shape)
    stacked = param.get_metadata("stacked", 0)
    stack, own = shape[:stacked], shape[stacked:]
    order = range(stacked, len(shape))
    axes = (*range(stacked), *order[len(own) - inputs :], *order[: len(own) - inputs])
    return stored.reshape(stack + own[inputs:] + own[:inputs]).transpose(axes)


def gate_columns(inner: int) -> int:
    """C: at most a TPU's 128 lanes, and so few that 16 devices can divide the halves wherever 16 divides F."""
    return math.gcd(inner, math.gcd(inner // 16, 128))

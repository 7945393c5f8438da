"""Pallas TPU kernels: both passes read every key once, and only up to the diagonal.

The grid's axis over keys has a traced length, as long as the last query needs. See
:mod:`pallas_kernels.attention_mass.tpu_log_sum_exp` and :mod:`pallas_kernels.attention_mass.tpu_mass`, and for keys in
float32 :mod:`pallas_kernels.tpu.float32_scores`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import argument_checks, tuned
from pallas_kernels.attention_mass import tpu_log_sum_exp, tpu_mass, xla
from pallas_kernels.attention_mass.mass_problem import Counting, Masses, Problem
from pallas_kernels.softmax import merge_log
from pallas_kernels.tpu import tiles
from pallas_kernels.tpu.tiles import Config, Tiles

#: Keys whose scores are computed together for the mass; more would spill registers. Hyperbolic tangents take some too.
_PART, _CAPPED_PART = 256, 128


def log_sum_exp(p: Problem, *, config: Config | None = None, interpret: Any = False) -> Float[Array, "B H G N"]:
    """See :func:`pallas_kernels.attention_mass.log_sum_exp`; kept tokens are handled in XLA."""
    _check(p)
    sizes = config or tuned.config("log_sum_exp.tpu", p, Config)
    whole, rest = _whole_and_rest(p, sizes)
    found = [] if not whole else [tpu_log_sum_exp.call(p, tpu_log_sum_exp.tiling(p, sizes, whole), interpret)]
    if rest is not None:
        t = tpu_log_sum_exp.tiling(rest, config or tuned.config("log_sum_exp.tpu", rest, Config))
        found.append(tpu_log_sum_exp.call(rest, t, interpret)[..., : t.count])
    lse = jnp.concatenate(found, axis=3)
    return lse if p.kept is None else merge_log(lse, xla.kept_log_sum_exp(p))


def attention_mass(p: Problem, c: Counting, *, config: Config | None = None, interpret: Any = False) -> Masses:
    """See :func:`pallas_kernels.attention_mass.attention_mass`; kept tokens are handled in XLA."""
    _check(p)
    sizes = config or tuned.config("attention_mass.tpu", p, Config)
    whole, rest = _whole_and_rest(p, sizes)
    t = mass_tiles(p, sizes, whole or None)
    tokens = p.k.shape[2]
    new = jnp.zeros((*p.q.shape[:3], tokens), jnp.float32) if c.onto is None else c.onto.new
    new = tiles.padded(new, 3, t.keys)
    if whole:
        new = tpu_mass.call(p, c.of(slice(0, whole)), t, new, interpret)
    if rest is not None:
        t = mass_tiles(rest, config or tuned.config("attention_mass.tpu", rest, Config))
        new = tpu_mass.call(rest, c.of(slice(whole, None)), t, tiles.padded(new, 3, t.keys), interpret)
    return Masses(new[..., :tokens], None if p.kept is None else xla.kept_mass(p, c))


def mass_tiles(p: Problem, config: Config | None, count: int | None = None) -> Tiles:
    """Blocks of the first ``count`` queries, all by default, in parts of the mass kernel's own size."""
    part = _PART if p.soft_cap is None else _CAPPED_PART
    return Tiles.of(p.q, p.k, config, part, count, p.window)


def _whole_and_rest(p: Problem, config: Config | None) -> tuple[int, Problem | None]:
    """Number of queries in whole blocks, and the problem of the rest: padding all queries would copy them."""
    block, count = Tiles.of(p.q, p.k, config).queries, p.q.shape[3]
    whole = count // block * block
    if whole == count:
        return whole, None
    return whole, dataclasses.replace(p, q=p.q[:, :, :, whole:], offset=p.offset + whole)


def _check(p: Problem) -> None:
    argument_checks.compiled_in(p.soft_cap)
    if p.bias is not None:
        raise NotImplementedError("The TPU kernels have no bias by positions (ALiBi).")
    tiles.check_dtype(p.k.dtype)

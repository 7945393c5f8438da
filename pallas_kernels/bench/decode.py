"""Benchmark of ``ragged_decode``: this platform's implementations beside attention over a padded cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch, tunable
from pallas_kernels.bench import decode_inputs, timing
from pallas_kernels.bench.decode_inputs import Sizes
from pallas_kernels.bench.kernel_report import Report, Row
from pallas_kernels.ragged_decode import reference
from pallas_kernels.ragged_decode.decode_problem import Problem

#: The peer on GPUs: one attention call over keys and values padded to the longest head, (row, head) as its batch.
CUDNN = "cudnn, padded"


def run(sizes: Sizes, *, rounds: int = 10, copy_bytes: int | None = None, seconds: float = 0.05) -> Report:
    """Measure one problem.

    Args:
      rounds: how often each implementation is timed; the median is reported.
      copy_bytes: size of the copy whose bandwidth results are compared with; by default 1 GiB, on CPUs 64 MiB.
      seconds: a timed call runs as many steps as take about this long.
    """
    problem = decode_inputs.make(sizes)
    platform = dispatch.platform()
    rows: dict[str, Row] = {}
    candidates: dict[str, Callable[[], Any]] = {}
    steps: dict[str, int] = {}
    want = reference.decode(problem).out.astype(jnp.float32)
    for name, step, arguments in _candidates(problem, platform):
        try:
            error = jnp.abs(jax.jit(step)(problem.q, *arguments).astype(jnp.float32) - want).max()
            count = _steps(step, problem.q, arguments, seconds)
            call = _call(timing.loop(step, count), problem.q, arguments)
            jax.block_until_ready(call())
        except (NotImplementedError, RuntimeError, ValueError) as refusal:
            # What a machine cannot run becomes a line of the table: cuDNN may be missing or too old.
            rows[name] = Row(name, refused=str(refusal).splitlines()[0][:160])
            continue
        rows[name], candidates[name], steps[name] = Row(name, error=float(error)), call, count
    timed = timing.interleaved(candidates, steps, rounds)
    nbytes = copy_bytes or (1 << 30 if platform in ("gpu", "tpu") else 64 << 20)
    bandwidth = timing.copy_bandwidth(nbytes, rounds)
    live = sizes.live_bytes
    for name, took in timed.items():
        rows[name] = dataclasses.replace(
            rows[name],
            microseconds=1e6 * took.median,
            least=1e6 * took.least,
            most=1e6 * took.most,
            gigabytes=live / took.median / 1e9,
            bandwidth_fraction=live / took.median / bandwidth,
        )
    return Report.of(sizes, tuple(rows.values()), bandwidth)


def _candidates(p: Problem, platform: str) -> list[tuple[str, Callable[..., jax.Array], tuple[Any, ...]]]:
    operation = tunable.OPERATIONS["ragged_decode"]
    arrays = operation.arguments(p)[1:]
    names = (*operation.order.get(platform, ()), "xla")
    found: list[tuple[str, Callable[..., jax.Array], tuple[Any, ...]]] = [
        (name, operation.step(p, name), arrays) for name in names
    ]
    if platform == "gpu" and p.pages.dtype.itemsize == 2:
        found.append((CUDNN, _cudnn(p.scale), (*_padded(p), p.length)))
    return found


def _steps(step: Callable[..., jax.Array], q: jax.Array, arguments: tuple[Any, ...], seconds: float) -> int:
    return timing.steps_for(_call(timing.loop(step, 3), q, arguments), 3, seconds)


def _call(function: Callable[..., Any], q: jax.Array, arguments: tuple[Any, ...]) -> Callable[[], Any]:
    return lambda: function(q, *arguments)


def _cudnn(scale: float) -> Callable[..., jax.Array]:
    def step(q: jax.Array, k: jax.Array, v: jax.Array, length: jax.Array) -> jax.Array:
        batch, heads, group, dim = q.shape
        flat = length.reshape(-1)
        out = jax.nn.dot_product_attention(
            q.reshape(batch * heads, 1, group, dim),
            k,
            v,
            scale=scale,
            query_seq_lengths=jnp.ones_like(flat),
            key_value_seq_lengths=flat,
            implementation="cudnn",
        )
        return out.reshape(q.shape)

    return step


def _padded(p: Problem) -> tuple[jax.Array, jax.Array]:
    """Keys and values [B H, longest, 1, D]: every head padded to the longest, as a dense cache holds them."""
    batch, _, page, dim = p.pages.shape
    longest = max(p.runs)
    index = np.minimum(
        p.first_page[:, None] + np.arange(longest), p.first_page[:, None] + np.asarray(p.runs)[:, None] - 1
    )

    def pad(rows: jax.Array) -> jax.Array:
        return rows[:, index].reshape(batch * len(p.runs), longest * page, 1, dim)

    return jax.jit(lambda pages: (pad(pages.keys()), pad(pages.values())))(p.pages)

"""Timing of a step: many steps in one compiled loop, candidates interleaved, medians.

Each step's queries depend on the step before, so that none can be removed or moved, and the host waits once for many
steps: a kernel of 30 microseconds is shorter than a call from Python.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Timed(NamedTuple):
    """Seconds of one step: the median, the least and the most over the rounds."""

    median: float
    least: float
    most: float


def loop(step: Callable[..., jax.Array], steps: int) -> Callable[..., jax.Array]:
    """Compile ``steps`` steps of ``step(q, *arguments) -> out`` as one program; ``out`` has the queries' shape."""

    def run(q: jax.Array, *arguments: Any) -> jax.Array:
        def body(_: Any, q: jax.Array) -> jax.Array:
            # Without the barrier XLA would hoist work on the pages alone, such as a float32 copy, out of the loop.
            q, given = jax.lax.optimization_barrier((q, arguments))
            out = step(q, *given)
            return (q + jnp.asarray(1e-3, q.dtype) * out.reshape(q.shape)).astype(q.dtype)

        return jax.lax.fori_loop(0, steps, body, q)

    return jax.jit(run)


def interleaved(candidates: Mapping[str, Callable[[], Any]], steps: Mapping[str, int], rounds: int) -> dict[str, Timed]:
    """Time warm calls, interleaved over some rounds; ``steps`` is how many steps a call of each runs."""
    for call in candidates.values():
        jax.block_until_ready(call())
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, call in candidates.items():
            begin = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append((time.perf_counter() - begin) / steps[name])
    return {name: Timed(statistics.median(took), min(took), max(took)) for name, took in seconds.items()}


def steps_for(call: Callable[[], Any], made: int, wanted: float = 0.05, most: int = 1000) -> int:
    """Number of steps that take about ``wanted`` seconds, measured with a warm call that runs ``made``."""
    jax.block_until_ready(call())
    begin = time.perf_counter()
    jax.block_until_ready(call())
    one = max(time.perf_counter() - begin, 1e-7) / made
    return int(min(max(wanted / one, 1), most))


def copy_bandwidth(nbytes: int, rounds: int = 5, repeats: int = 8) -> float:
    """Bytes per second that the device reads and writes while copying an array this large; the best of some rounds."""
    x = jnp.zeros((max(nbytes // 4, 1024),), jnp.float32)
    copy = jax.jit(lambda x: jax.lax.fori_loop(0, repeats, lambda _, x: x + jnp.float32(1), x))
    timed = interleaved({"copy": lambda: copy(x)}, {"copy": repeats}, rounds)
    return 2 * x.nbytes / timed["copy"].least

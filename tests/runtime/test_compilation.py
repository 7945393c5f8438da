"""The clock that tells compilation apart."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax.runtime.compilation import compile_clock


def test_clocks_inside_one_another_all_count():
    with compile_clock() as outer:
        with compile_clock() as idle:
            pass
        with compile_clock() as inner:
            jax.jit(lambda x: x * 3 + 1)(jnp.ones(7))
        with compile_clock() as later:
            jax.jit(lambda x: x * 5 + 1)(jnp.ones(7))
    assert idle.programs == 0 and idle.seconds == 0
    assert inner.programs >= 1 and later.programs >= 1
    assert outer.programs == inner.programs + later.programs
    assert outer.seconds >= inner.seconds > 0
    jax.jit(lambda x: x * 7 + 1)(jnp.ones(7))
    assert outer.programs == inner.programs + later.programs  # closed ones do not

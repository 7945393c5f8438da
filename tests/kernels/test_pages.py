"""Rows laid out as pages, a part of them at a time where they are widened."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import pages
from pallas_kernels.pages import Lanes, Stacked


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize(("batch", "total"), [(1, 1), (1, 4), (3, 4), (2, 7), (3, 13)])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_rows_in_parts(monkeypatch, head_dim, batch, total, x64):
    """Fewer pages than a part, whole parts, and a last part that begins earlier."""
    monkeypatch.setattr(pages, "_PART", 4 * 8)
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((batch, total, 8, head_dim)).astype(np.float32) for _ in range(2))
    with jax.enable_x64(x64):
        empty = Lanes.zeros(batch, total, 8, 64, jnp.bfloat16)
        if head_dim == 80:
            empty = Stacked.zeros(batch, total, 8, 80, jnp.bfloat16, 128)
        laid = jax.jit(lambda k, v: empty.of_rows(k, v))(k, v)
    assert laid.kv.dtype == jnp.bfloat16 and laid.kv.shape == empty.kv.shape
    for got, want in ((laid.keys(), k), (laid.values(), v)):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want.astype(jnp.bfloat16)))
    if head_dim == 80:
        assert not np.asarray(laid.kv[..., 80:]).any()


def test_no_more_than_a_part_is_widened_at_once():
    """What a TPU's compiler transposes to widen it is a part, not the whole of the rows."""
    rows = jax.ShapeDtypeStruct((2, 1024, 16, 64), jnp.bfloat16)
    jaxpr = str(jax.make_jaxpr(lambda k, v: Lanes.zeros(2, 1024, 16, 64, jnp.bfloat16).of_rows(k, v))(rows, rows))
    assert "bf16[1,512,16,128] = concatenate" in jaxpr and "bf16[2,1024,16,128] = concatenate" not in jaxpr

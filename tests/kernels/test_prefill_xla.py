"""The XLA form of prefill, and the operation's checks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.prefill_base import Case, PrefillBase, build

from pallas_kernels.prefill import prefill, reference, xla


class TestXla(PrefillBase):
    def run(self, problem):
        return jax.jit(xla.prefill)(problem)

    def test_rows_that_a_batch_shares(self, monkeypatch):
        monkeypatch.setenv("KVJAX_NATIVE", "0")  # shared tokens are not the form's own
        super().test_rows_that_a_batch_shares()


def _call(problem, **more):
    keywords = dict(offset=problem.offset, scale=problem.scale, kept=problem.kept, **more)
    return prefill(problem.q, problem.k, problem.v, **keywords)


def test_a_bias_by_place_counts_for_keys_and_kept_rows():
    problem = build(Case((30,), queries=16, keys=64, kept=(0, 20), group=1, heads=2))
    place = jnp.broadcast_to(jnp.arange(-128, 0), problem.kept.k.shape[:3])
    slope = jnp.asarray([0.02, 0.01])[:, None, None]

    def alibi(keys):
        return slope * (keys[:, :, None] - (30 + jnp.arange(16))[:, None])

    problem = dataclasses.replace(problem, kept=dataclasses.replace(problem.kept, position=place), bias=alibi)
    got, want = _call(problem, bias=alibi), reference.prefill(problem)
    np.testing.assert_allclose(got.out, want[0], atol=1e-5)
    np.testing.assert_allclose(got.lse, want[1], atol=1e-5)
    for name in ("tpu", "triton"):
        with pytest.raises(NotImplementedError, match="ALiBi"):
            _call(problem, bias=alibi, implementation=name)


def test_arguments_that_do_not_belong_together_are_refused():
    problem = build(Case((30,), queries=16, keys=64))
    with pytest.raises(ValueError, match=r"v is .*; give a float array of shape \[1, 2, 64, 64\]"):
        _call(dataclasses.replace(problem, v=problem.v[:, :1]))
    with pytest.raises(ValueError, match="block 48 does not divide 64 keys"):
        _call(problem, block=48)

"""The XLA form of attention mass, the operation's checks, and softmax in parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.mass_base import Case, MassBase, build

from pallas_kernels.attention_mass import attention_mass, log_sum_exp, reference, xla
from pallas_kernels.softmax import NEG, log_of, merge, merge_log


class TestXla(MassBase):
    def log_sum_exp(self, problem):
        return xla.log_sum_exp(problem)

    def attention_mass(self, problem, counting):
        return xla.attention_mass(problem, counting)


def _keywords(problem, **more):
    return dict(offset=problem.offset, scale=problem.scale, kept=problem.kept, **more)


def test_mass_adds_up_to_the_queries_and_biases_count():
    """Every query has one unit of attention to give, whatever its scores."""
    problem, _ = build(Case((0, 100), queries=40))

    def bias(place):
        return jnp.where(place == 3, 2.0, 0.0)[:, :, None]

    for given in (None, bias):
        lse = log_sum_exp(problem.q, problem.k, bias=given, **_keywords(problem))
        mass = attention_mass(problem.q, problem.k, lse, bias=given, **_keywords(problem)).new
        np.testing.assert_allclose(mass.sum(axis=-1), 40, rtol=1e-5)
    plain = reference.log_sum_exp(problem)
    assert (np.asarray(lse)[..., 5:] > np.asarray(plain)[..., 5:]).all()


def test_a_platform_takes_the_form_that_fits_and_a_named_one_fails_loudly():
    problem, counting = build(Case((0,), queries=16))
    got = log_sum_exp(problem.q, problem.k, **_keywords(problem))
    np.testing.assert_allclose(got, counting.lse, atol=3e-5)
    with pytest.raises(NotImplementedError, match="ALiBi"):
        log_sum_exp(problem.q, problem.k, bias=lambda place: place, implementation="tpu", **_keywords(problem))
    with pytest.raises(ValueError, match="no implementation 'gpu'; there are native, tpu, triton, xla"):
        attention_mass(problem.q, problem.k, got, implementation="gpu", **_keywords(problem))


def test_arguments_that_do_not_belong_together_are_refused():
    problem, counting = build(Case((0, 3), queries=16, kept=(3,), onto=True))
    q, k, lse = problem.q, problem.k, counting.lse
    with pytest.raises(ValueError, match=r"k is .*; give a float array of shape \[2, 2, any, 64\]"):
        log_sum_exp(q, k[:, :1], **_keywords(problem))
    with pytest.raises(ValueError, match="block 96 does not divide 256 keys"):
        log_sum_exp(q, k, block=96, **_keywords(problem))
    with pytest.raises(ValueError, match="lse is"):
        attention_mass(q, k, lse[..., :3], **_keywords(problem))
    with pytest.raises(ValueError, match="given together"):
        attention_mass(q, k, lse, onto=counting.onto, offset=problem.offset, scale=1.0)


def test_softmax_in_parts_is_softmax():
    rng = np.random.default_rng(0)
    scores, values = rng.normal(size=(3, 40)) * 20, rng.normal(size=(40, 5))

    def part(cut):
        s = jnp.asarray(scores[:, cut], jnp.float32)
        if not s.size:
            return jnp.ones((3, 5)), jnp.full((3,), NEG)
        return jax.nn.softmax(s) @ values[cut], jax.nn.logsumexp(s, axis=-1)

    want = part(slice(0, 40))
    for at in (0, 1, 25, 40):
        got = merge(*part(slice(0, at)), *part(slice(at, 40)))
        np.testing.assert_allclose(got[0], want[0], atol=1e-5)
        np.testing.assert_allclose(got[1], want[1], rtol=1e-6)
    out, lse = merge(*part(slice(0, 0)), *part(slice(0, 0)))
    assert not np.asarray(out).any() and (np.asarray(lse) == np.float32(NEG)).all()
    assert merge_log(jnp.float32(NEG), jnp.float32(-1e30)) == np.float32(-1e30)
    assert log_of(jnp.float32(NEG), jnp.float32(0)) == np.float32(NEG)

"""What every implementation of ``log_sum_exp`` and ``attention_mass`` must do, against the float32 reference."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention_mass import Masses, reference
from pallas_kernels.attention_mass.mass_problem import Counting, Problem
from pallas_kernels.kept_tokens import KeptTokens


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem by its sizes; ``offset`` of each row's query 0, so there are as many rows."""

    offset: tuple[int, ...]
    queries: int = 32
    keys: int = 256
    heads: int = 2
    group: int = 2
    head_dim: int = 64
    dtype: Any = jnp.float32
    kept: tuple[int, ...] = ()
    weighted: bool = True
    onto: bool = False
    block: int = 64
    window: int | None = None
    soft_cap: float | None = None


def build(case: Case, seed: int = 0) -> tuple[Problem, Counting]:
    """The case with random rows. What no query sees is huge; queries at negative places do not count."""
    rng = np.random.default_rng(seed)
    batch, count = len(case.offset), case.queries

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    q = normal(batch, case.heads, case.group, count, case.head_dim)
    k = normal(batch, case.heads, case.keys, case.head_dim)
    offset = np.asarray(case.offset, np.int32)
    k[np.broadcast_to((np.arange(case.keys) >= offset[:, None] + count)[:, None], k.shape[:3])] = 3e4
    dtype = jnp.dtype(case.dtype)
    kept = _kept(case, normal, rng) if case.kept else None
    scale = jnp.asarray(case.head_dim**-0.5 * rng.uniform(0.5, 2, batch), jnp.float32)
    q, k = (jnp.asarray(x).astype(dtype) for x in (q, k))
    bounds = case.window, case.soft_cap
    problem = Problem(q, k, jnp.asarray(offset), scale, kept, None, case.block, *bounds)
    weight = rng.uniform(0, 2, (batch, count)) * (rng.random((batch, count)) < 0.8)
    weight = np.where(offset[:, None] + np.arange(count) >= 0, weight, 0).astype(np.float32)
    onto = None
    if case.onto:
        slots = None if kept is None else jnp.asarray(normal(*q.shape[:3], kept.k.shape[2]))
        onto = Masses(jnp.asarray(normal(*q.shape[:3], case.keys)), slots)
    lse = jnp.asarray(reference.log_sum_exp(problem))
    return problem, Counting(lse, jnp.asarray(weight) if case.weighted else None, onto)


def _kept(case: Case, normal: Any, rng: np.random.Generator) -> KeptTokens:
    shape = (len(case.offset), case.heads, 2 * case.block, case.head_dim)
    length = np.resize(case.kept, shape[:2]).astype(np.int32)
    k, v = (jnp.asarray(normal(*shape)).astype(case.dtype) for _ in range(2))
    return KeptTokens(
        k, v, jnp.asarray(length), jnp.asarray(rng.uniform(0, 4, shape[:2]), jnp.float32), None, case.block
    )


class MassBase:
    """Inherit and give both functions."""

    tolerance: ClassVar = {"float32": 3e-5, "bfloat16": 2e-2}

    def log_sum_exp(self, problem: Problem) -> jax.Array:
        raise NotImplementedError

    def attention_mass(self, problem: Problem, counting: Counting) -> Masses:
        raise NotImplementedError

    def check(self, case: Case) -> None:
        problem, counting = build(case)
        tolerance = self.tolerance[jnp.dtype(case.dtype).name]
        both = jax.jit(lambda p, c: (self.log_sum_exp(p), self.attention_mass(p, c)))
        got, found = both(problem, counting)
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(np.asarray(got), np.asarray(counting.lse), atol=tolerance, rtol=tolerance)
        for ours, theirs in zip(found, reference.attention_mass(problem, counting), strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert ours.dtype == jnp.float32 and np.isfinite(np.asarray(ours)).all()
                np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), atol=tolerance, rtol=tolerance)

    def test_a_window_at_every_place(self):
        """Rows shorter than the window, of one token, and with a window that ends around the edges of blocks."""
        self.check(Case((-31, -30, -1, 0, 30, 31, 32, 33, 95, 96, 97, 127, 224)))

    def test_columns_of_a_chunk(self):
        self.check(Case((0, 1, 127, 128), queries=256, keys=512, onto=True))

    @pytest.mark.parametrize(
        ("group", "head_dim", "dtype"),
        [(1, 80, jnp.float32), (3, 128, jnp.bfloat16), (16, 256, jnp.bfloat16)],
        ids=["1-80", "3-128", "16-256"],
    )
    def test_sizes(self, group, head_dim, dtype):
        self.check(Case((10, 200), 20, 320, group=group, head_dim=head_dim, dtype=dtype, weighted=group != 3))

    def test_kept_rows_with_their_log_mass(self):
        """Kept rows may be none, and a row whose queries are none still adds nothing."""
        self.check(Case((64, -32, 3), kept=(0, 1, 63, 64, 65, 128), onto=True))

    @pytest.mark.parametrize(
        ("window", "soft_cap"),
        [
            (40, 0.7),
            (150, None),
            pytest.param(1, None, marks=pytest.mark.slow),
            pytest.param(None, 0.7, marks=pytest.mark.slow),
        ],
    )
    def test_windows_and_soft_caps(self, window, soft_cap):
        """Of several blocks of queries, with keys that queries see whole, in part, or not at all."""
        bounds = {"window": window, "soft_cap": soft_cap}
        self.check(Case((-30, 0, 1, 127), queries=160, keys=384, onto=True, **bounds))
        self.check(Case((5, 200), group=3, head_dim=128, dtype=jnp.bfloat16, kept=(0, 64, 128), **bounds))

    def test_chunks_add_up_and_their_place_does_not_recompile(self):
        """The column sums of two chunks of queries, one onto the other, are those of all."""
        problem, counting = build(Case((0, 40), queries=128))
        total = Masses(jnp.zeros((*problem.q.shape[:3], problem.k.shape[2])), None)
        traced = []

        @jax.jit
        def run(problem: Problem, counting: Counting) -> Masses:
            traced.append(None)
            return self.attention_mass(problem, counting)

        assert counting.weight is not None
        for first in (0, 64):
            cut = slice(first, first + 64)
            chunk = dataclasses.replace(problem, q=problem.q[:, :, :, cut], offset=problem.offset + first)
            total = run(chunk, Counting(counting.lse[..., cut], counting.weight[:, cut], total))
        assert len(traced) == 1
        want, _ = reference.attention_mass(problem, counting)
        np.testing.assert_allclose(np.asarray(total.new), want, atol=3e-5)

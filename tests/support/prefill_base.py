"""What every implementation of ``prefill`` must do, against the float32 reference; each inherits it."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import mass_base

from pallas_kernels.prefill import Prefilled, reference
from pallas_kernels.prefill.prefill_problem import Problem
from pallas_kernels.prefill.shared import with_shared


@dataclasses.dataclass(frozen=True)
class Case:
    """A chunk by its sizes: ``offset`` of each row, so there are as many rows, or of all."""

    offset: tuple[int, ...] | int
    length: tuple[int, ...] | None = None
    queries: int = 64
    keys: int = 320
    heads: int = 2
    group: int = 2
    head_dim: int = 64
    dtype: Any = jnp.float32
    kept: tuple[int, ...] = ()
    block: int = 64
    window: int | None = None
    soft_cap: float | None = None

    @property
    def batch(self) -> int:
        return 1 if isinstance(self.offset, int) else len(self.offset)


def build(case: Case, seed: int = 0) -> Problem:
    """The case with random rows. What no query sees is huge."""
    rows = mass_base.Case(
        (case.offset,) if isinstance(case.offset, int) else case.offset,
        case.queries,
        case.keys,
        case.heads,
        case.group,
        case.head_dim,
        case.dtype,
        case.kept,
        block=case.block,
    )
    same, _ = mass_base.build(rows, seed)
    v = np.random.default_rng(seed + 1).standard_normal(same.k.shape).astype(np.float32)
    huge = np.asarray(same.k[..., 0].astype(jnp.float32)) > 1e4
    v[huge] = -3e4
    return Problem(
        q=same.q,
        k=same.k,
        v=jnp.asarray(v).astype(case.dtype),
        offset=jnp.asarray(case.offset, jnp.int32),
        length=None if case.length is None else jnp.asarray(case.length, jnp.int32),
        kept=same.kept,
        scale=case.head_dim**-0.5,
        bias=None,
        block=case.block,
        window=case.window,
        soft_cap=case.soft_cap,
    )


class PrefillBase:
    """Inherit and give ``run``."""

    tolerance: ClassVar = {"float32": 3e-5, "bfloat16": 2e-2}

    def run(self, problem: Problem) -> Prefilled:
        raise NotImplementedError

    def check(self, case: Case) -> None:
        problem = build(case)
        got, want = self.run(problem), reference.prefill(problem)
        assert got.out.dtype == problem.q.dtype and got.lse.dtype == jnp.float32
        tolerance = self.tolerance[jnp.dtype(case.dtype).name]
        length = np.full(case.batch, case.queries) if case.length is None else np.asarray(case.length)
        asked = np.broadcast_to(np.arange(case.queries) < length[:, None, None, None], want[1].shape)
        for ours, theirs in zip(got, want, strict=True):
            ours = np.asarray(ours, np.float32)
            assert np.isfinite(ours).all()
            np.testing.assert_allclose(ours[asked], theirs[asked], atol=tolerance, rtol=tolerance)

    def test_a_chunk_at_every_place(self):
        """Places around the edges of blocks of 64 and 128 keys, with rows that end anywhere within the chunk."""
        offset = (0, 1, 31, 62, 63, 64, 65, 127, 128, 129, 200, 256)
        self.check(Case(offset, length=(0, 1, 15, 16, 17, 63, 64, 31, 32, 33, 2, 64)))

    @pytest.mark.parametrize(("offset", "queries"), [(0, 320), (319, 1), (20, 300)])
    def test_one_place_for_all_rows(self, offset, queries):
        self.check(Case(offset, queries=queries))

    @pytest.mark.parametrize(
        ("group", "head_dim", "dtype"),
        [(1, 80, jnp.float32), (3, 128, jnp.bfloat16), (16, 256, jnp.bfloat16)],
        ids=["1-80", "3-128", "16-256"],
    )
    def test_sizes(self, group, head_dim, dtype):
        self.check(Case((10, 200), queries=20, group=group, head_dim=head_dim, dtype=dtype))

    def test_queries_at_negative_places_see_no_key(self):
        """Chunks that begin before the keys: all of it, all but one, up to the middle and the edge of a block."""
        self.check(Case((-500, -128, -64, -63, -33, -32, -1, 0), queries=160, keys=192))
        self.check(Case((-70, -64, -5, -1), kept=(0, 3), length=(64, 64, 20, 64)))
        self.check(Case(-20, dtype=jnp.bfloat16, head_dim=128))

    def test_kept_rows_with_their_log_mass(self):
        """Heads that kept nothing are beside heads that kept as much as there is room for."""
        self.check(Case((64, 0, 3), kept=(0, 0, 0, 1, 65, 128)))

    @pytest.mark.parametrize("window", [1, 20, 64, 65, 130])
    def test_a_window_at_every_place(self, window):
        """Windows shorter and longer than blocks of queries and keys, of rows that end anywhere within the chunk."""
        where = (0, 1, 63, 64, 127, 200, 256)
        self.check(Case(where, length=(1, 15, 64, 63, 31, 2, 64), group=1, window=window))

    def test_windows_of_many_blocks(self):
        """Several blocks of queries, of each of which some see a block of keys whole, in part, or not at all."""
        for window, dtype in ((90, jnp.float32), (300, jnp.bfloat16)):
            self.check(Case((0, 40, 131), queries=256, keys=640, head_dim=128, dtype=dtype, window=window))

    def test_a_window_over_kept_rows_and_negative_places(self):
        """The last kept row is the token before the first key; some queries still see it, later ones do not."""
        self.check(Case((64, 0, 3), kept=(0, 1, 65, 128), window=70, soft_cap=2.0))
        self.check(Case((-70, -5, -1), length=(64, 20, 64), window=40))

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_a_soft_cap(self, dtype):
        self.check(Case((10, 200), soft_cap=0.5, dtype=dtype))

    def test_rows_that_a_batch_shares(self):
        """As if every row had kept them, beside what it kept itself; a head shares none."""
        whole = build(Case((64, 0, 3), kept=(70, 9) * 3))
        assert whole.kept is not None
        one = jax.tree.map(lambda x: x[:1], dataclasses.replace(whole.kept, log_mass=None))
        one = dataclasses.replace(one, length=jnp.asarray([[65, 0]], jnp.int32))
        everywhere = jax.tree.map(lambda x: jnp.repeat(x, 3, axis=0), one)
        got = with_shared(whole, self.run(whole), one, None)
        wanted = [reference.prefill(dataclasses.replace(whole, kept=kept)) for kept in (whole.kept, everywhere, None)]
        (out, lse), (other, mass), (own, own_mass) = ([np.asarray(x, np.float64) for x in each] for each in wanted)
        # The second and third differ by the shared tokens alone.
        alone = mass + np.log(-np.expm1(np.minimum(own_mass - mass, -1e-12)))
        shared = (other - own * np.exp(own_mass - mass)[..., None]) * np.exp(mass - alone)[..., None]
        total = np.logaddexp(lse, alone)
        want = out * np.exp(lse - total)[..., None] + shared * np.exp(alone - total)[..., None]
        np.testing.assert_allclose(np.asarray(got.lse)[:, 0], total[:, 0], atol=1e-4)
        np.testing.assert_allclose(np.asarray(got.out)[:, 0], want[:, 0], atol=1e-4)
        np.testing.assert_allclose(np.asarray(got.out)[:, 1], out[:, 1], atol=1e-4)  # the head that shares none

    def test_a_chunks_place_does_not_recompile(self):
        problem, traced = build(Case((150, 190))), []

        @jax.jit
        def run(problem: Problem) -> Prefilled:
            traced.append(None)
            return self.run(problem)

        for by in (-150, -37, 0):
            moved = dataclasses.replace(problem, offset=problem.offset + by)
            got, want = run(moved), reference.prefill(moved)
            np.testing.assert_allclose(np.asarray(got.out), want[0], atol=3e-5)
        assert len(traced) == 1

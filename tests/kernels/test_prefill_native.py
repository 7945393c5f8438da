"""The C++ prefill for CPUs, with the instructions of newer and of older processors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.native import chunk_sizes, needs_compiler, needs_native, suffix
from support.prefill_base import Case, PrefillBase, build

from pallas_kernels.prefill import native, prefill, reference, xla
from pallas_kernels.softmax import NEG


def _equal(got, want, queries=slice(None)):
    np.testing.assert_array_equal(got.out, want.out[..., queries, :])
    np.testing.assert_array_equal(got.lse, want.lse[..., queries])


class _Native(PrefillBase):
    instructions = "here"

    def run(self, problem):
        return jax.jit(lambda p: native.prefill(p, suffix=suffix("prefill", self.instructions)))(problem)

    @pytest.mark.parametrize("window", [None, 70])
    def test_a_query_is_what_it_is_alone(self, window):
        """Whatever rows, queries and keys are beside it, and wherever a chunk begins."""
        whole = build(Case((300, 0, 77), queries=90, keys=640, group=3, kept=(0, 5, 65, 128, 1, 64), window=window))
        want = self.run(whole)
        for b in range(3):
            row = slice(b, b + 1)
            kept = jax.tree.map(lambda x, row=row: x[row], whole.kept)
            alone = {"q": whole.q[row], "k": whole.k[row], "v": whole.v[row], "offset": whole.offset[row], "kept": kept}
            one = dataclasses.replace(whole, **alone)
            got = self.run(one)
            np.testing.assert_array_equal(got.out[0], want.out[b])
            np.testing.assert_array_equal(got.lse[0], want.lse[b])
            for some in (slice(0, 1), slice(41, 44), slice(50, 90)):
                part = dataclasses.replace(one, q=one.q[..., some, :], offset=one.offset + some.start)
                _equal(self.run(part), got, some)
            room = {name: jnp.pad(getattr(one, name), ((0, 0), (0, 0), (0, 64), (0, 0))) for name in ("k", "v")}
            _equal(self.run(dataclasses.replace(one, **room)), got)

    def test_blocks_that_no_query_sees_are_not_read(self):
        whole = build(Case((300,), queries=20, keys=640, window=70, kept=(0, 128)))
        want = self.run(whole)
        hidden = jnp.asarray([*range(128), *range(384, 640)])  # the window begins at 231, in the block from 128 on
        given = {name: getattr(whole, name).at[:, :, hidden].set(jnp.nan) for name in ("k", "v")}
        _equal(self.run(dataclasses.replace(whole, **given)), want)
        nothing = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), (whole.kept.k, whole.kept.v))
        kept = dataclasses.replace(whole.kept, k=nothing[0], v=nothing[1])
        _equal(self.run(dataclasses.replace(whole, kept=kept)), want)

    def test_queries_of_padding_are_empty(self):
        whole = build(Case((100, 100), length=(0, 45), queries=64))
        got = self.run(whole)
        beyond = np.asarray(got.lse) == np.float32(NEG)
        np.testing.assert_array_equal(beyond.all((1, 2)), [[True] * 64, [False] * 45 + [True] * 19])
        assert not np.asarray(got.out)[beyond].any()
        want = self.run(dataclasses.replace(whole, length=None))
        np.testing.assert_array_equal(got.out[1, ..., :45, :], want.out[1, ..., :45, :])

    def test_lengths_beyond_what_is_there_end_with_it(self):
        whole = build(Case((300,), queries=20, keys=320, kept=(128, 64)))
        want = self.run(whole)
        more = dataclasses.replace(whole, length=jnp.asarray([500]))
        more = dataclasses.replace(more, kept=dataclasses.replace(whole.kept, length=jnp.asarray([[900, 64]])))
        _equal(self.run(more), want)

    def test_what_is_not_finite_stays_in_its_query(self):
        whole = build(Case((100,), queries=30, keys=192))
        clean = self.run(whole)
        for bad in (jnp.nan, jnp.inf):
            got = self.run(dataclasses.replace(whole, q=whole.q.at[0, 1, 0, 7, 3].set(bad)))
            assert not np.isfinite(got.out[0, 1, 0, 7]).any()
            others = np.ones(whole.q.shape[:4], bool)
            others[0, 1, 0, 7] = False
            np.testing.assert_array_equal(np.asarray(got.out)[others], np.asarray(clean.out)[others])

    @pytest.mark.parametrize("window", [None, 150])
    def test_kept_rows_of_several_blocks(self, window):
        self.check(Case((64, 0, 3), kept=(129, 256, 0, 300, 128, 200), block=160, window=window))

    @pytest.mark.parametrize("window", [None, 60])
    def test_a_kept_row_whose_mass_is_nothing(self, window):
        """Of the other head, and of what a window hides, nothing is seen for it."""
        whole = build(Case((-8,), queries=8, keys=64, kept=(1, 40), window=window))
        kept = dataclasses.replace(whole.kept, log_mass=jnp.asarray([[-jnp.inf, 0.0]]))
        got = self.run(dataclasses.replace(whole, kept=kept))
        assert not np.asarray(got.out[0, 0]).any() and (np.asarray(got.lse[0, 0]) == np.float32(NEG)).all()
        want = self.run(dataclasses.replace(whole, kept=dataclasses.replace(kept, log_mass=jnp.zeros((1, 2)))))
        np.testing.assert_array_equal(got.out[0, 1], want.out[0, 1])

    @pytest.mark.parametrize("window", [None, 60])
    def test_queries_all_of_whose_scores_are_minus_infinity_see_nothing(self, window):
        whole = build(Case((3,), queries=8, keys=64, kept=(1, 40), window=window))
        kept = dataclasses.replace(whole.kept, k=jnp.full_like(whole.kept.k, 1e20))
        whole = dataclasses.replace(whole, q=jnp.full_like(whole.q, -1e20), k=jnp.full_like(whole.k, 1e20), kept=kept)
        got = self.run(whole)
        assert not np.asarray(got.out).any() and (np.asarray(got.lse) == np.float32(NEG)).all()

    def test_scores_far_apart(self):
        whole = build(Case((200,), queries=64))
        whole = dataclasses.replace(whole, q=whole.q * 1000)
        got, want = self.run(whole), reference.prefill(whole)
        np.testing.assert_allclose(got.out, want[0], atol=2e-3, rtol=2e-3)
        np.testing.assert_allclose(got.lse, want[1], rtol=1e-5)

    @pytest.mark.parametrize("cap", [0.01, 30.0])
    def test_soft_caps_of_scores_near_nothing_and_far_beyond(self, cap):
        whole = build(Case((200,), queries=64, soft_cap=cap))
        q = whole.q * jnp.logspace(-6, 3, 64)[:, None]
        whole = dataclasses.replace(whole, q=q)
        got, want = self.run(whole), reference.prefill(whole)
        np.testing.assert_allclose(got.out, want[0], atol=1e-4)
        np.testing.assert_allclose(got.lse, want[1], atol=1e-4)


@needs_compiler
class TestNative(_Native):
    @needs_native
    def test_it_is_what_cpus_take_unless_it_is_switched_off(self, monkeypatch):
        whole = build(Case((100,), kept=(3, 5)))

        def text(**options):
            given = (whole.q, whole.k, whole.v, whole.offset, whole.kept)
            run = jax.jit(
                lambda q, k, v, offset, kept: prefill(q, k, v, offset=offset, kept=kept, scale=0.1, **options)
            )
            return run.lower(*given).as_text()

        assert "@kvjax_prefill(" in text() and "custom_call" not in text(implementation="xla")
        monkeypatch.setenv("KVJAX_NATIVE", "0")
        assert "custom_call" not in text()
        with pytest.raises(NotImplementedError, match="no compiled prefill"):
            text(implementation="native")

    @pytest.mark.parametrize("change", [{"head_dim": 24}, {"dtype": jnp.float16}])
    def test_what_it_does_not_take_is_left_to_xla(self, change):
        whole = build(Case((30,), queries=16, keys=64, **change))
        with pytest.raises(NotImplementedError):
            native.prefill(whole)
        got = prefill(whole.q, whole.k, whole.v, offset=whole.offset, scale=whole.scale)
        np.testing.assert_allclose(np.float32(got.out), np.float32(xla.prefill(whole).out), atol=1e-3)

    def test_biases_and_traced_numbers_are_left_to_xla(self):
        whole = build(Case((30,), queries=16, keys=64))
        given = whole.q, whole.k, whole.v
        with pytest.raises(NotImplementedError, match="ALiBi"):
            native.prefill(dataclasses.replace(whole, bias=lambda place: jnp.zeros(())))
        capped = jax.jit(lambda cap: prefill(*given, offset=whole.offset, scale=0.1, soft_cap=cap).out)
        want = prefill(*given, offset=whole.offset, scale=0.1, soft_cap=3.0).out
        np.testing.assert_allclose(capped(jnp.float32(3.0)), want, atol=1e-5)

    def test_kept_rows_of_another_type(self):
        whole = build(Case((100,), kept=(3, 5), dtype=jnp.bfloat16))
        wide = dataclasses.replace(whole.kept, k=whole.kept.k.astype("float32"), v=whole.kept.v.astype("float32"))
        got, want = self.run(dataclasses.replace(whole, kept=wide)), self.run(whole)
        np.testing.assert_allclose(np.float32(got.out), np.float32(want.out), atol=1e-2)

    def test_no_keys_are_copied(self):
        whole = build(Case(3000, queries=64, keys=4096, heads=4))
        run = jax.jit(native.prefill)
        temporary = run.lower(whole).compile().memory_analysis().temp_size_in_bytes
        assert temporary < 1e6 < whole.k.nbytes


@needs_compiler
class TestNativeOfOlderProcessors(_Native):
    instructions = "avx2"


@needs_compiler
@pytest.mark.parametrize("form", [TestNative, TestNativeOfOlderProcessors])
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_any_problem(form, data):
    case = Case(**data.draw(chunk_sizes()))
    problem = build(case, seed=data.draw(st.integers(0, 99)))
    tolerance = form.tolerance[jnp.dtype(case.dtype).name]
    for got, want in zip(form().run(problem), reference.prefill(problem), strict=True):
        np.testing.assert_allclose(np.float32(got), want, atol=tolerance, rtol=tolerance)

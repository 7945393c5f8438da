"""The C++ attention mass for CPUs, with the instructions of newer and of older processors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.mass_base import Case, MassBase, build
from support.native import chunk_sizes, needs_compiler, needs_native, suffix

from pallas_kernels.attention_mass import Masses, attention_mass, log_sum_exp, native, reference, xla
from pallas_kernels.attention_mass.mass_problem import Counting
from pallas_kernels.softmax import NEG


class _Native(MassBase):
    instructions = "here"

    def log_sum_exp(self, problem):
        return native.log_sum_exp(problem, suffix=suffix("prefill", self.instructions))

    def attention_mass(self, problem, counting):
        return native.attention_mass(problem, counting, suffix=suffix("attention_mass", self.instructions))

    def both(self, problem, counting):
        return jax.jit(lambda p, c: (self.log_sum_exp(p), self.attention_mass(p, c)))(problem, counting)

    @pytest.mark.parametrize("window", [None, 70])
    def test_a_row_is_what_it_is_alone_and_a_key_whatever_room_there_is(self, window):
        sizes = {"queries": 90, "keys": 640, "group": 3, "kept": (0, 5, 65, 128, 1, 64)}
        problem, counting = build(Case((300, 0, 77), **sizes, onto=True, window=window))
        lse, mass = self.both(problem, counting)
        for b in range(3):
            row = slice(b, b + 1)
            alone = {name: getattr(problem, name)[row] for name in ("q", "k", "offset", "scale")}
            alone["kept"] = jax.tree.map(lambda x, row=row: x[row], problem.kept)
            one, own = dataclasses.replace(problem, **alone), jax.tree.map(lambda x, row=row: x[row], counting)
            got, found = self.both(one, own)
            np.testing.assert_array_equal(got[0], lse[b])
            for ours, theirs in zip(found, mass, strict=True):
                np.testing.assert_array_equal(ours[0], theirs[b])
            room = ((0, 0), (0, 0), (0, 64), (0, 0))
            onto = own.onto._replace(new=jnp.pad(own.onto.new, ((0, 0), (0, 0), (0, 0), (0, 64))))
            wide = dataclasses.replace(one, k=jnp.pad(one.k, room)), dataclasses.replace(own, onto=onto)
            got, longer = self.both(*wide)
            np.testing.assert_array_equal(got[0], lse[b])
            np.testing.assert_array_equal(longer.new[..., :640], found.new)
            assert not np.asarray(longer.new[..., 640:]).any()

    def test_blocks_that_no_query_sees_are_not_read(self):
        problem, counting = build(Case((300,), queries=20, keys=640, window=70, kept=(0, 128)))
        want = self.both(problem, counting)
        hidden = jnp.asarray([*range(128), *range(384, 640)])  # the window begins at 231, in the block from 128 on
        kept = dataclasses.replace(problem.kept, k=jnp.full_like(problem.kept.k, jnp.nan))
        unread = dataclasses.replace(problem, k=problem.k.at[:, :, hidden].set(jnp.nan), kept=kept)
        jax.tree.map(np.testing.assert_array_equal, self.both(unread, counting), want)

    def test_queries_that_do_not_count_add_nothing_whatever_they_are(self):
        problem, counting = build(Case((100,), queries=30, keys=192))
        without = dataclasses.replace(counting, weight=counting.weight.at[0, 7].set(0.0))
        want = self.attention_mass(problem, without).new
        odd = dataclasses.replace(problem, q=problem.q.at[0, :, :, 7].set(jnp.nan))
        np.testing.assert_array_equal(self.attention_mass(odd, without).new, want)
        unknown = dataclasses.replace(without, lse=without.lse.at[..., 7].set(jnp.nan))
        np.testing.assert_array_equal(self.attention_mass(odd, unknown).new, want)

    def test_what_is_not_finite_is_seen(self):
        problem, counting = build(Case((100,), queries=30, keys=192, weighted=False))
        odd = dataclasses.replace(problem, q=problem.q.at[0, 1, 0, 7].set(jnp.nan))
        got = np.asarray(self.attention_mass(odd, counting).new)
        assert np.isnan(got[0, 1, 0, :108]).all() and np.isfinite(got[0, 1, 0, 108:]).all()
        assert np.isfinite(got[0, 0]).all() and np.isfinite(got[0, 1, 1]).all()

    def test_a_query_that_sees_nothing_adds_nothing(self):
        """Its normaliser is the number that stands for minus infinity, as its masked scores are."""
        problem, counting = build(Case((-31,), keys=64, weighted=False))
        lse, mass = self.both(problem, counting)
        assert (np.asarray(lse)[..., :31] == np.float32(NEG)).all()
        np.testing.assert_allclose(mass.new[..., 0], 1, rtol=1e-6)  # the last query's, of its only key
        assert not np.asarray(mass.new)[..., 1:].any()

    def test_lengths_beyond_what_is_there_end_with_it(self):
        problem, counting = build(Case((300,), queries=20, keys=320, kept=(128, 64)))
        kept = dataclasses.replace(problem.kept, length=jnp.asarray([[900, 64]]))
        got = self.both(dataclasses.replace(problem, kept=kept), counting)
        jax.tree.map(np.testing.assert_array_equal, got, self.both(problem, counting))

    def test_a_kept_row_whose_mass_is_nothing(self):
        problem, _ = build(Case((-32,), keys=64, kept=(1, 40), weighted=False))
        kept = dataclasses.replace(problem.kept, log_mass=jnp.asarray([[-jnp.inf, 0.0]]))
        problem = dataclasses.replace(problem, kept=kept)
        lse = self.log_sum_exp(problem)
        assert (np.asarray(lse)[0, 0] == np.float32(NEG)).all()
        got = self.attention_mass(problem, Counting(lse, None, None))
        assert not np.asarray(got.kept)[0, 0].any() and not np.asarray(got.new).any()
        np.testing.assert_allclose(got.kept[0, 1].sum(axis=-1), 32, rtol=1e-5)

    def test_queries_all_of_whose_scores_are_minus_infinity_add_nothing(self):
        """Nor to keys that they do not see, whose scores are as low as their normaliser."""
        problem, _ = build(Case((3,), queries=8, keys=64, weighted=False))
        ends = {"q": jnp.full_like(problem.q, -1e20), "k": jnp.full_like(problem.k, 1e20)}
        problem = dataclasses.replace(problem, **ends)
        lse = self.log_sum_exp(problem)
        assert (np.asarray(lse) == np.float32(NEG)).all()
        assert not np.asarray(self.attention_mass(problem, Counting(lse, None, None)).new).any()

    def test_masses_add_to_those_of_before_in_place(self):
        problem, counting = build(Case((100,), keys=4096, kept=(3, 5), onto=True))
        run = jax.jit(lambda p, c, onto: self.attention_mass(p, dataclasses.replace(c, onto=onto)), donate_argnums=2)
        without = dataclasses.replace(counting, onto=None)
        memory = run.lower(problem, without, counting.onto).compile().memory_analysis()
        assert memory.alias_size_in_bytes >= counting.onto.new.nbytes + counting.onto.kept.nbytes
        assert memory.temp_size_in_bytes < problem.k.nbytes / 4

    def test_masses_of_before_that_are_used_again_stay(self):
        problem, counting = build(Case((100,), kept=(3, 5), onto=True))
        once = jax.jit(lambda p, c: (self.attention_mass(p, c), c.onto))
        (got, before), want = once(problem, counting), self.attention_mass(problem, counting)
        jax.tree.map(np.testing.assert_array_equal, (got, before), (want, counting.onto))


@needs_compiler
class TestNative(_Native):
    @needs_native
    def test_it_is_what_cpus_take_unless_it_is_switched_off(self, monkeypatch):
        problem, counting = build(Case((100,), kept=(3, 5), onto=True))

        def text(**options):
            def run(q, k, kept, lse, onto):
                where = {"offset": 100, "scale": 0.1, "kept": kept, **options}
                return log_sum_exp(q, k, **where), attention_mass(q, k, lse, onto=onto, **where)

            given = problem.q, problem.k, problem.kept, counting.lse, counting.onto
            return jax.jit(run).lower(*given).as_text()

        assert "@kvjax_prefill(" in text() and "@kvjax_attention_mass(" in text()
        assert "custom_call" not in text(implementation="xla")
        monkeypatch.setenv("KVJAX_NATIVE", "0")
        assert "custom_call" not in text()
        with pytest.raises(NotImplementedError, match="no compiled prefill"):
            text(implementation="native")

    @pytest.mark.parametrize("change", [{"head_dim": 24}, {"dtype": jnp.float16}])
    def test_what_it_does_not_take_is_left_to_xla(self, change):
        problem, counting = build(Case((30,), queries=16, keys=64, **change))
        for call in (lambda: native.log_sum_exp(problem), lambda: native.attention_mass(problem, counting)):
            with pytest.raises(NotImplementedError):
                call()
        got = log_sum_exp(problem.q, problem.k, offset=problem.offset, scale=problem.scale)
        np.testing.assert_allclose(got, xla.log_sum_exp(problem), atol=1e-5)

    def test_biases_are_left_to_xla(self):
        problem, counting = build(Case((30,), queries=16, keys=64))
        placed = dataclasses.replace(problem, bias=lambda place: jnp.zeros(()))
        with pytest.raises(NotImplementedError, match="ALiBi"):
            native.attention_mass(placed, counting)


@needs_compiler
class TestNativeOfOlderProcessors(_Native):
    instructions = "avx2"


@needs_compiler
@pytest.mark.parametrize("form", [TestNative, TestNativeOfOlderProcessors])
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_any_problem(form, data):
    case = Case(**data.draw(chunk_sizes()), weighted=data.draw(st.booleans()), onto=data.draw(st.booleans()))
    problem, counting = build(case, seed=data.draw(st.integers(0, 99)))
    tolerance = form.tolerance[jnp.dtype(case.dtype).name]
    lse, mass = form().both(problem, counting)
    np.testing.assert_allclose(lse, counting.lse, atol=tolerance, rtol=tolerance)
    for ours, theirs in zip(mass, Masses(*reference.attention_mass(problem, counting)), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            np.testing.assert_allclose(ours, theirs, atol=tolerance, rtol=tolerance)

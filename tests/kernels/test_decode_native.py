"""The C++ attention for CPUs, with the instructions of newer and of older processors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.decode_base import RAGGED, Case, DecodeBase, build, by_row, oracle
from support.native import needs_compiler, needs_native, suffix

from pallas_kernels.ragged_decode import native, ragged_decode, xla
from pallas_kernels.softmax import NEG


class _Native(DecodeBase):
    layouts = ("columns",)
    narrow = ("columns",)
    instructions = "here"

    def run(self, problem):
        def decode(given):
            return native.decode(dataclasses.replace(problem, **given), suffix=suffix("attention", self.instructions))

        return jax.jit(decode)({"q": problem.q, "pages": problem.pages, "length": problem.length})

    def test_queries_of_some_rows(self):
        self.check_rows(Case(((70, 130), (5, 160), (0, 1), (160, 17)), RAGGED, log_mass=True, with_logits=True))
        self.check_rows(
            by_row(((70, 130), (5, 160), (0, 1), (160, 17)), ((5, 16), (11, 10)) * 2, dtype=jnp.int8, page_size=32)
        )

    def test_rows_beside_a_row_and_room_beside_its_tokens_change_no_bit(self):
        problem = build(Case(((300, 17), (64, 0), (5, 200)), (30, 20), group=3, poison=False), "columns")
        whole = self.run(problem)
        for b in range(3):
            alone = jax.tree.map(lambda x, b=b: x[b : b + 1], problem.pages)
            more = dataclasses.replace(problem, q=problem.q[b : b + 1], pages=alone, length=problem.length[b : b + 1])
            np.testing.assert_array_equal(self.run(more).out[0], whole.out[b])
            room = jax.tree.map(lambda x: jnp.concatenate([x[:, :30], x[:, :7], x[:, 30:], x[:, :3]], axis=1), alone)
            np.testing.assert_array_equal(
                self.run(dataclasses.replace(more, pages=room, runs=(37, 23))).out[0], whole.out[b]
            )

    @pytest.mark.parametrize("window", [None, 40])
    def test_pages_beyond_a_length_and_before_a_window_are_not_read(self, window):
        problem = build(Case(((33, 400),), (20, 30), window=window, poison=False), "columns")
        want = self.run(problem)
        read = [range(3), range(20 if window is None else 20 + 16, 20 + 25)]  # chunks of 8 pages; 400 slots are 25
        unread = jnp.asarray([page for page in range(50) if not any(page in some for some in read)])
        pages = jax.tree.map(lambda x: x.at[:, unread].set(jnp.nan), problem.pages)
        for found, wanted in zip(self.run(dataclasses.replace(problem, pages=pages))[:2], want[:2], strict=True):
            np.testing.assert_array_equal(found, wanted)

    def test_a_length_beyond_a_heads_pages_ends_with_them(self):
        problem = build(Case(((160, 130),), (10, 9), poison=False), "columns")
        want = self.run(problem).out
        np.testing.assert_array_equal(self.run(dataclasses.replace(problem, length=jnp.array([[500, 130]]))).out, want)

    def test_a_head_whose_only_score_is_minus_infinity_is_empty(self):
        problem = build(Case(((1, 130),), RAGGED, log_mass=True), "columns")
        found = self.run(dataclasses.replace(problem, log_mass=jnp.array([[-jnp.inf, 0.0]])))
        assert not np.asarray(found.out[0, 0]).any() and (np.asarray(found.lse[0, 0]) == np.float32(NEG)).all()
        assert np.isfinite(np.asarray(found.out[0, 1])).all()

    def test_what_is_not_finite_stays_in_its_row(self):
        problem = build(Case(((70, 130), (5, 160)), RAGGED, poison=False), "columns")
        for bad in (jnp.nan, jnp.inf):
            out = np.asarray(self.run(dataclasses.replace(problem, q=problem.q.at[0, 0, 0, 0].set(bad))).out)
            assert (
                not np.isfinite(out[0, 0, 0]).any() and np.isfinite(out[0, 0, 1:]).all() and np.isfinite(out[1]).all()
            )

    def test_scores_far_apart(self):
        """Weights below what a float holds are 0, as exp says."""
        problem = build(Case(((70, 130),), RAGGED, poison=False), "columns")
        problem = dataclasses.replace(problem, q=problem.q * 1000)
        want, got = oracle(problem), self.run(problem)
        np.testing.assert_allclose(got.out, want.out, atol=1e-3, rtol=1e-3)
        np.testing.assert_allclose(got.lse, want.lse, rtol=1e-5)


@needs_compiler
class TestNative(_Native):
    @needs_native
    def test_it_is_what_cpus_take_unless_it_is_switched_off(self, monkeypatch):
        problem = build(Case(((70, 130),), RAGGED), "columns")

        def text(**options):
            given = (problem.q, problem.pages, problem.length)
            decode = jax.jit(lambda *given: ragged_decode(*given, runs=problem.runs, scale=1.0, **options))
            return decode.lower(*given).as_text()

        assert "kvjax_attention" in text() and "custom_call" not in text(implementation="xla")
        monkeypatch.setenv("KVJAX_NATIVE", "0")
        assert "custom_call" not in text()
        with pytest.raises(NotImplementedError, match="no compiled attention"):
            text(implementation="native")

    @pytest.mark.parametrize("change", [{"page_size": 8}, {"head_dim": 24}, {"dtype": jnp.float16}])
    def test_what_it_does_not_take_is_left_to_xla(self, change):
        problem = build(Case(((20, 30),), (8, 8), **{"poison": False, **change}), "columns")
        with pytest.raises(NotImplementedError):
            native.decode(problem)
        given = (problem.q, problem.pages, problem.length)
        found = ragged_decode(*given, runs=problem.runs, scale=problem.scale)
        want = jax.jit(lambda: xla.decode(problem))().out
        np.testing.assert_allclose(np.float32(found.out), np.float32(want), atol=1e-3, rtol=1e-3)

    def test_traced_numbers_are_left_to_xla(self):
        problem = build(Case(((20, 30),), (8, 8), poison=False), "columns")
        given = (problem.q, problem.pages, problem.length)
        capped = jax.jit(lambda cap: ragged_decode(*given, runs=problem.runs, scale=1.0, soft_cap=cap).out)
        want = ragged_decode(*given, runs=problem.runs, scale=1.0, soft_cap=3.0).out
        np.testing.assert_allclose(capped(jnp.float32(3.0)), want, atol=1e-5)

    def test_nothing_of_the_cache_is_copied(self):
        problem = build(Case(((4096, 4000),), (256, 256), page_size=32, poison=False), "columns")
        given = {"q": problem.q, "pages": problem.pages, "length": problem.length}
        decode = jax.jit(lambda given: native.decode(dataclasses.replace(problem, **given)))
        temporary = decode.lower(given).compile().memory_analysis().temp_size_in_bytes
        assert temporary < 1e5 < sum(x.nbytes for x in jax.tree.leaves(problem.pages))

    def test_an_empty_head_is_said_by_its_sum(self):
        problem = build(Case(((0, 130),), RAGGED), "columns")
        found = self.run(problem)
        assert not np.asarray(found.out[0, 0]).any() and (np.asarray(found.lse[0, 0]) == np.float32(NEG)).all()


@needs_compiler
class TestNativeOfOlderProcessors(_Native):
    instructions = "avx2"


@needs_compiler
@pytest.mark.parametrize("form", [TestNative, TestNativeOfOlderProcessors])
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_any_problem(form, data):
    heads, rows = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    page = data.draw(st.sampled_from([16, 32, 48]))
    runs = tuple(data.draw(st.integers(1, 9)) for _ in range(heads))
    lengths = tuple(tuple(data.draw(st.integers(0, page * n)) for n in runs) for _ in range(rows))
    dtype = data.draw(st.sampled_from([jnp.float32, jnp.bfloat16, jnp.int8]))
    alibi, head_dim = data.draw(st.booleans()), data.draw(st.sampled_from([16, 48, 64, 80, 128]))
    case = Case(
        lengths,
        runs,
        group=data.draw(st.integers(1, 9)),
        head_dim=head_dim,
        key_dim=data.draw(st.sampled_from([None, 1, head_dim // 2])),
        page_size=page,
        dtype=dtype,
        log_mass=data.draw(st.booleans()),
        alibi=alibi,
        by_position=not alibi and data.draw(st.booleans()),
        window=data.draw(st.sampled_from([None, 1, 20, 1500])),
        soft_cap=data.draw(st.sampled_from([None, 3.0])),
        with_logits=data.draw(st.booleans()),
        logits_scale=data.draw(st.sampled_from([None, 0.3])),
    )
    problem = build(case, "columns", seed=data.draw(st.integers(0, 99)))
    want, got = oracle(problem), form().run(problem)
    tolerance = form.tolerance[jnp.dtype(dtype).name]
    np.testing.assert_allclose(np.float32(got.out), want.out, atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(got.lse, want.lse, atol=tolerance, rtol=tolerance)
    if case.with_logits:
        np.testing.assert_allclose(got.logits, want.logits, atol=4 * tolerance, rtol=tolerance)

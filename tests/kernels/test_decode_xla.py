"""The XLA form, in every layout; and that an operation chooses an implementation as it says."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.decode_base import RAGGED, UNIFORM, Case, DecodeBase, build, by_row, oracle, rows_of

from pallas_kernels.ragged_decode import api, ragged_decode, reference, xla
from pallas_kernels.ragged_decode.worklist import FIRST, LAST, ZERO, most_items, work_list


class TestXla(DecodeBase):
    layouts = ("columns", "stacked", "padded", "lanes")
    narrow = ("columns", "lanes", "registers")

    def run(self, problem):
        return jax.jit(lambda arrays: xla.decode(dataclasses.replace(problem, **arrays)))(
            {"q": problem.q, "pages": problem.pages, "length": problem.length, "starts": problem.starts}
        )

    def test_rows_at_different_positions_share_a_pool(self):
        rows = ((70, 3), (1, 128), (5, 0))
        self.check_shared(Case(rows, (9, 8), alibi=True), Case(((130, 7),), (9, 2), alibi=True))

    @pytest.mark.slow
    def test_a_part_of_the_pages_in_several_blocks(self, monkeypatch):
        """Blocks that begin earlier at a row's end, rows that end before others, and heads with none."""
        monkeypatch.setattr(xla, "PART", 4)
        self.test_heads_that_have_a_part_of_the_pages()

    @pytest.mark.slow
    @pytest.mark.parametrize("runs", [RAGGED, UNIFORM], ids=["ragged", "uniform"])
    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8], ids=["float32", "bfloat16", "int8"])
    def test_a_batch_of_one(self, runs, dtype):
        case = Case(((70, 130),), runs, group=3, head_dim=80, dtype=dtype, log_mass=True)
        for changes in (
            dict(with_logits=True, logits_scale=0.3),
            dict(lengths=((0, 160),), window=16, soft_cap=3.0),
            dict(alibi=True, window=1500),
        ):
            self.check(dataclasses.replace(case, **changes))

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8], ids=["float32", "bfloat16", "int8"])
    @pytest.mark.parametrize("batch", [1, 2])
    def test_nothing_copies_a_cache_of_equal_heads(self, batch, dtype):
        case = Case(((4096, 4000),) * batch, (128, 128), page_size=32, dtype=dtype, poison=False)
        problem = build(case, "columns")
        arrays = {"q": problem.q, "pages": problem.pages, "length": problem.length}
        compiled = jax.jit(lambda arrays: xla.decode(dataclasses.replace(problem, **arrays))).lower(arrays).compile()
        cache = sum(leaf.nbytes for leaf in jax.tree.leaves(problem.pages))
        assert compiled.memory_analysis().temp_size_in_bytes < cache / 4

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8], ids=["float32", "bfloat16", "int8"])
    @pytest.mark.parametrize("batch", [1, 2])
    def test_nothing_copies_a_cache_whose_runs_are_by_row(self, batch, dtype):
        case = by_row(((4096, 4000),) * batch, ((128, 128),) * batch, page_size=32, dtype=dtype, poison=False)
        problem = build(case, "columns")
        arrays = {"q": problem.q, "pages": problem.pages, "length": problem.length, "starts": problem.starts}
        compiled = jax.jit(lambda arrays: xla.decode(dataclasses.replace(problem, **arrays))).lower(arrays).compile()
        cache = sum(leaf.nbytes for leaf in jax.tree.leaves(problem.pages))
        assert compiled.memory_analysis().temp_size_in_bytes < cache / 2  # of int8 pages a third

    @pytest.mark.parametrize("runs", [RAGGED, UNIFORM, None], ids=["ragged", "uniform", "by row"])
    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8], ids=["float32", "int8"])
    @pytest.mark.parametrize("batch", [1, 2])
    def test_a_gpu_is_asked_for_whole_floats(self, batch, dtype, runs):
        """By default it would round the operands of a float32 product to TF32's 10 bits."""
        lengths = ((70, 130),) * batch
        case = by_row(lengths, ((5, 16),) * batch) if runs is None else Case(lengths, runs)
        case = dataclasses.replace(case, dtype=dtype, log_mass=True)
        for layout in self.layouts_of(case):
            problem = build(case, layout)
            arrays = {"q": problem.q, "pages": problem.pages, "length": problem.length, "starts": problem.starts}
            decode = jax.jit(lambda arrays, problem=problem: xla.decode(dataclasses.replace(problem, **arrays)))
            lowered = decode.trace(arrays).lower(lowering_platforms=("cuda",)).as_text()
            products = [line for line in lowered.splitlines() if "dot_general" in line]
            assert products and all("precision = [HIGHEST, HIGHEST]" in line for line in products), products

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8], ids=["float32", "int8"])
    def test_one_row_of_its_own_runs(self, dtype):
        case = by_row(((70, 160, 3),), ((5, 10, 6),), group=3, head_dim=80, dtype=dtype, log_mass=True)
        self.check(dataclasses.replace(case, with_logits=True, logits_scale=0.3))

    def test_queries_of_some_rows_of_runs_by_row(self):
        """The starts are of the rows that are asked, the pages of all."""
        case = by_row(((70, 130), (0, 5), (160, 1)), ((5, 16), (11, 10), (20, 1)), with_logits=True, log_mass=True)
        for layout in self.layouts_of(case):
            problem = build(case, layout)
            whole, got = oracle(problem), self.run(rows_of(problem, 1, 2))
            for x, y in zip(got, whole, strict=True):
                np.testing.assert_allclose(np.asarray(x), np.asarray(y)[1:], atol=1e-4)

    def test_queries_of_some_rows(self):
        case = Case(((70, 130), (0, 5), (160, 1)), RAGGED, dtype=jnp.int8, alibi=True, with_logits=True, log_mass=True)
        problem = build(case, "stacked")
        wanted, got = reference.decode(problem), xla.decode(rows_of(problem, 1, 2))
        for x, y in zip(got, wanted, strict=True):
            np.testing.assert_allclose(np.asarray(x), np.asarray(y)[1:], atol=1e-4)
        got = reference.decode(rows_of(problem, 1, 2))
        np.testing.assert_array_equal(np.asarray(got.out), np.asarray(wanted.out)[1:])


@st.composite
def owned(draw):
    """Pages of the heads of two rows, of 12 each, and how much of each head is filled."""
    rows = []
    for _ in range(2):
        cuts = sorted(draw(st.lists(st.integers(1, 11), min_size=2, max_size=2, unique=True)))
        rows.append(tuple(int(x) for x in np.diff([0, *cuts, 12])))
    lengths = [[draw(st.one_of(st.just(0), st.just(4 * n), st.integers(0, 4 * n))) for n in row] for row in rows]
    return tuple(rows), tuple(tuple(row) for row in lengths)


ARRAYS = ("q", "pages", "length", "starts", "log_mass", "k_scale", "v_scale", "position", "query_position")
SLOPES = 2.0 ** -np.arange(1, 7, dtype=np.float32).reshape(3, 2)


@pytest.mark.parametrize(
    "options",
    [
        {"with_logits": True, "logits_scale": 0.3, "soft_cap": 3.0, "window": 5},
        {"dtype": jnp.int8, "alibi": True, "window": 1500, "with_logits": True},
    ],
    ids=["window by slot", "int8, slopes, window by position"],
)
@pytest.mark.parametrize("form", [xla, reference], ids=["xla", "reference"])
@pytest.mark.parametrize("layout", ["columns", "stacked"])
def test_any_runs_by_row(form, options, layout):
    compiled = {}

    @settings(max_examples=25, deadline=None)
    @given(owned(), st.integers(0, 100))
    def holds(drawn, seed):
        rows, lengths = drawn
        case = Case(lengths, (10,) * 3, row_runs=rows, group=2, head_dim=8, page_size=4, log_mass=True, **options)
        problem = build(case, layout, seed)
        problem = dataclasses.replace(problem, slopes=SLOPES if case.alibi else None)
        if not compiled:  # Draws differ in their arrays alone.
            compiled[form] = jax.jit(lambda arrays: form.decode(dataclasses.replace(problem, **arrays)))
        got = compiled[form]({name: getattr(problem, name) for name in ARRAYS})
        for x, y in zip(got, oracle(problem), strict=True):
            np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=2e-4, rtol=2e-4)

    holds()


def _arguments(problem):
    values = {field.name: getattr(problem, field.name) for field in dataclasses.fields(problem)}
    values.pop("first_visible")  # the XLA form's own
    return [values.pop(name) for name in ("q", "pages", "length")], values


def test_what_does_not_fit_is_passed_over_and_what_is_named_is_not(monkeypatch):
    problem = build(Case(((5, 9),), (1, 1)), "columns")
    arguments, keywords = _arguments(problem)

    def refuses(problem):
        raise NotImplementedError("not this one")

    monkeypatch.setattr(api.IMPLEMENTATIONS, "functions", {"tpu": refuses, "xla": api.IMPLEMENTATIONS["xla"]})
    monkeypatch.setattr(api.IMPLEMENTATIONS, "order", {"cpu": ("tpu",)})
    got = ragged_decode(*arguments, **keywords)
    np.testing.assert_allclose(got.out, reference.decode(problem).out, atol=1e-5)
    with pytest.raises(NotImplementedError, match="not this one"):
        ragged_decode(*arguments, **keywords, implementation="tpu")
    with pytest.raises(ValueError, match="no implementation 'cuda'; there are tpu, xla"):
        ragged_decode(*arguments, **keywords, implementation="cuda")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"runs": (2, 1)}, "2 runs of 3 pages"),
        ({"window": 0}, "window is 0"),
        ({"slopes": np.ones((2, 4), np.float32)}, "slopes, and a window by position"),
    ],
)
def test_arguments_that_do_not_belong_together_are_refused(change, sentence):
    arguments, keywords = _arguments(build(Case(((5, 9),), (1, 1)), "columns"))
    with pytest.raises(ValueError, match=sentence):
        ragged_decode(*arguments, **{**keywords, **change})


@pytest.mark.parametrize("first", [None, (0, 5, 16, 0)])
def test_items_cover_every_slot_once_and_stay_in_the_pool(first):
    page, block, runs = 4, 2, (1, 3, 5, 2)
    length, start = np.array([4, 0, 19, 7], np.int32), np.array([0, 1, 4, 9], np.int32)
    lowest = np.zeros(4, np.int32) if first is None else np.array(first, np.int32)
    items = work_list(
        jnp.asarray(start),
        jnp.asarray(length),
        page_size=page,
        pages_per_item=block,
        max_items=most_items(runs, 1, block),
        total_pages=sum(runs),
        first=None if first is None else jnp.asarray(first),
    )
    seen = {s: [] for s in range(4)}
    for w in range(int(items.count[0])):
        s, at = int(items.segment[w]), int(items.page[w])
        assert 0 <= at <= sum(runs) - block and 0 <= items.low[w] < items.high[w] <= page * block
        slots = [(at - start[s]) * page + r for r in range(int(items.low[w]), int(items.high[w]))]
        assert bool(items.flags[w] & FIRST) == (not seen[s])
        assert bool(items.flags[w] & ZERO) == (slots[0] == 0)
        seen[s] += slots
        assert bool(items.flags[w] & LAST) == (seen[s][-1] == length[s] - 1)
    assert seen == {s: list(range(min(lowest[s], length[s]), length[s])) for s in range(4)}

"""What every implementation of ``ragged_decode`` must do, against the float32 reference; each inherits it."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.pages import Columns, Lanes, Pages, Stacked
from pallas_kernels.ragged_decode import reference
from pallas_kernels.ragged_decode.decode_problem import Decoded, Problem
from pallas_kernels.ragged_decode.shared import Shared, with_shared
from pallas_kernels.softmax import NEG

PAGE = 16
#: Position of every query; those of slots are below, in any order, as a policy's evictions leave them.
QUERY = 4096


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem by its sizes: ``lengths`` of each row's heads, in slots."""

    lengths: tuple[tuple[int, ...], ...]
    runs: tuple[int, ...]
    group: int = 4
    head_dim: int = 128
    # Channels of keys, where values have more.
    key_dim: int | None = None
    page_size: int = PAGE
    dtype: Any = jnp.float32
    log_mass: bool = False
    alibi: bool = False
    by_position: bool = False
    window: int | None = None
    soft_cap: float | None = None
    with_logits: bool = False
    logits_scale: float | None = None
    # Pages of each row's heads, where they differ from row to row; ``runs`` are then the most of each head.
    row_runs: tuple[tuple[int, ...], ...] | None = None
    # What lies past a head's length: keys are NaN, for their scores are selected away; values are huge, for they are
    # multiplied by 0 and must be finite.
    poison: bool = True


def by_row(lengths: tuple[tuple[int, ...], ...], rows: tuple[tuple[int, ...], ...], **options: Any) -> Case:
    """A case whose heads have these numbers of pages in each row."""
    return Case(lengths, tuple(max(pages) for pages in zip(*rows, strict=True)), row_runs=rows, **options)


def build(case: Case, layout: str, seed: int = 0) -> Problem:
    """The case with random rows in this layout."""
    rng = np.random.default_rng(seed)
    runs = np.array(case.row_runs or (case.runs,) * len(case.lengths))
    batch, heads, total = len(case.lengths), len(case.runs), int(runs[0].sum())
    shape = (batch, total, case.page_size, case.head_dim)
    k, v = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    key_dim = case.key_dim or case.head_dim
    k = k[..., :key_dim]
    length = np.asarray(case.lengths, np.int32)
    starts = np.cumsum(runs, axis=1) - runs
    worst = 3e4 if jnp.dtype(case.dtype).itemsize == 1 else np.nan
    if case.poison:
        for b in range(batch):
            for h in range(heads):
                flat = slice(starts[b, h], starts[b, h] + runs[b, h])
                past = np.arange(runs[b, h] * case.page_size).reshape(-1, case.page_size) >= length[b, h]
                k[b, flat][past], v[b, flat][past] = worst, -3e4
    k_scale = v_scale = None
    dtype = jnp.dtype(case.dtype)
    if dtype.itemsize == 1:
        k_scale = rng.uniform(0.5, 1.5, (batch, heads, key_dim)).astype(np.float32) / 40
        v_scale = rng.uniform(0.5, 1.5, (batch, total, case.page_size)).astype(np.float32) / 40
        k, v = (np.clip(np.round(40 * x), -120, 120) for x in (k, v))
    pages = lay(layout, jnp.asarray(k).astype(dtype), jnp.asarray(v).astype(dtype))
    query = jnp.float32 if dtype.itemsize != 2 else dtype
    placed = case.alibi or case.by_position
    position = rng.integers(0, QUERY, (batch, total * case.page_size)).astype(np.int32)
    if case.window is not None:
        # The last that a window sees and the first that it does not are among the valid slots of every head.
        for b, h in np.ndindex(length.shape):
            at = starts[b, h] * case.page_size + rng.permutation(length[b, h])[:2]
            position[b, at] = (QUERY - case.window + np.arange(2))[: len(at)]
    position = position.reshape(shape[:3])
    return Problem(
        q=jnp.asarray(rng.standard_normal((batch, heads, case.group, key_dim))).astype(query),
        pages=pages,
        length=jnp.asarray(length),
        runs=case.runs,
        scale=case.head_dim**-0.5,
        log_mass=jnp.asarray(rng.uniform(0, 5, (batch, heads)).astype(np.float32)) if case.log_mass else None,
        k_scale=None if k_scale is None else jnp.asarray(k_scale),
        v_scale=None if v_scale is None else jnp.asarray(v_scale),
        window=case.window,
        soft_cap=case.soft_cap,
        slopes=2.0 ** -rng.uniform(1, 8, (heads, case.group)).astype(np.float32) if case.alibi else None,
        position=jnp.asarray(position) if placed else None,
        query_position=jnp.full((batch,), QUERY, jnp.int32) if placed else None,
        with_logits=case.with_logits,
        logits_scale=case.logits_scale,
        starts=None if case.row_runs is None else jnp.asarray(starts, jnp.int32),
    )


def oracle(p: Problem) -> Decoded:
    """A softmax in float64, head by head, of the slots that a list of each head's pages says are its own."""
    batch, heads, group, _ = p.q.shape
    total, size = p.pages.shape[1:3]
    k, v = (np.asarray(x.astype(jnp.float32), np.float64) for x in (p.pages.keys(), p.pages.values()))
    first = np.broadcast_to(np.asarray(p.first_page), (batch, heads))
    out, lse = np.zeros((batch, heads, group, p.pages.shape[3])), np.full((batch, heads, group), NEG)
    logits = np.full((batch, total, group, size), NEG)
    for b, h in np.ndindex(batch, heads):
        end = total if h == heads - 1 else first[b, h + 1]
        # Page and place of each valid slot.
        at = [(page, r) for page in range(first[b, h], end) for r in range(size)][: int(p.length[b, h])]
        slots = np.arange(len(at))
        if p.window is not None and p.position is None:
            slots = slots[-p.window :]
        if p.window is not None and p.position is not None:
            slots = slots[[int(p.position[b, *at[i]]) > int(p.query_position[b]) - p.window for i in slots]]
        if not len(slots):
            continue
        pages, place = np.array(at)[slots].T
        keys, values = k[b, pages, place], v[b, pages, place]
        keys = keys if p.k_scale is None else keys * np.asarray(p.k_scale, np.float64)[b, h]
        values = values if p.v_scale is None else values * np.asarray(p.v_scale, np.float64)[b, pages, place][:, None]
        bias = np.zeros((group, len(slots)))
        if p.slopes is not None:
            bias += p.slopes[h][:, None] * (np.asarray(p.position)[b, pages, place] - int(p.query_position[b]))
        if p.log_mass is not None:
            bias += np.where(slots == 0, float(p.log_mass[b, h]), 0.0)
        raw = np.asarray(p.q.astype(jnp.float32), np.float64)[b, h] @ keys.T

        def scored(scale, raw=raw, bias=bias):
            return (raw * scale if p.soft_cap is None else p.soft_cap * np.tanh(raw * scale / p.soft_cap)) + bias

        score = scored(p.scale)
        lse[b, h] = np.logaddexp.reduce(score, axis=1)
        out[b, h] = np.exp(score - lse[b, h][:, None]) @ values
        logits[b, pages, :, place] = scored(p.logits_scale or p.scale).T
    return Decoded(*(jnp.asarray(x, jnp.float32) for x in (out, lse)), jnp.asarray(logits, jnp.float32))


def lay(layout: str, k: jax.Array, v: jax.Array) -> Pages:
    """Rows of pages [B, P, R, D] in a layout; "padded" is Stacked, and "registers" Lanes, with whole 128 lanes."""
    if layout == "columns":
        return Columns(k.swapaxes(-1, -2), v)
    if layout == "lanes" and k.shape == v.shape:
        return Lanes(jnp.concatenate([k, v], axis=-1))
    if layout in ("lanes", "registers"):
        width = k.shape[-1] + v.shape[-1]
        lanes = width + -width % 128 if layout == "registers" else 0
        return Lanes.zeros(*v.shape, v.dtype, k.shape[-1], lanes).of_rows(k, v)
    head_dim = k.shape[-1]
    if layout == "padded":
        k, v = (jnp.pad(x, ((0, 0),) * 3 + ((0, -head_dim % 128),)) for x in (k, v))
    return Stacked(jnp.stack([k, v], axis=2), head_dim)


def lengths(page: int = PAGE, block: int = 4 * PAGE) -> tuple[int, ...]:
    """Lengths around every boundary."""
    return (0, 1, page - 1, page, page + 1, block - 1, block, block + 1, 2 * block, 2 * block + page + 3)


def around_boundaries(heads: int = 2) -> tuple[tuple[int, ...], ...]:
    """Rows whose heads have those lengths, each beside another."""
    every = lengths()
    return tuple(tuple(every[(i + 3 * h) % len(every)] for h in range(heads)) for i in range(len(every)))


def rows_of(problem: Problem, first: int, rows: int) -> Problem:
    """The queries of some rows of the same pages."""
    names = ("q", "length", "starts", "log_mass", "k_scale", "query_position")
    own = {name: x[first : first + rows] for name in names if (x := getattr(problem, name)) is not None}
    return dataclasses.replace(problem, **own, first_row=jnp.int32(first))


RAGGED = (10, 11)
UNIFORM = (10, 10)


class DecodeBase:
    """Inherit, give ``run`` and the layouts."""

    layouts: tuple[str, ...] = ()
    #: Those in which keys may have fewer channels than values.
    narrow: tuple[str, ...] = ()
    tolerance: ClassVar = {"float32": 2e-5, "bfloat16": 2e-2, "int8": 2e-2, "float8_e4m3fn": 2e-2}

    def run(self, problem: Problem) -> Decoded:
        raise NotImplementedError

    def fit(self, case: Case) -> Case:
        """The case, changed where the implementation asks something of pages; another page size, say."""
        return case

    def check(self, case: Case, seed: int = 0) -> None:
        case = self.fit(case)
        for layout in self.layouts_of(case) if case.key_dim is None else self.narrow:
            problem = build(case, layout, seed)
            wide = dataclasses.replace(problem, q=problem.q.astype(jnp.float32))
            want, got = (oracle if wide.by_row else reference.decode)(wide), self.run(problem)
            assert got.out.dtype == problem.q.dtype and got.lse.dtype == jnp.float32
            tolerance = self.tolerance[jnp.dtype(case.dtype).name]
            out, lse = np.asarray(got.out, np.float32), np.asarray(got.lse)
            assert np.isfinite(out).all() and np.isfinite(lse).all()
            np.testing.assert_allclose(out, np.asarray(want.out), atol=tolerance, rtol=tolerance)
            np.testing.assert_allclose(lse, np.asarray(want.lse), atol=tolerance, rtol=tolerance)
            if case.with_logits:
                assert got.logits is not None and want.logits is not None
                np.testing.assert_allclose(
                    np.asarray(got.logits), np.asarray(want.logits), atol=tolerance * 4, rtol=tolerance
                )
            else:
                assert got.logits is None

    def check_rows(self, case: Case) -> None:
        """Of queries of some rows the results are those rows of all, to the last bit."""
        case = self.fit(case)
        for layout in self.layouts_of(case):
            problem = build(case, layout)
            whole = self.run(problem)
            for first, rows in ((0, 2), (1, 2), (3, 1)):
                for all_rows, own in zip(whole, self.run(rows_of(problem, first, rows)), strict=True):
                    if all_rows is not None:
                        np.testing.assert_array_equal(np.asarray(own), np.asarray(all_rows)[first : first + rows])

    def check_shared(self, own: Case, shared: Case, heads: slice | None = None) -> None:
        """Rows and a pool that they share, or some ``heads`` of it, against both for every row, merged in float64."""
        own, shared = self.fit(own), self.fit(shared)
        for layout in self.layouts_of(own):
            problem, common = build(own, layout), build(shared, layout, seed=1)
            batch = problem.q.shape[0]
            if own.alibi:
                problem = dataclasses.replace(problem, query_position=QUERY + 7 * jnp.arange(batch, dtype=jnp.int32))
            names = "pages", "length", "position", "starts", "k_scale", "v_scale"
            arrays = {name: getattr(common, name) for name in names}
            if heads is not None:
                some = {name: arrays[name] for name in ("length", "starts", "k_scale") if arrays[name] is not None}
                arrays |= {name: x[:, heads] for name, x in some.items()}
                common = dataclasses.replace(common, runs=common.runs[heads])
            pool = Shared(runs=common.runs, part=heads is not None, **arrays)
            got = with_shared(self.run, problem, pool, queries=64)
            wide = dataclasses.replace(problem, q=problem.q.astype(jnp.float32))
            arrays = jax.tree.map(lambda x, rows=batch: jnp.repeat(x, rows, axis=0), arrays)
            length = arrays["length"]
            copied = dataclasses.replace(wide, runs=common.runs, log_mass=None, with_logits=False, **arrays)
            parts = [reference.decode(one) for one in (wide, copied)]
            outs, lses = ([np.asarray(x, np.float64) for x in both] for both in list(zip(*parts, strict=True))[:2])
            lse = np.logaddexp(*lses)
            out = sum(o * np.exp(part - lse)[..., None] for o, part in zip(outs, lses, strict=True))
            tolerance = self.tolerance[jnp.dtype(own.dtype).name]
            some = (np.asarray(problem.length) + np.asarray(length) > 0)[..., None] & np.ones(lse.shape, bool)
            assert np.isfinite(np.asarray(got.out, np.float32)).all() and (np.asarray(got.lse)[~some] <= NEG).all()
            np.testing.assert_allclose(np.asarray(got.out, np.float32)[some], out[some], atol=tolerance, rtol=tolerance)
            np.testing.assert_allclose(np.asarray(got.lse)[some], lse[some], atol=tolerance, rtol=tolerance)

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8], ids=["float32", "bfloat16", "int8"])
    def test_a_pool_that_rows_share(self, dtype):
        """Heads that are empty in one of the pools, and in both; 3 rows of 30 queries a head are taken in two parts."""
        rows = ((70, 3), (0, 128), (1, 0))
        self.check_shared(
            Case(rows, (9, 8), group=3, dtype=dtype, log_mass=True), Case(((130, 0),), (9, 2), dtype=dtype)
        )
        self.check_shared(Case(rows, (9, 8), group=30, dtype=dtype), Case(((65, 16),), (9, 9), dtype=dtype))

    def test_runs_by_row(self):
        """Heads of one page and of nearly all, each empty, full and in part; a block reads on into the next head."""
        lengths = ((112, 17, 32), (0, 150, 16), (64, 1, 0), (16, 15, 129))
        rows = ((7, 3, 2), (1, 10, 1), (5, 1, 6), (1, 2, 9))
        self.check(by_row(lengths, rows, log_mass=True))
        self.check(by_row(lengths, rows, window=20, soft_cap=3.0, group=2, dtype=jnp.bfloat16))

    def test_runs_by_row_with_scores_and_streams(self):
        lengths, rows = ((70, 130), (5, 160)), ((5, 16), (11, 10))
        self.check(by_row(lengths, rows, with_logits=True, logits_scale=0.3, log_mass=True, soft_cap=3.0))
        self.check(by_row(lengths, rows, alibi=True, window=1500, log_mass=True, dtype=jnp.int8, page_size=32))

    def test_heads_that_have_a_part_of_the_pages(self):
        """Neighbours among the heads of a row: the first, the last, one in between, and a part as long as the row."""
        lengths = ((112, 17, 32, 5), (0, 150, 16, 48), (64, 1, 0, 90), (16, 15, 129, 1))
        rows = ((7, 3, 2, 6), (1, 10, 1, 6), (5, 1, 6, 6), (1, 2, 9, 6))
        case = by_row(lengths, rows, log_mass=True, alibi=True, poison=False)
        for heads in (slice(0, 2), slice(1, 3), slice(3, 4), slice(0, 4)):
            self.check_part(case, heads)
        self.check_part(dataclasses.replace(case, dtype=jnp.int8, page_size=32, alibi=False), slice(1, 3))

    def check_part(self, case: Case, heads: slice) -> None:
        """Some heads of a pool as a problem of their own, against those of all."""
        case = self.fit(case)
        for layout in self.layouts_of(case):
            whole = build(case, layout)
            own = {name: getattr(whole, name) for name in ("q", "length", "starts", "log_mass", "k_scale")}
            own = {name: None if x is None else x[:, heads] for name, x in own.items()}
            slopes = None if whole.slopes is None else whole.slopes[heads]
            part = dataclasses.replace(whole, **own, slopes=slopes, runs=whole.runs[heads], part=True)
            want, got = oracle(whole), self.run(part)
            tolerance = self.tolerance[jnp.dtype(case.dtype).name]
            for found, wanted in ((got.out, want.out), (got.lse, want.lse)):
                wanted = np.asarray(wanted, np.float32)[:, heads]
                np.testing.assert_allclose(np.asarray(found, np.float32), wanted, atol=tolerance, rtol=tolerance)

    def test_equal_runs_given_by_row_are_equal_runs(self):
        for case in (Case(((70, 130), (0, 160)), UNIFORM, log_mass=True), Case(((70, 130), (5, 160)), RAGGED)):
            case = self.fit(case)
            for layout in self.layouts_of(case):
                problem = build(case, layout)
                starts = jnp.broadcast_to(jnp.asarray(problem.first_page), problem.length.shape)
                want, got = self.run(problem), self.run(dataclasses.replace(problem, starts=starts))
                np.testing.assert_allclose(np.asarray(got.out), np.asarray(want.out), atol=2e-6, rtol=2e-6)
                np.testing.assert_allclose(np.asarray(got.lse), np.asarray(want.lse), atol=2e-6, rtol=2e-6)

    def test_runs_by_row_beside_a_pool_that_rows_share(self):
        own = by_row(((70, 3), (1, 128), (0, 0)), ((15, 2), (2, 15), (8, 9)), log_mass=True)
        self.check_shared(own, Case(((130, 7),), (9, 2)))

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8], ids=["float32", "int8"])
    def test_a_pool_that_rows_share_with_runs_of_its_own(self, dtype):
        """As many pages for each of its heads as it has tokens there, beside rows whose heads have equally many."""
        own = Case(((70, 3), (0, 128), (1, 0)), (8, 8), group=3, dtype=dtype, page_size=32)
        self.check_shared(own, by_row(((7, 270),), ((2, 10),), group=3, dtype=dtype, page_size=32))

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8], ids=["float32", "int8"])
    def test_some_heads_of_a_pool_that_rows_share(self, dtype):
        """Those of one layer of a pool of all layers: other heads' pages come before them, after them, or both."""
        own = Case(((70, 3), (0, 128), (1, 0)), (8, 8), group=3, dtype=dtype, page_size=32)
        lengths, rows = ((64, 7, 270, 33),), ((2, 1, 10, 2),)
        shared = by_row(lengths, rows, group=3, dtype=dtype, page_size=32, poison=False)
        for heads in (slice(0, 2), slice(1, 3), slice(2, 4)):
            self.check_shared(own, shared, heads)

    def layouts_of(self, case: Case) -> tuple[str, ...]:
        return tuple(name for name in self.layouts if name != "lanes" or case.head_dim == 64)

    @pytest.mark.parametrize("runs", [RAGGED, UNIFORM], ids=["ragged", "uniform"])
    @pytest.mark.parametrize("log_mass", [False, True])
    def test_lengths_around_every_boundary(self, runs, log_mass):
        self.check(Case(around_boundaries(), (max(runs), *runs[1:]), log_mass=log_mass))

    @pytest.mark.parametrize("group", [1, 2, 3, 4, 8, 16])
    def test_group_sizes(self, group):
        self.check(Case(((70, 3), (0, 128)), (9, 8), group=group, log_mass=True))

    @pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8], ids=["float32", "bfloat16", "int8"])
    def test_head_sizes_and_dtypes(self, head_dim, dtype):
        self.check(Case(((130, 17), (64, 0)), (9, 4), head_dim=head_dim, dtype=dtype, page_size=32))

    @pytest.mark.parametrize("lengths", [((130, 17), (64, 0)), ((130, 17),)], ids=["two rows", "one"])
    def test_scales_of_equal_runs(self, lengths):
        self.check(Case(lengths, (5, 5), dtype=jnp.int8, page_size=32, log_mass=True))

    @pytest.mark.parametrize("runs", [RAGGED, UNIFORM], ids=["ragged", "uniform"])
    def test_scores_by_page(self, runs):
        self.check(Case(((70, 130), (0, 1)), runs, with_logits=True))
        self.check(Case(((70, 130), (5, 160)), runs, with_logits=True, logits_scale=0.3, log_mass=True))

    def test_keys_of_fewer_channels(self):
        rows = ((70, 130), (5, 160))
        self.check(Case(rows, RAGGED, head_dim=64, key_dim=40, log_mass=True, with_logits=True, dtype=jnp.bfloat16))
        self.check(Case(rows, UNIFORM, head_dim=128, key_dim=80, group=3, window=70, page_size=32))
        self.check(by_row(rows, ((5, 16), (11, 10)), head_dim=80, key_dim=48, soft_cap=3.0, dtype=jnp.int8))

    def test_soft_cap(self):
        self.check(Case(((70, 130), (5, 160)), RAGGED, soft_cap=3.0, log_mass=True))

    @pytest.mark.parametrize("window", [1, 16, 70, 1000])
    def test_window_by_slot(self, window):
        self.check(Case(((70, 130), (0, 160)), RAGGED, window=window, log_mass=True))

    def test_alibi(self):
        self.check(Case(((70, 130), (5, 160)), RAGGED, alibi=True))
        self.check(Case(((70, 130), (5, 160)), RAGGED, alibi=True, window=1500, log_mass=True))

    @pytest.mark.parametrize("window", [1, 300, 4096])
    def test_window_by_position(self, window):
        """Of whole blocks nothing may be visible, and of a head."""
        self.check(Case(((70, 130), (0, 160)), RAGGED, by_position=True, window=window, log_mass=True))

    def test_one_row_is_the_same_alone(self):
        case = Case(((70, 130), (5, 160)), RAGGED, log_mass=True)
        for layout in self.layouts_of(case):
            problem = build(case, layout)
            both = self.run(problem)
            alone = self.run(jax.tree.map(lambda x: x, _row(problem, 1)))
            np.testing.assert_allclose(np.asarray(both.out[1:]), np.asarray(alone.out), atol=1e-6, rtol=1e-6)


def _row(problem: Problem, row: int) -> Problem:
    def cut(x: Any) -> Any:
        return None if x is None else jax.tree.map(lambda a: a[row : row + 1], x)

    per_row = ("q", "pages", "length", "starts", "log_mass", "k_scale", "v_scale", "position", "query_position")
    return dataclasses.replace(problem, **{name: cut(getattr(problem, name)) for name in per_row})

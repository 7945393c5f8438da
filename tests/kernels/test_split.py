"""Items of a GPU, their results put together, and which GPU is asked about."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.decode_base import Case, build, by_row
from support.gpus import A100, H100, on

from pallas_kernels.gpu import chip
from pallas_kernels.ragged_decode import mosaic_gpu, split, triton
from pallas_kernels.ragged_decode.merge import merge
from pallas_kernels.ragged_decode.split import Split
from pallas_kernels.ragged_decode.worklist import most_items
from pallas_kernels.softmax import NEG, capped


@pytest.mark.parametrize("pages", [1, 2, 3, 100])
def test_items_cover_every_page_once(pages):
    problem = build(Case(((5, 9, 1),), (7, 1, 4)), "stacked")
    cut = Split.of(problem, pages)
    seen = []
    for item, (head, page, slot) in enumerate(cut.table.T):
        assert cut.begin[head] <= item < cut.begin[head] + cut.count[head]
        end = problem.first_page[head] + problem.runs[head]
        assert slot == (page - problem.first_page[head]) * 16
        seen += [(int(head), p) for p in range(page, min(page + pages, end))]
    assert seen == list(zip(problem.owner.tolist(), range(12), strict=True))


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 9),
    st.lists(st.lists(st.integers(1, 9), min_size=4, max_size=4), min_size=2, max_size=2),
    st.lists(st.lists(st.integers(0, 18), min_size=4, max_size=4), min_size=2, max_size=2),
)
def test_items_of_runs_by_row_cover_every_page_with_slots_once(pages, rows, held):
    """Also where a row's heads divide into fewer items than the most of any; the rest begin past their head's slots."""
    total = max(sum(row) for row in rows)
    rows = [(*row[:3], row[3] + total - sum(row)) for row in rows]
    lengths = tuple(
        tuple(min(pair) for pair in zip(row, slots, strict=True))
        for row, slots in zip(held, np.multiply(rows, 2).tolist(), strict=True)
    )
    problem = build(by_row(lengths, tuple(rows), head_dim=2, page_size=2, poison=False), "stacked")
    cut = Split.of(problem, pages)
    table, begin, count, first = (np.asarray(x) for x in (cut.table, cut.begin, cut.count, problem.first_page))
    length = np.asarray(problem.length)
    assert table.shape == (2, 3, cut.items) and table.dtype == np.int32
    for row, runs in enumerate(rows):
        seen = []
        for item, (head, page, slot) in enumerate(table[row].T):
            end = first[row, head] + runs[head]
            if item < sum(count[row]):
                assert begin[row, head] <= item < begin[row, head] + count[row, head] and page < end
                assert slot == (page - first[row, head]) * 2
                assert slot < length[row, head] or slot == 0  # of a head without slots there is one
                seen += [(int(head), p) for p in range(page, min(page + pages, end))]
            else:
                assert slot >= length[row, head]
        whole = [(int(head), page) for page, head in enumerate(np.asarray(problem.owner)[row])]
        assert seen == [one for one in whole if one in set(seen)]  # in order, each once, under its own head
        assert {one for one in whole if (one[1] - first[row, one[0]]) * 2 < length[row, one[0]]} <= set(seen)
        assert max(count[row]) <= cut.most and sum(count[row]) <= cut.items


def test_the_most_items_of_runs_by_row_are_of_some():
    """Of 12 pages that three heads share, 5 items of 3: runs of 1, 7 and 4 pages."""
    assert most_items((12,) * 3, 1, 3, row_pages=12) == 6 and most_items((1, 7, 4), 1, 3) == 6
    assert most_items((4,) * 3, 2, 3, row_pages=12) == 12 and most_items((4, 2, 1), 1, 3, row_pages=7) == 4


@pytest.mark.parametrize("count", [(3, 3), (1, 1), (1, 4)], ids=["uniform", "alone", "ragged"])
def test_parts_merge_to_the_whole_softmax(count):
    rng = np.random.default_rng(0)
    count, group, dim, slots = np.array(count), 2, 3, 5
    begin = np.cumsum(count) - count
    scores = rng.standard_normal((1, count.sum(), group, slots)) * 4
    values = rng.standard_normal((1, count.sum(), slots, dim))
    lse = np.log(np.exp(scores).sum(-1))
    out = np.einsum("bigs,bisd->bigd", np.exp(scores - lse[..., None]), values)
    # The last item of the last head holds nothing: what it left is not read.
    out[:, -1], lse[:, -1], scores[:, -1] = np.nan, NEG, -np.inf
    got, mass = merge(jnp.asarray(out, jnp.float32), jnp.asarray(lse, jnp.float32), begin, count, int(count.max()))
    for h in range(2):
        of_head = slice(begin[h], begin[h] + count[h])
        total = np.exp(scores[0, of_head]).sum(axis=(0, 2))
        whole = np.einsum("igs,isd->gd", np.exp(scores[0, of_head]), values[0, of_head])
        held = total > 0
        np.testing.assert_allclose(
            got[0, h], np.where(held[:, None], whole / np.where(held, total, 1)[:, None], 0), atol=1e-5
        )
        np.testing.assert_allclose(mass[0, h], np.where(held, np.log(np.where(held, total, 1)), NEG), rtol=1e-5)


def test_parts_of_each_row_merge_as_its_own_do():
    rng = np.random.default_rng(1)
    out, lse = rng.standard_normal((2, 6, 2, 3)).astype(np.float32), rng.standard_normal((2, 6, 2)).astype(np.float32)
    # The second row has an item less; what the last, which is of no head, left is not read.
    out[1, 5], lse[1, 5] = np.nan, NEG
    count = np.array([[1, 5], [3, 2]])
    begin = np.cumsum(count, axis=1) - count
    got = merge(*(jnp.asarray(x) for x in (out, lse, begin, count)), 5)
    for row in range(2):
        want = merge(jnp.asarray(out[row, None]), jnp.asarray(lse[row, None]), begin[row], count[row], 5)
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x[row], y[0], atol=1e-6)


def test_items_fill_the_processors_within_bounds():
    def slots(rows, group=4):
        pages = -(-rows // 64)
        problem = build(Case(((1,),), (pages,), group=group, head_dim=16, page_size=64, poison=False), "stacked")
        return 64 * split.pages_per_item(problem)

    with on(*H100):
        assert [slots(n) for n in (64, 132 * 4 * 200, 132 * 4 * 2000)] == [128, 256, 1024]
        assert slots(64, group=16) == 512


@pytest.mark.parametrize(
    ("device", "capability", "memory"),
    [
        (H100, (9, 0), 227),
        (A100, (8, 0), 163),
        (("NVIDIA B200", 148), (10, 0), 227),
        (("NVIDIA GeForce RTX 4090", 128), (8, 9), 99),
        (("NVIDIA L40S", 142), (8, 9), 99),
        (("NVIDIA RTX PRO 6000 Blackwell Server Edition", 188), (12, 0), 99),
        (("Some other", 7), None, 227),
    ],
)
def test_a_gpu_is_known_by_its_name(device, capability, memory):
    with on(*device):
        target = chip.target()
    assert target == chip.Gpu(device[0], capability, device[1]) and target.shared_memory == memory << 10


def test_without_a_gpu_nothing_is_known():
    assert chip.target() == chip.Gpu()


def test_amd_gpus_are_refused(monkeypatch):
    amd = SimpleNamespace(device_kind="AMD Instinct MI300X", compute_capability="gfx942", core_count=304)
    monkeypatch.setattr(chip.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(chip.jax, "local_devices", lambda: [amd])
    assert chip.target() == chip.Gpu("AMD Instinct MI300X", None, 304, nvidia=False)
    problem = build(Case(((5, 9, 1),), (7, 1, 4), dtype=jnp.bfloat16, page_size=64), "stacked")
    for module in (triton, mosaic_gpu):
        with pytest.raises(NotImplementedError, match="MI300X"):
            module.decode(problem)


def test_a_gpu_that_is_there_says_its_capability(monkeypatch):
    one = SimpleNamespace(device_kind="NVIDIA Something New", compute_capability="9.0", core_count=78)
    monkeypatch.setattr(chip.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(chip.jax, "local_devices", lambda: [one])
    assert chip.target() == chip.Gpu("NVIDIA Something New", (9, 0), 78)


@pytest.mark.parametrize("cap", [30.0, np.float32(30), np.float64(30)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_soft_caps_keep_the_dtype_of_scores(cap, dtype):
    scores = jnp.linspace(-90, 90, 64).astype(dtype)
    found = capped(scores, cap)
    assert found.dtype == dtype
    exact = 30 * np.tanh(np.asarray(scores, np.float64) / 30)
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=1e-6 if dtype == jnp.float32 else 2e-2)

"""AdaptiveHeads against Ada-KV's algorithm 1 in NumPy, and its bytes, which are those of equal heads."""

from __future__ import annotations

import numpy as np
import pytest
import toys
from hypothesis import given, settings
from hypothesis import strategies as st
from support.choosing import Lane, assert_alone

import kvjax
from kvjax.allocation import Allocation
from kvjax.cache import runs
from kvjax.cache.layout import Layout
from kvjax.cache.pool import PAGE_SIZE
from kvjax.cache.quantisation import Storage
from kvjax.engine.levels import levels_of
from kvjax.errors import UsageError
from kvjax.policies import NACL, AdaptiveHeads, KeyDiff, PyramidKV, SnapKV, StreamingLLM, format_policy, parse

BUDGET = 10


def keydiff_scores(keys: np.ndarray) -> np.ndarray:
    unit = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    anchor = unit.mean(axis=0)
    return -unit @ anchor / np.linalg.norm(anchor)


def adaptive(scores: list[np.ndarray], budget: int, floor: float) -> list[list[int]]:
    """Indices that each head keeps: its own best ones, then the best of the layer (Ada-KV, algorithm 1)."""
    safe = max(int(floor * budget + 1e-9), 1)
    kept = [sorted(range(len(s)), key=lambda i, s=s: (s[i], i), reverse=True)[:safe] for s in scores]
    others = [(s[i], head, i) for head, s in enumerate(scores) for i in range(len(s)) if i not in kept[head]]
    for _, head, i in sorted(others, reverse=True)[: max(budget * len(scores) - sum(map(len, kept)), 0)]:
        kept[head].append(i)
    return [sorted(one) for one in kept]


class Layer:
    """All heads of a row's layer: tokens by number, and which of them are kept."""

    def __init__(self, k: np.ndarray, floor: float):
        self.k, self.floor, self.seen = k.astype(np.float64), floor, 0
        self.kept: list[list[int]] = [[] for _ in k]

    def read(self, count: int) -> None:
        candidates = [own + list(range(self.seen, self.seen + count)) for own in self.kept]
        self.seen += count
        if count == 0 or sum(map(len, candidates)) <= BUDGET * len(candidates):
            self.kept = candidates
            return
        scores = [keydiff_scores(self.k[head, own]) for head, own in enumerate(candidates)]
        chosen = adaptive(scores, BUDGET, self.floor)
        self.kept = [[own[i] for i in some] for own, some in zip(candidates, chosen, strict=True)]

    def decode(self, count: int) -> None:
        self.kept = [own + list(range(self.seen, self.seen + count)) for own in self.kept]
        self.seen += count


def assert_as_paper(events, *, heads=3, seed=0, floor=0.2) -> Lane:
    batch = len(next(amount for kind, amount in events if kind == "read"))
    tokens = sum(max(amount) if kind == "read" else amount for kind, amount in events)
    policy = AdaptiveHeads(budget=BUDGET, inner=KeyDiff(), floor=floor)
    lane = Lane(policy, batch, heads, 2, 4, tokens, seed).play(events)
    for row in range(batch):
        oracle = Layer(lane.k[row], floor)
        for kind, amount in events:
            oracle.read(amount[row]) if kind == "read" else oracle.decode(amount)
        assert lane.driver.kept(lane.k, row) == oracle.kept, row
    return lane


@pytest.mark.parametrize("floor", [0.0, 0.2, 0.7, 1.0])
def test_choices_are_the_papers_around_every_boundary(floor):
    lane = assert_as_paper([("read", [1, BUDGET - 1, BUDGET, BUDGET + 1, 40, 90])], floor=floor)
    length = np.asarray(lane.driver.cache.length)
    assert (length.sum(axis=1) == 3 * np.minimum([1, BUDGET - 1, BUDGET, BUDGET + 1, 40, 90], BUDGET)).all()
    assert (length[4:].std(axis=1) > 0).all() or floor == 1, "heads differ"


def test_later_turns_divide_the_budget_anew():
    events = [("read", [30, 12, 5]), ("decode", 7), ("read", [9, 2, 0]), ("decode", 3), ("read", [1, 40, 20])]
    assert_as_paper(events, seed=5)


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 64), min_size=2, max_size=2), seed=st.integers(0, 10**6))
def test_any_lengths(lengths, seed):
    assert_as_paper([("read", lengths)], seed=seed)


def test_a_row_equals_the_row_alone():
    policy = AdaptiveHeads(budget=BUDGET, inner=SnapKV(window=3))
    assert_alone(policy, [("read", [20, 70, 3]), ("decode", 4), ("read", [6, 1, 9])], heads=3)


def test_what_the_inner_policy_protects_stays_in_every_head():
    policy = AdaptiveHeads(budget=BUDGET, inner=SnapKV(window=5), floor=0.0)
    lane = Lane(policy, 1, 3, 2, 4, 60, seed=2).play([("read", [60])])
    kept = lane.driver.kept(lane.k, 0)
    assert all(own[-5:] == [55, 56, 57, 58, 59] for own in kept) and sum(map(len, kept)) == 3 * BUDGET


@pytest.mark.slow
def test_a_floor_of_one_is_the_inner_policy():
    lm, prompt = toys.tiny_model(), [i % 97 for i in range(150)]
    adaptive = kvjax.generate(
        lm, prompt, policy="adaptive:ratio=0.25,floor=1,inner=keydiff", max_new_tokens=20, logprobs=True
    )
    equal = kvjax.generate(lm, prompt, policy="keydiff:ratio=0.25", max_new_tokens=20, logprobs=True)
    assert adaptive.tokens == equal.tokens
    np.testing.assert_allclose(adaptive.logprobs, equal.logprobs, atol=2e-5)


@pytest.mark.parametrize("storage", ["model", "int8"])
def test_the_bytes_are_those_of_equal_heads_and_a_page_a_head(storage):
    lm, tokens = toys.tiny_model(max_position=1024), 700
    prompts = [[(i * step) % 97 for i in range(tokens)] for step in (1, 7, 31)]
    given = {"storage": storage, "max_new_tokens": 12}
    equal = kvjax.generate(lm, prompts, policy="keydiff:ratio=0.25", **given)
    found = kvjax.generate(lm, prompts, policy="adaptive:ratio=0.25,floor=0.1,inner=keydiff", **given)
    lengths = [np.asarray(pool.length) for output in found for pool in output.cache.pools]
    assert any(len(set(row)) > 1 for length in lengths for row in length), "heads hold different numbers of tokens"
    cache, other = found[0].stats.cache_bytes, equal[0].stats.cache_bytes
    heads = lm.config.num_layers * lm.config.num_kv_heads
    a_page = found[0].cache.page_size * found[0].cache.pools[0].slot_nbytes
    # Beside the pages, for each head where its run begins; and the seen tokens that a page more rounds up to.
    assert cache <= other + heads * (a_page + 4)
    plan = kvjax.plan(lm, prompt_tokens=tokens, batch=3, policy="adaptive:ratio=0.25,inner=keydiff", **given)
    assert plan.cache_bytes == 4 * cache  # three prompts run as a batch of four


def test_text_and_refusals():
    policy = AdaptiveHeads(ratio=0.25, inner=PyramidKV(), floor=0.3)
    assert parse(format_policy(policy)) == policy
    assert parse("adakv:ratio=0.5") == AdaptiveHeads(ratio=0.5)
    with pytest.raises(UsageError, match="score of each token"):
        AdaptiveHeads(inner=StreamingLLM())
    with pytest.raises(UsageError, match="leave budget, ratio and keep_turn out of inner"):
        AdaptiveHeads(inner=KeyDiff(budget=9))
    with pytest.raises(UsageError, match="floor"):
        AdaptiveHeads(floor=1.5)
    assert isinstance(AdaptiveHeads(inner=NACL()).scoring, NACL)


PROMPTS = [[i * step % 97 for i in range(count)] for step, count in ((1, 300), (7, 90), (31, 170))]
QUESTIONS = [[5, 9, 2], [1], [44, 3, 3, 8]]


@pytest.mark.slow
def test_rows_of_different_sizes_go_on_together_as_each_alone():
    lm, options = toys.tiny_model(), {"max_new_tokens": 12, "logprobs": True}
    first = [kvjax.generate(lm, one, policy="adaptive:ratio=0.25,inner=keydiff", **options) for one in PROMPTS]
    assert len({output.cache.pools[0].pages for output in first}) > 1, "they are allocated alike"
    together = kvjax.generate(lm, QUESTIONS, cache=[output.cache for output in first], **options)
    for question, output, found in zip(QUESTIONS, first, together, strict=True):
        alone = kvjax.generate(lm, question, cache=output.cache, **options)
        assert found.tokens == alone.tokens
        np.testing.assert_allclose(found.logprobs, alone.logprobs, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [8, 32, 64])
def test_what_was_saved_in_other_pages_goes_on(page_size, tmp_path):
    lm, options = toys.tiny_model(), {"max_new_tokens": 40, "logprobs": True}
    storage = Storage(layout=Layout("columns", page_size))
    policy = AdaptiveHeads(ratio=0.25, inner=KeyDiff(), floor=0.1)
    read = kvjax.generate(lm, PROMPTS[0], policy=policy, storage=storage, max_new_tokens=0).cache
    kvjax.save_cache(tmp_path / "saved", read, lm)
    loaded = kvjax.load_cache(tmp_path / "saved", lm)
    assert loaded.page_size == PAGE_SIZE and read.page_size == page_size
    room = runs.ends(loaded.pools[0].row_starts, loaded.pools[0].kv.shape[1]) - loaded.pools[0].row_starts
    assert (np.asarray(room) * PAGE_SIZE >= np.asarray(loaded.pools[0].length) + loaded.new_capacity).all()
    found, wanted = (kvjax.generate(lm, QUESTIONS[0], cache=cache, **options) for cache in (loaded, read))
    assert found.tokens == wanted.tokens
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=2e-5)


def test_a_slot_of_an_engine_has_room_for_what_the_heads_hold_together():
    config, policy = toys.tiny_config(), AdaptiveHeads(budget=40, inner=KeyDiff())
    (level,) = levels_of(config, policy, Allocation(2, 200, 60), PAGE_SIZE, smaller=False)
    heads = config.num_kv_heads
    held = np.full(heads, 20, np.int32)
    held[0] += 20 * heads  # one head holds what the others do not: 40 each on average
    free = level.free([held] * config.num_layers)
    assert free == level.free([np.full(heads, 40, np.int32)] * config.num_layers) >= 60

"""The room of a conversation grows geometrically, by a documented bound, and by less where more does not fit."""

from __future__ import annotations

from types import SimpleNamespace

import hypothesis
import hypothesis.strategies as st
import pytest
import toys
from support.compiled import compiled_programs

import kvjax
from kvjax.allocation import Allocation, allocations
from kvjax.cache.buckets import RESERVE, prompt_bucket, request_bucket
from kvjax.planning import fitting
from kvjax.policies import Full

LONG = toys.tiny_config(max_position=1 << 17)


def room_after(tokens: int, held: int, rows: int = 1, **keywords) -> tuple[Allocation, ...]:
    """The sizes of a turn onto a cache with room for ``held`` tokens in each row."""
    cache = SimpleNamespace(prompt_capacity=held, new_capacity=256)
    return allocations(LONG, Full(), rows, tokens, held=cache, **keywords)  # pyright: ignore[reportArgumentType]


def test_a_conversation_has_eight_rooms_until_the_context_ends():
    rooms = [allocations(LONG, Full(), 1, 50, reserve=RESERVE)[0].prompt_capacity]
    while rooms[-1] < LONG.max_position:
        rooms.append(room_after(rooms[-1] + 1, rooms[-1])[0].prompt_capacity)
    assert len(rooms) == 8 and rooms[-1] == LONG.max_position


@hypothesis.given(
    tokens=st.integers(1, LONG.max_position), rows=st.integers(1, 40), reserve=st.none() | st.integers(0, 50_000)
)
def test_what_is_spare_is_bounded_and_each_size_is_smaller_than_the_one_before(tokens, rows, reserve):
    sizes = room_after(tokens, tokens - 1, rows, reserve=reserve)
    assert sizes[-1] == Allocation(rows, prompt_bucket(tokens))
    asked = (RESERVE if reserve is None else reserve) // sizes[0].rows
    most = min(request_bucket(tokens + max(asked, tokens // 2 if asked else 0)), prompt_bucket(LONG.max_position))
    assert tokens <= sizes[0].prompt_capacity == max(most, prompt_bucket(tokens))
    assert len({(size.rows, size.prompt_capacity) for size in sizes}) == len(sizes) <= 3
    assert [size.prompt_capacity for size in sizes] == sorted((s.prompt_capacity for s in sizes), reverse=True)


@pytest.mark.parametrize(
    "policy", ["full", *(pytest.param(name, marks=pytest.mark.slow) for name in ("h2o:ratio=0.5", "round:watershed=1"))]
)
def test_a_conversation_that_outgrows_its_room_compiles_once_more_and_then_not(policy):
    lm = toys.tiny_model(max_position=1 << 14, num_layers=2, hidden_size=16, intermediate_size=16)
    cache, compiled, rooms = None, [], []
    with compiled_programs() as programs:
        for _ in range(8):
            before = programs["decode_chunk"]
            how = {"policy": policy} if cache is None else {"cache": cache}
            cache = kvjax.generate(lm, [65] * 700, max_new_tokens=4, reserve_tokens=64, **how).cache
            compiled.append(programs["decode_chunk"] - before)
            held = getattr(cache, "lower", cache).prompt_capacity
            rooms += [held] * (held not in rooms)
    # Of 703 tokens, then of 2,112 and 3,520 with half as many to come, in whole buckets.
    assert rooms == [2048, 3328, 5632] and sum(map(bool, compiled)) == len(rooms), (rooms, compiled)


def test_a_room_that_does_not_fit_grows_by_what_does():
    held = SimpleNamespace(prompt_capacity=12_288, new_capacity=256)
    request = dict(dtype="float32", held=held)

    def fits(limit: int | None) -> int:
        return fitting(LONG, Full(), 1, 12_400, memory_limit=limit, **request).prompt_capacity

    needs = kvjax.plan(LONG, prompt_tokens=12_400, max_new_tokens=1, dtype="float32")  # a bucket alone
    a_token = needs.cache_bytes // (13_312 + 256)
    limits = [needs.total_bytes + a_token * spare for spare in (8_000, 6_000, 4_096)]
    assert [fits(limit) for limit in [None, *limits]] == [20_480, 20_480, 18_432, 13_312]
    with pytest.raises(kvjax.DoesNotFit):
        fits(needs.total_bytes - 1)

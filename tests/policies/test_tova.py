"""TOVA against a NumPy oracle: one decision for all heads, by the newest query alone."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.eviction_oracle import NARROW, attention, lowest, sizes
from support.evictor import ROOM, Evictor, compare, layer_config, random_qkv

from kvjax.errors import UsageError
from kvjax.policies import TOVA


@dataclasses.dataclass
class LayerOracle:
    """One row with all its heads: ``q`` [H, G, T, D], ``k`` [H, T, D]. The paper's policy, as its code reads it."""

    policy: TOVA
    q: np.ndarray
    k: np.ndarray

    def __post_init__(self) -> None:
        self.tokens: list[int] = []
        self.seen, self.budget, self.margins = 0, 0, [1.0]

    def _drop(self) -> None:
        """While over the budget, the token the newest query attends to least, on average over all heads, leaves."""
        newest, scale = self.seen - 1, self.q.shape[-1] ** -0.5
        weights = [attention(q, k, [newest], self.tokens, scale)[:, 0] for q, k in zip(self.q, self.k, strict=True)]
        scores = dict(zip(self.tokens, np.mean(weights, axis=(0, 1)), strict=True))
        while len(self.tokens) > self.budget:
            self.tokens.remove(lowest(scores, self.tokens, self.margins))

    def turn(self, count: int) -> None:
        self.tokens = self.tokens + list(range(self.seen, self.seen + count))
        self.seen += count
        self.budget = sizes(self.policy)(self.seen)
        self._drop()

    def step(self) -> None:
        self.tokens = self.tokens + [self.seen]
        self.seen += 1
        self._drop()

    @property
    def held(self) -> list[list[int]]:
        return [self.tokens] * len(self.k)

    @property
    def margin(self) -> float:
        return min(self.margins)


def oracle_of(policy: TOVA):
    return lambda q, k, v: LayerOracle(policy, q, k)


@pytest.mark.parametrize(("heads", "group"), [(2, 1), (2, 3), (1, 4)], ids=["mha", "gqa", "mqa"])
def test_prompt_and_every_step_drop_what_the_newest_query_cares_for_least(heads, group):
    policy, budget = TOVA(budget=12), 12
    lengths = [1, budget - 1, budget, budget + 1, 40]
    events = [("steps", 1), ("steps", 1), ("steps", 30)]
    assert compare(policy, oracle_of(policy), lengths, events, seed=0, heads=heads, group=group) > NARROW


@settings(max_examples=8, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=2, max_size=2),
    policy=st.sampled_from([TOVA(ratio=0.3), TOVA(budget=1)]),
    seed=st.integers(0, 10**6),
)
def test_any_lengths_and_sizes(lengths, policy, seed):
    events = [("steps", 9), ("turn", 5), ("steps", 12)]
    assume(compare(policy, oracle_of(policy), lengths, events, seed=seed) > NARROW)


def test_the_newest_token_itself_may_leave():
    q, k, v = random_qkv(0, 1, 1, 1, 40, 8)
    k[0, 0, 30] = -100 * q[0, 0, 0, 30]  # what its own query likes least
    evictor = Evictor(TOVA(budget=10), layer_config(1, 1, 8), 1, ROOM)
    evictor.turn(q[..., :30, :], k[..., :30, :], v[..., :30, :], 30)
    before = evictor.kept(k)
    evictor.steps(q[..., 30:31, :], k[..., 30:31, :], v[..., 30:31, :])
    assert evictor.kept(k) == before


@pytest.mark.parametrize("bad", [dict(budget=0), dict(ratio=0), dict(ratio=1.5), dict(budget=8, ratio=0.5)])
def test_bad_parameters_are_one_sentence(bad):
    with pytest.raises(UsageError) as error:
        TOVA(**bad)
    assert "\n" not in str(error.value) and str(error.value).endswith(".")

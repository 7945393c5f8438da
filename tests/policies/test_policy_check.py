"""``kvjax.check_policy``: the properties that every policy must have, tried on one of one's own."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import pytest
from support.wrong_policies import NanV, Recent

import kvjax
from kvjax.policies import Policy, numpy_or_jax, per_head, selection


@dataclasses.dataclass(frozen=True)
class SeesItsNeighbours(Recent):
    """Keeps by the batch's longest row: a row's answer hangs on what else is in the batch."""

    def select(self, layer, cache, candidates, chunk):
        index = jnp.arange(candidates.k.shape[2])
        keep = index >= candidates.length.max() - self.window - 1
        last = index == candidates.length[..., None] - 1
        return selection(cache, candidates, (keep | last) & candidates.valid)

    budgets = Policy.budgets


@dataclasses.dataclass(frozen=True)
class SaysAnotherBudget(Recent):
    def budgets(self, config, layer, total):
        return per_head(numpy_or_jax(total).minimum(total, self.window + 7), config)


@dataclasses.dataclass(frozen=True)
class SharesMoreThanItSays(kvjax.AdaptiveHeads):
    def size(self, config, layer, total):
        return super().size(config, layer, total) + 1

    def budgets(self, config, layer, total):
        return per_head(numpy_or_jax(total).minimum(total, super().size(config, layer, total)), config)


@dataclasses.dataclass(frozen=True)
class NeverAppends(Recent):
    def append(self, layer, cache, k, v, config, **_):
        return cache


@dataclasses.dataclass(frozen=True)
class AppendsNoNumbers(Recent):
    def append(self, layer, cache, k, v, step):
        return super().append(layer, cache, k, v * jnp.nan, step)


@dataclasses.dataclass(frozen=True)
class AppendsToAll(Recent):
    """A row that has ended is written to while others go on."""

    def append(self, layer, cache, k, v, step):
        return super().append(layer, cache, k, v, dataclasses.replace(step, active=jnp.ones_like(step.active)))


@dataclasses.dataclass(frozen=True)
class Raises(Recent):
    def select(self, layer, cache, candidates, chunk):
        if chunk.total[0] > 3:
            raise AssertionError
        return super().select(layer, cache, candidates, chunk)


@dataclasses.dataclass(frozen=True)
class NoSelection(Recent):
    def select(self, layer, cache, candidates, chunk):
        return candidates.valid


@dataclasses.dataclass(frozen=True)
class NoChunks(Recent):
    def chunks(self, config):
        return (0, 0)


@dataclasses.dataclass(frozen=True)
class TextMarks(Recent):
    marks: ClassVar[Any] = "position"


@dataclasses.dataclass(frozen=True)
class NothingMaintains(Recent):
    maintains: ClassVar[bool] = True


@pytest.mark.slow
def test_a_policy_that_is_right_passes(tiny_model):
    found = kvjax.check_policy(Recent(), tiny_model)
    assert {"full", "row alone", "later turn", "int8", "composition"} <= set(found.holds)
    assert set(found.skipped) <= {"mesh"} and "row alone" in str(found)


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (NeverAppends(), r"NeverAppends: it keeps 5 tokens and the first of its answer, and answers .* look at append"),
        (AppendsNoNumbers(), "AppendsNoNumbers: its answer's log-probabilities are not finite"),
        (NanV(), r"NanV\.select gives values in layer 0, head 0 that are no numbers"),
        (Raises(), "Raises.select raises TracerBoolConversionError: "),
        (NoSelection(), "NoSelection.select gives a DynamicJaxprTracer; give a kvjax.policies.Selection"),
        (NoChunks(), r"NoChunks.chunks gives \(0, 0\); give two whole numbers of at least 1"),
        (TextMarks(), "TextMarks.marks is 'position'; give a tuple of names"),
        (NothingMaintains(), "NothingMaintains.maintains is true, and nothing makes a row due no more"),
        (SeesItsNeighbours(), "SeesItsNeighbours: a row of a batch is not the row alone"),
        (SharesMoreThanItSays(budget=20), r"SharesMoreThanItSays.budgets (keeps|says) .* kept"),
        (AppendsToAll(), "AppendsToAll: a row that has ended changes while another goes on; look at step.active"),
        (SaysAnotherBudget(), "SaysAnotherBudget.budgets keeps 31 of 150 tokens .* and 24 are kept"),
    ],
)
def test_a_property_that_does_not_hold_is_said(tiny_model, policy, says):
    with pytest.raises(kvjax.UsageError, match=says):
        kvjax.check_policy(policy, tiny_model)


def test_what_is_no_policy_is_refused(tiny_model):
    with pytest.raises(kvjax.UsageError, match="is not a policy"):
        kvjax.check_policy(3, tiny_model)  # type: ignore[arg-type]
    with pytest.raises(kvjax.UsageError, match=r"kvjax\.load"):
        kvjax.check_policy(Recent(), "model")  # type: ignore[arg-type]
    for seed in (-1, "x", 2**32):
        with pytest.raises(kvjax.UsageError, match=r"seed is .*; give a whole number of at least 0"):
            kvjax.check_policy(Recent(), tiny_model, seed=seed)  # type: ignore[arg-type]

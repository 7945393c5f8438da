"""A policy written outside of kvjax in a few lines: through ``generate``, ``batch`` and ``compare``, by its name."""

from __future__ import annotations

import dataclasses
import json
from typing import ClassVar

import numpy as np
import pytest

import kvjax
from kvjax.cache.pool import mark_by_head
from kvjax.eval.entries import entries
from kvjax.policies import Policy, format_policy, parse, register, registry
from kvjax.policies.base import numpy_or_jax, per_head, selection


@dataclasses.dataclass(frozen=True)
class EveryFourth(Policy):
    """Keep every fourth token and the last ``window``; what is decoded after a prompt stays until the next one."""

    window: int = 64

    marks: ClassVar[tuple[str, ...]] = ("position",)

    def budgets(self, config, layer, total):
        xp = numpy_or_jax(total)
        recent = xp.minimum(total, self.window)
        return per_head((total - recent + 3) // 4 + recent, config)

    def select(self, layer, cache, candidates, chunk):
        position, total = candidates.marks["position"], (chunk.seen + chunk.count)[:, None, None]
        keep = (position % 4 == 0) | (position >= total - self.window)
        return selection(cache, candidates, keep & candidates.valid)


@pytest.fixture(autouse=True)
def name(forgotten_policies):
    register("Every-Fourth", EveryFourth)
    register("every_fourth", EveryFourth)  # the same name, and again


def positions(cache) -> list[list[int]]:
    """Positions in the slots of the first KV head, of each layer."""
    found = []
    for layer in cache.layers:
        found.append(np.asarray(mark_by_head(layer, "position"))[0, 0, : int(layer.length[0, 0])].tolist())
    return found


def test_it_has_a_name_like_any_other():
    assert parse("every-fourth:window=8") == EveryFourth(8) == parse(format_policy(EveryFourth(8)))
    assert registry()["every_fourth"] is EveryFourth
    assert [one.name for one in entries("every_fourth", [0.5])] == ["full", "every_fourth"]


def test_generate_keeps_what_it_says_and_the_plan_is_what_is_allocated(tiny_model):
    prompt = list(range(200))
    ask = dict(max_new_tokens=3, stop_token_ids=())
    output = kvjax.generate(tiny_model, prompt, policy="every_fourth:window=10", **ask)
    kept = [i for i in range(200) if i % 4 == 0 or i >= 190]
    assert positions(output.cache) == [[*kept, 200, 201]] * 2
    assert output.stats.retained == ((len(kept) + 2,) * 2,) * 2
    planned = kvjax.plan(tiny_model, prompt_tokens=200, max_new_tokens=3, policy=EveryFourth(10))
    assert planned.cache_bytes == output.cache.nbytes
    again = kvjax.generate(tiny_model, list(range(30)), cache=output.cache, **ask)
    seen = 200 + 3 + 30
    kept = [i for i in (*kept, *range(200, seen)) if i % 4 == 0 or i >= seen - 10]
    assert positions(again.cache) == [[*kept, seen, seen + 1]] * 2


def test_batch_answers_with_it(tiny_model, tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": f"Row {i}"}) + "\n" for i in range(2)))
    report = kvjax.batch.run(
        tiny_model, tmp_path / "in.jsonl", tmp_path / "out", policy="every_fourth", max_new_tokens=2, progress=False
    )
    assert report.answered == 2

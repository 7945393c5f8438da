"""Questions, answers and settings of a small run of ``kvjax eval``."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

from kvjax.eval.entries import Entry
from kvjax.eval.suites.item import Item
from kvjax.eval.suites.journal import Answer, Journal, RunSettings
from kvjax.eval.suites.runner import AFTER

SETTINGS = RunSettings("tiny", None, None, "ruler", ("a", "b"), 64, 2, False, 42, AFTER, "model", 2)
CACHES = [Entry("full"), Entry("streamingllm", 0.5)]


def question(number: int, task: str = "a") -> Item:
    context = f"The stone number {number} is red. " * (2 + number % 2)
    return Item(f"{task}/{number}", task, context, "Which one?", ("red", "e"), "string_match_all", 3, cell=(number, 50))


ITEMS = [question(0), question(1), question(2), question(3, "b"), question(4, "b")]


def answer(item: Item, policy: str = "full", text: str = "red") -> Answer:
    retained = None if policy == "full" else 0.5
    return Answer(policy, retained, item.id, text, 3, "length", 20, 50, 80, 100, 0.5, 0.25)


def journal_at(path: Path, settings: RunSettings = SETTINGS) -> Journal:
    """A journal that was begun."""
    found = Journal(path, settings)
    found.begin("digest")
    return found


def without_times(path: Path) -> list[dict[str, Any]]:
    """A journal's lines without what no two runs share."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.endswith("seconds")} for row in rows]


class QuickAsker:
    """Answers at once, with what tells whose answer it is."""

    def __init__(self, lm, storage):
        self._rng = random.Random(4)

    def keep_for(self, batch):
        pass

    def answers(self, entry, batch, policy):
        time.sleep(self._rng.random() / 1000)
        spent = {"read_seconds": self._rng.random(), "decode_seconds": 0.0}
        return [
            Answer(
                policy=entry.name, retained=entry.retained, item=one.item.id, text=f"{one.item.id} by {entry.name}",
                tokens=3, finish_reason="length", prompt_tokens=one.tokens, live_bytes=1, allocated_bytes=2,
                full_bytes=3, **spent,
            )
            for one in batch
        ]  # fmt: skip

"""Asks every question of every cache, a batch at a time, and keeps each answer."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from kvjax import progress
from kvjax.checkpoints.load import LanguageModel
from kvjax.errors import DoesNotFit, KvjaxError
from kvjax.eval.candidates import Candidate
from kvjax.eval.suites.data import digest_text
from kvjax.eval.suites.item import Item
from kvjax.eval.suites.journal import Answer, Journal
from kvjax.eval.suites.prompts import Prepared, prepare
from kvjax.generation import generate
from kvjax.output import Output
from kvjax.policies.best import resolve
from kvjax.policies.window_layers import for_model

#: When the question is asked: after the context was compressed, or in view of the compression.
AFTER, IN_VIEW = "after", "in view"


def digest(items: Sequence[Item]) -> str:
    """A digest of all questions and how they are scored."""
    return hashlib.sha256(digest_text([dataclasses.asdict(item) for item in items]).encode()).hexdigest()[:16]


def batches(prepared: Sequence[Prepared], size: int) -> list[list[Prepared]]:
    """The questions in batches, the same in every run: of one answer's length, the shortest prompts first.

    Compiled programs belong to lengths in buckets, and a batch takes as long as its longest row.
    """
    order = sorted(prepared, key=lambda one: (one.item.max_new_tokens, one.tokens, one.item.id))
    found = []
    for _, group in itertools.groupby(order, key=lambda one: one.item.max_new_tokens):
        rows = list(group)
        found += [rows[start : start + size] for start in range(0, len(rows), size)]
    return found


class Runner:
    """A loaded model and the questions it is asked.

    Args:
      lm: the model.
      items: every question.
      journal: where answers go; those of an earlier run are not asked for again.
      say: called with one line as things go on.

    Attributes:
      refused: by cache, why it has no answers.
    """

    def __init__(
        self, lm: LanguageModel, items: Sequence[Item], journal: Journal, say: Callable[[str], None] = lambda _: None
    ):
        self.lm, self.items, self._journal, self._say = lm, items, journal, say
        settings = journal.settings
        self._in_view, self._storage = settings.mode == IN_VIEW, settings.storage
        self.batches = batches([prepare(lm, item) for item in items], settings.batch_size)
        self.refused: dict[tuple[str, float | None], str] = {}
        self._told: set[str] = set()

    def missing(self, candidates: Sequence[Candidate]) -> int:
        """Questions that have no answer yet, over all caches."""
        return sum(self._misses(candidate, batch) for candidate in candidates for batch in self.batches)

    def _misses(self, candidate: Candidate, batch: Sequence[Prepared]) -> int:
        keys = ((candidate.name, candidate.retained, one.item.id) for one in batch)
        return sum(key not in self._journal.answers for key in keys)

    def run(self, candidates: Sequence[Candidate]) -> None:
        """Ask every cache what it has not answered.

        Raises:
          KeyboardInterrupt: Ctrl-C; the answers of finished batches are in the journal.
        """
        total = self.missing(candidates)
        done = 0
        with progress.stage("job", "kvjax eval:", unit="prompts", total=total, done=0) as shown:
            for number, candidate in enumerate(candidates):
                for batch in self.batches:
                    missing = self._misses(candidate, batch)
                    if not missing:
                        continue
                    try:
                        answers = self._ask(candidate, batch)
                    except KvjaxError as error:
                        self.refused[candidate.name, candidate.retained] = str(error)
                        self._say(f"{describe(candidate)}: {error}")
                        break
                    # A batch that was broken off is asked again as a whole: its rows are what they would have been.
                    for answer in answers:
                        self._journal.add(answer)
                    done += missing
                    shown.update(done, total, note=describe(candidate))
                else:
                    self._say(f"[{number + 1}/{len(candidates)}] {describe(candidate)}")
                jax.clear_caches()  # a policy's programs serve no other, and those of many caches take gigabytes

    def _ask(self, candidate: Candidate, batch: Sequence[Prepared]) -> list[Answer]:
        found = resolve(candidate.policy(), self.lm.config, later=not self._in_view)
        if found.line is not None and found.line not in self._told:
            self._told.add(found.line)
            self._say(found.line)
        policy = found.policy
        for_model(policy, self.lm.config).check(self.lm.config)
        try:
            return self._answers(candidate, batch, policy)
        except DoesNotFit:
            if len(batch) == 1:
                raise
        half = len(batch) // 2
        return self._ask(candidate, batch[:half]) + self._ask(candidate, batch[half:])

    def _answers(self, candidate: Candidate, batch: Sequence[Prepared], policy: Any) -> list[Answer]:
        room, kind = batch[0].item.max_new_tokens, {"policy": policy, "storage": self._storage}
        read: list[Output] = []
        if self._in_view:
            outputs = generate(self.lm, [one.context + one.question for one in batch], max_new_tokens=room, **kind)
        else:
            read = generate(self.lm, [one.context for one in batch], max_new_tokens=0, **kind)
            _check(read)
            caches = [output.cache for output in read]
            outputs = generate(self.lm, [one.question for one in batch], cache=caches, max_new_tokens=room)
        _check(outputs)
        before = [output.stats.prompt_seconds for output in read] or [0.0] * len(batch)
        return [
            Answer(
                policy=candidate.name,
                retained=candidate.retained,
                item=one.item.id,
                text=output.text,
                tokens=len(output.tokens),
                finish_reason=output.finish_reason,
                prompt_tokens=one.tokens,
                live_bytes=output.stats.live_cache_bytes,
                allocated_bytes=output.stats.cache_bytes,
                full_bytes=output.stats.full_cache_bytes,
                read_seconds=(output.stats.prompt_seconds + seconds) / len(batch),
                decode_seconds=output.stats.decode_seconds / len(batch),
            )
            for one, output, seconds in zip(batch, outputs, before, strict=True)
        ]


def _check(outputs: Sequence[Output]) -> None:
    """Raise KeyboardInterrupt where Ctrl-C ended the answers."""
    if any(output.finish_reason == "interrupted" for output in outputs):
        raise KeyboardInterrupt


def describe(candidate: Candidate) -> str:
    """A cache by its name, for people."""
    return candidate.name if candidate.retained is None else f"{candidate.name} at {candidate.retained:g}"

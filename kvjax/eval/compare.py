"""The comparison: the same questions asked of every policy's cache, at every fraction retained.

For each length the prompts are made and run through the model once (``recorded.py``); then every cache is made from
that record, asked, and let go. Each policy at each fraction needs programs of its own (compression, a later turn,
decoding), which cost more time than asking; they are compiled once, because every task, mode and turn has the same
number of rows and falls into the same buckets.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import jax

from kvjax.cache.quantisation import parse_storage
from kvjax.checkpoints.load import LanguageModel
from kvjax.errors import DoesNotFit, KvjaxError
from kvjax.eval.asking import Answers, Asker, Cost
from kvjax.eval.entries import Entry, profile_of
from kvjax.eval.follow_ups import ANSWER_TOKENS, TURNS
from kvjax.eval.material import Prompts, Talks, check_length, make_prompts, make_talks
from kvjax.eval.recorded import RecordedDecoder, can_replay
from kvjax.eval.results import AFTER, IN_VIEW, Row, Scored, Settings, accuracy
from kvjax.eval.ruler import match_all
from kvjax.eval.suites.estimate import in_words
from kvjax.generation import generate
from kvjax.interrupt import breakably, interruptible
from kvjax.policies.base import Policy
from kvjax.policies.best import resolve
from kvjax.policies.window_layers import for_model
from kvjax.runtime.compilation import compile_clock
from kvjax.tables import counted
from kvjax.waiting import in_thread

T = TypeVar("T")
#: Groups of answers as they come, with what they cost.
Asked = Iterator[tuple[Scored, Cost]]


class Comparison:
    """A loaded model, what is asked of it, and the rows measured so far.

    Args:
      lm: the model.
      settings: what is asked.
      rows: results of an earlier run with the same settings, which are kept.
      save: called with all rows after each new one.
      say: called with one line as things go on.
      speed: whether prefill is timed, which takes a program more for each policy.
    """

    def __init__(
        self,
        lm: LanguageModel,
        settings: Settings,
        *,
        rows: Sequence[Row] = (),
        save: Callable[[Sequence[Row]], None] = lambda _: None,
        say: Callable[[str], None] = lambda _: None,
        speed: bool = True,
    ):
        self.lm, self.settings, self.rows, self._speed = lm, settings, list(rows), speed
        self._save, self._say = save, say
        self._prefill_rates: dict[tuple[int, str], float] = {}

    def run(self, entries: Sequence[Entry], lengths: Sequence[int]) -> None:
        """Measure every cache that has no row yet.

        Raises:
          UsageError: a length that is too short for a task, beyond the model's context or too large for the memory.
          KeyboardInterrupt: Ctrl-C; what was measured before is in ``rows``, and saved.
        """
        for length in lengths:
            check_length(self.lm, self.settings, length)
        with interruptible() as interrupt, compile_clock() as clock:
            asker = Asker(self.lm, parse_storage(self.settings.storage), clock, interrupt)
            for length in lengths:
                self._forget_others(length, entries)
                done = {row.key for row in self.rows}
                missing = [c for c in entries if (length, c.name, c.retained) not in done]
                if not missing:
                    continue
                prompts, talks = self._material(length)
                spent: list[float] = []
                for number, entry in enumerate(missing, 1):
                    began, compiled = time.perf_counter(), clock.seconds
                    row = self._row(asker, entry, length, prompts, talks)
                    took = dict(seconds=time.perf_counter() - began, compile_seconds=clock.seconds - compiled)
                    self.rows.append(dataclasses.replace(row, **took))
                    self._save(self.rows)
                    spent.append(took["seconds"])
                    left = sum(spent) / number * (len(missing) - number)
                    more = f"; about {in_words(left)} left" if number < len(missing) else ""
                    self._say(f"[{number}/{len(missing)}] {describe(self.rows[-1])}{more}")
                    if number == len(missing) or missing[number].name != entry.name:
                        jax.clear_caches()  # a policy's programs serve no other, and those of 50 caches take gigabytes

    def _forget_others(self, length: int, entries: Sequence[Entry]) -> None:
        """Leave out rows whose policies had other profiles than now, and refusals that may have passed."""
        now = {(length, each.name, each.retained): profile_of(each) for each in entries}
        self.rows = [row for row in self.rows if row.key not in now or (now[row.key] == row.profile and not row.retry)]

    def _material(self, length: int) -> tuple[list[Prompts], Talks | None]:
        prompts = []
        for task in self.settings.tasks:
            self._say(f"{length} tokens: making {counted(self.settings.samples, 'sample')} of {task}, read once")
            prompts.append(_broken_off(functools.partial(make_prompts, self.lm, self.settings, task, length)))
        if not self.settings.turns:
            return prompts, None
        self._say(f"{length} tokens: making {counted(self.settings.samples, 'conversation')}, read once")
        return prompts, _broken_off(functools.partial(make_talks, self.lm, self.settings, length))

    def _row(self, asker: Asker, entry: Entry, length: int, prompts: Sequence[Prompts], talks: Talks | None) -> Row:
        row = Row(length, entry.name, entry.retained, profile=profile_of(entry))
        try:
            policy = entry.policy()
            for later in (True, False):
                found = resolve(policy, self.lm.config, later=later)
                if found.line is not None:
                    self._say(found.line)
                for_model(found.policy, self.lm.config).check(self.lm.config)
            asked = list(self._ask(asker, policy, prompts))
            if talks is not None:
                asked += self._talk(asker, policy, talks)
            prefill = self._prefill_rate(entry.name, length, policy, prompts[0]) if self._speed else 0.0
        except KvjaxError as error:
            return dataclasses.replace(row, refused=str(error), retry=isinstance(error, DoesNotFit))
        samples = self.settings.samples
        return dataclasses.replace(
            row,
            answers=tuple(scored for scored, _ in asked),
            prefill_tokens_per_second=prefill,
            decode_tokens_per_second=_decode_rate([cost for _, cost in asked], samples),
            **_mean_bytes([cost for scored, cost in asked if scored.mode == AFTER], samples),
        )

    def _ask(self, asker: Asker, policy: Policy, tasks: Sequence[Prompts]) -> Asked:
        after, known = (resolve(policy, self.lm.config, later=later).policy for later in (True, False))
        for task in tasks:
            made = self._record_for(after, task)
            answers = asker.ask_onto(asker.compress(made, task.contexts, after), task.questions, task.room)
            yield _score(AFTER, task.task, answers, task.outputs)
            answers = asker.ask_fresh(self._record_for(known, task), task.wholes, known, task.room)
            yield _score(IN_VIEW, task.task, answers, task.outputs)

    def _talk(self, asker: Asker, policy: Policy, talks: Talks) -> Asked:
        first, policy = talks.first, resolve(policy, self.lm.config, later=True).policy  # as in a kvjax.Chat
        answers = asker.ask_fresh(self._record_for(policy, first), first.wholes, policy, first.room)
        yield _score(TURNS[0], "", answers, first.outputs)
        for turn in range(1, len(TURNS)):
            answers = asker.ask_onto(answers.cache, talks.prompts(turn), ANSWER_TOKENS)
            yield _score(TURNS[turn], "", answers, talks.outputs(turn))

    def _record_for(self, policy: Policy, prompts: Prompts) -> RecordedDecoder | None:
        """The record, or None for a policy that needs the model."""
        return prompts.made if can_replay(policy, self.lm.config) else None

    def _prefill_rate(self, name: str, length: int, policy: Policy, prompts: Prompts) -> float:
        """Tokens per second of one prompt through the whole prefill; what is retained hardly changes it."""
        if (length, name) not in self._prefill_rates:
            for _ in range(2):  # the first call compiles; the second is taken
                output = generate(
                    self.lm, prompts.wholes[0], policy=policy, storage=self.settings.storage, max_new_tokens=0
                )
            self._prefill_rates[length, name] = output.stats.prompt_tokens_per_second
        return self._prefill_rates[length, name]


def _broken_off(make: Callable[[], T]) -> T:
    """Make it, and stop waiting at Ctrl-C: the model reads all samples in one program, which hears nothing."""
    return breakably(lambda: in_thread(make))


def _score(mode: str, task: str, answers: Answers, outputs: Sequence[tuple[str, ...]]) -> tuple[Scored, Cost]:
    # The answers hold their cache; what is returned does not.
    scores = tuple(match_all(text, expected) for text, expected in zip(answers.texts, outputs, strict=True))
    return Scored(mode, task, scores, tuple(tokens[0] for tokens in answers.tokens)), answers.cost


def _mean_bytes(costs: Sequence[Cost], samples: int) -> dict[str, float]:
    names = ("live_bytes", "allocated_bytes", "full_bytes")
    return {name: sum(getattr(cost, name) for cost in costs) / (samples * len(costs)) for name in names}


def _decode_rate(costs: Sequence[Cost], samples: int) -> float:
    seconds = sum(cost.seconds for cost in costs)
    return samples * sum(cost.steps for cost in costs) / seconds if seconds > 0 else 0.0


def describe(row: Row) -> str:
    """A row in one line, for progress."""
    if row.refused is not None:
        return f"{row.name}: {row.refused}"
    shown = ", ".join(f"{mode} {accuracy(row, mode).mean:.2f}" for mode in (AFTER, IN_VIEW))
    return f"{row.name}: {shown}; {row.seconds:.0f} s, {row.compile_seconds:.0f} of them compiling"

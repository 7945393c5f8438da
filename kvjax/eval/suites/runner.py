"""Asks every question of every cache, a batch at a time, on one process or many, and keeps each answer."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from kvjax import progress
from kvjax.checkpoints.digest import weights_digest
from kvjax.checkpoints.load import LanguageModel
from kvjax.errors import DoesNotFit, KvjaxError
from kvjax.eval.entries import Entry, entry_name, profile_of
from kvjax.eval.suites.asker import Asker
from kvjax.eval.suites.data import digest_text
from kvjax.eval.suites.hosts import Piece, Pieces, agree
from kvjax.eval.suites.item import Item
from kvjax.eval.suites.journal import Answer, Journal
from kvjax.eval.suites.prompts import Prepared, prepare
from kvjax.policies.best import resolve
from kvjax.policies.window_layers import for_model
from kvjax.runtime.distributed import Group
from kvjax.tables import counted

#: When the question is asked: after the context was compressed, or in view of the compression.
AFTER, IN_VIEW = "after", "in view"


def digest(items: Sequence[Item]) -> str:
    """A digest of all questions and how they are scored."""
    return hashlib.sha256(digest_text([_described(item) for item in items]).encode()).hexdigest()[:16]


def _described(item: Item) -> dict[str, Any]:
    """An item's fields; without those that earlier versions had not, where they are empty, so that runs go on."""
    found = dataclasses.asdict(item)
    return {name: value for name, value in found.items() if value or name not in ("earlier", "shares", "choices")}


def batches(prepared: Sequence[Prepared], size: int) -> list[list[Prepared]]:
    """The questions in batches, the same in every run: of one answer's length, the shortest prompts first."""
    return [batch for group in grouped(prepared, size) for batch in group]


def grouped(prepared: Sequence[Prepared], size: int) -> list[list[list[Prepared]]]:
    """The batches, those together that go on from the same caches.

    Compiled programs belong to lengths in buckets, and a batch takes as long as its longest row. Questions that share a
    context stand in batches that follow each other, in their order: the first of ``size`` contexts, then the second.
    """
    of_context: dict[str, list[Prepared]] = {}
    for one in prepared:
        of_context.setdefault(one.item.shares or f"{one.item.id} alone", []).append(one)

    def rooms(questions: Sequence[Prepared]) -> tuple[tuple[int, int], ...]:
        return tuple((one.item.max_new_tokens, len(one.earlier)) for one in questions)

    def place(questions: Sequence[Prepared]) -> tuple[Any, ...]:
        return rooms(questions), max(one.tokens for one in questions), questions[0].item.id

    order = sorted(of_context.values(), key=place)
    found = []
    for _, group in itertools.groupby(order, key=rooms):
        contexts = list(group)
        for start in range(0, len(contexts), size):
            found.append([list(batch) for batch in zip(*contexts[start : start + size], strict=True)])
    return found


class Runner:
    """A loaded model and the questions it is asked.

    Args:
      lm: the model.
      items: every question.
      journal: where answers go; those of an earlier run are not asked for again.
      say: called with one line as things go on.
      everyone: the processes that share the run, each with a model, the same questions and a journal in one folder.

    Attributes:
      refused: by cache, why it has no answers.
      answered: how many questions this process has answered.
    """

    def __init__(
        self,
        lm: LanguageModel,
        items: Sequence[Item],
        journal: Journal,
        say: Callable[[str], None] = lambda _: None,
        everyone: Group | None = None,
    ):
        self.lm, self.items, self._journal, self._say = lm, items, journal, say
        self._everyone = Group() if everyone is None else everyone
        settings = journal.settings
        prepared = [prepare(lm, item) for item in items]
        if settings.mode == IN_VIEW:
            prepared = [one.in_view() for one in prepared]
        self._groups = grouped(prepared, settings.batch_size)
        self.batches = [batch for group in self._groups for batch in group]
        self._asker = Asker(lm, settings.storage)
        self.refused: dict[tuple[str, float | None], str] = {}
        self.answered = 0
        self._told: set[str] = set()

    def begin(self, entries: Sequence[Entry]) -> None:
        """Open the journal, whose answers are of these questions, these weights and these caches' profiles."""
        everyone = self._everyone
        model = f"{self.lm.params.number_format} {weights_digest(self.lm.params)}"
        questions = f"{digest(self.items)} in {model}"
        agree(everyone, "questions", {"questions and model": questions})
        if everyone.process == 0:
            self._journal.begin(questions)
        everyone.gather("begun", "")
        if everyone.process > 0:
            self._journal.begin(questions)
        for process in everyone.gather("open", ""):
            self._journal.check_seen(process)
        self._journal.forget_others({_key(each): profile_of(each) for each in entries})

    def missing(self, entries: Sequence[Entry]) -> int:
        """Questions that have no answer yet, over all caches."""
        return sum(self._misses(entry, batch) for entry in entries for batch in self.batches)

    def _misses(self, entry: Entry, batch: Sequence[Prepared]) -> int:
        keys = ((*_key(entry), one.item.id) for one in batch)
        return sum(key not in self._journal.answers for key in keys)

    def run(self, entries: Sequence[Entry]) -> None:
        """Ask every cache what it has not answered; of several processes each asks what it claims.

        In the end process 0's journal holds the answers of all.

        Raises:
          PeerFailed: another process has failed.
          KeyboardInterrupt: Ctrl-C; the answers of finished batches are in the journal.
        """
        total, pieces = self.missing(entries), Pieces(self._everyone, len(entries), len(self._groups))
        with progress.stage("job", "kvjax eval:", unit="prompts", total=total, done=0) as shown:

            def told(entry: Entry) -> None:
                self._everyone.tell("answered", str(self.answered))
                of_others = {process: int(count) for process, count in self._everyone.told("answered").items()}
                of_all = of_others | {self._everyone.process: self.answered}
                shown.update(min(sum(of_all.values()), total), total, note=describe(entry))

            while pieces:
                answered: list[Piece] = []
                refused: dict[int, str] = {}
                for number in pieces.caches():
                    try:
                        for group in pieces.claims(number):
                            self._answer(entries[number], self._groups[group], told)
                            answered.append((number, group))
                    except _Refused as error:
                        refused[number] = self.refused[_key(entries[number])] = str(error)
                        self._say(f"{describe(entries[number])}: {error}")
                    else:
                        self._say(f"[{number + 1}/{len(entries)}] {describe(entries[number])}")
                    self._asker.keep_for(())
                    jax.clear_caches()  # a policy's programs serve no other, and those of many caches take gigabytes
                refused = pieces.told(answered, refused)
                self.refused |= {_key(entries[number]): sentence for number, sentence in refused.items()}
                if pieces:  # somebody was killed: its last answers are not asked for again
                    self._journal.read_again()
        if self._everyone.processes > 1:
            self._gather(entries)

    def _gather(self, entries: Sequence[Entry]) -> None:
        """Put everybody's answers into process 0's journal."""
        if self._everyone.process > 0:
            self._journal.close()
        lost = set(range(self._everyone.processes)) - self._everyone.gather("closed", "").keys()
        if lost:
            names = f"process{'es' * (len(lost) > 1)} {', '.join(map(str, sorted(lost)))}"
            self._say(f"{names} lost, whose questions the others answered")
        if self._everyone.process == 0:
            ids = [one.item.id for batch in self.batches for one in batch]
            self._journal.gather((*_key(entry), one) for entry in entries for one in ids)
            asked = [entry for entry in entries if _key(entry) not in self.refused]
            if missing := self.missing(asked):
                raise KvjaxError(
                    f"{counted(missing, 'answer')} of other processes cannot be seen in {self._journal.path.parent} "
                    "yet; the same command asks for what is not there."
                )

    def _answer(self, entry: Entry, group: Sequence[Sequence[Prepared]], told: Callable[[Entry], None]) -> None:
        """Ask a cache the questions of a group that it has not answered, and keep the answers."""
        for place, batch in enumerate(group):
            self._everyone.check()
            if not (missing := self._misses(entry, batch)):
                continue
            try:
                answers = self._ask(entry, batch)
            except KvjaxError as error:
                raise _Refused(str(error)) from error
            # A batch that was broken off is asked again as a whole: its rows are what they would have been.
            for answer in answers:
                self._journal.add(answer)
            self.answered += missing
            self._asker.keep_for(group[place + 1] if place + 1 < len(group) else ())
            told(entry)

    def _ask(self, entry: Entry, batch: Sequence[Prepared]) -> list[Answer]:
        found = resolve(entry.policy(), self.lm.config, later=bool(batch[0].question))
        if found.line is not None and found.line not in self._told:
            self._told.add(found.line)
            self._say(found.line)
        policy = found.policy
        for_model(policy, self.lm.config).check(self.lm.config)
        try:
            return self._asker.answers(entry, batch, policy)
        except DoesNotFit:
            if len(batch) == 1:
                raise
        self._asker.keep_for(())
        half = len(batch) // 2
        return self._ask(entry, batch[:half]) + self._ask(entry, batch[half:])


def _key(entry: Entry) -> tuple[str, float | None]:
    return entry.name, entry.retained


class _Refused(KvjaxError):
    """A cache cannot be asked."""


def describe(entry: Entry) -> str:
    """A cache by its name, for people."""
    return entry_name(entry.name, entry.retained)

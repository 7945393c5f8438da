"""Asks a batch of questions of compressed caches; what several questions share is read and compressed once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from kvjax.checkpoints.load import LanguageModel
from kvjax.eval.entries import Entry, profile_of
from kvjax.eval.suites.journal import Answer
from kvjax.eval.suites.prompts import Prepared
from kvjax.generation import generate
from kvjax.output import Output, Score
from kvjax.policies.base import Policy
from kvjax.scoring import score

#: What was read before a question, as :attr:`Prepared.shared` names it.
_Read = tuple[tuple[int, ...], ...]


class Asker:
    """A loaded model that is asked; it holds the caches that the next batch goes on from.

    Args:
      lm: the model.
      storage: of the caches' rows, as ``generate`` takes it.
    """

    def __init__(self, lm: LanguageModel, storage: str):
        self._lm, self._storage = lm, storage
        self._held: dict[_Read, Output] = {}

    def keep_for(self, batch: Sequence[Prepared]) -> None:
        """Let go of every cache that no question of the next batch goes on from."""
        wanted = {read[: count + 1] for read in (one.shared for one in batch) for count in range(len(read))}
        self._held = {read: output for read, output in self._held.items() if read in wanted}

    def answers(self, entry: Entry, batch: Sequence[Prepared], policy: Policy) -> list[Answer]:
        """The answers to a batch of questions that have one answer's length and equally many earlier turns.

        Raises:
          DoesNotFit: the rows do not fit the device together.
          KeyboardInterrupt: Ctrl-C.
        """
        room, texts = batch[0].item.max_new_tokens, None
        if not batch[0].question:  # it is part of what is compressed
            prompts = [one.context for one in batch]
            outputs = generate(self._lm, prompts, max_new_tokens=room, policy=policy, storage=self._storage)
            _check(outputs)
            read = [outputs]
        else:
            outputs, read = self._states(batch, policy)
            caches = [output.cache for output in outputs]
            if batch[0].choices:
                texts = self._scored(batch, caches)
            else:
                outputs = generate(self._lm, [one.question for one in batch], cache=caches, max_new_tokens=room)
                _check(outputs)
                read = [*read, outputs]
        texts = [output.text for output in outputs] if texts is None else texts
        profile = profile_of(entry)
        seconds = sum(piece[0].stats.prompt_seconds for piece in read) / len(batch)
        return [
            Answer(
                policy=entry.name,
                retained=entry.retained,
                item=one.item.id,
                text=text,
                tokens=len(output.tokens),
                finish_reason=output.finish_reason,
                prompt_tokens=one.tokens,
                live_bytes=output.stats.live_cache_bytes,
                allocated_bytes=output.stats.cache_bytes,
                full_bytes=output.stats.full_cache_bytes,
                read_seconds=seconds,
                decode_seconds=output.stats.decode_seconds / len(batch),
                read_tokens=sum(piece[row].stats.prompt_tokens for piece in read),
                first_token=output.tokens[0] if output.tokens else None,
                profile=profile,
            )
            for row, (one, output, text) in enumerate(zip(batch, outputs, texts, strict=True))
        ]

    def _states(self, batch: Sequence[Prepared], policy: Policy) -> tuple[list[Output], list[list[Output]]]:
        """Every row's cache when its question comes, and what was read now to get there.

        The caches of the last batch are gone on from where all rows have them; else all are read, the same rows
        together as ever.
        """
        reads = [one.shared for one in batch]
        done = max((n for n in range(1, len(reads[0]) + 1) if all(r[:n] in self._held for r in reads)), default=0)
        states = [self._held[read[:done]] for read in reads] if done else []
        read: list[list[Output]] = []
        for level in range(done, len(reads[0])):
            pieces = [list(one[level]) for one in reads]
            kind: dict[str, Any] = {"cache": [state.cache for state in states]} if states else {"policy": policy}
            states = generate(self._lm, pieces, max_new_tokens=0, storage=None if states else self._storage, **kind)
            _check(states)
            read.append(states)
            self._held.update({one[: level + 1]: state for one, state in zip(reads, states, strict=True)})
        return states, read

    def _scored(self, batch: Sequence[Prepared], caches: Sequence[Any]) -> list[str]:
        """Scores of each choice (:func:`kvjax.score`), as JSON, a text for every row."""
        rows = [
            (one.question, choice, cache) for one, cache in zip(batch, caches, strict=True) for choice in one.choices
        ]
        questions, choices, held = map(list, zip(*rows, strict=True))
        found = iter(score(self._lm, questions, choices, cache=held))
        return [json.dumps([_facts(next(found)) for _ in one.choices]) for one in batch]


def _facts(found: Score) -> dict[str, float]:
    """A continuation's log-probability, its tokens, and how many of them were the likeliest ones."""
    likeliest = sum(mine == best for mine, best in zip(found.tokens, found.best_tokens, strict=True))
    return {"logprob": found.total, "tokens": len(found.tokens), "likeliest": likeliest}


def _check(outputs: Iterable[Output]) -> None:
    """Raise KeyboardInterrupt where Ctrl-C ended the answers."""
    if any(output.finish_reason == "interrupted" for output in outputs):
        raise KeyboardInterrupt

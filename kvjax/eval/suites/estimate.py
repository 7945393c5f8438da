"""Estimates the time of a run: its multiplications and bytes read, over this device's measured rates."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from kvjax.checkpoints.load import LanguageModel
from kvjax.eval.suites.prompts import Prepared
from kvjax.memory_needs import weights_bytes
from kvjax.policies.base import Policy
from kvjax.runtime import prefill_speed

#: Rows and columns of the product that is timed.
_SIZE = 1024


@dataclasses.dataclass(frozen=True)
class Reading:
    """Prompts that are read together: how many, their tokens, and those that were read before them."""

    rows: int
    tokens: int
    seen: int = 0


def readings(batches: Sequence[Sequence[Prepared]]) -> tuple[list[Reading], list[Reading]]:
    """Tokens that batches read with one cache: of contexts, which are compressed, and of what is read onto them.

    What the batch before has read is not read again.
    """
    contexts, onto, held = [], [], set[tuple[tuple[int, ...], ...]]()
    for batch in batches:
        reads = [one.shared for one in batch]
        levels = len(reads[0])
        done = max((n for n in range(1, levels + 1) if all(read[:n] in held for read in reads)), default=0)
        seen = max(sum(map(len, read[:done])) for read in reads)
        for level in range(done, levels):
            tokens = max(len(read[level]) for read in reads)
            (onto if level else contexts).append(Reading(len(batch), tokens, seen))
            seen += tokens
        rows = sum(max(len(one.choices), 1) for one in batch)
        asked = max(len(one.question) + max(map(len, one.choices), default=0) for one in batch)
        if asked:
            onto.append(Reading(rows, asked, seen))
        held = {read[:n] for read in reads for n in range(1, levels + 1)}
    return contexts, onto


def seconds(lm: LanguageModel, batches: Sequence[Sequence[Prepared]], policies: Sequence[Policy]) -> float:
    """Seconds of all answers, if each is as long as it may be; programs are compiled besides."""
    contexts, onto = readings(batches)
    steps = sum(batch[0].item.max_new_tokens for batch in batches)
    repeating = sum(policy.signals.repeat is not None for policy in policies)
    once, twice = (_seconds(lm, contexts, onto, steps, repeats) for repeats in (False, True))
    return (len(policies) - repeating) * once + repeating * twice


def work_seconds(lm: LanguageModel, prompts: Sequence[tuple[int, int]], steps: int, *, repeats: bool = False) -> float:
    """Seconds of reading batches of (rows, tokens), and of so many decode steps; programs are compiled besides.

    ``repeats``: the policy has the model repeat each prompt, which reads it again, attending to all of it.
    """
    return _seconds(lm, [Reading(rows, tokens) for rows, tokens in prompts], [], steps, repeats)


def _seconds(
    lm: LanguageModel, contexts: Sequence[Reading], onto: Sequence[Reading], steps: int, repeats: bool
) -> float:
    again = [Reading(one.rows, one.tokens, one.tokens) for one in contexts] if repeats else []
    works = [(prefill_speed.work(lm.config, 1, one.tokens, one.seen), one.rows) for one in [*contexts, *onto, *again]]
    reading, longest = sum(work * rows for work, rows in works), max((work for work, _ in works), default=0.0)
    multiplications, bytes_read = _speeds(lm.params.dtype)
    known = prefill_speed.expected_seconds(lm.config, reading, longest)
    weights = weights_bytes(lm.config, lm.params.dtype)
    return (reading / multiplications if known is None else known) + steps * weights / bytes_read


def _speeds(dtype: jnp.dtype) -> tuple[float, float]:
    """Multiplications and bytes a second, of a square product and of one with a vector."""
    square, vector = jnp.ones((_SIZE, _SIZE), dtype), jnp.ones((1, _SIZE), dtype)
    product = _timed(lambda: square @ square)
    read = _timed(lambda: vector @ square)
    return _SIZE**3 / product, square.nbytes / read


def _timed(work: Callable[[], jax.Array]) -> float:
    jax.block_until_ready(work())
    began = time.perf_counter()
    for _ in range(3):
        jax.block_until_ready(work())
    return max((time.perf_counter() - began) / 3, 1e-7)


def in_words(count: float) -> str:
    """Seconds as people say them."""
    if count < 90:
        return f"{max(count, 1):.0f} s"
    return f"{count / 60:.0f} min" if count < 5400 else f"{count / 3600:.1f} h"

"""The options of rows as arrays on the device, for the compiled decode loop."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from kvjax.checkpoints.load import LanguageModel
from kvjax.options import GenerationOptions
from kvjax.runtime.decode import Controls
from kvjax.runtime.sampling import Sampling, numbers_of
from kvjax.runtime.stopping import StopTable, stop_table
from kvjax.text.tokenizer import Tokenizer


def controls_of(
    lm: LanguageModel, options: Sequence[GenerationOptions], draws: Any, limits: Sequence[int], stops: StopTable
) -> Controls:
    """The controls of rows, on the device.

    Args:
      options: of each row. draws: [B, 3] what each draws by. limits: tokens that each may generate, below 2**31.
      stops: what ends each row.
    """
    config = lm.config
    numbers = [numbers_of(own, config.vocab_size) for own in options]
    arrays: dict[str, Any] = {name: np.array([own[name] for own in numbers]) for name in numbers[0]}
    arrays |= {"known": np.int32(known_ids(lm)), "draws": np.asarray(draws).astype(np.uint32)}
    logprobs = any(own.logprobs for own in options)
    ends: Any = np.array(limits, np.int32), np.int32(config.max_position), np.bool_(logprobs), np.int32(1)
    # Put there as they are: conversions would be programs of their own.
    return jax.device_put(Controls(Sampling(**arrays), stops, *ends))


def known_ids(lm: LanguageModel) -> int:
    """The number of ids, the first ones, that may be drawn."""
    vocabulary = lm.config.vocab_size
    return min(lm.tokenizer.vocab_size or vocabulary, vocabulary)


def stops_of(lm: LanguageModel, strings: tuple[str, ...], ids: tuple[int, ...], rows: int) -> StopTable:
    """What ends so many rows: these strings and token ids."""
    if not strings:
        return _of_ids(ids, lm.config.vocab_size, rows)
    return _of_strings(lm.tokenizer, strings, ids, lm.config.vocab_size, rows)


@functools.lru_cache(maxsize=2)  # a tenth of a second for 49,152 tokens, and megabytes; a conversation repeats its own
def _of_strings(
    tokenizer: Tokenizer, strings: tuple[str, ...], ids: tuple[int, ...], vocabulary: int, rows: int
) -> StopTable:
    return stop_table(strings, ids, tokenizer.token_bytes(), vocabulary, rows)


@functools.lru_cache(maxsize=8)
def _of_ids(ids: tuple[int, ...], vocabulary: int, rows: int) -> StopTable:
    return stop_table((), ids, (), vocabulary, rows)

"""The same model with its weights as floats, timed in turn with the quantised one."""

from __future__ import annotations

import dataclasses
import time

import jax
import numpy as np

from kvjax.bench.measurements import DecodeTimer
from kvjax.checkpoints.load import LanguageModel
from kvjax.generation import generate
from kvjax.policies import Full
from kvjax.runtime.synthetic import filled_cache


@dataclasses.dataclass(frozen=True)
class _Decoding:
    """A full cache, and steps from it."""

    cache_bytes: int
    timer: DecodeTimer


class FloatsPeer:
    """Decode and prefill times of a model of floats under the full cache.

    Args:
      lm: the model. steps: tokens that :meth:`decode_seconds` decodes. room: tokens decoded in a case, at most.
    """

    name = "floats"

    def __init__(self, lm: LanguageModel, steps: int, room: int):
        self._lm, self._steps, self._room = lm, steps, room
        self.about = f"the same model's weights as {lm.params.dtype}, full cache"

    def filled_cache(self, batch: int, context: int) -> _Decoding:
        """A cache as after a prompt of ``context`` tokens, without running it."""
        params, config = self._lm.params, self._lm.config
        cache = filled_cache(config, Full(), batch, context, params.dtype, new_capacity=self._room)
        timer = DecodeTimer(params, jax.block_until_ready(cache), self._steps)
        timer()  # compiles
        return _Decoding(cache.nbytes, timer)

    def decode_seconds(self, cache: _Decoding, batch: int, context: int, steps: int) -> float:
        """Seconds of one greedy step, over :attr:`steps` of them; the cache grows on."""
        return cache.timer()

    def prefill_seconds(self, tokens: np.ndarray) -> float:
        """Seconds until the first next token of a prompt, [B, T] ids; compilation apart."""
        ids = np.asarray(tokens).tolist()
        start = time.perf_counter()
        found = generate(self._lm, ids, max_new_tokens=0)
        jax.block_until_ready([output.cache for output in found])
        return time.perf_counter() - start - found[0].stats.compile_seconds

    @staticmethod
    def nbytes(cache: _Decoding) -> int:
        """Bytes that the cache holds."""
        return cache.cache_bytes

"""Which tokens the official LagKV code keeps, and the inputs it was asked with; ``scripts/golden_lagkv.py`` made them.

Only kept indices are stored (``lagkv_official.npz``); keys and values come back from NumPy's frozen ``RandomState``.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import zlib

import numpy as np

KEPT = pathlib.Path(__file__).parents[1] / "golden" / "lagkv_official.npz"
HEADS, DIM = 3, 8
# Token counts around every boundary of sink + n x lag: nothing happens below sink + 2 lag, one partition goes there.
SETTINGS: tuple[tuple[int, int, float], ...] = (
    (4, 8, 0.5),
    (4, 8, 0.25),
    (0, 8, 0.3),  # no sinks; 0.3 x 8 floors to 2
    (16, 16, 0.25),
    (3, 5, 0.6),
    (4, 8, 1.0),  # keeps everything
    (4, 8, 0.05),  # floors to no token of a partition
    (2, 10, 0.7),  # 0.7 x 10 is 7.000000000000001 or 6.999...: the floor must not lose a token to rounding
    (2, 100, 0.29),  # 0.29 x 100 is 28.999999999999996 in floating point: the official code keeps 28
)


@dataclasses.dataclass(frozen=True)
class LagCase:
    """One question to the official code and its answer.

    Attributes:
      variant: "lag" (LagKV) or "l2" (its L2KV, on a layer it does not skip).
      sink, lag: tokens. ``ratio`` is the share of a partition that is kept (kvjax's ``partition_ratio``).
      prompt: tokens given in one call.
      steps: tokens given afterwards, in calls of ``step`` tokens each (the last may be smaller).
      step: 1 is decoding; more is a chunked prefill.
      kept: original token indices of every head, ascending, int [HEADS, kept].
    """

    variant: str
    sink: int
    lag: int
    ratio: float
    prompt: int
    steps: int
    step: int
    kept: np.ndarray

    @property
    def tokens(self) -> int:
        """All tokens seen."""
        return self.prompt + self.steps

    @property
    def k(self) -> np.ndarray:
        """Keys of all tokens in order, float32 [1, HEADS, tokens, DIM]."""
        return keys_values(self.sink, self.lag, self.tokens)[0]

    @property
    def v(self) -> np.ndarray:
        """Values, as ``k``."""
        return keys_values(self.sink, self.lag, self.tokens)[1]

    @property
    def name(self) -> str:
        """Key of the case in the file."""
        return _name(self.variant, self.sink, self.lag, self.ratio, self.prompt, self.steps, self.step)


def _name(variant: str, sink: int, lag: int, ratio: float, prompt: int, steps: int, step: int) -> str:
    return f"{variant},{sink},{lag},{ratio},{prompt},{steps},{step}"


@functools.lru_cache(maxsize=64)
def keys_values(sink: int, lag: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Random keys and values [1, HEADS, tokens, DIM]; every channel has its own scale and offset, as real keys do."""
    random = np.random.RandomState(zlib.crc32(f"{sink}/{lag}/{tokens}".encode()))
    scale = 2.0 ** random.randint(-2, 3, (2, 1, HEADS, 1, DIM))
    offset = 3 * random.standard_normal((2, 1, HEADS, 1, DIM))
    both = (random.standard_normal((2, 1, HEADS, tokens, DIM)) * scale + offset).astype(np.float32)
    return both[0], both[1]


def questions() -> list[LagCase]:
    """Every case without its answer."""
    cases = []
    for sink, lag, ratio in SETTINGS:
        near = {sink + n * lag + delta for n in (2, 3, 4) for delta in (-1, 0, 1)}
        prefill = [(n, 0, 1) for n in sorted({1, sink + lag, *near, sink + 5 * lag + lag // 2} - {0})]
        # Decoding after a short prompt, after one that was compressed, and a chunked prefill as the README feeds it.
        decode = [(1, sink + 4 * lag + 2, 1), (sink + 2 * lag + 1, 3 * lag, 1), (sink + 4 * lag - 1, 2 * lag + 1, 1)]
        chunked = [(sink + 2 * lag, 3 * lag + 1, lag), (sink + 2 * lag, 2 * lag - 1, lag), (sink + lag, 4 * lag, 3)]
        shapes = prefill + decode + chunked
        variants = ("lag", "l2") if ratio in (0.5, 0.6) else ("lag",)
        empty = np.zeros((HEADS, 0), np.int64)
        cases += [LagCase(v, sink, lag, ratio, p, s, c, empty) for v in variants for p, s, c in shapes]
    return cases


def load_cases() -> list[LagCase]:
    """Every case with the tokens the official code kept."""
    with np.load(KEPT) as kept:
        return [dataclasses.replace(case, kept=kept[case.name].astype(np.int64)) for case in questions()]

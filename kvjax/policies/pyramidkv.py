"""PyramidKV: SnapKV with more tokens in early layers than in late ones (Cai et al., arXiv 2406.02069)."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from kvjax.checks import MOST_SLOTS, whole_number
from kvjax.model.config import ModelConfig
from kvjax.policies.base import HostOrTraced, numpy_or_jax
from kvjax.policies.snapkv import SnapKV


@dataclasses.dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV whose budget falls linearly with depth and averages to the one asked for (PyramidKV, arXiv 2406.02069).

    With C the average budget and W the window, the last layer selects ``(C - W) // beta`` tokens of the prefix, the
    first as many more than C - W as the last selects fewer, and the layers between lie on a line; every layer keeps
    its window. Where the first layer would select more than there is, it keeps everything and the last layer gets
    what that leaves, so that the row still holds L x C in all. Layers that mirror each other are rounded in opposite
    directions: the total of a uniform budget is met exactly, to the token.

    A row that fits C is left whole in every layer, so under a fixed ``budget`` even the last layers are allocated C;
    under ``ratio`` they are allocated what they keep. The official code falls back to a uniform budget below
    2 x (C - W) tokens; here, as in the paper's text, the line only becomes flatter.
    """

    beta: int = 20

    def __post_init__(self) -> None:
        whole_number("beta", self.beta, 1, MOST_SLOTS)
        super().__post_init__()

    def size(self, config: ModelConfig, layer: int, total: HostOrTraced) -> HostOrTraced:
        xp, average = numpy_or_jax(total), super().size(config, layer, total)
        depth = config.num_layers - 1
        if depth == 0:
            return average
        prefix = average - self.window
        room = xp.maximum(total - self.window, prefix)
        first = xp.minimum(2 * prefix - prefix // self.beta, room)
        last = 2 * prefix - first
        # From whichever end is nearer, so that a layer and its mirror image sum to exactly twice the average.
        steps = min(layer, depth - layer) * (first - last) // depth
        selected = first - steps if 2 * layer <= depth else last + steps
        return (selected + self.window).astype(xp.int32)

    def most(self, config: ModelConfig, layer: int, prompt: int) -> int:
        """See :meth:`Selecting.most`; in late layers the longest row need not keep the most."""
        return _most(self, config, layer, prompt)


@functools.lru_cache(maxsize=4096)
def _most(policy: PyramidKV, config: ModelConfig, layer: int, prompt: int) -> int:
    # Every length is tried: exact where a formula of the worst one would have to know about roundings.
    totals = np.arange(1, prompt + 1, dtype=np.int32)
    return int(np.minimum(policy.size(config, layer, totals), totals).max())

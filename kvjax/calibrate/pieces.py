"""Texts as pieces of tokens, which calibration reads one by one."""

from __future__ import annotations

from collections.abc import Sequence

from kvjax.checkpoints.load import LanguageModel
from kvjax.errors import UsageError


def pieces_of(lm: LanguageModel, texts: Sequence[str], tokens: int) -> list[list[int]]:
    """The texts' ids in pieces of ``tokens``, or of what fits the context; the last of each text may be shorter.

    Raises:
      UsageError: no text, or a model without global layers, of which nothing could be used.
    """
    if isinstance(texts, str):
        raise UsageError("The texts are one text; give a list of texts.")
    config = lm.config
    if config.sliding and None not in config.windows:
        raise UsageError("Every layer of this model sees a window of tokens; a policy has nothing to choose there.")
    size = min(tokens, config.max_position)
    pieces = [ids[i : i + size] for ids in map(lm.tokenizer.encode, texts) for i in range(0, len(ids), size)]
    if max(map(len, pieces), default=0) < 2:
        raise UsageError("The texts have no tokens to read; give some pages.")
    return pieces

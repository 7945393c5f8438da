"""SentencePiece's BPE of a GGUF (``tokenizer.ggml.model`` "llama"), as Llama 2, Mistral, Gemma and Phi-3 have it.

The file has a score of every piece; merges follow from them, as transformers' converters of SentencePiece models make
them. Characters without a piece are spelled in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvjax.errors import WeightsError
from kvjax.text.gguf_vocabulary import NORMAL, SPACE, UNKNOWN, Vocabulary

if TYPE_CHECKING:
    import tokenizers


def sentencepiece(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """The tokenizer, without its added tokens.

    A file says in ``tokenizer.ggml.add_space_prefix`` whether a space is put before the text, and after each control
    token in it; where it does not say, it is.

    Raises WeightsError when there is not a score for every piece.
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers

    scores, count = vocabulary.metadata.get("tokenizer.ggml.scores"), len(vocabulary.tokens)
    if not isinstance(scores, list) or len(scores) < count or not all(map(_is_number, scores)):
        raise WeightsError(f"{vocabulary.origin} is corrupt: tokenizer.ggml.scores is not a number for each token.")
    unknown = vocabulary.role("unknown")
    if unknown is None:
        unknown = next(iter(vocabulary.of_kind(UNKNOWN)), None)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocabulary.ids,
            merges_of(_pieces(vocabulary, scores)),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = bool(vocabulary.metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps = [normalizers.Prepend(SPACE)] if prefixed else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(parts + ([decoders.Strip(" ", 1, 0)] if prefixed else []))
    return backend


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _pieces(vocabulary: Vocabulary, scores: list[float]) -> dict[str, float]:
    """Scores of the pieces that are merged: not of bytes, and not of tokens that are found in the text before."""
    listed = zip(vocabulary.tokens, vocabulary.kinds, scores, strict=False)
    return {token: score for token, kind, score in listed if kind == NORMAL}


def merges_of(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others: of the best piece first, and of it with the longest left part first."""
    return [
        (left, right)
        for piece in sorted(scores, key=scores.__getitem__, reverse=True)
        for cut in range(len(piece) - 1, 0, -1)
        if (left := piece[:cut]) in scores and (right := piece[cut:]) in scores
    ]

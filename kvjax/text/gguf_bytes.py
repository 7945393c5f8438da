"""Byte-level BPE of a GGUF (``tokenizer.ggml.model`` "gpt2"), its text split as ``tokenizer.ggml.pre`` says."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from kvjax.errors import WeightsError, quoted
from kvjax.text.gguf_vocabulary import Vocabulary

if TYPE_CHECKING:
    import tokenizers

_DIGIT = r"\p{N}"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SIGNS_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n%s]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}%s|" + _SIGNS_AND_SPACES % ""
# Words that begin with capitals and end with small letters, as OpenAI's o200k has them.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|\p{{N}}%s|"
_CASED += _SIGNS_AND_SPACES % "/"


@dataclasses.dataclass(frozen=True)
class Splitting:
    """A pre-tokenizer: how text is split before bytes are merged.

    Attributes:
      patterns: regular expressions that cut the text one after the other, their matches and what is between them.
      gpt2_words: cut into GPT-2's words after that.
      nfc: normalise the text to Unicode's composed form.
      whole_words: a word that is in the vocabulary is taken without looking at merges.
      adds_bos: text begins with the token of beginnings where the file does not say.
    """

    patterns: tuple[str, ...] = ()
    gpt2_words: bool = False
    nfc: bool = False
    whole_words: bool = False
    adds_bos: bool = False


# GPT-2's words, as a pattern that others may follow.
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT2 = Splitting(gpt2_words=True)
_DIGITS = Splitting(patterns=(_DIGIT,), gpt2_words=True)
_GPT4 = Splitting(patterns=(_WORDS % "{1,3}",))
_LLAMA3 = dataclasses.replace(_GPT4, whole_words=True, adds_bos=True)
_NEOX = Splitting(gpt2_words=True, nfc=True)
_QWEN2 = Splitting(patterns=(_WORDS % "",), nfc=True)
# llama.cpp's names; each equals what the model's own tokenizer.json says.
SPLITTINGS: dict[str, Splitting] = {
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "phi-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": dataclasses.replace(_DIGITS, nfc=True),
    "mpt": _NEOX,
    "olmo": _NEOX,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "smaug-bpe": _GPT4,
    "dbrx": _GPT4,
    "chatglm-bpe": _GPT4,
    "glm4": _GPT4,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "stablelm2": _QWEN2,
    "falcon": Splitting(patterns=(r"[\p{P}$+<=>^~|`]+", _GPT2_WORDS, "[0-9][0-9][0-9]")),
    "gpt-4o": Splitting(patterns=(_CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?", "{1,3}"),)),
    "tekken": Splitting(patterns=(_CASED % ("", "", ""),), whole_words=True, adds_bos=True),
    "bloom": Splitting(patterns=(r" ?[^(\s|.,!?…。，、।۔،)]+",)),
    "deepseek-coder": Splitting(patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", _DIGIT)),
}


def byte_level(vocabulary: Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """The tokenizer, without its added tokens, and whether text begins with the token of beginnings by default.

    Raises WeightsError when its way to split text is not known, or its merges do not fit.
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    pre, origin = vocabulary.metadata.get("tokenizer.ggml.pre"), vocabulary.origin
    if not isinstance(pre, str) or pre not in SPLITTINGS:
        raise WeightsError(
            f"{origin} splits text as {quoted(pre)} (tokenizer.ggml.pre) before merging, which is not known; load the "
            "model from safetensors."
        )
    splitting, ids = SPLITTINGS[pre], vocabulary.ids
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in vocabulary.strings("merges"))]
    for left, right in pairs:
        # Some of these end the library in a panic, which is no Exception.
        if left not in ids or right not in ids or left + right not in ids:
            raise WeightsError(
                f"{origin} is corrupt: its merges do not fit its vocabulary ({quoted(left)} with {quoted(right)})."
            )
    backend = tokenizers.Tokenizer(models.BPE(ids, pairs, ignore_merges=splitting.whole_words))
    steps: list[Any] = [
        pre_tokenizers.Digits(individual_digits=True)
        if pattern == _DIGIT
        else pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
        for pattern in splitting.patterns
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.gpt2_words))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if splitting.nfc:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend, splitting.adds_bos

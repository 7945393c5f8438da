"""Builds the tokenizer that a GGUF file carries: byte-level BPE, split as the file's ``tokenizer.ggml.pre`` says."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvjax.errors import WeightsError, quoted
from kvjax.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers

_CONTROL, _USER_DEFINED = 3, 4
# Ends of a message that some files name only in the vocabulary (llama.cpp recognises them by their text too).
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>")
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclasses.dataclass(frozen=True)
class Splitting:
    """How text is cut into words before bytes are merged.

    Attributes:
      pattern: the words, as a regular expression; None for GPT-2's own.
      single_digits: cut every digit off first.
      nfc: normalise the text to Unicode's composed form.
      whole_words: a word that is in the vocabulary is taken without looking at merges.
    """

    pattern: str | None = None
    single_digits: bool = False
    nfc: bool = False
    whole_words: bool = False


_LLAMA3 = Splitting(pattern=_WORDS % "{1,3}", whole_words=True)
# llama.cpp's names; each equals what the model's own tokenizer.json says.
SPLITTINGS: dict[str, Splitting] = {
    "gpt-2": Splitting(),
    "gpt2": Splitting(),
    "smollm": Splitting(single_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": Splitting(pattern=_WORDS % "", nfc=True),
    "bloom": Splitting(pattern=r" ?[^(\s|.,!?…。，、।۔،)]+"),
}


def tokenizer_from_gguf(metadata: Mapping[str, Any], origin: str) -> Tokenizer:
    """The tokenizer and chat template in a GGUF's metadata.

    Raises WeightsError when there is none, or when its kind or way to split text is not known.
    """
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise WeightsError(
            f"{origin} has a tokenizer of kind {quoted(kind)}; byte-level BPE ('gpt2') is read from GGUF."
        )
    if not isinstance(pre, str) or pre not in SPLITTINGS:
        known = ", ".join(SPLITTINGS)
        raise WeightsError(
            f"{origin} splits text as {quoted(pre)} (tokenizer.ggml.pre) before merging; known are {known}."
        )
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        _backend(metadata, SPLITTINGS[pre], origin),
        chat_template=template if isinstance(template, str) else None,
        special_tokens=_roles(metadata, _strings(metadata, "tokens", origin)),
    )


def _backend(metadata: Mapping[str, Any], splitting: Splitting, origin: str) -> tokenizers.Tokenizer:
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    tokens, merges = _strings(metadata, "tokens", origin), _strings(metadata, "merges", origin)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise WeightsError(f"{origin} is corrupt: its vocabulary lists a token twice.")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    try:
        model = models.BPE(vocabulary, pairs, ignore_merges=splitting.whole_words)
    except Exception as error:  # the library has no exception class of its own
        raise WeightsError(f"{origin} is corrupt: its merges do not fit its vocabulary ({error}).") from error
    backend = tokenizers.Tokenizer(model)
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if splitting.single_digits else []
    if splitting.pattern is not None:
        steps.append(pre_tokenizers.Split(tokenizers.Regex(splitting.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if splitting.nfc:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [tokenizers.AddedToken(tokens[i], normalized=False, special=special) for i in _of_kind(metadata, kind)]
        backend.add_tokens(added)
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token") and isinstance(bos, int) and 0 <= bos < len(tokens):
        backend.post_processor = processors.TemplateProcessing(
            single=[tokens[bos], "$A"], special_tokens=[(tokens[bos], bos)]
        )
    return backend


def _strings(metadata: Mapping[str, Any], name: str, origin: str) -> list[str]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise WeightsError(f"{origin} holds no tokenizer: tokenizer.ggml.{name} is missing.")
    return values


def _of_kind(metadata: Mapping[str, Any], wanted: int) -> Iterator[int]:
    """Ids whose token type is ``wanted``."""
    kinds = metadata.get("tokenizer.ggml.token_type")
    count = len(metadata["tokenizer.ggml.tokens"])
    return (index for index, kind in enumerate(kinds[:count] if isinstance(kinds, list) else ()) if kind == wanted)


def _roles(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found = {role: metadata.get(f"tokenizer.ggml.{key}_token_id") for role, key in keys.items()}
    return {role: tokens[index] for role, index in found.items() if isinstance(index, int) and 0 <= index < len(tokens)}


def stop_ids_from_gguf(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end an answer: the file's end of text, of turn (eot) and of message (eom), and known ends by name."""
    tokens = metadata["tokenizer.ggml.tokens"]
    keys = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    found = [index for index in keys if isinstance(index, int) and 0 <= index < len(tokens)]
    found += [index for index in _of_kind(metadata, _CONTROL) if tokens[index] in _END_OF_TURN]
    return tuple(dict.fromkeys(found))

"""Builds the tokenizer that a GGUF file carries: byte-level BPE, split as the file's ``tokenizer.ggml.pre`` says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvjax.errors import WeightsError
from kvjax.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    pass

_CONTROL, _USER_DEFINED = 3, 4
# Ends of a turn that some files name only in the vocabulary (llama.cpp recognises them by their text too).
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>")
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def _gpt2() -> list[Any]:
    from tokenizers import pre_tokenizers

    return [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]


def _smollm() -> list[Any]:
    from tokenizers import pre_tokenizers

    return [pre_tokenizers.Digits(individual_digits=True), *_gpt2()]


def _llama3(digits: str) -> list[Any]:
    from tokenizers import Regex, pre_tokenizers

    split = pre_tokenizers.Split(Regex(_LLAMA3.replace("{DIGITS}", digits)), behavior="isolated")
    return [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


def _llama_bpe() -> list[Any]:
    return _llama3("{1,3}")


def _qwen2() -> list[Any]:
    return _llama3("")


# llama.cpp's names of the ways to split text before merging; each equals the model's own tokenizer.json.
PRE_TOKENIZERS: dict[str, Callable[[], list[Any]]] = {
    "gpt-2": _gpt2,
    "gpt2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": _llama_bpe,
    "llama3": _llama_bpe,
    "llama-v3": _llama_bpe,
    "qwen2": _qwen2,
}


def tokenizer_from_gguf(metadata: Mapping[str, Any], origin: str) -> Tokenizer:
    """The tokenizer and chat template in a GGUF's metadata.

    Raises WeightsError when there is none, or when its kind or way to split text is not known.
    """
    from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    tokens, merges = _list(metadata, "tokens", origin), _list(metadata, "merges", origin)
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise WeightsError(
            f"{origin} has a tokenizer of kind {kind!r}; only byte-level BPE ('gpt2') is read from GGUF."
        )
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise WeightsError(f"{origin} splits text as {pre!r} (tokenizer.ggml.pre) before merging; known are {known}.")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise WeightsError(f"{origin} is corrupt: its vocabulary lists a token twice.")
    try:
        # llama 3's tokenizer takes a whole word that is in the vocabulary without looking at merges.
        model = models.BPE(vocabulary, pairs, ignore_merges=PRE_TOKENIZERS[pre] is _llama_bpe)
    except Exception as error:
        raise WeightsError(f"{origin} is corrupt: its merges do not fit its vocabulary ({error}).") from error
    backend = Backend(model)
    if PRE_TOKENIZERS[pre] is _qwen2:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(PRE_TOKENIZERS[pre]())
    backend.decoder = decoders.ByteLevel()
    kinds = metadata.get("tokenizer.ggml.token_type") or []
    for wanted, add in ((_CONTROL, backend.add_special_tokens), (_USER_DEFINED, backend.add_tokens)):
        special = wanted == _CONTROL
        found = [token for token, kind in zip(tokens, kinds, strict=False) if kind == wanted]
        add([AddedToken(token, normalized=False, special=special) for token in found])
    return Tokenizer(
        backend,
        chat_template=metadata.get("tokenizer.chat_template"),
        special_tokens=_roles(metadata, tokens),
    )


def _list(metadata: Mapping[str, Any], name: str, origin: str) -> list[str]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise WeightsError(f"{origin} holds no tokenizer: tokenizer.ggml.{name} is missing.")
    return values


def _roles(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found = {role: metadata.get(f"tokenizer.ggml.{key}_token_id") for role, key in keys.items()}
    return {role: tokens[index] for role, index in found.items() if isinstance(index, int) and index < len(tokens)}


def stop_ids_from_gguf(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end an answer: the file's end of text, of turn and of message, and known ends of turn by name."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    found = [metadata[key] for key in keys if isinstance(metadata.get(key), int)]
    kinds = metadata.get("tokenizer.ggml.token_type") or []
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False)):
        if kind == _CONTROL and token in _END_OF_TURN:
            found.append(index)
    return tuple(dict.fromkeys(found))

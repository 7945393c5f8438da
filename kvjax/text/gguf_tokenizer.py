"""The tokenizer that a GGUF file carries, as a ``tokenizers`` one: byte-level BPE or SentencePiece's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.errors import WeightsError, quoted
from kvjax.text.gguf_bytes import byte_level
from kvjax.text.gguf_sentencepiece import sentencepiece
from kvjax.text.gguf_vocabulary import CONTROL, UNKNOWN, USER_DEFINED, Vocabulary
from kvjax.text.tokenizer import Tokenizer

# Ends of a message or of a text that files name only in the vocabulary (llama.cpp recognises them by their text too):
# a GGUF has one end, and generation_config.json often several.
_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|call|>"),
    *("<|end_of_text|>", "<|endoftext|>"),
)
#: Where there is this token, messages go on after ``<|end|>``.
_END_OF_ANSWER = "<|return|>"
#: Control tokens of Phi-3 after which spaces count, unlike after all others (its tokenizer.json; no key says it).
_PHI3_KEEPING_SPACE = ("<unk>", "<s>", "<|endoftext|>")


def tokenizer_from_gguf(metadata: Mapping[str, Any], origin: str) -> Tokenizer:
    """The tokenizer and chat template in a GGUF's metadata.

    Raises WeightsError when there is none, or when its kind or way to split text is not known.
    """
    import tokenizers
    from tokenizers import processors

    kind, template = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.chat_template")
    if kind not in ("gpt2", "llama"):
        raise WeightsError(
            f"{origin} has a tokenizer of kind {quoted(kind)}; of a GGUF byte-level BPE ('gpt2') and SentencePiece's "
            "('llama') are read."
        )
    vocabulary, strips = Vocabulary(metadata, origin), False
    if kind == "llama":
        backend, adds_bos = sentencepiece(vocabulary), True
        strips = metadata.get("general.architecture") == "phi3"
    else:
        backend, adds_bos = byte_level(vocabulary)
    tokens = vocabulary.tokens
    # transformers' Llama has the unknown piece among the special ones too.
    for wanted in (CONTROL, UNKNOWN, USER_DEFINED):
        added = [
            tokenizers.AddedToken(
                tokens[index],
                normalized=False,
                special=wanted != USER_DEFINED,
                rstrip=strips and wanted != USER_DEFINED and tokens[index] not in _PHI3_KEEPING_SPACE,
            )
            for index in vocabulary.of_kind(wanted)
        ]
        backend.add_tokens(added)
    bos = vocabulary.role("bos")
    if vocabulary.adds_bos(adds_bos) and bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=[tokens[bos], "$A"], special_tokens=[(tokens[bos], bos)]
        )
    return Tokenizer(
        backend,
        chat_template=template if isinstance(template, str) else None,
        special_tokens=_roles(vocabulary),
    )


def _roles(vocabulary: Vocabulary) -> dict[str, str]:
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found = {role: vocabulary.role(name) for role, name in names.items()}
    return {role: vocabulary.tokens[index] for role, index in found.items() if index is not None}


def stop_ids_from_gguf(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end an answer: the file's end of text, of turn (eot) and of message (eom), and known ends by name."""
    vocabulary = Vocabulary(metadata, "")
    found = [vocabulary.role(name) for name in ("eos", "eot", "eom")]
    ends = [end for end in _ENDS if end != "<|end|>" or _END_OF_ANSWER not in vocabulary.ids]
    named = [index for index in vocabulary.of_kind(CONTROL) if vocabulary.tokens[index] in ends]
    # SmolLM's unknown token is called an end, and is none.
    found += [index for index in named if index != vocabulary.role("unknown")]
    return tuple(dict.fromkeys(index for index in found if index is not None))

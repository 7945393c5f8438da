"""A toy model and tokenizer for tests that need the shape of things and no sense."""

from __future__ import annotations

from typing import Any

import tokenizers

from kvjax.checkpoints.load import LanguageModel
from kvjax.model.config import ModelConfig
from kvjax.model.decoder import random_decoder
from kvjax.text.tokenizer import Tokenizer, byte_level_alphabet

_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPECIALS = ("<|start|>", "<|end|>", "<|unused|>")


def tiny_config(**changes: Any) -> ModelConfig:
    """Two layers, four query heads on two KV heads: small enough to compile in a second."""
    values = dict(
        family="llama",
        vocab_size=256 + len(SPECIALS),
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position=512,
        tie_embeddings=True,
    )
    return ModelConfig(**(values | changes))


def byte_tokenizer() -> Tokenizer:
    """One id per byte, then the special tokens: no merges, so lengths are easy to count."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=byte_level_alphabet(), merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in SPECIALS])
    return Tokenizer(backend, chat_template=_TEMPLATE, special_tokens={"eos_token": "<|end|>"})


def tiny_model(seed: int = 3, **changes: Any) -> LanguageModel:
    """A random model with the byte tokenizer."""
    config, tokenizer = tiny_config(**changes), byte_tokenizer()
    stop = tuple(tokenizer.encode("<|end|>"))
    return LanguageModel("tiny", config, random_decoder(config, seed=seed), tokenizer, stop)


def needle_model(seed: int = 3, **changes: Any) -> LanguageModel:
    """A random model whose tokenizer has learned the needle tasks' lines: samples of them take hundreds of tokens.

    With one id per byte they take thousands.
    """
    from kvjax.eval import follow_ups, ruler

    lines = [ruler.NOISE, ruler.NEEDLE, ruler.QUESTION, ruler.ANSWER_PREFIX, ruler.INTRODUCTION, follow_ups.__doc__]
    plain = byte_tokenizer()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIALS),
        show_progress=False,
        min_frequency=1,
    )
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.train_from_iterator(lines, trainer)
    tokenizer = Tokenizer(backend, chat_template=_TEMPLATE, special_tokens=plain.special_tokens)
    config = tiny_config(**({"vocab_size": 600, "max_position": 1024} | changes))
    return LanguageModel("needles", config, random_decoder(config, seed=seed), tokenizer, (1,))

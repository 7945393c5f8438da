"""The harness's ``generation_kwargs`` as options of a generation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.checkpoints.load import LanguageModel
from kvjax.errors import UsageError, quoted
from kvjax.eval.harness.arguments import Settings
from kvjax.options import DRAWN, GenerationOptions

#: Names of the same number, the first that is given counts.
_MOST_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
#: What the harness itself generates at most where a task does not say.
_DEFAULT_TOKENS = 256
_SAMPLING = (*DRAWN, "repetition_penalty")
#: What others' generation can do, where it asks for nothing.
_NOTHING = {"num_beams": 1, "num_return_sequences": 1, "length_penalty": 1.0, "early_stopping": False}


def options_of(kwargs: Mapping[str, Any], lm: LanguageModel, settings: Settings) -> GenerationOptions:
    """Options that do what a task's ``generation_kwargs`` say.

    Sampling follows the harness: temperature above 0 samples unless ``do_sample`` is false, and ``do_sample`` without a
    temperature samples at 1.

    Raises:
      UsageError: kvjax has nothing that would do it.
    """
    given = {name: value for name, value in kwargs.items() if value is not None}
    until = given.pop("until", ())
    until = list(until) if isinstance(until, (list, tuple)) else [until]
    lengths = [given.pop(name) for name in _MOST_TOKENS if name in given]
    sampled, temperature = given.pop("do_sample", None), given.pop("temperature", None)
    if sampled is False or (sampled is None and temperature is None):
        temperature = 0.0
    more: dict[str, Any] = {name: given.pop(name) for name in _SAMPLING if name in given}
    if more.get("top_k") == 0:  # none, as others write it
        more["top_k"] = None
    for name, value in given.items():
        if name not in _NOTHING or value != _NOTHING[name]:
            known = ", ".join(("until", _MOST_TOKENS[0], "do_sample", "temperature", *_SAMPLING))
            raise UsageError(f"kvjax cannot generate with {name}={quoted(value)}; generation_kwargs may hold {known}.")
    texts, ids = _stops(until, lm)
    return GenerationOptions(
        policy=settings.policy,
        storage=settings.storage,
        chat=False,
        max_new_tokens=lengths[0] if lengths else _DEFAULT_TOKENS,
        temperature=1.0 if temperature is None else temperature,
        seed=settings.seed,
        stop=texts,
        stop_token_ids=ids,
        **more,
    )


def _stops(until: list[Any], lm: LanguageModel) -> tuple[list[Any], list[int]]:
    """Stop strings, and the ids of those that are special tokens, which add no text."""
    texts, ids = [], []
    for text in until:
        found = lm.tokenizer.encode(text) if isinstance(text, str) else []
        if len(found) == 1 and found[0] in lm.tokenizer.special_ids:
            ids.append(found[0])
        elif text != "":
            texts.append(text)
    return texts, ids

"""What a toy model answers, in numbers to compare between devices: every policy, storage and kind of weights.

``python tests/support/whole_models.py NAME`` prints a case's.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import toys
from support.scorers import with_profiles

import kvjax
from kvjax.checkpoints.load import LanguageModel
from kvjax.model.decoder import random_decoder
from kvjax.policies import parse, registry

#: The toy's: a head size that the GPU kernels take, and matrices that groups of 4-bit weights divide.
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_layers": 3, "head_dim": 64, "max_position": 2048}
#: Policies whose text form needs more than a budget.
OPTIONS = {
    "full": "",
    "lagkv": ":ratio=0.5,lag=16,sink=4",
    "duo": ":ratio=0.5",
    "razor": ":heads=0.0+1.1,budget=96",
    "round": ":watershed=1,top=0.5",
    "think": "",
    "ahakv": ":ratio=0.5",
}
LAGKV = "lagkv" + OPTIONS["lagkv"]
RNG = np.random.default_rng(11)
PROMPTS = [RNG.integers(0, 256, size).tolist() for size in (300, 70, 131)]
ANSWERS = [RNG.integers(0, 256, size).tolist() for size in (40, 70, 1)]


def model(**changes: Any) -> LanguageModel:
    """The toy, whose weights differ between devices by roundings of what is drawn."""
    return toys.tiny_model(**(SIZES | changes))


def scored(lm: LanguageModel, policy: str, **options: Any) -> list[float]:
    """Log-probabilities of given answers, decoded over a compressed cache."""
    chosen = with_profiles(parse(policy), lm.config)
    found = kvjax.score(lm, PROMPTS, ANSWERS, policy=chosen, way="decode", **options)
    return [logprob for score in found for logprob in score.logprobs]


def talked(lm: LanguageModel, policy: str) -> list[float]:
    """Log-probabilities of a given answer after each of three turns onto one cache."""
    cache, found = None, []
    for prompt in PROMPTS:
        chosen = {"policy": policy} if cache is None else {"cache": cache}
        out = kvjax.generate(lm, prompt, max_new_tokens=0, chat=False, **chosen)
        score = kvjax.score(lm, PROMPTS[1][:9], PROMPTS[1][9:20], cache=out.cache, way="decode", chat=False)
        cache, found = out.cache, found + list(score.logprobs)
    return found


def served(lm: LanguageModel) -> list[float]:
    """Log-probabilities of what an engine of two slots answers to three requests."""
    with kvjax.Engine(lm, LAGKV, slots=2, prompt_tokens=320, new_tokens=40) as engine:
        handles = [engine.submit(prompt, chat=False, max_new_tokens=24, logprobs=True) for prompt in PROMPTS]
        return [logprob for handle in handles for logprob in handle.result().logprobs or ()]


def in_bfloat16(lm: LanguageModel) -> LanguageModel:
    """The model with its weights in bfloat16."""
    return dataclasses.replace(lm, params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), lm.params))


def stored_as(weights: Any) -> LanguageModel:
    """The toy with quantised weights."""
    config = toys.tiny_config(**SIZES).stored_as(weights)
    return dataclasses.replace(model(), config=config, params=random_decoder(config, seed=3))


#: Policies that the default model is asked under; those that have a ratio keep a quarter.
OF_THE_DEFAULT_MODEL = ("full", "lagkv", "h2o", "snapkv", "razor", "ahakv", "slimkv", "round", "streamingllm", "kvzip")


def answered(policy: str) -> list[float]:
    """The default model's greedy answer about a long text, its tokens and their log-probabilities."""
    text = (Path(__file__).parents[2] / "docs/guides/policies.md").read_text()[:9000]
    lm = kvjax.load("smollm2-135m-instruct", dtype="float32", progress=False)
    prompt = f"{text}\n\nSummarise the text above in a few sentences."
    found = kvjax.generate(lm, prompt, policy=policy, max_new_tokens=60, logprobs=True)
    return [*map(float, found.tokens), *(found.logprobs or ())]


def cases() -> dict[str, Callable[[], list[float]]]:
    """Every case by its name."""
    found: dict[str, Callable[[], list[float]]] = {}
    for name in sorted(registry()):
        found[name] = lambda name=name: scored(model(), name + OPTIONS.get(name, ":budget=96"))
    for name in ("full", "lagkv", "h2o", "round"):
        text = name + OPTIONS.get(name, ":budget=96")
        found[f"{name} in bfloat16"] = lambda text=text: scored(in_bfloat16(model()), text)
    found["a cache in int8"] = lambda: scored(model(), LAGKV, storage="int8")
    for weights in ("int8", "int4", "fp8"):
        found[f"weights in {weights}"] = lambda weights=weights: scored(stored_as(weights), "full")
    found["rounds of a conversation"] = lambda: talked(model(), "round:watershed=1,top=0.5")
    found["turns of a conversation"] = lambda: talked(model(), LAGKV)
    found["an engine"] = lambda: served(model())
    for name in OF_THE_DEFAULT_MODEL:
        text = name if name in ("full", "round") else f"{name}:ratio=0.25"
        found[f"the default model, {text}"] = lambda text=text: answered(text)
    return found


if __name__ == "__main__":
    print(json.dumps(cases()[sys.argv[1]]()))

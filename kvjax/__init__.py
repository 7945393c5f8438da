"""kvjax: long contexts made cheap by compressing the KV cache, in JAX, with the bytes and the time really saved.

lm = kvjax.load("smollm2-135m-instruct")
out = kvjax.generate(lm, "Why is the sky blue?", policy=kvjax.LagKV(ratio=0.25), max_new_tokens=200)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvjax import batch, calibrate, policies
    from kvjax.cache.cache import Cache
    from kvjax.cache.continuation import concatenate
    from kvjax.cache.quantisation import Storage
    from kvjax.chat import Chat
    from kvjax.checkpoints.load import LanguageModel, load, load_config
    from kvjax.errors import DoesNotFit, KvjaxError, UsageError, WeightsError
    from kvjax.generation import generate, stream_generate
    from kvjax.history import read_history
    from kvjax.model.config import ModelConfig, RopeConfig
    from kvjax.output import Output, Piece, Stats
    from kvjax.planning import Plan, plan
    from kvjax.policies import (
        H2O,
        NACL,
        TOVA,
        AhaKV,
        CompensatedRing,
        ExpectedAttention,
        Full,
        KeyDiff,
        LagKV,
        Policy,
        PyramidKV,
        Razor,
        RazorAttention,
        RoundAttention,
        SlimKV,
        SnapKV,
        StreamingLLM,
    )
    from kvjax.rounds.conversation import Conversation
    from kvjax.saving import load_cache, save_cache
    from kvjax.sharding.mesh import Mesh

__version__ = "0.1.0"

# Names are imported when first used, so that `import kvjax` costs nothing beyond `import jax`.
_HOMES = {
    "Cache": "kvjax.cache.cache",
    "Storage": "kvjax.cache.quantisation",
    "concatenate": "kvjax.cache.continuation",
    "Chat": "kvjax.chat",
    "ModelConfig": "kvjax.model.config",
    "RopeConfig": "kvjax.model.config",
    "DoesNotFit": "kvjax.errors",
    "KvjaxError": "kvjax.errors",
    "UsageError": "kvjax.errors",
    "WeightsError": "kvjax.errors",
    "generate": "kvjax.generation",
    "stream_generate": "kvjax.generation",
    "Mesh": "kvjax.sharding.mesh",
    "LanguageModel": "kvjax.checkpoints.load",
    "load": "kvjax.checkpoints.load",
    "load_config": "kvjax.checkpoints.load",
    "Output": "kvjax.output",
    "Piece": "kvjax.output",
    "Stats": "kvjax.output",
    "Plan": "kvjax.planning",
    "plan": "kvjax.planning",
    "read_history": "kvjax.history",
    "load_cache": "kvjax.saving",
    "save_cache": "kvjax.saving",
    "AhaKV": "kvjax.policies",
    "CompensatedRing": "kvjax.policies",
    "ExpectedAttention": "kvjax.policies",
    "Full": "kvjax.policies",
    "H2O": "kvjax.policies",
    "KeyDiff": "kvjax.policies",
    "LagKV": "kvjax.policies",
    "NACL": "kvjax.policies",
    "Policy": "kvjax.policies",
    "PyramidKV": "kvjax.policies",
    "RazorAttention": "kvjax.policies",
    "Razor": "kvjax.policies",
    "RoundAttention": "kvjax.policies",
    "Conversation": "kvjax.rounds.conversation",
    "SlimKV": "kvjax.policies",
    "SnapKV": "kvjax.policies",
    "StreamingLLM": "kvjax.policies",
    "TOVA": "kvjax.policies",
}

__all__ = [
    "H2O",
    "NACL",
    "TOVA",
    "AhaKV",
    "Cache",
    "Chat",
    "CompensatedRing",
    "Conversation",
    "DoesNotFit",
    "ExpectedAttention",
    "Full",
    "KeyDiff",
    "KvjaxError",
    "LagKV",
    "LanguageModel",
    "Mesh",
    "ModelConfig",
    "Output",
    "Piece",
    "Plan",
    "Policy",
    "PyramidKV",
    "Razor",
    "RazorAttention",
    "RopeConfig",
    "RoundAttention",
    "SlimKV",
    "SnapKV",
    "Stats",
    "Storage",
    "StreamingLLM",
    "UsageError",
    "WeightsError",
    "batch",
    "calibrate",
    "concatenate",
    "generate",
    "load",
    "load_cache",
    "load_config",
    "plan",
    "policies",
    "read_history",
    "save_cache",
    "stream_generate",
]


def __getattr__(name: str) -> Any:
    if name in ("batch", "calibrate", "policies"):
        return importlib.import_module(f"kvjax.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'kvjax' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

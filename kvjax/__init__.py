"""kvjax: long contexts made cheap by compressing the KV cache, in JAX, with the bytes and the time really saved.

lm = kvjax.load("smollm2-135m-instruct")
out = kvjax.generate(lm, "Why is the sky blue?", policy=kvjax.LagKV(ratio=0.25), max_new_tokens=200)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvjax.policies.names import CLASSES
from kvjax.version import __version__ as __version__

if TYPE_CHECKING:
    from kvjax import batch as batch
    from kvjax import calibrate as calibrate
    from kvjax import policies as policies
    from kvjax import progress as progress
    from kvjax.cache.cache import Cache as Cache
    from kvjax.cache.continuation import concatenate as concatenate
    from kvjax.cache.quantisation import Storage as Storage
    from kvjax.chat import Chat as Chat
    from kvjax.checkpoints.convert import convert as convert
    from kvjax.checkpoints.load import LanguageModel as LanguageModel
    from kvjax.checkpoints.load import load as load
    from kvjax.checkpoints.load import load_config as load_config
    from kvjax.context import read as read
    from kvjax.engine.engine import Engine as Engine
    from kvjax.engine.engine import QueueFull as QueueFull
    from kvjax.engine.engine_report import EngineReport as EngineReport
    from kvjax.engine.handle import Handle as Handle
    from kvjax.errors import DoesNotFit as DoesNotFit
    from kvjax.errors import KvjaxError as KvjaxError
    from kvjax.errors import UsageError as UsageError
    from kvjax.errors import WeightsError as WeightsError
    from kvjax.generation import generate as generate
    from kvjax.generation import stream_generate as stream_generate
    from kvjax.history import read_history as read_history
    from kvjax.model.config import ModelConfig as ModelConfig
    from kvjax.model.config import RopeConfig as RopeConfig
    from kvjax.options import GenerationOptions as GenerationOptions
    from kvjax.output import Output as Output
    from kvjax.output import Piece as Piece
    from kvjax.output import Score as Score
    from kvjax.output import Stats as Stats
    from kvjax.planning import Plan as Plan
    from kvjax.planning import plan as plan
    from kvjax.policies import *  # noqa: F403  one line of the registry names a policy for type checkers too
    from kvjax.policy_check import PolicyCheck as PolicyCheck
    from kvjax.policy_check import check_policy as check_policy
    from kvjax.prompts import chat_tokens as chat_tokens
    from kvjax.rounds.conversation import Conversation as Conversation
    from kvjax.saving import load_cache as load_cache
    from kvjax.saving import save_cache as save_cache
    from kvjax.scoring import score as score
    from kvjax.sharding.mesh import Mesh as Mesh
    from kvjax.warming import warm as warm

#: Public names by their modules, which are imported when a name is first used: `import kvjax` does not even import JAX.
_NAMES = {
    "kvjax.cache.cache": ("Cache",),
    "kvjax.cache.continuation": ("concatenate",),
    "kvjax.cache.quantisation": ("Storage",),
    "kvjax.chat": ("Chat",),
    "kvjax.checkpoints.convert": ("convert",),
    "kvjax.checkpoints.load": ("LanguageModel", "load", "load_config"),
    "kvjax.context": ("read",),
    "kvjax.engine.engine": ("Engine", "QueueFull"),
    "kvjax.engine.handle": ("Handle",),
    "kvjax.engine.engine_report": ("EngineReport",),
    "kvjax.errors": ("DoesNotFit", "KvjaxError", "UsageError", "WeightsError"),
    "kvjax.generation": ("generate", "stream_generate"),
    "kvjax.history": ("read_history",),
    "kvjax.model.config": ("ModelConfig", "RopeConfig"),
    "kvjax.options": ("GenerationOptions",),
    "kvjax.output": ("Output", "Piece", "Score", "Stats"),
    "kvjax.planning": ("Plan", "plan"),
    "kvjax.policy_check": ("PolicyCheck", "check_policy"),
    "kvjax.prompts": ("chat_tokens",),
    "kvjax.rounds.conversation": ("Conversation",),
    "kvjax.saving": ("load_cache", "save_cache"),
    "kvjax.scoring": ("score",),
    "kvjax.sharding.mesh": ("Mesh",),
    "kvjax.warming": ("warm",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names} | CLASSES | {"Policy": "kvjax.policies"}
_PACKAGES = ("batch", "calibrate", "policies", "progress")
__all__ = sorted([*_HOMES, *_PACKAGES])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"kvjax.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'kvjax' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

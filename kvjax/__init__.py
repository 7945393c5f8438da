"""kvjax: long contexts made cheap by compressing the KV cache, in JAX, with the bytes and the time really saved.

lm = kvjax.load("smollm2-135m-instruct")
out = kvjax.generate(lm, "Why is the sky blue?", policy=kvjax.LagKV(ratio=0.25), max_new_tokens=200)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvjax import batch as batch
    from kvjax import calibrate as calibrate
    from kvjax import policies as policies
    from kvjax.cache.cache import Cache as Cache
    from kvjax.cache.quantisation import Storage as Storage
    from kvjax.chat import Chat as Chat
    from kvjax.checkpoints.load import LanguageModel as LanguageModel
    from kvjax.checkpoints.load import load as load
    from kvjax.checkpoints.load import load_config as load_config
    from kvjax.errors import DoesNotFit as DoesNotFit
    from kvjax.errors import KvjaxError as KvjaxError
    from kvjax.errors import UsageError as UsageError
    from kvjax.errors import WeightsError as WeightsError
    from kvjax.generation import generate as generate
    from kvjax.generation import stream_generate as stream_generate
    from kvjax.history import read_history as read_history
    from kvjax.joining import concatenate as concatenate
    from kvjax.model.config import ModelConfig as ModelConfig
    from kvjax.model.config import RopeConfig as RopeConfig
    from kvjax.options import GenerationOptions as GenerationOptions
    from kvjax.output import Output as Output
    from kvjax.output import Piece as Piece
    from kvjax.output import Stats as Stats
    from kvjax.planning import Plan as Plan
    from kvjax.planning import plan as plan
    from kvjax.policies import *  # noqa: F403  one line of the registry names a policy for type checkers too
    from kvjax.rounds.conversation import Conversation as Conversation
    from kvjax.saving import load_cache as load_cache
    from kvjax.saving import save_cache as save_cache
    from kvjax.sharding.mesh import Mesh as Mesh

__version__ = "0.1.0"

#: Where public names are from. They are imported when first used: `import kvjax` does not even import JAX. The classes
#: of policies follow from `kvjax.policies`.
_HOMES = {
    "kvjax.cache.cache": ("Cache",),
    "kvjax.cache.quantisation": ("Storage",),
    "kvjax.chat": ("Chat",),
    "kvjax.checkpoints.load": ("LanguageModel", "load", "load_config"),
    "kvjax.errors": ("DoesNotFit", "KvjaxError", "UsageError", "WeightsError"),
    "kvjax.generation": ("generate", "stream_generate"),
    "kvjax.history": ("read_history",),
    "kvjax.joining": ("concatenate",),
    "kvjax.model.config": ("ModelConfig", "RopeConfig"),
    "kvjax.options": ("GenerationOptions",),
    "kvjax.output": ("Output", "Piece", "Stats"),
    "kvjax.planning": ("Plan", "plan"),
    "kvjax.rounds.conversation": ("Conversation",),
    "kvjax.saving": ("load_cache", "save_cache"),
    "kvjax.sharding.mesh": ("Mesh",),
}
_PACKAGES = ("batch", "calibrate", "policies")


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted([*_PACKAGES, *(name for names in _HOMES.values() for name in names), *_policies()])
    if name in _PACKAGES:
        return importlib.import_module(f"kvjax.{name}")
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None and (name.startswith("_") or name not in _policies()):
        raise AttributeError(f"module 'kvjax' has no attribute {name!r}")
    value = getattr(importlib.import_module(home or "kvjax.policies"), name)
    globals()[name] = value
    return value


def _policies() -> list[str]:
    """The names of the policies' classes, and of what they derive from."""
    policies = importlib.import_module("kvjax.policies")
    found = {name: getattr(policies, name) for name in policies.__all__}
    return [name for name, value in found.items() if isinstance(value, type) and issubclass(value, policies.Policy)]


def __dir__() -> list[str]:
    return __getattr__("__all__")

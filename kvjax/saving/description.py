"""The description of a saved cache: the form's version, the model, the policy, the shapes. All of it JSON.

A cache belongs to weights, not to a shape: keys of a base model mean nothing to its fine-tuned sibling. The model is
therefore known by its configuration and by a digest of some of its weights.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any, get_args

from kvjax.checkpoints.digest import weights_digest
from kvjax.checkpoints.load import LanguageModel, Weights
from kvjax.documents import NotADocument
from kvjax.errors import UsageError, kind_of, quoted
from kvjax.policies import RazorAttention, registry
from kvjax.policies.base import Policy
from kvjax.policies.profile import (
    FilterProfile,
    GateProfile,
    HeadProfile,
    ModelShape,
    ScopeProfile,
    ScorerProfile,
    StatisticsProfile,
    WatershedProfile,
)
from kvjax.policies.split_cache import SplitCache
from kvjax.policies.window_layers import SlidingWindow, WithWindows

#: Of the form that is written. A file of a later version is refused; an earlier one is read as long as this says how.
VERSION = 1
_VALUES: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        HeadProfile,
        ScopeProfile,
        WatershedProfile,
        FilterProfile,
        ScorerProfile,
        GateProfile,
        StatisticsProfile,
        ModelShape,
    )
}
_VALUES |= {cls.__name__: cls for cls in (WithWindows, SlidingWindow)}
_VALUES["Placed"] = SplitCache  # its name in version 1 of the file format
#: Fields whose names in version 1 of the file format are others.
_SAVED_NAMES: dict[tuple[Any, str], str] = {(SplitCache, "upper_capacity"): "upper_room"}


def model_identity(lm: LanguageModel) -> dict[str, str]:
    """The model by its name, its configuration's digest and its weights'."""
    return {"name": lm.name, "config": _config_digest(lm.config), "weights": weights_digest(lm.params)}


def _config_digest(config: Any) -> str:
    return _digest(json.dumps(config.identity(), sort_keys=True, default=str).encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def description_digest(description: dict[str, Any]) -> str:
    """A digest of a description, but for the digest in it."""
    checksum = description.get("checksum")
    if isinstance(checksum, dict):
        checksum = {name: value for name, value in checksum.items() if name != "description"}
    return _digest(json.dumps(description | {"checksum": checksum}, sort_keys=True).encode())


def same_model(saved: dict[str, str], lm: LanguageModel, dtype: str | None = None) -> None:
    """Refuse a cache of another model (UsageError); ``dtype`` is what that was loaded in, if it is known."""
    mine, own = model_identity(lm), str(lm.params.dtype)
    for kind in (None, *get_args(Weights)):
        other = dataclasses.replace(lm.config, weights=kind)
        if kind != lm.config.weights and saved["config"] == _config_digest(other):
            raise UsageError(
                f"It was saved with the model {quoted(saved['name'])} loaded with weights={kind!r}, and "
                f"{quoted(lm.name)} has weights={lm.config.weights!r}; load it as then."
            )
    if saved["config"] != mine["config"]:
        raise UsageError(
            f"It was saved with the model {quoted(saved['name'])}, and {quoted(lm.name)} has another shape."
        )
    halves = {("float16", "float32"), ("float16", "bfloat16"), ("float32", "float16"), ("bfloat16", "float16")}
    if saved["weights"] != mine["weights"] and (dtype, own) in halves:
        # Its weights are other numbers than those that float32 and bfloat16 round to.
        raise UsageError(
            f"It was saved with the model {quoted(saved['name'])} in {dtype}, and the weights of {quoted(lm.name)} in "
            f"{own} are others; load it with dtype={dtype!r}."
        )
    if saved["weights"] != mine["weights"]:
        raise UsageError(
            f"It was saved with the model {quoted(saved['name'])}, and the weights of {quoted(lm.name)} are others."
        )


def policy_to_json(policy: Policy) -> Any:
    """A policy with all its fields, policies and profiles within it too."""
    names = {cls: name for name, cls in [*_VALUES.items(), *registry().items()]}

    def plain(value: Any) -> Any:
        if isinstance(value, Policy) or type(value) in _VALUES.values():
            kind = names.get(type(value), type(value).__name__)
            # What takes no part in a value's equality is no part of the value: the file a profile was read from.
            fields = [field for field in dataclasses.fields(value) if field.compare]
            saved = {_SAVED_NAMES.get((type(value), f.name), f.name): plain(getattr(value, f.name)) for f in fields}
            return {"kind": kind, **saved}
        if isinstance(value, tuple):
            return [plain(item) for item in value]
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise UsageError(
            f"{type(policy).__name__} holds {kind_of(value)}, which cannot be saved; policies hold numbers, "
            "text, tuples, profiles and policies."
        )

    return plain(policy)


def policy_from_json(saved: Any, rotary: bool = False) -> Policy:
    """Undo :func:`policy_to_json`; classes are looked up among the registered ones alone, never imported by name.

    Of a ``rotary`` model, RazorAttention's ``bound`` is left out: nothing reads it there, and version 0.1 wrote it with
    another default.
    """
    kinds: dict[str, Any] = {**registry(), **_VALUES}

    def value(item: Any) -> Any:
        if isinstance(item, list):
            return tuple(value(each) for each in item)
        if not isinstance(item, dict):
            return item
        if item["kind"] not in kinds:
            raise UsageError(
                f"It was saved under the policy {quoted(item['kind'])}, which is not known here; "
                "register the class with kvjax.policies.register first."
            )
        cls = kinds[item["kind"]]
        fields = {saved: name for (owner, name), saved in _SAVED_NAMES.items() if owner is cls}
        given: dict[str, Any] = {
            fields.get(str(name), str(name)): value(each) for name, each in item.items() if name != "kind"
        }
        if rotary and cls is RazorAttention:
            given.pop("bound", None)
        return cls(**given)

    policy = value(saved)
    if not isinstance(policy, Policy):
        raise NotADocument(f"policy is {kind_of(policy)}")
    return policy

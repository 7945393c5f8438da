"""Policies: which tokens a compressed cache keeps. ``parse`` reads the command line's form.

What a policy of one's own needs is here too. To write one, read :mod:`kvjax.policies.base`; :mod:`kvjax.policies.names`
lists the ones that come with kvjax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvjax.policies.names import CLASSES

if TYPE_CHECKING:
    from kvjax.cache.packing import store  # noqa: F401
    from kvjax.cache.pool import LayerCache, append_token, keys_and_values, mark_by_head  # noqa: F401
    from kvjax.checks import number, true_or_false, whole_number  # noqa: F401
    from kvjax.policies.base import *  # noqa: F403
    from kvjax.policies.evicting import Evicting  # noqa: F401
    from kvjax.policies.inner import Rescoring  # noqa: F401
    from kvjax.policies.names import *  # noqa: F403
    from kvjax.policies.option_checks import one_of, only_one  # noqa: F401
    from kvjax.policies.parsing import format_policy, parse, register, registry  # noqa: F401
    from kvjax.policies.signals import Repetition  # noqa: F401
    from kvjax.policies.sized import Scoring, Selecting, Sized  # noqa: F401

# Names are imported when first used, so that reading the table of names loads no JAX.
_MODULES = {
    "kvjax.cache.pool": ("LayerCache", "append_token", "keys_and_values", "mark_by_head"),
    "kvjax.cache.packing": ("store",),
    "kvjax.checks": ("number", "true_or_false", "whole_number"),
    "kvjax.policies.base": (
        *("Candidates", "HostOrTraced", "Policy", "PromptChunk", "Selection", "Signals", "Step", "Weighed"),
        *("append_new", "floor_fraction", "gather_candidates", "keep_all", "keep_where"),
        *("numpy_or_jax", "per_head", "selection", "top_mask"),
    ),
    "kvjax.policies.option_checks": ("one_of", "only_one"),
    "kvjax.policies.evicting": ("Evicting",),
    "kvjax.policies.inner": ("Rescoring",),
    "kvjax.policies.parsing": ("format_policy", "parse", "register", "registry"),
    "kvjax.policies.signals": ("Repetition",),
    "kvjax.policies.sized": ("Scoring", "Selecting", "Sized"),
}
_HOMES = CLASSES | {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvjax.policies' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

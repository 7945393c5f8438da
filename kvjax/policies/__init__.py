"""Policies: which tokens a compressed cache keeps. ``parse`` reads the command line's form.

To write a policy, read :mod:`kvjax.policies.base`; :mod:`kvjax.policies.names` lists the ones that come with kvjax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvjax.policies.names import CLASSES

if TYPE_CHECKING:
    from kvjax.policies.base import Candidates, Policy, PromptChunk, Selection, Signals, Step  # noqa: F401
    from kvjax.policies.names import *  # noqa: F403
    from kvjax.policies.parsing import format_policy, parse, register, registry  # noqa: F401
    from kvjax.policies.sized import Selecting, Sized  # noqa: F401

# Names are imported when first used, so that reading the table of names loads no JAX.
_HOMES = CLASSES | {
    "Candidates": "kvjax.policies.base",
    "Policy": "kvjax.policies.base",
    "PromptChunk": "kvjax.policies.base",
    "Selecting": "kvjax.policies.sized",
    "Selection": "kvjax.policies.base",
    "Signals": "kvjax.policies.base",
    "Sized": "kvjax.policies.sized",
    "Step": "kvjax.policies.base",
    "format_policy": "kvjax.policies.parsing",
    "parse": "kvjax.policies.parsing",
    "register": "kvjax.policies.parsing",
    "registry": "kvjax.policies.parsing",
}
__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvjax.policies' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

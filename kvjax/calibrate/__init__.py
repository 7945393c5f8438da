"""Calibration: what a policy must know of a model's heads, found once per model and kept as a small file.

``retrieval_heads`` scores the heads of a rotary model (RazorAttention), ``alibi_scopes`` bounds how far the heads of
an ALiBi model see, ``watershed`` finds the layer from which on RoundAttention keeps rounds in host memory,
``query_filters`` the direction that each head's queries share (QFilters), and ``scorer`` trains the maps that tell
KVzip's scores from hidden states (Learned), ``gates`` what tells retrieval heads (DuoAttention), and
``text_statistics`` what queries and keys are on average over texts (ExpectedAttention, KeyDiff). Each gives a frozen
profile, ``scorer`` and ``gates`` with its training, that ``save_profile`` writes and a policy takes as ``profile=``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvjax.calibrate.alibi import alibi_scopes
    from kvjax.calibrate.divergence import watershed
    from kvjax.calibrate.filters import query_filters
    from kvjax.calibrate.head_gates import gates
    from kvjax.calibrate.kvzip_scorer import scorer
    from kvjax.calibrate.retrieval import retrieval_heads
    from kvjax.calibrate.statistics import text_statistics
    from kvjax.policies.profile import (
        FilterProfile,
        GateProfile,
        HeadProfile,
        ScopeProfile,
        ScorerProfile,
        StatisticsProfile,
        WatershedProfile,
    )
    from kvjax.policies.profile_files import load_profile, save_profile

# Policies read profiles, so this package must not load what reads policies.
_HOMES = {
    "FilterProfile": "kvjax.policies.profile",
    "GateProfile": "kvjax.policies.profile",
    "HeadProfile": "kvjax.policies.profile",
    "ScopeProfile": "kvjax.policies.profile",
    "ScorerProfile": "kvjax.policies.profile",
    "StatisticsProfile": "kvjax.policies.profile",
    "WatershedProfile": "kvjax.policies.profile",
    "alibi_scopes": "kvjax.calibrate.alibi",
    "gates": "kvjax.calibrate.head_gates",
    "load_profile": "kvjax.policies.profile_files",
    "query_filters": "kvjax.calibrate.filters",
    "retrieval_heads": "kvjax.calibrate.retrieval",
    "save_profile": "kvjax.policies.profile_files",
    "scorer": "kvjax.calibrate.kvzip_scorer",
    "text_statistics": "kvjax.calibrate.statistics",
    "watershed": "kvjax.calibrate.divergence",
}

__all__ = [
    "FilterProfile",
    "GateProfile",
    "HeadProfile",
    "ScopeProfile",
    "ScorerProfile",
    "StatisticsProfile",
    "WatershedProfile",
    "alibi_scopes",
    "gates",
    "load_profile",
    "query_filters",
    "retrieval_heads",
    "save_profile",
    "scorer",
    "text_statistics",
    "watershed",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvjax.calibrate' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)

"""Filters of QFilters for a toy model, drawn at random."""

from __future__ import annotations

import numpy as np

from kvjax.model.config import ModelConfig
from kvjax.policies.full import Full
from kvjax.policies.profile import FilterProfile, ModelShape
from kvjax.policies.window_layers import for_model


def random_filters(config: ModelConfig, seed: int = 0) -> FilterProfile:
    """A direction for every KV head of the model's global layers."""
    shape = ModelShape.of(for_model(Full(), config).seen_as(config))
    drawn = np.random.default_rng(seed).standard_normal((shape.num_layers, shape.num_kv_heads * shape.head_dim))
    return FilterProfile("toy", shape, pieces=1, tokens=8, filters=tuple(map(tuple, drawn.round(3).tolist())))

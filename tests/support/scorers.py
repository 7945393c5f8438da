"""Profiles of a toy model that policies cannot do without, drawn at random."""

from __future__ import annotations

import dataclasses

import numpy as np
from support.filters import random_filters

from kvjax.model.config import ModelConfig
from kvjax.policies import DuoAttention, ExpectedAttention, KeyDiff, Learned, QFilters
from kvjax.policies.base import Policy
from kvjax.policies.full import Full
from kvjax.policies.profile import (
    SINGLE,
    GateProfile,
    ModelShape,
    ScorerProfile,
    StatisticsProfile,
    lower_roots,
    packed_numbers,
)
from kvjax.policies.window_layers import for_model


def random_scorer(config: ModelConfig, seed: int = 0) -> ScorerProfile:
    """A linear map for every KV head of the model's global layers."""
    shape = ModelShape.of(for_model(Full(), config).seen_as(config))
    drawn = np.random.default_rng(seed).standard_normal((shape.num_layers, shape.num_kv_heads, shape.hidden_size + 1))
    return ScorerProfile("toy", shape, texts=1, tokens=8, steps=1, correlation=0.0, weights=packed_numbers(drawn))


def random_gates(config: ModelConfig, seed: int = 0) -> GateProfile:
    """A gate for every KV head of the model's global layers."""
    shape = ModelShape.of(for_model(Full(), config).seen_as(config))
    drawn = np.random.default_rng(seed).random((shape.num_layers, shape.num_kv_heads)).round(3)
    gates = tuple(map(tuple, drawn.tolist()))
    return GateProfile("toy", shape, tokens=8, steps=1, sink=1, recent=1, gates=gates)


def random_statistics(config: ModelConfig, seed: int = 0) -> StatisticsProfile:
    """Means and covariances of queries, and anchors, for every head of the model's global layers."""
    shape = ModelShape.of(for_model(Full(), config).seen_as(config))
    rng = np.random.default_rng(seed)
    layers, heads, dim = shape.num_layers, shape.num_heads, shape.head_dim
    spread = 0.5 * rng.standard_normal((layers, heads, dim, dim))
    return StatisticsProfile(
        "toy", shape, pieces=1, tokens=8, seed=0, sink=0,
        means=packed_numbers(1.5 * rng.standard_normal((layers, heads, dim)), SINGLE),
        roots=packed_numbers(lower_roots(spread @ spread.swapaxes(-1, -2))),
        anchors=packed_numbers(0.5 * rng.standard_normal((layers, shape.num_kv_heads, dim)), SINGLE),
    )  # fmt: skip


def with_profiles(policy: Policy, config: ModelConfig) -> Policy:
    """The policy, and those within it, with the profiles that toys have none of."""
    changed = {}
    for field in dataclasses.fields(policy):
        value = getattr(policy, field.name)
        if isinstance(value, Policy):
            changed[field.name] = with_profiles(value, config)
    if isinstance(policy, QFilters) and policy.profile is None:
        changed["profile"] = random_filters(config)
    if isinstance(policy, DuoAttention) and policy.profile is None:
        changed["profile"] = random_gates(config)
    if isinstance(policy, Learned) and policy.profile is None:
        changed["profile"] = random_scorer(config)
    return dataclasses.replace(policy, **changed) if changed else policy


def with_statistics(policy: Policy, config: ModelConfig) -> Policy:
    """The policy, and those within it, with statistics of texts instead of the prompt's."""
    changed: dict[str, object] = {
        field.name: with_statistics(getattr(policy, field.name), config)
        for field in dataclasses.fields(policy)
        if isinstance(getattr(policy, field.name), Policy)
    }
    if isinstance(policy, (ExpectedAttention, KeyDiff)):
        changed["profile"] = random_statistics(config)
    return dataclasses.replace(policy, **changed)

"""Layers that a policy treats alike: one is traced and lowered for all of them, or has a program that all share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvjax.model.config import ModelConfig
from kvjax.model.decoder import Decoder
from kvjax.policies.base import Policy
from kvjax.sharding.mesh import Mesh
from pallas_kernels import dispatch

#: Layers of a kind, on average, from which on a program a kind is compiled much faster than one of all layers.
_MANY_ALIKE = 4
#: Kinds of layers, programs each, that are worth the stops in between: so many, or half of the layers. Compiling them
#: takes no longer than one program of all layers does.
_FEW_KINDS = 4


def numbers_of_kind(policy: Policy, params: Decoder) -> list[tuple[int, bool]]:
    """For each layer the number that the policy's methods are given, and whether it is shared.

    Layers of one :meth:`Policy.layer_kind` are given the number of their first, so that a function traced for one of
    them is found again for the others. Those whose shapes or capacities differ are told apart by the types of their
    arrays.
    """
    return _numbers(policy, [layer.config for layer in params.layers])


def can_stop_between_layers(policy: Policy, config: ModelConfig, mesh: Mesh | None = None) -> bool:
    """Whether prompts may be read whole, layer by layer, by programs that serve several layers each."""
    most = max(_FEW_KINDS, config.num_layers // 2)
    return policy.chunks(config) is None and _kinds(policy, _layers(config), mesh) <= most


def compiles_faster_by_layers(policy: Policy, config: ModelConfig, mesh: Mesh | None = None) -> bool:
    """Whether the programs of single layers are compiled much faster than one of all layers.

    On a CPU not where a policy makes more kinds of them than the model has: of each kind a conversation has two
    programs, which take it as long as two of all layers. Elsewhere those of layers also need less memory: of 8 rows of
    32,768 tokens of an 8B model's 32 layers, compiled for v5e, 8.5 GiB at the peak where one of all layers needs 11.0.
    """
    layers = _layers(config)
    kinds = _kinds(policy, layers, mesh)
    few = kinds <= len(set(layers)) or dispatch.platform() != "cpu"
    return few and kinds * _MANY_ALIKE <= len(layers)


def _layers(config: ModelConfig) -> list[ModelConfig]:
    return [config.layer(i) for i in range(config.num_layers)]


def _kinds(policy: Policy, layers: Sequence[ModelConfig], mesh: Mesh | None) -> float:
    """Programs that read a layer under a policy; without end on a mesh if layers choose together or repeat prompts."""
    if mesh is not None and (policy.shares_layers or policy.signals.repeat is not None):
        return np.inf
    return len({number for number, _ in _numbers(policy, layers)})


def _numbers(policy: Policy, layers: Sequence[ModelConfig]) -> list[tuple[int, bool]]:
    found: list[tuple[int, bool]] = []
    first: dict[object, int] = {}
    for i, layer in enumerate(layers):
        kind = policy.layer_kind(layer, i)
        found.append((i, False) if kind is None else (first.setdefault((kind, layer), i), True))
    return found

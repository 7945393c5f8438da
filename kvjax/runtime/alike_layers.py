"""Layers that a policy treats alike: one is traced and lowered for all of them."""

from __future__ import annotations

from kvjax.model.decoder import Decoder
from kvjax.policies.base import Policy


def numbers_of_kind(policy: Policy, params: Decoder) -> list[tuple[int, bool]]:
    """For each layer the number that the policy's methods are given, and whether it is shared.

    Layers of one :meth:`Policy.layer_kind` are given the number of their first, so that a function traced for one of
    them is found again for the others. Those whose shapes or capacities differ are told apart by the types of their
    arrays.
    """
    found: list[tuple[int, bool]] = []
    first: dict[object, int] = {}
    for i, layer in enumerate(params.layers):
        kind = policy.layer_kind(layer.config, i)
        found.append((i, False) if kind is None else (first.setdefault((kind, layer.config), i), True))
    return found

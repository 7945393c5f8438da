"""Which KV heads profiles say to keep whole, and how many tokens the others see."""

from __future__ import annotations

import functools
import math
from typing import Literal

from kvjax.policies.profile import Bound, GateProfile, HeadProfile, Heads, ScopeProfile, Table


@functools.lru_cache(maxsize=64)
def protected_heads(
    profile: HeadProfile, induction_share: float, echo_share: float, share_of: Literal["query", "kv"]
) -> Heads:
    """KV heads that keep everything, by layer: the top fractions by induction and by echo score, over all layers.

    With ``share_of="query"`` the fractions count query heads, and a KV head is protected when any of its query heads is
    among the top; with "kv" they count KV heads, each scored by the best of its query heads. A fraction above 0 is at
    least one head; of equal scores the earlier head's comes first.
    """
    group = profile.shape.num_heads // profile.shape.num_kv_heads
    chosen: set[tuple[int, int]] = set()
    for table, share in ((profile.induction, induction_share), (profile.echo, echo_share)):
        if share_of == "kv":
            table = _best_of_group(table, group)
        ranked = sorted((-score, layer, head) for layer, row in enumerate(table) for head, score in enumerate(row))
        count = max(round(share * len(ranked)), 1) if share > 0 else 0
        for _, layer, head in ranked[:count]:
            chosen.add((layer, head if share_of == "kv" else head // group))
    layers, heads = profile.shape.num_layers, profile.shape.num_kv_heads
    return tuple(tuple(head for head in range(heads) if (layer, head) in chosen) for layer in range(layers))


@functools.lru_cache(maxsize=64)
def scope_lengths(
    profile: ScopeProfile, bound: Bound, eps: float, attention_scale: float
) -> tuple[tuple[int, ...], ...]:
    """L_h of every KV head in whole tokens [2], [layer][KV head]; the longest of the query heads that share it.

    Args:
      profile: the bounds of a model's heads.
      bound: "scaled" is [2] for scaled logits, which is how every supported model computes them; "paper" is [2] as
        printed, without the scale; "safe" holds for every input.
      eps: the most attention a token beyond the scope may get.
      attention_scale: of the model's logits.
    """
    group = profile.shape.num_heads // profile.shape.num_kv_heads
    limits = profile.safe if bound == "safe" else profile.paper
    scale = attention_scale if bound == "scaled" else 1.0  # "safe" is stored scaled
    reach = tuple(
        tuple((limit * scale - math.log(eps)) / slope for limit, slope in zip(*rows, strict=True))
        for rows in zip(limits, profile.slopes, strict=True)
    )
    return tuple(tuple(math.ceil(length) for length in row) for row in _best_of_group(reach, group))


@functools.lru_cache(maxsize=64)
def gated_heads(profile: GateProfile, count: int) -> Heads:
    """The ``count`` KV heads with the highest gates, by layer; of equal gates the earlier head's comes first."""
    ranked = sorted((-gate, layer, head) for layer, row in enumerate(profile.gates) for head, gate in enumerate(row))
    chosen = {(layer, head) for _, layer, head in ranked[:count]}
    layers, heads = profile.shape.num_layers, profile.shape.num_kv_heads
    return tuple(tuple(head for head in range(heads) if (layer, head) in chosen) for layer in range(layers))


def _best_of_group(table: Table, group: int) -> Table:
    """The largest of each KV head's query heads."""
    return tuple(tuple(max(row[i : i + group]) for i in range(0, len(row), group)) for row in table)

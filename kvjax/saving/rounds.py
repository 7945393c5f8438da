"""A conversation of rounds in its canonical form: its lower layers as any cache, and every round's one array.

A round's array has no layout, only padding to its bucket, which is not written.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.cache import Cache
from kvjax.cache.host_memory import HOST
from kvjax.rounds.conversation import Conversation, Round, UpperRows
from kvjax.saving.canonical import Counts, canonical, restored
from kvjax.saving.schema import SavedRound, SavedRounds


def rows_of(conversation: Conversation) -> list[list[Round]]:
    """The prefix and the rounds of each row."""
    return [[first, *rest] for first, rest in zip(conversation.prefix, conversation.rounds, strict=True)]


def describe_rounds(conversation: Conversation) -> dict[str, Any]:
    """The description that is written of rounds: where each is in its conversation, and its sizes."""
    described = [
        [
            {
                "start": part.start,
                "tokens": part.tokens,
                "used": part.used,
                "held": part.held.tolist(),
                "layers": part.upper.kv.shape[0],
                "room": part.upper.kv.shape[3],
                "count": _count(part),
            }
            for part in row
        ]
        for row in rows_of(conversation)
    ]
    return {"asked": list(conversation.asked), "parts": described}


def _count(part: Round) -> int:
    """Slots that its upper layers hold at most."""
    return max(int(part.held[-part.upper.kv.shape[0] :].max()), 1)


def canonical_rounds(conversation: Conversation, counts: Counts) -> dict[str, Any]:
    """A conversation as plain dictionaries of arrays; rounds stay in host memory."""
    parts = [[_trimmed(part.upper, _count(part)) for part in row] for row in rows_of(conversation)]
    return {"lower": canonical(conversation.lower, counts), "parts": parts}


def _trimmed(upper: UpperRows, count: int) -> dict[str, Any]:
    tree = {"kv": np.asarray(upper.kv)[:, :, :, :count]}
    if upper.k_scale is not None:
        tree |= {"k_scale": np.asarray(upper.k_scale), "v_scale": np.asarray(upper.v_scale)[:, :, :count]}
    return tree


def shapes_of_rounds(
    lower: dict[str, Any], described: SavedRounds, head_dim: int, dtype: Any, quantised: bool
) -> dict[str, Any]:
    """Shapes of :func:`canonical_rounds`, as described."""

    def part(item: SavedRound) -> dict[str, Any]:
        layers, heads = item.layers, len(item.held[0])
        rows = (layers, 2, heads, item.count, head_dim)
        if not quantised:
            return {"kv": jax.ShapeDtypeStruct(rows, dtype)}
        return {
            "kv": jax.ShapeDtypeStruct(rows, jnp.int8),
            "k_scale": jax.ShapeDtypeStruct((layers, heads, head_dim), jnp.float32),
            "v_scale": jax.ShapeDtypeStruct((layers, heads, item.count), jnp.float32),
        }

    return {"lower": lower, "parts": [[part(item) for item in row] for row in described.parts]}


def sharded_rounds(shapes: dict[str, Any], device: Any) -> dict[str, Any]:
    """The same shapes with where they are loaded to: the lower layers and the prefixes to the device, rounds to the
    host's memory."""
    host = device.with_memory_kind(HOST)
    parts = [[with_sharding(part, device if i == 0 else host) for i, part in enumerate(row)] for row in shapes["parts"]]
    return {"lower": with_sharding(shapes["lower"], device), "parts": parts}


def with_sharding(tree: Any, sharding: Any) -> Any:
    """Shapes with where their arrays are to be."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def restored_rounds(
    tree: dict[str, Any], empty: Cache, counts: Counts, described: SavedRounds, policy: Any
) -> Conversation:
    """Undo :func:`canonical_rounds`."""
    rows = [
        [_round(saved, item) for saved, item in zip(row, items, strict=True)]
        for row, items in zip(tree["parts"], described.parts, strict=True)
    ]
    return Conversation(
        lower=restored(tree["lower"], empty, counts),
        prefix=tuple(row[0] for row in rows),
        rounds=tuple(tuple(row[1:]) for row in rows),
        asked=described.asked,
        policy=policy,
    )


def _round(saved: dict[str, Any], item: SavedRound) -> Round:
    def padded(x: jax.Array, axis: int) -> jax.Array:
        # Padded on the host, since it is there that most of them stay.
        fill = [(0, item.room - item.count if i == axis else 0) for i in range(x.ndim)]
        return jax.device_put(np.pad(np.asarray(x), fill), x.sharding)

    upper = UpperRows(
        kv=padded(saved["kv"], 3),
        k_scale=saved.get("k_scale"),
        v_scale=padded(saved["v_scale"], 2) if "v_scale" in saved else None,
    )
    return Round(item.start, item.tokens, np.asarray(item.held, np.int32), upper, item.used)

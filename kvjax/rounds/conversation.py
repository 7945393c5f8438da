"""A conversation of rounds as a value, which one turn leaves and the next one starts from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.array_bytes import nbytes
from kvjax.cache.cache import Cache, take
from kvjax.cache.host_memory import to_device, to_host
from kvjax.cache.quantisation import Storage
from kvjax.checks import row_number
from kvjax.errors import UsageError
from kvjax.policies.round_attention import RoundAttention


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class UpperRows:
    """Keys and values of one row's round in the layers above the watershed: one array, padded to N slots.

    N is a bucket, and on a mesh a multiple of the devices that share a head.

    Attributes:
      kv: [L - Lw, 2, H, N, D] keys after rotary, then values; int8 when there are scales.
      k_scale: [L - Lw, H, D] of int8 key channels, or None. v_scale: [L - Lw, H, N] of int8 values, or None.
    """

    kv: Float[Array, "L 2 H N D"] | Int[Array, "L 2 H N D"]
    k_scale: Float[Array, "L H D"] | None = None
    v_scale: Float[Array, "L H N"] | None = None

    @property
    def nbytes(self) -> int:
        return nbytes(self)

    def logical_axes(self) -> list[tuple[str | None, ...]]:
        """Axes of its arrays on a mesh; devices that share a head have a block of its slots each."""
        kv = (None, None, "kv_head", "slot")
        return [kv] if self.k_scale is None else [kv, (None, "kv_head"), (None, "kv_head", "slot")]


@dataclasses.dataclass(frozen=True, eq=False)
class Round:
    """One row's round.

    Attributes:
      start: position of its first token. tokens: how many it has.
      held: [L, H] slots it holds in every layer and KV head; ``tokens``, unless an inner policy chose among them.
      upper: its rows above the watershed, in host memory.
      used: the row's question that selected it last, or that it began with.
    """

    start: int
    tokens: int
    held: Int[np.ndarray, "L H"]
    upper: UpperRows
    used: int


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Conversation:
    """Rows under RoundAttention between two turns; ``output.cache`` under that policy.

    Attributes:
      lower: the layers below the watershed with all rounds, and the counters, on the device unless parked. While a
        turn runs on a mesh it may have rows of padding behind the others.
      prefix: of each row, the sinks and the system prompt, which belong to no round; on the device unless parked.
      rounds: of each row, its rounds in order. Slots of ``lower`` are the prefix's, then those of each round.
      asked: of each row, questions so far.
      policy: which rounds a question sees.
    """

    lower: Cache
    prefix: tuple[Round, ...]
    rounds: tuple[tuple[Round, ...], ...]
    asked: tuple[int, ...]
    policy: RoundAttention

    # --- what can be continued: see kvjax.cache.continuation ---------------------------------------------------

    @property
    def batch(self) -> int:
        return len(self.asked)

    @property
    def seen(self) -> Int[Array, " B"]:
        return self.lower.seen

    @property
    def next_token(self) -> Int[Array, " B"]:
        return self.lower.next_token

    @property
    def storage(self) -> Storage:
        return self.lower.storage

    @property
    def device_layers(self) -> Cache:
        return self.lower

    def with_device_layers(self, cache: Cache) -> Conversation:
        return self.replace(lower=cache)

    @property
    def model_shape(self) -> tuple[int, int, int]:
        """Layers, KV heads and channels of the model it belongs to."""
        below, heads, dim = self.lower.model_shape
        return below + self.prefix[0].upper.kv.shape[0], heads, dim

    def __repr__(self) -> str:
        """Rows, rounds, policy and bytes, without the arrays."""
        rounds = [len(row) for row in self.rounds]
        sizes = f"nbytes={self.nbytes:,}, host_nbytes={self.host_nbytes:,}"
        return f"Conversation(rows={self.batch}, rounds={rounds}, policy={self.policy}, {sizes})"

    @property
    def nbytes(self) -> int:
        """Allocated bytes but for the rounds' upper layers: device memory, unless parked."""
        return self.lower.nbytes + sum(part.upper.nbytes for part in self.prefix)

    @property
    def host_nbytes(self) -> int:
        """Bytes of the rounds' upper layers, in host memory."""
        return sum(part.upper.nbytes for row in self.rounds for part in row)

    def replace(self, **changes: Any) -> Conversation:
        return dataclasses.replace(self, **changes)

    def row(self, index: int) -> Conversation:
        """One row as a conversation of batch 1."""
        return self.take([row_number("conversation", index, self.batch)])

    def take(self, indices: Sequence[int]) -> Conversation:
        """Rows in the given order; a row may be taken several times, and its rounds are then shared."""
        return self.records(indices).replace(lower=take(self.lower, indices))

    def records(self, indices: Sequence[int]) -> Conversation:
        """Rows as :meth:`take` gives them but for the lower layers, which stay as they are."""
        return self.replace(
            prefix=tuple(self.prefix[i] for i in indices),
            rounds=tuple(self.rounds[i] for i in indices),
            asked=tuple(self.asked[i] for i in indices),
        )

    def join(self, others: Sequence[Conversation]) -> Conversation:
        """One batch with others that share its policy and model, in order."""
        every = [self, *others]
        if any(one.policy != self.policy for one in others):
            raise UsageError("Conversations of one batch must share their policy; continue these one by one instead.")
        return Conversation(
            lower=self.lower.join([one.lower for one in others]),
            prefix=sum((one.prefix for one in every), ()),
            rounds=sum((one.rounds for one in every), ()),
            asked=sum((one.asked for one in every), ()),
            policy=self.policy,
        )

    def to_host(self) -> Conversation:
        """All of it in host memory, for an idle user (section 3.2, step 1); the next turn brings it back."""
        lower, prefix = to_host((self.lower, [part.upper for part in self.prefix]))
        return self.replace(lower=lower, prefix=self._with_prefix(prefix))

    def to_device(self) -> Conversation:
        """Ready for a turn: the lower layers on the device."""
        lower, prefix = to_device((self.lower, [part.upper for part in self.prefix]))
        return self.replace(lower=lower, prefix=self._with_prefix(prefix))

    def _with_prefix(self, upper: Sequence[UpperRows]) -> tuple[Round, ...]:
        return tuple(dataclasses.replace(part, upper=rows) for part, rows in zip(self.prefix, upper, strict=True))

    def without_idle(self, questions: int, delete: Callable[[Cache, np.ndarray], Cache]) -> Conversation:
        """Without the rounds that none of the last so many questions selected (section 3.4), in any layer.

        ``delete`` leaves of a cache's slots those that a mask [L, B, H, C] has.
        """
        stays = [[self.asked[row] - part.used < questions for part in parts] for row, parts in enumerate(self.rounds)]
        if all(map(all, stays)):
            return self
        most = max(max(pool.slots) for pool in self.lower.pools)
        keep = np.zeros((len(self.lower.layers), self.lower.batch, len(self.prefix[0].held[0]), most), bool)
        for row, stay in enumerate(stays):
            edges = self.slots(row)
            for first, last, here in zip(edges[:-1], edges[1:], [True, *stay], strict=True):
                for layer, head in np.ndindex(keep.shape[0], keep.shape[2]):
                    keep[layer, row, head, first[layer, head] : last[layer, head]] = here
        rounds = (
            tuple(part for part, here in zip(parts, stay, strict=True) if here)
            for parts, stay in zip(self.rounds, stays, strict=True)
        )
        return self.replace(lower=delete(self.lower, keep), rounds=tuple(rounds))

    def slots(self, row: int) -> Int[np.ndarray, "R+2 L H"]:
        """First slot of the row's prefix, of each of its rounds, and the end of the last, by layer and head."""
        held = [self.prefix[row].held, *(part.held for part in self.rounds[row])]
        return np.concatenate([np.zeros_like(held[:1]), np.cumsum(held, axis=0)])

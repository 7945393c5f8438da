"""``Plan``: the bytes of a request by what they are for, and the table of them."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from typing import Any

from kvjax.tables import Column, Table, human_bytes, windows_text


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes of a request; on a mesh, those on each of its devices, which all hold equally many.

    Attributes:
      policy: its text form.
      mesh: its text form, or None.
      batch, prompt_tokens, max_new_tokens: the request. rows: those that are allocated, on all devices together.
      weights_bytes: the model's parameters.
      cache_bytes: the cache as allocated when decoding ends, counters included; exact. Of RoundAttention's first
        question, which holds all tokens in all layers; with ``inner``, which keeps less of a context, at most so much.
      later_bytes: of RoundAttention alone, the cache while a later question is answered in a conversation of as many
        tokens of which ``top`` are selected.
      spare_bytes: how much of it the request does not need: rows that pad the batch, buckets of lengths, and what is
        reserved for later turns (:mod:`kvjax.allocation`). What does not fit with it is allocated without.
      prefill_peak_bytes: what prefill needs beside weights and cache at its worst moment; an estimate from shapes.
      full_cache_bytes: keys and values of every token that is fed, unpadded, for comparison; of a mesh an even share.
      context_tokens: tokens before every prompt, which are read once.
      shares_context: whether rows share slots of a context, or hold a copy of it each.
      context_bytes: of ``cache_bytes``, what the rows share of the context.
      cache_over_even: ``cache_bytes`` over an even share of the cache that one device alone would hold; what is above 1
        is rows without which the mesh would not divide them, pages that do not divide, and counters that several
        devices hold.
      total_bytes: weights, cache and prefill peak.
      memory_limit: bytes the device has, or None when it does not say; of a GPU, those that JAX may take.
      memory_source: on a GPU, where that number comes from.
      capacities: slots allocated for each row [layer][KV head], those that rows share apart.
      retained: tokens kept of the prompt [layer][KV head], its context included.
      windows: of each layer its sliding window in tokens, whatever the policy, or None of a global layer; empty where
        all layers are global.
      notice: what the policy cannot do for prompts of this length, and what would; None where it can.
      choice: where the policy was asked for as ``best``, the one that it became and why, in one line.
    """

    policy: str
    batch: int
    prompt_tokens: int
    max_new_tokens: int
    weights_bytes: int
    cache_bytes: int
    prefill_peak_bytes: int
    full_cache_bytes: int
    total_bytes: int
    memory_limit: int | None
    capacities: tuple[tuple[int, ...], ...]
    retained: tuple[tuple[int, ...], ...]
    mesh: str | None = None
    cache_over_even: float = 1.0
    spare_bytes: int = 0
    context_tokens: int = 0
    shares_context: bool = False
    context_bytes: int = 0
    memory_source: str | None = None
    windows: tuple[int | None, ...] = ()
    notice: str | None = None
    choice: str | None = None
    later_bytes: int | None = None
    rows: int = 0

    @property
    def fits(self) -> bool:
        """Whether the device has room for it, as far as it says."""
        return self.memory_limit is None or self.total_bytes <= self.memory_limit

    @property
    def retained_fraction(self) -> float:
        """Tokens kept of the prompt over those there are, in all global layers and heads together."""
        windows = self.windows or (None,) * len(self.retained)
        chosen = [heads for heads, window in zip(self.retained, windows, strict=True) if window is None]
        kept = [count for heads in chosen or self.retained for count in heads]
        return sum(kept) / (len(kept) * (self.context_tokens + self.prompt_tokens))

    def table(self) -> str:
        """The plan as text: bytes by part, then slots and retained tokens by layer and head (equal layers together)."""
        parts = [
            ("weights", self.weights_bytes),
            ("cache", self.cache_bytes),
            ("  of it spare, for padding and later turns", self.spare_bytes),
            ("prefill peak", self.prefill_peak_bytes),
            ("total" if self.mesh is None else "total, each device", self.total_bytes),
            ("full cache, for comparison", self.full_cache_bytes),
        ]
        if self.later_bytes is not None:
            parts.insert(3, ("  of a later question, when rounds are offloaded", self.later_bytes))
        if self.memory_limit is not None:
            parts.append(("device memory", self.memory_limit))
        sizes = (
            Column("part", operator.itemgetter(0)),
            Column("size", operator.itemgetter(1), human_bytes, right=True),
            Column("bytes", operator.itemgetter(1), "{:,} bytes".format, right=True),
        )
        slots = (
            Column("layers", lambda ends: f"{ends[0]}" if ends[0] == ends[1] else f"{ends[0]}-{ends[1]}"),
            Column("slots", lambda ends: f"{_heads(self.capacities[ends[0]])};"),
            Column("retained", lambda ends: f"{_heads(self.retained[ends[0]])} retained{self._window(ends[0])}"),
        )
        windows = self.windows or (None,) * len(self.capacities)
        layers = _equal_ranges(list(zip(self.capacities, self.retained, windows, strict=True)))
        lines = Table(sizes, parts).text().splitlines()
        if self.mesh is not None:
            lines.append(
                f"on each device of {self.mesh}: {self.cache_over_even:.3f} times an even share of one device's cache"
                f"{self._padding}"
            )
        if self.context_tokens and self.shares_context:
            shared = human_bytes(self.context_bytes)
            lines.append(f"context of {self.context_tokens:,} tokens: {shared}, which all rows share")
        elif self.context_tokens:
            lines.append(f"context of {self.context_tokens:,} tokens: every row holds a copy of what is kept of it")
        if self.memory_source is not None:
            lines.append(f"device memory: {self.memory_source}")
        if self.windows:
            lines.append(f"sliding windows, whatever the policy: {windows_text(self.windows)}")
        over = "all layers" if None not in self.windows else "global layers"
        lines.append(f"retained of {self._seen}, over {over} and heads: {self.retained_fraction:.1%}")
        lines += [line for line in (self.notice, self.choice) if line is not None]
        own = " of a row's own" if self.context_tokens and self.shares_context else ""
        lines.append(f"layers, slots{own} by KV head, and tokens retained of {self._seen}:")
        lines += Table(slots, layers).text().splitlines()
        head = f"{self.policy}: batch {self.batch}, {self.prompt_tokens} prompt + {self.max_new_tokens} new tokens"
        return "\n  ".join([head, *lines])

    @property
    def _seen(self) -> str:
        return "context and prompt" if self.context_tokens else "the prompt"

    @property
    def _padding(self) -> str:
        """The rows that are made of the batch, where they are more."""
        return "" if self.rows == self.batch else f"; the batch is padded to {self.rows} rows"

    def _window(self, layer: int) -> str:
        window = self.windows[layer] if self.windows else None
        return "" if window is None else f" (sliding window of {window:,})"

    def __str__(self) -> str:
        return self.table()


def _equal_ranges(items: list[Any]) -> list[tuple[int, int]]:
    edges = [0, *(i for i in range(1, len(items)) if items[i] != items[i - 1]), len(items)]
    return [(a, b - 1) for a, b in itertools.pairwise(edges)]


def _heads(values: tuple[int, ...]) -> str:
    return f"{len(values)} x {values[0]:,}" if len(set(values)) == 1 else ", ".join(f"{v:,}" for v in values)

"""LagKV: keep what the tokens that follow do not predict (Liang et al., arXiv 2504.04704). Attention-free."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.pool import LayerCache
from kvjax.cache.regions import Region, each, put_pages, take_pages
from kvjax.checks import MOST_SLOTS, number, whole_number
from kvjax.errors import UsageError
from kvjax.model.config import ModelConfig
from kvjax.policies.base import (
    HostOrTraced,
    Policy,
    PromptChunk,
    floor_fraction,
    gather_candidates,
    keep_all,
    keep_where,
    numpy_or_jax,
    per_head,
)
from kvjax.policies.option_checks import one_of, only_one


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LagState:
    """Counters of one layer; the same in every head, since each keeps equally many tokens of a partition.

    Attributes:
      static: [B] slots that are never scored again: the sinks and what earlier compressions kept.
      covered: [B] tokens those slots stand for, kept or dropped.
      shared: [B] how many of the static slots rows share, so that they are not in the pool; None for none.
    """

    static: Int[Array, " B"]
    covered: Int[Array, " B"]
    shared: Int[Array, " B"] | None = None

    @property
    def elsewhere(self) -> Int[Array, " B"]:
        """[B] static slots that are not in the pool."""
        return jnp.zeros_like(self.static) if self.shared is None else self.shared


@dataclasses.dataclass(frozen=True)
class LagKV(Policy):
    """Per partition of `lag` tokens keep those that stand out against the next one (LagKV, arXiv 2504.04704).

    The first ``sink`` tokens stay. The rest is cut into partitions of ``lag`` from the left; each but the last full
    one is compressed, with the partition after it as reference [7-11]; the last full partition and the remainder are
    the sliding window. Nothing happens while the rest is shorter than two partitions. While decoding the same happens
    each time the rest reaches 2 x lag; kept tokens are never scored again, and stay in order of position.

    Size, exactly one of: ``ratio``, the overall retained fraction of the row, from which the fraction of a partition is
    solved by [12, 13] (a short row may not reach it: sinks and a window of L to 2 L - 1 tokens always stay, and where
    these take all that the ratio allows, nothing between them does, which is said once); ``budget``, the same in
    tokens of the whole row, at which it stays while decoding, but for the window's coming and going;
    ``partition_ratio``, the paper's r. With none, ratio is 0.25. Where [12] leaves the moment open (decoding, later
    turns, chunks) it is solved anew for the partitions being compressed, from the slots and the tokens the row has by
    then, so that the row as a whole holds ``ratio`` as soon as it can.

    ``variant``: "lag" is the paper's; "local" normalises with the partition itself (LocalKV [14, 15]); "l2" scores by
    -|k| and leaves the first two layers whole ([16] and the official code). ``prefill="chunked"`` reads the prompt in
    chunks (sink + 2 x lag, then lag tokens) and compresses between them, which bounds the memory of a prompt and
    changes what later tokens see.

    Decided where the paper is silent: the standard deviation is torch's (ddof = 1), as in the official code; a
    channel whose reference does not vary normalises to 0; ties go to the later token.
    """

    ratio: float | None = None
    partition_ratio: float | None = None
    budget: int | None = None
    sink: int = 16
    lag: int = 128
    variant: Literal["lag", "local", "l2"] = "lag"
    prefill: Literal["whole", "chunked"] = "whole"

    layers_alike: ClassVar[bool] = True
    maintains: ClassVar[bool] = True

    def __post_init__(self) -> None:
        only_one("LagKV", ratio=self.ratio, partition_ratio=self.partition_ratio, budget=self.budget)
        if self.ratio is None and self.partition_ratio is None and self.budget is None:
            object.__setattr__(self, "ratio", 0.25)
        for name in ("ratio", "partition_ratio"):
            if getattr(self, name) is not None:
                number(name, getattr(self, name), 0, 1, open_below=True)
        whole_number("sink", self.sink, 0, MOST_SLOTS)
        whole_number("lag", self.lag, 2, MOST_SLOTS)
        if self.budget is not None:
            whole_number("budget", self.budget, 1, MOST_SLOTS)
            if self.budget < self.sink + self.lag:
                raise UsageError(
                    f"A budget of {self.budget} tokens is smaller than {self.sink} sinks and a window of {self.lag}; "
                    f"give at least {self.sink + self.lag}, or a smaller lag."
                )
        one_of("variant", self.variant, ("lag", "local", "l2"))
        one_of("prefill", self.prefill, ("whole", "chunked"))

    def check(self, config: ModelConfig) -> None:
        if self.variant == "l2" and config.num_layers <= self._skipped:
            raise UsageError(
                f'variant="l2" leaves the first {self._skipped} layers whole, and this model has '
                f"{config.num_layers}; it would compress nothing."
            )

    def notice(self, config: ModelConfig, total: int) -> str | None:
        """Between its sinks and its window a row of so many tokens loses everything."""
        if not self._keeps_none(total):
            return None
        window = self.lag + (total - self.sink) % self.lag
        held, partitions = self.sink + window, (total - self.sink) // self.lag - 1
        if self.partition_ratio is not None:
            way = f"partition_ratio={math.ceil(1000 / self.lag) / 1000:g}"
        elif self.budget is not None:
            way = f"budget={held + partitions}"
        else:
            way = f"ratio={math.ceil((held + partitions) / total * 1000) / 1000:g}"
        smaller = (dataclasses.replace(self, lag=lag) for lag in range(min(self.lag, total) - 1, 1, -1))
        found = next((policy.lag for policy in smaller if not policy._keeps_none(total)), None)
        return (
            f"LagKV keeps none of the {total - held:,} tokens between {self.sink} sinks and a window of {window} in a "
            f"row of {total:,}; {way}{'' if found is None else f' or lag={found}'} keeps some."
        )

    def useless(self, config: ModelConfig, total: int) -> bool:
        return self._keeps_none(total)

    def _keeps_none(self, total: int) -> bool:
        """Whether a row of so many tokens is compressed to its sinks and its window."""
        sinks = np.asarray([min(total, self.sink)])
        compressed = total - int(sinks[0]) >= 2 * self.lag
        return compressed and int(self._keep(np.asarray([total]), sinks, sinks)[0]) == 0

    @property
    def _skipped(self) -> int:
        return 2 if self.variant == "l2" else 0

    def chunks(self, config: ModelConfig) -> tuple[int, int] | None:
        return (self.sink + 2 * self.lag, self.lag) if self.prefill == "chunked" else None

    def layer_kind(self, config: ModelConfig, layer: int) -> Hashable | None:
        kind = super().layer_kind(config, layer)
        return kind if kind is None else layer < self._skipped

    # --- how many ---------------------------------------------------------------------------------------------

    def _keep(self, total: HostOrTraced, static: HostOrTraced, covered: HostOrTraced) -> Any:
        """Tokens kept of each partition now compressed, [12] solved for r at this moment; floor(r L), in [0, L].

        ``total`` tokens seen, ``static`` slots standing for ``covered`` of them; NumPy in, NumPy out.
        """
        lag, xp = self.lag, numpy_or_jax(total)
        if self.partition_ratio is not None:
            # Python's own floor of the product, as the official code: 0.29 of 100 is 28 there.
            return xp.full(xp.shape(total), int(self.partition_ratio * lag), xp.int32)
        partitions = xp.maximum((total - covered) // lag - 1, 1)
        window = lag + (total - covered) % lag
        spare = self._target(total) - static - window
        return xp.clip(spare // partitions, 0, lag).astype(xp.int32)

    def _target(self, total: HostOrTraced | int) -> Any:
        """Tokens the row should hold of ``total``."""
        if self.budget is not None:
            return self.budget
        return floor_fraction(self.ratio or 1.0, total)

    def budgets(self, config: ModelConfig, layer: int, total: HostOrTraced) -> HostOrTraced:
        xp = numpy_or_jax(total)
        sinks = xp.minimum(total, self.sink)
        partitions = xp.maximum((total - sinks) // self.lag - 1, 0)
        keep = xp.where(partitions > 0, self._keep(total, sinks, sinks), 0)
        kept = total - partitions * (self.lag - keep)
        kept = total if layer < self._skipped else kept
        return per_head(kept, config)

    def capacities(self, config: ModelConfig, prompt: int, new: int) -> tuple[tuple[int, ...], ...]:
        tokens, heads = prompt + new, config.num_kv_heads
        bound = min(self._longest(tokens), tokens)
        return tuple((tokens if layer < self._skipped else bound,) * heads for layer in range(config.num_layers))

    def _longest(self, tokens: int) -> int:
        """The most slots a row of at most ``tokens`` tokens ever holds, over any prompts, chunks and turns.

        The rest never exceeds 2 L. The static slots are the sinks and, with ``partition_ratio``, r L of every partition
        but the last; with ``ratio`` they only ever grow to where they fill that fraction together with a window of L.
        """
        if self.partition_ratio is not None:
            partitions = max((tokens - self.sink) // self.lag - 1, 0)
            return self.sink + int(self.partition_ratio * self.lag) * partitions + 2 * self.lag
        return max(self.sink + 2 * self.lag, int(self._target(tokens)) + self.lag)

    # --- what rows share --------------------------------------------------------------------------------------

    @property
    def shares_context(self) -> bool:
        """True: slots that earlier compressions kept are never scored again; the sliding window is each row's own."""
        return True

    def shared_slots(self, layer: int, cache: LayerCache, config: ModelConfig) -> Int[Array, "B H"]:
        if layer < self._skipped:
            return cache.length
        return jnp.broadcast_to(cache.state.static[:, None], cache.length.shape)

    def beyond_shared(self, state: Any, shared: Int[Array, "B H"] | None) -> Any:
        return dataclasses.replace(state, shared=None if shared is None else shared[:, 0])

    def own_capacities(self, config: ModelConfig, prompt: int, own: int, new: int) -> tuple[tuple[int, ...], ...]:
        # What is no slot of the context's, and its sliding window of less than two partitions.
        beyond = own + new + 2 * self.lag
        whole = self.capacities(config, prompt, new)
        rest = zip(whole, range(config.num_layers), strict=True)
        return tuple(tuple(min(n, own + new if i < self._skipped else beyond) for n in heads) for heads, i in rest)

    # --- which ------------------------------------------------------------------------------------------------

    def _scores(self, part: Float[Array, "... L D"], reference: Float[Array, "... L D"]) -> Float[Array, "... L"]:
        """[7-10] for keys or values: softmax over the partition of the deviation across normalised channels."""
        part, reference = part.astype(jnp.float32), reference.astype(jnp.float32)
        low, high = reference.min(axis=-2, keepdims=True), reference.max(axis=-2, keepdims=True)
        span = high - low
        normal = jnp.where(span > 0, (part - low) / jnp.where(span > 0, span, 1.0), 0.0)
        # Sums over channels as products with ones: XLA's CPU reduction over the last axis is scalar code, 5x slower.
        ones = jnp.ones((normal.shape[-1],), jnp.float32)
        exact = jax.lax.Precision.HIGHEST
        centred = normal - jnp.matmul(normal, ones, precision=exact)[..., None] / ones.size
        variance = jnp.matmul(centred * centred, ones, precision=exact) / (ones.size - 1)
        return jax.nn.softmax(jnp.sqrt(variance), axis=-1)

    def _partition_scores(
        self, k: Float[Array, "... L D"], v: Float[Array, "... L D"], next_k: Array, next_v: Array
    ) -> Float[Array, "... L"]:
        """[11], or the variant's score, of one partition's tokens given the partition after it."""
        if self.variant == "l2":
            return -jnp.linalg.norm(k.astype(jnp.float32), axis=-1)
        if self.variant == "local":
            next_k, next_v = k, v
        return self._scores(k, next_k) + self._scores(v, next_v)

    def _scores_of_pair(
        self, pair: Float[Array, "2 ... L D"], following: Float[Array, "2 ... L D"]
    ) -> Float[Array, "... L"]:
        """:meth:`_partition_scores` of keys and values in one array."""
        if self.variant == "l2":
            return self._partition_scores(*pair, *following)
        k, v = self._scores(pair, pair if self.variant == "local" else following)
        return k + v

    def init_state(self, config: ModelConfig, layer: int, batch: int, slots: tuple[int, ...]) -> Any:
        return LagState(jnp.zeros((batch,), jnp.int32), jnp.zeros((batch,), jnp.int32))

    def compress(
        self, layer: int, cache: LayerCache, k: Float[Array, "B H T D"], v: Float[Array, "B H T D"], chunk: PromptChunk
    ) -> LayerCache:
        candidates = gather_candidates(cache, k, v, chunk)
        if layer < self._skipped:
            return keep_all(cache, candidates, chunk)
        state: LagState = cache.state
        before = state.elsewhere
        length = candidates.length[:, 0] + before
        # Sinks become static as they arrive.
        new_sinks = jnp.clip(self.sink - state.static, 0, length - state.static)
        new_sinks = jnp.where(state.covered < self.sink, new_sinks, 0)
        static, covered = state.static + new_sinks, state.covered + new_sinks
        partitions = jnp.maximum((length - static) // self.lag - 1, 0)
        if candidates.k.shape[2] < 2 * self.lag:  # two partitions cannot fit: nothing is ever compressed here
            return keep_all(cache, candidates, chunk).replace(state=LagState(static, covered, state.shared))
        keep_each = self._keep(chunk.total, static, covered)
        here = candidates.length[:, 0], static - before
        keep = self._keep_mask(candidates.k, candidates.v, *here, partitions, keep_each)
        cache = keep_where(cache, candidates, keep, chunk)
        state = LagState(static + partitions * keep_each, covered + partitions * self.lag, state.shared)
        return cache.replace(state=state)

    def _keep_mask(
        self,
        k: Float[Array, "B H N D"],
        v: Float[Array, "B H N D"],
        length: Int[Array, " B"],
        static: Int[Array, " B"],
        partitions: Int[Array, " B"],
        keep_each: Int[Array, " B"],
    ) -> Bool[Array, "B H N"]:
        """The rows that stay: static ones, the best of each of the first ``partitions``, and the sliding window."""
        batch, heads, size, dim = k.shape
        lag, count = self.lag, -(-size // self.lag)
        # Partitions of a row start where its static slots end: shift each row so that they start at 0.
        order = static[:, None] + jnp.arange(count * lag)
        source = jnp.minimum(order, size - 1)[:, None, :, None]
        parts_k = jnp.take_along_axis(k, source, axis=2).reshape(batch, heads, count, lag, dim)
        parts_v = jnp.take_along_axis(v, source, axis=2).reshape(batch, heads, count, lag, dim)
        scores = self._partition_scores(parts_k[:, :, :-1], parts_v[:, :, :-1], parts_k[:, :, 1:], parts_v[:, :, 1:])
        best = rank_descending(scores) < keep_each[:, None, None, None]
        scored = jnp.arange(count - 1) < partitions[:, None]
        stays = (best | ~scored[:, None, :, None]).reshape(batch, heads, -1)
        stays = jnp.pad(stays, ((0, 0), (0, 0), (0, lag)), constant_values=True)
        # Back to the rows' own order.
        place = jnp.arange(size) - static[:, None]
        moved = jnp.take_along_axis(stays, jnp.maximum(place, 0)[:, None, :], axis=2)
        within = (jnp.arange(size) < length[:, None])[:, None]
        return within & (moved | (place < 0)[:, None])

    # --- while decoding ---------------------------------------------------------------------------------------

    def due(self, layers: tuple[LayerCache, ...], config: ModelConfig) -> Bool[Array, " B"]:
        # All compressing layers are in step; one of them answers for all.
        layer = layers[-1]
        return self._slots_now(layer) - self._static_now(layer) >= 2 * self.lag

    def _slots_now(self, cache: LayerCache) -> Int[Array, " B"]:
        """Slots of each row, those it shares included."""
        return cache.length[:, 0] + cache.state.elsewhere

    def _static_now(self, cache: LayerCache) -> Int[Array, " B"]:
        """Static slots, counting sinks that were decoded into the cache and not yet booked."""
        state: LagState = cache.state
        missing = jnp.maximum(self.sink - state.covered, 0)
        return state.static + jnp.minimum(missing, self._slots_now(cache) - state.static)

    def maintain(
        self, layer: int, cache: LayerCache, config: ModelConfig, row: Int[Array, ""], seen: Int[Array, ""]
    ) -> LayerCache:
        return cache if self._keeps_all(layer, cache) else self._compacted([cache], row, seen)[0]

    def maintain_layers(
        self, layers: Sequence[LayerCache], config: ModelConfig, row: Int[Array, ""], seen: Int[Array, ""]
    ) -> list[LayerCache] | None:
        if type(self) is not LagKV:  # one derived from it may treat layers in ways of its own
            return None
        due = [i for i, cache in enumerate(layers) if not self._keeps_all(i, cache)]
        alike = {(cache.kv.shape, cache.pages) for cache in (layers[i] for i in due)}
        if len(alike) != 1:
            return None
        found = list(layers)
        for i, cache in zip(due, self._compacted([layers[i] for i in due], row, seen), strict=True):
            found[i] = cache
        return found

    def _keeps_all(self, layer: int, cache: LayerCache) -> bool:
        """Whether a layer is never compacted; in a pool smaller than two partitions there is nothing to be due."""
        return layer < self._skipped or min(cache.slots) < 2 * self.lag

    def _compacted(self, layers: Sequence[LayerCache], row: Int[Array, ""], seen: Int[Array, ""]) -> list[LayerCache]:
        """Layers whose capacities are equal, with one row's oldest partition compressed. All of them are in step."""
        lag, cache, state = self.lag, layers[0], layers[0].state
        static, before = self._static_now(cache)[row], state.static[row]
        covered = state.covered[row] + static - before
        keep = self._keep(seen, static, covered)
        # Only the last 2 L slots change: the oldest partition shrinks and the window moves up to it.
        here = static - state.elsewhere[row]
        taken = [take_pages(cache, row, here, 2 * lag) for cache in layers]
        first = taken[0][1]
        offset = here - first * cache.page_size
        moved = each([region for region, _ in taken], lambda region: self._compact(region, offset, keep))
        found = []
        for cache, region in zip(layers, moved, strict=True):
            cache = put_pages(cache, row, first, region)
            length, state = cache.length.at[row].set(here + keep + lag), cache.state
            state = dataclasses.replace(
                state, static=state.static.at[row].set(static + keep), covered=state.covered.at[row].set(covered + lag)
            )
            found.append(cache.replace(length=length, next=length, state=state))
        return found

    def _compact(self, region: Region, offset: Int[Array, ""], keep: Int[Array, ""]) -> Region:
        """Write, from slot ``offset`` of a region on, the best of one partition, the next one, and what was there."""
        lag = self.lag
        # Keys and values as one array: half the kernels to compile, for little memory.
        pair = jnp.stack([region["k"], region["v"]])
        pair = jax.lax.dynamic_slice_in_dim(pair, offset, 2 * lag, axis=2)
        scores = self._scores_of_pair(pair[:, :, :lag], pair[:, :, lag:])
        # Counting beats two sorts for one short partition.
        ranks = count_better(scores) if lag <= 256 else rank_descending(scores)
        # Where each slot's row comes from: kept ones in order, then the window, then whatever was there.
        count = jnp.cumsum(ranks < keep, axis=-1)
        place = jnp.arange(region["k"].shape[1]) - offset
        kept = jax.vmap(lambda row: jnp.searchsorted(row, place + 1, method="compare_all"))(count)
        source = jnp.where(place < keep, kept, jnp.where(place < keep + lag, place - keep + lag, place))
        source = jnp.where(place < 0, place, source) + offset
        return {
            name: jnp.take_along_axis(whole, source[..., None], axis=1, mode="promise_in_bounds")
            for name, whole in region.items()
        }


def rank_descending(scores: Float[Array, "... N"]) -> Int[Array, "... N"]:
    """Rank of each entry, 0 for the highest; equal scores rank the later entry first."""
    # A stable ascending sort puts the later of two equals later; counted from the end it comes first.
    order = jnp.argsort(scores, axis=-1, stable=True)
    return scores.shape[-1] - 1 - jnp.argsort(order, axis=-1)


def count_better(scores: Float[Array, "... N"]) -> Int[Array, "... N"]:
    """:func:`rank_descending` by N x N comparisons, for small N."""
    index = jnp.arange(scores.shape[-1])
    own, other = scores[..., :, None], scores[..., None, :]
    return ((other > own) | ((other == own) & (index > index[:, None]))).sum(axis=-1)

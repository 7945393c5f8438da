"""``plan``: every byte of a request before any is allocated, and a refusal that says what would fit."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvjax.allocation import Allocation, allocation, spare_tokens
from kvjax.cache.buckets import NEW_TOKENS, RESERVE, new_bucket, prompt_bucket
from kvjax.cache.cache import Cache
from kvjax.cache.groups import split_heads
from kvjax.cache.layout import layout_on
from kvjax.cache.pool import layout_for
from kvjax.cache.quantisation import MODEL, Storage, parse_storage
from kvjax.checks import float_dtype, optional, whole_number
from kvjax.chips import chip
from kvjax.device_memory import GpuShare, device_limit, gpu_share
from kvjax.errors import DoesNotFit, UsageError
from kvjax.memory_needs import cache_bytes, full_cache_bytes, prefill_bytes, shared_context_bytes, weights_bytes
from kvjax.model.config import ModelConfig
from kvjax.model.quantised import Weights, check_weights
from kvjax.policies import Full, LagKV, Policy, format_policy, parse
from kvjax.policies.base import shares
from kvjax.policies.best import asked_later, resolve
from kvjax.policies.guard import check_sizes, check_value
from kvjax.policies.page_capacities import page_capacities
from kvjax.policies.split_cache import slots_above, slots_below
from kvjax.policies.window_layers import for_model
from kvjax.sharding.mesh import Mesh, parse_mesh
from kvjax.tables import Column, Table, human_bytes, windows_text


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes of a request; on a mesh, those on each of its devices, which all hold equally many.

    Attributes:
      policy: its text form.
      mesh: its text form, or None.
      batch, prompt_tokens, max_new_tokens: the request.
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
        is rows that pad the batch, pages that do not divide, and counters that several devices hold.
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

    @property
    def fits(self) -> bool:
        """Whether the device has room for it, as far as it says."""
        return self.memory_limit is None or self.total_bytes <= self.memory_limit

    @property
    def retained_share(self) -> float:
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
            ("  of it spare, for buckets and later turns", self.spare_bytes),
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
            lines.append(f"on each device of {self.mesh}; cache over an even part: {self.cache_over_even:.3f}")
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
        lines.append(f"retained of the prompt, over {over} and heads: {self.retained_share:.1%}")
        lines += [line for line in (self.notice, self.choice) if line is not None]
        lines.append("layers, slots by KV head, and tokens retained of the prompt:")
        lines += Table(slots, layers).text().splitlines()
        head = f"{self.policy}: batch {self.batch}, {self.prompt_tokens} prompt + {self.max_new_tokens} new tokens"
        return "\n  ".join([head, *lines])

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


def plan(
    model: Any,
    *,
    prompt_tokens: int,
    context_tokens: int = 0,
    batch: int = 1,
    policy: Policy | str | None = None,
    max_new_tokens: int = 256,
    dtype: Any = None,
    weights: Weights | None = None,
    storage: Storage | str | None = None,
    memory_limit: int | None = None,
    mesh: Mesh | str | None = None,
    reserve_tokens: int | None = None,
    device: str | None = None,
) -> Plan:
    """Every byte a request would take, before any of it is allocated.

    Args:
      model: a loaded model, or a ModelConfig (then ``dtype`` says what the weights would be; float32 by default).
      prompt_tokens: tokens of the longest prompt.
      context_tokens: tokens before those of every prompt, read once: ``context=`` of :func:`kvjax.generate`, or one
        ``cache=`` for all prompts.
      batch: rows.
      policy: as for :func:`kvjax.generate`.
      max_new_tokens: tokens generated; a growing policy's cache is planned at its final size.
      dtype: of weights and cache.
      weights: as for :func:`kvjax.load`; by default those of the model.
      storage: of the cache's rows, as for :func:`kvjax.generate`.
      memory_limit: bytes available; by default the device's.
      mesh: devices that the request is spread over, which need not be there; by default the model's. Bytes, and the
        limit, are then of each device.
      reserve_tokens: tokens of later turns, as for :func:`kvjax.generate`; ``kvjax.Chat`` reserves 4,096.
      device: the name of an accelerator that is planned for ("t4", "v5e", ..., :mod:`kvjax.chips`): its pages and
        blocks, and its memory as the limit, of a GPU the part that JAX takes.

    Raises:
      UsageError: a length or batch that makes no sense, or beyond the model's context.
      DoesNotFit: the total exceeds the limit; the sentence names a request that fits.
    """
    config, params, over = _model(model)
    if check_weights(weights) is not None:
        config = config.stored_as(weights)
    asked = Full() if policy is None else parse(policy)
    whole_number("prompt_tokens", prompt_tokens, 1)
    whole_number("context_tokens", context_tokens, 0)
    whole_number("batch", batch, 1)
    whole_number("max_new_tokens", max_new_tokens, 0)
    later = asked_later(context=context_tokens > 0, new_tokens=max_new_tokens, reserve_tokens=reserve_tokens)
    found = resolve(asked, config, later=later)
    chosen = for_model(found.policy, config)
    if context_tokens + prompt_tokens > config.max_position:
        raise UsageError(
            f"The prompt has {context_tokens + prompt_tokens} tokens; this model's context is {config.max_position}."
        )
    chosen.check(config)
    if dtype is None:
        dtype = jnp.float32 if params is None else params.dtype
    dtype = float_dtype(dtype)
    optional(functools.partial(whole_number, least=0))("reserve_tokens", reserve_tokens)
    check_value(chosen)
    check_sizes(chosen, config, prompt_bucket(prompt_tokens), NEW_TOKENS)
    stored = parse_storage(storage)
    over = over if mesh is None else parse_mesh(mesh)
    if device is not None and memory_limit is not None:
        raise UsageError("Both device and memory_limit say how much memory there is; give one of them.")
    given = config, chosen, batch, prompt_tokens, max_new_tokens, dtype, over, context_tokens, reserve_tokens
    if device is None:
        share = gpu_share() if memory_limit is None else None
        made = _that_fits(*given, stored, device_limit(memory_limit), share, share and share.source)
        return dataclasses.replace(made, choice=found.line)
    named = chip(device)
    if stored.layout is None:
        stored = dataclasses.replace(stored, layout=layout_on(named.platform, config.head_dim))
    with named.compiled_for():
        made = _that_fits(*given, stored, named.limit, named.share, named.source)
        return dataclasses.replace(made, choice=found.line)


def _that_fits(
    config: ModelConfig,
    policy: Policy,
    batch: int,
    prompt: int,
    new: int,
    dtype: Any,
    mesh: Mesh | None,
    context: int,
    reserve: int | None,
    storage: Storage,
    limit: int | None,
    share: GpuShare | None,
    source: str | None,
) -> Plan:
    """The plan of sizes that are shared with other requests, or else of exact ones; DoesNotFit where neither fits."""
    made = None
    for exact in (mesh is not None and not policy.offloads_rounds, True):
        exact = exact or _shared(policy, storage, batch, context)
        size = _first_size(config, policy, batch, prompt, context, reserve, exact)
        placed = policy.reading(config, slots_above(context + prompt, exact=exact))
        made = _plan(config, policy, size, batch, prompt, new, dtype, limit, storage, mesh, context, placed)
        if policy.offloads_rounds:
            made = dataclasses.replace(made, later_bytes=_later_bytes(made, config, policy, size, dtype, storage, mesh))
        if made.fits:
            return dataclasses.replace(made, memory_source=source)
    assert made is not None
    error = _does_not_fit(made, config, policy, dtype, 0, storage, mesh, share)
    error.plan = made
    raise error


def _first_size(
    config: ModelConfig, policy: Policy, batch: int, prompt: int, context: int, reserve: int | None, exact: bool
) -> Allocation:
    """The sizes of prompts that nothing but a context is before; a context of rounds is a turn of its own."""
    if not policy.offloads_rounds:
        return allocation(config, policy, batch, context + prompt, reserve=reserve, exact=exact)
    held = slots_below(config, context, spare=reserve or 0, exact=exact) if context else 0
    spare = (RESERVE if reserve is None and context else reserve or 0) // batch
    return Allocation(batch, slots_below(config, context + prompt, held=held, spare=spare, exact=exact))


def _later_bytes(
    made: Plan,
    config: ModelConfig,
    policy: Policy,
    size: Allocation,
    dtype: Any,
    storage: Storage,
    mesh: Mesh | None,
) -> int:
    """Bytes of the cache while a later question is answered in a conversation of as many tokens."""
    tokens = made.context_tokens + made.prompt_tokens
    selected = policy.answering(config, tokens).capacities(config, 0, 0)[-1][0]
    placed = policy.reading(config, slots_above(selected))
    return cache_bytes(config, placed, size.rows, size.prompt_capacity, NEW_TOKENS, dtype, storage, mesh)


def _model(model: Any) -> tuple[ModelConfig, Any, Mesh | None]:
    """Configuration, parameters and mesh of what was given as a model."""
    if isinstance(model, ModelConfig):
        return model, None, None
    from kvjax.checkpoints.load import LanguageModel  # and its readers of files, which a plan of a shape does without

    if not isinstance(model, LanguageModel):
        raise UsageError(f"The model is a {type(model).__name__}; give one from kvjax.load, or a ModelConfig.")
    return model.config, model.params, model.mesh


def _plan(
    config: ModelConfig,
    policy: Policy,
    size: Allocation,
    batch: int,
    prompt: int,
    new: int,
    dtype: Any,
    limit: int | None,
    storage: Storage = MODEL,
    mesh: Mesh | None = None,
    context: int = 0,
    placed: Policy | None = None,
) -> Plan:
    """The plan of these sizes; ``placed`` has the capacities, by default those while a later question is answered."""
    room, rows, whole = size.prompt_capacity, size.rows, context + prompt
    # The last token is generated and never fed; the context bounds what is.
    fed = max(new - 1, 0) if policy.beyond_context else min(max(new - 1, 0), config.max_position - whole)
    total = np.array([whole])
    held = placed or policy.answering(config, room)
    keeps = policy if held is policy or placed is None else Full()
    kept = [np.asarray(keeps.budgets(config, layer, total))[0] for layer in range(config.num_layers)]
    sharing = _shared(policy, storage, batch, context)
    new_capacity = NEW_TOKENS
    if policy.grows and fed > NEW_TOKENS:
        spare = 0 if sharing else spare_tokens(config, held, room, kept)
        new_capacity = new_bucket(fed - 1 - spare, config.max_position)
    weights, devices = weights_bytes(config, dtype, mesh), 1 if mesh is None else mesh.size
    cache = alone = cache_bytes(config, held, rows, room, new_capacity, dtype, storage)
    if mesh is not None:
        cache = cache_bytes(config, held, rows, room, new_capacity, dtype, storage, mesh)
    least = policy.answering(config, whole) if placed is None else policy.reading(config, whole)
    needed = cache_bytes(config, least, batch, whole, max(fed, 1), dtype, storage, mesh)
    peak, shared = prefill_bytes(config, policy, rows, whole, dtype, mesh), 0
    if sharing:
        sizes = context, prompt, new_capacity, dtype, storage
        cache, shared = alone, _ = shared_context_bytes(config, policy, batch, *sizes)
        if mesh is not None:
            cache, shared = shared_context_bytes(config, policy, batch, *sizes, mesh)
        exactly = context, prompt, max(fed, 1), dtype, storage, mesh
        needed, _ = shared_context_bytes(config, policy, batch, *exactly, exact=True)
        # The context is read by itself, and then attended to from rows of one layer of it at a time.
        of_prompts = prefill_bytes(config, policy, batch, prompt, dtype, mesh) + 2 * shared // config.num_layers
        peak = max(prefill_bytes(config, policy, 1, context, dtype, mesh), of_prompts)
    page_size = layout_for(storage, config.head_dim).page_size
    own = (prompt_bucket(prompt) if prompt else 0) if sharing else None
    pages = page_capacities(held, config, room, new_capacity, page_size, own)
    layers = config.num_layers // len(pages)  # more than one where all share their slots
    slots = [heads for counts in pages for heads in split_heads(counts, layers)]
    return Plan(
        policy=format_policy(policy),
        batch=batch,
        prompt_tokens=prompt,
        max_new_tokens=new,
        weights_bytes=weights,
        cache_bytes=cache,
        prefill_peak_bytes=peak,
        full_cache_bytes=batch * full_cache_bytes(config, whole + fed, dtype) // devices,
        total_bytes=weights + cache + peak,
        memory_limit=limit,
        capacities=tuple(tuple(count * page_size for count in heads) for heads in slots),
        retained=tuple(tuple(int(x) for x in heads) for heads in kept),
        mesh=None if mesh is None else str(mesh),
        cache_over_even=cache * devices / alone,
        spare_bytes=max(cache - needed, 0),
        context_tokens=context,
        shares_context=shares(policy, storage),
        context_bytes=shared,
        windows=config.windows_by_layer,
        notice=policy.notice(config, whole),
    )


def _shared(policy: Policy, storage: Storage, batch: int, context: int) -> bool:
    """Whether rows share a context of so many tokens; a single row has nobody to share with."""
    return bool(context) and batch > 1 and shares(policy, storage)


def fitting(
    config: ModelConfig,
    policy: Policy,
    rows: int,
    tokens: int,
    *,
    dtype: Any,
    memory_limit: int | None,
    already: int = 0,
    storage: Storage = MODEL,
    mesh: Mesh | None = None,
    reserve: int | None = None,
    held: Cache | None = None,
    exact: bool = False,
    context: int = 0,
) -> Allocation:
    """The sizes a generation is allocated, with prompts and the first new-token bucket: exact where it must be.

    Args:
      rows, reserve, held, exact: as for :func:`kvjax.allocation.allocation`.
      tokens: that the rows will have seen, prompts included, beside ``context`` tokens before all of them, read once.
      already: bytes of caches that stay beside it.

    Raises:
      DoesNotFit: not even exactly.
    """
    limit, context = device_limit(memory_limit), min(context, config.max_position - 1)
    tokens = min(tokens, config.max_position - context)
    check_value(policy)
    check_sizes(policy, config, prompt_bucket(context + tokens), NEW_TOKENS)
    # Rows that share a context are as many as were asked for, so that its bytes are spared and not spent on padding.
    exact = exact or mesh is not None or _shared(policy, storage, rows, context)
    for tight in dict.fromkeys((exact, True)):
        size = allocation(config, policy, rows, context + tokens, reserve=reserve, held=held, exact=tight)
        made = _plan(config, policy, size, rows, tokens, 1, dtype, limit, storage, mesh, context)
        if limit is None or made.total_bytes + already <= limit:
            return size
    share = gpu_share() if memory_limit is None else None
    raise _does_not_fit(made, config, policy, dtype, already, storage, mesh, share)


def _does_not_fit(
    made: Plan,
    config: ModelConfig,
    policy: Policy,
    dtype: Any,
    already: int,
    storage: Storage,
    mesh: Mesh | None = None,
    share: GpuShare | None = None,
) -> DoesNotFit:
    """The refusal of a plan that does not fit beside ``already`` bytes, with what would fit instead."""
    limit = made.memory_limit
    assert limit is not None, "what has no limit fits"
    each = "" if mesh is None else " on each device"
    need = f"This needs {human_bytes(made.total_bytes + already)}{each} and the limit is {human_bytes(limit)}"
    if made.weights_bytes >= limit:
        narrower = ' or dtype, or weights="int8"' if config.weights is None else ""
        return DoesNotFit(
            f"{need}: the weights alone are {human_bytes(made.weights_bytes)}; use a smaller model{narrower}."
        )

    def fits(batch: int, prompt: int, policy: Policy) -> bool:
        context = made.context_tokens
        size = _first_size(config, policy, batch, prompt, context, None, exact=True)
        given = config, policy, size, batch, prompt, made.max_new_tokens, dtype, limit, storage, mesh
        made_of = _plan(*given, context, policy.reading(config, slots_above(context + prompt, exact=True)))
        return made_of.total_bytes + already <= limit

    offers = []
    batch = _largest(1, made.batch - 1, lambda b: fits(b, made.prompt_tokens, policy))
    if batch:
        offers.append(f"a batch of {batch}")
    prompt = _largest(1, made.prompt_tokens - 1, lambda t: fits(made.batch, t, policy))
    if prompt:
        offers.append(f"prompts of {prompt:,} tokens")
    if not offers and (prompt := _largest(1, made.prompt_tokens - 1, lambda t: fits(1, t, policy))):
        offers.append(f"a batch of 1 with {prompt:,} tokens")
    for ratio in (0.5, 0.25, 0.125):
        lagkv = for_model(LagKV(ratio=ratio), config)
        if isinstance(policy.chosen, Full) and fits(made.batch, made.prompt_tokens, lagkv):
            offers.append(f'policy="lagkv:ratio={ratio}"')
            break
    if share is not None and (larger := share.offer(made.total_bytes + already)):
        offers.append(larger)
    would = " or ".join(offers) if offers else "only a device with more memory"
    return DoesNotFit(f"{need}; {would} would fit.")


def _largest(low: int, high: int, fits: Any) -> int:
    """The largest number in [low, high] that fits, or 0; what fits at n is taken to fit below."""
    best = 0
    while low <= high:
        middle = (low + high) // 2
        if fits(middle):
            best, low = middle, middle + 1
        else:
            high = middle - 1
    return best

"""``plan``: every byte of a request before any is allocated, and a refusal that says what would fit."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp

from kvjax.allocation import Allocation
from kvjax.cache.buckets import NEW_TOKENS, prompt_bucket
from kvjax.cache.cache import Cache
from kvjax.cache.layout import layout_on
from kvjax.cache.quantisation import MODEL, Storage, parse_storage
from kvjax.checks import float_dtype, optional, true_or_false, whole_number
from kvjax.chips import Chip, chip
from kvjax.device_memory import GpuMemory, device_limit, gpu_memory
from kvjax.errors import UsageError, kind_of
from kvjax.model.config import ModelConfig
from kvjax.model.quantised import Weights, check_weights
from kvjax.planning.refusal import refusal
from kvjax.planning.request_shape import RequestShape
from kvjax.planning.result import Plan as Plan
from kvjax.policies import Full, Policy, parse
from kvjax.policies.best import asked_later, resolve
from kvjax.policies.fixed import fixed
from kvjax.policies.guard import check_sizes, check_value
from kvjax.policies.window_layers import for_model
from kvjax.sharding.mesh import Mesh, parse_mesh


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
    prompt_logprobs: bool = False,
    once: bool = False,
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
      storage: of keys and values, as for :func:`kvjax.generate`.
      memory_limit: bytes available; by default the device's.
      mesh: devices that the request is spread over, which need not be there; by default the model's. Bytes, and the
        limit, are then of each device.
      reserve_tokens: tokens of later turns, as for :func:`kvjax.generate`; ``kvjax.Chat`` reserves 4,096.
      device: the name of an accelerator that is planned for ("t4", "v5e", ..., :mod:`kvjax.chips`): its pages and
        blocks, and its memory as the limit, of a GPU the part that JAX takes.
      prompt_logprobs: whether log-probabilities of the prompt are asked for, as for :func:`kvjax.generate`.
      once: whether the policy chooses among the context alone, as for :func:`kvjax.read`.

    Raises:
      UsageError: a length or batch that makes no sense, or beyond the model's context.
      DoesNotFit: the total exceeds the limit; the sentence names a request that fits.
    """
    config, params, own_mesh = _model(model)
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
    check_value(chosen)
    chosen.check(config)
    true_or_false("once", once)
    if once:
        if not context_tokens:
            raise UsageError("once=True is said of a context; give context_tokens, or leave it out.")
        chosen = fixed(chosen)
    if dtype is None:
        dtype = jnp.float32 if params is None else params.dtype
    dtype = float_dtype(dtype)
    optional(functools.partial(whole_number, least=0))("reserve_tokens", reserve_tokens)
    true_or_false("prompt_logprobs", prompt_logprobs)
    _check_scored(chosen, prompt_logprobs)
    check_sizes(chosen, config, prompt_bucket(prompt_tokens), NEW_TOKENS)
    stored, over = parse_storage(storage), own_mesh if mesh is None else parse_mesh(mesh)
    if device is not None and memory_limit is not None:
        raise UsageError("Both device and memory_limit say how much memory there is; give one of them.")
    request = RequestShape(
        config=config,
        policy=chosen,
        batch=batch,
        prompt=prompt_tokens,
        new=max_new_tokens,
        dtype=dtype,
        storage=stored,
        mesh=over,
        context=context_tokens,
        scored=prompt_logprobs,
    )
    made = (
        _within(request, reserve_tokens, memory_limit)
        if device is None
        else _on_chip(request, reserve_tokens, chip(device))
    )
    return dataclasses.replace(made, choice=found.line)


def _within(request: RequestShape, reserve: int | None, memory_limit: int | None) -> Plan:
    """The plan on this process's devices, within a limit or within their memory."""
    gpu = gpu_memory() if memory_limit is None else None
    limited = dataclasses.replace(request, limit=device_limit(memory_limit))
    return _that_fits(limited, reserve, gpu, gpu and gpu.source)


def _on_chip(request: RequestShape, reserve: int | None, named: Chip) -> Plan:
    """The plan on a chip that need not be there: with its pages and blocks, within its memory."""
    stored = request.storage
    if stored.layout is None:
        stored = dataclasses.replace(stored, layout=layout_on(named.platform, request.config.head_dim))
    limited = dataclasses.replace(request, limit=named.limit, storage=stored)
    with named.compiled_for():
        return _that_fits(limited, reserve, named.gpu, named.source)


def _that_fits(request: RequestShape, reserve: int | None, gpu: GpuMemory | None, source: str | None) -> Plan:
    """The plan of sizes that are shared with other requests, or else of exact ones; DoesNotFit where neither fits."""
    for exact in (False, True):
        made = request.first_plan(reserve, exact=exact)
        if made.fits:
            return dataclasses.replace(made, memory_source=source)
    error = refusal(made, request, 0, gpu)
    error.plan = made
    raise error


def _check_scored(policy: Policy, scored: bool) -> None:
    if scored and policy.offloads_rounds:
        raise UsageError(
            "prompt_logprobs needs every layer's output for every token of a prompt, and RoundAttention reads the "
            "upper layers for the last alone; leave it out."
        )


def _model(model: Any) -> tuple[ModelConfig, Any, Mesh | None]:
    """Configuration, parameters and mesh of what was given as a model."""
    if isinstance(model, ModelConfig):
        return model, None, None
    from kvjax.checkpoints.load import LanguageModel  # and its readers of files, which a plan of a shape does without

    if not isinstance(model, LanguageModel):
        raise UsageError(f"The model is {kind_of(model)}; give one from kvjax.load, or a ModelConfig.")
    return model.config, model.params, model.mesh


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
    held_context: int | None = None,
    scored: bool = False,
    once: bool = False,
) -> Allocation:
    """The sizes a generation is allocated, with prompts and the first new-token bucket: exact where it must be.

    Args:
      rows, reserve, held, exact: as for :func:`kvjax.allocation.allocations`.
      tokens: that the rows will have seen, prompts included, beside ``context`` tokens before all of them, read once.
      already: bytes of caches that stay beside it. scored: whether the prompts' tokens get log-probabilities.
      held_context: bytes on each device of a context that the rows share already; None where there is none.
      once: whether what is read becomes a context that is never chosen among again.

    Raises:
      DoesNotFit: not even exactly.
    """
    limit, context = device_limit(memory_limit), min(context, config.max_position - 1)
    tokens = min(tokens, config.max_position - context)
    check_value(policy)
    _check_scored(policy, scored)
    check_sizes(policy, config, prompt_bucket(context + tokens), NEW_TOKENS)
    request = RequestShape(
        config=config,
        policy=policy,
        batch=rows,
        prompt=tokens,
        new=1,
        dtype=dtype,
        limit=limit,
        storage=storage,
        mesh=mesh,
        context=context,
        scored=scored,
        held_context=held_context,
        once=once,
    )
    sizes = request.sizes(reserve, held, exact=exact)
    for size in sizes:
        # What a later question selects is not known yet: rows of padding are added where even all of it would fit.
        spare_rows = policy.offloads_rounds and size != sizes[-1]
        made = request.first_plan(reserve, exact=False) if spare_rows else request.plan(size)
        if limit is None or made.total_bytes + already <= limit:
            return size
    raise refusal(made, request, already, gpu_memory() if memory_limit is None else None)

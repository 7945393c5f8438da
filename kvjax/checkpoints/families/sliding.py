"""Sliding windows of attention in configurations: which layers have one, and with which rotary embedding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from kvjax.checkpoints.families.settings import Keys, checked_size, layer_count, whole
from kvjax.checkpoints.rope_settings import context_from_hf, rope_from_hf
from kvjax.errors import WeightsError, quoted
from kvjax.model.config import ModelConfig, RopeConfig

#: ``layer_types`` of a ``config.json``.
GLOBAL, SLIDING = "full_attention", "sliding_attention"
#: Whether a layer slides, by its number.
Slides = Callable[[int], bool]
#: The windows of :class:`ModelConfig`.
Windows = tuple[int | None, ...]


def every_layer(layer: int) -> bool:
    """All layers slide."""
    return True


def all_but_every(count: int) -> Slides:
    """All layers slide but every ``count``-th."""
    return lambda layer: (layer + 1) % count != 0


def sliding_layers(config: Mapping[str, Any], origin: str, default: Slides) -> list[bool]:
    """Whether each layer has a sliding window: from ``layer_types``, or by default."""
    layers, kinds = layer_count(config, origin), config.get("layer_types")
    if kinds is None:
        return [default(layer) for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise WeightsError(f"{origin} lists layer_types for other than its {layers} layers.")
    for kind in kinds:
        if kind not in (GLOBAL, SLIDING):
            raise WeightsError(f"{origin} has layers of the kind {quoted(kind)}; known are {GLOBAL} and {SLIDING}.")
    return [kind == SLIDING for kind in kinds]


def windows_from_hf(
    config: Mapping[str, Any],
    origin: str,
    context: int,
    *,
    window: int | None = None,
    default: Slides = every_layer,
    idle: bool = False,
) -> Windows:
    """Each layer's window in a ``config.json``; none where no layer has one that is shorter than the context.

    Args:
      context: tokens of context where the file does not say.
      window: tokens, where the file does not say; a file's null is none.
      default: which layers slide where the file does not say.
      idle: whether windows that never slide are kept, as long as the context; see :func:`with_ropes`.
    """
    tokens = config.get("sliding_window", window)
    if tokens is None:
        return ()
    checked_size(tokens, "sliding_window", origin)
    return windows(sliding_layers(config, origin, default), tokens, context_from_hf(config, context), idle)


def windows_from_gguf(key: Keys, layers: int, context: int, default: Slides, idle: bool) -> Windows:
    """Each layer's window in a GGUF, whose ``attention.sliding_window`` is of the layers that slide by default."""
    tokens = key("attention.sliding_window", 0)
    return windows([default(layer) for layer in range(layers)], tokens, context, idle) if tokens else ()


def windows(slides: list[bool], tokens: int, context: int, idle: bool = False) -> Windows:
    """The window of each layer that slides, None of the others; none at all where it could never slide."""
    if not isinstance(context, int) or (tokens >= context and not idle) or not any(slides):
        return ()
    tokens = min(tokens, context)
    return tuple(tokens if each else None for each in slides)


def with_ropes(
    make: Callable[[Mapping[str, Any]], ModelConfig], config: Mapping[str, Any], origin: str, theta: float, local: float
) -> ModelConfig:
    """A model whose sliding layers have a rotary embedding of their own, without the other's scaling.

    Args:
      make: the model of a ``config.json`` with the rotary embedding of its global layers alone, and with idle windows,
        which are kept where their layers have a rotary embedding of their own.
      theta, local: bases of global and of sliding layers where the file does not say.
    """
    tables = config.get("rope_parameters")
    plain = {name: value for name, value in config.items() if name not in ("rope_parameters", "rope_scaling")}
    if isinstance(tables, Mapping) and any(kind in tables for kind in (GLOBAL, SLIDING)):
        own = {GLOBAL: {"rope_theta": theta}, SLIDING: {"rope_theta": local}}
        ropes = [{**plain, "rope_parameters": {**own[kind], **(tables.get(kind) or {})}} for kind in (GLOBAL, SLIDING)]
    else:
        base = config.get("rope_local_base_freq", local)
        ropes = [{"rope_theta": theta, **config}, {**plain, "rope_theta": base}]
    found = make(ropes[0])
    return with_window_rope(found, rope_from_hf(ropes[1], found.max_position, found.head_dim, origin))


def with_window_rope(config: ModelConfig, rope: RopeConfig) -> ModelConfig:
    """A model whose sliding layers have this rotary embedding; idle windows are kept only where it is another."""
    if rope != config.rope and config.sliding:
        return dataclasses.replace(config, window_rope=rope)
    idle = all(window in (None, config.max_position) for window in config.windows)
    return dataclasses.replace(config, windows=()) if idle else config


def slides_from_gguf(metadata: Mapping[str, Any], arch: str, default: Slides, origin: str) -> Slides:
    """Which layers of a GGUF have a sliding window; some list it by layer (``attention.sliding_window_pattern``)."""
    listed = metadata.get(f"{arch}.attention.sliding_window_pattern")
    if not isinstance(listed, list):
        return default
    layers = metadata.get(f"{arch}.block_count")
    if len(listed) != layers or not all(isinstance(each, bool) for each in listed):
        raise WeightsError(f"{origin} lists {arch}.attention.sliding_window_pattern for other than its layers.")
    return lambda layer: listed[layer]


def qwen_windows(config: Mapping[str, Any], origin: str, context: int, below: bool = False) -> Windows:
    """Each layer's window where ``use_sliding_window`` says so: of those from ``max_window_layers`` on.

    ``below``: as transformers has it for Qwen2-MoE, of every other layer up to there.
    """
    if not config.get("use_sliding_window"):
        return ()
    first = whole(config.get("max_window_layers", 28), "max_window_layers", origin)

    def slides(layer: int) -> bool:
        return layer % 2 == 0 and layer < first if below else layer >= first

    return windows_from_hf(config, origin, context, window=4096, default=slides)

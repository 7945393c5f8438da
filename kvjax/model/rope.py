"""Rotary position embedding with every length-scaling rule of the llama family, equal to Hugging Face's reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.model.config import ModelConfig, RopeConfig


def _base(config: RopeConfig, dim: int, theta: float | None = None) -> np.ndarray:
    # Rounded where the reference rounds: an ulp here is 1e-7 x position in the angle, 4e-4 at 8,000 tokens. NumPy's
    # own float32 power is off by an ulp at every fifth frequency; the float64 power, rounded, equals torch's.
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    power = np.power(np.float64(theta or config.theta), exponent.astype(np.float64)).astype(np.float32)
    return np.float32(1.0) / power


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """YaRN's factor of queries and of keys (arXiv 2309.00071, equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(config: RopeConfig, dim: int) -> tuple[np.ndarray, float]:
    original = config.original_max_position or 0

    def correction(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = correction(config.beta_fast), correction(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / max(high - low, 1e-3), 0, 1)
    base = _base(config, dim)
    inv_freq = base / np.float32(config.factor) * ramp + base * (1 - ramp)

    if config.attention_factor is not None:
        factor = config.attention_factor
    elif config.mscale and config.mscale_all_dim:
        factor = yarn_attention_factor(config.factor, config.mscale) / yarn_attention_factor(
            config.factor, config.mscale_all_dim
        )
    else:
        factor = yarn_attention_factor(config.factor)
    return inv_freq.astype(np.float32), factor


def _llama3(config: RopeConfig, dim: int) -> np.ndarray:
    original = config.original_max_position or 0
    base = _base(config, dim)
    wavelength = 2 * np.pi / base
    low, high = original / config.low_freq_factor, original / config.high_freq_factor
    smooth = (original / wavelength - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    medium = (1 - smooth) * base / config.factor + smooth * base
    scaled = np.where(wavelength > low, base / config.factor, np.where(wavelength < high, base, medium))
    return scaled.astype(np.float32)


def frequencies(config: ModelConfig, seen: Int[Array, " B"]) -> tuple[Float[Array, "B F"], float | Float[Array, " B"]]:
    """Inverse frequencies of each row and the factor that multiplies cos and sin.

    Args:
      config: the model; ``config.rope.kind`` chooses the rule.
      seen: tokens of the row after this call, shape [B]; "dynamic" and "longrope" change with it.

    Returns:
      ``(inv_freq [B, F] float32, attention factor)``; F is half the rotary channels.
    """
    rope, dim, batch = config.rope, config.rotary_channels, seen.shape[0]
    factor: float | Array = 1.0
    if rope.kind == "dynamic":
        original = rope.original_max_position or config.max_position
        length = jnp.maximum(seen, original).astype(jnp.float32)
        theta = rope.theta * ((rope.factor * length / original) - (rope.factor - 1)) ** (dim / (dim - 2))
        exponent = jnp.arange(0, dim, 2, dtype=jnp.float32) / dim
        return 1.0 / theta[:, None] ** exponent, factor
    if rope.kind == "longrope":
        original = rope.original_max_position or config.max_position
        base = _base(rope, dim)
        short, long = (base / np.asarray(f, np.float32) for f in (rope.short_factor, rope.long_factor))
        scale = rope.factor
        if rope.attention_factor is not None:
            factor = rope.attention_factor
        elif scale > 1:
            factor = math.sqrt(1 + math.log(scale) / math.log(original))
        return jnp.where((seen > original)[:, None], long, short), factor
    if rope.kind == "yarn":
        inv_freq, factor = _yarn(rope, dim)
    elif rope.kind == "llama3":
        inv_freq = _llama3(rope, dim)
    elif rope.kind == "linear":
        inv_freq = _base(rope, dim) / np.float32(rope.factor)
    else:
        inv_freq = _base(rope, dim)
    return jnp.broadcast_to(jnp.asarray(inv_freq), (batch, dim // 2)), factor


def angles(
    config: ModelConfig, positions: Int[Array, "R T"], seen: Int[Array, " B"]
) -> tuple[Float[Array, "A T F"], Float[Array, "A T F"]]:
    """cos and sin of every position, float32, shape [A, T, F]; F is half the rotary channels.

    R is B, or 1 where all rows have the same positions; then A is 1 too, unless frequencies follow what a row has seen.
    """
    by_row = config.rope.kind in ("dynamic", "longrope")
    inv_freq, factor = frequencies(config, seen if by_row else seen[: len(positions)])
    phase = positions[..., None].astype(jnp.float32) * inv_freq[:, None, :]
    return jnp.cos(phase) * factor, jnp.sin(phase) * factor


#: cos and sin of a run of tokens, [B, T, F] each, or [1, T, F] where rows have the same ones; None for a model whose
#: positions are elsewhere (ALiBi).
Angles = tuple[Array, Array] | None


def token_angles(config: ModelConfig, positions: Int[Array, "R T"], seen: Int[Array, " B"]) -> Angles:
    """The cos and sin with which :func:`apply_rope` rotates these tokens."""
    return angles(config, positions, seen) if config.positional == "rope" else None


def angles_of_layers(
    layers: Sequence[ModelConfig], positions: Int[Array, "R T"], seen: Int[Array, " B"]
) -> list[Angles]:
    """:func:`token_angles` of each layer, from the model as that layer sees it; equal ones are computed once."""
    found: dict[Any, Angles] = {}
    keys = [(config.positional, config.rope, config.rotary_channels) for config in layers]
    for key, config in zip(keys, layers, strict=True):
        if key not in found:
            found[key] = token_angles(config, positions, seen)
    return [found[key] for key in keys]


def prompt_positions(seen: Int[Array, " B"], tokens: int, fresh: bool) -> Int[Array, "R T"]:
    """Positions of the next tokens: of each row, or of all rows together if these are their first."""
    run = jnp.arange(tokens)
    return run[None] if fresh else seen[:, None] + run


def apply_rope(x: Array, rope: Angles) -> Array:
    """Queries [B, T, H, G, D] or keys [B, T, H, D] (or either without T, of one token) as attention takes them."""
    if rope is None:
        return x
    cos, sin = (a.reshape(*a.shape[:-1], *(1,) * (x.ndim - a.ndim), a.shape[-1]) for a in rope)
    return rotate(x, cos, sin)


def rotate(x: Float[Array, "*S D"], cos: Float[Array, "*#S F"], sin: Float[Array, "*#S F"]) -> Float[Array, "*S D"]:
    """Rotate channel pairs (i, i + F) by the given angles in float32; channels from 2 F on, and the dtype, stay."""
    width = 2 * cos.shape[-1]
    first, second = jnp.split(x[..., :width].astype(jnp.float32), 2, axis=-1)
    pairs = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return pairs if width == x.shape[-1] else jnp.concatenate([pairs, x[..., width:]], axis=-1)

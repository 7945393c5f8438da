"""Reads rotary scaling out of Hugging Face configurations and GGUF metadata into one ``RopeConfig``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from kvjax.errors import WeightsError, quoted
from kvjax.model.config import MOST_SIZE, RopeConfig, RopeKind
from kvjax.model.rope import yarn_attention_factor

# Transformers' names of former years.
_ALIASES = {"su": "longrope", "ntk": "dynamic", "none": "default"}


def _kind(name: Any, origin: str) -> RopeKind:
    kind = _ALIASES.get(name, name)
    known: tuple[RopeKind, ...] = get_args(RopeKind)
    for candidate in known:
        if candidate == kind:
            return candidate
    raise WeightsError(f"{origin} asks for rotary scaling {quoted(name)}; known are {', '.join(known)}.")


def _require(table: Mapping[str, Any], names: tuple[str, ...], kind: str, origin: str) -> None:
    for name in names:
        if table.get(name) is None:
            raise WeightsError(f"{origin} asks for {kind} rotary scaling and lacks its {quoted(name)}.")


def _hf_table(config: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """The scaling's keys, from ``rope_parameters`` (transformers 5) or ``rope_scaling`` (before), theta included."""
    table = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if table and all(isinstance(value, Mapping) for value in table.values()):
        kinds = {key: value for key, value in table.items() if key == "full_attention"}
        if len(table) != 1 or not kinds:
            raise WeightsError(f"{origin} gives layers different rotary embeddings ({', '.join(table)}); one is read.")
        table = kinds["full_attention"]
    table = {"rope_theta": config.get("rope_theta"), **table}
    table.setdefault("partial_rotary_factor", config.get("partial_rotary_factor"))
    if "mrope_section" in table:
        raise WeightsError(f"{origin} asks for multimodal rotary embedding (mrope_section), which is not read.")
    return table


def context_from_hf(config: Mapping[str, Any], default: int) -> Any:
    """Tokens of context that a ``config.json`` gives, unchecked: with dynamic scaling and YaRN, after scaling.

    A file with dynamic scaling says the context before it, and so does one that a user added YaRN to, as Qwen's model
    cards say.
    """
    context = config.get("max_position_embeddings") or default
    table = config.get("rope_parameters") or config.get("rope_scaling")
    table = table.get("full_attention", table) if isinstance(table, Mapping) else None
    if not isinstance(table, Mapping) or "short_factor" in table:
        return context
    kind, factor = str(table.get("rope_type", table.get("type"))), table.get("factor")
    before = config.get("original_max_position_embeddings") or table.get("original_max_position_embeddings")
    befores = {"dynamic": context, "yarn": before or context}
    return _scaled(context, befores.get(_ALIASES.get(kind, kind)), factor)


def _scaled(context: Any, before: Any, factor: Any) -> Any:
    """A context, or that before scaling times the factor where this is longer; what are no numbers is left alone."""
    numbers = [isinstance(each, int | float) and not isinstance(each, bool) for each in (before, factor)]
    if not isinstance(context, int) or not all(numbers):
        return context
    # Bounded first: a file may say 1e308, or no number at all, and such a context is refused where it is checked.
    return int(max(context, min(MOST_SIZE, before) * min(MOST_SIZE, factor)))


def _before(value: Any, name: str, origin: str) -> int:
    """The context before scaling, checked (WeightsError)."""
    if not isinstance(value, int | float) or not 1 <= value <= MOST_SIZE:
        raise WeightsError(f"{origin} has {quoted(value)} as its {name}; it is a whole number from 1 to {MOST_SIZE:,}.")
    return int(value)


def scaled_context(rope: RopeConfig, context: int) -> int:
    """The context of a GGUF, which gives that before YaRN's scaling or the scaled one."""
    return _scaled(context, rope.original_max_position, rope.factor) if rope.kind == "yarn" else context


def rotary_dim_from_hf(config: Mapping[str, Any], head_dim: int, default: float, origin: str) -> int:
    """Channels of a head that get rotary embedding, from the fraction of them that a ``config.json`` gives."""
    share = _hf_table(config, origin)["partial_rotary_factor"]
    channels = int(head_dim * float(default if share is None else share))
    if not 2 <= channels <= head_dim or channels % 2:
        raise WeightsError(f"{origin} rotates {channels} of a head's {head_dim} channels; an even number is needed.")
    return channels


def rope_from_hf(
    config: Mapping[str, Any], max_position: int, head_dim: int, origin: str, *, partial: bool = False
) -> RopeConfig:
    """Map a ``config.json`` with transformers' own defaults (modeling_rope_utils of version 5).

    Args:
      config: the file's content.
      max_position: the model's context in tokens.
      head_dim: channels of a head that get rotary embedding.
      origin: the file, for messages.
      partial: whether the family may apply rotary embedding to only a part of each head.

    Raises:
      WeightsError: a scaling that is unknown or lacks a number it needs, or rotary embedding of a part of each head
        where the family has it in whole heads.
    """
    table = _hf_table(config, origin)
    if not partial and table["partial_rotary_factor"] not in (None, 1, 1.0):
        share = table["partial_rotary_factor"]
        raise WeightsError(f"{origin} rotates only {share} of each head; models of its family rotate all of it.")
    kind = _kind(table.get("rope_type", table.get("type")) or "default", origin)
    if kind == "yarn" and "short_factor" in table:  # as Phi-3's first files call it
        kind = "longrope"
    theta = table["rope_theta"]
    theta = 10000.0 if theta is None else _positive(theta, "rope_theta", origin)
    if kind == "default":
        return RopeConfig(theta=theta)
    # Phi-3 keeps the original context beside the table, and there it wins.
    original = config.get("original_max_position_embeddings") or table.get("original_max_position_embeddings")
    original = _before(original or max_position, "original_max_position_embeddings", origin)
    factor = table.get("factor")
    if factor is None and kind in ("yarn", "longrope"):
        factor = max_position / original
    required = {"llama3": ("low_freq_factor", "high_freq_factor"), "longrope": ("short_factor", "long_factor")}
    _require({**table, "factor": factor}, ("factor", *required.get(kind, ())), kind, origin)
    common: dict[str, Any] = {"theta": theta, "kind": kind, "factor": float(1.0 if factor is None else factor)}
    if kind == "llama3":
        low, high = float(table["low_freq_factor"]), float(table["high_freq_factor"])
        return RopeConfig(**common, original_max_position=original, low_freq_factor=low, high_freq_factor=high)
    if kind == "yarn":
        return RopeConfig(**common, original_max_position=original, **_yarn(table))
    if kind == "longrope":
        short, long = (tuple(map(float, table[key])) for key in ("short_factor", "long_factor"))
        _check_factors((short, long), head_dim, origin)
        attention = _optional(table.get("attention_factor"))
        return RopeConfig(
            **common,
            original_max_position=original,
            short_factor=short,
            long_factor=long,
            attention_factor=attention,
        )
    # linear needs no original context; dynamic measures against the file's, as transformers does.
    return RopeConfig(**common, original_max_position=max_position if kind == "dynamic" else None)


def _check_factors(lists: Sequence[Sequence[float]], head_dim: int, origin: str) -> None:
    for factors in lists:
        if len(factors) != head_dim // 2:
            raise WeightsError(
                f"{origin} gives {len(factors)} rotary divisors; heads of {head_dim} channels need {head_dim // 2}."
            )


def _positive(value: Any, name: str, origin: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise WeightsError(f"{origin} has {quoted(value)} as its {name}; a number above 0 is needed.")
    return float(value)


def _optional(value: Any) -> float | None:
    return None if value is None else float(value)


def _yarn(table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "beta_fast": float(table.get("beta_fast") or 32),
        "beta_slow": float(table.get("beta_slow") or 1),
        "mscale": _optional(table.get("mscale")),
        "mscale_all_dim": _optional(table.get("mscale_all_dim")),
        "truncate": bool(table.get("truncate", True)),
        "attention_factor": _optional(table.get("attention_factor")),
    }


def rope_from_gguf(
    metadata: Mapping[str, Any],
    prefix: str,
    factors: Mapping[str, tuple[float, ...]],
    max_position: int,
    head_dim: int,
    origin: str,
) -> RopeConfig:
    """Map GGUF's ``rope.*`` keys and its tensors of per-frequency divisors.

    llama 3 scaling reaches a GGUF only as the tensor ``rope_freqs.weight``: the divisor of every frequency, already
    computed. Divisors are what "longrope" means, so such a file becomes a longrope whose short and long divisors are
    equal and whose attention factor is 1: the same angles, without guessing the parameters they came from.

    Args:
      metadata: the file's keys.
      prefix: the architecture's name, which begins its keys.
      factors: values of the tensors ``rope_freqs``, ``rope_factors_short`` and ``rope_factors_long`` that are there.
      max_position: the model's context in tokens.
      head_dim: channels of a head; every list of divisors has half as many.
      origin: the file, for messages.
    """

    def key(name: str, default: Any = None) -> Any:
        return metadata.get(f"{prefix}.rope.{name}", default)

    theta = float(key("freq_base", 10000.0))
    original = _before(
        key("scaling.original_context_length") or max_position, "scaling.original_context_length", origin
    )
    if factors:
        short = factors.get("rope_freqs", factors.get("rope_factors_short"))
        long = factors.get("rope_freqs", factors.get("rope_factors_long"))
        if short is None or long is None:
            raise WeightsError(f"{origin} holds only one of rope_factors_short.weight and rope_factors_long.weight.")
        _check_factors((short, long), head_dim, origin)
        attention = float(key("scaling.attn_factor", 1.0))
        return RopeConfig(
            theta=theta,
            kind="longrope",
            original_max_position=original,
            short_factor=short,
            long_factor=long,
            attention_factor=attention,
        )
    kind = _kind(key("scaling.type", "linear" if key("scale_linear") else "none"), origin)
    factor = float(key("scaling.factor", key("scale_linear", 1.0)))
    if kind == "default" or factor == 1.0:
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    if kind == "yarn":
        mixed, times = key("scaling.yarn_ext_factor"), key("scaling.attn_factor")
        if mixed not in (None, 1, -1):  # below 0 stands for 1
            raise WeightsError(f"{origin} mixes rotary scalings (yarn_ext_factor is {quoted(mixed)}); only 1 is read.")
        return RopeConfig(
            theta=theta,
            kind="yarn",
            factor=factor,
            # llama.cpp's factor multiplies YaRN's own.
            attention_factor=None if times is None else float(times) * yarn_attention_factor(factor),
            original_max_position=original,
            beta_fast=float(key("scaling.yarn_beta_fast", 32.0)),
            beta_slow=float(key("scaling.yarn_beta_slow", 1.0)),
        )
    raise WeightsError(f"{origin} asks for {kind} rotary scaling and holds no rope_factors_short/long tensors for it.")

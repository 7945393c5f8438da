"""Estimates of the time that a prefill takes, from earlier ones, until it tells itself how far it is.

Work is counted in multiplications, so that a short prompt tells of a long one. The speed of each model on each kind of
device is kept in the user's cache folder, for the first prompt of the next process.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax

from kvjax.cache.buckets import request_bucket, rows_multiplied
from kvjax.errors import KvjaxError
from kvjax.files import cache_folder, write_atomically
from kvjax.model.config import ModelConfig

#: Prompts that took less tell of overheads.
_LEAST_SECONDS = 0.05
#: A prompt of less than this fraction of another's work says less, or nothing, about its speed.
_ALIKE = 0.3
#: (multiplications a second, those of the prompt that showed it), of each model.
_speeds: dict[str, tuple[float, float]] = {}


def work(config: ModelConfig, rows: int, tokens: int, seen: int = 0) -> float:
    """Multiplications of reading ``tokens`` a row after ``seen``: products with the weights, and attention.

    Prompts are read in blocks; where their padding is multiplied, a short one takes as long as a whole block.
    """
    tokens = rows_multiplied(tokens, request_bucket(max(tokens, 1)))
    dim = config.head_dim
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * dim * config.hidden_size
    weights = config.num_layers * (heads + 3 * config.hidden_size * config.mlp_channels)
    attention = 2 * config.num_layers * config.num_heads * dim * (seen + tokens / 2)
    return float(rows) * tokens * (weights + attention)


def expected_seconds(config: ModelConfig, amount: float, longest: float = 0.0) -> float | None:
    """Seconds that so much work will take; None where nothing of the kind was done before.

    ``longest``: the work of the longest of many prompts, for which far shorter ones do not tell: with few tokens most
    of the time goes into reading the weights, and the estimate of a long run would be many times too high.
    """
    key = _key(config)
    for found in (_speeds.get(key), _kept().get(key)):
        if found is not None and found[1] >= _ALIKE * longest:
            return amount / found[0]
    return None


def note(config: ModelConfig, amount: float, seconds: float, *, keep: bool) -> None:
    """Remember how long so much work took; ``keep`` it for other processes too.

    A prompt far shorter than the one that is remembered says less, and is not remembered.
    """
    key = _key(config)
    if seconds < _LEAST_SECONDS or amount < _ALIKE * _speeds.get(key, (0.0, 0.0))[1]:
        return
    _speeds[key] = amount / seconds, amount
    kept = _kept() if keep else {}
    old = kept.get(key)
    if keep and (old is None or (amount >= _ALIKE * old[1] and not 0.8 < old[0] * seconds / amount < 1.25)):
        try:
            _file().parent.mkdir(parents=True, exist_ok=True)
            write_atomically(_file(), json.dumps(kept | {key: _speeds[key]}, indent=1) + "\n")
        except (OSError, KvjaxError):
            return  # a folder that cannot be written keeps nothing


def _file() -> Path:
    return cache_folder() / "prefill_speed.json"


def _kept() -> dict[str, tuple[float, float]]:
    """The speeds that earlier processes kept; none where the file is not there or holds something else."""
    try:
        content = json.loads(_file().read_text(encoding="utf-8"))
        return {key: (float(speed), float(amount)) for key, (speed, amount) in content.items() if speed > 0}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _key(config: ModelConfig) -> str:
    sizes = config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    kind = "" if config.weights is None else f" {config.weights}"
    return f"{config.family} {'x'.join(map(str, sizes))}{kind} on {jax.device_count()} {jax.devices()[0].device_kind}"

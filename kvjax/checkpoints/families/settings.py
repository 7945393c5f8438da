"""Readers of single settings of several families, with their refusals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from kvjax.errors import WeightsError, quoted
from kvjax.model.config import MOST_SIZE, MLPKind


def size(config: Mapping[str, Any], origin: str, *names: str) -> int:
    """A whole number of at least 1 of a ``config.json``, by the first of its names that is there."""
    value = next((config[name] for name in names if config.get(name) is not None), None)
    return checked_size(value, names[0], origin)


#: More layers than any model has; a corrupt count of them is refused before anything is listed by layer.
MOST_LAYERS = 2**12


def layer_count(config: Mapping[str, Any], origin: str, *names: str) -> int:
    """The number of layers of a ``config.json``, by the first of its names that is there."""
    return checked_layers(size(config, origin, *(names or ("num_hidden_layers",))), origin)


def checked_layers(count: int, origin: str) -> int:
    """A number of layers; WeightsError for one that no model has."""
    if count > MOST_LAYERS:
        raise WeightsError(f"{origin} is corrupt: it says that the model has {count:,} layers.")
    return count


def whole(value: Any, name: str, origin: str) -> int:
    """A setting that is a whole number; WeightsError for anything else."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise WeightsError(f"{origin} is corrupt: a setting is of the wrong kind ({name} is {quoted(value)}).")
    return value


def checked_size(value: Any, name: str, origin: str) -> int:
    """A setting that is a whole number of at least 1; WeightsError for anything else."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_SIZE:
        raise WeightsError(f"{origin} has {quoted(value)} as its {name}; it is a whole number from 1 to {MOST_SIZE:,}.")
    return value


#: The MLP that a ``hidden_act`` means, in families whose MLP is gated, and in those whose is not.
SILU: Mapping[str, MLPKind] = {"silu": "gated_silu", "swish": "gated_silu"}
GELU: Mapping[str, MLPKind] = {
    "gelu": "gelu_exact",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
}


def activation(
    config: Mapping[str, Any], known: Mapping[str, MLPKind], origin: str, key: str = "hidden_act"
) -> MLPKind:
    """The MLP of a ``config.json``, the first known one where it does not say; WeightsError for an unknown one."""
    asked = config.get(key) or next(iter(known))
    if not isinstance(asked, str) or asked not in known:
        raise WeightsError(f"{origin} asks for the activation {quoted(asked)}; its family has {' or '.join(known)}.")
    return known[asked]


#: Settings that are true or false, of all families.
_SWITCHES = (
    "add_qkv_bias", "alibi", "attention_bias", "bias", "mlp_bias", "multi_query", "multi_query_attention",
    "new_decoder_architecture", "norm_topk_prob", "parallel_attn", "qk_layernorm", "qkv_bias", "tie_word_embeddings",
    "use_bias", "use_parallel_residual", "use_qk_norm", "use_qkv_bias", "use_sliding_window",
)  # fmt: skip


def check_switches(config: Mapping[str, Any], origin: str) -> None:
    """WeightsError where a setting of a ``config.json`` that is true or false is anything else, such as a text."""
    for name in _SWITCHES:
        if config.get(name) not in (None, False, True):
            raise WeightsError(f"{origin} has {quoted(config[name])} as its {name}; true or false is needed.")


def refuse(config: Mapping[str, Any], origin: str, *names: str) -> None:
    """WeightsError where a ``config.json`` switches on one of these, which kvjax does not have."""
    for name in names:
        if config.get(name):
            raise WeightsError(f"{origin} asks for {name} ({quoted(config[name])}), which is not supported.")


def without_mxfp4(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A ``config.json`` without its description of experts quantised as MXFP4, which are read; others stay in it."""
    described = config.get("quantization_config")
    if not isinstance(described, Mapping) or described.get("quant_method") != "mxfp4":
        return config
    return {name: value for name, value in config.items() if name != "quantization_config"}


def refuse_quantised(config: Mapping[str, Any], origin: str) -> None:
    """WeightsError where a ``config.json`` describes quantised weights; it names the method and what to do instead."""
    described = config.get("quantization_config")
    if not described:
        return
    method = described.get("quant_method") if isinstance(described, Mapping) else None
    named = f" by {quoted(method)}" if method else ""
    raise WeightsError(
        f"{origin} describes weights that are quantised{named} (quantization_config), which cannot be read; give the "
        "checkpoint in float that they were made from, or a GGUF of the model."
    )


class Keys(Protocol):
    """Reads one key of a GGUF."""

    def __call__(self, name: str, default: Any = None, *, count: bool = False) -> Any:
        """The value, or the default; ``count`` says that it is a whole number of at least 1."""
        ...


def gguf_keys(metadata: Mapping[str, Any], arch: str, origin: str) -> Keys:
    """A reader of a GGUF's keys, which begin with its architecture; WeightsError for an absent one."""

    def key(name: str, default: Any = None, *, count: bool = False) -> Any:
        value = metadata.get(f"{arch}.{name}", default)
        if value is None:
            raise WeightsError(f"{origin} lacks the key {arch}.{name}.")
        if isinstance(value, list):
            raise WeightsError(f"{origin} gives every layer its own {arch}.{name}, which is not supported.")
        return checked_size(value, f"{arch}.{name}", origin) if count else value

    return key

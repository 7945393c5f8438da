"""The same model in Hugging Face transformers (torch, SDPA attention, DynamicCache), timed on the same shapes.

torch is never a dependency: this module is imported only when ``--peer transformers`` asks for it. The weights are
kvjax's own, handed over as a state dict, so both sides compute the same function from the same numbers.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from kvjax.bench.machine import usable_cores
from kvjax.errors import KvjaxError, UsageError
from kvjax.model.config import ModelConfig
from kvjax.model.decoder import Decoder, DecoderLayer
from kvjax.model.params import logical

try:
    import torch
    import transformers
except ImportError as error:
    raise KvjaxError(
        "--peer transformers needs torch, which kvjax itself never does; install it beside kvjax and try again."
    ) from error


def _numpy(param: Any) -> np.ndarray:
    # A copy: torch wants memory it may write to, and JAX's buffers are not.
    return np.array(logical(param), np.float32)


def _linear(weight: np.ndarray) -> torch.Tensor:
    """[in, out] as torch's contiguous [out, in]."""
    return torch.from_numpy(np.ascontiguousarray(weight.T))


def _layer_state(layer: DecoderLayer, config: ModelConfig) -> dict[str, torch.Tensor]:
    hidden, group = config.hidden_size, config.group_size
    qkv, gate_up = _numpy(layer.qkv), _numpy(layer.gate_up)
    state = {
        "input_layernorm.weight": torch.from_numpy(_numpy(layer.input_norm.weight)),
        "post_attention_layernorm.weight": torch.from_numpy(_numpy(layer.post_attention_norm.weight)),
        "self_attn.q_proj.weight": _linear(qkv[:, :, :group].reshape(hidden, -1)),
        "self_attn.k_proj.weight": _linear(qkv[:, :, group].reshape(hidden, -1)),
        "self_attn.v_proj.weight": _linear(qkv[:, :, group + 1].reshape(hidden, -1)),
        "self_attn.o_proj.weight": _linear(_numpy(layer.out).reshape(-1, hidden)),
        "mlp.gate_proj.weight": _linear(gate_up[:, :, 0].reshape(hidden, -1)),
        "mlp.up_proj.weight": _linear(gate_up[:, :, 1].reshape(hidden, -1)),
        "mlp.down_proj.weight": _linear(_numpy(layer.down)),
    }
    if config.qkv_bias:
        bias = _numpy(layer.qkv_bias)
        state["self_attn.q_proj.bias"] = torch.from_numpy(bias[:, :group].reshape(-1))
        state["self_attn.k_proj.bias"] = torch.from_numpy(np.ascontiguousarray(bias[:, group]).reshape(-1))
        state["self_attn.v_proj.bias"] = torch.from_numpy(np.ascontiguousarray(bias[:, group + 1]).reshape(-1))
    return state


def _reference_config(config: ModelConfig) -> transformers.PretrainedConfig:
    families = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}
    if config.family not in families or config.rope.kind != "default":
        raise UsageError(
            f"--peer transformers builds llama and qwen2 models without rope scaling, not {config.family} "
            f"with {config.rope.kind} rope."
        )
    return families[config.family](
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position,
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=config.tie_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        attn_implementation="sdpa",
    )


def build(params: Decoder, config: ModelConfig) -> Any:
    """A float32 transformers model with kvjax's weights, on as many threads as cores.

    Raises:
      UsageError: for a family this peer does not cover.
    """
    torch.set_num_threads(usable_cores())
    reference = _reference_config(config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(reference, attn_implementation="sdpa")
    # torch multiplies rows of its [V, M] table; a tied one is kvjax's head as it is stored.
    head = _linear(_numpy(params.head))
    embedding = head if config.tie_embeddings else torch.from_numpy(_numpy(params.embedding))
    state = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.from_numpy(_numpy(params.norm.weight)),
    }
    for index, layer in enumerate(params.layers):
        for name, value in _layer_state(layer, config).items():
            state[f"model.layers.{index}.{name}"] = value
    state["lm_head.weight"] = head
    model.load_state_dict(state, strict=True, assign=True)
    if config.tie_embeddings:
        model.tie_weights()
    # Frequencies are a buffer outside the state dict; the meta device left it empty.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=reference)
    return model.eval()


class TransformersPeer:
    """Decode and prefill times of the transformers model."""

    name = "transformers"
    about = "the same weights in float32, SDPA attention and DynamicCache"

    def __init__(self, params: Decoder, config: ModelConfig):
        self.config = config
        self.model = build(params, config)

    def filled_cache(self, batch: int, context: int) -> transformers.DynamicCache:
        """A cache as after a prompt of ``context`` tokens, without running it."""
        c = self.config
        generator = torch.Generator().manual_seed(0)
        cache = transformers.DynamicCache()
        for layer in range(c.num_layers):
            shape = (batch, c.num_kv_heads, context, c.head_dim)
            k, v = (torch.randn(shape, generator=generator) for _ in range(2))
            cache.update(k, v, layer)
        return cache

    def decode_seconds(self, cache: transformers.DynamicCache, batch: int, context: int, steps: int) -> float:
        """Seconds of one greedy step, over ``steps`` of them; the cache is cut back to ``context`` before."""
        if cache.get_seq_length() > context:
            cache.crop(context - cache.get_seq_length())
        token = torch.ones((batch, 1), dtype=torch.long)
        with torch.inference_mode():
            start = time.perf_counter()
            for _ in range(steps):
                logits = self.model(input_ids=token, past_key_values=cache, use_cache=True).logits
                token = logits[:, -1:].argmax(-1)
            return (time.perf_counter() - start) / steps

    def prefill_seconds(self, tokens: np.ndarray) -> float:
        """Seconds until the first next token of a prompt, [B, T] ids."""
        ids = torch.from_numpy(np.asarray(tokens, np.int64))
        with torch.inference_mode():
            start = time.perf_counter()
            logits = self.model(
                input_ids=ids, past_key_values=transformers.DynamicCache(), use_cache=True, logits_to_keep=1
            ).logits
            logits.argmax(-1)
            return time.perf_counter() - start

    @staticmethod
    def nbytes(cache: transformers.DynamicCache) -> int:
        """Bytes of the keys and values the cache holds."""
        return sum(getattr(layer, name).nbytes for layer in cache.layers for name in ("keys", "values"))

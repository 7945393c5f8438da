"""Trains the recall model: a dense, differentiable forward pass of kvjax's decoder, and the recipe.

The runtime's prefill runs in loops that have no reverse derivative, so training has a pass of its own, from the same
halves of a layer. The recipe is what makes retrieval heads form within minutes on two cores: repeated segments alone
first, at 32 tokens, until heads copy; then half of them recall, at lengths doubled up to the context, where few steps
suffice because rotary embedding with a large base already carries over. Embeddings start at unit scale: with the
loader's small ones, the residual stream hides which token it stands on and the copying heads take five times longer.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from support.recall import task

from kvjax.checkpoints.families import FAMILIES
from kvjax.model.config import ModelConfig, RopeConfig
from kvjax.model.decoder import Decoder, random_decoder
from kvjax.model.params import logical
from kvjax.model.rope import angles, rotate

CONFIG = ModelConfig(
    family="llama",
    vocab_size=task.VOCAB,
    hidden_size=64,
    intermediate_size=128,
    num_layers=3,
    num_heads=8,
    num_kv_heads=8,
    head_dim=32,
    max_position=512,
    rope=RopeConfig(theta=5e5),
)


@dataclasses.dataclass(frozen=True)
class Phase:
    """Steps at one length, with a share of repeated segments among the rows; the rest are questions."""

    length: int
    steps: int
    batch: int
    repeated: float
    price: float


#: What a head pays for attention beyond this many tokens.
WINDOW, PRICE = 16, 0.3
PHASES = (
    Phase(32, 220, 64, 1.0, 0.0),
    Phase(64, 120, 32, 0.5, PRICE),
    Phase(128, 60, 16, 0.5, PRICE),
    Phase(256, 50, 8, 0.5, PRICE),
    Phase(512, 60, 4, 0.5, PRICE),
)


def forward(params: Decoder, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logits [B, T, V] of whole rows, T x T attention and all, and each head's mean far attention [L, H, G].

    Far is what is more than ``WINDOW`` tokens back and is not the first token of all, where attention rests.
    """
    config, (batch, count) = params.config, tokens.shape
    positions = jnp.broadcast_to(jnp.arange(count), (batch, count))
    cos, sin = angles(config, positions, jnp.full((batch,), count))
    visible = jnp.tri(count, dtype=bool)
    far = jnp.tri(count, k=-WINDOW, dtype=bool) & (jnp.arange(count) > 0)
    x, masses = params.embed(tokens), []
    for layer in params.layers:
        q, k, v = layer.project(x)
        q, k = rotate(q, cos[:, :, None, None], sin[:, :, None, None]), rotate(k, cos[:, :, None], sin[:, :, None])
        scores = jnp.einsum("bthgd,bshd->bhgts", q, k) * config.head_dim**-0.5
        weight = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
        masses.append(jnp.einsum("bhgts,ts->hg", weight, far.astype(jnp.float32)) / (batch * max(count - WINDOW, 1)))
        x = layer.finish(x, jnp.einsum("bhgts,bshd->bthgd", weight, v))
    return params.logits(x), jnp.stack(masses)


def loss(params: Decoder, tokens: jax.Array, asked: jax.Array, price: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(what is minimised, mean cross-entropy of the tokens that can be known in nats).

    The price of far attention is concave in what a head uses: many heads that look far a little cost more than one
    that does all of it.
    """
    scores, far = forward(params, tokens)
    losses = optax.softmax_cross_entropy_with_integer_labels(scores[:, :-1], tokens[:, 1:])
    entropy = jnp.sum(losses * asked[:, 1:]) / jnp.sum(asked[:, 1:])
    return entropy + price * jnp.sum(jnp.sqrt(far + 1e-3)), entropy


def start(config: ModelConfig, seed: int) -> Decoder:
    """Random parameters with embeddings of unit scale and a residual stream they dominate at first."""
    params = random_decoder(config, seed=seed)
    params.embedding[...] = params.embedding[...] * config.vocab_size**0.5
    for layer in params.layers:
        layer.out[...] = layer.out[...] * 0.5 * config.group_size**-0.5 * config.head_dim**-0.5
        layer.down[...] = layer.down[...] * 0.5
    return params


def batch(random: np.random.RandomState, phase: Phase) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, asked) of one step, each [batch, length]."""
    repeated = int(random.binomial(phase.batch, phase.repeated))
    parts = [task.repeats(random, repeated, phase.length), task.questions(random, phase.batch - repeated, phase.length)]
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])


def train(config: ModelConfig, phases: tuple[Phase, ...], seed: int, report: Any = None) -> tuple[Decoder, np.ndarray]:
    """Trained parameters, and the loss of every step [steps]; ``report(step, phase, loss)`` after each."""
    steps = sum(phase.steps for phase in phases)
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, min(50, steps // 4), steps, 1.5e-4)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98, weight_decay=0.1))
    params = start(config, seed)
    state = optimizer.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Decoder, state: Any, tokens: Any, asked: Any, price: Any) -> tuple[Decoder, Any, jax.Array]:
        (_, value), gradient = jax.value_and_grad(loss, has_aux=True)(params, tokens, asked, price)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    random, losses = np.random.RandomState(seed), []
    for phase in phases:
        for _ in range(phase.steps):
            params, state, value = step(params, state, *batch(random, phase), phase.price)
            losses.append(float(value))
            if report is not None:
                report(len(losses), phase, losses[-1])
    return params, np.array(losses)


def write_folder(params: Decoder, folder: pathlib.Path, dtype: Any = np.float16) -> pathlib.Path:
    """Write a Hugging Face folder: config.json, weights, and a tokenizer that names every id; return it."""
    import tokenizers
    from safetensors.numpy import save_file

    c = params.config
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": c.max_position,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope.theta,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": task.BOS,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {}
    for weight in FAMILIES["llama"].weights(c, False):
        values: Any = params
        for part in weight.param.split("."):
            values = values[int(part)] if part.isdigit() else getattr(values, part)
        tensors[weight.hf] = np.ascontiguousarray(
            weight.place(np.asarray(logical(values))).reshape(weight.shape), dtype
        )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    words = {"<s>": task.BOS, **{f"t{i}": i for i in range(1, c.vocab_size)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<s>"))
    tokenizer.add_special_tokens([tokenizers.AddedToken("<s>", special=True)])
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings) + "\n")
    return folder

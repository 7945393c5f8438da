"""Retrieval heads of a rotary model (RazorAttention, section 3.3), data-free: random tokens, repeated.

K random tokens are repeated four times and read in one forward pass. For a query at position p the echo score is its
attention to the earlier positions that hold the same token, p - K, p - 2K, ..., the induction score its attention to
the tokens after those, p - K + 1, ...; both summed over the occurrences and averaged over the queries from the second
repetition on. Only those few diagonals of the attention matrix are needed: each block of queries computes its softmax's
normaliser over the blocks of keys before it, then a handful of dot products, so nothing of size T x T ever exists and
the memory is that of one layer's keys and values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.checkpoints.load import LanguageModel
from kvjax.checks import whole_number
from kvjax.errors import UsageError
from kvjax.model.config import ModelConfig
from kvjax.model.decoder import Decoder, DecoderLayer
from kvjax.model.rope import angles, rotate
from kvjax.policies.profile import HeadProfile, ModelShape, model_name
from pallas_kernels.prefill import prefill

#: The paper's K and how often it repeats them.
TOKENS, REPEATS = 2500, 4
_BLOCK = 256


def retrieval_heads(
    lm: LanguageModel,
    *,
    tokens: int | None = None,
    repeats: int = REPEATS,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> HeadProfile:
    """Score every query head of a model.

    Args:
      lm: a model with rotary positions.
      tokens: K; by default 2,500, or what fits the model's context after the first token.
      repeats: how often the tokens are repeated, at least twice.
      seed: of the tokens; the same seed gives the same profile on the same machine.
      progress: called after each layer with the layers done and their number.

    Raises:
      UsageError: a model without rotary positions, or a length that its context cannot hold.
    """
    config = lm.config
    if config.positional != "rope":
        raise UsageError(
            "The heads of an ALiBi model are not scored; their scopes follow from its weights: "
            "use `kvjax calibrate alibi-scopes`."
        )
    whole_number("repeats", repeats, 2)
    whole_number("seed", seed, 0)
    most = (config.max_position - 1) // repeats
    if most < 2:
        raise UsageError(f"A context of {config.max_position} tokens does not hold 2 tokens repeated {repeats} times.")
    period = min(TOKENS, most) if tokens is None else tokens
    whole_number("tokens", period, 2, most)
    ids = np.concatenate([first_token(lm), *[random_tokens(lm, period, seed)] * repeats]).astype(np.int32)
    echo, induction = _scores(lm, ids, period, repeats, progress)
    return HeadProfile(
        model=model_name(lm.name),
        shape=ModelShape.of(config),
        tokens=period,
        repeats=repeats,
        seed=seed,
        echo=_rounded(echo),
        induction=_rounded(induction),
    )


def first_token(lm: LanguageModel) -> np.ndarray:
    """[1] what stands before the tokens and draws the attention that no token deserves: the model's own first token."""
    bos = lm.tokenizer.special_tokens.get("bos_token")
    known = lm.tokenizer.encode(bos) if bos else [*lm.tokenizer.prefix_ids, *lm.stop_token_ids]
    return np.array(known[:1] or [0])


def random_tokens(lm: LanguageModel, count: int, seed: int) -> np.ndarray:
    """[count] random ids without special tokens, all different.

    A vocabulary smaller than ``count`` is gone through again in another order; the copies that calibration looks for
    are those one period apart.
    """
    special = [*lm.tokenizer.special_ids, *lm.stop_token_ids, *first_token(lm)]
    usable = np.setdiff1d(np.arange(lm.tokenizer.vocab_size), special)
    if not usable.size:
        raise UsageError("This model's vocabulary holds nothing but special tokens; there is nothing to repeat.")
    rng = np.random.default_rng(seed)
    return np.concatenate([rng.permutation(usable) for _ in range(-(-count // usable.size))])[:count]


def _scores(
    lm: LanguageModel,
    ids: np.ndarray,
    period: int,
    repeats: int,
    progress: Callable[[int, int], None] | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Echo and induction scores [layer, query head] of a sequence that repeats after its first token."""
    config, length = lm.config, len(ids)
    padded = np.pad(ids, (0, -length % _BLOCK))[None]
    seen = jnp.full((1,), length, jnp.int32)
    cos, sin = angles(config, jnp.arange(padded.shape[1])[None], seen)
    x = _embed(lm.params, jnp.asarray(padded))
    rows = []
    for done, layer in enumerate(lm.params.layers, 1):
        x, scores = _layer(layer, x, cos, sin, period=period, repeats=repeats)
        rows.append(np.asarray(scores, np.float64).reshape(2, config.num_heads))
        if progress is not None:
            progress(done, config.num_layers)
    echo, induction = np.stack(rows, axis=1)
    return echo, induction


@jax.jit
def _embed(params: Decoder, tokens: Int[Array, "1 T"]) -> Float[Array, "1 T M"]:
    return params.embed(tokens)


@functools.partial(jax.jit, static_argnames=("period", "repeats"), donate_argnames=("x",))
def _layer(
    layer: DecoderLayer,
    x: Float[Array, "1 T M"],
    cos: Float[Array, "1 T F"],
    sin: Float[Array, "1 T F"],
    *,
    period: int,
    repeats: int,
) -> tuple[Float[Array, "1 T M"], Float[Array, "2 H G"]]:
    """One layer over the whole sequence in query blocks: hidden states out, and its heads' two scores."""
    config: ModelConfig = layer.config
    tokens = x.shape[1]
    heads, group, dim = config.num_kv_heads, config.group_size, config.head_dim
    length, scale = 1 + period * repeats, config.attention_scale

    def body(i: Array, carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        x, k, v, total = carry
        xb, cb, sb = (jax.lax.dynamic_slice_in_dim(a, i * _BLOCK, _BLOCK, axis=1) for a in (x, cos, sin))
        q, kb, vb = layer.project(xb)
        kb = rotate(kb, cb[:, :, None], sb[:, :, None]).swapaxes(1, 2)
        q = rotate(q, cb[:, :, None, None], sb[:, :, None, None]).transpose(0, 2, 3, 1, 4)
        k = jax.lax.dynamic_update_slice_in_dim(k, kb, i * _BLOCK, axis=2)
        v = jax.lax.dynamic_update_slice_in_dim(v, vb.swapaxes(1, 2), i * _BLOCK, axis=2)
        out, normaliser = prefill(q, k, v, offset=i * _BLOCK, scale=scale, block=_BLOCK)
        attended = out.transpose(0, 3, 1, 2, 4)
        xb = layer.finish(xb, attended.astype(x.dtype))
        position = i * _BLOCK + jnp.arange(_BLOCK)
        found = _diagonals(q[0].astype(jnp.float32), normaliser[0], k[0], position, period, repeats, scale)
        asked = (position > period) & (position < length)
        total = total + jnp.where(asked, found, 0.0).sum(axis=-1)
        return jax.lax.dynamic_update_slice_in_dim(x, xb, i * _BLOCK, axis=1), k, v, total

    empty = jnp.zeros((1, heads, tokens, dim), x.dtype)
    total = jnp.zeros((2, heads, group), jnp.float32)
    x, _, _, total = jax.lax.fori_loop(0, tokens // _BLOCK, body, (x, empty, empty, total))
    return x, total / (period * (repeats - 1))


def _diagonals(
    q: Float[Array, "H G N D"],
    normaliser: Float[Array, "H G N"],
    k: Float[Array, "H T D"],
    position: Int[Array, " N"],
    period: int,
    repeats: int,
    scale: float,
) -> Float[Array, "2 H G N"]:
    """Attention of each query to the same token's earlier copies, and to the tokens after those."""
    found = []
    for after in (0, 1):
        total = jnp.zeros(normaliser.shape, jnp.float32)
        for back in range(1, repeats):
            source = position - back * period
            keys = jnp.take(k, jnp.maximum(source + after, 0), axis=1).astype(jnp.float32)
            # A multiply-reduce in float32: one number a query, nothing a matrix unit would speed up.
            logits = jnp.sum(q * keys[:, None], axis=-1) * scale
            # The first token of all stands before the repetitions: position 0 is no copy.
            total = total + jnp.where(source > 0, jnp.exp(logits - normaliser), 0.0)
        found.append(total)
    return jnp.stack(found)


def _rounded(scores: np.ndarray) -> tuple[tuple[float, ...], ...]:
    """Six decimals: what a file holds is what was computed, and reads well."""
    return tuple(tuple(round(float(value), 6) for value in row) for row in scores)

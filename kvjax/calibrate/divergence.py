"""The watershed layer (Round Attention, section 3.1 and appendix B): from where on layers agree about rounds.

A dialogue is read once; at each layer the attention of the last token of its last question to every earlier round
makes a distribution over rounds. The mean KL divergence of a layer's distribution to those of all later layers falls
where layers begin to agree; the watershed is its first significant local minimum. One layer runs at a time, so the
memory is that of one layer's keys and values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.calibrate.profile import ModelShape, WatershedProfile
from kvjax.checks import number
from kvjax.errors import UsageError
from kvjax.model.decoder import Decoder, DecoderLayer
from kvjax.model.load import LanguageModel
from kvjax.model.rope import Angles, token_angles
from kvjax.policies.signals import Signals
from kvjax.prompts import opening_tokens, tokenize
from kvjax.rounds.choose import normalised
from kvjax.runtime.buckets import block_of, prompt_bucket
from kvjax.runtime.prefill import read_layer
from kvjax.runtime.taps import LayerTap

#: What an empty round counts as, so that a divergence is finite.
_FLOOR = 1e-8

Messages = Sequence[Mapping[str, Any]]


def watershed(
    lm: LanguageModel,
    dialogues: Sequence[tuple[Messages, str]],
    *,
    prominence: float = 0.1,
    progress: Callable[[int, int], None] | None = None,
) -> WatershedProfile:
    """Find the watershed layer of a model on dialogues.

    Args:
      lm: a model with rotary positions and a chat template.
      dialogues: messages (user and assistant in turns, at least two rounds) and the question that follows them.
      prominence: what a local minimum must stand out by, as a share of the curve's range.
      progress: called after each dialogue with how many are done, and their number.

    Raises:
      UsageError: an ALiBi model, no dialogue, or one that is too short or too long.
    """
    config = lm.config
    if config.positional != "rope":
        raise UsageError("RoundAttention is for models with rotary positions; this one has ALiBi's.")
    number("prominence", prominence, 0, 1, open_below=True)
    if not dialogues:
        raise UsageError("There is no dialogue to calibrate on; give at least one with two rounds before its question.")
    curves, rounds = [], 0
    for done, (messages, question) in enumerate(dialogues, 1):
        shares = round_shares(lm, messages, question)
        rounds += shares.shape[1]
        curves.append(divergence_to_later(shares))
        if progress is not None:
            progress(done, len(dialogues))
    curve = np.mean(curves, axis=0)
    return WatershedProfile(
        model=lm.name,
        shape=ModelShape.of(config),
        watershed=first_minimum(curve, prominence) + 1,
        dialogues=len(dialogues),
        rounds=rounds,
        prominence=float(prominence),
        divergence=(*(round(float(value), 6) for value in curve), 0.0),
    )


def round_shares(lm: LanguageModel, messages: Messages, question: str) -> Float[np.ndarray, "L R"]:
    """[layer, round] attention of the question's last token to the earlier rounds, over heads; each row sums to 1."""
    from kvjax.rounds.history import history_ids

    config = lm.config
    ids, starts = history_ids(lm, messages)
    if len(starts) < 2:
        raise UsageError("A dialogue has fewer than two rounds before its question; nothing is distributed over one.")
    edges = [max(opening_tokens(lm, list(messages), ids), 4), *starts[1:], len(ids)]
    asked = [{"role": "user", "content": question}]
    ids += tokenize(lm, asked, context=None, chat=True, onto=True).prompts[0]
    if len(ids) > config.max_position:
        raise UsageError(f"A dialogue has {len(ids)} tokens; this model's context is {config.max_position}.")
    padded = np.zeros((1, prompt_bucket(len(ids))), np.int32)
    padded[0, : len(ids)] = ids
    count = jnp.full((1,), len(ids), jnp.int32)
    angles = token_angles(config, jnp.arange(padded.shape[1])[None], count)
    x = _embed(lm.params, jnp.asarray(padded))
    shares = []
    for layer in lm.params.layers:
        x, mass = _layer(layer, x, angles, count)
        running = np.concatenate([[0.0], np.cumsum(np.asarray(mass), dtype=np.float64)])
        shares.append(normalised(np.diff(running[edges])))
    return np.stack(shares)


@jax.jit
def _embed(params: Decoder, tokens: Int[Array, "1 T"]) -> Float[Array, "1 T M"]:
    return params.embed(tokens)


@functools.partial(jax.jit, donate_argnames=("x",))
def _layer(
    layer: DecoderLayer, x: Float[Array, "1 T M"], angles: Angles, count: Int[Array, " 1"]
) -> tuple[Float[Array, "1 T M"], Float[Array, " T"]]:
    """One layer over a dialogue: hidden states out, and the attention of the last token to each, over heads."""
    config = layer.config
    scale = jnp.full((1,), config.head_dim**-0.5, jnp.float32)
    tap = LayerTap(Signals(window=1), config, jnp.zeros_like(count), count, count - 1, scale, 1)
    block = block_of(x.shape[1])
    blocks = (count[0] + block - 1) // block
    x, _, _, signals = read_layer(layer, x, angles, None, blocks, jnp.int32(0), tap, count)
    assert signals is not None and signals.window is not None
    return x, signals.window.new.sum(axis=(0, 1, 2))


def divergence_to_later(shares: Float[np.ndarray, "L R"]) -> Float[np.ndarray, " L-1"]:
    """Mean KL divergence (nats) of each layer's distribution to those of all later layers; the last has none."""
    p = shares + _FLOOR
    p = p / p.sum(axis=1, keepdims=True)
    log = np.log(p)
    return np.array([(p[i] * (log[i] - log[i + 1 :])).sum(axis=1).mean() for i in range(len(p) - 1)])


def first_minimum(curve: Float[np.ndarray, " L"], prominence: float) -> int:
    """Index of the first significant local minimum.

    It stands out by ``prominence`` times the curve's range, and the curve stays in the lower half of that range from
    there on: in the paper's words, later differences "remain significantly smaller than those observed in the earlier
    layers". (SmolLM2's first prominent minimum, at layer 8 of 30, lies between two peaks.) Without one, as in a curve
    that only falls, it is the first point within ``prominence`` of the lowest.
    """
    from scipy.signal import find_peaks

    low, span = float(curve.min()), float(curve.max() - curve.min())
    if span > 0:
        found, _ = find_peaks(-curve, prominence=prominence * span)
        lasting = [int(i) for i in found if curve[i:].max() <= low + span / 2]
        if lasting:
            return lasting[0]
    return int(np.argmax(curve <= curve.min() + prominence * span))

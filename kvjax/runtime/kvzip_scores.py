"""KVzip's scores of whole prompts, and the hidden states of the tokens that have them: what a scorer is trained on."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.cache.buckets import prompt_bucket
from kvjax.model.decoder import Decoder
from kvjax.model.rope import angles_of_layers, prompt_positions
from kvjax.policies.full import Full
from kvjax.policies.signals import Repetition
from kvjax.runtime.kvzip_passes import Passes
from kvjax.runtime.kvzip_prefill import hold, repeated
from kvjax.runtime.prefill_layer import read_rows
from kvjax.runtime.programs import Programs
from kvjax.sharding.compile import Device, Named, Program


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScoredTokens:
    """Some tokens of each prompt, in the global layers of a model.

    Attributes:
      hidden: [B, L, S, M] what the projections of attention read of each token.
      scores: [B, L, H, S] the largest attention probability that each head gave it while the prompt was repeated.
    """

    hidden: Named
    scores: Named


_RESULTS = ScoredTokens(
    Named(0, ("batch", None, None, None)),
    Named(0, ("batch", None, "kv_head", None)),
)


def score_repetition(
    device: Device,
    params: Decoder,
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    picked: Int[Array, "B S"],
    *,
    asked: Repetition,
) -> ScoredTokens:
    """Read prompts and have them repeated, and say of the ``picked`` tokens what :class:`ScoredTokens` holds."""
    seen = jnp.zeros_like(count)
    place = prompt_positions(seen, tokens.shape[1], fresh=True)
    angles = angles_of_layers([layer.config for layer in params.layers], place, count)
    x, hidden, held = params.embed(tokens), [], []
    for layer, rope in zip(params.layers, angles, strict=True):
        if layer.config.window is None:
            hidden.append(layer.attention_input(jnp.take_along_axis(x, picked[..., None], axis=1)))
        x, k, v, _ = read_rows(layer, x, rope, None, count, jnp.int32(0))
        held.append(hold(None, k, v, seen, count, fresh=True, placed=layer.config.positional == "alibi"))
    masses = repeated(params, Passes(asked, tokens, seen, count), held, [(None,)] * len(held))
    scores = [jnp.take_along_axis(mass, picked[:, None], axis=2) for mass in masses if mass is not None]  # [B, H, S]
    return ScoredTokens(
        dataclasses.replace(_RESULTS.hidden, values=jnp.stack(hidden, axis=1)),
        dataclasses.replace(_RESULTS.scores, values=jnp.stack(scores, axis=1)),
    )


SCORE_REPETITION = Program(score_repetition, lambda *_: _RESULTS, ("asked",))


def scored_tokens(
    programs: Programs, params: Decoder, prompts: list[list[int]], picked: list[np.ndarray], asked: Repetition
) -> tuple[np.ndarray, np.ndarray]:
    """:class:`ScoredTokens` of as many prompts, each of as many picked tokens, on the host.

    Args:
      programs: of the model's devices; every row of their data axis takes a prompt.
      prompts: token ids. picked: places of tokens, equally many of each prompt.
      asked: how the prompts are repeated.
    """
    rows = programs.rows(len(prompts))
    tokens = np.zeros((rows, prompt_bucket(max(map(len, prompts)))), np.int32)
    count, chosen = np.ones(rows, np.int32), np.zeros((rows, len(picked[0])), np.int32)
    for row, (ids, places) in enumerate(zip(prompts, picked, strict=True)):
        tokens[row, : len(ids)], count[row], chosen[row] = ids, len(ids), places
    device = programs.device(Full(), params.config)
    found: Any = SCORE_REPETITION(device, params, tokens, count, chosen, asked=asked)
    hidden, scores = (np.asarray(named.values, np.float32)[: len(prompts)] for named in (found.hidden, found.scores))
    return hidden, scores

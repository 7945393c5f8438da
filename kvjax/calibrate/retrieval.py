"""Retrieval heads of a rotary model (RazorAttention, section 3.3), data-free: random tokens, repeated.

K random tokens are repeated four times and read in one forward pass. For a query at position p the echo score is its
attention to the earlier positions that hold the same token, p - K, p - 2K, ..., the induction score its attention to
the tokens after those, p - K + 1, ...; both summed over the occurrences and averaged over the queries from the second
repetition on. Only those few diagonals of the attention matrix are needed: each block of queries computes its softmax's
normaliser over the blocks of keys before it, then a handful of dot products, so nothing of size T x T ever exists and
the memory is that of one layer's keys and values.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.checkpoints.load import LanguageModel
from kvjax.checks import MOST_SEED, whole_number
from kvjax.errors import UsageError
from kvjax.model.config import ModelConfig
from kvjax.policies.full import Full
from kvjax.policies.profile import HeadProfile, ModelShape, model_name
from kvjax.policies.window_layers import for_model
from kvjax.runtime.layer_forward import forward_layers
from kvjax.runtime.layer_observer import LayerObserver
from pallas_kernels.kept_tokens import KeptTokens
from pallas_kernels.softmax import capped

#: The paper's K and how often it repeats them.
TOKENS, REPEATS = 2500, 4


def retrieval_heads(
    lm: LanguageModel,
    *,
    tokens: int | None = None,
    repeats: int = REPEATS,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> HeadProfile:
    """Score every query head of a model, of its global layers where others have a window.

    Args:
      lm: a model with rotary positions.
      tokens: K; by default 2,500, or what fits the model's context after the first token.
      repeats: how often the tokens are repeated, at least twice.
      seed: of the tokens; the same seed gives the same profile on the same machine.
      progress: called after each layer with the layers done and their number.

    Raises:
      UsageError: a model without rotary positions or global layers, or a length that its context cannot hold.
    """
    config = lm.config
    if config.positional != "rope":
        raise UsageError(
            "The heads of an ALiBi model are not scored; their scopes follow from its weights: "
            "use `kvjax calibrate alibi-scopes`."
        )
    if config.sliding and None not in config.windows:
        raise UsageError("Every layer of this model sees a window of tokens; none has heads that retrieve from afar.")
    whole_number("repeats", repeats, 2)
    whole_number("seed", seed, 0, MOST_SEED)
    most = (config.max_position - 1) // repeats
    if most < 2:
        raise UsageError(f"A context of {config.max_position} tokens does not hold 2 tokens repeated {repeats} times.")
    period = min(TOKENS, most) if tokens is None else tokens
    whole_number("tokens", period, 2, most)
    ids = np.concatenate([first_token(lm), *[random_tokens(lm, period, seed)] * repeats]).astype(np.int32)
    echo, induction = _scores(lm, ids, period, repeats, progress)
    return HeadProfile(
        model=model_name(lm.name),
        shape=ModelShape.of(for_model(Full(), config).seen_as(config)),
        tokens=period,
        repeats=repeats,
        seed=seed,
        echo=_rounded(echo),
        induction=_rounded(induction),
    )


def first_token(lm: LanguageModel) -> np.ndarray:
    """[1] the model's own first token: it draws the attention that no other token deserves."""
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
    """Echo and induction scores [global layer, query head] of a sequence that repeats after its first token."""
    scores = []
    config = lm.config
    layers = forward_layers(lm.params, [ids.tolist()], RepetitionScores(config, period, repeats))
    for layer, (_, found) in enumerate(layers):
        if config.window_of(layer) is None:
            scores.append(np.asarray(found, np.float64).reshape(2, config.num_heads))
        if progress is not None:
            progress(layer + 1, config.num_layers)
    echo, induction = np.stack(scores, axis=1)
    return echo, induction


@functools.partial(jax.tree_util.register_dataclass, data_fields=(), meta_fields=("config", "period", "repeats"))
@dataclasses.dataclass(frozen=True)
class RepetitionScores(LayerObserver):
    """Observes the echo and the induction score of every head: [2, H, G].

    Attributes:
      period: tokens that are repeated after the first one; ``repeats``: how often they stand there.
    """

    config: ModelConfig
    period: int
    repeats: int

    def start(self, kept: KeptTokens | None, tokens: int) -> Float[Array, "2 H G"]:
        """Scores of no query."""
        return jnp.zeros((2, self.config.num_kv_heads, self.config.group_size), jnp.float32)

    def after_block(
        self,
        partial: Float[Array, "2 H G"],
        raw: Float[Array, "1 S H G D"],
        q: Float[Array, "1 H G S D"],
        normaliser: Float[Array, "1 H G S"],
        k: Float[Array, "1 H T D"],
        kept: KeptTokens | None,
        index: Int[Array, ""],
    ) -> Float[Array, "2 H G"]:
        """The sums over queries, those of this block included."""
        block = q.shape[3]
        position = index * block + jnp.arange(block)
        where = position, self.period, self.repeats, self.config.attention_scale, self.config.attention_soft_cap
        found = _diagonals(q[0].astype(jnp.float32), normaliser[0], k[0], *where)
        counts = (position > self.period) & (position < 1 + self.period * self.repeats)
        return partial + jnp.where(counts, found, 0.0).sum(axis=-1)

    def finish(
        self, partial: Float[Array, "2 H G"], before: None, k: Float[Array, "1 H T D"], kept: KeptTokens | None
    ) -> Float[Array, "2 H G"]:
        """Means over the queries from the second repetition on."""
        return partial / (self.period * (self.repeats - 1))


def _diagonals(
    q: Float[Array, "H G N D"],
    normaliser: Float[Array, "H G N"],
    k: Float[Array, "H T D"],
    position: Int[Array, " N"],
    period: int,
    repeats: int,
    scale: float,
    soft_cap: float | None,
) -> Float[Array, "2 H G N"]:
    """Attention of each query to the same token's earlier copies, and to the tokens after those."""
    found = []
    for after in (0, 1):
        total = jnp.zeros(normaliser.shape, jnp.float32)
        for back in range(1, repeats):
            source = position - back * period
            keys = jnp.take(k, jnp.maximum(source + after, 0), axis=1).astype(jnp.float32)
            # A multiply-reduce in float32: one number a query, nothing a matrix unit would speed up.
            logits = capped(jnp.sum(q * keys[:, None], axis=-1) * scale, soft_cap)
            # The first token of all stands before the repetitions: position 0 is no copy.
            total = total + jnp.where(source > 0, jnp.exp(logits - normaliser), 0.0)
        found.append(total)
    return jnp.stack(found)


def _rounded(scores: np.ndarray) -> tuple[tuple[float, ...], ...]:
    """Six decimals: what a file holds is what was computed, and reads well."""
    return tuple(tuple(round(float(value), 6) for value in row) for row in scores)

"""The statistics of attention that a policy may ask for."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.checks import MOST_SLOTS, number, whole_number
from kvjax.errors import UsageError, quoted


@dataclasses.dataclass(frozen=True)
class Repetition:
    """A prompt that is read once more, in answer to a request to repeat it (KVzip, arXiv 2505.23416, section 3.2).

    Once a prompt is in, ``chunk`` of its tokens at a time are fed again after a request to repeat them; each of these
    passes attends to the whole prompt and to nothing of the others, and leaves nothing behind.

    Attributes:
      chunk: tokens that one pass repeats.
      sink: tokens at the row's beginning that share the softmax in which a chunk's keys are scored.
      first, later: token ids of the request to repeat the first chunk, and a later one: the latter goes on with the
        last ``overlap`` tokens of the chunk before. end: ids between either and the repetition.
    """

    chunk: int
    sink: int = 0
    first: tuple[int, ...] = ()
    later: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    overlap: int = 8

    @property
    def request_tokens(self) -> tuple[int, int]:
        """Tokens of the request for the first chunk, and for a later one."""
        return len(self.first) + len(self.end), len(self.later) + self.overlap + len(self.end)

    def tokens(self, prompt: int) -> int:
        """Tokens of all passes over a prompt of so many."""
        first, later = self.request_tokens
        passes = -(-prompt // self.chunk)
        return prompt + first * (passes > 0) + later * max(passes - 1, 0)


@dataclasses.dataclass(frozen=True)
class Signals:
    """The statistics of attention that a policy needs; what is not declared is never computed.

    Attributes:
      window: queries at the end of each prompt or turn whose attention every key's mass is summed over.
      window_share: the same as a fraction of the tokens seen by then, rounded up; the larger of the two counts.
      window_by_keys: each of these queries counts as often as there are tokens up to it, its own among them.
      columns: mass of every key over all queries of the prompt or turn.
      columns_scaled: the columns' softmax uses :meth:`Policy.window_scale` instead of the model's own scale.
      noncausal: chunk size of non-causal attention, in which every query of a chunk attends to every key of it, earlier
        or later; each key's mass is summed over the chunk's queries, 1 on average, and each query that a short
        chunk lacks adds 1 / chunk size. 0 for none.
      noncausal_scaled: whether its softmax uses the model's own scale, or the products of queries and keys as they are.
      noncausal_first: tokens at positions below this belong to no chunk.
      noncausal_last: neither do so many at the end of each prompt or turn.
      repeat: the prompt is repeated, and each key's largest attention probability from a query of that is taken: in the
        softmax over its own chunk's keys, the sinks' and the repetition's so far; of a group's query heads the largest.
      outputs: the L1 norm of what each token's value adds to the hidden states at full attention, by query head.
      hidden: a linear function of what attention's projections read of each token, for each KV head: see
        :meth:`Policy.hidden_weights`.
      queries: mean and covariance of the queries before rotary embedding.
      query_skip: tokens at positions below this do not count among them.
      squares: queries at the end of each prompt or turn whose channels' squares, after rotary embedding, are averaged.
      decode_logits: :meth:`Policy.observe` gets each new query's scaled scores by page.
    """

    window: int = 0
    window_share: float = 0.0
    window_by_keys: bool = False
    columns: bool = False
    columns_scaled: bool = False
    noncausal: int = 0
    noncausal_scaled: bool = True
    noncausal_first: int = 0
    noncausal_last: int = 0
    repeat: Repetition | None = None
    outputs: bool = False
    hidden: bool = False
    queries: bool = False
    query_skip: int = 0
    squares: int = 0
    decode_logits: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, name = getattr(self, field.name), f"Signals.{field.name}"
            if isinstance(field.default, bool):
                if not isinstance(value, bool):
                    raise UsageError(f"{name} is {quoted(value)}; give True or False.")
            elif isinstance(field.default, int):
                whole_number(name, value, 0, MOST_SLOTS)
        number("Signals.window_share", self.window_share, 0, 1)
        if self.repeat is not None and not isinstance(self.repeat, Repetition):
            raise UsageError(f"Signals.repeat is {quoted(self.repeat)}; give a Repetition or None.")

    def window_rows(self, tokens: int) -> int:
        """The most queries a window of ``tokens`` tokens can hold: a static size."""
        return min(tokens, max(self.window, math.ceil(self.window_share * tokens)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mass:
    """Attention mass of each key, the query heads of a group apart.

    Attributes:
      kept: [B, H, G, C] of the slots that were in the cache; None in a fresh one.
      new: [B, H, G, T] of the tokens being read.
    """

    kept: Float[Array, "B H G C"] | None
    new: Float[Array, "B H G T"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QueryStats:
    """Queries before rotary embedding, float32.

    Attributes:
      count: [B] queries.
      mean: [B, H, G, D]; covariance: [B, H, G, D, D], divided by the count.
    """

    count: Float[Array, " B"]
    mean: Float[Array, "B H G D"]
    covariance: Float[Array, "B H G D D"]

    @classmethod
    def none(cls, batch: int, heads: int, group: int, dim: int) -> QueryStats:
        """Statistics of no query."""
        zeros = jnp.zeros((batch, heads, group, dim), jnp.float32)
        return cls(jnp.zeros((batch,), jnp.float32), zeros, jnp.zeros((*zeros.shape, dim), jnp.float32))

    def merge(self, other: QueryStats) -> QueryStats:
        """Statistics of both sets together (Chan et al.'s update: no cancellation of large means)."""
        count = self.count + other.count
        part = (other.count / jnp.maximum(count, 1))[:, None, None, None]
        delta = other.mean - self.mean
        mean = self.mean + part * delta
        outer = delta[..., :, None] * delta[..., None, :]
        part = part[..., None]
        covariance = (1 - part) * self.covariance + part * other.covariance + part * (1 - part) * outer
        return QueryStats(count, mean, covariance)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptSignals:
    """The declared signals of a prompt or turn, in the layer's tokens; see :class:`Signals`. The rest is None.

    ``outputs`` are norms, ``hidden`` what a linear function gives and ``repeat`` the largest probability, both of one
    query head: no masses, in the same form.
    ``squares`` [B, H, G, D] are float32 means.
    """

    window: Mass | None = None
    columns: Mass | None = None
    queries: QueryStats | None = None
    noncausal: Mass | None = None
    repeat: Mass | None = None
    outputs: Mass | None = None
    hidden: Mass | None = None
    squares: Float[Array, "B H G D"] | None = None

    def of_heads(self, heads: tuple[int, ...]) -> PromptSignals:
        """The signals of some of the KV heads."""
        index = jnp.asarray(heads, jnp.int32)

        def cut(mass: Mass | None) -> Mass | None:
            if mass is None:
                return None
            return Mass(None if mass.kept is None else mass.kept[:, index], mass.new[:, index])

        stats = self.queries
        if stats is not None:
            stats = QueryStats(stats.count, stats.mean[:, index], stats.covariance[:, index])
        return PromptSignals(
            cut(self.window),
            cut(self.columns),
            stats,
            cut(self.noncausal),
            cut(self.repeat),
            cut(self.outputs),
            cut(self.hidden),
            None if self.squares is None else self.squares[:, index],
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CandidateSignals:
    """:class:`PromptSignals` in the order of a selection's candidates: [B, H, G, N] masses."""

    window: Float[Array, "B H G N"] | None = None
    columns: Float[Array, "B H G N"] | None = None
    queries: QueryStats | None = None
    noncausal: Float[Array, "B H G N"] | None = None
    repeat: Float[Array, "B H 1 N"] | None = None
    outputs: Float[Array, "B H G N"] | None = None
    hidden: Float[Array, "B H 1 N"] | None = None


def first_window_query(signals: Signals, count: Int[Array, " B"], total: Int[Array, " B"]) -> Int[Array, " B"]:
    """[B] index among the new tokens of the first query in each row's window."""
    wanted = jnp.maximum(signals.window, jnp.ceil(jnp.float32(signals.window_share) * total - 1e-3).astype(jnp.int32))
    return jnp.maximum(count - wanted, 0)

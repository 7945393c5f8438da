"""A request checked against the model, the policy and the device, before anything is allocated."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.value import Cache, concatenate, take
from kvjax.checks import number, whole_number
from kvjax.config import ModelConfig
from kvjax.errors import UsageError
from kvjax.model.load import LanguageModel
from kvjax.planning import check_fits
from kvjax.policies import Full, Policy, parse
from kvjax.prompts import Tokens, tokenize
from kvjax.runtime.decode import Controls
from kvjax.runtime.sampling import Sampling
from kvjax.runtime.stopping import StopTable, stop_table


@dataclasses.dataclass(frozen=True)
class Options:
    """How tokens are chosen and what ends them; see :func:`kvjax.generate` for each."""

    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int
    n: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int] | None
    logprobs: bool

    def __post_init__(self) -> None:
        whole_number("max_new_tokens", self.max_new_tokens, 0)
        number("temperature", self.temperature, 0)
        number("top_p", self.top_p, 0, 1, open_below=True)
        number("min_p", self.min_p, 0, 1)
        number("repetition_penalty", self.repetition_penalty, 0, open_below=True)
        if self.top_k is not None:
            whole_number("top_k", self.top_k, 1)
        whole_number("seed", self.seed, 0)
        whole_number("n", self.n, 1)
        if any(not isinstance(text, str) or not text for text in self.stop_strings):
            raise UsageError("A stop string is empty or not text; give strings of at least one character.")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class Request:
    """Prompts tokenised and checked against the model, the policy and the device.

    Attributes:
      tokens: the context's and the prompts' ids as passed.
      prompts: ids to read, row by row before samples are spread: a continued row begins with its pending token.
      cache: what they are read onto, or None.
      policy: which tokens stay.
      rows: prompts times samples.
    """

    def __init__(
        self,
        lm: LanguageModel,
        prompt: Any,
        policy: Policy | str | None,
        cache: Cache | Sequence[Cache] | None,
        chat: bool,
        context: Any,
        options: Options,
        memory_limit: int | None,
    ):
        self.lm, self.options = lm, options
        self.tokens: Tokens = tokenize(lm, prompt, context=context, chat=chat, onto=cache is not None)
        count = len(self.tokens.prompts)
        self.cache = _one_cache(cache, count)
        if self.cache is not None:
            if policy is not None and parse(policy) != self.cache.policy:
                raise UsageError(
                    f"The cache was compressed by {self.cache.policy}; it continues with that policy, so leave "
                    "policy= out or give the same one."
                )
            _same_model(lm.config, self.cache)
        self.policy = _policy(policy, self.cache)
        self.policy.check(lm.config)
        self.rows = count * options.n
        self.prompts = self._with_pending()
        self._check_size(memory_limit)

    def _with_pending(self) -> list[tuple[int, ...]]:
        """Prompts of a continued cache begin with the token that was generated but not yet read."""
        if self.cache is None:
            return list(self.tokens.prompts)
        result = []
        for pending, ids in zip(np.asarray(self.cache.pending).tolist(), self.tokens.prompts, strict=True):
            # The end of the last answer comes with the new turn's own text.
            ended = pending < 0 or pending in self.lm.stop_token_ids
            result.append(ids if ended else (pending, *ids))
        return result

    def _check_size(self, memory_limit: int | None) -> None:
        config, limit = self.lm.config, self.lm.config.max_position
        seen = np.zeros(len(self.prompts), int) if self.cache is None else np.asarray(self.cache.seen)
        added = np.array([len(self.tokens.context) + len(ids) for ids in self.prompts])
        longest = int((seen + added).max())
        if longest > limit and not (self.policy.beyond_context and int(added.max()) <= limit):
            before = f" after {int(seen.max())} of the conversation" if seen.any() else ""
            raise UsageError(
                f"The prompt has {int(added.max())} tokens{before}; this model's context is {limit}, so shorten it."
            )
        check_fits(config, longest, self.rows, self.policy, self.dtype, memory_limit, self.lm.params, self.cache)

    @property
    def dtype(self) -> Any:
        """Dtype of the weights, and of the cache."""
        return jnp.dtype(self.lm.params.embedding[...].dtype)

    def controls(self) -> Controls:
        """The options on the device, for the compiled loop."""
        lm, options, vocabulary = self.lm, self.options, self.lm.config.vocab_size
        ids = [*lm.stop_token_ids, *(options.stop_token_ids or ())]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, (int, np.integer)) or not 0 <= token < vocabulary:
                raise UsageError(f"The stop token id {token!r} is not one of this model's 0 to {vocabulary - 1}.")
        index = np.arange(self.rows)
        seed = jnp.asarray(options.seed & 0xFFFFFFFF, jnp.uint32)
        sampling = Sampling(
            temperature=jnp.asarray(options.temperature, jnp.float32),
            top_k=jnp.asarray(min(options.top_k or vocabulary, vocabulary), jnp.int32),
            top_p=jnp.asarray(options.top_p, jnp.float32),
            min_p=jnp.asarray(options.min_p, jnp.float32),
            repetition_penalty=jnp.asarray(options.repetition_penalty, jnp.float32),
            keys=_keys(seed, jnp.asarray(index // options.n), jnp.asarray(index % options.n)),
        )
        stops = _stop_table(lm, options.stop_strings, tuple(int(token) for token in ids))
        limits = (min(options.max_new_tokens, 2**31 - 1), lm.config.max_position)
        return Controls(sampling, stops, *(jnp.asarray(limit, jnp.int32) for limit in limits))


def _policy(policy: Policy | str | None, cache: Cache | None) -> Policy:
    if cache is not None:
        return cache.policy
    return Full() if policy is None else parse(policy)


def _one_cache(cache: Cache | Sequence[Cache] | None, count: int) -> Cache | None:
    """The caches to continue as one batch with a row per prompt."""
    if cache is None:
        return None
    if not isinstance(cache, Cache):
        cache = concatenate(list(cache))
    leaf = cache.layers[0].k
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise UsageError("This cache was consumed by an earlier call; keep a cache by leaving consume_cache=False.")
    if cache.batch == 1 and count > 1:
        return take(cache, [0] * count)
    if cache.batch != count:
        raise UsageError(f"The cache has {cache.batch} rows and there are {count} prompts; give one prompt a row.")
    return cache


def _same_model(config: ModelConfig, cache: Cache) -> None:
    first = cache.layers[0]
    shape = (len(cache.layers), len(first.pages), first.k.shape[2])
    wanted = (config.num_layers, config.num_kv_heads, config.head_dim)
    if shape != wanted:
        raise UsageError(
            f"The cache is of another model: it has {shape[0]} layers of {shape[1]} heads of {shape[2]} channels, "
            f"and this model has {wanted[0]} of {wanted[1]} of {wanted[2]}."
        )


@jax.jit
def _keys(seed: jax.Array, row: jax.Array, sample: jax.Array) -> jax.Array:
    """One random key per (seed, row, sample)."""
    key = jax.random.key(seed)
    return jax.vmap(lambda i, j: jax.random.fold_in(jax.random.fold_in(key, i), j))(row, sample)


def _stop_table(lm: LanguageModel, strings: tuple[str, ...], ids: tuple[int, ...]) -> StopTable:
    if not strings:
        return _plain_table(ids, lm.config.vocab_size)
    return stop_table(strings, ids, lm.tokenizer.token_bytes(), lm.config.vocab_size)


@functools.lru_cache(maxsize=8)
def _plain_table(ids: tuple[int, ...], vocabulary: int) -> StopTable:
    return stop_table((), ids, (), vocabulary)

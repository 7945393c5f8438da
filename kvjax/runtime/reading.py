"""Prompts of different lengths, read as one batch: in buckets of lengths, onto what there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.buckets import NEW_TOKENS, prompt_bucket, request_bucket
from kvjax.cache.cache import Cache, take
from kvjax.cache.continuation import delete
from kvjax.cache.host_memory import as_numpy
from kvjax.cache.quantisation import MODEL, Storage
from kvjax.model.config import ModelConfig
from kvjax.model.decoder import Decoder
from kvjax.policies.base import Policy
from kvjax.runtime.programs import ONE_DEVICE, Programs


class Read(Protocol):
    """The prompts of a request, and what they are read onto; :class:`kvjax.request.Request` is one."""

    @property
    def prompts(self) -> Sequence[Sequence[int]]: ...
    @property
    def context(self) -> Sequence[int]: ...
    @property
    def cache(self) -> Any: ...
    @property
    def policy(self) -> Any: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def storage(self) -> Storage: ...
    @property
    def programs(self) -> Programs: ...
    @property
    def copies(self) -> Sequence[int]: ...
    @property
    def memory_limit(self) -> int | None: ...
    @property
    def size(self) -> Capacities: ...


class Capacities(Protocol):
    """How large a cache is made: tokens of prompt, and tokens decoded after them, of each row."""

    @property
    def prompt_capacity(self) -> int: ...
    @property
    def new_capacity(self) -> int: ...


#: The first token of a row of padding, of which a prefill computes nothing.
_NO_TOKEN = -1

#: Told of the newest cache after every program that makes one.
Note = Callable[[Cache], None]


def unheard(cache: Cache) -> None:
    """Nobody asks for the newest cache."""


def read_prompts(
    params: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    policy: Policy,
    cache: Cache | None,
    consume: bool,
    dtype: Any,
    storage: Storage = MODEL,
    programs: Programs = ONE_DEVICE,
    note: Note = unheard,
    size: Capacities | None = None,
) -> tuple[Cache, jax.Array]:
    """Prefill prompts of different lengths as one batch, onto ``cache`` when there is one.

    ``consume`` donates that one; ``note`` is told of every newer one; ``size`` is that of the cache afterwards, None
    for the smallest.

    Returns:
      The cache and the logits [B, V] after each row's last token; on a mesh B may be more than there are prompts.
    """
    config = params.config
    padding = programs.rows(len(prompts)) - len(prompts)
    # A row of padding is one token that is none, or nothing new of another row's cache.
    prompts = [*prompts, *([(_NO_TOKEN,)] if cache is None else [()]) * padding]
    if cache is not None and cache.batch < len(prompts):
        wide = take(cache, [*range(cache.batch), *[0] * padding])
        note(wide)
        if consume:
            delete(cache)
        cache, consume = wide, True
    lengths = np.array([len(ids) for ids in prompts], np.int32)
    seen = np.zeros_like(lengths) if cache is None else as_numpy(cache.seen)
    total = seen + lengths
    capacities = {"prompt_capacity": prompt_bucket(int(total.max())), "new_capacity": NEW_TOKENS}
    if size is not None:
        capacities = {"prompt_capacity": size.prompt_capacity, "new_capacity": size.new_capacity}
    elif cache is not None and not policy.replans:
        capacities["prompt_capacity"] = cache.prompt_capacity
    logits = None
    for start, most in _chunks(policy, config, int(lengths.max())):
        count = np.clip(lengths - start, 0, most)
        bucket = request_bucket(int(count.max())) if policy.chunks(config) is None else prompt_bucket(most)
        tokens = np.zeros((len(prompts), bucket), np.int32)
        for row, ids in enumerate(prompts):
            tokens[row, : count[row]] = ids[start : start + count[row]]
        read = tokens, count, total
        if cache is None:
            cache, new = programs.fresh(params, *read, policy=policy, dtype=dtype, storage=storage, **capacities)
        else:
            cache, new = programs.onto(params, cache, *read, consume=consume, **capacities)
        note(cache)
        consume = True  # from the second chunk on the cache is this function's own
        logits = new if logits is None else jnp.where(count[:, None] > 0, new, logits)
    assert cache is not None and logits is not None  # there is at least one chunk
    return cache, logits


def _chunks(policy: Policy, config: ModelConfig, longest: int) -> Iterator[tuple[int, int]]:
    """(start, size) of the chunks a policy reads prompts in."""
    sizes = policy.chunks(config)
    if sizes is None:
        yield 0, longest
        return
    start, size = 0, sizes[0]
    while start < longest:
        yield start, size
        start, size = start + size, sizes[1]


class TokenStrategy:
    """Prompts of a policy of tokens: read onto a cache, of which the rest of the call leaves a cache."""

    def programs(self, request: Read, config: ModelConfig) -> tuple[list[str], list[str]]:
        """Names of the programs that reading and finishing need."""
        longest = max(map(len, [request.context, *request.prompts]))
        several = len(list(_chunks(request.policy, config, longest))) > 1
        fresh, onto = request.cache is None, request.cache is not None or bool(request.context) or several
        return ["prefill_fresh"] * fresh + ["prefill_onto"] * onto, []

    def read(self, params: Decoder, request: Read, consume: bool, note: Note) -> tuple[Cache, jax.Array]:
        """Read the context once, then the prompts, then give every sample its row."""
        kinds: dict[str, Any] = {"policy": request.policy, "dtype": request.dtype, "storage": request.storage}
        kinds |= {"programs": request.programs, "note": note, "size": request.size}
        cache = request.cache
        if request.context:
            cache, logits = read_prompts(params, [request.context], cache=None, consume=False, **kinds)
            cache, _ = spread(cache, logits, [0] * request.programs.rows(len(request.prompts)))
            consume = True
        cache, logits = read_prompts(params, request.prompts, cache=cache, consume=consume, **kinds)
        return spread(cache, logits, request.copies)

    def finish(self, cache: Cache, fed: Sequence[Sequence[int]], note: Note) -> Cache:
        """The cache is what is left."""
        return cache

    def stats(self, row: int) -> None:
        """It has none of its own."""


def spread(cache: Cache, logits: jax.Array, copies: Sequence[int]) -> tuple[Cache, jax.Array]:
    """Rows of a cache, and of its logits, in the given order; for one context under many prompts and for n > 1."""
    if list(copies) == list(range(cache.batch)):
        return cache, logits
    return take(cache, copies), logits[jnp.asarray(copies, jnp.int32)]

"""Prompts of different lengths, read as one batch: in buckets of lengths, onto what there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

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
from kvjax.policies.composition import shares
from kvjax.runtime.alike_layers import compiles_faster_by_layers
from kvjax.runtime.prefill_by_layers import program_names, reading_by_layers
from kvjax.runtime.prefill_choosing_by_layers import choosing_by_layers
from kvjax.runtime.programs import ONE_DEVICE, Programs
from kvjax.runtime.single_layer_programs import LayerwisePrompt, Reading
from kvjax.runtime.token_logprobs import next_logprobs


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
    @property
    def prompt_logprobs(self) -> bool: ...
    @property
    def shares_prompt(self) -> bool: ...


@runtime_checkable
class Capacities(Protocol):
    """The sizes a cache is made with: tokens of prompt, and tokens decoded after them, of each row; see
    :class:`kvjax.allocation.Allocation`."""

    @property
    def prompt_capacity(self) -> int: ...
    @property
    def new_capacity(self) -> int: ...
    @property
    def own_capacity(self) -> int | None: ...


#: A prompt of a row of padding, of which a prefill computes nothing.
PADDING_PROMPT = (-1,)

#: Told of the newest cache after every program that makes one.
Note = Callable[[Cache], None]


def unheard(cache: Cache) -> None:
    """Nobody asks for the newest cache."""


def never(tokens: int) -> bool:
    """Whether to, of prompts of any length: no."""
    return False


def read_prompts(params: Decoder, prompts: Sequence[Sequence[int]], **how: Any) -> tuple[Cache, jax.Array]:
    """:func:`reading`, done at once."""
    return finished(reading(params, prompts, **how))


def finished(steps: Reading) -> tuple[Cache, jax.Array]:
    """The result of a prefill that nothing interrupts."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def reading(
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
    logprobs: Sequence[list[float]] | None = None,
    best: Sequence[list[int]] | None = None,
    bucket_of: Callable[[int], int] = request_bucket,
    by_layers: Callable[[int], bool] = never,
) -> Reading:
    """Prefill prompts of different lengths as one batch, onto ``cache`` when there is one.

    ``consume`` donates that one; ``note`` is told of every newer one; ``size`` is that of the cache afterwards, None
    for the smallest. ``bucket_of`` gives the tokens that prompts of a length are read as, and ``by_layers``
    whether so many are read layer by layer. ``logprobs``, a list a prompt, get the log-probability of
    every token after the prompt's first, and ``best``, beside them, the likeliest token in its place.

    Returns:
      The cache and the logits [B, V] after each row's last token; on a mesh B may be more than there are prompts.
    """
    config = params.config
    padding = programs.rows(len(prompts)) - len(prompts)
    # A row of padding is one token that is none, or nothing new of another row's cache.
    prompts = [*prompts, *([PADDING_PROMPT] if cache is None else [()]) * padding]
    if cache is not None and cache.batch < len(prompts):
        cache, consume = _padded(cache, padding, consume, note), True
    lengths = np.array([len(ids) for ids in prompts], np.int32)
    seen = np.zeros_like(lengths) if cache is None else as_numpy(cache.seen)
    total = seen + lengths
    capacities = {"prompt_capacity": prompt_bucket(int(total.max())), "new_capacity": NEW_TOKENS}
    if size is not None:
        capacities = {"prompt_capacity": size.prompt_capacity, "new_capacity": size.new_capacity}
    elif cache is not None and not policy.replans:
        capacities["prompt_capacity"] = cache.prompt_capacity
    onto: dict[str, Any] = {} if cache is None else {"own_capacity": None}
    if size is not None and cache is not None and cache.context is not None:
        onto["own_capacity"] = size.own_capacity
    logits = None
    for start, most in _chunks(policy, config, int(lengths.max())):
        count = np.clip(lengths - start, 0, most)
        bucket = bucket_of(int(count.max())) if policy.chunks(config) is None else prompt_bucket(most)
        tokens = _cut(prompts, start, start + count, bucket)
        read = [tokens, count, total]
        if logprobs is not None:
            read.append(_cut(prompts, start + 1, lengths, bucket))
        if logprobs is None and by_layers(bucket):
            device = programs.device(policy if cache is None else cache.policy, config)
            given = device, params, cache, tokens, count, total, consume, dtype, storage
            read_layers = choosing_by_layers if policy.shares_layers else reading_by_layers
            sizes = {"own_capacity": None, **capacities, **onto}
            found: Any = yield from read_layers(LayerwisePrompt(*given, sizes, note))
        elif cache is None:
            found = programs.fresh(params, *read, policy=policy, dtype=dtype, storage=storage, **capacities)
        else:
            found = programs.onto(params, cache, *read, consume=consume, **capacities, **onto)
        cache, new = found[0], found[1]
        note(found[0])
        if logprobs is not None:
            followed = np.clip(lengths - 1 - start, 0, count)
            _append(logprobs, found[2], followed)
            _append(best or (), found[3], followed)
        consume = True  # from the second chunk on the cache is this function's own
        logits = new if logits is None else jnp.where(count[:, None] > 0, new, logits)
        yield new
    assert cache is not None and logits is not None  # there is at least one chunk
    return cache, logits


def _padded(cache: Cache, padding: int, consume: bool, note: Note) -> Cache:
    """A copy of the cache with so many rows more; the one given is freed where it is to be consumed."""
    wide = take(cache, [*range(cache.batch), *[0] * padding])
    note(wide)
    if consume:
        delete(cache)
    return wide


def _cut(prompts: Sequence[Sequence[int]], start: int, ends: np.ndarray, bucket: int) -> np.ndarray:
    """[B, bucket] the tokens from ``start`` on, up to each prompt's end; 0 behind the last."""
    tokens = np.zeros((len(prompts), bucket), np.int32)
    for row, (ids, end) in enumerate(zip(prompts, ends, strict=True)):
        own = ids[start : min(end, start + bucket)]
        tokens[row, : len(own)] = own
    return tokens


def _append(lists: Sequence[list[Any]], values: jax.Array, counts: np.ndarray) -> None:
    """The first so many values of each row, at the end of its list; rows of padding have none."""
    for into, own, count in zip(lists, as_numpy(values), counts, strict=False):
        into += own[:count].tolist()


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
    """Prompts of a policy of tokens: read onto a cache, of which the rest of the call leaves a cache.

    Attributes:
      prompt_logprobs: of each prompt that was read, where they were asked for: of every token, None of the first.
    """

    prompt_logprobs: list[list[float | None]] | None = None

    def programs(self, request: Read, params: Decoder) -> tuple[list[str], list[str]]:
        """Names of the programs that reading and finishing need."""
        longest = max(map(len, [request.context, *request.prompts]))
        several = len(list(_chunks(request.policy, params.config, longest))) > 1
        fresh, onto = request.cache is None, request.cache is not None or bool(request.context) or several
        if _by_layers(params, request)(longest):
            return program_names(request.policy, params, fresh=fresh, onto=onto), []
        return ["prefill_fresh"] * fresh + ["prefill_onto"] * onto, []

    def read(self, params: Decoder, request: Read, consume: bool, note: Note) -> tuple[Cache, jax.Array]:
        """Read the context once, then the prompts, then give every sample its row."""
        kinds: dict[str, Any] = {"policy": request.policy, "dtype": request.dtype, "storage": request.storage}
        kinds |= {"programs": request.programs, "note": note, "size": request.size}
        kinds |= {"by_layers": _by_layers(params, request)}
        cache, count, scored = request.cache, len(request.prompts), request.prompt_logprobs
        before: list[list[float]] = [[] for _ in request.prompts]
        if request.context:
            own = [[]] if scored else None
            cache, logits = read_prompts(params, [request.context], cache=None, consume=False, logprobs=own, **kinds)
            if own is not None:
                firsts = next_logprobs(logits, [0] * count, [ids[0] for ids in request.prompts])
                before = [[*own[0], first] for first in firsts]
            consume = True
        if cache is not None and (request.context or cache.batch < count):
            one, samples = cache, len(request.copies)
            cache = _row_each(cache, count, samples, programs=request.programs, config=params.config)
            note(cache)
            if consume and cache is not one:
                delete(one)
            consume = True
        given = before if scored else None
        cache, logits = read_prompts(params, request.prompts, cache=cache, consume=consume, logprobs=given, **kinds)
        self.prompt_logprobs = [[None, *found] for found in given] if given is not None else None
        if request.shares_prompt:
            shared = _samples_of(cache, len(request.copies), request.size, request.programs, params.config, note)
            return shared, logits[jnp.asarray(request.copies, jnp.int32)]
        return spread(cache, logits, request.copies)

    def finish(self, cache: Cache, fed: Sequence[Sequence[int]], note: Note) -> Cache:
        """The cache is what is left."""
        return cache

    def stats(self, row: int) -> None:
        """It has none of its own."""


def _by_layers(params: Decoder, request: Read) -> Callable[[int], bool]:
    """Whether prompts are read layer by layer, whatever their length: where it is compiled faster."""
    faster = compiles_faster_by_layers(request.policy, params.config, request.programs.mesh)
    return lambda tokens: faster and not request.prompt_logprobs


def _row_each(cache: Cache, prompts: int, samples: int, *, programs: Programs, config: ModelConfig) -> Cache:
    """A row for each prompt, all like row 0 of a cache; they share of it what their policy allows.

    A single row that is sampled once has nobody to share with. A row that shares already goes on sharing the same.
    """
    rows = programs.rows(prompts)
    if max(prompts, samples) == 1 or cache.context is not None or not shares(cache.policy, cache.storage):
        return take(cache, [0] * rows)
    return programs.share(cache, rows, config=config, prompt_capacity=prompt_bucket(int(as_numpy(cache.seen)[0])))


def _samples_of(
    cache: Cache, samples: int, size: Capacities, programs: Programs, config: ModelConfig, note: Note
) -> Cache:
    """A row for each sample of the prompt that row 0 holds, with room for its new tokens; they share the prompt."""
    prompt_capacity = prompt_bucket(int(as_numpy(cache.seen)[0]))
    rows = programs.share(cache, samples, config=config, prompt_capacity=prompt_capacity)
    note(rows)
    delete(cache)
    return programs.grow(rows, config=config, new_capacity=size.new_capacity)


def spread(cache: Cache, logits: jax.Array, copies: Sequence[int]) -> tuple[Cache, jax.Array]:
    """Rows of a cache, and of its logits, in the given order; for one context under many prompts and for n > 1."""
    if list(copies) == list(range(cache.batch)):
        return cache, logits
    return take(cache, copies), logits[jnp.asarray(copies, jnp.int32)]

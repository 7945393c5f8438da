"""The parts that programs of single layers share: what they are told, the model's two ends, and the host's lead."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax import progress
from kvjax.cache.cache import NO_TOKEN, Cache
from kvjax.cache.continuation import delete
from kvjax.cache.groups import parts
from kvjax.cache.layer_view import layer_view
from kvjax.cache.quantisation import Storage
from kvjax.cache.shared_context import SharedLayer
from kvjax.committed import put_beside
from kvjax.model.decoder import Decoder, DecoderLayer, without_layers
from kvjax.runtime.alike_layers import numbers_of_kind
from kvjax.runtime.prefill import last_hidden, pages_onto
from kvjax.runtime.prefill_and_compress import Counts
from kvjax.sharding.compile import ROW, Device, Program, put
from kvjax.waiting import ready
from pallas_kernels import dispatch

#: Layers that are given to the device before the first of them is done: enough that it never waits, and few enough to
#: tell how far a prompt is read. (XLA's CPU client takes 32 programs, and then lets the caller wait where no Ctrl-C is
#: answered.)
AHEAD = 4
#: Static fields of a cache on which no program here depends, so that none is compiled again when they change.
_NO_CAPACITIES: dict[str, Any] = {"prompt_capacity": 0, "new_capacity": 0, "own_capacity": None, "joined_tokens": 0}


class LayerInput(NamedTuple):
    """The arrays that every layer of a prompt reads.

    Attributes:
      tokens: ids, [B, T], which the first layer embeds. counts: as :data:`kvjax.runtime.prefill_and_compress.Counts`.
      first, last: whether it is the model's first layer, and its last, which computes the logits. index: its number.
    """

    tokens: Int[Array, "B T"]
    counts: Counts
    first: Any = np.bool_(False)
    last: Any = np.bool_(False)
    index: Any = np.int32(0)

    def at(self, layer: int, last: int) -> LayerInput:
        """The same of this layer, ``last`` being the model's last."""
        return self._replace(first=np.bool_(layer == 0), last=np.bool_(layer == last), index=np.int32(layer))


class Begun:
    """The programs that the device was given, of which the host is never far ahead.

    Attributes:
      tokens_each: tokens of the prompts for a unit of all programs' work; what is done is told as so many tokens.
    """

    def __init__(self, tokens: Int[np.ndarray, "B T"], count: Int[np.ndarray, " B"], work: float) -> None:
        self.tokens_each = float(work_of(tokens, count).sum()) / work
        self._made: collections.deque[tuple[Any, float]] = collections.deque()

    def after(self, made: Any, work: float = 1.0) -> Any:
        """The results of the newest program, once what was begun long before is done."""
        self._made.append((made, work))
        if len(self._made) > AHEAD:
            done, its = self._made.popleft()
            ready(done)
            progress.advance("prefill", its * self.tokens_each)
        return made


# Both ends of the model are in the program of every layer, which takes one branch: two programs fewer are compiled for
# each shape of a request.


def embedded(ends: Decoder, read: LayerInput, x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
    """The input of a layer: of the first the embedding, of the others ``x``."""
    return jax.lax.cond(read.first, lambda: ends.embed(jnp.maximum(read.tokens, 0)), lambda: x)


def logits_of_last(ends: Decoder, read: LayerInput, x: Float[Array, "B T M"]) -> Float[Array, "B V"]:
    """The logits after each row's last token where ``x`` is the last layer's output, else zeros."""
    last = last_hidden(x, read.counts[1])
    found = jax.eval_shape(ends.logits, last)
    return jax.lax.cond(read.last, lambda: ends.logits(last), lambda: jnp.zeros(found.shape, found.dtype))


def own_layer(cache: Cache, index: Int[Array, ""]) -> Any:
    """The layer that :func:`layer_of` gave to a program: its only one, or that of this number of a shared pool."""
    return layer_view(cache.layers[0], cache.most_tokens, index) if cache.shares_layers else cache.layers[0]


def shared_layer(cache: Cache, index: Int[Array, ""]) -> SharedLayer:
    """The shared pools of the layer that :func:`layer_of` gave to a program."""
    return (None,) * len(parts(cache.layers[0])) if cache.context is None else cache.context.of_layer(index)


def cache_of(device: Device, layer: Any, seen: Any) -> Cache:
    """A cache of one layer, into which nothing is read yet."""
    return Cache((layer,), seen, seen, jnp.full_like(seen, NO_TOKEN), device.local_policy, 0, 0)


def hidden_states(
    device: Device, tokens: Int[Array, "*B T"], *, hidden_size: int, dtype: Any
) -> Float[Array, "*B T M"]:
    """Zeros where the first layer's input goes."""
    return jnp.zeros((*tokens.shape, hidden_size), dtype)


HIDDEN_STATES = Program(hidden_states, lambda device, arguments, static: ROW, ("hidden_size", "dtype"))


@dataclasses.dataclass(frozen=True)
class LayerwisePrompt:
    """A prompt that is read layer by layer, into a new cache or onto one.

    Attributes:
      params: the model. cache: onto which it is read; None for a new one.
      tokens, count, total: ids [B, T], how many of them are the prompt's, and tokens with those before, as in
        :meth:`kvjax.runtime.programs.Programs.fresh`.
      consume: whether the cache goes, layer by layer. dtype, storage: of a new cache.
      capacities: of the cache afterwards; ``own_capacity`` where rows share a context.
      note: told of what there is of a consumed cache after each layer, with the counters of before, so that whoever
        lent it can have it back when a later layer fails.
    """

    device: Device
    params: Decoder
    cache: Cache | None
    tokens: Int[np.ndarray, "B T"]
    count: Int[np.ndarray, " B"]
    total: Int[np.ndarray, " B"]
    consume: bool
    dtype: Any
    storage: Storage
    capacities: dict[str, int | None]
    note: Callable[[Cache], None]

    @functools.cached_property
    def ends(self) -> Decoder:
        """The model without its layers."""
        return without_layers(self.params)

    @functools.cached_property
    def read(self) -> LayerInput:
        """The arrays that the layers read."""
        seen = np.zeros((len(self.count),), np.int32) if self.cache is None else self.cache.seen
        work = work_of(self.tokens, self.count)
        given: Any = put_as_weights(self.device, self.params, (self.tokens, (seen, self.count, work, self.total)))
        return LayerInput(*given)

    @functools.cached_property
    def pages(self) -> tuple[tuple[int, ...], ...]:
        """Pages of each layer's heads once the prompt is in."""
        sizes: Any = self.capacities
        if self.cache is None:
            return self.device.pages(storage=self.storage, **sizes)
        return pages_onto(self.device.local_config, self.device.local(self.cache), **sizes)

    @functools.cached_property
    def fits(self) -> list[bool]:
        """Whether each layer's pages stay as many as they are, so that its cache may be written in place."""
        if self.cache is None:
            return [False] * len(self.pages)
        had = [layer.pages for layer in self.device.local(self.cache).layers]
        return [own == before for own, before in zip(self.pages, had, strict=True)]

    def layers(self, cache: Cache | None) -> Iterator[tuple[DecoderLayer, int, Cache | None, LayerInput]]:
        """Each layer, the number that its policy is told, its cache before the prompt, and the arrays that it reads."""
        last = len(self.params.layers) - 1
        numbers = numbers_of_kind(self.device.policy, self.params)
        for i, (layer, (number, _)) in enumerate(zip(self.params.layers, numbers, strict=True)):
            yield layer, number, None if cache is None else layer_of(cache, i), self.read.at(i, last)

    def done(self, one: Cache, layers: Sequence[Any]) -> Cache:
        """The cache of all layers, with the counters of ``one``; that onto which it was read goes if consumed."""
        if self.cache is None:
            return one.replace(layers=tuple(layers), **self.capacities)
        if self.consume:
            delete(self.cache)
        return one.replace(layers=tuple(layers), context=self.cache.context, joined_tokens=0, **self.capacities)


#: A prefill that gives what is there after each of its programs; in the end the cache, and the logits [B, V].
Reading = Generator[Array, None, tuple[Cache, Float[Array, "B V"]]]


def work_of(tokens: Int[np.ndarray, "B T"], count: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
    """Tokens of each row to compute: a row of padding has one that is none."""
    return np.where(tokens[:, 0] < 0, 0, count)


def before_the_first(
    device: Device, ids: Int[Array, "*B T"] | Int[np.ndarray, "*B T"], params: Decoder
) -> Float[Array, "*B T M"]:
    """The array that the first layer embeds into, whose numbers nobody reads; of ids the shape alone counts.

    A CPU is handed zeros, for which nothing is compiled; an accelerator, which they would have to be sent to, makes
    them.
    """
    channels, dtype = params.stream
    if not zeros_are_sent():
        return HIDDEN_STATES(device, put_as_weights(device, params, ids), hidden_size=channels, dtype=dtype)
    zeros: Any = np.zeros((*ids.shape, channels), dtype)
    return put_as_weights(device, params, zeros)


def put_as_weights(device: Device, params: Decoder, tree: Any) -> Any:
    """NumPy's arrays where programs take them, committed if the weights are.

    What a layer makes is committed as the weights are, so that a first layer that is given anything else would have a
    program of its own.
    """
    return put(device, tree) if device.mesh is not None else put_beside(jax.tree.leaves(params)[0], tree)


def zeros_are_sent() -> bool:
    """Whether nothing is compiled to make the zeros before the first layer."""
    return dispatch.platform() == "cpu"


def layer_of(cache: Cache, index: int) -> Cache:
    """A cache of one of its layers, which shares the others' counters; of all where they share their slots."""
    if cache.shares_layers:
        (pool,) = cache.layers
        return cache.replace(layers=(pool.replace(state=None if pool.state is None else pool.state[index]),))
    context = cache.context
    context = context and context.one_layer(index)
    return cache.replace(layers=cache.layers[index : index + 1], context=context, **_NO_CAPACITIES)

"""The cache of a whole model as a value, which one turn leaves and the next one starts from."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from kvjax.array_bytes import nbytes
from kvjax.cache.groups import Layer, pages_by_group, parts, slot_bytes, split_heads, with_parts
from kvjax.cache.host_memory import as_numpy, device_bytes, to_device, to_host
from kvjax.cache.layer_view import LayerView, joined_views, layer_views, with_pages_of
from kvjax.cache.layout import platform_layout
from kvjax.cache.packing import resize
from kvjax.cache.pool import LayerCache
from kvjax.cache.pool_sharding import shard, unshard
from kvjax.cache.quantisation import Storage
from kvjax.cache.shared_context import SharedContext, after_shared
from kvjax.checks import row_number
from kvjax.errors import UsageError
from pallas_kernels.pages import Pages

if TYPE_CHECKING:
    from kvjax.policies.base import Policy

#: What :attr:`Cache.next_token` says where there is no such token: nothing more; or that what was read ends within a
#: user's message, with which a question goes on.
NO_TOKEN, OPEN_MESSAGE = -1, -2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Cache:
    """Every layer's pool with the rows' counters.

    Attributes:
      layers: one :class:`LayerCache` or :class:`HeadGroups` a layer; capacities may differ among layers and heads.
        Where all layers share their slots one pool of all of them, see :meth:`by_layer`.
      seen: [B] int32, tokens each row has been through, kept or not: the position of the next token.
      prompt_end: [B] int32, ``seen`` when the last prompt was in; ``seen - prompt_end`` tokens were decoded since.
      next_token: [B] int32, a token that was generated but not yet read, with which the next turn begins; or NO_TOKEN,
        or OPEN_MESSAGE.
      policy: which tokens stay; static.
      prompt_capacity: tokens of prompt the allocation was made for; static.
      new_capacity: tokens that may be decoded after ``prompt_end`` before the pools must grow; static.
      context: slots that come before those of every row, or None where rows hold all of theirs.
      own_capacity: with a context, tokens of prompt beyond it that the allocation was made for; static.
      joined_tokens: the most tokens that rows may have seen which were joined, where their capacities differed; static.
    """

    layers: tuple[Any, ...]  # of the kind that the policy's init_layer makes
    seen: Int[Array, " B"]
    prompt_end: Int[Array, " B"]
    next_token: Int[Array, " B"]
    policy: Policy = dataclasses.field(metadata={"static": True})
    prompt_capacity: int = dataclasses.field(metadata={"static": True})
    new_capacity: int = dataclasses.field(metadata={"static": True})
    context: SharedContext | None = None
    own_capacity: int | None = dataclasses.field(default=None, metadata={"static": True})
    joined_tokens: int = dataclasses.field(default=0, metadata={"static": True})

    @property
    def batch(self) -> int:
        return self.seen.shape[0]

    def __repr__(self) -> str:
        """Rows, layers, policy and bytes, without the arrays."""
        there = [leaf for leaf in jax.tree.leaves(self) if hasattr(leaf, "nbytes")]  # a shape alone has none
        size = f"{nbytes(there):,}"
        return f"Cache(rows={self.batch}, layers={len(self.layers)}, policy={self.policy.named}, nbytes={size})"

    @property
    def nbytes(self) -> int:
        """Allocated bytes: the sum over the live buffers, on a mesh and of a shared context everything once."""
        return nbytes(self)

    @property
    def device_nbytes(self) -> int:
        """Allocated bytes on each device of the mesh; all devices hold equally many."""
        return device_bytes(jax.tree.leaves(self))

    @property
    def live_nbytes(self) -> int:
        """Bytes of the slots that hold a token still attended to, over rows, heads and layers; shared ones once."""
        held = [np.asarray(kept).sum(axis=0) for kept in self.policy.retained_by_layer(self.layers)]
        own = sum(int(np.dot(slots, sizes)) for slots, sizes in zip(held, self.slot_bytes, strict=True))
        return own if self.context is None else own + self.context.live_nbytes

    @property
    def storage(self) -> Storage:
        """How its keys and values are stored."""
        pool = parts(self.layers[0])[0]
        usual = platform_layout(pool.kv.shape[3])
        if pool.channels is not None:
            usual = usual.with_key_channels(pool.kv.key_dim, pool.kv.shape[3])
        layout = None if pool.layout == usual else pool.layout
        return Storage(layout=layout) if pool.scales is None else Storage("int8", pool.scales.headroom, layout)

    @property
    def page_size(self) -> int:
        """Slots of a page."""
        return parts(self.layers[0])[0].page_size

    @property
    def clipped(self) -> np.ndarray:
        """[B] int8 keys that were clipped to their scale, over heads and layers; 0 for other storage."""
        pools = [pool for layer in self.layers for pool in parts(layer)]
        counts = [as_numpy(pool.scales.clipped).sum(axis=1) for pool in pools if pool.scales is not None]
        return np.sum(counts, axis=0) if counts else np.zeros(self.batch, np.int64)

    @property
    def pools(self) -> tuple[LayerCache, ...]:
        """Every pool of every layer, those of a shared context apart."""
        return tuple(pool for layer in self.layers for pool in parts(layer))

    @property
    def shared_layers(self) -> list[tuple[Any, ...]]:
        """The shared pools of each layer, one for each of its own pools, or None."""
        if self.context is not None:
            return self.context.by_layer()
        return [(None,) * len(parts(layer)) for layer in self.layers for _ in range(layer.model_layers)]

    @property
    def shared_lengths(self) -> list[np.ndarray]:
        """[H] of each layer, slots that all rows share of a context; zeros without one."""
        if self.context is None:
            return [np.zeros(len(sizes), np.int32) for sizes in self.slot_bytes]
        return self.context.lengths(self.layers)

    @property
    def model_shape(self) -> tuple[int, int, int]:
        """Layers, KV heads and channels of the model it belongs to."""
        layers = self.slot_bytes
        return len(layers), len(layers[0]), parts(self.layers[0])[0].kv.shape[3]

    @property
    def slot_bytes(self) -> list[tuple[int, ...]]:
        """Bytes of one slot of each KV head, by layer of the model."""
        return [sizes for layer in self.layers for sizes in split_heads(slot_bytes(layer), layer.model_layers)]

    @property
    def lengths(self) -> list[Int[np.ndarray, "B H"]]:
        """Valid slots of each KV head, by layer of the model; read from the device."""
        each = (np.split(as_numpy(layer.length), layer.model_layers, axis=1) for layer in self.layers)
        return [length for lengths in each for length in lengths]

    @property
    def shares_layers(self) -> bool:
        """Whether one pool holds all layers."""
        return self.policy.shares_layers

    def by_layer(self) -> list[Any]:
        """The cache of each layer of the model, to be read and changed one after the other: see :meth:`next_layer`."""
        if not self.shares_layers:
            return list(self.layers)
        return list(layer_views(self.layers[0], self.most_tokens))

    @property
    def most_tokens(self) -> int:
        """The most tokens that any row may have seen: what one head may hold where all share their slots."""
        return max(self.prompt_capacity + self.new_capacity, self.joined_tokens)

    def with_layers(self, layers: Sequence[Layer]) -> Cache:
        """Undo :meth:`by_layer`, once each layer has been changed."""
        if not self.shares_layers:
            return self.replace(layers=tuple(layers))
        views = [layer for layer in layers if isinstance(layer, LayerView)]
        return self.replace(layers=(joined_views(self.layers[0], views),))

    def replace(self, **changes: object) -> Cache:
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    # --- what can be continued: see kvjax.cache.continuation ---------------------------------------------------

    @property
    def device_layers(self) -> Cache:
        """All of it."""
        return self

    def with_device_layers(self, cache: Cache) -> Cache:
        return cache

    def take(self, indices: Sequence[int]) -> Cache:
        """Rows in the given order; a row may be taken several times. A copy, unless all rows stay.

        A context that the rows share is not copied: these share it too.
        """
        return take(self, indices)

    def join(self, others: Sequence[Cache]) -> Cache:
        """One batch with others that share its policy; each head gets the largest of its allocations.

        Raises:
          UsageError: when policies, models or storages differ, or when a policy's own state depends on the allocation
            and the allocations differ.
        """
        return _concatenate([self, *others])

    def to_host(self) -> Cache:
        """All of it in pinned host memory."""
        return to_host(self)

    def to_device(self) -> Cache:
        """All of it in device memory."""
        return to_device(self)

    def row(self, index: int) -> Cache:
        """One row as a cache of batch 1."""
        return take(self, [row_number("cache", index, self.batch)])


def next_layer(layer: Layer, before: Sequence[Layer]) -> Layer:
    """The next of :meth:`Cache.by_layer`, when those ``before`` have been changed: the pages may be the same."""
    last = before[-1] if before else None
    return with_pages_of(layer, last) if isinstance(layer, LayerView) and isinstance(last, LayerView) else layer


#: Keys and values of every pool of every layer: all the bytes worth donating.
Pools = tuple[Pages, ...]


def detach(cache: Cache) -> tuple[Pools, Cache]:
    """Split a cache into its pools and the rest, so that a program donates the pools alone.

    Counters may share a buffer (two outputs of one program that are equal do), and a buffer is donated only once.
    """
    pools = tuple(pool.kv for layer in cache.layers for pool in parts(layer))
    layers = (with_parts(layer, [pool.replace(kv=None) for pool in parts(layer)]) for layer in cache.layers)
    return pools, cache.replace(layers=tuple(layers))


def attach(pools: Pools, rest: Cache) -> Cache:
    """Undo :func:`detach`."""
    remaining = iter(pools)
    layers = []
    for layer in rest.layers:
        filled = []
        for pool in parts(layer):
            filled.append(pool.replace(kv=next(remaining)))
        layers.append(with_parts(layer, filled))
    return rest.replace(layers=tuple(layers))


def take(cache: Cache, indices: Sequence[int]) -> Cache:
    """Rows of a cache in the given order; a row may be taken several times. Always a copy, unless all rows stay."""
    if list(indices) == list(range(cache.batch)):
        return cache
    return copied(cache, indices)


def copied(cache: Cache, indices: Sequence[int]) -> Cache:
    """Rows of a cache in the given order, as copies; a context that they share is the same."""
    return take_rows(cache.replace(context=None), indices).replace(context=cache.context)


Tree = TypeVar("Tree")


def take_rows(tree: Tree, indices: Sequence[int]) -> Tree:
    """Rows of all arrays of a tree in the given order, as copies; on a mesh over the data axis if it divides them."""
    leaves, structure = jax.tree.flatten(tree)
    where = tuple(_sharding_of_rows(leaf, len(indices)) for leaf in leaves)
    return jax.tree.unflatten(structure, _taking(where)(leaves, np.asarray(indices, np.int32)))


@functools.lru_cache(maxsize=32)
def _taking(where: tuple[Any, ...]) -> Any:
    def rows(leaves: list[Array], indices: Int[Array, " N"]) -> list[Array]:
        return [leaf[indices] for leaf in leaves]

    return jax.jit(rows, out_shardings=list(where))


def _sharding_of_rows(leaf: Array, rows: int) -> Any:
    """Where ``rows`` rows of a leaf go: on a mesh as they are, over the data axis if it divides them."""
    where = getattr(leaf, "sharding", None)
    if not isinstance(where, NamedSharding) or where.mesh.size == 1:
        return None
    first = "data" if rows % where.mesh.shape.get("data", 1) == 0 else None
    return NamedSharding(where.mesh, PartitionSpec(first, *where.spec[1:]))


def _concatenate(caches: Sequence[Cache]) -> Cache:
    shapes = {tuple(len(layer.pages) for layer in cache.layers) for cache in caches}
    if any(cache.policy != caches[0].policy for cache in caches) or len(shapes) > 1:
        raise UsageError("Caches of one batch must share model and policy; continue these one by one instead.")
    if any(cache.storage != caches[0].storage for cache in caches):
        raise UsageError("Caches of one batch must share their storage; continue these one by one instead.")
    context = caches[0].context
    share = all(same_context(cache.context, context) for cache in caches)
    # What was saved has its choice in its own rows, until a request shares it.
    if caches[0].policy.chosen_once and (context is None or not share) and len(caches) > 1:
        raise UsageError("These caches keep what was chosen of contexts of their own; continue them one by one.")
    if not share:
        caches, context = [materialised(cache) for cache in caches], None
    caches = [cache.replace(context=None) for cache in caches]
    # On a mesh as one program: many, all in flight, wait for each other for ever on virtual CPU devices.
    many = any(len(cache.seen.sharding.device_set) > 1 for cache in caches)
    return (_joining(tuple(caches)) if many else _joined(caches)).replace(context=context)


def same_context(context: SharedContext | None, other: SharedContext | None) -> bool:
    """Whether two contexts are the same arrays."""
    ours, theirs = jax.tree.flatten(context), jax.tree.flatten(other)
    return ours[1] == theirs[1] and all(x is y for x, y in zip(ours[0], theirs[0], strict=True))


def _joined(caches: Sequence[Cache]) -> Cache:
    caches = _aligned(caches)
    forms = {(jax.tree.structure(cache), tuple(x.shape[1:] for x in jax.tree.leaves(cache))) for cache in caches}
    if len(forms) > 1:
        raise UsageError("Caches of one batch must share their capacities; continue these one by one instead.")
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=0), *caches)


_joining = jax.jit(_joined)


def resize_layer(layer: Layer, pages: tuple[int, ...]) -> Layer:
    """The same contents in runs of other sizes, ``pages`` of each head of the layer."""
    wanted = zip(parts(layer), pages_by_group(layer, pages), strict=True)
    return with_parts(layer, [resize(pool, counts) for pool, counts in wanted])


def _aligned(caches: Sequence[Cache]) -> list[Cache]:
    """The caches with equal allocations, and the capacities that every row surely has in them."""
    prompt_capacity, new_capacity = max(c.prompt_capacity for c in caches), min(c.new_capacity for c in caches)
    own_capacity = max((c.own_capacity for c in caches if c.own_capacity is not None), default=None)
    result = []
    for cache in caches:
        layers = []
        for i, layer in enumerate(cache.layers):
            pages = tuple(max(counts) for counts in zip(*(c.layers[i].pages for c in caches), strict=True))
            # Arrays of all devices of a mesh are resized in the order of the pages.
            wanted = zip(parts(layer), pages_by_group(layer, pages), strict=True)
            pools = [pool if pool.pages == n else shard(resize(unshard(pool), n), pool.sharding) for pool, n in wanted]
            layers.append(with_parts(layer, pools))
        capacities = {"prompt_capacity": prompt_capacity, "new_capacity": new_capacity, "own_capacity": own_capacity}
        if cache.shares_layers:
            capacities["joined_tokens"] = max(c.most_tokens for c in caches)
        result.append(cache.replace(layers=tuple(layers), **capacities))
    return result


def materialised(cache: Cache) -> Cache:
    """The same rows with all of their slots in their own pools: a cache that shares no context."""
    return cache if cache.context is None else _materialised(cache)


@jax.jit
def _materialised(cache: Cache) -> Cache:
    layers = []
    for layer, shared in zip(cache.layers, cache.shared_layers, strict=True):
        both = zip(parts(layer), shared, strict=True)
        layers.append(with_parts(layer, [own if one is None else _whole(cache.policy, one, own) for own, one in both]))
    return cache.replace(layers=tuple(layers), context=None, own_capacity=None)


def _whole(policy: Policy, shared: LayerCache, own: LayerCache) -> LayerCache:
    # Both have whole rounds of pages on the devices that shard them, and so has the sum.
    pages, sharding = tuple(sum(both) for both in zip(shared.pages, own.pages, strict=True)), own.sharding
    whole = shard(after_shared(unshard(shared), unshard(own), pages), sharding)
    return whole.replace(state=policy.beyond_shared(own.state, None))

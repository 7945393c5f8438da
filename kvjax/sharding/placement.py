"""Specs of arrays on a mesh: of weights from their logical axes, and of caches from the sharding of their pages."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from kvjax.cache.cache import Cache
from kvjax.cache.groups import parts, with_parts
from kvjax.cache.page_sharding import PageSharding
from kvjax.cache.pool import LayerCache
from kvjax.cache.shared_context import SharedContext
from kvjax.errors import UsageError
from kvjax.model.config import ModelConfig
from kvjax.model.decoder import Decoder, DecoderLayer
from kvjax.model.group_quantised import GroupFormat, GroupQuantised, format_of
from kvjax.model.params import gate_columns
from kvjax.model.quantised import Quantised
from kvjax.model.tiling import tiled
from kvjax.sharding.mesh import RULES, Mesh
from kvjax.sharding.partition import head_sharding
from pallas_kernels.quantised_matmul.weight_tiles import tile_of

#: Kinds of weights some of whose matrices may be quantised in groups.
GROUPED = ("int4", "file")
ROWS = PartitionSpec("data")


@dataclasses.dataclass(frozen=True)
class Splits:
    """The weights that the model axis divides.

    Attributes:
      heads: how heads are sharded. order: axes in the order of the columns of weights: of heads, then of the rest.
      parts: devices along them.
      qkv, mlp, vocab: whether it divides the projections of attention, of the MLP, and the vocabulary.
    """

    heads: PageSharding
    order: tuple[str, ...]
    parts: int
    qkv: bool
    mlp: bool
    vocab: bool

    def axes(self, logical: str | None) -> tuple[str, ...] | None:
        """Axes of the mesh that a weight's logical axis goes over."""
        if logical is None or RULES[logical] != "model":
            return None
        divided = {"kv_heads": self.qkv, "mlp": self.mlp, "vocab": self.vocab}[logical]
        return self.order if divided and self.order else None


@functools.lru_cache(maxsize=64)
def splits(mesh: Mesh, config: ModelConfig) -> Splits:
    """The division of a model's weights on a mesh.

    Projections of attention divide by channels, not by heads, so that they do for nearly every model; a shard of the
    MLP must hold as many gates as what they gate. Matrices that are quantised in groups divide by tiles of inputs, and
    those whose outputs share bytes by two outputs.
    """
    heads, parts = head_sharding(mesh, config), mesh.model
    group = config.group_size
    channels = config.num_kv_heads * config.head_dim
    inners = _mlp_channels(config)
    shards = [(inner, gate_columns(inner) if config.gated else 1) for inner in inners]
    return Splits(
        heads,
        heads.head_axes + heads.page_axes,
        parts,
        qkv=channels * (group + 2) % parts == 0
        and channels * group % parts == 0
        and _whole_groups(config, parts, {"qkv": channels * (group + 2)}, {"out": channels * group}),
        mlp=all(channels // unit % parts == 0 for channels, unit in shards)
        and _whole_groups(config, parts, *_mlp_sizes(config)),
        vocab=config.vocab_size % parts == 0
        and _whole_groups(config, parts, {"embedding": config.vocab_size, "head": config.vocab_size}, {}),
    )


def _whole_groups(config: ModelConfig, parts: int, outputs: Mapping[str, int], inputs: Mapping[str, int]) -> bool:
    """Whether parts of these matrices, by their outputs or by their inputs, can be stored as the whole ones are."""
    if config.weights not in GROUPED:
        return True

    def formats(name: str, outputs: int, inputs: int) -> list[GroupFormat]:
        kinds = {config.layer(index).weights_of(name) for index in range(config.num_layers)}
        found = (format_of(kind, outputs, inputs) for kind in kinds)
        return [form for form in found if form is not None]

    hidden = config.hidden_size
    pairs = [count for name, count in outputs.items() for form in formats(name, count, hidden) if form.bits == 4]
    tiles = [
        count // tile_of(count, form.group) for name, count in inputs.items() for form in formats(name, hidden, count)
    ]
    return all(count // parts % 2 == 0 for count in pairs) and all(count % parts == 0 for count in tiles)


def _mlp_sizes(config: ModelConfig) -> tuple[dict[str, int], dict[str, int]]:
    """Outputs and inputs of the MLPs' matrices, by name."""
    experts, halves = config.experts, 2 if config.gated else 1
    inners = {"": config.intermediate_size}
    if experts is not None:
        inners = {"experts.": experts.inner}
        if experts.shared_inner or experts.dense_layers:
            inners[""] = experts.shared_inner or config.intermediate_size
    up = "gate_up" if config.gated else "up"
    return (
        {prefix + up: halves * inner for prefix, inner in inners.items()},
        {prefix + "down": inner for prefix, inner in inners.items()},
    )


def _mlp_channels(config: ModelConfig) -> list[int]:
    """Channels of every kind of MLP that a layer of the model has."""
    experts = config.experts
    if experts is None:
        return [config.intermediate_size]
    dense = [config.intermediate_size] if experts.dense_layers else []
    return [*dense, experts.inner, *([experts.shared_inner] if experts.shared_inner else [])]


def weight_spec(param: nnx.Variable, split: Splits) -> PartitionSpec:
    """The spec of a weight, from the logical axes that lead the axes of the matrix it is stored as."""
    names = param.get_metadata("axes")
    stacked, inputs = param.get_metadata("stacked", 0), param.get_metadata("inputs", 1)
    leading = [stacked, stacked + inputs][: len(param.get_value().shape) - stacked]
    if param.get_metadata("transposed", False):
        leading.reverse()
    return PartitionSpec(*(split.axes(names[i]) for i in (*range(stacked), *leading)))


def quantised_specs(spec: PartitionSpec, weight: Quantised) -> list[PartitionSpec]:
    """The specs of the leaves of a quantised matrix, in their order, from its own, [..., outputs, inputs]."""
    *stack, outputs, inputs = spec
    if isinstance(weight, GroupQuantised):
        beside = PartitionSpec(*stack, inputs, outputs)
        minimum = [] if weight.minimum is None else [beside]
        return [PartitionSpec(*stack, inputs, outputs, None), beside, *minimum]
    return [spec, PartitionSpec(*stack, outputs)]


def weight_specs(params: Decoder | DecoderLayer, mesh: Mesh, config: ModelConfig | None = None) -> list[PartitionSpec]:
    """The spec of every leaf of a model or a layer, in its order: of a quantised weight those of its arrays.

    ``config`` is the model's, which a layer does not know.
    """
    split, specs = splits(mesh, config or params.config), []
    for param in _variables(params):
        spec, weight = weight_spec(param, split), param.get_value()
        specs += quantised_specs(spec, weight) if isinstance(weight, Quantised) else [spec]
    return specs


def device_weights_bytes(params: Decoder, mesh: Mesh) -> int:
    """Bytes of the weights on each device; the mesh's devices need not be there."""
    sizes = dict(mesh.factors)

    def sharding(leaf: Any, spec: PartitionSpec) -> int:
        axes = [name for part in spec for name in _axes(part)]
        return leaf.size * leaf.dtype.itemsize // math.prod(sizes[name] for name in axes)

    return sum(map(sharding, jax.tree.leaves(params), weight_specs(params, mesh)))


def _axes(part: Any) -> tuple[str, ...]:
    """Axes of the mesh that one axis of an array goes over, as a spec has them."""
    return part if isinstance(part, tuple) else (part,) if part else ()


def _variables(params: Decoder | DecoderLayer) -> list[Any]:
    return jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, nnx.Variable))


def place_weights(params: Decoder, mesh: Mesh) -> Decoder:
    """A model that is on one device, on the devices of a mesh."""
    leaves, tree = jax.tree.flatten(params)
    specs = weight_specs(params, mesh)
    placed = [tiled(jax.device_put(x, NamedSharding(mesh.jax, spec))) for x, spec in zip(leaves, specs, strict=True)]
    return jax.tree.unflatten(tree, placed)


def cache_specs(cache: Cache) -> Any:
    """The specs of a cache's leaves, as a cache of specs; the pools may be detached."""
    layers = [with_parts(layer, [_pool_specs(pool) for pool in parts(layer)]) for layer in cache.layers]
    context = None if cache.context is None else context_specs(cache.context)
    return cache.replace(layers=tuple(layers), seen=ROWS, prompt_end=ROWS, next_token=ROWS, context=context)


def context_specs(context: SharedContext) -> Any:
    """The specs of what rows share: on every device of the data axis, as soon as it is of a batch of one."""
    rows = None if context.seen.shape[0] == 1 else "data"
    layers = (tuple(pool if pool is None else _pool_specs(pool, rows) for pool in layer) for layer in context.layers)
    return dataclasses.replace(context, layers=tuple(layers), seen=PartitionSpec(rows))


def _pool_specs(pool: LayerCache, rows: str | None = "data") -> LayerCache:
    sharding = pool.sharding
    heads = PartitionSpec(rows, sharding.head_axes or None)
    pages = PartitionSpec(rows, sharding.head_axes + sharding.page_axes or None)

    def state(x: Any) -> PartitionSpec:
        if x.ndim > 1 and sharding.head_axes and x.shape[1] % len(pool.pages):
            raise UsageError(
                "This policy's state has a second axis that is not the KV heads; run it without a model axis."
            )
        return heads if x.ndim > 1 else PartitionSpec(rows)

    scales = pool.scales and dataclasses.replace(pool.scales, k=heads, v=pages, clipped=heads)
    return pool.replace(
        kv=jax.tree.map(lambda _: pages, pool.kv),
        length=heads,
        next=heads,
        log_mass=None if pool.log_mass is None else heads,
        state=jax.tree.map(state, pool.state),
        marks=dict.fromkeys(pool.marks, heads),
        scales=scales,
        row_starts=None if pool.row_starts is None else heads,
        channels=None if pool.channels is None else heads,
    )


def leaves_of(specs: Any) -> list[PartitionSpec]:
    """Specs of a tree, in the order of its leaves."""
    return jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


def of_all(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """Shapes of the arrays of all devices, with their shardings, from the shapes that one device has."""
    leaves, structure = jax.tree.flatten(tree)
    sizes = dict(mesh.jax.shape)

    def unsharded(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        parts = [_axes(part) for part in spec]
        parts += [()] * (len(leaf.shape) - len(parts))
        shape = (n * math.prod(sizes[name] for name in names) for n, names in zip(leaf.shape, parts, strict=True))
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype, sharding=NamedSharding(mesh.jax, spec))

    return jax.tree.unflatten(structure, list(map(unsharded, leaves, leaves_of(specs))))

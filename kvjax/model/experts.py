"""A layer's experts: MLPs of which a router chooses a few for each token (Shazeer et al., arXiv 1701.06538).

Tokens are sorted by expert and every expert multiplies its own run of them: on a TPU by ``jax.lax.ragged_dot``,
elsewhere in blocks of a few tokens, as XLA makes of it a product with every expert there; so too, on any device, with
weights that are quantised in groups. Where there are fewer choices than experts, as in a decode step, the chosen ones
are gone through one by one, so that a step reads no other's weights. On a mesh each device has a part of every expert's
channels, as of a dense MLP's.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kvjax.checks import number, whole_number
from kvjax.errors import UsageError
from kvjax.model.matmul import matmul, ragged_matmul
from kvjax.model.params import gate_columns, new_param
from kvjax.model.quantised import Quantised
from kvjax.model.quantised_matmul import multiplies_runs

if TYPE_CHECKING:
    from kvjax.model.config import ModelConfig

#: More experts than a layer of any model has; every one has weights of its own, which are listed before they are read.
MOST_EXPERTS = 2**12


#: Weights [T, K], float32, and numbers [T, K] of each token's experts.
Routed = tuple[Array, Array]


@dataclasses.dataclass(frozen=True)
class Experts:
    """The experts of a model's layers.

    Attributes:
      count: experts of a layer. active: how many of them a token goes through.
      inner: channels of each; they are gated by SiLU, unless there is a ``limit``.
      normalised: whether the weights of the chosen ones sum to 1, or are their shares among all.
      shared_inner: channels of an MLP that every token goes through beside them, times a gate of its own; 0 for none.
      dense_layers: layers that have a plain MLP instead.
      biased: whether the router and the experts' projections add biases.
      limit: where it is given, of a gate g and what it gates u an expert makes ``(u + 1) g sigmoid(alpha g)``, with g
        at most ``limit`` and u within ``limit`` of 0.
    """

    count: int
    active: int
    inner: int
    normalised: bool = True
    shared_inner: int = 0
    dense_layers: tuple[int, ...] = ()
    biased: bool = dataclasses.field(default=False, metadata={"added": True})
    limit: float | None = dataclasses.field(default=None, metadata={"added": True})
    alpha: float = dataclasses.field(default=1.702, metadata={"added": True})

    def __post_init__(self) -> None:
        whole_number("experts.count", self.count, 1, MOST_EXPERTS)
        for name, least in (("active", 1), ("inner", 1), ("shared_inner", 0)):
            whole_number(f"experts.{name}", getattr(self, name), least)
        if self.limit is not None:
            number("experts.limit", self.limit, 0, open_below=True)
            number("experts.alpha", self.alpha, 0, open_below=True)
        if self.active > self.count:
            raise UsageError(f"A token goes through {self.active} of {self.count} experts; there are not so many.")


class ExpertMLP(nnx.Module):
    """The router and the experts of one layer.

    Parameters, with logical axes (E experts, M hidden, F channels of an expert):
      router [M | E]; gate_up [E; M | F / C, 2, C] as a dense MLP's; down [E; F | M].
      shared_gate [M | 1] where there is an MLP for every token.
      Where there are biases, router_bias [E], gate_up_bias [E; F / C, 2, C] and down_bias [E; M].
    """

    def __init__(self, config: ModelConfig, experts: Experts, *, rngs: nnx.Rngs | None, dtype: DTypeLike):
        half, hidden = gate_columns(experts.inner), config.hidden_size
        self.router = new_param(rngs, (hidden, experts.count), (None, None), dtype, transposed=True)
        shape, axes = (experts.count, hidden, experts.inner // half, 2, half), (None, None, "mlp", None, None)
        self.gate_up = new_param(rngs, shape, axes, dtype, stacked=1, weights=config.weights_of("experts.gate_up"))
        shape = (experts.count, experts.inner, hidden)
        weights = config.weights_of("experts.down")
        self.down = new_param(rngs, shape, (None, "mlp", None), dtype, stacked=1, weights=weights)
        if experts.shared_inner:
            self.shared_gate = new_param(rngs, (hidden, 1), (None, None), dtype, transposed=True)
        if experts.biased:
            self.router_bias = new_param(rngs, (experts.count,), (None,), dtype, 0)
            shape, axes = (experts.count, experts.inner // half, 2, half), (None, "mlp", None, None)
            self.gate_up_bias = new_param(rngs, shape, axes, dtype, 0, stacked=1)
            self.down_bias = new_param(rngs, (experts.count, hidden), (None, None), dtype, 0, stacked=1)
        self.experts, self.half = experts, half

    def __call__(self, x: Float[Array, "*S M"], routed: Routed) -> Float[Array, "*S M"]:
        """The experts' output for each token, from the channels that this device holds, before the output bias."""
        tokens = x.reshape(-1, x.shape[-1])
        weight, chosen = routed
        choices = chosen.size
        if choices < self.experts.count:
            found = self._one_by_one(tokens, chosen)
        else:
            both = all(multiplies_runs(weight[...]) for weight in (self.gate_up, self.down))
            runs = self._by_runs if both else self._by_blocks
            found = jax.lax.platform_dependent(tokens, chosen, tpu=runs, default=self._by_blocks)
        found = found.reshape(*chosen.shape, -1)
        return (found * weight[..., None].astype(x.dtype)).sum(axis=1).reshape(x.shape)

    def routed(self, x: Float[Array, "*S M"]) -> Routed:
        """The experts of each token, one after the other, and their weights, float32.

        Weights of the chosen ones that sum to 1 are the softmax over their logits alone.
        """
        logits = (x.reshape(-1, x.shape[-1]) @ self.router[...].T).astype(jnp.float32)
        if self.experts.biased:
            logits = logits + self.router_bias[...]
        weight, chosen = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), self.experts.active)
        return weight / weight.sum(axis=-1, keepdims=True) if self.experts.normalised else weight, chosen

    def bias(self, routed: Routed) -> Float[Array, "T M"]:
        """The bias of each token's experts' results, float32; the whole of it, on a mesh too."""
        weight, chosen = routed
        every = (weight[..., None] * jax.nn.one_hot(chosen, self.experts.count)).sum(axis=1)
        return jnp.matmul(every, self.down_bias[...].astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)

    def shared(self, x: Float[Array, "*S M"], y: Float[Array, "*S M"]) -> Float[Array, "*S M"]:
        """The result of the MLP for every token, times its gate."""
        return jax.nn.sigmoid(x @ self.shared_gate[...].T) * y

    def _activated(self, inner: Float[Array, "N F2"], expert: Int[Array, "*#N"]) -> Float[Array, "N F"]:
        if self.experts.biased:
            inner = inner + self.gate_up_bias[...][expert]
        halves = inner.reshape(inner.shape[0], -1, 2, self.half)
        gate, up = halves[:, :, 0], halves[:, :, 1]
        limit = self.experts.limit
        if limit is None:
            return (jax.nn.silu(gate) * up).reshape(inner.shape[0], -1)
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return ((up + 1) * gate * jax.nn.sigmoid(self.experts.alpha * gate)).reshape(inner.shape[0], -1)

    def _by_runs(self, tokens: Float[Array, "T M"], chosen: Int[Array, "T K"]) -> Float[Array, "N M"]:
        """The choices' results, in their order, from products with every expert's run of tokens."""
        flat = chosen.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        runs = (flat[:, None] == jnp.arange(self.experts.count)).sum(axis=0, dtype=jnp.int32)
        inner = ragged_matmul(tokens[order // chosen.shape[1]], self.gate_up[...], runs)
        found = ragged_matmul(self._activated(inner, flat[order]), self.down[...], runs)
        return found[jnp.argsort(order, stable=True)]

    def _by_blocks(self, tokens: Float[Array, "T M"], chosen: Int[Array, "T K"]) -> Float[Array, "N M"]:
        """The same in a loop over blocks of a run's tokens, each with its expert's weights."""
        flat, active, count = chosen.reshape(-1), chosen.shape[1], self.experts.count
        rows = min(128, 1 << (flat.size // count).bit_length())
        order = jnp.argsort(flat, stable=True)
        ends = (flat[:, None] <= jnp.arange(count)).sum(axis=0, dtype=jnp.int32)
        begins = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
        last_block = jnp.cumsum((ends - begins + rows - 1) // rows)

        def body(block: Int[Array, ""], found: Float[Array, "N M"]) -> Float[Array, "N M"]:
            expert = jnp.searchsorted(last_block, block, side="right")
            earlier = jnp.where(expert > 0, last_block[expert - 1], 0)
            place = begins[expert] + (block - earlier) * rows + jnp.arange(rows)
            which = jnp.where(place < ends[expert], order[jnp.minimum(place, flat.size - 1)], flat.size)
            token = tokens[jnp.minimum(which, flat.size - 1) // active]
            return found.at[which].set(self._expert(expert, token), mode="drop")

        return jax.lax.fori_loop(0, last_block[-1], body, jnp.zeros((flat.size, tokens.shape[1]), tokens.dtype))

    def _expert(self, index: Int[Array, ""], x: Float[Array, "N M"]) -> Float[Array, "N M"]:
        """One expert of all of these tokens."""
        gate_up, down = (
            jax.tree.map(lambda each: jax.lax.dynamic_index_in_dim(each, index, keepdims=False), weight[...])
            for weight in (self.gate_up, self.down)
        )
        return _product(self._activated(_product(x, gate_up), index), down)

    def _one_by_one(self, tokens: Float[Array, "T M"], chosen: Int[Array, "T K"]) -> Float[Array, "N M"]:
        """The same of few choices, each from its expert's weights alone."""
        flat, active = chosen.reshape(-1), chosen.shape[1]

        def body(i: Int[Array, ""], found: Float[Array, "N M"]) -> Float[Array, "N M"]:
            one = self._expert(flat[i], jax.lax.dynamic_index_in_dim(tokens, i // active))
            return jax.lax.dynamic_update_slice_in_dim(found, one, i, axis=0)

        return jax.lax.fori_loop(0, flat.size, body, jnp.zeros((flat.size, tokens.shape[1]), tokens.dtype))


def _product(x: Float[Array, "S K"], weight: Float[Array, "K N"] | Quantised) -> Float[Array, "S N"]:
    return matmul(x, weight) if isinstance(weight, Quantised) else x @ weight

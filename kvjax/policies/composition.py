"""How policies are composed: what the runtime asks of one that holds others, or stands beside others.

An author of a policy needs none of it. A policy by itself answers for every layer and head of the model, and that is
what the methods here say. Those override them that give layers or heads to other policies: ``composed.py`` by heads,
``window_layers.py`` by layers, ``round_attention.py`` by the turn of a conversation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvjax.cache.groups import counted_on_host
from kvjax.cache.host_memory import as_numpy
from kvjax.cache.quantisation import Storage
from kvjax.errors import UsageError, quoted
from kvjax.model.config import ModelConfig
from kvjax.policies.token_counts import HostOrTraced

if TYPE_CHECKING:
    from kvjax.policies.base import Policy


class Composable:
    """The methods of a policy by which it is composed with others."""

    @property
    def itself(self) -> Policy:
        """The policy that this is: nothing else is composed."""
        return cast("Policy", self)

    @property
    def chosen(self) -> Policy:
        """The policy as the user gave it: itself, unless a model's window layers have rings beside it."""
        return self.itself

    @property
    def named(self) -> Policy:
        """The policy that the text form is of: the :attr:`chosen` one, or the one whose choice that keeps."""
        return self.itself

    @property
    def chosen_once(self) -> bool:
        """Whether a context's slots stay as they were chosen once, in a pool that all of its rows share."""
        return False

    def with_chosen(self, policy: Policy) -> Policy:
        """The same with another policy in the place of the :attr:`chosen` one."""
        return policy

    def chosen_layers(self, config: ModelConfig) -> tuple[int, ...]:
        """The numbers of the layers that the chosen policy has: those without a window."""
        return tuple(range(config.num_layers))

    def seen_as(self, config: ModelConfig) -> ModelConfig:
        """The model, or a layer's view of it, as if it had those layers alone."""
        return config

    def part(self, config: ModelConfig, layer: int) -> tuple[Policy, int, ModelConfig]:
        """The policy of a layer, the layer's number as that policy counts, and the model as it sees it."""
        return self.itself, layer, config

    def with_words(self, words: Callable[[str], tuple[int, ...]], answer: Callable[[], str]) -> Policy:
        """The policy as a model's tokenizer has it: those within it, too; itself where none reads text of its own.

        Args:
          words: the token ids of a text. answer: gives what the chat template writes between the user's last words and
            the answer.
        """
        inner = {field.name: getattr(self, field.name) for field in dataclasses.fields(self.itself)}
        inner = {name: value for name, value in inner.items() if isinstance(value, Composable)}
        told = {name: value.with_words(words, answer) for name, value in inner.items()}
        changed = {name: value for name, value in told.items() if value is not inner[name]}
        return dataclasses.replace(self.itself, **changed) if changed else self.itself

    def pool_policies(self, config: ModelConfig, layer: int) -> tuple[tuple[Policy, ModelConfig], ...]:
        """The policy of each pool of a layer, and the model as it sees it."""
        return ((self.itself, config),)

    def answering(self, config: ModelConfig, prompt: int) -> Policy:
        """The policy whose capacities are held while a later turn is answered, after ``prompt`` tokens in all.

        Itself, unless it offloads.
        """
        return self.itself

    def reading(self, config: ModelConfig, slots: int) -> Policy:
        """The policy whose capacities hold a first prompt, with so many ``slots`` where it offloads them later."""
        return self.itself

    def heads_of(self, config: ModelConfig, layer: int) -> int:
        """The number of KV heads of a layer that this policy has."""
        return config.num_kv_heads

    def owners(self, config: ModelConfig, layer: int) -> tuple[Policy, ...]:
        """The policy of each of these KV heads: this one, unless it composes others."""
        return (self.itself,) * self.heads_of(config, layer)

    def retained_by_layer(self, layers: Sequence[Any]) -> list[HostOrTraced]:
        """:meth:`retained` of a cache's layers, from the first on."""
        return [self.itself.retained(cache) for cache in layers]


def shares(policy: Policy, storage: Storage) -> bool:
    """Whether rows that begin with the same context share slots of it.

    int8 storage does not, unless the context was chosen once: the scales of a row's keys follow what it reads, and its
    stored keys are packed anew.
    """
    return policy.shares_context and (policy.chosen_once or not storage.quantised)


def is_own(policy: Policy) -> bool:
    """Whether a policy is the caller's, and none that comes with kvjax."""
    return not type(policy).__module__.startswith("kvjax.")


def retained_on_host(policy: Policy, layers: Sequence[Any]) -> list[np.ndarray]:
    """:meth:`Policy.retained_by_layer` as NumPy's arrays.

    Raises:
      UsageError: they are no whole numbers of each row and head.
    """
    found = [as_numpy(kept) for kept in policy.retained_by_layer([counted_on_host(layer) for layer in layers])]
    # Layers that share a pool have counts each, and its heads together.
    heads = [len(layer.most_slots) for layer in layers] if len(found) == len(layers) else [None] * len(found)
    for kept, count in zip(found, heads, strict=True):
        if kept.ndim != 2 or kept.dtype.kind not in "iu" or kept.shape[1] != (count or kept.shape[1]):
            name = type(policy.chosen).__name__
            raise UsageError(f"{name}.retained gives {quoted(kept.tolist())}; give [B, H] whole numbers.")
    return found


def policies_within(policy: Policy) -> list[Policy]:
    """A policy and those that its fields hold, at any depth."""
    held = (getattr(policy, field.name) for field in dataclasses.fields(policy))
    return [policy, *(each for one in held if isinstance(one, Composable) for each in policies_within(one.itself))]


def has_own(policy: Policy) -> bool:
    """Whether a policy, or one within it, is the caller's."""
    return any(map(is_own, policies_within(policy)))

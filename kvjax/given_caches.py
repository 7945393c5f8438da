"""The caches that a request continues: one a prompt, one of all their rows, or a single row for all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from kvjax.cache.buckets import prompt_bucket
from kvjax.cache.cache import NO_TOKEN, Cache, same_context
from kvjax.cache.continuation import Continuation, are_apart, check_continuable, delete, one_batch
from kvjax.cache.host_memory import as_numpy
from kvjax.cache.quantisation import Storage, parse_storage
from kvjax.cache.shared_context import SharedContext
from kvjax.checkpoints.load import LanguageModel
from kvjax.errors import UsageError
from kvjax.model.config import ModelConfig
from kvjax.options import GenerationOptions
from kvjax.policies import Full, Policy, format_policy, parse
from kvjax.policies.best import resolve
from kvjax.policies.window_layers import for_model
from kvjax.prompts import as_told, matching
from kvjax.runtime.programs import Programs
from kvjax.sharding.adopt import adopt, keeps_context


@dataclasses.dataclass(frozen=True)
class GivenCaches:
    """The caches, or conversations, that ``count`` prompts are read onto; none where they begin.

    Attributes:
      caches: in the order of their rows, which are one a prompt, or a single one for all.
      count: prompts.
    """

    caches: tuple[Continuation, ...]
    count: int

    @classmethod
    def of(cls, cache: Any, count: int) -> GivenCaches:
        """What was given as ``cache=`` with ``count`` prompts.

        Raises:
          UsageError: it is nothing that can be continued, or has another number of rows.
        """
        if cache is None:
            return cls((), count)
        caches = tuple(cache) if isinstance(cache, (list, tuple)) else (cache,)
        if not caches:
            raise UsageError("The list of caches is empty; give one cache a prompt, or leave cache= out.")
        check_continuable("cache=", caches)
        found = cls(caches, count)
        if found.rows not in (1, count):
            there = "is 1 prompt" if count == 1 else f"are {count} prompts"
            raise UsageError(f"The cache has {found.rows} rows and there {there}; give one prompt a row.")
        return found

    @property
    def rows(self) -> int:
        """Rows of all of them."""
        return sum(old.batch for old in self.caches)

    @property
    def layers(self) -> list[Cache]:
        """The part of each that is in device memory between turns."""
        return [old.device_layers for old in self.caches]

    @property
    def seen(self) -> np.ndarray:
        """[count] tokens that each prompt comes after."""
        return self._counters([old.seen for old in self.caches], 0)

    @property
    def next_token(self) -> np.ndarray:
        """[count] :attr:`kvjax.cache.cache.Cache.next_token` of what each prompt is read onto."""
        return self._counters([old.next_token for old in self.caches], NO_TOKEN)

    def _counters(self, parts: Sequence[jax.Array], missing: int) -> np.ndarray:
        """[count] numbers of the rows; of a single row for all, and ``missing`` without a cache."""
        rows = np.concatenate([as_numpy(part) for part in parts]) if parts else np.array([missing])
        return np.broadcast_to(rows, (self.count,))

    def policy(self, asked: Policy | str | None, lm: LanguageModel, *, later: bool) -> tuple[Policy, str | None]:
        """The policy asked for, beside the rings of a model's window layers, or the one the caches have; and why.

        ``later``: whether questions come after the compression.
        """
        if not self.caches:
            found = resolve(Full() if asked is None else parse(asked), lm.config, later=later)
            return for_model(as_told(lm, found.policy), lm.config), found.line
        own = self.caches[0].policy.named
        same = None if asked is None else matching(lm, parse(asked), own)
        if asked is not None and same is None:
            raise UsageError(
                f"The cache was compressed by {format_policy(own)}; it continues with that policy, so leave policy= "
                "out or give the same one."
            )
        return self.caches[0].policy, same and same.line

    def storage(self, asked: Any, head_dim: int) -> Storage:
        """The storage asked for, or the one the caches have."""
        found = parse_storage(asked, head_dim)
        if not self.caches:
            return found
        own = self.caches[0].storage
        if asked is not None and found != own:
            what = own.kind if found.kind != own.kind else own
            raise UsageError(f"The cache is stored as {what}; it continues so, so leave storage= out or give the same.")
        return own

    def check_model(self, config: ModelConfig) -> None:
        """Refuse (UsageError) caches of another model."""
        wanted = (config.num_layers, config.num_kv_heads, config.head_dim)
        for old in self.caches:
            if (shape := old.model_shape) != wanted:
                raise UsageError(
                    f"The cache is of another model: it has {shape[0]} layers of {shape[1]} heads of {shape[2]} "
                    f"channels, and this model has {wanted[0]} of {wanted[1]} of {wanted[2]}."
                )

    def common_context(self, lm: LanguageModel) -> SharedContext | None:
        """The context that the rows of all of them share, and will go on sharing; None where they do not."""
        layers = self.layers
        if not layers or not all(same_context(cache.context, layers[0].context) for cache in layers):
            return None
        return layers[0].context if keeps_context(layers[0], lm.mesh, lm.config) else None

    def shared_tokens(self, context: SharedContext | None) -> int:
        """Tokens of a context that the prompts' rows will share, or do already; ``context`` is their common one."""
        if context is not None:
            return int(as_numpy(context.seen)[0])
        begin = self.rows and (self.rows < self.count or self.caches[0].policy.chosen_once)
        return int(self.seen.max()) if begin else 0

    def bytes_with_copies(self, context: SharedContext | None, shared: int, devices: int) -> int:
        """Bytes on each device of the caches, and of what is made of them for the prompts.

        What counts the rows that are made counts a ``context`` that they go on sharing; ``shared`` are its tokens.
        """
        beside = 0 if context is None else context.nbytes
        given = sum((old.nbytes - beside) // devices for old in self.caches)
        as_it_is = len(self.caches) == 1 and self.rows == self.count
        begins = self.rows < self.count and shared and context is None
        if not self.caches or as_it_is or begins:  # where rows begin to share, what they share is the copy
            return given
        return given + given // self.rows * self.count  # joined, or a single one spread over all

    @property
    def widest(self) -> Cache | None:
        """The cache with room for the longest prompt, whose capacities they have as one batch; None of none."""
        return max(self.layers, key=lambda cache: (cache.prompt_capacity, cache.own_capacity or 0), default=None)

    def joined(self, lm: LanguageModel, programs: Programs) -> Any:
        """All of them on the model's devices as one batch; None of none.

        A single row for all prompts stays the one row it is, until they are read; but not one of rounds.
        """
        held: list[Any] = [adopt(old.to_device(), lm.mesh, lm.config) for old in self.caches]
        if not held:
            return None
        whole = one_batch(held)
        if whole.policy.offloads_rounds and whole.batch != self.count:
            whole = whole.take([0] * self.count)
        if whole.policy.chosen_once and whole.context is None:  # it was saved
            sizes = {"prompt_capacity": prompt_bucket(int(as_numpy(whole.seen)[0])), "dtype": lm.params.dtype}
            whole = programs.share_chosen(whole, config=lm.config, **sizes)
        return whole

    def are_apart(self, joined: Any) -> bool:
        """Whether a batch that was made of them shares no keys and values with any of them."""
        return all(are_apart(joined, old) for old in self.caches)

    def delete(self) -> None:
        """Free their arrays."""
        for old in self.caches:
            delete(old)


def how_to_continue(
    lm: LanguageModel, options: GenerationOptions, cache: Continuation
) -> tuple[Policy | str, Storage | str]:
    """Policy and storage of a conversation that goes on with a cache: the options', or its own where they say none.

    Raises:
      UsageError: the options say others, or the cache is of another model.
    """
    given = GivenCaches((cache,), 1)
    given.check_model(lm.config)
    own, _ = given.policy(options.policy, lm, later=True)
    stored = given.storage(options.storage, lm.config.head_dim)
    return own.named if options.policy is None else options.policy, options.storage or stored

"""The compiled programs a generation is made of, on one device or (``kvjax.sharding``) on a mesh."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.cache import Cache
from kvjax.cache.quantisation import Storage
from kvjax.model.config import ModelConfig
from kvjax.model.decoder import Decoder
from kvjax.policies.base import Policy
from kvjax.runtime.decode import Controls, DecodeState, decode_chunk, first_token
from kvjax.runtime.grow import grow
from kvjax.runtime.prefill import prefill_fresh, prefill_onto


class Programs(Protocol):
    """What a session calls; arrays of rows are NumPy's, [B] or [B, T], B as :meth:`rows` says."""

    def rows(self, batch: int) -> int:
        """Rows to run for ``batch`` of them: the others are padding, which ends at once and is dropped."""
        ...

    def fresh(
        self,
        params: Decoder,
        tokens: np.ndarray,
        count: np.ndarray,
        total: np.ndarray,
        /,
        *,
        policy: Policy,
        prompt_capacity: int,
        new_capacity: int,
        dtype: Any,
        storage: Storage,
    ) -> tuple[Cache, jax.Array]:
        """:func:`kvjax.runtime.prefill.prefill_fresh`."""
        ...

    def onto(
        self,
        params: Decoder,
        cache: Cache,
        tokens: np.ndarray,
        count: np.ndarray,
        total: np.ndarray,
        /,
        *,
        prompt_capacity: int,
        new_capacity: int,
        consume: bool,
    ) -> tuple[Cache, jax.Array]:
        """:func:`kvjax.runtime.prefill.prefill_onto`."""
        ...

    def first(
        self, cache: Cache, logits: jax.Array, present: np.ndarray, controls: Controls, *, logprobs: bool
    ) -> DecodeState:
        """:func:`kvjax.runtime.decode.first_token`; rows that ``present`` does not have are padding."""
        ...

    def chunk(
        self, params: Decoder, state: DecodeState, controls: Controls, steps: int
    ) -> tuple[DecodeState, jax.Array]:
        """:func:`kvjax.runtime.decode.decode_chunk`."""
        ...

    def grow(self, cache: Cache, *, config: ModelConfig, new_capacity: int) -> Cache:
        """:func:`kvjax.runtime.grow.grow`."""
        ...


class OneDevice:
    """The programs of one device."""

    def rows(self, batch: int) -> int:
        return batch

    def fresh(self, params: Decoder, *read: np.ndarray, **options: Any) -> tuple[Cache, jax.Array]:
        return prefill_fresh(params, *map(jnp.asarray, read), **options)

    def onto(self, params: Decoder, cache: Cache, *read: np.ndarray, **options: Any) -> tuple[Cache, jax.Array]:
        return prefill_onto(params, cache, *map(jnp.asarray, read), **options)

    def first(
        self, cache: Cache, logits: jax.Array, present: np.ndarray, controls: Controls, *, logprobs: bool
    ) -> DecodeState:
        return first_token(cache, logits, jnp.asarray(present), controls, logprobs=logprobs)

    def chunk(
        self, params: Decoder, state: DecodeState, controls: Controls, steps: int
    ) -> tuple[DecodeState, jax.Array]:
        return decode_chunk(params, state, controls, jnp.asarray(np.int32(steps)))

    def grow(self, cache: Cache, *, config: ModelConfig, new_capacity: int) -> Cache:
        return grow(cache, config=config, new_capacity=new_capacity)


ONE_DEVICE = OneDevice()

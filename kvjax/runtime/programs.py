"""The compiled programs of a generation, each declared once; :class:`Programs` runs them on one device or on a mesh."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from kvjax.cache.buckets import batch_bucket
from kvjax.cache.cache import Cache, take, take_rows
from kvjax.cache.quantisation import MODEL, Storage
from kvjax.committed import put_beside, shapes_beside
from kvjax.model.config import ModelConfig
from kvjax.model.decoder import Decoder
from kvjax.policies.base import Policy
from kvjax.policies.fixed import fixed
from kvjax.runtime.decode import Controls, DecodeState, decode_chunk, initial_state
from kvjax.runtime.grow import grow
from kvjax.runtime.insert import Admitted, empty_state, insert
from kvjax.runtime.prefill import pages_onto, prefill_fresh, prefill_onto
from kvjax.runtime.share_context import share, share_chosen, share_chosen_types, share_types
from kvjax.runtime.token_logprobs import score_fresh, score_onto
from kvjax.sharding.compile import ROW, SCALAR, Device, Program, device_of
from kvjax.sharding.mesh import Mesh


def _empty(device: Device, arguments: Any, static: dict[str, Any]) -> Any:
    return jax.eval_shape(lambda: device.empty(arguments[1].shape[0], **static)), ROW


def _shared(device: Device, arguments: Any, static: dict[str, Any]) -> Any:
    return share_types(arguments[0], device.policy, device.config)


_CAPACITIES = ("prompt_capacity", "new_capacity")
_ONTO = (*_CAPACITIES, "own_capacity")
PREFILL_FRESH = Program(prefill_fresh, _empty, (*_CAPACITIES, "dtype", "storage"))
PREFILL_ONTO = Program(prefill_onto, lambda device, arguments, static: (arguments[1], ROW), _ONTO, (1,))
#: The same with the log-probability of what follows each token, and the likeliest token there, on request alone.
SCORE_FRESH = Program(score_fresh, lambda *given: (*_empty(*given), ROW, ROW), (*_CAPACITIES, "dtype", "storage"))
SCORE_ONTO = Program(score_onto, lambda device, arguments, static: (arguments[1], ROW, ROW, ROW), _ONTO, (1,))
DECODE_CHUNK = Program(decode_chunk, lambda device, arguments, static: (arguments[1], SCALAR), donates=(1,))
SHARE = Program(share, _shared, ("prompt_capacity",))
SHARE_CHOSEN = Program(
    share_chosen,
    lambda device, arguments, static: share_chosen_types(device, *arguments, **static),
    ("prompt_capacity", "dtype"),
)
EMPTY_STATE = Program(
    empty_state,
    lambda device, arguments, static: jax.eval_shape(lambda: empty_state(device, *arguments, **static)),
    (*_ONTO, "dtype", "storage"),
)
INSERT = Program(insert, lambda device, arguments, static: (arguments[0], ROW, ROW, ROW), donates=(0,))
GROW = Program(grow, lambda device, arguments, static: arguments[0], ("new_capacity",))


@dataclasses.dataclass(frozen=True)
class ProgramSet:
    """Programs for a model on a mesh, or for any model on one device.

    Attributes:
      mesh: the devices, None for one. config: the model; None on one device.
      exact: whether as many rows are run as there are, or as the mesh divides, and not a bucket of them.
    """

    mesh: Mesh | None = None
    config: ModelConfig | None = None
    exact: bool = True

    def device(self, policy: Policy, config: ModelConfig | None = None) -> Device:
        """The device that this policy's programs are compiled for."""
        return device_of(self.mesh, self.config or config, policy)  # pyright: ignore[reportArgumentType]

    def rows(self, batch: int) -> int:
        """Rows to run for ``batch`` of them: the others are padding, which ends at once and is dropped."""
        rows = batch if self.exact else batch_bucket(batch)
        return rows if self.mesh is None else self.mesh.rows(rows)


@dataclasses.dataclass(frozen=True)
class Programs(ProgramSet):
    """The programs of a generation. Arrays of rows are NumPy's, [B] or [B, T], B as :meth:`rows` says."""

    def fresh(
        self,
        params: Decoder,
        *read: np.ndarray,
        policy: Policy,
        prompt_capacity: int,
        new_capacity: int,
        dtype: Any,
        storage: Storage = MODEL,
    ) -> tuple[Any, ...]:
        """Read (tokens, count, total) into a new cache: :func:`kvjax.runtime.prefill.prefill_fresh`.

        With a fourth array, what follows each token, :func:`kvjax.runtime.token_logprobs.score_fresh`.
        """
        sizes = {"prompt_capacity": prompt_capacity, "new_capacity": new_capacity, "dtype": dtype, "storage": storage}
        program = PREFILL_FRESH if len(read) == 3 else SCORE_FRESH
        return program(self.device(policy, params.config), params, *read, **sizes)

    def onto(
        self,
        params: Decoder,
        cache: Cache,
        *read: np.ndarray,
        prompt_capacity: int,
        new_capacity: int,
        own_capacity: int | None = None,
        consume: bool = False,
    ) -> tuple[Any, ...]:
        """Read (tokens, count, total) onto a cache: :func:`kvjax.runtime.prefill.prefill_onto`.

        With a fourth array, what follows each token, :func:`kvjax.runtime.token_logprobs.score_onto`. The cache stays
        a value, unless ``consume``: then its buffers are donated, and reused where shapes allow.
        """
        device = self.device(cache.policy, params.config)
        capacities: dict[str, Any] = {"prompt_capacity": prompt_capacity, "new_capacity": new_capacity}
        capacities |= {"own_capacity": own_capacity}
        pages = pages_onto(device.local_config, device.local(cache), **capacities)
        given = (device, params, cache, *read)
        program = PREFILL_ONTO if len(read) == 3 else SCORE_ONTO
        return program.onto(*given, cache=cache, pages=pages, consume=consume, **capacities)

    def compile_ahead(
        self,
        params: Decoder,
        policy: Policy,
        present: np.ndarray,
        controls: Controls,
        *,
        onto: int | None,
        dtype: Any,
        storage: Storage,
        **capacities: int,
    ) -> None:
        """Begin to compile what follows :meth:`fresh`, while that is compiled and runs itself: :meth:`chunk`.

        Not on a mesh, whose devices would begin their programs in different orders.

        Args:
          present: [rows, V], as for :func:`kvjax.runtime.decode.initial_state`.
          onto: tokens of the bucket that :meth:`onto` will read in between, consuming what is read first; or None.
        """
        device, config, rows = self.device(policy, params.config), params.config, self.rows(len(present))
        form = device, rows, onto, dtype, storage, *capacities.values()
        if self.mesh is not None or form in _begun:
            return
        _begun.add(form)
        cache = jax.eval_shape(lambda: device.empty(rows, dtype=dtype, storage=storage, **capacities))
        logits = jax.ShapeDtypeStruct((rows, config.vocab_size), np.float32)
        cache, logits = shapes_beside(jax.tree.leaves(params)[0], (cache, logits))
        state = initial_state(device, cache, logits, present)
        DECODE_CHUNK.compile_ahead(device, params, state, controls, np.int32(1))
        if onto is not None:
            tokens, count = np.zeros((rows, onto), np.int32), np.zeros((rows,), np.int32)
            PREFILL_ONTO.compile_ahead(device, params, cache, tokens, count, count, own_capacity=None, **capacities)

    def begin(self, config: ModelConfig, cache: Cache, logits: jax.Array, present: np.ndarray) -> DecodeState:
        """The state that the first :meth:`chunk` takes: :func:`kvjax.runtime.decode.initial_state`."""
        return initial_state(self.device(cache.policy, config), cache, logits, present)

    def chunk(
        self, params: Decoder, state: DecodeState, controls: Controls, steps: int
    ) -> tuple[DecodeState, jax.Array]:
        """:func:`kvjax.runtime.decode.decode_chunk`; the state given is consumed."""
        return DECODE_CHUNK(self.device(state.cache.policy, params.config), params, state, controls, np.int32(steps))

    def empty(self, params: Decoder, rows: int, *, policy: Policy, **sizes: Any) -> DecodeState:
        """:func:`kvjax.runtime.insert.empty_state` of as many rows as :meth:`rows` says, where the weights are."""
        present = np.zeros((self.rows(rows), params.config.vocab_size), bool)
        present = put_beside(jax.tree.leaves(params)[0], present)
        return EMPTY_STATE(self.device(policy, params.config), present, **sizes)

    def insert(
        self, config: ModelConfig, state: DecodeState, cache: Cache, admitted: Admitted, controls: Controls
    ) -> tuple[DecodeState, jax.Array, jax.Array, jax.Array]:
        """:func:`kvjax.runtime.insert.insert`; the state given is consumed."""
        return INSERT(self.device(cache.policy, config), state, cache, admitted, controls)

    def share(self, cache: Cache, rows: int, *, config: ModelConfig, prompt_capacity: int) -> Cache:
        """``rows`` rows that begin like row 0 of a cache and share of it what they can: ``share_context.py``.

        A copy: the cache stays a value.
        """
        cache = self._of_row(cache)
        own, context = SHARE(self.device(cache.policy, config), cache, prompt_capacity=prompt_capacity)
        return take_rows(own, [0] * rows).replace(context=take_rows(context, [0]))

    def share_chosen(self, cache: Cache, *, config: ModelConfig, prompt_capacity: int, dtype: Any) -> Cache:
        """A row of a context that stays as its policy has chosen it: :func:`kvjax.runtime.share_context.share_chosen`.

        A copy: the cache stays a value.
        """
        cache, device = self._of_row(cache), self.device(fixed(cache.policy), config)
        own, context = SHARE_CHOSEN(device, cache, prompt_capacity=prompt_capacity, dtype=dtype)
        if cache.batch > 1:
            own, context = take_rows(own, [0]), take_rows(context, [0])
        return own.replace(context=context)

    def _of_row(self, cache: Cache) -> Cache:
        """Row 0 of a cache, on every device."""
        rows = self.rows(1)
        return cache if cache.batch == rows else take(cache, [0] * rows)

    def grow(self, cache: Cache, *, config: ModelConfig, new_capacity: int) -> Cache:
        """:func:`kvjax.runtime.grow.grow`."""
        return GROW(self.device(cache.policy, config), cache, new_capacity=new_capacity)


#: What :meth:`Programs.compile_ahead` has begun in this process.
_begun: set[Any] = set()
ONE_DEVICE = Programs()

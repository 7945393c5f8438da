"""Decode: N tokens of every row in one compiled, donated loop.

A step feeds each row's last token at its position, appends its key and value, attends, and samples the next; stop
conditions are part of it. The cache is donated and updated in place, so a step moves the bytes attention reads and
nothing else, and costs the same at token 10 and at token 100,000 under a bounded policy. Layers are unrolled over
per-layer tuples: measured 3.5 to 6 times faster on CPU than stacked caches under ``scan``, without its second copy.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.cache import Cache
from kvjax.model.alibi import slopes
from kvjax.model.decoder import Decoder
from kvjax.model.rope import apply_rope, token_angles
from kvjax.policies.base import Step
from kvjax.runtime.decode_attention import attend
from kvjax.runtime.sampling import Sampling, log_probability, sample
from kvjax.runtime.stopping import FOUND, StopTable
from kvjax.sharding.compile import Device

#: Tokens a compiled call has room for. How many of them it makes is traced.
CHUNK = 64

#: Whether another step follows, and whether a row is to be maintained before it.
Flags = tuple[Array, Array]
#: Tokens made by this call, the state, and on a mesh the flags that all devices agree on.
Carry = tuple[Array, "DecodeState", Flags | None]

RUNNING, STOP, LENGTH, CONTEXT = 0, 1, 2, 3
REASONS = {STOP: "stop", LENGTH: "length", CONTEXT: "context"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Controls:
    """The options of a request that the loop reads, all traced.

    Attributes:
      sampling: how tokens are chosen.
      stops: what ends a row.
      max_new_tokens: tokens each row may generate.
      max_position: tokens a row may see; beyond it generation ends with "context".
    """

    sampling: Sampling
    stops: StopTable
    max_new_tokens: Int[Array, " B"]
    max_position: Int[Array, ""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """The loop's carry.

    Attributes:
      cache: ``cache.pending`` is each row's last token, not yet fed.
      reason: [B] why a row has ended, RUNNING while it has not.
      stop_state: [B] state of the stop strings' automaton.
      present: [B, V] tokens a row holds, for the repetition penalty.
      made: [B] tokens generated.
      tokens: [B, CHUNK] this call's tokens, -1 where a row had ended.
      logprobs: [B, CHUNK] their log-probabilities, when asked for.
    """

    cache: Cache
    reason: Int[Array, " B"]
    stop_state: Int[Array, " B"]
    present: Bool[Array, "B V"]
    made: Int[Array, " B"]
    tokens: Int[Array, "B N"]
    logprobs: Float[Array, "B N"] | None


def forward_step(
    params: Decoder, cache: Cache, token: Int[Array, " B"], active: Bool[Array, " B"]
) -> tuple[Cache, Float[Array, "B V"]]:
    """Feed one token a row; rows that are not active keep their cache bit for bit.

    Returns:
      The cache with the tokens in, and the float32 logits of what follows.
    """
    config, policy = params.config, cache.policy
    angles = token_angles(config, cache.seen[:, None], cache.seen + 1)
    x = params.embed(token)
    done: list[Any] = []
    for i, (layer, kept) in enumerate(zip(params.layers, cache.layers, strict=True)):
        own = layer.config  # the model's, or of the heads that this device has of the layer
        step = Step(cache.seen, active, config=own)
        q, k, v = layer.project(x)
        kept = policy.append(i, kept, apply_rope(k, angles), v, step)
        attended, kept = attend(
            policy,
            i,
            kept,
            apply_rope(q, angles),
            step,
            scale=config.attention_scale,
            slopes=slopes(own) if own.positional == "alibi" else None,
        )
        done.append(kept)
        x = layer.finish(x, attended)
    return cache.replace(layers=tuple(done), seen=cache.seen + active), params.logits(x)


def _record(
    state: DecodeState, logits: Float[Array, "B V"], controls: Controls, active: Bool[Array, " B"], slot: Array
) -> DecodeState:
    """Sample from the logits, note the token, and end the rows that are done."""
    token = sample(logits, controls.sampling, state.present, state.made)
    made = state.made + active
    stop_state = controls.stops.next_state[state.stop_state, token].astype(jnp.int32)
    stop_state = jnp.where(active, stop_state, state.stop_state)
    stopped = (token[:, None] == controls.stops.ids).any(axis=-1) | (stop_state == FOUND)
    full = (state.cache.seen >= controls.max_position) & ~jnp.asarray(state.cache.policy.beyond_context)
    reason = jnp.where(made >= controls.max_new_tokens, LENGTH, jnp.where(full, CONTEXT, RUNNING))
    reason = jnp.where(active, jnp.where(stopped, STOP, reason), state.reason)
    present = state.present.at[jnp.arange(token.shape[0]), token].max(active)
    logprobs = state.logprobs
    if logprobs is not None:
        value = jnp.where(active, log_probability(logits, token), 0.0)
        logprobs = jax.lax.dynamic_update_slice_in_dim(logprobs, value[:, None], slot, axis=1)
    written = jnp.where(active, token, -1)[:, None]
    return dataclasses.replace(
        state,
        cache=state.cache.replace(next_token=jnp.where(active, token, state.cache.next_token)),
        reason=reason,
        stop_state=stop_state,
        present=present,
        made=made,
        tokens=jax.lax.dynamic_update_slice_in_dim(state.tokens, written, slot, axis=1),
        logprobs=logprobs,
    )


def first_token(
    device: Device,
    cache: Cache,
    logits: Float[Array, "B V"],
    present: Bool[Array, "B V"],
    controls: Controls,
    live: Bool[Array, " B"],
    *,
    logprobs: bool,
) -> DecodeState:
    """Sample the first token from the prefill's logits; it stands in column 0 of ``tokens``.

    Rows that are not ``live`` have ended from the start. The cache may be without its keys and values.
    """
    batch = cache.batch
    zeros = jnp.zeros((batch,), jnp.int32)
    state = DecodeState(
        cache=cache,
        reason=jnp.where(live, RUNNING, STOP).astype(jnp.int32),
        stop_state=zeros,
        present=present,
        made=zeros,
        tokens=jnp.full((batch, CHUNK), -1, jnp.int32),
        logprobs=jnp.zeros((batch, CHUNK), jnp.float32) if logprobs else None,
    )
    return _record(state, logits, controls, live, jnp.int32(0))


def decode_chunk(
    device: Device, params: Decoder, state: DecodeState, controls: Controls, steps: Int[Array, ""]
) -> tuple[DecodeState, Int[Array, ""]]:
    """Generate up to ``steps`` (at most CHUNK) tokens a row; ends early when every row has ended.

    Devices that hold different rows must take every step together, so on a mesh the loop's body agrees on its flags.
    (One device reads them in the loop's condition: XLA's CPU compiler takes half as long again when the body hands them
    on; measured for 30 layers and LagKV, 6.6 against 9.9 seconds.)

    Returns:
      The state, this call's tokens in columns ``0 .. n - 1``, and n.
    """
    agree = device.any_row
    policy, config = state.cache.policy, params.config
    state = dataclasses.replace(state, tokens=jnp.full_like(state.tokens, -1))

    def due(state: DecodeState) -> Bool[Array, " B"]:
        return policy.due(state.cache.layers, config) & (state.reason == RUNNING)

    def flags(made: Array, state: DecodeState) -> Flags:
        going = (made < steps) & (state.reason == RUNNING).any()
        return going, due(state).any() if policy.maintains else jnp.bool_(False)

    def carry(made: Array, state: DecodeState) -> Carry:
        if agree is None:
            return made, state, None
        going, maintaining = flags(made, state)
        return made, state, (agree(going), agree(maintaining))

    def read(now: Carry) -> Flags:
        made, state, agreed = now
        return flags(made, state) if agreed is None else agreed

    def nothing_due(now: Carry) -> Bool[Array, ""]:
        going, maintaining = read(now)
        return going & ~maintaining

    def step(now: Carry) -> Carry:
        made, state, _ = now
        active = state.reason == RUNNING
        cache, logits = forward_step(params, state.cache, jnp.maximum(state.cache.next_token, 0), active)
        state = _record(dataclasses.replace(state, cache=cache), logits, controls, active, made)
        return carry(made + 1, state)

    def maintain(state: DecodeState) -> DecodeState:
        cache, row = state.cache, jnp.argmax(due(state))
        layers = tuple(
            policy.maintain(i, old, layer.config, row, cache.seen[row])
            for i, (layer, old) in enumerate(zip(params.layers, cache.layers, strict=True))
        )
        return dataclasses.replace(state, cache=cache.replace(layers=layers))

    def maintain_then_step(now: Carry) -> Carry:
        made, state, agreed = now
        # One row at a time, and in loops rather than behind a conditional, whose branches would copy the cache.
        state = jax.lax.while_loop(lambda state: due(state).any(), maintain, state)
        agreed = agreed and (agreed[0], jnp.bool_(False))
        return jax.lax.while_loop(nothing_due, step, (made, state, agreed))

    body = maintain_then_step if policy.maintains else step
    made, state, _ = jax.lax.while_loop(lambda now: read(now)[0], body, carry(jnp.int32(0), state))
    return state, made

"""Checks of what a policy of one's own must keep to: on the host, before compiling and when numbers are read.

A wrong policy would not fail by itself. Compiled programs read other heads' slots, or finite garbage, and the answer
is a little worse. Each mistake is one sentence that names the method instead.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from kvjax.cache.cache import Cache
from kvjax.cache.groups import parts
from kvjax.errors import UsageError, kind_of, quoted
from kvjax.model.config import ModelConfig
from kvjax.policies.base import BEFORE_THE_FIRST, BEYOND, NOT_FINITE, STILL_DUE, UNRANKED, Policy
from kvjax.policies.composed import HeadWise
from kvjax.policies.composition import has_own, is_own
from kvjax.policies.signals import Signals
from kvjax.policies.sized import Sized
from kvjax.policies.traced_checks import own_within

#: Rows for which state is tried: no other axis of a policy has as many.
_ROWS = 13
#: What later steps may add to the length of a head that is marked as wrong.
_STEPS = 2**28


def check_value(policy: Policy) -> None:
    """Refuse a policy that is no value: programs are compiled for a policy, and caches continue under an equal one.

    Raises:
      UsageError: it is no frozen dataclass, cannot be hashed, or equals one with other options.
    """
    policy = policy.chosen
    cls, name = type(policy), type(policy).__name__
    for field in dataclasses.fields(policy) if dataclasses.is_dataclass(cls) else ():
        if isinstance(inner := getattr(policy, field.name, None), Policy):
            check_value(inner)
    if not dataclasses.is_dataclass(cls) or "__dataclass_params__" not in vars(cls):
        raise UsageError(f"{name} is no frozen dataclass; put @dataclasses.dataclass(frozen=True) above the class.")
    fields = [field.name for field in dataclasses.fields(policy)]
    if other := sorted(set(vars(policy)) - set(fields)):
        raise UsageError(
            f"{name} keeps {quoted(other[0])} beside its dataclass's fields, so it equals a policy with another; "
            "make it a field."
        )
    for field in fields:
        if not _hashes(getattr(policy, field)):
            raise UsageError(
                f"{name}.{field} holds {kind_of(getattr(policy, field))}, which cannot be hashed; policies "
                "hold numbers, text, tuples, profiles and policies."
            )
    if not isinstance(policy.marks, tuple) or not all(isinstance(mark, str) for mark in policy.marks):
        raise UsageError(f"{name}.marks is {quoted(policy.marks)}; give a tuple of names.")
    if len({"", *policy.marks}) <= len(policy.marks):
        raise UsageError(f"{name}.marks is {quoted(policy.marks)}; give names that differ, none of them empty.")
    if is_own(policy) and not isinstance(policy.signals, Signals):
        raise UsageError(f"{name}.signals is {kind_of(policy.signals)}; give a kvjax.policies.Signals.")
    if is_own(policy) and policy.signals.hidden and cls.hidden_weights is Policy.hidden_weights:
        raise UsageError(f"{name}.signals asks for hidden states; write {name}.hidden_weights, which weigh them.")
    compacts = cls.maintain is not Policy.maintain or cls.maintain_layers is not Policy.maintain_layers
    if is_own(policy) and cls.maintains is True and not compacts:
        raise UsageError(f"{name}.maintains is true, and nothing makes a row due no more; write {name}.maintain.")
    if is_own(policy) and policy.shares_layers is True:
        unwritten = [each for each in ("weigh", "choose") if getattr(cls, each) is getattr(Policy, each)]
        if unwritten:
            raise UsageError(
                f"{name}.shares_layers is true; write {name}.{unwritten[0]}, as all layers choose together."
            )
        if policy.shares_slots is not True:
            raise UsageError(f"{name}.shares_layers is true; set {name}.shares_slots, as heads share their slots too.")
    twin = copy.copy(policy)
    if not _hashes(policy) or not _equal(policy, twin) or hash(policy) != hash(twin):
        raise UsageError(f"Two {name} of the same fields are not equal; leave __eq__ and __hash__ to the dataclass.")
    for field in fields:
        other = copy.copy(policy)
        object.__setattr__(other, field, _Another())
        if _equal(policy, other):
            raise UsageError(
                f"{name} equals one with another {field}, and would run its programs; let the dataclass compare every "
                "field."
            )
    alien = object.__new__(type(name, (cls,), {}))
    vars(alien).update(vars(policy))
    if _equal(policy, alien):
        raise UsageError(
            f"{name} equals a policy of another class, and would run its programs; leave __eq__ and __hash__ to the "
            "dataclass."
        )


class _Another:
    """Equals nothing else."""


def _hashes(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # noqa: BLE001  a comparison of the author's that takes no such value: they differ
        return False


@functools.lru_cache(maxsize=256)
def check_sizes(policy: Policy, config: ModelConfig, prompt: int, new: int) -> None:
    """Refuse capacities that are no numbers of slots or less than the budgets, and state that does not fit a batch.

    Args:
      prompt, new: what :meth:`Policy.capacities` will be asked for.

    Raises:
      UsageError: one of these, naming the method.
    """
    policy, config = policy.chosen, policy.seen_as(config)
    if has_own(policy) and policy.signals.hidden:
        _check_hidden(policy, config)
    _check_sizes(policy, config, prompt, new)


def _check_sizes(policy: Policy, config: ModelConfig, prompt: int, new: int) -> None:
    """:func:`check_sizes` of a policy, or of one that has some of a layer's heads."""
    name = type(policy).__name__
    if isinstance(policy, HeadWise):
        for layer in range(config.num_layers):
            for one, _, own in policy.members(config, layer):
                _check_sizes(one, own, prompt, new)
    if not is_own(policy) or policy.offloads_rounds:
        return
    chunks = policy.chunks(config)
    if chunks is not None and not (isinstance(chunks, tuple) and len(chunks) == 2 and all(map(_is_count, chunks))):
        raise UsageError(f"{name}.chunks gives {quoted(chunks)}; give two whole numbers of at least 1, or None.")
    if not isinstance(notice := policy.notice(config, prompt), (str, type(None))):
        raise UsageError(f"{name}.notice gives {quoted(notice)}; give a sentence, or None.")
    planned = type(policy).budgets is not Policy.budgets
    totals = np.unique([1, max(prompt // 2, 1), prompt]).astype(np.int32)
    budgets = [_budgets(policy, config, layer, totals) for layer in range(config.num_layers) if planned]
    capacities = policy.capacities(config, prompt, new)
    if _shape(capacities) != [config.num_kv_heads] * config.num_layers:
        raise UsageError(
            f"{name}.capacities gives {quoted(capacities)}; give for each of the {config.num_layers} layers a tuple "
            f"of {config.num_kv_heads} numbers, the slots of each KV head."
        )
    for layer, heads in enumerate(capacities):
        for count in heads:
            if not _is_count(count):
                raise UsageError(
                    f"{name}.capacities gives {quoted(count)} slots in layer {layer}; give whole numbers of at least 1."
                )
    # What a step drops is not known here.
    only_grows = policy.grows and not policy.changes_while_decoding
    for layer, kept in enumerate(budgets):
        _check_budgets(name, layer, totals, kept, capacities[layer])
        if only_grows:
            _check_growth(name, layer, prompt, new, kept[-1], capacities[layer])
    for layer in range(config.num_layers):
        slots = tuple(capacities[layer])
        if not _hashes(kind := policy.layer_kind(config, layer)):
            raise UsageError(f"{name}.layer_kind gives {quoted(kind)}, which cannot be hashed; give a number or text.")
        state = jax.eval_shape(lambda layer=layer, slots=slots: _state(policy, config, layer, slots))
        for leaf in jax.tree.leaves(state):
            if leaf.shape[:1] != (_ROWS,):
                raise UsageError(
                    f"{name}.init_state gives an array of shape {leaf.shape} for {_ROWS} rows; every array's first "
                    "axis is the batch."
                )


def _state(policy: Policy, config: ModelConfig, layer: int, slots: tuple[int, ...]) -> Any:
    """The state of so many rows, if it is arrays (UsageError)."""
    state = policy.init_state(config, layer, _ROWS, slots)
    for leaf in jax.tree.leaves(state):
        if not isinstance(leaf, (jax.Array, np.ndarray)):
            raise UsageError(
                f"{type(policy).__name__}.init_state gives {quoted(leaf)}; give arrays whose first axis is the batch."
            )
    return state


def _check_hidden(policy: Policy, config: ModelConfig) -> None:
    """Refuse weights of hidden states that are not one a channel, and one more, of each head (UsageError)."""
    name, wanted = own_within(policy), (config.num_kv_heads, config.hidden_size + 1)
    for layer in range(config.num_layers):
        weights: Any = policy.hidden_weights(config, layer)
        if not isinstance(weights, (jax.Array, np.ndarray)) or weights.shape != wanted:
            found = f"an array of shape {weights.shape}" if hasattr(weights, "shape") else kind_of(weights)
            raise UsageError(
                f"{name}.hidden_weights gives {found} in layer {layer}; give [H, M + 1] numbers, {list(wanted)} here."
            )
        if not np.isfinite(np.asarray(weights, np.float32)).all():
            raise UsageError(f"{name}.hidden_weights gives weights in layer {layer} that are not finite; look at them.")


def _budgets(policy: Policy, config: ModelConfig, layer: int, totals: np.ndarray) -> np.ndarray:
    """[B, H] the budgets of rows of so many tokens, if they are whole numbers of that shape (UsageError)."""
    name, heads = type(policy).__name__, config.num_kv_heads
    if isinstance(policy, Sized):
        _check_size(policy, config, layer, totals)
    given = policy.budgets(config, layer, totals)
    try:
        budgets = np.asarray(given)
    except ValueError as error:
        raise UsageError(f"{name}.budgets gives lists of unequal lengths; give [B, H] numbers.") from error
    if budgets.shape != (len(totals), heads):
        raise UsageError(
            f"{name}.budgets gives an array of shape {budgets.shape} for {len(totals)} rows and {heads} KV heads; give "
            "[B, H] numbers."
        )
    if budgets.dtype.kind not in "iu":
        raise UsageError(
            f"{name}.budgets gives {budgets.dtype} numbers such as {budgets.flat[0]} in layer {layer}; give whole "
            "numbers of tokens, such as kvjax.policies.floor_fraction's."
        )
    return budgets


def _check_size(policy: Sized, config: ModelConfig, layer: int, totals: np.ndarray) -> None:
    """Refuse a size that is no number of each row (UsageError), which budgets would be made of."""
    given = policy.size(config, layer, totals)
    if getattr(given, "shape", ()) not in ((), totals.shape) or np.asarray(given).dtype.kind not in "iuf":
        raise UsageError(
            f"{type(policy).__name__}.size gives {quoted(given)} in layer {layer}; give whole numbers of tokens, an "
            "array of the shape of total."
        )


def _check_budgets(name: str, layer: int, totals: np.ndarray, budgets: np.ndarray, slots: Sequence[int]) -> None:
    """Refuse budgets of more tokens than there are, or than the layer's heads have slots (UsageError)."""
    for total, kept in zip(totals, budgets, strict=True):
        if (kept > total).any() or (kept < 1).any():
            raise UsageError(
                f"{name}.budgets keeps {int(kept.max() if (kept > total).any() else kept.min())} of {total} tokens "
                f"in layer {layer}; give numbers from 1 to the tokens there are."
            )
        if (kept > np.asarray(slots)).any():
            at = int((kept - np.asarray(slots)).argmax())
            raise UsageError(
                f"{name}.capacities gives {slots[at]} slots in layer {layer}, head {at}, and budgets keeps "
                f"{int(kept[at])} of {total} tokens; allocate what is kept."
            )


def _check_growth(name: str, layer: int, prompt: int, new: int, kept: np.ndarray, slots: Sequence[int]) -> None:
    """Refuse slots that decoded tokens, all of which stay, do not find beside what is kept (UsageError)."""
    spare = np.asarray(slots) - kept
    if (spare < new).any():
        at = int(spare.argmin())
        raise UsageError(
            f"{name}.capacities gives {slots[at]} slots in layer {layer}, head {at}, for a prompt of {prompt} tokens "
            f"and {new} decoded ones, and budgets keeps {int(kept[at])}; allocate a slot for each decoded token."
        )


def _shape(capacities: Any) -> list[int]:
    """The number of heads of each layer that capacities have; none of what is no sequence of sequences."""
    try:
        return [len(heads) for heads in capacities]
    except TypeError:
        return []


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= 1)


def layers_of(cache: Cache, policy: Policy, on_mesh: bool) -> Sequence[Any]:
    """The layers of a cache whose slots :func:`check_kept` can compare with what is kept; none where all share them.

    On a mesh those of policies of one's own alone, whose heads have runs of pages of equal size in all rows.
    """
    layers = () if cache.shares_layers else cache.layers
    by_row = any(pool.row_starts is not None for layer in layers for pool in parts(layer))
    return () if on_mesh and (by_row or not has_own(policy)) else layers


def check_kept(
    policy: Policy,
    layers: Sequence[Any],
    retained: Sequence[np.ndarray],
    seen: np.ndarray,
    config: ModelConfig | None = None,
    decoded: bool = False,
) -> None:
    """Refuse what a policy says, or is found, to have kept, if it cannot be.

    Args:
      layers: the cache's, for their slots; see :func:`layers_of`.
      retained: [B, H] :meth:`Policy.retained` of each layer. seen: [B] tokens.
      config: the model, so that of composed policies the head's own is named.
      decoded: whether what the prompts left was looked at before, and tokens were appended since.

    Raises:
      UsageError: nothing is kept, more than was seen, more than there are slots, or rows that are no tokens.
    """
    if policy.offloads_rounds:
        return
    for layer, kept in enumerate(retained):
        kept, there = kept[: len(seen)], seen[: len(kept), None]
        most = there + policy.merges  # a slot that stands for many may stand for none yet
        slots = np.asarray(layers[layer].most_slots) if layers else np.full(kept.shape[1:], np.iinfo(np.int32).max)
        wrong = (there > 0) & ((kept < 1) | (kept > most) | (kept > slots))
        if wrong.any():
            row, head = (int(i) for i in np.argwhere(wrong)[0])
            owner = policy if config is None else policy.owners(config, layer)[head]
            _refuse(owner.chosen, layer, head, int(kept[row, head]), int(seen[row]), int(slots[head]), decoded)


def _refuse(policy: Policy, layer: int, head: int, kept: int, seen: int, slots: int, decoded: bool) -> None:
    name = type(policy).__name__
    chooses = f"{name}.{'select' if type(policy).compress is Policy.compress else 'compress'}"
    where = f"in layer {layer}, head {head}"
    own = own_within(policy) or name
    if STILL_DUE <= kept < STILL_DUE + _STEPS:
        raise UsageError(f"{own}.maintain leaves a row due; compact it so that {own}.due is false of it.")
    if BEFORE_THE_FIRST <= kept < BEFORE_THE_FIRST + _STEPS:
        raise UsageError(
            f"A step of {own} leaves a next slot {where} that is none of its {slots} slots; append and observe set "
            "cache.next from 0 on, and capacities has slots for the tokens to come."
        )
    if kept == NOT_FINITE:
        raise UsageError(f"{chooses} gives values {where} that are no numbers; look for a division by zero in its v.")
    if kept == UNRANKED:
        raise UsageError(f"{own}.scores gives scores {where} that are no numbers; look for a division by zero.")
    if kept == BEYOND:
        raise UsageError(f"{chooses} keeps what is beyond candidates.length {where}; add `& candidates.valid` to keep.")
    if kept < 0:
        raise UsageError(f"{name}.retained gives {kept} {where}; give the slots that hold a token.")
    if kept < 1:
        raise UsageError(f"{chooses} keeps nothing of {seen} tokens {where}; keep at least one, such as the last.")
    if kept > seen + policy.merges:
        says = f"{name}.append" if decoded else chooses
        if type(policy).retained is not Policy.retained:
            says = f"{name}.retained"
        raise UsageError(f"{says} has {kept} tokens {where}, and {seen} were seen; count each token once.")
    raise UsageError(
        f"{name}.capacities gives {slots} slots {where}, and {kept} tokens are kept there; allocate what is kept."
    )

"""Refuses what methods of a policy of somebody's own give, while a program is traced, where shapes show a mistake."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from kvjax.cache.groups import parts
from kvjax.errors import UsageError, kind_of
from kvjax.policies.candidates import Candidates, Selection
from kvjax.policies.composition import Composable, is_own, policies_within


def check_selection(name: str, chosen: Any, candidates: Candidates) -> None:
    """Refuse a selection of another type, a mask of another shape, and values or marks unlike the candidates'.

    Raises:
      UsageError: the sentence names the method of the policy ``name``.
    """
    if not isinstance(chosen, Selection):
        raise UsageError(f"{name}.select gives {kind_of(chosen)}; give a kvjax.policies.Selection.")
    if not isinstance(chosen.marks, Mapping):
        raise UsageError(f"{name}.select gives marks of type {type(chosen.marks).__name__}; give candidates.marks.")
    valid = candidates.valid
    if not _are_booleans(chosen.keep, valid.shape):
        raise UsageError(
            f"{name}.select gives a mask of {_numbers(chosen.keep)}; give booleans of the shape of candidates.valid, "
            f"{valid.shape}."
        )
    v = candidates.v if chosen.v is None else jnp.asarray(chosen.v)
    if v.shape != candidates.v.shape or not jnp.issubdtype(v.dtype, jnp.floating):
        raise UsageError(
            f"{name}.select gives a v of {v.dtype} numbers of shape {v.shape}; give floats of the shape of "
            f"candidates.v, {candidates.v.shape}."
        )
    if other := _difference(dict(candidates.marks), dict(chosen.marks)):
        raise UsageError(f"{name}.select gives marks {other}; give candidates.marks, with new numbers in some.")


def check_scores(policy: Any, scores: Any, valid: Bool[Array, "B H N"]) -> None:
    """Refuse scores of another shape than the candidates' of a policy of somebody's own.

    Raises:
      UsageError: the sentence names the method.
    """
    own = own_within(policy)
    shape, kind = getattr(scores, "shape", None), getattr(scores, "dtype", None)
    if own is not None and (shape != valid.shape or kind is None or not jnp.issubdtype(kind, jnp.number)):
        raise UsageError(
            f"{own}.scores gives {_numbers(scores)}; give numbers of the shape of candidates.valid, {valid.shape}."
        )


def check_protected(policy: Any, protected: Any, valid: Bool[Array, "B H N"]) -> None:
    """Refuse what is no mask of the candidates from ``protected`` of a policy of somebody's own.

    Raises:
      UsageError: the sentence names the method.
    """
    own = own_within(policy)
    if own is not None and not _are_booleans(protected, valid.shape, broadcast=True):
        raise UsageError(
            f"{own}.protected gives {_numbers(protected)}; give booleans of the shape of candidates.valid, "
            f"{valid.shape}."
        )


def check_state(name: str, state: Any, initial: Any) -> None:
    """Refuse state of a selection that is of other arrays than ``init_state`` makes for as many slots.

    Raises:
      UsageError: the sentence names the method of the policy ``name``.
    """
    if other := _difference(initial, state):
        raise UsageError(f"{name}.select gives state {other}; give the arrays of {name}.init_state with new numbers.")


def check_arrays(policy: Any, method: str, before: Any, after: Any) -> None:
    """Refuse a layer's cache whose arrays are of other shapes or types than those that a method was given.

    Args:
      policy: the one that was called, which may hold one of somebody's own; kvjax's own are not looked at.

    Raises:
      UsageError: the sentence names the method.
    """
    own = own_within(policy)
    if own is not None and (other := _difference(before, after)):
        raise UsageError(f"{own}.{method} gives a cache {other}; change the numbers of its arrays alone.")


def check_compressed(policy: Any, before: Any, after: Any) -> None:
    """Refuse what is no layer's cache from ``compress`` of a policy of somebody's own.

    Raises:
      UsageError: the sentence names the method.
    """
    own = own_within(policy)
    if own is None:
        return
    # A policy of kvjax's, whose cache it is, may have one of somebody's own for some heads.
    whole = type(after) is not type(before)
    for one, other in [(before, after)] if whole else zip(parts(before), parts(after), strict=True):
        if type(other) is not type(one):
            raise UsageError(f"{own}.compress gives {kind_of(other)}; give the layer's cache.")


def check_due(policy: Any, due: Any, rows: int) -> None:
    """Refuse what is no boolean a row from ``due`` of a policy of somebody's own.

    Raises:
      UsageError: the sentence names the method.
    """
    own = own_within(policy)
    if own is not None and not _are_booleans(due, (rows,)):
        raise UsageError(f"{own}.due gives {_numbers(due)}; give [B] booleans, {rows} here.")


def _are_booleans(given: Any, shape: tuple[int, ...], broadcast: bool = False) -> bool:
    """Whether this is an array of booleans of a shape, or of one that becomes it beside an array of the shape."""
    if not hasattr(given, "shape") or given.dtype != bool:
        return False
    ends = zip(given.shape[::-1], shape[::-1], strict=False)
    becomes = given.ndim <= len(shape) and all(size in (1, wanted) for size, wanted in ends)
    return becomes if broadcast else given.shape == shape


def _numbers(given: Any) -> str:
    """The kind of a value that was given in place of an array, for a sentence."""
    shape = getattr(given, "shape", None)
    return kind_of(given) if shape is None else f"{given.dtype} numbers of shape {shape}"


def own_within(policy: Composable) -> str | None:
    """The class of somebody's own among a policy and those within it; None where all come with kvjax."""
    return next((type(each).__name__ for each in policies_within(policy.chosen) if is_own(each)), None)


def _difference(wanted: Any, given: Any) -> str | None:
    """Where the arrays of a tree differ from those wanted, as the end of a sentence; None if nowhere."""
    if jax.tree.structure(wanted) != jax.tree.structure(given):
        return "of another structure"
    leaves = jax.tree.leaves(given)
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(wanted), leaves, strict=True):
        if jnp.shape(one) != jnp.shape(other) or jnp.result_type(one) != jnp.result_type(other):
            place = jax.tree_util.keystr(path, simple=True, separator=".") or "array"
            was, now = (f"{jnp.result_type(each)}{list(jnp.shape(each))}" for each in (one, other))
            return f"whose {place} is {now} in place of {was}"
    return None

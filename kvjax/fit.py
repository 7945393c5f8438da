"""The weights, policies and ratios with which a context and a batch fit on a device, and the bytes left."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.checks import MOST_BYTES
from kvjax.chips import chip
from kvjax.device_memory import LARGEST_SETTING, device_limit, gpu_memory
from kvjax.errors import DoesNotFit, UsageError
from kvjax.model.config import ModelConfig
from kvjax.model.quantised import Weights
from kvjax.planning import Plan, plan
from kvjax.policies import Policy, format_policy, parse
from kvjax.tables import Column, Report, Table, human_bytes

#: What is tried: everything, and a half, a quarter and an eighth of it.
POLICIES = ("full", "lagkv:ratio=0.5", "lagkv:ratio=0.25", "lagkv:ratio=0.125")
_NUMBERS = ("weights_bytes", "cache_bytes", "prefill_peak_bytes", "total_bytes")


@dataclasses.dataclass(frozen=True)
class Fit:
    """One row: weights of a form under a policy.

    Attributes:
      weights: the form, as the table calls it.
      policy: its text form.
      plan: its bytes; None of a policy that is none for the model.
      limit: bytes of the device, or None when it does not say.
      refusal: what does not fit and what would, or why the policy is none for the model; None of what fits.
    """

    weights: str
    policy: str
    plan: Plan | None
    limit: int | None
    refusal: str | None = None

    @property
    def fits(self) -> bool:
        """Whether the device has room."""
        return self.refusal is None

    @property
    def spare_bytes(self) -> int | None:
        """Bytes of the device that stay free; below 0, those that lack."""
        return None if self.plan is None or self.limit is None else self.limit - self.plan.total_bytes

    def verdict(self) -> str:
        """Whether it fits, and by how much."""
        spare = self.spare_bytes
        if spare is None:
            return self.refusal or "the device does not say how much it has"
        return f"fits, {human_bytes(spare)} to spare" if spare >= 0 else f"refused: {human_bytes(-spare)} too much"


def forms_of(dtype: DTypeLike, config: ModelConfig) -> dict[str, dict[str, Any]]:
    """Weights of a dtype and the quantised ones, each as keywords of :func:`kvjax.plan` by its name.

    A checkpoint's own numbers are among them where it is quantised; a model that was loaded or converted with quantised
    weights has no others.
    """
    if config.weights is not None:
        return {config.weights: {"dtype": dtype, "weights": None}}
    known = [kind for kind in get_args(Weights) if kind != "file" or config.kept]
    kinds = {jnp.dtype(dtype).name: None, **{kind: kind for kind in known}}
    return {name: {"dtype": dtype, "weights": kind} for name, kind in kinds.items()}


def fit(
    model: Any,
    *,
    prompt_tokens: int,
    device: str | None = None,
    policies: Sequence[Policy | str] = POLICIES,
    forms: Mapping[str, Mapping[str, Any]] | None = None,
    **request: Any,
) -> list[Fit]:
    """Tabulate which weights and policies fit a request on a device; nothing is allocated, and no row stops the others.

    Args:
      model: as for :func:`kvjax.plan`.
      prompt_tokens, request: as for :func:`kvjax.plan`; not ``dtype``, ``policy`` and ``memory_limit``.
      device: a name of :data:`kvjax.chips.CHIPS`; by default this process's device.
      policies: those that are tried, in order.
      forms: keywords of :func:`kvjax.plan` by what the table calls them; by default
        :func:`forms_of` the device's dtype.

    Raises:
      UsageError: a request that makes no sense, or is beyond the model's context.
    """
    from kvjax.checkpoints.load import weights_dtype  # and its readers of files, which a plan of a shape does without

    named = None if device is None else chip(device)
    limit = device_limit(None) if named is None else named.limit
    dtype = weights_dtype(None) if named is None else named.dtype
    memory = {"memory_limit": limit or MOST_BYTES} if device is None else {"device": device}
    rows = []
    for weights, form in (forms_of(dtype, getattr(model, "config", model)) if forms is None else forms).items():
        for policy in policies:
            given = {"prompt_tokens": prompt_tokens, "policy": policy, **memory, **request, **form}
            text = format_policy(parse(policy))
            try:
                made = plan(model, **given)
                rows.append(Fit(weights, _became(text, made), made, limit))
            except DoesNotFit as error:
                rows.append(Fit(weights, _became(text, error.plan), error.plan, limit, str(error)))
            except UsageError as error:
                if policy == "full":  # what everything is refused for is the request
                    raise
                rows.append(Fit(weights, text, None, limit, str(error)))
    return rows


def _became(text: str, made: Plan | None) -> str:
    """The policy as asked for, or what it stands for at this request."""
    return text if made is None or made.choice is None else made.policy


def fit_report(rows: Sequence[Fit], device: str | None) -> Report:
    """The rows as a table, with what the device's memory is."""
    gpu, limit = gpu_memory() if device is None else chip(device).gpu, rows[0].limit
    source = chip(device).source if device is not None else gpu.source if gpu else ""
    has = f"Device memory: {'not known' if limit is None else human_bytes(limit)}{source and f' ({source})'}."
    more = [] if gpu is None or (most := gpu.largest) is None else [f"{LARGEST_SETTING} makes it {human_bytes(most)}."]
    if device is not None and (note := chip(device).dtype_note) is not None:
        more.append(note)
    columns = (
        Column("weights", "weights"),
        Column("policy", "policy"),
        Column(device or "this device", lambda row: row.verdict()),
        *(
            Column(name, lambda row, field=field: row.plan and getattr(row.plan, field), human_bytes, "-", right=True)
            for name, field in (
                ("total", "total_bytes"),
                ("weights", "weights_bytes"),
                ("cache", "cache_bytes"),
                ("prefill peak", "prefill_peak_bytes"),
            )
        ),
    )
    data = [
        {
            "weights": row.weights,
            "policy": row.policy,
            "fits": row.fits,
            "spare_bytes": row.spare_bytes,
            "refusal": row.refusal,
            **({} if row.plan is None else {name: getattr(row.plan, name) for name in _NUMBERS}),
        }
        for row in rows
    ]
    return Report([Table(columns, rows, labels=2), " ".join([has, *more])], data)

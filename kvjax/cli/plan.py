"""``kvjax plan``: every byte of a request before it is made."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax import tables
from kvjax.cli import options as flag
from kvjax.cli.app import app
from kvjax.errors import UsageError

if TYPE_CHECKING:
    from kvjax.model.config import ModelConfig


@app.command()
@flag.generation("policy", "storage", "max_new_tokens", "memory_limit", "reserve_tokens", "prompt_logprobs")
def plan(
    *,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", help="Tokens of the longest prompt.")],
    context_tokens: Annotated[
        int, typer.Option("--context-tokens", help="Tokens of a context that all prompts share.")
    ] = 0,
    once: flag.Once = False,
    model: flag.Model = flag.DEFAULT_MODEL,
    config: flag.Config = None,
    dtype: flag.Dtype = None,
    weights: flag.Weights = None,
    batch: Annotated[int, typer.Option("--batch", help="Prompts answered together.")] = 1,
    options: dict[str, Any],
    mesh: flag.Mesh = None,
    device: Annotated[
        str | None,
        typer.Option("--device", help="Another device: t4, l4, a100-40, h100, v5e, v6e, ...; by default this one."),
    ] = None,
    fit: Annotated[
        bool,
        typer.Option(
            "--fit", help="Show a table of the weights and policies that fit the device instead; --policy adds a row."
        ),
    ] = False,
    json: flag.Json = False,
) -> None:
    """Report a request's memory before it is allocated.

    Every byte that it would allocate, or what would fit on a device.
    """
    import kvjax

    kvjax.policies.parse(options["policy"])
    # The weights stay where they are: a plan needs their shapes alone, in the dtype they would be loaded in.
    from kvjax.checkpoints.load import weights_dtype

    asked: dict[str, Any] = dict(
        prompt_tokens=prompt_tokens, context_tokens=context_tokens, batch=batch, weights=weights, mesh=mesh, **options
    )
    if fit:
        if once:
            raise UsageError("--fit compares policies that choose with every prompt; leave --once out, or --fit.")
        _fit(model, device, dtype, asked, json)
        return
    if device is not None and dtype is None:
        from kvjax.chips import chip

        dtype = chip(device).dtype
    shape = kvjax.load_config(model)
    _refuse_other_weights(model, shape, weights)
    planned = kvjax.plan(shape, dtype=weights_dtype(dtype), device=device, once=once, **asked)
    if json:
        tables.print_json(dataclasses.asdict(planned))
    else:
        tables.print_text(str(planned))


def _fit(model: str, device: str | None, dtype: str | None, asked: dict[str, Any], json: bool) -> None:
    """Print the table of what fits."""
    import kvjax
    from kvjax.checkpoints.load import weights_dtype
    from kvjax.chips import chip
    from kvjax.fit import POLICIES, fit, fit_report, forms_of
    from kvjax.model.quantised import check_weights
    from kvjax.policies import format_policy, parse

    if asked.pop("memory_limit") is not None:
        raise UsageError("--fit is about a device; leave --memory-limit out, or --fit.")
    policies = list(dict.fromkeys([*POLICIES, format_policy(parse(asked.pop("policy")))]))
    if dtype is None and device is not None:
        dtype = chip(device).dtype
    config = kvjax.load_config(model)
    forms = forms_of(weights_dtype(dtype), config)
    if _is_converted(model):  # to floats, where there are several: a folder has no weights but its own
        forms = dict(list(forms.items())[:1])
    if (kind := check_weights(asked.pop("weights"))) is not None:
        _refuse_other_weights(model, config, kind)
        forms = {kind: {**next(iter(forms.values())), "weights": kind}}
    report = fit_report(fit(config, device=device, policies=policies, forms=forms, **asked), device)
    if json:
        tables.print_json(report.data)
    else:
        report.print(width=150)


def _refuse_other_weights(model: str, config: ModelConfig, weights: str | None) -> None:
    """Refuse (UsageError) weights of another kind than those that a folder was converted to, as loading does."""
    if weights is None or weights == config.weights:
        return
    if config.weights is not None:
        raise UsageError(f"The model's weights are {config.weights}; leave --weights out, or say so.")
    if _is_converted(model):
        raise UsageError(f"{model} was converted with float weights; leave --weights out, or convert the original.")


def _is_converted(model: str) -> bool:
    """Whether a name, of which there is a configuration, is a folder that ``kvjax convert`` wrote."""
    from kvjax.checkpoints.converted import is_converted

    return is_converted(Path(model).expanduser())

"""The refusal of a request that does not fit, with what would."""

from __future__ import annotations

import dataclasses

from kvjax.device_memory import GpuMemory
from kvjax.errors import DoesNotFit
from kvjax.halving import largest
from kvjax.planning.request_shape import RequestShape
from kvjax.planning.result import Plan
from kvjax.policies import Full, LagKV, Policy
from kvjax.policies.window_layers import for_model
from kvjax.tables import human_bytes


def refusal(made: Plan, request: RequestShape, already: int, gpu: GpuMemory | None) -> DoesNotFit:
    """The error of a plan that does not fit beside ``already`` bytes, with the sizes of the request that would.

    ``gpu``: the memory that JAX takes of a GPU; None where the limit was given.
    """
    limit = made.memory_limit
    assert limit is not None, "what has no limit fits"
    each = "" if request.mesh is None else " on each device"
    need = f"This needs {human_bytes(made.total_bytes + already)}{each} and the limit is {human_bytes(limit)}"
    if made.weights_bytes >= limit:
        narrower = ' or dtype, or weights="int8"' if request.config.weights is None else ""
        return DoesNotFit(
            f"{need}: the weights alone are {human_bytes(made.weights_bytes)}; use a smaller model{narrower}."
        )

    policy = request.policy

    def fits(batch: int, prompt: int, policy: Policy) -> bool:
        other = dataclasses.replace(request, batch=batch, prompt=prompt, policy=policy)
        return other.first_plan(None, exact=True).total_bytes + already <= limit

    offers = []
    batch = largest(1, made.batch - 1, lambda b: fits(b, made.prompt_tokens, policy))
    if batch:
        offers.append(f"a batch of {batch}")
    prompt = largest(1, made.prompt_tokens - 1, lambda t: fits(made.batch, t, policy))
    if prompt:
        offers.append(f"prompts of {prompt:,} tokens")
    if not offers and (prompt := largest(1, made.prompt_tokens - 1, lambda t: fits(1, t, policy))):
        offers.append(f"a batch of 1 with {prompt:,} tokens")
    for ratio in (0.5, 0.25, 0.125):
        lagkv = for_model(LagKV(ratio=ratio), request.config)
        if isinstance(policy.chosen, Full) and fits(made.batch, made.prompt_tokens, lagkv):
            offers.append(f'policy="lagkv:ratio={ratio}"')
            break
    if gpu is not None and (larger := gpu.offer(made.total_bytes + already)):
        offers.append(larger)
    would = " or ".join(offers) if offers else "only a device with more memory"
    error = DoesNotFit(f"{need}; {would} would fit.")
    error.batch = batch
    return error

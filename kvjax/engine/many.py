"""More prompts than fit the memory together: answered through as many slots as do."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kvjax import progress
from kvjax.cache.cache import Cache
from kvjax.checkpoints.load import LanguageModel
from kvjax.device_memory import device_limit
from kvjax.engine.common_context import common_context
from kvjax.engine.core import EngineCore
from kvjax.engine.row import Row
from kvjax.interrupt import interruptible
from kvjax.options import GenerationOptions
from kvjax.output import Output
from kvjax.request import Request


def answer_many(
    lm: LanguageModel,
    prompts: Sequence[Any],
    options: GenerationOptions,
    cache: Cache | None = None,
) -> list[Output]:
    """The outputs of prompts, each drawing by its place in the list as one batch of them would.

    Their outputs have no caches: slots are given from one to the next.

    Args:
      cache: a row that all prompts go on with, of which the slots share what can be shared; it stays a value.

    Raises:
      DoesNotFit: not even one slot does.
      KeyboardInterrupt: Ctrl-C.
    """
    # Shared here, and not by every request anew where the cache was saved.
    row = None if cache is None else common_context(lm, cache).row
    requests = [Request(lm, prompt, options, cache=row, exact=True) for prompt in prompts]
    longest = max(len(request.prompts[0]) for request in requests)
    limit = device_limit(options.memory_limit)
    if cache is not None and limit is not None:  # which holds this too, but for what the slots share
        limit = max(limit - cache.replace(context=None).device_nbytes, 1)
    core = EngineCore(
        lm,
        requests[0].policy.chosen if row is None else None,
        options.storage if row is None else None,
        prompt_tokens=longest,
        new_tokens=options.max_new_tokens,
        memory_limit=limit,
        most_slots=len(requests),
        context=row,
    )
    done: list[Row] = []

    def told(row: Row) -> None:
        if row.ended:
            done.append(row)

    try:
        rows = [
            core.slots.row_of(request, number=i, limit=options.max_new_tokens, on_change=told)
            for i, request in enumerate(requests)
        ]
        for row in rows:
            core.add(row)
        with (
            progress.showing(options.progress),
            progress.stage("job", f"{len(rows)} prompts, {core.sizes.slots} at a time:", unit="prompts") as shown,
            interruptible() as interrupt,
        ):
            while not core.loop.idle:
                core.loop.iterate()
                shown.update(len(done), len(rows))
                if interrupt.requested:
                    raise KeyboardInterrupt
    finally:
        core.close()
    outputs = []
    for row in rows:
        if row.error is not None:
            raise row.error
        assert row.output is not None, "the engine is idle"
        stats = dataclasses.replace(row.output.stats, compile_seconds=core.clock.seconds, choice=row.request.choice)
        outputs.append(dataclasses.replace(row.output, stats=stats))
    return outputs

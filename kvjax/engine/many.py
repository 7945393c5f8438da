"""More prompts than fit the memory together: answered through as many slots as do."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kvjax import progress
from kvjax.checkpoints.load import LanguageModel
from kvjax.device_memory import device_limit
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
) -> list[Output]:
    """The outputs of prompts, each drawing by its place in the list as one batch of them would.

    Their outputs have no caches: slots are given from one to the next.

    Raises:
      DoesNotFit: not even one slot does.
      KeyboardInterrupt: Ctrl-C.
    """
    requests = [Request(lm, prompt, options, exact=True) for prompt in prompts]
    longest = max(len(request.prompts[0]) for request in requests)
    limit = device_limit(options.memory_limit)
    core = EngineCore(
        lm,
        requests[0].policy.chosen,
        options.storage,
        prompt_tokens=longest,
        new_tokens=options.max_new_tokens,
        memory_limit=limit,
        most_slots=len(requests),
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

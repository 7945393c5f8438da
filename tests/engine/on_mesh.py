"""Run by ``test_on_mesh.py`` on 8 virtual devices: an engine's answers on meshes, beside those of one device."""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from toys import tiny_model

import kvjax
from kvjax.runtime import prefill_by_layers, programs
from kvjax.sharding.compile import Program

#: The mesh of each policy.
MESHES = {"snapkv:ratio=0.5": "data=2,model=2", "full": "data=4,model=2"}


def in_order(names: list[str]) -> None:
    """Note the layers that an engine's thread reads, and the chunks that it decodes, in their order."""
    run = Program.__call__

    def noted(self: Program, *arguments: Any, **static: Any) -> Any:
        own = threading.current_thread() is not threading.main_thread()
        if own and self in (prefill_by_layers.PREFILL_LAYER_FRESH, programs.DECODE_CHUNK):
            names.append(self.function.__name__)
        return run(self, *arguments, **static)

    Program.__call__ = noted


def over_a_context(lm: Any, policy: str) -> dict[str, Any]:
    """What is asked of one context, in the slots of engines on a mesh (and off it), and as many at a time as fit."""
    sharded, once = lm.on(MESHES[policy]), policy != "full"
    ids = np.random.default_rng(9).integers(3, 250, 203).tolist()
    one, held = (kvjax.read(model, ids, policy=policy, once=once) for model in (lm, sharded))
    questions = [np.random.default_rng(i).integers(3, 250, n).tolist() for i, n in enumerate((5, 40, 1, 33, 7))]
    drawn = {"max_new_tokens": 7, "temperature": 1.0}
    same, sizes = [], {"slots": 4, "prompt_tokens": 48, "new_tokens": 16}
    wanted = [kvjax.generate(lm, question, cache=one, seed=i, **drawn) for i, question in enumerate(questions)]
    places = ((sharded, one), (sharded, held), (lm, held))
    for model, context in places if policy == "full" else places[:1]:
        with kvjax.Engine(model, context=context, **sizes) as engine:
            handles = [engine.submit(question, seed=i, **drawn) for i, question in enumerate(questions)]
            outputs = [handle.result(300) for handle in handles]
            device_bytes = engine.sizes.slots_bytes + engine.sizes.context_bytes
        same += [
            a.tokens == b.tokens and a.stats.retained == b.stats.retained for a, b in zip(outputs, wanted, strict=True)
        ]
        same += [output.stats.device_cache_bytes == device_bytes for output in outputs]
    many = questions * 10
    planned = {"prompt_tokens": 40, "context_tokens": 203, "max_new_tokens": 7, "policy": policy, "once": once}
    own = held.replace(context=None).device_nbytes
    limit = kvjax.plan(sharded, batch=12, **planned).total_bytes + own
    few = kvjax.generate(sharded, many, cache=held, memory_limit=limit, **drawn)
    whole = kvjax.generate(sharded, many, cache=held, **drawn)
    same += [a.tokens == b.tokens for a, b in zip(few, whole, strict=True)]
    smaller = few[0].stats.device_cache_bytes < whole[0].stats.device_cache_bytes
    return {"same": same, "smaller": smaller, "shared": [few[0].stats.shared_cache_bytes, one.device_nbytes]}


def main() -> None:
    names: list[str] = []
    in_order(names)
    lm = tiny_model(max_position=1024, vocab_size=264)
    if sys.argv[1] == "--context":
        print(json.dumps(over_a_context(lm, sys.argv[2])))
        return
    for policy in sys.argv[1:]:
        mesh = MESHES[policy]
        sharded = lm.on(mesh)
        same, finished = [], []
        with kvjax.Engine(sharded, policy, slots=4, prompt_tokens=300, new_tokens=40, max_pause=0.0) as engine:
            handles = []
            names.clear()
            for i, length in enumerate((5, 270, 40, 2, 90, 33, 64)):
                prompt = np.random.default_rng(i).integers(0, 256, length).tolist()
                options = {"max_new_tokens": 40 - 5 * i, "temperature": 0.5 * (i % 2), "seed": i, "chat": False}
                handles.append((engine.submit(prompt, **options), prompt, options))
            for handle, prompt, options in handles:
                wanted = kvjax.generate(lm, prompt, policy=policy, **options)
                found = handle.result(300)
                same.append(found.tokens == wanted.tokens and found.stats.retained == wanted.stats.retained)
                finished.append(found.finish_reason == wanted.finish_reason)
            held = kvjax.read(sharded, [1, 2, 3, 4, 5] * 9, policy=policy, chat=False)
            one = kvjax.read(lm, [1, 2, 3, 4, 5] * 9, policy=policy, chat=False)
            for question in ([7, 8], [9]):
                found = engine.submit(question, cache=held, max_new_tokens=5, chat=False).result(300)
                same.append(
                    found.tokens == kvjax.generate(lm, question, cache=one, max_new_tokens=5, chat=False).tokens
                )
            sizes = dataclasses.asdict(engine.sizes)
        # The rows that run decode between two layers of the long prompt.
        between = names[names.index("prefill_layer_fresh") + 1]
        found = {"policy": policy, "mesh": mesh, "same": same, "finished": finished, "slots": sizes["slots"]}
        print(json.dumps(found | {"between": between}))


if __name__ == "__main__":
    main()

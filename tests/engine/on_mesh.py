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
from kvjax.runtime import by_layers, programs
from kvjax.sharding.compile import Program

#: The mesh of each policy.
MESHES = {"snapkv:ratio=0.5": "data=2,model=2", "full": "data=4,model=2"}


def in_order(names: list[str]) -> None:
    """Note the layers that an engine's thread reads, and the chunks that it decodes, in their order."""
    run = Program.__call__

    def noted(self: Program, *arguments: Any, **static: Any) -> Any:
        own = threading.current_thread() is not threading.main_thread()
        if own and self in (by_layers.PREFILL_LAYER_FRESH, programs.DECODE_CHUNK):
            names.append(self.function.__name__)
        return run(self, *arguments, **static)

    Program.__call__ = noted


def main() -> None:
    names: list[str] = []
    in_order(names)
    lm = tiny_model(max_position=1024, vocab_size=264)
    for policy in sys.argv[1:]:
        mesh = MESHES[policy]
        sharded = lm.on(mesh)
        same, finished = [], []
        with kvjax.Engine(sharded, policy, slots=4, prompt_tokens=300, new_tokens=40, max_pause=0.0) as engine:
            handles = []
            names.clear()
            for i, length in enumerate((5, 270, 40, 2, 90, 33, 64)):
                prompt = np.random.default_rng(i).integers(0, 256, length).tolist()
                options = {"max_new_tokens": 3 + 4 * i, "temperature": 0.5 * (i % 2), "seed": i, "chat": False}
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

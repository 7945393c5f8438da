"""Conversations on a mesh of two processes with four devices each: a process of its own, a line of JSON at the end.

``python tests/sharding/hosts.py PORT PROCESSES NUMBER POLICY [MODEL]``; a single process makes the same mesh of its 8
devices. Without MODEL, which is loaded onto the mesh, it is a toy.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import toys

import kvjax

TURNS = (
    ["hello there my friend, how are you today?", "ab" * 12, "the quick brown fox jumps"],
    ["and so?", "b", "what then"],
    ["why", "no way", "but then who"],
)


def main() -> None:
    port, processes, number, policy, *model = sys.argv[1:]
    if int(processes) > 1:
        jax.distributed.initialize(f"localhost:{port}", int(processes), int(number))
    mesh = "data=2,model=4"
    toy = {"num_heads": 8, "num_kv_heads": 4, "vocab_size": 264}
    lm = kvjax.load(model[0], mesh=mesh, progress=False) if model else toys.tiny_model(**toy).on(mesh)
    options = {"chat": False, "logprobs": True, "max_new_tokens": 5}
    # Sums over processes have another order: through thirty layers, an int8 level near a half rounds the other way.
    storage = "model" if model else "int8"
    outputs, said = None, []
    for prompts in TURNS:
        cache = None if outputs is None else [output.cache for output in outputs]
        first = {"policy": policy, "storage": storage} if outputs is None else {}
        outputs = kvjax.generate(lm, prompts, cache=cache, **options, **first)
        said += [[output.tokens, output.logprobs, output.stats.retained] for output in outputs]
    down = lm.params.layers[0].down[...]
    found = {"said": said, "weights": [shard.data.size / down.size for shard in down.addressable_shards]}
    if policy.startswith("round"):
        cache = outputs[0].cache
        found["here"] = [len(part.upper.kv.addressable_shards) for part in cache.rounds[0]]
        found["bytes"] = cache.host_nbytes
        # Its rounds are where its row was; another place in the batch is another host's.
        try:
            kvjax.generate(lm, ["a", "b", "c"], cache=[outputs[i].cache for i in (2, 1, 0)], **options)
        except kvjax.UsageError as error:
            found["refused"] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

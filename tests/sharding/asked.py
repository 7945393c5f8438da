"""Reading once, scoring and prompts' log-probabilities on meshes of 8 virtual devices, against one device.

``python tests/sharding/asked.py MESH...`` prints a line of JSON a mesh and policy; XLA_FLAGS must give 8 devices.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import numpy as np
import toys

import kvjax

CONTEXT = "The lighthouse of Alma stands on a rock, and was lit by hand."
QUESTIONS = ["Where?", "Who lit it, and how?", "?"]
POLICIES = {"lagkv": "lagkv:ratio=0.5,lag=8,sink=4", "rounds": "round:watershed=1,top=0.5"}


def numbers(lm: Any, policy: str) -> dict[str, list[Any]]:
    """Tokens, log-probabilities of each kind, and how many rows were left."""
    rounds = policy.startswith("round")
    cache = kvjax.read(lm, CONTEXT, policy=policy)
    asked: dict[str, Any] = {"cache": cache, "max_new_tokens": 6, "logprobs": True, "prompt_logprobs": not rounds}
    outputs = kvjax.generate(lm, QUESTIONS, **asked)
    answers = [output.tokens for output in outputs]
    scored = kvjax.score(lm, QUESTIONS, answers, cache=cache, way="decode")
    off = [np.abs(np.subtract(s.logprobs, o.logprobs)).max() for s, o in zip(scored, outputs, strict=True)]
    found = [list(output.logprobs) for output in outputs]
    best = [score.best_tokens for score in scored]
    if not rounds:
        read = kvjax.score(lm, QUESTIONS, answers, cache=cache, way="prefill")
        best += [score.best_tokens for score in read]
        found += [list(score.logprobs) for score in read] + [list(o.prompt_logprobs[1:]) for o in outputs]
        batch = kvjax.read(lm, [CONTEXT, CONTEXT[:30], CONTEXT[:9]], policy=policy)
        found += [list(s.logprobs) for s in kvjax.score(lm, QUESTIONS, "It is.", cache=batch)]
    return {"tokens": [answers, best, cache.batch], "logprobs": found, "decoded": [float(max(off))]}


def main() -> None:
    """One line a mesh and policy."""
    assert len(jax.devices()) == 8, jax.devices()
    lm = toys.tiny_model(vocab_size=264)
    for policy in POLICIES.values():
        want = numbers(lm, policy)
        for mesh in sys.argv[1:]:
            found = numbers(lm.on(mesh), policy)
            pairs = zip(found["logprobs"], want["logprobs"], strict=True)
            result = {
                "name": f"{mesh}-{policy}",
                "tokens": found["tokens"] == want["tokens"],
                "off": float(max(np.abs(np.subtract(a, b)).max() for a, b in pairs)),
                "decoded": found["decoded"][0],
            }
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

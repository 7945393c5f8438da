"""Generation on meshes of 8 virtual CPU devices against one device: a process of its own, a line of JSON a case.

``python tests/sharding/grid.py NAME...`` runs the named cases; XLA_FLAGS must give 8 devices.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import numpy as np
import toys
from support.scorers import with_profiles, with_statistics

import kvjax
from kvjax.cache import buckets
from kvjax.planning.request_shape import RequestShape
from kvjax.policies import parse
from kvjax.policies.base import Policy
from kvjax.runtime import prefill_batches, prefill_by_layers

#: Every policy, at a size at which it drops something of these prompts.
POLICIES: dict[str, str | Policy] = {
    "full": "full",
    "streamingllm": "streamingllm:budget=12,positions=cache",
    "lagkv": "lagkv:ratio=0.5,lag=8,sink=4",
    "h2o": "h2o:budget=12",
    "tova": "tova:budget=12",
    "ahakv": "ahakv:budget=12,recent=4",
    "razor": "razor:heads=0.0,budget=9,sink=2",
    "compensated": "compensated:budget=12,sink=2",
    "snapkv": "snapkv:budget=12,window=4",
    "pyramidkv": "pyramidkv:budget=12,window=4,beta=4",
    "slimkv": "slimkv:budget=12,window=4",
    "finch": "finch:budget=12,window=4",
    "nacl": "nacl:budget=12",
    "keydiff": "keydiff:budget=12",
    "expected_attention": "expected_attention:budget=12,future=16",
    "keydiff_of_texts": "keydiff:budget=12",  # with statistics of the case's model
    "expected_attention_of_texts": "expected_attention:budget=12,future=16",
    "adaptive_of_texts": "adaptive:budget=12,inner=expected_attention(future=16)",
    # One of the prompts repeats itself every two tokens: chunks that hold the same would tie, and rounding decide.
    "chunkkv": "chunkkv:budget=12,chunk=5",
    "compactor": "compactor:budget=12,sink=2,recent=2",
    "qfilters": "qfilters:budget=12",  # with filters of the case's model
    "duo": "duo:heads=0.3,sink=2,recent=9",  # with gates of the case's model
    "learned": "learned:budget=12,sink=2",  # with a scorer of the case's model
    "razor_of_learned": "razor:heads=0.0,budget=9,inner=learned(sink=2)",
    "criticalkv": "criticalkv:budget=12,inner=snapkv(window=4)",
    "kvzip": "kvzip:budget=12,sink=2,chunk=24",
    "adaptive": "adaptive:budget=12,inner=keydiff",
    "adaptive_of_all": "adaptive:budget=12,inner=keydiff,scope=model",
    "adaptive_of_h2o": "adaptive:budget=12,inner=h2o",
    "adaptive_of_ahakv": "adaptive:budget=12,inner=ahakv(recent=4)",
    "merged": "merged:budget=12,inner=snapkv(window=4)",
    "think": "think:channels=0.5,window=4",
    "think_of_adaptive": "think:channels=0.5,window=4,inner=adaptive(budget=12,inner=keydiff)",
    "merged_of_adaptive": "merged:budget=12,inner=adaptive(inner=keydiff)",
    "adaptive_of_snapkv": "adaptive:budget=12,inner=snapkv(window=4)",
    "razor_of_adaptive": "razor:heads=0.0,budget=9,inner=adaptive(inner=keydiff)",
    "razor_of_tova": kvjax.Razor(inner=kvjax.TOVA(budget=10), heads="0.0+1.0"),
    "rounds": "round:watershed=1,top=0.5",
    "rounds_of_snapkv": kvjax.RoundAttention(watershed=1, inner=kvjax.SnapKV(budget=12, window=4)),
    "rounds_of_tokens": "round:watershed=1,top=0.5,granularity=token",
    "rounds_idle": "round:watershed=1,drop_after=1",
    "lengths": kvjax.CompensatedRing(sink=0, compensation=False, lengths=((3, 9, 20, 6), (12, 4, 7, 30))),
}
#: Policies whose layers are read twice, or choose together.
AT_ONCE = ("kvzip", "adaptive_of_all", "rounds", "rounds_of_snapkv", "rounds_of_tokens", "rounds_idle")
MESHES = ("data=8", "data=4,model=2", "data=2,model=4", "model=8")
CONTEXT = "it was a dark and stormy night; the rain fell in torrents, except at occasional intervals"
PROMPTS = ["hello there my friend, how are you today?", "ab" * 12, "the quick brown fox jumps"]


@dataclasses.dataclass(frozen=True)
class Case:
    """A policy on a mesh; ``kv_heads`` of the model, and what else is asked."""

    policy: str
    mesh: str
    kv_heads: int = 4
    storage: str = "model"
    positional: str = "rope"
    later: bool = False
    grow: bool = False
    saved: bool = False
    moves: bool = False
    context: bool = False
    #: That one's slots are chosen once.
    once: bool = False
    #: Prompts are read by a program a layer on the mesh, and by one of all layers on one device.
    layers: bool = False
    #: The first layer sees a window alone.
    windows: bool = False

    @property
    def name(self) -> str:
        known = ("later", "grow", "saved", "moves", "context", "once", "layers", "windows")
        flags = "".join(f"-{flag}" for flag in known if getattr(self, flag))
        return f"{self.policy}-{self.mesh}-{self.kv_heads}-{self.storage}-{self.positional}{flags}"


#: A representative part: heads dealt, pages dealt, both, groups; padding, later turns, samples, int8, growing, ALiBi.
DEFAULT = (
    Case("full", "data=4,model=2", storage="int8"),
    Case("razor", "data=2,model=4", kv_heads=3, later=True, saved=True),
    Case("lagkv", "model=8", kv_heads=1),
    Case("tova", "data=2,model=4"),
    Case("rounds", "data=2,model=4", kv_heads=3, later=True, saved=True),
    Case("lagkv", "data=2,model=4", kv_heads=2, later=True, context=True),
    Case("razor", "data=4,model=2", kv_heads=3, context=True),
    Case("adaptive", "data=2,model=4", later=True, saved=True),
    Case("razor_of_learned", "data=2,model=4", kv_heads=3, later=True),
    Case("razor", "data=2,model=4", kv_heads=3, later=True, context=True, layers=True),
    Case("snapkv", "data=4,model=2", kv_heads=1, storage="int8", later=True, layers=True),
    Case("adaptive", "data=2,model=2", later=True, windows=True),
    Case("adaptive_of_h2o", "data=2,model=2", kv_heads=3, later=True, saved=True),
    Case("snapkv", "data=2,model=4", kv_heads=3, later=True, context=True, once=True),
    Case("adaptive_of_all", "data=2,model=4", kv_heads=3, later=True, context=True, once=True),
    Case("expected_attention_of_texts", "data=2,model=4", storage="int8", later=True, saved=True),
)
GRID = (
    Case("adaptive_of_all", "data=2,model=2", kv_heads=3, later=True),
    *(Case(policy, mesh, later=True) for policy in POLICIES for mesh in MESHES),
    *(
        Case(policy, "data=4,model=2", heads, storage, later=True)
        for policy in ("rounds_of_snapkv", "rounds_of_tokens", "rounds_idle")
        for heads, storage in ((1, "int8"), (3, "model"))
    ),
    Case("rounds", "data=4,model=2", kv_heads=1, storage="int8", later=True, saved=True),
    Case("rounds", "data=2,model=3", kv_heads=1, storage="int8", later=True, moves=True),
    Case("rounds_of_tokens", "data=2,model=3", kv_heads=1, storage="int8", later=True),
    *(
        Case(policy, mesh, heads, storage, later=True)
        for policy in POLICIES
        if policy != "lengths" and not policy.startswith("rounds_")
        for mesh, heads, storage in (("data=2,model=4", 3, "model"), ("data=4,model=2", 1, "int8"))
    ),
    *(
        Case(policy, "data=2,model=4", positional="alibi", later=True)
        for policy in ("full", "ahakv", "adaptive_of_ahakv", "streamingllm", "expected_attention", "lengths")
    ),
    Case("h2o", "data=4,model=2", positional="alibi"),
    # Without rotary embedding equal tokens have equal keys: by these alone they would tie.
    Case("adaptive_of_snapkv", "data=2,model=4", positional="alibi", later=True),
    Case("adaptive", "data=4,model=2", kv_heads=3, storage="int8", grow=True),
    Case("full", "data=2,model=4", later=True, moves=True, context=True),
    *(Case(policy, mesh, later=True, context=True) for policy in ("full", "lagkv", "razor", "h2o") for mesh in MESHES),
    *(
        Case(policy, mesh, heads, storage, later=True, context=True, once=True)
        for policy in ("kvzip", "expected_attention", "learned", "adaptive", "adaptive_of_all")
        for mesh in MESHES
        for heads, storage in ((4, "model"), (1, "int8"))
    ),
    Case("snapkv", "data=2,model=2", 4, later=True, context=True, once=True, windows=True),
    *(
        Case(policy, mesh, heads, later=True, context=True, once=True)
        for policy in ("razor_of_learned", "razor_of_adaptive")
        for mesh, heads in (("data=4,model=2", 3), ("data=2,model=4", 4))
    ),
    *(
        Case(policy, "data=2,model=4", positional="alibi", later=True, context=True, once=True)
        for policy in ("keydiff", "adaptive_of_all")
    ),
    *(Case("full", "data=2,model=4", heads, later=True, saved=True, context=True) for heads in (1, 3)),
    Case("full", "data=2,model=4", positional="alibi", later=True, context=True),
    Case("think_of_adaptive", "data=2,model=4", kv_heads=3, later=True, saved=True),
    Case("full", "data=4,model=2", storage="int8", grow=True),
    Case("lagkv", "model=8", grow=True),
    Case("razor", "data=2,model=4", kv_heads=3, grow=True),
    *(
        Case(policy, "data=2,model=4", heads, later=True, context=True, layers=True)
        for policy in POLICIES
        if policy not in AT_ONCE
        for heads in (3, 4)
        if (policy, heads) != ("lengths", 3)
    ),
    Case("razor_of_tova", "data=4,model=2", storage="int8", grow=True, layers=True),
    *(
        Case(policy, "data=2,model=2", heads, later=True, windows=True)
        for policy in ("full", "snapkv", "adaptive", "adaptive_of_h2o", "think_of_adaptive", "merged_of_adaptive")
        for heads in (2, 3, 4)
    ),
    Case("adaptive", "data=2,model=2", grow=True, windows=True),
    Case("full", "data=2,model=4", positional="alibi", later=True, context=True, layers=True),
)
CASES = {case.name: case for case in (*DEFAULT, *GRID)}


@functools.lru_cache(maxsize=4)
def model(kv_heads: int, positional: str, windows: bool = False) -> Any:
    changes = {"windows": (8, None)} if windows else {}
    sizes = {"num_heads": 2 * kv_heads, "num_kv_heads": kv_heads, "vocab_size": 264}
    return toys.tiny_model(**sizes, positional=positional, **changes)


def model_of(case: Case) -> Any:
    return model(case.kv_heads, case.positional, case.windows)


def policy_of(case: Case) -> Any:
    """The policy of a case, with what it must know of the model."""
    policy, config = with_profiles(parse(POLICIES[case.policy]), model_of(case).config), model_of(case).config
    return with_statistics(policy, config) if case.policy.endswith("_of_texts") else policy


def numbers(case: Case, lm: Any) -> tuple[dict[str, Any], Any]:
    """What a case gives on this model, and the outputs of its first turn."""
    rooms, faster, plan = buckets.NEW_TOKENS, prefill_batches.compiles_faster_by_layers, RequestShape.plan
    checked, turn = [], None
    compiled = prefill_by_layers.PREFILL_LAYER_FRESH.compilations()
    buckets.NEW_TOKENS = prefill_batches.NEW_TOKENS = 8 if case.grow else rooms
    try:
        prefill_batches.compiles_faster_by_layers = lambda *_: case.layers
        RequestShape.plan = lambda *given: checked.append(plan(*given)) or checked[-1]
        policy = policy_of(case)
        tokens = 12 if case.grow else 5
        options: dict[str, Any] = {"chat": False, "logprobs": True, "max_new_tokens": tokens}
        context = CONTEXT if case.context else None
        reads: dict[str, Any] = {"policy": policy, "storage": case.storage}
        if case.once:
            first = kvjax.generate(
                lm, PROMPTS, cache=kvjax.read(lm, CONTEXT, chat=False, once=True, **reads), **options
            )
        else:
            first = kvjax.generate(lm, PROMPTS, context=context, **reads, **options)
        outputs = list(first)
        if case.later and policy.offloads_rounds:
            # So that there are rounds to choose from.
            for asked in (["why?", "no", "then who"], ["and you", "me?", "so"]):
                # To one device and back.
                on = model_of(case) if case.moves and asked[1] == "no" else lm
                outputs += kvjax.generate(on, asked, cache=[output.cache for output in outputs[-3:]], **options)
        if case.later:
            caches = [_through_disk(lm, output.cache) if case.saved else output.cache for output in outputs[-3:]]
            sampling = {"n": 2, "temperature": 1.0, "seed": 5}
            # Rows that leave the mesh hold the context that they shared, each its own.
            on = model_of(case) if case.moves and not policy.offloads_rounds else lm
            turns = kvjax.generate(on, ["and so?", "b", "what then"], cache=caches, **options, **sampling)
            outputs += [sample for samples in turns for sample in samples]
            turn = turns[0][0].stats.device_cache_bytes, checked[-1].cache_bytes
    finally:
        RequestShape.plan = plan
        buckets.NEW_TOKENS = prefill_batches.NEW_TOKENS = rooms
        prefill_batches.compiles_faster_by_layers = faster
    assert case.layers == (prefill_by_layers.PREFILL_LAYER_FRESH.compilations() > compiled)
    found = {
        "tokens": [output.tokens for output in outputs],
        "logprobs": [output.logprobs for output in outputs],
        "retained": [output.stats.retained for output in outputs],
        "seen": [output.stats.seen for output in outputs],
        "clipped": [output.stats.clipped for output in outputs],
        "rounds": [_rounds(output.stats.rounds) for output in outputs],
        "turn": turn,
    }
    return found, first


def _rounds(stats: Any) -> tuple[Any, ...] | None:
    """What a turn selected, and the tokens of it."""
    return stats and (stats.rounds, stats.selected, stats.tokens_used)


def _planned(case: Case, lm: Any) -> int:
    """Bytes on each device after the first turn, as they are planned."""
    asked = {
        "prompt_tokens": 41,
        "context_tokens": len(CONTEXT) if case.context else 0,
        "batch": 3,
        "max_new_tokens": 5,
        "mesh": case.mesh,
        "storage": case.storage,
        "once": case.once,
    }
    return kvjax.plan(lm, policy=policy_of(case), **asked).cache_bytes


def _through_disk(lm: Any, cache: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        kvjax.save_cache(folder, cache, lm)
        return kvjax.load_cache(folder, lm)


@functools.lru_cache(maxsize=64)
def alone(case: Case) -> dict[str, Any]:
    """The same on one device."""
    return numbers(case, model_of(case))[0]


def run(case: Case) -> dict[str, Any]:
    """Both, as one comparison."""
    lm = model_of(case)
    want = alone(dataclasses.replace(case, mesh="", saved=False, moves=False, layers=False))
    found, first = numbers(case, lm.on(case.mesh))
    off = [np.subtract(a, b) for a, b in zip(found["logprobs"], want["logprobs"], strict=True) if len(a) == len(b)]
    return {
        "name": case.name,
        **{name: found[name] == want[name] for name in ("tokens", "retained", "seen", "clipped", "rounds")},
        "off": float(max(np.abs(x).max() for x in off)),
        "device_bytes": first[0].stats.device_cache_bytes,
        "planned_bytes": _planned(case, lm),
        # Of the later turn, allocated and as the check before it counted them.
        "turn_bytes": found["turn"],
    }


def main() -> None:
    """One line a case."""
    assert len(jax.devices()) == 8, jax.devices()
    for name in sys.argv[1:]:
        print(json.dumps(run(CASES[name])), flush=True)


if __name__ == "__main__":
    main()

"""A whole decode step of Llama 3.1 8B under every policy: XLA's cost model of it beside the time of what it must read.

    python -m tools.aot.steps --tpu-python .venv-aot-tpu/bin/python --out docs/steps.md

A step is compiled ahead of time for four devices of each TPU, and not run. Policies whose compiled steps are the same
program are compiled once.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.aot.processes import last_line, versions

#: By target, its topology, of which the first four devices are the mesh's.
TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
MESH = (1, 4)
BATCH, PROMPT = 8, 32768


@dataclasses.dataclass(frozen=True)
class Step:
    """A decode step of a policy on a target; bytes and seconds are those of each device.

    Attributes:
      read: bytes that it must read: the weights, of the embedding only rows, and the slots kept of the prompt.
      limit: seconds in which memory delivers them. seconds: of XLA's cost model. accessed: bytes that it counts.
      temporary: bytes of temporary memory. program: tells apart what was compiled.
    """

    target: str
    policy: str
    read: int
    limit: float
    seconds: float
    accessed: int
    temporary: int
    program: str


def compile_steps(target: str, policies: Sequence[str], layers: int) -> list[Step]:
    """Every policy's step on this target, in the process that has its compiler."""
    import jax
    from jax.experimental import topologies

    from kvjax.bench.shapes import with_profile
    from kvjax.planning import plan
    from kvjax.policies import parse
    from kvjax.sharding.compile import Program
    from tools.aot.targets import targets
    from tools.aot.whole_model import DTYPE, LLAMA_8B, whole_model

    config = dataclasses.replace(LLAMA_8B, num_layers=layers)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[target]).devices
    devices = devices[: math.prod(MESH)]
    program = Program(_step, lambda device, arguments, static: arguments[1], donates=(1,))
    bandwidth = targets()[target].bandwidth
    costs: dict[str, tuple[float, int, int]] = {}
    found = []
    for text in policies:
        policy = with_profile(parse(text), config)
        made = whole_model(config, devices, *MESH, policy, batch=BATCH, prompt=PROMPT)
        state = dataclasses.replace(made.state, logits=None, first=None)
        with jax.sharding.use_abstract_mesh(made.mesh.abstract_mesh):
            lowered = program.lower(made.device, made.params, state, made.controls)
            key = hashlib.sha256(lowered.as_text().encode()).hexdigest()[:12]
            if key not in costs:
                compiled = lowered.compile()
                cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
                costs[key] = cost["optimal_seconds"], round(cost["bytes accessed"]), memory.temp_size_in_bytes
                print(f"{target}, {text}: {costs[key]}", file=sys.stderr, flush=True)
            planned = plan(
                config, prompt_tokens=PROMPT, batch=BATCH, policy=policy, max_new_tokens=1, dtype=DTYPE,
                storage=made.storage, memory_limit=1 << 50, mesh=made.device.mesh,
            )  # fmt: skip
        slots = BATCH * sum(map(sum, planned.retained)) // math.prod(MESH)
        read = _weights(made.params) + slots * 2 * config.head_dim * DTYPE.itemsize
        seconds, accessed, temporary = costs[key]
        found.append(Step(target, text, read, read / bandwidth, seconds, accessed, temporary, key))
    return found


def _step(device: Any, params: Any, state: Any, controls: Any) -> Any:
    """One decode step, without the loop that a chunk of them is, and its maintenance."""
    import jax.numpy as jnp

    from kvjax.runtime.decode import RUNNING, forward_step, record

    active = state.reason == RUNNING
    cache, logits = forward_step(params, state.cache, state.cache.next_token, active)
    return record(dataclasses.replace(state, cache=cache), logits, controls, active, jnp.int32(0))


def _weights(params: Any) -> int:
    """Bytes on a device of the weights that a step reads whole."""
    import jax

    def size(tree: Any) -> int:
        shards = ((x.sharding.shard_shape(x.shape), x.dtype.itemsize) for x in jax.tree.leaves(tree))
        return sum(math.prod(shape) * itemsize for shape, itemsize in shards)

    return size(params) - size(params.embedding)


def render(steps: Sequence[Step], layers: int, found: dict[str, str]) -> str:
    """The page."""
    targets = list(dict.fromkeys(step.target for step in steps))
    by = {(step.target, step.policy): step for step in steps}
    policies = list(dict.fromkeys(step.policy for step in steps))
    kinds = {step.program for step in steps}
    lines = [
        "# Whole decode steps, as XLA's cost model counts them",
        "",
        f"One decode step of Llama 3.1 8B's shape, {layers} layers, bfloat16, batch {BATCH} after prompts of {PROMPT:,}"
        " tokens, on four",
        f"devices ({MESH[0]} x {MESH[1]}) of each TPU, compiled ahead of time; **nothing here was run**. A cell, of a "
        "device: milliseconds by",
        "XLA's cost model / milliseconds in which memory delivers what the step must read, its weights and the slots "
        "that the",
        "policy kept of the prompt; then the bytes that the cost model counts over those. Kernels are counted as they "
        "say of",
        "themselves, by the pool's capacity, which is the prompt's and room for new tokens. The cost model knows no "
        "schedule:",
        "it says what a step moves and multiplies that it need not, and not how long it will take. The maintenance of "
        "policies",
        "that evict in batches comes once in many steps, and is no part of one. "
        f"The {len(steps)} cells are {len(kinds)} compiled programs.",
        "",
        f"| policy | must read, GB | {' | '.join(targets)} |",
        f"| --- | --- |{' --- |' * len(targets)}",
    ]
    for policy in policies:
        row = [by[target, policy] for target in targets]
        cells = [f"{x.seconds * 1e3:.2f} / {x.limit * 1e3:.2f} ms, {x.accessed / x.read:.2f}" for x in row]
        lines.append(f"| {policy} | {row[0].read / 1e9:.2f} | {' | '.join(cells)} |")
    listed = ", ".join(f"{name} {version}" for name, version in found.items())
    return "\n".join([*lines, "", f"{listed}. `python -m tools.aot.steps --layers {layers}` writes this page.", ""])


def main() -> None:
    """See the module's docstring."""
    from kvjax.bench.shapes import every_policy

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--targets", default=",".join(TOPOLOGIES), help="comma-separated; all by default")
    parser.add_argument("--policies", nargs="+", default=every_policy(), help="all by default, at an eighth")
    parser.add_argument("--out", type=Path, help="the page; printed if not given")
    parser.add_argument("--tpu-python", default=sys.executable)
    parser.add_argument("--here", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        made = compile_steps(options.here, options.policies, options.layers)
        print(json.dumps([dataclasses.asdict(step) for step in made]))
        return
    steps = []
    for target in options.targets.split(","):
        how = ("-m", "tools.aot.steps", "--layers", str(options.layers), "--here", target, "--policies")
        steps += [Step(**step) for step in json.loads(last_line(options.tpu_python, *how, *options.policies))]
    page = render(steps, options.layers, versions(options.tpu_python, "jax", "libtpu"))
    if options.out is None:
        print(page)
    else:
        options.out.write_text(page)


if __name__ == "__main__":
    main()

"""The whole decode step of Llama 3.1 8B, by the compiler's cost model, beside the limit of its bytes.

    python -m tools.aot.step_limit --page docs/kernels.md

Each step is compiled ahead of time for 8 devices of a chip, a model axis of 8, in a process of its own. ``--page``
names a page whose section of that name is replaced, or to whose end it is added.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvjax.array_bytes import nbytes
from kvjax.tables import Column, Table
from tools.aot.kernels_page import deliver
from tools.aot.processes import ROOT, last_line
from tools.aot.targets import targets
from tools.aot.tpu_profile import environment

HEADING = "Decode step against the limit of its bytes"
#: Prompts and their tokens.
BATCH, PROMPT = 8, 32768
#: Topologies of 8 devices; a TPU7x's chip is two.
TOPOLOGIES = {"v5e": "v5e:2x4", "v6e": "v6e:2x4", "tpu7x": "tpu7x:2x2x1"}
DEVICES = 8
#: Layers of the model, and of the program that is compiled by default.
LAYERS, COMPILED = 32, 3


def _razor(layers: int) -> str:
    return "razor:heads=" + "+".join(f"{layer}.{3 * layer % 8}" for layer in range(layers))


#: By name, the policy of a model of so many layers: all slots, fewer of them, heads of unequal length, scores handed
#: back. Layers are alike. The step of other policies that drop tokens of the prompt once is SnapKV's.
POLICIES: dict[str, Callable[[int], str]] = {
    "full": lambda _: "full",
    "lagkv:ratio=0.25": lambda _: "lagkv:ratio=0.25",
    "snapkv:ratio=0.25": lambda _: "snapkv:ratio=0.25",
    "razor: one whole head a layer": _razor,
    "tova:ratio=0.25": lambda _: "tova:ratio=0.25",
    "h2o:ratio=0.25": lambda _: "h2o:ratio=0.25",
}


@dataclasses.dataclass(frozen=True)
class Step:
    """A compiled decode step, of one of the devices.

    Attributes:
      weights, cache: bytes that the step must read: an even share of the weights but for the embedding table, and of
        the slots that prompts leave.
      cycles, copied, collectives: see ``StepCost``.
      blocks: iterations of the attention kernel. block_cycles: of one, by its schedule. block_bytes: that one reads.
    """

    target: str
    policy: str
    weights: int
    cache: int
    cycles: int
    copied: int
    collectives: int
    blocks: int
    block_cycles: int
    block_bytes: int

    def _ms(self, cycles: float, nbytes: float = 0) -> float:
        chip = targets()[self.target]
        return 1e3 * max(cycles / chip.clock, nbytes / chip.bandwidth)

    @property
    def limit(self) -> float:
        """Milliseconds in which memory delivers the bytes."""
        return self._ms(0, self.weights + self.cache)

    @property
    def operations(self) -> float:
        """Milliseconds of XLA's operations, by its cost model."""
        return self._ms(self.cycles)

    @property
    def attention(self) -> float:
        """Milliseconds of the kernel: of each block its schedule or its bytes, whichever takes longer."""
        return self.blocks * self._ms(self.block_cycles, self.block_bytes)

    @property
    def copies(self) -> float:
        """Milliseconds in which memory delivers what is copied ahead."""
        return self._ms(0, self.copied)

    @property
    def together(self) -> float:
        return self.operations + self.attention + self.copies


def measure(target: str, policy: str, compiled_layers: int, dump: str) -> Step:
    """Compile a step, in a process that has the TPU's compiler and lets it leave its dumps in ``dump``."""
    import jax
    from jax.experimental import topologies

    from kvjax.model.decoder import abstract_decoder
    from kvjax.policies import parse
    from kvjax.policies.page_capacities import page_capacities
    from pallas_kernels.ragged_decode.tpu_sizes import TpuConfig
    from tools.aot.step_cost import KERNEL, step_cost
    from tools.aot.tpu_profile import profiles
    from tools.aot.whole_model import DTYPE, LLAMA_8B, whole_model

    config, few = (dataclasses.replace(LLAMA_8B, num_layers=layers) for layers in (LAYERS, compiled_layers))
    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[target]).devices
    made = whole_model(few, devices, 1, DEVICES, parse(POLICIES[policy](compiled_layers)), batch=BATCH, prompt=PROMPT)
    with jax.sharding.use_abstract_mesh(made.mesh.abstract_mesh):
        compiled = made.programs["decode"]().lower().compile()
    cost = step_cost(compiled.as_text(), compiled_layers, LAYERS)
    kernel = max((x for x in profiles(Path(dump)) if x.name == KERNEL), key=lambda x: x.cycles)

    assert made.storage.layout is not None
    page = made.storage.layout.page_size
    layers = page_capacities(parse(POLICIES[policy](LAYERS)), config, PROMPT, 0, page)
    slots = [pages * page for layer in layers for pages in layer]
    block = TpuConfig.default(devices[0].device_kind, page, config.head_dim, DTYPE)
    row = 2 * config.head_dim * DTYPE.itemsize
    blocks = BATCH * sum(-(-count // block.rows) for count in slots)
    weights = nbytes(abstract_decoder(config, DTYPE))
    return Step(
        target,
        policy,
        weights=(weights - config.vocab_size * config.hidden_size * DTYPE.itemsize) // DEVICES,
        cache=BATCH * sum(slots) * row // DEVICES,
        cycles=cost.cycles,
        copied=cost.copied_bytes,
        collectives=cost.collectives,
        blocks=-(-blocks // (DEVICES * block.together)),
        block_cycles=kernel.cycles,
        block_bytes=block.together * block.rows * row,
    )


def section(steps: Sequence[Step], compiled: int = COMPILED) -> str:
    """Markdown of the section, without its heading."""
    lines = [
        f"Llama 3.1 8B, {LAYERS} layers, bfloat16, {BATCH} rows of {PROMPT:,} tokens, compiled for {DEVICES} devices",
        f"of each chip (model axis {DEVICES}; a TPU7x's chip is two). Of one device:",
        "",
        "- limit: the time in which memory delivers what the step must read, the weights, but for the embedding table,",
        "  and the slots that the prompts leave, an even share each.",
        "- operations: the cycles that XLA's cost model for TPUs gives its products, fusions and copies, one after",
        "  another.",
        "- attention: of every block of the kernel, the cycles of its schedule or those in which memory delivers the",
        "  block, whichever are more.",
        "- ahead: weights that are copied to the chip's own memory while something else runs, at the memory's speed.",
    ]
    times = {"limit": "limit", "operations": "operations", "attention": "attention", "ahead": "copies"}
    times["together"] = "together"
    columns = [
        *(Column(name, name) for name in ("target", "policy")),
        *(Column(f"{name}, MB", name, lambda size: f"{size / 1e6:,.0f}") for name in ("weights", "cache")),
        *(Column(f"{title}, ms", name, "{:.2f}".format) for title, name in times.items()),
        Column("limit / together", lambda x: x.limit / x.together, "{:.0%}".format),
    ]
    few = [line.format(compiled, compiled - 1, LAYERS) for line in _FEW] if compiled < LAYERS else []
    return "\n".join([*lines, "", Table(columns, steps).markdown(), "", *_MEANING, *few, _COMMAND, ""])


_MEANING = (
    "These are a compiler's numbers; nothing ran. Parts are added as if none overlapped another, and two things are",
    "not in them: exchanges between the devices, two a layer and more, and the wait for a first byte of memory.",
    "Weights that are copied ahead arrive while products of others compute, so the more XLA copies ahead (on v5e and",
    "v6e most of them), the more the sum overstates. The cost model gives next to no operation less than 1,800",
    "cycles, a microsecond, however small: where a layer's bytes are few, the number of its operations counts, and",
    "that grows where heads differ in length and where a step evicts.",
    "",
    "XLA's own totals say less. For the step of 3 layers under `full` on v5e, `cost_analysis()` has 1.40 GB accessed,",
    "where weights and slots of one device are 0.70 GB, and `optimal_seconds` is -9.0.",
    "",
)
_FEW = (
    "Programs of {0} layers were compiled: what is scheduled between the attention of the first and of the last is",
    "that of {1} layers, and counts for the others of {2}. Compiled whole (`python -m tools.aot.step_limit --compiled",
    "{2} --targets tpu7x --policies full`), a TPU7x's step under `full` came to 3.22 ms: XLA copies more of a large",
    "program's weights ahead, 0.31 ms, and its operations take 1.75 ms.",
    "",
)
_COMMAND = "`python -m tools.aot.step_limit --page docs/kernels.md` writes this section."


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join(TOPOLOGIES), help="comma-separated; all by default")
    parser.add_argument("--policies", default=",".join(POLICIES), help="their names in the table, comma-separated")
    parser.add_argument("--compiled", type=int, default=COMPILED, help="layers of the programs that are compiled")
    parser.add_argument("--page", type=Path, help="the page; the section is printed if none is given")
    parser.add_argument("--results", type=Path, help="a file of the steps that were compiled already, to go on from")
    parser.add_argument("--tpu-python", default=str(ROOT / ".venv-aot-tpu/bin/python"))
    parser.add_argument("--here", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(dataclasses.asdict(measure(*json.loads(options.here)))))
        return
    held = json.loads(options.results.read_text()) if options.results and options.results.exists() else {}
    steps = []
    for target in options.targets.split(","):
        for policy in options.policies.split(","):
            key = f"{target} {policy} {options.compiled}"
            if key not in held:
                held[key] = _compiled(options.tpu_python, target, policy, options.compiled)
                print(held[key], file=sys.stderr)
            steps.append(Step(**held[key]))
            if options.results:
                options.results.write_text(json.dumps(held))
    deliver(options.page, HEADING, section(steps, options.compiled))


def _compiled(python: str, target: str, policy: str, layers: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        asked = json.dumps([target, policy, layers, folder])
        how = ("-m", "tools.aot.step_limit", "--here", asked)
        return json.loads(last_line(python, *how, settings=environment(Path(folder))))


if __name__ == "__main__":
    main()

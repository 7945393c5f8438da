"""Seconds to compile a whole model, ahead of time: Llama 3.1 8B's 32 layers, and the 80 of its 70B.

    python -m tools.aot.seconds --page docs/kernels.md

Each program is traced, lowered and compiled in a process of its own, ``--repeat`` times; of each stage the least is
reported, as seconds of the processor's time, of all threads and of the compiler's own processes. ``--page`` names a
page whose section of that name is replaced, or to whose end it is added.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvjax.tables import Column, Table
from tools.aot.kernels_page import deliver
from tools.aot.processes import ROOT, last_line

HEADING = "Seconds to compile a whole model"
#: Prompts and their tokens.
BATCH, PROMPT = 8, 8192
#: By target, its platform, the topology and the mesh: the fewest devices that hold the larger model in bfloat16.
TARGETS = {"v5e": ("tpu", "v5e:4x4", (1, 16)), "sm_90": ("gpu", "1x1x2", (1, 2))}
#: Model and number of its layers; the first two say what a layer takes, the second and third are compared.
MODELS = (("8B", 8), ("8B", 32), ("70B", 80))
PROGRAMS = ("decode", "prefill")
#: What reads a prompt: a program of one layer, which all layers share.
LAYER = "prefill_layer"
STAGES = ("trace", "lower", "compile")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%\S+ = ", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Measured:
    """A program of a model on a target.

    Attributes:
      seconds: of the processor, by stage. instructions: of the compiled module, those in fusions and loops among them.
    """

    target: str
    model: str
    layers: int
    program: str
    seconds: dict[str, float]
    instructions: int

    @property
    def name(self) -> str:
        return f"Llama 3.1 {self.model}, {self.layers} layers" + (" of it" if self.layers < 32 else "")

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def _processor() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(x.ru_utime + x.ru_stime for x in used)


def measure(target: str, model: str, layers: int, program: str) -> Measured:
    """Trace, lower and compile once, in the process that has the target's compiler."""
    import jax
    from jax.experimental import topologies

    from kvjax.policies.full import Full
    from tools.aot.targets import targets
    from tools.aot.whole_model import LLAMA_8B, LLAMA_70B, whole_model

    _, topology, mesh = TARGETS[target]
    where = dict(targets()[target].topology)
    where["topology_name" if where["platform"] == "tpu" else "topology"] = topology
    devices = topologies.get_topology_desc(**where).devices
    config = dataclasses.replace({"8B": LLAMA_8B, "70B": LLAMA_70B}[model], num_layers=layers)
    made = whole_model(config, devices, *mesh, Full(), batch=BATCH, prompt=PROMPT)
    seconds: dict[str, float] = {}

    def timed(stage: str, run: Callable[[], Any]) -> Any:
        began = _processor()
        found = run()
        seconds[stage] = _processor() - began
        return found

    with jax.sharding.use_abstract_mesh(made.mesh.abstract_mesh):
        traced = timed("trace", made.programs[program])
        lowered = timed("lower", traced.lower)
        compiled = timed("compile", lowered.compile)
    return Measured(target, model, layers, program, seconds, len(_INSTRUCTION.findall(compiled.as_text())))


def least(runs: Sequence[Measured]) -> Measured:
    """The fastest run's seconds of every stage."""
    return dataclasses.replace(runs[0], seconds={stage: min(x.seconds[stage] for x in runs) for stage in STAGES})


def section(results: Sequence[Measured], repeats: int) -> str:
    """Markdown of the section, without its heading."""
    meshes = ", ".join(f"{name} {a} x {b}" for name, (_, _, (a, b)) in TARGETS.items())
    by = {(x.target, x.program, x.model, x.layers): x.total for x in results}
    least = "" if repeats == 1 else f" The least of {repeats} runs."
    lines = [
        f"Decode (a chunk of steps) and prefill of {BATCH} prompts of {PROMPT:,} tokens, full cache, bfloat16,",
        f"on the fewest devices that hold 70B ({meshes}). Seconds of the processor, all threads together.{least}",
        f"Instructions are those of the compiled module. `{LAYER}` reads a prompt: all layers share it, and it embeds",
        "tokens and computes logits too.",
    ]

    def compared(x: Measured) -> float | None:
        of = by.get((x.target, x.program, "8B", 32))
        return x.total / of if of else None

    columns = [
        *(Column(title, name) for title, name in (("target", "target"), ("program", "program"), ("model", "name"))),
        *(Column(stage, lambda x, stage=stage: x.seconds[stage], "{:.1f}".format) for stage in STAGES),
        Column("together", "total", "{:.1f}".format),
        Column("x 32 layers", compared, "{:.2f}".format),
        Column("instructions", "instructions", "{:,}".format),
    ]
    added = [
        f"{(by[target, program, '8B', 32] - by[target, program, '8B', 8]) / 24:.2f} s ({target}, {program})"
        for target, program in dict.fromkeys((x.target, x.program) for x in results if x.program != LAYER)
    ]
    return "\n".join(
        [
            *lines,
            "",
            Table(columns, results).markdown(),
            "",
            *_REASON,
            f"A layer of 8B adds {', '.join(added)}.",
            "",
            _COMMAND.format(repeats),
            "",
        ]
    )


_REASON = (
    "Prompts are read by one program a kind of layer, so 80 layers compile like 32; by a program of all of them under",
    "policies that treat most layers differently, or on a mesh read a prompt twice. Of programs of all layers 80 take",
    "more than 1.5 times as long as 32, all of it in the compiler. Layers that are alike are traced and lowered once,",
    "whatever their number. The compiler is given every layer by itself, as it will run, each with its own weights and",
    "pages, and its time follows the number of instructions. A loop over layers would be compiled once, but slice or",
    "copy what a layer reads in every step: decoding so was 3.5 to 6 times slower on a CPU. Compiled programs are",
    "kept, and `kvjax warm` compiles ahead.",
)
_COMMAND = "`python -m tools.aot.seconds --repeat {} --page docs/kernels.md` writes this section."


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join(TARGETS), help="comma-separated; all by default")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--page", type=Path, help="the page; the section is printed if none is given")
    parser.add_argument("--tpu-python", default=str(ROOT / ".venv-aot-tpu/bin/python"))
    parser.add_argument("--gpu-python", default=str(ROOT / ".venv-aot-gpu/bin/python"))
    parser.add_argument("--here", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(dataclasses.asdict(measure(*json.loads(options.here)))))
        return
    results = []
    for target in options.targets.split(","):
        python = getattr(options, f"{TARGETS[target][0]}_python")
        for program in (*PROGRAMS, LAYER):
            for model, layers in MODELS[program == LAYER :]:
                asked = json.dumps([target, model, layers, program])
                lines = [last_line(python, "-m", "tools.aot.seconds", "--here", asked) for _ in range(options.repeat)]
                results.append(least([Measured(**json.loads(line)) for line in lines]))
                print(results[-1], file=sys.stderr)
    deliver(options.page, HEADING, section(results, options.repeat))


if __name__ == "__main__":
    main()

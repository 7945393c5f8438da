"""Compile Llama 3.1 8B's shape for real TPU topologies, a decode step, a prefill and a question under Round Attention,
and write the page of results.

    python -m tools.aot.mesh --tpu-python .venv-aot-tpu/bin/python --layers 32 --out docs/sharding.md

No hardware is needed: the Python named, this one if none is, has a TPU's compiler installed or finds it in ``.libtpu``,
where scripts/fetch_libtpu.py puts it. Ends with 1 when XLA's own memory analysis and ``kvjax.plan`` differ by more than
3 %, when a decode step has a collective, but for the logits, as large as a tenth of one layer's cache, or when a device
does not bring its own share of a round, and no more, from host memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from tools.aot.mesh_page import (
    NEW,
    PREFILL_LAYERS,
    PREFILL_MESHES,
    PREFILLS,
    PREFILLS_ON,
    PROMPT,
    TOLERANCE,
    judged,
    peak_off,
    render,
)
from tools.aot.mesh_sizes import BATCH
from tools.aot.processes import last_line, versions

#: Topology, data axis, model axis, policy; 8 KV heads on 16 devices share their pages by two.
CASES = (
    ("v5e:4x4", 2, 8, "full"),
    ("v5e:4x4", 4, 4, "lagkv:ratio=0.25"),
    ("v5e:4x4", 1, 16, "full"),
    ("v5e:4x4", 2, 8, "razor:heads=0.1+0.6+1.3+2.0+3.2+3.5+3.7"),
    ("v5p:2x2x2", 1, 8, "full"),
    ("v5p:2x2x2", 2, 4, "h2o:ratio=0.25"),
)


def compile_case(
    topology: str, data: int, model: int, policy: str, layers: int, only: str = "", plan_only: bool = False
) -> dict[str, Any]:
    """The plan of a case, and XLA's analysis of its programs; in the process that has the TPU's compiler."""
    import jax
    from jax.experimental import topologies

    from kvjax.planning import plan
    from kvjax.policies import parse
    from kvjax.sharding.hlo_collectives import collectives
    from tools.aot.whole_model import DTYPE, LLAMA_8B, whole_model

    config = dataclasses.replace(LLAMA_8B, num_layers=layers)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    made = whole_model(config, devices, data, model, parse(policy), batch=BATCH, prompt=PROMPT)
    result: dict[str, Any] = {}
    with jax.sharding.use_abstract_mesh(made.mesh.abstract_mesh):
        planned = plan(
            config, prompt_tokens=PROMPT, batch=BATCH, policy=made.device.policy, max_new_tokens=NEW, dtype=DTYPE,
            storage=made.storage, memory_limit=1 << 50, mesh=made.device.mesh,
        )  # fmt: skip
        for name, program in () if plan_only else made.programs.items():
            if name == "prefill_layer" or only not in ("", name):
                continue
            began = time.perf_counter()
            if name == "prefill" and made.by_layers:
                every = [trace().lower().compile() for trace in made.layers]
                compiled = max(every, key=lambda each: each.memory_analysis().peak_memory_in_bytes)
            else:
                compiled = program().lower().compile()
            memory = compiled.memory_analysis()
            peak = memory.peak_memory_in_bytes
            if name == "prefill" and made.by_layers:
                # Beside a layer's program are the other layers' weights and caches.
                x = BATCH // data * PROMPT * (config.hidden_size * DTYPE.itemsize + 4)  # and the tokens
                peak += planned.weights_bytes - (memory.argument_size_in_bytes - x)
                peak += planned.cache_bytes // layers * (layers - 1)
            result[name] = {
                "arguments": memory.argument_size_in_bytes,
                "results": memory.output_size_in_bytes,
                "aliased": memory.alias_size_in_bytes,
                "temporary": memory.temp_size_in_bytes,
                "peak": peak,
                "collectives": collectives(compiled.as_text()),
                "seconds": time.perf_counter() - began,
            }
    pool_bytes = planned.cache_bytes // layers
    sizes = {"layer_bytes": pool_bytes, "logits_bytes": BATCH // data * config.vocab_size * 4}
    return result | {"plan": {name: getattr(planned, name) for name in _PLANNED}} | sizes


_PLANNED = ("weights_bytes", "cache_bytes", "prefill_peak_bytes", "total_bytes", "cache_over_even")


def _here(options: argparse.Namespace) -> None:
    """Compile one case in this process and print it."""
    case = json.loads(options.here)
    if "policy" in case:
        print(json.dumps(compile_case(**case, layers=options.layers, plan_only=options.plan_only)))
    else:
        from tools.aot.mesh_rounds import compile_rounds

        print(json.dumps(compile_rounds(**case, layers=options.layers)))


def _compile(python: str, case: dict[str, Any], layers: int, *flags: str) -> dict[str, Any]:
    how = ("-m", "tools.aot.mesh", "--layers", str(layers), "--here", json.dumps(case))
    return case | json.loads(last_line(python, *how, *flags))


def _known(python: str, case: dict[str, Any], layers: int, results: Path | None) -> dict[str, Any]:
    """A case from the file of results, with the plan as it is now; compiled, and added, where it is not there."""
    file = json.loads(results.read_text()) if results is not None and results.exists() else {}
    key = json.dumps([case, layers])
    if key in file:
        return file[key] | (_compile(python, case, layers, "--plan-only") if "policy" in case else {})
    made = _compile(python, case, layers)
    print(f"{case}: compiled", file=sys.stderr)
    if results is not None:
        results.write_text(json.dumps(file | {key: made}))
    return made


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--cases", default="", help="numbers of the cases, comma-separated; all by default")
    parser.add_argument("--out", type=Path, help="the page; printed if not given")
    parser.add_argument("--tpu-python", default=sys.executable)
    parser.add_argument("--results", type=Path, help="a file of what was compiled already, to go on from")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    parser.add_argument("--plan-only", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        return _here(options)
    chosen = [int(n) for n in options.cases.split(",") if n] or range(len(CASES))
    names: tuple[str, ...] = ("topology", "data", "model", "policy")
    cases: list[dict[str, Any]] = [dict(zip(names, CASES[n], strict=True)) for n in chosen]
    results = [_known(options.tpu_python, case, options.layers, options.results) for case in cases]
    prefills = (
        [
            _known(
                options.tpu_python,
                dict(zip(names, (PREFILLS_ON, *mesh, policy), strict=True)) | {"only": "prefill"},
                PREFILL_LAYERS,
                options.results,
            )
            for policy in PREFILLS
            for mesh in PREFILL_MESHES
        ]
        if not options.cases
        else []
    )
    meshes = {(case["topology"], case["data"], case["model"]) for case in cases}
    rounds = [
        _known(options.tpu_python, dict(zip(names[:3], mesh, strict=True)), options.layers, options.results)
        for mesh in sorted(meshes)
    ]
    found = versions(options.tpu_python, "jax", "libtpu")
    flags = f"--layers {options.layers}" + (f" --cases {options.cases}" if options.cases else "")
    page = render(
        results,
        prefills,
        rounds,
        flags,
        options.layers,
        ", ".join(f"{name} {version}" for name, version in found.items()),
    )
    if options.out is None:
        print(page)
    else:
        options.out.write_text(page)
    broken = [f"{x['topology']} {x['policy']}: {line}" for x in results for line in judged(x)["broken"]]
    broken += [f"{x['policy']}: prefill {peak_off(x):+.1%}" for x in prefills if abs(peak_off(x)) > TOLERANCE]
    moved = [(case, case["programs"]["one round to the device"]["host"]) for case in rounds]
    broken += [f"{x['topology']}: a device brings {n} bytes of a round" for x, n in moved if n != x["round_share"]]
    for line in broken:
        print(line, file=sys.stderr)
    raise SystemExit(bool(broken))


if __name__ == "__main__":
    main()

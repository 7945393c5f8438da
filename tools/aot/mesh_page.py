"""The page that ``tools.aot.mesh`` writes, and what on it breaks a limit."""

from __future__ import annotations

from typing import Any

from tools.aot.mesh_rounds import BATCH, QUESTION, ROUND, SEEN, SELECTED

#: And prefill alone, of policies that the cases above have not.
PREFILLS = (
    "streamingllm:ratio=0.25",
    "compensated:budget=8192",
    "snapkv:ratio=0.25",
    "pyramidkv:ratio=0.25",
    "slimkv:ratio=0.25",
    "nacl:ratio=0.25",
    "keydiff:ratio=0.25",
    "expected_attention:ratio=0.25",
    "tova:ratio=0.25",
    "ahakv:ratio=0.25",
)
PREFILLS_ON, PREFILL_MESHES, PREFILL_LAYERS = "v5e:4x4", ((2, 8), (4, 4)), 4
PROMPT, NEW = 32768, 256
TOLERANCE = 0.03


def _gib(size: float) -> str:
    return f"{size / 2**30:.3f}"


def peak_off(case: dict[str, Any]) -> float:
    """How far XLA's peak memory of prefill is from the plan's total."""
    return case["prefill"]["peak"] / case["plan"]["total_bytes"] - 1


def judged(case: dict[str, Any]) -> dict[str, Any]:
    """XLA's totals beside the plan's, and what breaks a limit."""
    plan, decode, prefill = case["plan"], case["decode"], case["prefill"]
    steady = decode["arguments"] + decode["results"] - decode["aliased"]
    peak = prefill["peak"]
    off = {
        "decode": steady / (plan["weights_bytes"] + plan["cache_bytes"]) - 1,
        "prefill": peak_off(case),
    }
    # What is planned and not needed refuses too much; what is needed and not planned ends a job.
    least = {"decode": -TOLERANCE, "prefill": -0.25}
    broken = [
        f"{name} {value:+.1%} beside the plan" for name, value in off.items() if not least[name] <= value <= TOLERANCE
    ]
    # The logits are gathered in every step, whatever the cache; nothing else may be a tenth of one layer's.
    large = [c for c in decode["collectives"] if c[3] >= case["layer_bytes"] / 10 and c[3] != case["logits_bytes"]]
    broken += [f"a decode step's {kind} of {size} bytes" for kind, _, _, size in large]
    return {"steady": steady, "peak": peak, "off": off, "broken": broken}


def _prefills(cases: list[dict[str, Any]]) -> list[str]:
    lines = [
        "## Prefill of every policy",
        "",
        f"XLA's peak memory of prefill compared with the plan's total, {PREFILL_LAYERS} layers, {PREFILLS_ON}.",
        "",
        f"| policy | {' | '.join(f'{data} x {model}' for data, model in PREFILL_MESHES)} |",
        f"| --- |{' --- |' * len(PREFILL_MESHES)}",
    ]
    for policy in PREFILLS:
        offs = [peak_off(case) for case in cases if case["policy"] == policy]
        lines.append(f"| {policy} | {' | '.join(f'{off:+.2%}' for off in offs)} |")
    return [*lines, ""]


def render(
    results: list[dict[str, Any]],
    prefills: list[dict[str, Any]],
    rounds: list[dict[str, Any]],
    options: str,
    layers: int,
    versions: str,
) -> str:
    """The page."""
    lines = [
        "# A model on many devices, as XLA's TPU compiler sees it",
        "",
        f"Llama 3.1 8B's shape, {layers} layers, bfloat16, batch {BATCH}, prompts of {PROMPT:,} tokens and {NEW} new",
        "ones, compiled ahead of time for real topologies; nothing here was run. GiB per device. Steady: the arguments",
        "and results of a decode program, donated buffers counted once; off compares it with the plan's weights and",
        "cache. Peak: XLA's peak memory of prefill; off compares it with the plan's total. Where prompts are read by",
        "programs of one layer it is that of the largest, with the weights and caches of the other layers; plans are",
        "of a program of all layers, and so ask for more than RazorAttention needs. Even: the cache's bytes on a",
        "device divided by an even share of a single device's cache.",
        "The plan's model of prefill on TPUs was fitted to the first of these rows and to h2o's; what RazorAttention",
        "packs, and what LagKV computes for every token, are counted with factors fitted to their rows.",
        "",
        "| topology | data x model | policy | weights | cache | even | steady, XLA | off | peak, XLA | off |"
        " temporary, decode |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case in results:
        plan, found = case["plan"], judged(case)
        cells = [
            case["topology"],
            f"{case['data']} x {case['model']}",
            case["policy"],
            _gib(plan["weights_bytes"]),
            _gib(plan["cache_bytes"]),
            f"{plan['cache_over_even']:.3f}",
            _gib(found["steady"]),
            f"{found['off']['decode']:+.2%}",
            _gib(found["peak"]),
            f"{found['off']['prefill']:+.2%}",
            _gib(case["decode"]["temporary"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## Collectives of a decode step", ""]
    for case in results:
        lines += [
            f"{case['topology']}, {case['data']} x {case['model']}, {case['policy']}; one layer's cache on a device is "
            f"{case['layer_bytes']:,} bytes:",
            "",
            "| collective | result | in the program | bytes |",
            "| --- | --- | --- | --- |",
        ]
        for kind, name, times, size in case["decode"]["collectives"]:
            lines.append(f"| {kind} | `{name}` | {times} | {size:,} |")
        lines.append("")
    lines += _prefills(prefills) if prefills else []
    lines += [
        "## Round Attention",
        "",
        f"A question of {QUESTION} tokens a row, {BATCH} rows, after {SEEN:,} tokens each, that selects rounds of "
        f"{SELECTED:,} in all;",
        f"half of the {layers} layers are below the watershed. Bytes are per device. A round, one row's {ROUND}",
        "tokens, is an array in `pinned_host` memory, sharded over the devices of its row; each device copies its own",
        "shard.",
        "Where the number of heads is not divisible by that of devices (1 x 16), a head's slots are sharded, and",
        "gathered on the devices.",
        "",
        "| topology | data x model | program | in host memory | arguments | results | donated | temporary |"
        " largest collective |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case in rounds:
        for name, found in case["programs"].items():
            sizes = [f"{found[size]:,}" for size in ("host", "arguments", "results", "aliased", "temporary")]
            largest = found["collectives"][:1]
            sent = f"{largest[0][0]} `{largest[0][1]}`" if largest else "none"
            cells = [case["topology"], f"{case['data']} x {case['model']}", name, *sizes, sent]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{versions}. `python -m tools.aot.mesh {options}` writes this page.", ""])

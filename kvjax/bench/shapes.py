"""Decode speed of a model's shape with random weights: what an accelerator machine without any weights can measure.

``kvjax bench decode`` and ``python -m kvjax.bench.shapes`` run it; the latter needs jax, flax and numpy alone, and on
a CPU psutil. Caches are filled with random keys and values, as after prompts of the given length, so nothing is
prefilled. Random weights have no profile, so two policies are given what a profile would say:

* RazorAttention the heads it protects, spread evenly over layers and heads: as many as hold half of its ``ratio``, or
  without one the 15 % of [1] (14 % by induction, 1 % by echo score);
* Round Attention its watershed, 45 % of the layers. Its cache is the one that an answer is decoded from: all of
  the context below the watershed, above it the ``top`` fraction, which a question has brought to the device. How long
  that transfer takes is no part of a step, and is what ``kvjax compare-rounds`` measures.

[1] RazorAttention, arXiv 2407.15891.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax.tables import Column, Report, Table, human_bytes, milliseconds
from pallas_kernels.bench.bare import stand_in

if TYPE_CHECKING:
    from kvjax.cache.cache import Cache
    from kvjax.model.config import ModelConfig
    from kvjax.model.decoder import Decoder
    from kvjax.policies import Policy
    from kvjax.policies.profile import FilterProfile, GateProfile, ModelShape, ScorerProfile
    from kvjax.policies.razor import RazorAttention

#: The fraction of the tokens that policies keep by default.
FRACTION = 0.125
#: Of a model without a profile: KV heads that RazorAttention protects, and layers below Round Attention's watershed
#: (calibrated, 13 of SmolLM2-135M's 30 and 12 of Qwen2.5-Coder-0.5B's 24).
_RETRIEVAL, _BELOW = 0.15, 0.45
#: Slots for decoded tokens.
_ROOM = 256


@dataclasses.dataclass(frozen=True)
class ShapeRow:
    """One policy at one batch and context.

    ``step_bytes`` is what a step must read, the weights and the live cache; ``read_per_second`` is that over the step.
    ``note`` says why a row has no numbers.
    """

    batch: int
    context: int
    policy: str
    tokens_per_second: float = 0.0
    step_seconds: float = 0.0
    cache_bytes: int = 0
    step_bytes: int = 0
    note: str = ""

    @property
    def read_per_second(self) -> float:
        return self.step_bytes / self.step_seconds if self.step_seconds else 0.0


def shapes() -> dict[str, ModelConfig]:
    """Shapes by name."""
    from kvjax.model.config import ModelConfig, RopeConfig

    return {
        "llama-3.1-8b": ModelConfig(
            family="llama",
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            max_position=131072,
            rope=RopeConfig(theta=500000.0, kind="llama3", factor=8.0, original_max_position=8192),
        ),
        "smollm2-135m": ModelConfig(
            family="llama",
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_layers=30,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            max_position=8192,
            rope=RopeConfig(theta=100000.0),
            tie_embeddings=True,
        ),
        "tiny": ModelConfig(
            family="llama",
            vocab_size=256,
            hidden_size=32,
            intermediate_size=64,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            max_position=4096,
        ),
    }


def every_policy() -> tuple[str, ...]:
    """All tokens, and each registered policy with an eighth of them."""
    from kvjax.policies import registry

    found = []
    for name, kind in registry().items():
        size = next((x.name for x in dataclasses.fields(kind) if x.name in ("ratio", "top")), None)
        found.append(name if size is None else f"{name}:{size}={FRACTION}")
    return tuple(found)


def with_profile(policy: Policy, config: ModelConfig) -> Policy:
    """The policy with what a profile would say of a model that has none; see above.

    Raises:
      UsageError: it cannot run on this model.
    """
    from kvjax.policies.best import resolve
    from kvjax.policies.duo import DuoAttention
    from kvjax.policies.learned import Learned
    from kvjax.policies.profile import FilterProfile, GateProfile, ScorerProfile
    from kvjax.policies.profile_files import packaged
    from kvjax.policies.qfilters import QFilters
    from kvjax.policies.razor import RazorAttention
    from kvjax.policies.round_attention import RoundAttention
    from kvjax.policies.window_layers import for_model

    policy = resolve(policy, config, later=False).policy
    if isinstance(policy, RazorAttention) and policy.profile is None and policy.heads is None:
        policy = dataclasses.replace(policy, heads=_spread_heads(policy, config))
    if isinstance(policy, RoundAttention) and policy.profile is None and policy.watershed is None:
        below = min(max(round(_BELOW * config.num_layers), 1), config.num_layers - 1)
        policy = dataclasses.replace(policy, watershed=below)
    if isinstance(policy, QFilters) and policy.profile is None and packaged(FilterProfile, config) is None:
        policy = dataclasses.replace(policy, profile=_any_filters(config))
    if isinstance(policy, Learned) and policy.profile is None and packaged(ScorerProfile, config) is None:
        policy = dataclasses.replace(policy, profile=_any_scorer(config))
    if isinstance(policy, DuoAttention) and policy.profile is None and packaged(GateProfile, config) is None:
        policy = dataclasses.replace(policy, profile=_any_gates(config))
    policy = for_model(policy, config)
    policy.check(config)
    return policy


def _any_gates(config: ModelConfig) -> GateProfile:
    """Gates that make retrieval heads of a few in every layer."""
    from kvjax.policies.profile import GateProfile

    shape = _chosen_shape(config)
    row = tuple(1 / (head + 1) for head in range(shape.num_kv_heads))
    return GateProfile("any", shape, tokens=1, steps=1, sink=0, recent=1, gates=(row,) * shape.num_layers)


def _chosen_shape(config: ModelConfig) -> ModelShape:
    """The shape of a profile of this model: that of its global layers."""
    from kvjax.policies.full import Full
    from kvjax.policies.profile import ModelShape
    from kvjax.policies.window_layers import for_model

    return ModelShape.of(for_model(Full(), config).seen_as(config))


def _any_scorer(config: ModelConfig) -> ScorerProfile:
    """A linear map for every KV head; which one makes no difference to the time."""
    import numpy as np

    from kvjax.policies.profile import ScorerProfile, packed_numbers

    shape = _chosen_shape(config)
    row = np.cos(np.arange(shape.num_kv_heads * (shape.hidden_size + 1)))
    weights = packed_numbers(np.broadcast_to(row, (shape.num_layers, row.size)))
    return ScorerProfile("any", shape, texts=1, tokens=1, steps=1, correlation=0.0, weights=weights)


def _any_filters(config: ModelConfig) -> FilterProfile:
    """A direction for every KV head; which one makes no difference to the time."""
    from kvjax.policies.profile import FilterProfile

    shape = _chosen_shape(config)
    row = tuple(math.cos(i) for i in range(shape.num_kv_heads * shape.head_dim))
    return FilterProfile("any", shape, pieces=1, tokens=1, filters=(row,) * shape.num_layers)


def _spread_heads(policy: RazorAttention, config: ModelConfig) -> tuple[tuple[int, int], ...]:
    """KV heads: one of every layer before a second one of any, and not of all layers the same."""
    layers, heads = config.num_layers, config.num_kv_heads
    left, found = int(layers * heads * (_RETRIEVAL if policy.ratio is None else policy.ratio / 2)), []
    for turn in range(heads):
        count = min(left - turn * layers, layers)
        for layer in (i * layers // count for i in range(count)):
            found.append((layer, (layer + layer // heads + turn) % heads))
    return tuple(found)


def measure(
    shape: str,
    batches: Sequence[int],
    contexts: Sequence[int],
    policies: Sequence[str] = (),
    *,
    dtype: str = "bfloat16",
    rounds: int = 5,
    steps: int = 32,
    say: Callable[[str], None] = lambda _: None,
) -> list[ShapeRow]:
    """Decode steps of every policy, batch and context; a case the device has no memory for gets a note.

    ``policies`` are :func:`every_policy` by default.

    Raises:
      UsageError: an unknown shape or policy, or a size that makes no sense.
    """
    import jax
    import jax.numpy as jnp

    from kvjax.array_bytes import nbytes
    from kvjax.checks import float_dtype, whole_number
    from kvjax.errors import UsageError, quoted
    from kvjax.model.decoder import random_decoder
    from kvjax.model.tiling import tiled
    from kvjax.policies import parse

    known = shapes()
    dtype = float_dtype(dtype).name
    if shape not in known:
        raise UsageError(f"shape is {quoted(shape)}; there are {', '.join(known)}.")
    config = known[shape]
    parsed = {text: with_profile(parse(text), config) for text in policies or every_policy()}
    for name, values in {"batch": batches, "context": contexts, "rounds": [rounds]}.items():
        if not values:
            raise UsageError(f"{name} is empty; give at least one number.")
        for value in values:
            whole_number(name, value, 1)
    whole_number("steps", steps, 1, 64)  # the tokens one compiled call makes
    if max(contexts) > config.max_position:
        raise UsageError(f"context {max(contexts)} is beyond the shape's {config.max_position} tokens.")
    likeness = jax.eval_shape(lambda: random_decoder(config, dtype=jnp.dtype(dtype)))
    weights = nbytes(likeness)
    cases = [(batch, context, text) for batch in batches for context in contexts for text in parsed]
    notes = [
        _too_large(weights + _needed(config, dtype, parsed[text], batch, context)) for batch, context, text in cases
    ]
    params: Any = None
    if not all(notes):
        say(f"{shape}: random weights")
        params = jax.tree.map(tiled, random_decoder(config, dtype=jnp.dtype(dtype)))
    rows = []
    for (batch, context, text), note in zip(cases, notes, strict=True):
        if note is not None:
            rows.append(ShapeRow(batch, context, text, note=note))
            continue
        say(f"batch {batch}, context {context}, {text}")
        rows.append(_case(params, text, parsed[text], batch, context, rounds, steps))
        jax.clear_caches()
    return rows


def _too_large(needed: int) -> str | None:
    """Why a case is not measured that needs so many bytes, where the device does not have them."""
    there = _memory()
    if there is None or needed <= there:
        return None
    return f"needs {human_bytes(needed)}, the device has {human_bytes(there)}"


def _case(params: Decoder, text: str, policy: Policy, batch: int, context: int, rounds: int, steps: int) -> ShapeRow:
    import jax

    from kvjax.runtime.synthetic import benchmark_controls, decode_state, run_steps, weight_bytes_per_step

    config = params.config
    row = ShapeRow(batch, context, text)
    cache = jax.block_until_ready(_filled(config, policy, batch, context, params.dtype))
    held, live = cache.nbytes, cache.live_nbytes
    state, controls, seconds = decode_state(config, cache), benchmark_controls(config, batch), []
    del cache
    for turn in range(rounds + 1):
        state, taken = run_steps(params, state, controls, steps)
        if turn:  # the first compiles
            seconds.append(taken)
    step = statistics.median(seconds)
    read = weight_bytes_per_step(params) + live
    return dataclasses.replace(
        row, tokens_per_second=batch / step, step_seconds=step, cache_bytes=held, step_bytes=read
    )


def _filled(config: ModelConfig, policy: Policy, batch: int, context: int, dtype: Any) -> Cache:
    """A cache as after a prompt; where a policy offloads rounds, as after a question."""
    from kvjax.policies import Full
    from kvjax.policies.split_cache import SplitCache
    from kvjax.runtime.synthetic import filled_cache

    placed = policy.answering(config, context)
    if not isinstance(placed, SplitCache):
        return filled_cache(config, policy, batch, context, dtype, new_capacity=_ROOM)

    def layers(count: int, tokens: int) -> Cache:
        part = dataclasses.replace(config, num_layers=count)
        return filled_cache(part, Full(), batch, tokens, dtype, new_capacity=_ROOM)

    lower = layers(placed.watershed, context)
    upper = layers(config.num_layers - placed.watershed, placed.upper_capacity)
    return lower.replace(layers=lower.layers + upper.layers, policy=placed)


def _needed(config: ModelConfig, dtype: str, policy: Policy, batch: int, context: int) -> int:
    """Bytes of the cache, and of the random rows of one layer that fill it."""
    import jax
    import jax.numpy as jnp

    from kvjax.array_bytes import nbytes
    from kvjax.policies.empty_cache import empty_cache

    placed = policy.answering(config, context)
    cache = jax.eval_shape(lambda: empty_cache(config, placed, batch, context, _ROOM, jnp.dtype(dtype)))
    return nbytes(cache) + 6 * batch * config.num_kv_heads * context * config.head_dim * 4


def _memory() -> int | None:
    import jax

    device = jax.local_devices()[0]
    if device.platform == "cpu":
        import psutil

        return int(psutil.virtual_memory().total)
    return (device.memory_stats() or {}).get("bytes_limit")


def facts(shape: str, dtype: str) -> dict[str, Any]:
    """The facts that the numbers depend on."""
    import jax
    import numpy as np

    device = jax.local_devices()[0]
    return {
        "shape": shape,
        "dtype": dtype,
        "device": device.device_kind,
        "jax": jax.__version__,
        "numpy": np.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def report(rows: Sequence[ShapeRow], about: dict[str, Any]) -> Report:
    """The table, and what it depends on."""
    columns = (
        *(Column(name, name) for name in ("batch", "context", "policy")),
        Column("tokens/s", "tokens_per_second", "{:.1f}".format),
        Column("step", "step_seconds", milliseconds),
        # One unit each, to be compared down the column.
        Column("cache", lambda row: f"{row.cache_bytes / 1e9:.2f} GB"),
        Column("read per second", lambda row: f"{row.read_per_second / 1e9:.0f} GB/s"),
    )
    table = Table(columns, rows, note=lambda row: row.note or None, labels=3)
    facts = "; ".join(f"{name} {value}" for name, value in about.items()) + "."
    return Report([table, facts], {"about": about, "rows": [dataclasses.asdict(row) for row in rows]})


def main(arguments: Sequence[str] | None = None) -> int:
    """The command of a bare machine."""
    parser = argparse.ArgumentParser(prog="python -m kvjax.bench.shapes", description=__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--context", default="32768")
    parser.add_argument("--policy", action="append")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    stand_in()
    from kvjax.errors import KvjaxError
    from kvjax.files import write_atomically

    try:
        batches, contexts = ([int(x) for x in text.split(",")] for text in (given.batch, given.context))
        chosen = tuple(given.policy or ())
        say = lambda what: print(f"kvjax bench: {what}", file=sys.stderr, flush=True)  # noqa: E731
        rows = measure(given.shape, batches, contexts, chosen, dtype=given.dtype, rounds=given.rounds, say=say)
    except (KvjaxError, ValueError) as error:
        print(f"kvjax bench: {error}", file=sys.stderr)
        return 2
    found = report(rows, facts(given.shape, given.dtype))
    found.print(markdown=True)
    if given.json is not None:
        write_atomically(given.json, found.json())
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Operations that ``tune`` can tune: their problems, the sizes worth trying, and one step with given sizes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels import tuned
from pallas_kernels.attention_mass import api as mass
from pallas_kernels.attention_mass.mass_problem import Counting
from pallas_kernels.bench import chunk_inputs, decode_inputs
from pallas_kernels.bench.chunk_inputs import Chunk
from pallas_kernels.bench.decode_inputs import Sizes
from pallas_kernels.prefill import api as prefill
from pallas_kernels.ragged_decode import api as decode

#: Keys of the prompts whose last queries are a chunk: one below and one above the limit in the default rules.
TOKENS = (4096, 32768)


class Operation:
    """An operation whose block sizes can be tuned.

    Attributes:
      name: as on the command line.
      order: its implementations that have sizes, for each platform.
      arrays: fields of its problem that are arguments of a timed step, the queries first (see ``timing.loop``).
      queries: queries of the chunks that it is tuned for by default; empty for decode steps.
    """

    name: ClassVar[str]
    order: ClassVar[Mapping[str, Sequence[str]]]
    arrays: ClassVar[tuple[str, ...]]
    queries: ClassVar[tuple[int, ...]] = ()

    def problem(self, sizes: Any) -> Any:
        """The problem of these sizes, with random arrays."""
        raise NotImplementedError

    def run(self, p: Any, implementation: str, **options: Any) -> jax.Array:
        """Run an implementation on a problem; returns a result of the queries' shape."""
        raise NotImplementedError

    def arguments(self, p: Any) -> tuple[Any, ...]:
        """The problem's arrays, which :meth:`step` takes."""
        return tuple(getattr(p, name) for name in self.arrays)

    def step(self, p: Any, implementation: str, **options: Any) -> Callable[..., jax.Array]:
        """The operation as a function of :meth:`arguments`."""

        def step(*arrays: Any) -> jax.Array:
            given = dataclasses.replace(p, **dict(zip(self.arrays, arrays, strict=True)))
            return self.run(given, implementation, **options)

        return step

    def candidates(self, p: Any, implementation: str) -> list[Any]:
        """Sizes worth trying, the kernel's own default first.

        Raises:
          NotImplementedError: the implementation cannot do this on this device.
        """
        found = getattr(self, f"_{implementation}", None)
        if found is None:
            raise ValueError(f"{implementation} has no sizes to tune.")
        return found(p)


def _of_accelerators(order: Mapping[str, Sequence[str]]) -> Mapping[str, Sequence[str]]:
    """The forms with sizes: a CPU's have none."""
    return {platform: names for platform, names in order.items() if platform != "cpu"}


class RaggedDecode(Operation):
    """One query per row over paged, ragged heads."""

    name = "ragged_decode"
    order = _of_accelerators(decode.IMPLEMENTATIONS.order)
    arrays = ("q", "pages", "length", "k_scale", "v_scale")

    def problem(self, sizes: Sizes) -> Any:
        return decode_inputs.make(sizes)

    def run(self, p: Any, implementation: str, **options: Any) -> jax.Array:
        return decode.IMPLEMENTATIONS[implementation](p, **options).out

    def _mosaic_gpu(self, p: Any) -> list[Any]:
        from pallas_kernels.ragged_decode.mosaic_gpu import MosaicGpuConfig

        return _grid(MosaicGpuConfig.of(p), pages=(2, 4, 8, 16, 32), stages=(2, 3, 4, 6))

    def _triton(self, p: Any) -> list[Any]:
        from pallas_kernels.ragged_decode.triton import TritonConfig

        pages = sorted({max(slots // p.pages.shape[2], 1) for slots in (128, 256, 512, 1024, 2048)})
        return _grid(TritonConfig.of(p), pages=pages, block=(32, 64, 128), warps=(2, 4, 8), stages=(2, 3, 4))

    def _tpu(self, p: Any) -> list[Any]:
        from pallas_kernels.ragged_decode.tpu_sizes import TpuConfig

        _, _, page_size, head_dim = p.pages.shape
        rule = TpuConfig.default(jax.devices()[0].device_kind, page_size, head_dim, p.pages.dtype)
        rows = (256, 512, 1024, 2048)
        found = _grid(rule, rows=rows, buffers=(8, 16), together=(1, 2))
        return list(dict.fromkeys([*found, *_grid(dataclasses.replace(rule, together=1), rows=rows, buffers=(4,))]))


class Prefill(Operation):
    """A chunk's attention."""

    name = "prefill"
    order = _of_accelerators(prefill.IMPLEMENTATIONS.order)
    arrays = ("q", "k", "v", "offset")
    queries = (64, 256, 1024)

    def problem(self, sizes: Chunk) -> Any:
        return chunk_inputs.prefill_problem(sizes)

    def run(self, p: Any, implementation: str, **options: Any) -> jax.Array:
        return prefill.IMPLEMENTATIONS[implementation](p, **options).out

    def _triton(self, p: Any) -> list[Any]:
        from pallas_kernels.prefill.triton import Config

        return _grid(Config.default(p), queries=(32, 64, 128), keys=(32, 64, 128), warps=(4, 8), stages=(2, 3, 4))

    def _tpu(self, p: Any) -> list[Any]:
        from pallas_kernels.prefill import tpu

        return _tiles_grid(p, tpu.rule(p), lambda config: tpu.Tiles.of(p.q, p.k, config))


class LogSumExp(Operation):
    """The normalisers of a window or a chunk."""

    name = "log_sum_exp"
    order = _of_accelerators(mass.LOG_SUM_EXP.order)
    arrays = ("q", "k", "offset", "scale")
    queries = (32, 1024)

    def problem(self, sizes: Chunk) -> Any:
        return chunk_inputs.mass_problem(sizes)

    def run(self, p: Any, implementation: str, **options: Any) -> jax.Array:
        lse = mass.LOG_SUM_EXP[implementation](p, **options)
        return jnp.broadcast_to(lse[..., None], p.q.shape)

    def _triton(self, p: Any) -> list[Any]:
        from pallas_kernels.attention_mass.triton import Config

        # The keys are split among programs for a window, which has few programs; for a chunk that is optional.
        split = (512, 1024, 2048) if p.q.shape[3] <= 64 else (None, 2048)
        return _grid(Config.default(p), queries=(16, 32, 64, 128), keys=(64, 128, 256), split=split, warps=(4, 8))

    def _tpu(self, p: Any) -> list[Any]:
        from pallas_kernels.attention_mass import tpu_log_sum_exp

        return _tiles_grid(p, _rule(p), lambda config: tpu_log_sum_exp.tiling(p, config))


class AttentionMass(LogSumExp):
    """The masses of a window or a chunk, from given normalisers."""

    name = "attention_mass"

    def run(self, p: Any, implementation: str, **options: Any) -> jax.Array:
        # Normalisers of about the size that random rows have.
        lse = jnp.full(p.q.shape[:4], jnp.log(jnp.float32(p.k.shape[2])) + 0.5)
        found = mass.ATTENTION_MASS[implementation](p, Counting(lse, None, None), **options).new
        return jnp.broadcast_to(found.mean(axis=3)[..., None, None], p.q.shape)

    def _triton(self, p: Any) -> list[Any]:
        from pallas_kernels.attention_mass.triton import Config

        # The second pass does not split the keys.
        rule = dataclasses.replace(Config.default(p), split=None)
        return _grid(rule, queries=(16, 32, 64, 128), keys=(64, 128, 256), warps=(4, 8), stages=(2, 3))

    def _tpu(self, p: Any) -> list[Any]:
        from pallas_kernels.attention_mass import tpu

        return _tiles_grid(p, _rule(p), lambda config: tpu.mass_tiles(p, config))


OPERATIONS: Mapping[str, Operation] = {x.name: x for x in (RaggedDecode(), Prefill(), LogSumExp(), AttentionMass())}


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem of an operation, given by its sizes; arrays are made when it is measured."""

    operation: Operation
    sizes: Sizes | Chunk


def cases(
    operations: Iterable[str] = tuple(OPERATIONS),
    sizes: Sizes | None = None,
    *,
    queries: Sequence[int] = (),
    tokens: Sequence[int] = (),
) -> list[Case]:
    """The problems that some operations are tuned for.

    Args:
      sizes: sizes of a decode step. Chunks have its heads and a single row, which gives programs enough.
      queries: queries of the chunks; by default each operation's own. tokens: keys of their prompts, or :data:`TOKENS`.

    Raises:
      ValueError: there is no such operation, or sizes are invalid.
    """
    sizes, found = sizes or Sizes(), []
    for name in operations:
        if name not in OPERATIONS:
            raise ValueError(f"There is no operation {name!r} to tune; there are {', '.join(OPERATIONS)}.")
        operation = OPERATIONS[name]
        if not operation.queries:
            found.append(Case(operation, sizes))
            continue
        same = {x: getattr(sizes, x) for x in ("heads", "group", "head_dim", "dtype", "seed")}
        for many, count in itertools.product(tokens or TOKENS, queries or operation.queries):
            found.append(Case(operation, Chunk(queries=count, tokens=many, **same)))
    return found


def _grid(rule: Any, **choices: Iterable[int | None]) -> list[Any]:
    every = (dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values()))
    return list(dict.fromkeys([rule, *(dataclasses.replace(rule, **values) for values in every)]))


def _rule(p: Any) -> Any:
    """Default sizes of the masses' TPU kernels."""
    from pallas_kernels.tpu.tiles import Config

    return Config.default(p.q.shape[2], p.q.shape[3], p.k.shape[2], p.k.dtype)


def _tiles_grid(p: Any, rule: Any, tiles_of: Callable[[Any], Any]) -> list[Any]:
    """Sizes that give this problem different blocks; sizes that are reduced to the same blocks are tried once.

    No block has more queries than the problem's class, since the result is used for every problem of the class.
    """
    most = max(128, tuned.query_class(p.q.shape[3]))
    queries = [count for count in (128, 256, 512) if count <= most]
    different: dict[Any, Any] = {}
    for config in _grid(rule, queries=queries, keys=(128, 256, 512, 1024, 2048, 4096), part=(256, 512)):
        different.setdefault(tiles_of(config), config)
    return list(different.values())

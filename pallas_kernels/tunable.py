"""What ``tune`` tunes: of each operation its problems, the sizes worth trying, and one step with given sizes."""

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

#: Keys of the prompts that chunks are the end of: fewer and more than what the rules tell apart.
TOKENS = (4096, 32768)


class Operation:
    """One operation; ``order`` are the implementations of each platform that have sizes.

    A problem's arrays are arguments of a step, its queries first, as ``timing.loop`` wants them.
    """

    name: ClassVar[str]
    order: ClassVar[Mapping[str, Sequence[str]]]
    #: Queries of the chunks that it is tuned for by default.
    queries: ClassVar[tuple[int, ...]] = ()

    def problem(self, sizes: Any) -> Any:
        """The problem of these sizes, with random arrays."""
        raise NotImplementedError

    def arguments(self, p: Any) -> tuple[Any, ...]:
        """Its arrays."""
        raise NotImplementedError

    def step(self, p: Any, implementation: str, **options: Any) -> Callable[..., jax.Array]:
        """A function of the arrays; its result is of the queries' size."""
        raise NotImplementedError

    def candidates(self, p: Any, implementation: str) -> list[Any]:
        """Sizes worth trying, the kernel's own rule's first.

        Raises:
          NotImplementedError: the implementation cannot do this on this device.
        """
        found = getattr(self, f"_{implementation}", None)
        if found is None:
            raise ValueError(f"{implementation} has no sizes to tune.")
        return found(p)


class RaggedDecode(Operation):
    """One query a row on pages."""

    name = "ragged_decode"
    order = decode.IMPLEMENTATIONS.order

    def problem(self, sizes: Sizes) -> Any:
        return decode_inputs.make(sizes)

    def arguments(self, p: Any) -> tuple[Any, ...]:
        return p.q, p.pages, p.length, p.k_scale, p.v_scale

    def step(self, p: Any, implementation: str, **options: Any) -> Callable[..., jax.Array]:
        def step(q: Any, pages: Any, length: Any, k_scale: Any, v_scale: Any) -> jax.Array:
            given = dataclasses.replace(p, q=q, pages=pages, length=length, k_scale=k_scale, v_scale=v_scale)
            return decode.IMPLEMENTATIONS[implementation](given, **options).out

        return step

    def _mosaic_gpu(self, p: Any) -> list[Any]:
        from pallas_kernels.ragged_decode.mosaic_gpu import MosaicGpuConfig

        return _grid(MosaicGpuConfig.of(p), pages=(2, 4, 8, 16, 32), stages=(2, 3, 4, 6))

    def _triton(self, p: Any) -> list[Any]:
        from pallas_kernels.ragged_decode.triton import TritonConfig

        pages = sorted({max(slots // p.pages.shape[2], 1) for slots in (128, 256, 512, 1024, 2048)})
        return _grid(TritonConfig.of(p), pages=pages, block=(32, 64, 128), warps=(2, 4, 8), stages=(2, 3, 4))

    def _tpu(self, p: Any) -> list[Any]:
        from pallas_kernels.ragged_decode.tpu import TpuConfig

        _, _, page_size, head_dim = p.pages.shape
        rule = TpuConfig.default(jax.devices()[0].device_kind, page_size, head_dim, p.pages.dtype)
        return _grid(rule, rows=(256, 512, 1024, 2048), buffers=(4, 8, 16))


class Prefill(Operation):
    """A chunk's attention."""

    name = "prefill"
    order = prefill.IMPLEMENTATIONS.order
    queries = (64, 256, 1024)

    def problem(self, sizes: Chunk) -> Any:
        return chunk_inputs.prefill_problem(sizes)

    def arguments(self, p: Any) -> tuple[Any, ...]:
        return p.q, p.k, p.v, p.offset

    def step(self, p: Any, implementation: str, **options: Any) -> Callable[..., jax.Array]:
        def step(q: Any, k: Any, v: Any, offset: Any) -> jax.Array:
            given = dataclasses.replace(p, q=q, k=k, v=v, offset=offset)
            return prefill.IMPLEMENTATIONS[implementation](given, **options).out

        return step

    def _triton(self, p: Any) -> list[Any]:
        from pallas_kernels.prefill.triton import Config

        return _grid(Config.default(p), queries=(32, 64, 128), keys=(32, 64, 128), warps=(4, 8), stages=(2, 3, 4))

    def _tpu(self, p: Any) -> list[Any]:
        from pallas_kernels.prefill import tpu

        return _tiles_grid(p, tpu.rule(p), lambda config: tpu.Tiles.of(p.q, p.k, config))


class LogSumExp(Operation):
    """The normalisers of a window or a chunk."""

    name = "log_sum_exp"
    order = mass.LOG_SUM_EXP.order
    queries = (32, 1024)

    def problem(self, sizes: Chunk) -> Any:
        return chunk_inputs.mass_problem(sizes)

    def arguments(self, p: Any) -> tuple[Any, ...]:
        return p.q, p.k, p.offset, p.scale

    def step(self, p: Any, implementation: str, **options: Any) -> Callable[..., jax.Array]:
        def step(q: Any, k: Any, offset: Any, scale: Any) -> jax.Array:
            given = dataclasses.replace(p, q=q, k=k, offset=offset, scale=scale)
            lse = mass.LOG_SUM_EXP[implementation](given, **options)
            return jnp.broadcast_to(lse[..., None], q.shape)

        return step

    def _triton(self, p: Any) -> list[Any]:
        from pallas_kernels.attention_mass.triton import Config

        # A window's few programs have shares of the keys; a chunk's many need not.
        split = (512, 1024, 2048) if p.q.shape[3] <= 64 else (None, 2048)
        return _grid(Config.default(p), queries=(16, 32, 64, 128), keys=(64, 128, 256), split=split, warps=(4, 8))

    def _tpu(self, p: Any) -> list[Any]:
        from pallas_kernels.attention_mass import tpu_log_sum_exp

        return _tiles_grid(p, _rule(p), lambda config: tpu_log_sum_exp.tiling(p, config))


class AttentionMass(LogSumExp):
    """The masses of a window or a chunk, by normalisers that are given."""

    name = "attention_mass"

    def step(self, p: Any, implementation: str, **options: Any) -> Callable[..., jax.Array]:
        def step(q: Any, k: Any, offset: Any, scale: Any) -> jax.Array:
            given = dataclasses.replace(p, q=q, k=k, offset=offset, scale=scale)
            # As large as those of random rows are.
            lse = jnp.full(q.shape[:4], jnp.log(jnp.float32(k.shape[2])) + 0.5)
            found = mass.ATTENTION_MASS[implementation](given, Counting(lse, None, None), **options).new
            return jnp.broadcast_to(found.mean(axis=3)[..., None, None], q.shape)

        return step

    def _triton(self, p: Any) -> list[Any]:
        from pallas_kernels.attention_mass.triton import Config

        # The second pass has no share of the keys.
        rule = dataclasses.replace(Config.default(p), split=None)
        return _grid(rule, queries=(16, 32, 64, 128), keys=(64, 128, 256), warps=(4, 8), stages=(2, 3))

    def _tpu(self, p: Any) -> list[Any]:
        from pallas_kernels.attention_mass import tpu

        return _tiles_grid(p, _rule(p), lambda config: tpu.mass_tiles(p, config))


OPERATIONS: Mapping[str, Operation] = {x.name: x for x in (RaggedDecode(), Prefill(), LogSumExp(), AttentionMass())}


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem of an operation by its sizes: its arrays are made when it is measured."""

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
      sizes: of a decode step. Chunks have its heads, and are of one row: their programs are many without others.
      queries: of the chunks; by default those that each operation meets. tokens: of their prompts, else :data:`TOKENS`.

    Raises:
      ValueError: there is no such operation, or there are sizes that are no problem.
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
    """Of the masses' TPU kernels."""
    from pallas_kernels.tpu.tiles import Config

    return Config.default(p.q.shape[2], p.q.shape[3], p.k.shape[2], p.k.dtype)


def _tiles_grid(p: Any, rule: Any, tiles_of: Callable[[Any], Any]) -> list[Any]:
    """Sizes that are different blocks of this problem: those that are cut to the same ones are one.

    No block of queries is larger than the class of the problem's, whose others it is to fit.
    """
    most = max(128, tuned.query_class(p.q.shape[3]))
    queries = [count for count in (128, 256, 512) if count <= most]
    different: dict[Any, Any] = {}
    for config in _grid(rule, queries=queries, keys=(128, 256, 512, 1024, 2048, 4096), part=(256, 512)):
        different.setdefault(tiles_of(config), config)
    return list(different.values())

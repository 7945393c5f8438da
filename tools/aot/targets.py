"""The chips that cases are compiled for. Nothing here imports JAX before a mesh is asked for."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from typing import Any


@dataclasses.dataclass(frozen=True)
class Target:
    """A chip.

    Attributes:
      name: as on the command line and in the report.
      platform: "tpu" or "gpu".
      topology: keywords of ``jax.experimental.topologies.get_topology_desc``, ``platform`` among them.
      clock: cycles a second, nominal. bandwidth: bytes a second that memory gives one core; 0 where it is not used.
    """

    name: str
    platform: str
    topology: tuple[tuple[str, Any], ...]
    clock: float = 0.0
    bandwidth: float = 0.0

    def mesh(self) -> Any:
        """A mesh of one device of this kind, along an axis "x"."""
        import numpy as np
        from jax.experimental import topologies
        from jax.sharding import Mesh

        description = topologies.get_topology_desc(**dict(self.topology))
        return Mesh(np.array(description.devices[:1]), ("x",))

    def sharding(self) -> Any:
        """Everything whole on that device."""
        from jax.sharding import NamedSharding, PartitionSpec

        return NamedSharding(self.mesh(), PartitionSpec())


def _tpu(name: str, topology: str, clock: float, bandwidth: float) -> Target:
    return Target(name, "tpu", (("platform", "tpu"), ("topology_name", topology)), clock, bandwidth)


#: Bandwidths are those of ``pltpu.get_tpu_info()``, of v5p the half that each of its two cores has when both work.
#: Clocks are nominal and approximate.
TPU_TARGETS = (
    _tpu("v5e", "v5e:2x2", 1.5e9, 0.82e12),
    _tpu("v5p", "v5p:2x2x1", 1.75e9, 1.23e12),
    _tpu("v6e", "v6e:2x2", 1.75e9, 1.64e12),
    _tpu("tpu7x", "tpu7x:2x2x1", 1.9e9, 3.69e12),
)

#: Modules of the platforms: ``environment(dump)`` makes the compiler dump its results, ``profiles(dump)`` reads them;
#: a module may list further ``TARGETS``.
PLATFORMS = {"tpu": "tools.aot.tpu_profile", "gpu": "tools.aot.gpu_profile"}


def platform(name: str) -> Any:
    """The module of a platform."""
    return importlib.import_module(PLATFORMS[name])


def targets() -> dict[str, Target]:
    """Every target by name."""
    others = [platform(name) for name, module in PLATFORMS.items() if importlib.util.find_spec(module) is not None]
    every = [*TPU_TARGETS, *(target for module in others for target in getattr(module, "TARGETS", ()))]
    return {target.name: target for target in every}

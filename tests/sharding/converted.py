"""A converted model read onto meshes: a process of its own, a line of JSON a mesh.

``python tests/sharding/converted.py ORIGINAL CONVERTED [PORT PROCESSES NUMBER]``: with several processes each is a host
of one mesh over all their devices.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import numpy as np

import kvjax
from kvjax.checkpoints import converted_weights


def main() -> None:
    original, folder, *place = sys.argv[1:]
    if place:
        jax.distributed.initialize(f"localhost:{place[0]}", int(place[1]), int(place[2]))
    read, path_of = [0], converted_weights.chunk_path

    def counted(*given: Any) -> Path:
        path = path_of(*given)
        read[0] += path.stat().st_size - converted_weights.INDEX
        return path

    converted_weights.chunk_path = counted
    for mesh in ("data=1,model=2",) if place else ("data=1,model=4", "data=2,model=2"):
        for weights, path in ((None, f"{folder}-floats"), ("int8", folder)):
            options = {"mesh": mesh, "dtype": "float32", "progress": False, "compile_cache": False}
            one = kvjax.load(original, weights=weights, **options)
            read[0] = 0
            other = kvjax.load(path, **options)
            pairs = list(zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True))
            same = [
                mine.sharding == its.sharding and np.array_equal(left.data, right.data)
                for mine, its in pairs
                for left, right in zip(mine.addressable_shards, its.addressable_shards, strict=True)
            ]
            held = sum(
                shard.data.nbytes for _, its in pairs for shard in its.addressable_shards if shard.replica_id == 0
            )
            print(
                json.dumps(
                    {
                        "mesh": mesh,
                        "same": all(same),
                        "shards": len(same),
                        "read": read[0],
                        "held": held,
                        "all": sum(leaf.nbytes for _, leaf in pairs),
                    }
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()

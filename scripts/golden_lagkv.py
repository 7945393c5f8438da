"""Record which tokens the official LagKV code keeps, for the tests of ``kvjax.policies.LagKV``.

    python scripts/golden_lagkv.py CHECKOUT      # of github.com/AI-Lab-China-Merchants-Bank/LagKV, MIT licence

Needs torch. ``CHECKOUT`` holds ``lag_kv.py`` and ``l2_kv.py`` and is only read. The two classes extend the cache of an
older transformers, so a stand-in with the three attributes they use takes that place.

Format of ``tests/golden/lagkv_official.npz``: one int16 array [heads, kept] a case, ascending original token indices;
its key is ``variant,sink,lag,ratio,prompt,steps,step``. ``tests/support/lagkv_cases.py`` makes the inputs from the key
and returns the cases: ``load_cases()``.

The indices come back by matching the kept key rows with the rows that went in (all different), the value rows being
checked to sit at the same places. The official code keeps a partition's tokens in the order of their scores; a set of
tokens is what is compared, hence ascending. ``near`` on standard output is the smallest difference, over all
decisions of the recorded cases, between the last score kept and the first one dropped.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import pathlib
import sys
import types
from typing import Any

import numpy as np
import torch

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support import lagkv_cases as lagkv  # noqa: E402


class StandInCache:
    """The part of transformers' former DynamicCache that the official classes build on."""

    def __init__(self, _distributed_cache_data: Any = None):
        self.key_cache: list[Any] = []
        self.value_cache: list[Any] = []
        self._seen_tokens = 0


def official_classes(checkout: pathlib.Path) -> dict[str, type]:
    """``{"lag": LagKV, "l2": L2KV}`` as the checkout defines them."""
    package, module = types.ModuleType("transformers"), types.ModuleType("transformers.cache_utils")
    module.DynamicCache = StandInCache  # type: ignore[attr-defined]
    sys.modules |= {"transformers": package, "transformers.cache_utils": module}
    found = {}
    for variant, file, name in (("lag", "lag_kv.py", "LagKV"), ("l2", "l2_kv.py", "L2KV")):
        spec = importlib.util.spec_from_file_location(file[:-3], checkout / file)
        if spec is None or spec.loader is None or not (checkout / file).is_file():
            sys.exit(f"{checkout / file} is not there; give the folder of a LagKV checkout")
        source = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(source)
        found[variant] = getattr(source, name)
    return found


class LeastGap:
    """Watches torch.topk for the smallest lead of a kept score over a dropped one."""

    def __init__(self) -> None:
        self.value = float("inf")
        self.topk = torch.topk

    def __call__(self, score: torch.Tensor, k: int, dim: int) -> Any:
        if 0 < k < score.shape[dim]:
            ordered = score.sort(dim=dim, descending=True).values
            lead = ordered.select(dim, k - 1) - ordered.select(dim, k)
            # Relative to the spread of the partition's scores: what a last-bit difference could turn.
            self.value = min(self.value, float((lead / score.std(dim=dim)).min()))
        return self.topk(score, k, dim=dim)


def kept_indices(cache: Any, layer: int, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Original indices [heads, kept], ascending, of the rows the cache holds."""
    kept_k, kept_v = cache.key_cache[layer][0].numpy(), cache.value_cache[layer][0].numpy()
    rows = []
    for head in range(k.shape[1]):
        place = {row.tobytes(): i for i, row in enumerate(k[0, head])}
        assert len(place) == k.shape[2], "two keys are equal; their indices cannot be told apart"
        indices = np.array([place[row.tobytes()] for row in kept_k[head]])
        np.testing.assert_array_equal(v[0, head, indices], kept_v[head])
        rows.append(np.sort(indices))
    return np.array(rows)


def ask(classes: dict[str, type], case: lagkv.LagCase) -> np.ndarray:
    """Feed the case's tokens to the official class and return what it kept."""
    cache = classes[case.variant](ratio=case.ratio, sink_size=case.sink, lag_size=case.lag)
    # L2KV leaves layers 0 and 1 alone.
    layer = 2 if case.variant == "l2" else 0
    k, v = torch.from_numpy(case.k), torch.from_numpy(case.v)
    bounds = [0, *range(case.prompt, case.tokens, case.step), case.tokens]
    for start, stop in itertools.pairwise(bounds):
        cache.update(k[:, :, start:stop].clone(), v[:, :, start:stop].clone(), layer)
    return kept_indices(cache, layer, case.k, case.v)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=pathlib.Path)
    classes = official_classes(parser.parse_args().checkout)
    torch.topk = gap = LeastGap()  # type: ignore[assignment]
    answers = {case.name: ask(classes, case).astype(np.int16) for case in lagkv.questions()}
    np.savez_compressed(lagkv.KEPT, **answers)
    print(f"{len(answers)} cases, {lagkv.KEPT.stat().st_size} bytes, near {gap.value:.2g}")


if __name__ == "__main__":
    main()

"""Whole models on an accelerator answer as on the CPU; skipped where there is none."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from support import devices, whole_models

from kvjax.checkpoints import hub

pytestmark = [
    pytest.mark.hardware,
    pytest.mark.skipif(jax.default_backend() == "cpu", reason="there is no accelerator here"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]
CASES = whole_models.cases()


def tolerance(name: str) -> float:
    """How far a log-probability may be off: roundings to 16 or fewer bits move choices, those of float32 do not."""
    return 0.1 if "bfloat16" in name else 0.02 if " in " in name else 2e-3


@pytest.mark.parametrize("name", CASES)
def test_answers_are_the_cpus(name):
    if "default model" in name and not hub.is_cached("smollm2-135m-instruct"):
        pytest.skip("the default model is not in the user's cache; run `kvjax fetch` once")
    with ThreadPoolExecutor() as pool:
        printed = pool.submit(devices.printed, Path(whole_models.__file__), name, devices=1)
        with jax.default_matmul_precision("highest"):  # float32's products, not those of TF32 or bfloat16
            found = CASES[name]()
        (wanted,) = printed.result()
    assert np.isfinite(found).all() and len(found) == len(wanted)
    print(f"{name}: {len(found)} numbers that differ by {np.abs(np.subtract(found, wanted)).max():.1e}")  # with -rP
    np.testing.assert_allclose(found, wanted, atol=tolerance(name))

"""Formats that hold the numbers of several: no number changes."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.checkpoints.checkpoint import Numbers
from kvjax.checkpoints.gguf_blocks import _FORMATS
from kvjax.checkpoints.group_formats import as_format, common_format
from kvjax.model.group_quantised import GroupFormat

AWQ = GroupFormat(4, 128, minimum=True, scale="float32")
FORMATS = {**_FORMATS, "AWQ": AWQ, "GPTQ": GroupFormat(4, 128, scale="float16"), "int4": GroupFormat(4, 64)}
FP8 = GroupFormat(8, 128, scale="float32", fp8=True)


def _numbers(form: GroupFormat) -> Numbers:
    random = np.random.default_rng(form.group)
    least, most = (-7 if form.fp4 else -8, 7) if form.bits == 4 else (-127, 127)
    scale, minimum = ((random.standard_normal((6, 256 // form.group)) * 9000).astype(form.scale) for _ in range(2))
    whole = random.integers(least, most + 1, (6, 256)).astype(np.int8)
    return Numbers(whole, scale, minimum if form.minimum else None)


def _floats(numbers: Numbers, form: GroupFormat) -> np.ndarray:
    """What a format says that its numbers are, in float64."""
    whole = numbers.whole.astype(np.float64)
    if form.fp4:
        whole = np.sign(whole) * np.array([0, 1, 2, 3, 4, 6, 8, 12])[np.abs(numbers.whole)]
    elif form.bits == 4 and form.minimum:
        whole += 8
    scale, minimum = (None if x is None else np.repeat(x.astype(np.float64), form.group, -1) for x in numbers[1:])
    return whole * scale + (0 if minimum is None else minimum)


@pytest.mark.parametrize("names", [*itertools.combinations(FORMATS, 2)], ids="+".join)
def test_two_formats_share_one_that_changes_no_number(names):
    forms = [FORMATS[name] for name in names]
    common = common_format(forms)
    assert common is not None and common == common_format(forms[::-1])
    assert common.bits == max(form.bits for form in forms) or any(form.fp4 for form in forms)
    for form in forms:
        numbers = _numbers(form)
        found = as_format(numbers, form, common)
        assert found.whole.dtype == np.int8 and found.scale.dtype == jnp.dtype(common.scale)
        assert found.scale.shape == (6, 256 // common.group) and (found.minimum is None) != common.minimum
        assert np.abs(found.whole + 0.5).max() <= (7.5 if common.bits == 4 else 127.5)
        np.testing.assert_array_equal(_floats(found, common), _floats(numbers, form))


def test_one_format_is_itself_and_float8_stays_apart():
    assert common_format([AWQ]) is AWQ
    assert common_format([FP8, AWQ]) is None
    assert common_format([FP8, GroupFormat(8, 64, scale="float32", fp8=True)]) == GroupFormat(
        8, 64, scale="float32", fp8=True
    )
    numbers = _numbers(AWQ)
    assert as_format(numbers, AWQ, AWQ) is numbers

"""Reading GGUF: the header against the gguf package, every block format bit for bit, and files that are broken."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import gguf_files

from kvjax.checkpoints.gguf import GGUFFile, dequantize
from kvjax.checkpoints.load import load
from kvjax.errors import WeightsError


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A llama of two layers as a file."""
    return gguf_files.write_case(gguf_files.case("llama_gqa"), tmp_path_factory.mktemp("gguf") / "small.gguf")


def test_header_and_tensors_equal_the_packages(small):
    ours, theirs = GGUFFile(small), gguf.GGUFReader(small)
    keys = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == keys
    assert list(ours.shapes) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        assert ours.shapes[tensor.name] == tuple(reversed(tensor.shape.tolist()))
        np.testing.assert_array_equal(ours.read(tensor.name, 0, ours.shapes[tensor.name][0]), tensor.data)
    ours.close()


@pytest.mark.parametrize("kind", gguf.GGMLQuantizationType, ids=lambda kind: kind.name)
def test_every_format_equals_the_package_bit_for_bit(kind):
    _, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(int(kind)).integers(0, 256, (96, size), np.uint8)
    try:
        with np.errstate(all="ignore"):
            want = gguf.dequantize(raw, kind).reshape(-1)
    except NotImplementedError:
        with pytest.raises(WeightsError, match=rf"'a\.b' is stored as {kind.name}"):
            dequantize(raw.reshape(-1), kind, "a.b")
        return
    # Scales that are not finite, which these bytes have too, are the loader's to refuse: nothing warns of them.
    ours = dequantize(raw.reshape(-1), kind)
    np.testing.assert_array_equal(ours.view(np.uint32), want.view(np.uint32))


def test_rows_of_a_quantised_tensor(tmp_path):
    values = np.random.default_rng(0).standard_normal((6, 64), np.float32)
    kind = gguf.GGMLQuantizationType.Q4_1
    path = gguf_files.write(tmp_path / "q.gguf", "llama", {}, {"x": values}, {"x": kind})
    file = GGUFFile(path)
    whole = gguf.dequantize(gguf.quantize(values, kind), kind)
    np.testing.assert_array_equal(file.read("x", 2, 5), whole[2:5])
    file.close()


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_said_to_be(small, tmp_path, share):
    data = small.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(WeightsError, match=r"truncated|not a GGUF file"):
        load(path, progress=False)


def test_what_is_not_gguf_is_said_not_to_be(tmp_path):
    path = tmp_path / "text.gguf"
    path.write_text("hello")
    with pytest.raises(WeightsError, match=r"not a GGUF file"):
        load(path)


def test_a_future_version_is_refused(small, tmp_path):
    data = bytearray(small.read_bytes())
    data[4] = 9
    path = tmp_path / "new.gguf"
    path.write_bytes(data)
    with pytest.raises(WeightsError, match=r"version 9"):
        load(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 9000), value=st.integers(0, 255))
def test_a_damaged_header_never_ends_in_a_traceback(small, tmp_path, at, value):
    data = bytearray(small.read_bytes())
    data[at] = value
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    try:
        file = GGUFFile(path)
    except WeightsError as error:
        assert "\n" not in str(error)
    else:
        file.close()

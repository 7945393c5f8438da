"""A converted model on a mesh has the shards of the original, and each host reads its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support import gguf_files, quick
from support.devices import printed

import kvjax
from kvjax.checkpoints import convert

SCRIPT = Path(__file__).with_name("converted.py")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[str, str]:
    """A model whose matrices a mesh divides, and its conversions in chunks far smaller than a shard."""
    root = tmp_path_factory.mktemp("models")
    case = gguf_files.case(
        "llama_gqa", hidden_size=64, num_attention_heads=8, num_key_value_heads=4, intermediate_size=96
    )
    original = gguf_files.write_folder(case, root / "m")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "CHUNK", 512)
        kvjax.convert(original, root / "out", weights="int8", dtype="float32", progress=False)
        kvjax.convert(original, root / "out-floats", dtype="float32", progress=False)
    return str(original), str(root / "out")


def test_every_device_has_the_originals_shard(folders):
    found = printed(SCRIPT, *folders)
    assert len(found) == 4 and all(each["same"] and each["shards"] > 30 for each in found)


@pytest.mark.slow
def test_a_host_reads_its_own_share_alone(folders):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | quick.on_devices(1) | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    command = [sys.executable, str(SCRIPT), *folders, str(port), "2"]
    started = [
        subprocess.Popen(
            [*command, str(number)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for number in range(2)
    ]
    try:
        ended = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (out, log) in zip(started, ended, strict=True):
        assert process.returncode == 0, log[-4000:]
        for each in map(json.loads, out.splitlines()):
            # Norms and an odd vocabulary are whole on every host; of matrices each reads its half, by whole chunks.
            assert each["same"] and each["read"] < 0.75 * each["all"], each

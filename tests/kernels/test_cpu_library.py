"""The C++ for CPUs is compiled once, whole or not at all, and what cannot be compiled is said."""

import threading
import time
from pathlib import Path

import pytest
from support import tiny
from support.native import needs_compiler, needs_shell

import kvjax
from kvjax.bench import machine
from pallas_kernels.cpu import library


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A cache folder of its own; its folder of libraries. What earlier tests began to compile goes to theirs."""
    for thread in threading.enumerate():
        if thread.name == "kvjax-native":
            thread.join()
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path))
    return tmp_path / "native"


@needs_compiler
def test_a_library_is_compiled_once_and_kept_under_what_it_is_made_from(cache, monkeypatch):
    assert library.loaded("products") is not None
    (path,) = cache.iterdir()
    assert path.name.startswith("products-") and path.suffix == ".so"
    monkeypatch.setattr(library, "_build", None)  # is not called again
    library._made.cache_clear()
    assert library.loaded("products") is not None and list(cache.iterdir()) == [path]


@needs_compiler
def test_it_is_compiled_ahead_on_a_thread(cache, monkeypatch):
    compiled = []
    monkeypatch.setattr(library, "_run", lambda line: compiled.append((threading.current_thread().name, line[-1])))
    monkeypatch.setattr(library.os, "replace", lambda source, target: None)
    monkeypatch.setattr(library, "register", lambda name, path: None)
    library.ahead("attention", "products")
    for thread in threading.enumerate():
        if thread.name == "kvjax-native":
            thread.join(60)
    assert [name for name, _ in compiled] == ["kvjax-native"] * 2
    assert ["attention" in compiled[0][1], "products" in compiled[1][1]] == [True, True]


@needs_compiler
def test_a_library_that_cannot_be_loaded_is_made_again(cache):
    path = Path(library._path("products", library.folder()))
    path.parent.mkdir()
    path.write_text("from another system")
    library._registered.pop("products", None)  # XLA keeps what it has; that a new one is loaded counts here
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library.jax.ffi, "register_ffi_target", lambda *args, **options: None)
        assert library.loaded("products") is not None
    assert path.read_bytes().startswith(b"\x7fELF")


def test_a_key_changes_with_the_processor_and_the_source(monkeypatch):
    library._key.cache_clear()
    found = [library._key("products"), library._key("attention")]
    monkeypatch.setattr(library, "_processor", lambda: "another")
    library._key.cache_clear()
    found += [library._key("products"), library._key("attention")]
    library._key.cache_clear()
    assert len(set(found)) == 4


def test_without_a_compiler_there_is_none(monkeypatch, tmp_path, cache):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert library.compiler() is None and library.command("products", tmp_path / "x.so") is None
    library.ahead("products")
    assert library.loaded("products") is None and not cache.exists()


def test_a_compiler_whose_quotation_has_no_end_is_none(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    found = library.compiler()
    monkeypatch.setenv("CXX", "'g++ -O2")
    assert library.compiler() == found


@needs_shell
def test_a_compiler_that_fails_is_said_and_leaves_nothing(monkeypatch, tmp_path, cache):
    script = tmp_path / "cxx"
    script.write_bytes(b"#!/bin/sh\necho 'In file \xe9' >&2\necho 'error: no such flag' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", f"{script} --with=arguments")
    assert library.compiler() == [str(script), "--with=arguments"]
    monkeypatch.setattr(library, "supported", lambda: True)
    with pytest.warns(RuntimeWarning, match=r"attention.*no such flag.*XLA's own are used"):
        assert library.loaded("attention") is None
    assert list(cache.iterdir()) == []
    assert library.loaded("attention") is None  # and is said once


@needs_shell
def test_a_compiler_that_hangs_is_killed_with_what_it_started(monkeypatch, tmp_path, cache):
    script = tmp_path / "cxx"
    script.write_text(f"#!/bin/sh\nsleep 60 &\necho $! > {tmp_path}/child\nwait\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setattr(library, "supported", lambda: True)
    monkeypatch.setattr(library, "_SECONDS", 1)
    with pytest.warns(RuntimeWarning, match="took more than 1 s"):
        assert library.loaded("attention") is None
    assert list(cache.iterdir()) == []
    child, until = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/stat"), time.monotonic() + 10
    while (alive := child.exists() and child.read_text().split()[2] != "Z") and time.monotonic() < until:
        time.sleep(0.05)  # a busy machine takes its time to end what was killed
    assert not alive


def test_a_cache_that_cannot_be_looked_at_does_not_disturb(monkeypatch):
    monkeypatch.setenv("KVJAX_CACHE", "/x" * 3000)
    monkeypatch.setattr(library, "compiler", lambda: None)
    library.ahead("attention")
    assert library.loaded("attention") is None


@needs_compiler
def test_a_folder_that_cannot_be_written_is_said(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match="could not be compiled"):
        assert library.loaded("products") is None


def test_other_processors_and_platforms_have_none(monkeypatch, cache):
    monkeypatch.setattr(library.platform, "machine", lambda: "arm64")
    assert not library.supported() and library.loaded("products") is None
    monkeypatch.undo()
    monkeypatch.setattr(library.dispatch, "platform", lambda: "tpu")
    assert library.loaded("products") is None


def test_loading_compiles_ahead_what_the_model_needs(tmp_path, monkeypatch):
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(library, "ahead", lambda *names: asked.append(names))
    with pytest.raises(kvjax.UsageError):
        kvjax.load(tmp_path / "nothing.gguf")
    assert not asked  # a name that there is not keeps no compiler busy
    folder = tiny.write_folder(tiny.CASES[0], tmp_path / "tiny")
    products = "float_products", "products", "group_products"
    for weights, names in ((None, products[:1]), ("int8", products[1:2]), ("int4", products[1:]), ("fp8", ())):
        kvjax.load(folder, weights=weights, progress=False)
        assert asked.pop() == ("prefill", *names, "attention")
    kvjax.load(folder, dtype="bfloat16", progress=False)
    assert asked.pop() == ("prefill", "attention")
    kvjax.convert(folder, tmp_path / "converted", weights="int8", progress=False)
    asked.clear()
    kvjax.load(tmp_path / "converted", progress=False)
    assert asked.pop() == ("prefill", *products, "attention")
    monkeypatch.setenv("KVJAX_NATIVE", "0")
    kvjax.load(folder, progress=False)
    assert not asked
    monkeypatch.setenv("KVJAX_NATIVE", "maybe")
    with pytest.raises(kvjax.UsageError, match="KVJAX_NATIVE"):
        kvjax.load(folder, progress=False)


def test_benchmarks_say_what_cpu_kernels_were_compiled_from(monkeypatch):
    for found, said in ((None, "CPU kernels in XLA"), (object(), "CPU kernels in C++")):
        monkeypatch.setattr(library, "loaded", lambda name, found=found: found)
        assert said in machine.sentence(machine.describe())

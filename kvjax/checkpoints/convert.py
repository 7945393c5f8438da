"""``convert``: writes a model in the form in which kvjax multiplies it, so that it loads at the speed of the disk."""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from kvjax.array_bytes import nbytes
from kvjax.checkpoints import converted
from kvjax.checkpoints.converted import PARAMETERS, TEMPLATE, TOKENIZER, WEIGHTS, StoredArray
from kvjax.checkpoints.converted_weights import described, leaf_names
from kvjax.checkpoints.load import LanguageModel, load, load_config, weights_dtype
from kvjax.errors import KvjaxError, UsageError
from kvjax.files import bytes_in, check_folder, disk_reason, sync_folder
from kvjax.model.decoder import abstract_decoder
from kvjax.model.quantised import Weights, check_weights
from kvjax.progress import Progress, showing, stage
from kvjax.stored_files import StoredFile, stored
from kvjax.tables import human_bytes
from kvjax.version import __version__

#: Bytes of a chunk at most: small beside a shard, large beside what reading one costs.
CHUNK = 4 << 20
#: After a day what a killed conversion left is nobody's.
_STALE_SECONDS = 86400.0


def convert(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    weights: Weights | None = None,
    dtype: DTypeLike | None = None,
    progress: Progress = None,
) -> Path:
    """Write a model's weights as kvjax stores them, with its configuration and tokenizer, to a new folder.

    :func:`kvjax.load` reads the folder like any other model, and on a mesh each host reads what its own devices hold.
    Its numbers, digests and plans are those of the original loaded with these ``weights``. The folder is there whole or
    not at all. Weights pass through this machine's memory.

    Args:
      model: as for :func:`kvjax.load`.
      out: a folder that does not exist, or is empty.
      weights: as for :func:`kvjax.load`.
      dtype: of the parameters that are floats. They are cast where the folder is loaded in another one; only from
        "float32" is each what it would be of the original.
      progress: as for :func:`kvjax.load`.

    Returns:
      The folder.

    Raises:
      UsageError, WeightsError: as of :func:`kvjax.load`; the folder holds something.
      KvjaxError: the disk is too small or cannot be written to; nothing is left there then.
    """
    target, asked = Path(out), check_weights(weights)
    kind = weights_dtype(dtype)
    if jax.process_count() > 1:
        raise UsageError("A model is converted by one process; call kvjax.convert outside of jax.distributed.")
    check_folder("out", target)
    if target.exists() and any(target.iterdir()):
        raise UsageError(f"{target} is not empty; name a folder that does not exist.")
    with showing(progress):
        config = load_config(model)
        # Of what a folder keeps of its numbers only its files tell; int8 takes as many bytes or more.
        form = "int8" if asked == "file" and not config.kept else asked
        config = config if form is None else config.stored_as(form)
        _check_space(target, nbytes(abstract_decoder(config, kind)))
        with _on_the_host():
            lm = load(model, weights=asked, dtype=kind, compile_cache=False)
            write_converted(lm, target)
    return target


def write_converted(lm: LanguageModel, out: Path) -> None:
    """Write a loaded model, which is on one device, to a new folder; see :func:`convert`."""
    target = out.resolve()  # a link stays, and what it leads to is written
    # Beside the folder, so that the last step is to rename it.
    work = target.parent / f".{target.name}.kvjax-{uuid.uuid4().hex}"
    try:
        _remove_stale(target)
        work.mkdir(parents=True)
        arrays = _write_arrays(work, lm)
        (work / TOKENIZER).write_text(lm.tokenizer.to_json(), encoding="utf-8")
        if lm.tokenizer.chat_template is not None:
            (work / TEMPLATE).write_text(lm.tokenizer.chat_template, encoding="utf-8")
        description = converted.Description(
            kind=converted.KIND,
            version=converted.VERSION,
            kvjax=__version__,
            name=lm.name,
            config=lm.config,
            dtype=str(lm.params.dtype),
            stop_token_ids=lm.stop_token_ids,
            special_tokens=lm.tokenizer.special_tokens,
            files=_files(work),
            arrays=arrays,
        )
        (work / converted.DESCRIPTION).write_text(description.text(), encoding="utf-8")
        _sync(work)
        if target.exists():  # an empty folder; not every system renames onto one
            target.rmdir()
        work.rename(target)
        sync_folder(target.parent)
    except OSError as error:
        raise KvjaxError(f"The model cannot be written to {out}: {error.strerror or error}.") from error
    finally:
        _remove(work)


def _remove(folder: Path) -> None:
    """Remove a folder in which writes that failed may not have ended yet."""
    for _ in range(50):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.02)


def _write_arrays(work: Path, lm: LanguageModel) -> dict[str, StoredArray]:
    """Write all parameters as a checkpoint of Orbax; what they are and their checksums."""
    named = dict(zip(leaf_names(lm.params), jax.tree.leaves(lm.params), strict=True))
    total = sum(leaf.nbytes for leaf in named.values())
    with stage("save", lm.name, unit="bytes", total=total) as shown:
        # Ctrl-C comes to this thread. Orbax's go on until the disk has what they hold, and then the folder is removed.
        with ThreadPoolExecutor(1) as pool:
            saving = pool.submit(_save, work / WEIGHTS, named)
            while not saving.done():
                shown.update(min(bytes_in(work), total), total)
                wait([saving], timeout=0.1)
        try:
            saving.result()
        except Exception as error:
            raise OSError(disk_reason(error)) from error
        return {name: described(work, name, np.asarray(leaf)) for name, leaf in named.items()}


def _save(folder: Path, named: dict[str, Any]) -> None:
    from orbax.checkpoint import v1  # takes half a second to import

    ocp: Any = v1  # its own annotations contradict one another
    context = ocp.Context()
    # Numbers of weights do not compress, and what is not compressed is read as fast as it is copied.
    context.array.saving.use_compression = False
    context.array.saving.use_ocdbt = False
    context.array.saving.storage_options.chunk_byte_size = CHUNK
    with context, _quiet():
        ocp.save_checkpointables(folder, {PARAMETERS: named})


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Orbax logs each error by a page in every of its threads; it raises the first all the same."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _files(work: Path) -> dict[str, StoredFile]:
    found = {}
    for path in sorted(path for path in work.rglob("*") if path.is_file()):
        name = path.relative_to(work).as_posix()
        chunk = name.startswith(f"{WEIGHTS}/{PARAMETERS}/") and "/c/" in name
        found[name] = StoredFile(path.stat().st_size, None) if chunk else stored(path)
    return found


def _sync(work: Path) -> None:
    """Make everything last through a loss of power before it gets its name."""
    for path in work.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        else:
            with path.open("rb+") as file:
                os.fsync(file.fileno())
    sync_folder(work)


def _check_space(target: Path, needed: int) -> None:
    """Refuse before a byte is read when the disk has no room."""
    there = target.absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    if free < needed:
        raise KvjaxError(
            f"{target} would take {human_bytes(needed)}, and its disk has {human_bytes(free)} free; name a folder on "
            "another one, or convert to smaller weights."
        )


def _remove_stale(target: Path) -> None:
    """Remove what conversions to the same folder left when they were killed."""
    for left in target.parent.glob(f".{glob.escape(target.name)}.kvjax-*"):
        if time.time() - left.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _on_the_host() -> Iterator[None]:
    """Arrays of this block are on the CPU, so that a model larger than the accelerator is converted too."""
    try:
        host = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves the CPU out
        yield
        return
    with jax.default_device(host):
        yield

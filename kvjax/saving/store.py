"""Saved conversations: folders that Orbax writes, of which the newest whole one counts.

Every save is a new numbered checkpoint within the folder, complete or not there at all, and the one before it goes only
then. A crash at any moment therefore leaves the old conversation whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from kvjax.array_bytes import nbytes
from kvjax.cache.cache import Cache, materialised
from kvjax.cache.continuation import Continuation, check_continuable
from kvjax.cache.host_memory import HOST
from kvjax.cache.pool import layout_for
from kvjax.cache.quantisation import Storage
from kvjax.checkpoints.load import LanguageModel, check_model
from kvjax.device_memory import device_limit
from kvjax.documents import NotADocument, parse_json
from kvjax.errors import DoesNotFit, KvjaxError, UsageError, cut, quoted
from kvjax.files import check_local
from kvjax.memory_needs import weights_bytes
from kvjax.policies.base import Policy
from kvjax.policies.fixed import chooser_of, fixed, materialised_chosen
from kvjax.policies.page_capacities import by_pool
from kvjax.rounds.conversation import Conversation
from kvjax.saving.canonical import Counts, canonical, checksum, counts_of, pages_of, restored
from kvjax.saving.checksums import CHECKSUMS, check_files, write_checksums
from kvjax.saving.description import (
    VERSION,
    description_digest,
    model_identity,
    policy_from_json,
    policy_to_json,
    same_model,
)
from kvjax.saving.rounds import (
    canonical_rounds,
    describe_rounds,
    restored_rounds,
    shapes_of_rounds,
    sharded_rounds,
    with_sharding,
)
from kvjax.saving.schema import Saved, check_counts, check_policy, check_shapes, read_description
from kvjax.sharding.adopt import adopt
from kvjax.tables import human_bytes

_KIND = "kvjax cache"
#: The file of a save in which Orbax keeps the description.
_METADATA = "_CHECKPOINT_METADATA"


def save_cache(path: str | os.PathLike[str], cache: Continuation, lm: LanguageModel) -> None:
    """Write a cache, with the policy it was compressed by, to a folder; an older one there is replaced at the end.

    Slots that hold nothing are not written. The form is the same on every platform, and holds what is stored, bit for
    bit; see ``kvjax/saving/canonical.py``.

    Args:
      path: a folder that does not exist, is empty, or holds an earlier save.
      cache: of any batch; under RoundAttention a conversation, with its rounds.
      lm: the model it is of; only that model may load it.

    Raises:
      UsageError: the folder holds something else, or the policy holds what cannot be written.
      KvjaxError: the disk refused; what was there before is still there.
    """
    check_continuable("save_cache", [cache], one=True)
    once = cache.policy.chosen_once
    held = cache.with_device_layers(materialised_chosen(cache.device_layers)) if once else cache
    # What is parked, or spread over a mesh, comes to one device for a moment, where its slots are gathered.
    here: Any = adopt(held.to_device(), None, lm.config)
    layers = materialised(here.device_layers)
    counts = counts_of(layers)
    description = _described(layers, lm, counts) | ({"once": True} if once else {})
    if here.policy.offloads_rounds:
        description["rounds"] = describe_rounds(here) | {"policy": policy_to_json(here.policy)}
        tree = canonical_rounds(here, counts)
    else:
        tree = canonical(layers, counts)
    description["checksum"] = {"dtype": str(lm.params.dtype), "crc32": checksum(tree)}
    description["checksum"]["description"] = description_digest(description)
    with _folder(path, writes=True) as folder:
        latest = folder.latest
        step = 0 if latest is None else latest.step + 1
        folder.save(step, tree, custom_metadata=description)
        write_checksums(Path(path) / str(step))


def load_cache(
    path: str | os.PathLike[str], lm: LanguageModel, *, memory_limit: int | None = None
) -> Cache | Conversation:
    """The cache that :func:`save_cache` wrote, in the layout and on the device of this machine, in the model's dtype.

    ``memory_limit`` is in bytes, by default what the device has; nothing is allocated for what does not fit.

    Raises:
      UsageError: there is none, it is of another model, or it was written by a later version of kvjax.
      DoesNotFit: it is too large for the device, beside the weights.
      KvjaxError: the folder is damaged.
    """
    check_model(lm)
    if not isinstance(path, (str, os.PathLike)):
        raise UsageError(f"The saved conversation is {quoted(path)}; give a path.")
    where = Path(path)
    if not holds_conversation(where) and not where.is_dir():
        raise UsageError(f"There is no saved conversation at {where}.")
    with _folder(where) as folder:
        if folder.latest is None:
            raise UsageError(f"There is no saved conversation at {where}; its folder holds no whole one.")
        item = where / str(folder.latest.step)
        saved = _saved(where, item)
        with _damaged(where, "its description is not what was saved: "):
            empty, chooser = _empty(where, saved, lm)
        counts = saved.counts
        shapes = jax.eval_shape(lambda cache: canonical(cache, counts), empty)
        device = jax.sharding.SingleDeviceSharding(
            min(jax.tree.leaves(lm.params)[0].devices(), key=lambda each: each.id)
        )
        if saved.rounds is None:
            wanted = with_sharding(shapes, device)
            _check_whole(folder, where, item, wanted)
            _check_fits(where, lm, empty, wanted, memory_limit)
            found = restored(_load(folder, wanted, saved, lm), _zeros(empty), counts)
            return found.replace(policy=fixed(found.policy)) if saved.once else found
        whole = shapes_of_rounds(shapes, saved.rounds, lm.config.head_dim, lm.params.dtype, empty.storage.quantised)
        wanted = sharded_rounds(whole, device)
        _check_whole(folder, where, item, wanted)
        _check_fits(where, lm, empty, wanted, memory_limit)
        return restored_rounds(_load(folder, wanted, saved, lm), _zeros(empty), counts, saved.rounds, chooser)


def _check_whole(folder: Any, where: Path, item: Path, wanted: Any) -> None:
    """Refuse a save whose files are broken, or hold arrays of other shapes than are wanted; none is read."""
    with _damaged(where):
        check_files(item)
        check_shapes(folder.metadata().metadata, wanted)


def _load(folder: Any, wanted: Any, saved: Saved, lm: LanguageModel) -> Any:
    """The newest save's arrays, checked: Orbax keeps no checksums of rows, and a wrong one looks like any."""
    tree, written = folder.load(None, wanted), saved.checksum
    if written is not None and written.dtype == str(lm.params.dtype) and written.crc32 != checksum(tree):
        raise ValueError("its checksum differs")
    return tree


def _check_fits(where: Path, lm: LanguageModel, empty: Cache, wanted: Any, memory_limit: int | None) -> None:
    """Refuse what the device cannot hold: the weights, what is read, and the pages its rows are then laid in."""
    limit = device_limit(memory_limit)
    cpu = jax.default_backend() == "cpu"  # where the host's memory is the device's
    read = [leaf for leaf in jax.tree.leaves(wanted) if cpu or leaf.sharding.memory_kind != HOST]
    rows = nbytes((read, empty))
    weights = weights_bytes(lm.config, lm.params.dtype, lm.mesh)
    if limit is not None and weights + rows > limit:
        raise DoesNotFit(
            f"To load the conversation at {where} takes {human_bytes(rows)} beside {human_bytes(weights)} of weights, "
            f"and the limit is {human_bytes(limit)}; a device with more memory would hold it."
        )


def _described(cache: Cache, lm: LanguageModel, counts: Counts) -> dict[str, Any]:
    """The description that is written beside a cache."""
    from kvjax import version

    storage = cache.storage
    return {
        "kind": _KIND,
        "version": VERSION,
        "kvjax": version.__version__,
        "model": model_identity(lm),
        "policy": policy_to_json(chooser_of(cache.policy)),
        "storage": {"kind": storage.kind, "headroom": storage.headroom},
        "batch": cache.batch,
        "prompt_room": cache.prompt_capacity,
        "new_room": cache.new_capacity,
        **({"joined_tokens": cache.joined_tokens} if cache.joined_tokens else {}),
        **({"page_size": cache.page_size} if any(pool.row_starts is not None for pool in cache.pools) else {}),
        "slots": [list(layer.slots) for layer in cache.layers],
        "counts": [[list(pool) for pool in layer] for layer in counts],
    }


@contextlib.contextmanager
def _damaged(where: Path, what: str = "") -> Iterator[None]:
    """Say of a save that is not what it should be, that it is damaged; ``what`` of it, and why."""
    try:
        yield
    except NotADocument as error:
        raise KvjaxError(f"The conversation at {where} is damaged; {what}{error}.") from error


def _saved(where: Path, item: Path) -> Saved:
    """The description of a save, checked as far as it goes without the model."""
    with _damaged(where, "its description is not what was saved: "):
        description = parse_json((item / _METADATA).read_bytes())["custom_metadata"]
        version = description.get("version")
        if type(version) is not int or version < 1:
            raise NotADocument(f"version is {quoted(version)}")
        if version > VERSION:
            raise UsageError(
                f"{where} was saved by kvjax {cut(str(description.get('kvjax')))}, in version {quoted(version)} of the "
                f"form; this one reads up to version {VERSION}."
            )
        return read_description(description)


def _empty(where: Path, saved: Saved, lm: LanguageModel) -> tuple[Cache, Policy | None]:
    """Shapes of the cache that is described, and what chooses among its rounds; a wrong description is refused.

    Raises:
      NotADocument: it contradicts itself, or is of what no cache can have been.
    """
    config = lm.config
    try:
        same_model(dataclasses.asdict(saved.model), lm, saved.checksum and saved.checksum.dtype)
        policy = policy_from_json(saved.policy, config.positional == "rope")
        chooser = None if saved.rounds is None else policy_from_json(saved.rounds.policy)
        for each in (policy, chooser):
            if each is not None and not saved.is_as_written:
                each.check(config)
        check_policy(saved, policy, chooser, lm)
    except UsageError as error:
        raise UsageError(f"{where} cannot be continued here. {error}") from error
    storage, batch = Storage(saved.storage.kind, saved.storage.headroom), saved.batch
    page_size = layout_for(storage, config.head_dim).page_size
    counters: Any = jax.ShapeDtypeStruct((batch,), "int32")
    # Heads that share slots may each leave a part of a page unused, which is larger where pages are.
    larger = page_size > (saved.page_size or page_size)

    owners = by_pool(policy, [policy.owners(config, layer) for layer in range(config.num_layers)])

    def layer(i: int, slots: tuple[int, ...]) -> Any:
        pages = zip(pages_of(slots, page_size), owners[i], strict=True)
        wanted = tuple(count + (larger and owner.shares_slots) for count, owner in pages)
        return policy.init_layer(config, i, batch, wanted, lm.params.dtype, storage)

    layers = jax.eval_shape(lambda: tuple(layer(i, slots) for i, slots in enumerate(saved.slots)))
    check_counts(saved.counts, layers)
    empty = Cache(
        layers=layers,
        seen=counters,
        prompt_end=counters,
        next_token=counters,
        policy=policy,
        prompt_capacity=saved.prompt_room,
        new_capacity=saved.new_room,
        joined_tokens=saved.joined_tokens,
    )
    return empty, chooser


def _zeros(shapes: Cache) -> Cache:
    return jax.tree.map(lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype), shapes)


def holds_conversation(path: str | os.PathLike[str]) -> bool:
    """Whether a whole conversation is saved in a folder.

    Raises:
      UsageError: it holds something else, or cannot be a folder.
      KvjaxError: what says what it holds is damaged.
    """
    where = Path(path)
    try:
        if not where.exists():
            return False
        held = list(where.iterdir()) if where.is_dir() else [where]
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{where} cannot be the folder of a conversation: {reason}.") from error
    whole = [item for item in held if _is_number(item.name)]
    # Orbax names what is not whole yet 7.orbax-checkpoint-tmp.
    known = where.is_dir() and all(_is_number(item.name.split(".")[0]) for item in held)
    # An older one may be half deleted: the newest was whole before that began.
    newest = max(whole, key=lambda item: int(item.name), default=None)
    if not known or (newest is not None and not _is_conversation(where, newest)):
        raise UsageError(f"{where} holds something else than a saved conversation; name another folder.")
    return bool(whole)


def _is_number(name: str) -> bool:
    """Whether a name is a number as Orbax writes it."""
    return name.isascii() and name.isdecimal() and len(name) <= 18


def _is_conversation(where: Path, item: Path) -> bool:
    """Whether a numbered folder is a save of kvjax: others' checkpoints, or photos by year, are numbered too."""
    try:
        content = parse_json((item / _METADATA).read_bytes())
        return content["custom_metadata"]["kind"] == _KIND
    except NotADocument as error:
        what = f"The conversation at {where} is damaged" if (item / CHECKSUMS).is_file() else f"{where} is damaged"
        raise KvjaxError(f"{what}; {item.name}/{_METADATA}, which says what was saved, cannot be read.") from error
    except (OSError, KeyError, TypeError):
        return False


@contextlib.contextmanager
def _folder(path: str | os.PathLike[str], writes: bool = False) -> Iterator[Any]:
    """Orbax's checkpoints in a folder; what it refuses is one sentence. Writing removes what a crash left behind."""
    check_local("The conversation", path)
    where = Path(path).absolute()
    holds_conversation(path)

    from orbax.checkpoint import v1  # takes seconds to import

    ocp: Any = v1  # its own annotations contradict one another
    newest = ocp.training.preservation_policies.LatestN(1)
    try:
        if writes:
            # Orbax's threads wait five minutes for a folder that another of them could not make.
            where.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=where).close()
        with ocp.training.Checkpointer(where, preservation_policy=newest, cleanup_tmp_directories=writes) as folder:
            yield folder
    except (KvjaxError, MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        reason = getattr(error, "strerror", None)
        if writes:
            reason = reason or " ".join(str(error).split())[:300]
            raise KvjaxError(f"The conversation cannot be written to {path}: {reason}.") from error
        # Orbax and TensorStore say which byte of which of their files is wrong, in a page.
        raise KvjaxError(
            f"The conversation at {path} cannot be read: {reason}."
            if reason
            else f"The conversation at {path} is damaged; what was saved cannot be read back."
        ) from error


__all__ = ["holds_conversation", "load_cache", "save_cache"]

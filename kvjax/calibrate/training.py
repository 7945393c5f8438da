"""Trains a few numbers with optax: the loop, its checkpoints, and the folder that an interrupted run goes on from.

What is trained is small, whatever the model: scores' weights, gates. A checkpoint therefore holds all of it, with the
optimiser's state and the losses so far. The batch of a step follows from its number, so a run that was interrupted ends
with the numbers of one that was not.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kvjax.cache.host_memory import as_numpy
from kvjax.documents import parse_json
from kvjax.errors import KvjaxError, UsageError, quoted
from kvjax.files import check_folder, disk_reason, reason, write_atomically
from kvjax.progress import stage

_SETTINGS, _STEPS = "settings.json", "steps"


@dataclasses.dataclass(frozen=True)
class Trained:
    """The end of a training.

    Attributes:
      params: what was trained, as NumPy arrays. losses: [steps] one a step.
    """

    params: Any
    losses: np.ndarray


def train(
    loss: Callable[..., Any],
    start: Any,
    fixed: Any,
    batch: Callable[[int], Any],
    optimiser: optax.GradientTransformation,
    steps: int,
    *,
    project: Callable[[Any], Any] = lambda params: params,
    folder: Path | None = None,
    every: int = 100,
) -> Trained:
    """Minimise a loss.

    Args:
      loss: ``loss(params, batch, fixed)``, a scalar.
      start: the parameters at first, a pytree of float32.
      fixed: arrays that do not change: data, a model.
      batch: gives the batch of a step, from 0; the same one for the same step.
      optimiser: of optax. steps: how many. project: what is done to the parameters after each.
      folder: of a :func:`training_folder`; a checkpoint is written there ``every`` so many steps, and the newest one is
        gone on from. None writes nothing.
    """

    @jax.jit
    def update(params: Any, state: Any, batch: Any, fixed: Any) -> tuple[Any, Any, Any]:
        value, gradient = jax.value_and_grad(loss)(params, batch, fixed)
        changes, state = optimiser.update(gradient, state, params)
        return project(optax.apply_updates(params, changes)), state, value

    now = (jax.tree.map(jnp.asarray, start), optimiser.init(start), np.zeros(steps, np.float32))
    done, now = _newest(folder, now)
    params, state, losses = now
    losses = np.array(losses)
    with stage("job", "training", unit="steps", total=steps - done) as shown:
        for step in range(done, steps):
            params, state, value = update(params, state, batch(step), fixed)
            losses[step] = as_numpy(value)  # NumPy, asking for the number itself, would hide a Ctrl-C
            if not np.isfinite(losses[step]):
                raise KvjaxError(f"The loss of step {step + 1} is not finite; give a lower learning rate.")
            if folder is not None and ((step + 1) % every == 0 or step + 1 == steps):
                _save(folder, step + 1, (params, state, losses))
            shown.update(step + 1 - done, note=f"loss {losses[step]:.4f}")
    return Trained(jax.tree.map(np.asarray, params), losses)


# --- the folder of a run -------------------------------------------------------------------------------------------


def check_training(folder: Path) -> None:
    """Refuse a folder that cannot be a run's, whatever its settings: before a model is loaded for it.

    Raises:
      UsageError: it holds something else, or is none.
      KvjaxError: it cannot be made.
    """
    check_folder("--training", folder)
    try:
        # A run that was killed as it wrote its settings left a file of another name.
        held = [] if not folder.exists() else [left.name for left in folder.iterdir()]
    except OSError as error:
        raise KvjaxError(f"{folder} cannot be the folder of a training: {reason(error)}.") from error
    if _SETTINGS not in held and any(not name.startswith(f".{_SETTINGS}-") for name in held):
        raise UsageError(f"{folder} holds something else than a training of kvjax; name another folder.")


def training_folder(folder: Path, settings: Mapping[str, Any]) -> None:
    """Make the folder of a run, or find it as the same settings left it.

    Raises:
      UsageError: it holds a run of other settings, or something else.
      KvjaxError: it cannot be made.
    """
    check_training(folder)
    file, wanted = folder / _SETTINGS, {name: str(value) for name, value in settings.items()}
    try:
        if file.exists():
            found = parse_json(file.read_bytes())
            different = [name for name in wanted if not isinstance(found, dict) or found.get(name) != wanted[name]]
            if different:
                name = different[0]
                was = found.get(name) if isinstance(found, dict) else None
                raise UsageError(
                    f"{folder} holds a training with {name} {quoted(was)}, and this one has {quoted(wanted[name])}; "
                    "name another folder, or remove it."
                )
            return
        folder.mkdir(parents=True, exist_ok=True)
    except KvjaxError:
        raise
    except (OSError, ValueError) as error:
        raise KvjaxError(f"{folder} cannot be the folder of a training: {reason(error)}.") from error
    write_atomically(file, json.dumps(wanted, indent=1))


def remove_training(folder: Path) -> None:
    """Remove the folder of a run that ended."""
    if (folder / _SETTINGS).is_file():
        shutil.rmtree(folder, ignore_errors=True)


def _checkpoints(folder: Path) -> Any:
    from orbax.checkpoint import v1  # takes seconds to import

    ocp: Any = v1  # its own annotations contradict one another
    newest = ocp.training.preservation_policies.LatestN(1)
    return ocp.training.Checkpointer(
        (folder / _STEPS).absolute(), preservation_policy=newest, cleanup_tmp_directories=True
    )


def _save(folder: Path, step: int, tree: Any) -> None:
    leaves = {str(i): np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(tree))}
    try:
        with _checkpoints(folder) as checkpoints:
            checkpoints.save(step, leaves)
    except Exception as error:
        raise KvjaxError(f"The training cannot be written to {folder}: {disk_reason(error)}.") from error


def _newest(folder: Path | None, tree: Any) -> tuple[int, Any]:
    """The newest checkpoint's step and numbers; 0 and these where there is none."""
    if folder is None or not (folder / _STEPS).is_dir():
        return 0, tree
    leaves, structure = jax.tree.flatten(tree)
    try:
        with _checkpoints(folder) as checkpoints:
            if checkpoints.latest is None:
                return 0, tree
            step, found = checkpoints.latest.step, checkpoints.load(None)
        read = [np.asarray(found[str(i)]) for i in range(len(leaves))]
        if any(one.shape != other.shape for one, other in zip(read, map(np.asarray, leaves), strict=True)):
            raise ValueError("its arrays have other shapes")
    except Exception as error:
        raise KvjaxError(f"The training in {folder} is damaged; remove the folder to begin anew.") from error
    return step, jax.tree.unflatten(structure, read)

"""Profiles as files: written, read, and found for a policy: the one it was given, or one that comes with kvjax."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from kvjax.documents import NotADocument, parse_yaml
from kvjax.errors import UsageError, quoted
from kvjax.files import read_bytes, reason, write_atomically
from kvjax.model.config import ModelConfig
from kvjax.policies.base import Policy
from kvjax.policies.profile import KINDS, ModelShape, Profile, Table

#: Bytes of a file at most: what the statistics of a model of 80 layers of 64 heads take, and a little more.
_MOST_BYTES = 128_000_000
AnyProfile = TypeVar("AnyProfile", bound=Profile)


def save_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a profile as YAML, all of it or nothing.

    Raises:
      KvjaxError: the file cannot be written.
    """
    import yaml

    fields = {field.name: getattr(profile, field.name) for field in dataclasses.fields(profile) if field.compare}
    content: dict[str, Any] = {"kind": profile.kind}
    for name, value in fields.items():
        if name == "shape":
            content[name] = dataclasses.asdict(value)
        elif name in profile.rows_of_numbers():
            content[name] = [list(row) for row in value]
        else:
            content[name] = list(value) if name in (*profile.curves, *profile.packed) else value
    text = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=120)
    write_atomically(Path(path), text)


def load_profile(path: str | os.PathLike[str]) -> Profile:
    """Read a profile written by :func:`save_profile`.

    Raises:
      UsageError: no such file, one that is too large, not a profile, an unknown or a missing key, or values of the
        wrong kind or out of range.
    """
    try:
        content = parse_yaml(read_bytes(Path(path), _MOST_BYTES))
    except UsageError:  # it has too many bytes, which is a ValueError too
        raise
    except NotADocument as error:
        raise UsageError(f"{os.fspath(path)} is not a profile: {error}.") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"The profile {os.fspath(path)} cannot be read: {reason(error)}.") from error
    kind = str(content.get("kind")) if isinstance(content, dict) else None
    if kind not in KINDS:
        raise UsageError(
            f"{os.fspath(path)} is not a profile: its kind is {quoted(kind)}; known are {', '.join(KINDS)}."
        )
    cls = KINDS[kind]
    values = _fields(cls, content, os.fspath(path))
    shape = _fields(ModelShape, values["shape"], f"{os.fspath(path)}, shape")
    for name in cls.rows_of_numbers():
        values[name] = _table(values[name], f"{os.fspath(path)}, {name}")
    for name in cls.packed:
        rows = values[name]
        if not isinstance(rows, list) or not all(isinstance(row, str) for row in rows):
            raise UsageError(
                f"{os.fspath(path)}, {name} is not a list of texts, one a layer; calibrate the model again."
            )
        values[name] = tuple(rows)
    for name in cls.curves:
        values[name] = _table([values[name]], f"{os.fspath(path)}, {name}")[0]
    return cls(**(values | {"shape": ModelShape(**shape), "source": os.fspath(path)}))


def _fields(cls: type, content: Any, origin: str) -> dict[str, Any]:
    """The values of a dataclass's fields, exactly: a key too many or too few is an error, and so is another kind."""
    fields = {field.name: field for field in dataclasses.fields(cls) if field.compare}
    given = {name: value for name, value in content.items() if name != "kind"} if isinstance(content, Mapping) else {}
    if unknown := sorted(set(map(str, given)) - set(fields)):
        raise UsageError(f"{origin} has the unknown key {quoted(unknown[0])}; known are {', '.join(fields)}.")
    if missing := [name for name in fields if name not in given]:
        raise UsageError(f"{origin} does not say {quoted(missing[0])}; calibrate the model again.")
    for name, field in fields.items():
        kind = {"int": int, "str": str, "float": float}.get(str(field.type))
        if kind is not None and type(given[name]) is not kind:
            raise UsageError(f"{origin} has {quoted(given[name])} as {name}; a profile has a {kind.__name__} there.")
    return given


def _table(value: Any, origin: str) -> Table:
    rows = value if isinstance(value, list) else ["not a row"]
    if not all(isinstance(row, list) and all(type(x) in (int, float) for x in row) for row in rows):
        raise UsageError(f"{origin} is not a table of numbers, a row a layer; calibrate the model again.")
    try:
        return tuple(tuple(float(x) for x in row) for row in rows)
    except OverflowError as error:
        raise UsageError(f"{origin} holds a number that is too large; calibrate the model again.") from error


def folder() -> Path:
    """The folder of the profiles that come with kvjax: in an installed package, else in the repository."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "profiles"
    return installed if installed.is_dir() else package.parent / "configs" / "profiles"


@functools.lru_cache(maxsize=32)
def packaged(cls: type[AnyProfile], config: ModelConfig) -> AnyProfile | None:
    """The profile of this kind that comes with kvjax for a model of this shape, or None."""
    for path in sorted(folder().glob("*.yaml")):
        profile = load_profile(path)
        if isinstance(profile, cls) and profile.shape == ModelShape.of(config):
            return profile
    return None


def read_profile(policy: Any, *kinds: type[Profile]) -> None:
    """Put a profile in place of its file's path, in the field ``profile`` of a policy that is being made.

    Raises:
      UsageError: it is none of these kinds, or the file holds none.
    """
    if isinstance(policy.profile, (str, os.PathLike)):
        object.__setattr__(policy, "profile", load_profile(policy.profile))
    found, commands = policy.profile, " or ".join(f"`kvjax calibrate {kind.kind}`" for kind in kinds)
    if isinstance(found, Profile) and not isinstance(found, kinds):
        name = type(policy).__name__
        raise UsageError(f"The profile {found} is one of {found.kind}; {name} takes those of {commands}.")
    if found is not None and not isinstance(found, kinds):
        raise UsageError(f"profile is {quoted(found)}; give a file of {commands}, or the profile that it makes.")


def profile_of(policy: Policy, kind: type[AnyProfile], config: ModelConfig, otherwise: str = "") -> AnyProfile:
    """A policy's profile of this kind, else the one of this model that comes with kvjax.

    Args:
      otherwise: what may be given in its place, as the end of a sentence.

    Raises:
      UsageError: there is none, or the policy has one of another kind.
    """
    given = getattr(policy, "profile", None)
    found = given if given is not None else packaged(kind, config)
    if found is None:
        raise UsageError(
            f"No profile of {kind.kind} for this model comes with kvjax; make one with `kvjax calibrate {kind.kind}` "
            f"and give it as profile{otherwise}."
        )
    if not isinstance(found, kind):
        raise UsageError(f"The profile {found} is not one of {kind.kind}, which this model needs.")
    return found

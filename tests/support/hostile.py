"""Hostile input, made from the type of what it is for: values, text, and files with one thing wrong."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import random
import struct
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LONG = 5000
DIGITS = "9" * LONG


def nested(depth: int = 2000, kind: type = list) -> Any:
    """Lists, or mappings, within one another."""
    value: Any = kind()
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value


#: No whole number of any option, nor anything else of it.
NOT_WHOLE: tuple[Any, ...] = (
    -1, -(2**63), 2**63, 2**64, 10**30, 10**LONG, 1.5, math.nan, math.inf, True, "5", "", b"1", [], [1], {}, (),
    object, nested(), "x" * LONG,
)  # fmt: skip
#: No number of any option.
NOT_NUMBERS: tuple[Any, ...] = (
    -1, -0.5, math.nan, math.inf, -math.inf, 1e39, 10**400, 10**LONG, True, "hot", "", b"1", [], {}, object, nested(),
)  # fmt: skip
#: Text that may or may not mean something; whatever it does, it must be said in one sentence.
TEXTS = (
    "", " ", "\0", "a\0b", "\n", "a\nb\nc", "\ud800", "x" * LONG, "a " * LONG, "'" * 300, "{}", "%s %d {0}", "-", "--",
    "@", "@/", "@\0", "../" * 500, "~nobody-here/x", "٣", "é", "🜁" * 100, "(" * LONG, ")" * LONG, "," * 200, ":" * 50,
    "=", "=1", "a=", "a:b=c(", "1e999", DIGITS, "[" * LONG, "gs://bucket/x", "s3://bucket/y/../z",
)  # fmt: skip
#: Text that is no whole number of any flag, and no number of any.
TYPED_WHOLE = (
    "-1",
    "1.5",
    "",
    " ",
    "one",
    "nan",
    "0x10",
    "1e3",
    "1 2",
    str(2**63),
    DIGITS,
    "-" + DIGITS,
    "+",
    "\0",
    "--",
)
TYPED_NUMBERS = ("-1", "", "x", "nan", "inf", "-inf", "1e999", "1,5", DIGITS, "-" + DIGITS, "0x1p3", "\0", "..")
MESHES = (
    "model=1048576", "model=0", "data=-1", "model=2,model=2", "data", "data=", "=2", "data=2,", ",", "axes=3",
    f"model={2**63}", f"model={DIGITS}", "data=65536,model=65536", "data=1.5", "model=٣", "x" * LONG, "data=2;model=2",
    "model=65521", "data=\0",
)  # fmt: skip
BYTES = (
    "0", "-1GB", "GB", "1e9", "8 XB", f"{DIGITS}", f"{DIGITS}GB", "9" * 30, "1.GB", ".5GB", "nan", "inf", "1 2",
    "x" * LONG,
    "٣GB", "0.0000001", "8GB8GB",
)  # fmt: skip
LISTS = ("1,,2", "1,", ",", "a,b", "1;2", "-1", "0", "1.5", f"1,{2**63}", DIGITS, f"1,{DIGITS}", "1 2", "٣", "x" * LONG)
#: Values that stand in a file's tree in place of what was there.
LEAVES: tuple[Any, ...] = (
    None, True, -1, 0, 2**31, 2**63, 10**30, 1.5, -0.0, 1e300, "", "x", "\0", "x" * LONG, "gs://a/b", [], {}, [[]],
    [None],
    {"": ""}, {"a": {"b": []}}, "٣", "8",
)  # fmt: skip


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the hint alone."""
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if union else (hint,)


def values(hint: Any) -> list[tuple[Any, bool]]:
    """Values for an option of this type, each with whether every such option must refuse it."""
    kinds = kinds_of(hint)
    texts = str in kinds or any(typing.get_origin(kind) is typing.Literal for kind in kinds)
    if bool in kinds:
        return [(value, True) for value in (2, -1, "yes", "", None, [], 0.5, math.nan, nested())]
    if int in kinds and not texts:
        return [(value, True) for value in NOT_WHOLE]
    if float in kinds and not texts:
        return [(value, True) for value in NOT_NUMBERS]
    if any(typing.get_args(kind) == (int,) for kind in kinds):  # sequences of them
        return [
            (value, True) for value in ([-1], [2**63], [10**LONG], ["a"], [[1]], [None], [1.5], "5", b"5", 3, nested())
        ]
    found = [(value, False) for value in TEXTS]
    return found + [(value, True) for value in (3.5, math.nan, b"x", object, 10**LONG, nested(), {"a": 1})]


def fields(cls: Any) -> Iterator[tuple[str, Any]]:
    """Names and types of what a dataclass is made with."""
    hints = typing.get_type_hints(cls)
    return ((field.name, hints[field.name]) for field in dataclasses.fields(cls) if field.init)


def policy_texts(registry: dict[str, Any]) -> list[str]:
    """Policies as text with one thing wrong each, from the types of their options; none may be accepted."""
    found = ["lagk", "razor:inner=" + "razor(inner=" * 400 + "full" + ")" * 400, "razor:heads=0.0+", "razor:heads=+"]
    found += [f"razor:heads={text}" for text in ("0", "0.", ".0", "0.0.0", "0.-1", f"0.{DIGITS}", "0.0++1.1", "٣.٣")]
    found += [f"{'(' * 50}lagkv", "lagkv:ratio=0.5,,sink=2", "lagkv:,", "lagkv:ratio=(0.5", "full:x=1", "x" * LONG]
    for name, cls in registry.items():
        found += [f"{name}:=1", f"{name}:zzz=1"]
        for field, hint in fields(cls):
            kinds = kinds_of(hint)
            bad: tuple[str, ...] = ("",)
            if int in kinds:
                bad += ("-1", "1.5", str(2**63), DIGITS, "x", "1_0", "nan")
            elif float in kinds:
                bad += ("-1", "nan", "inf", "1e999", DIGITS, "x", "1_0")
            elif bool in kinds:
                bad += ("2", "yes")
            else:
                bad += ("zzz", "x" * LONG, "\0", "no/such/file.yaml")
            found += [f"{name}:{field}={text}" for text in bad]
    return found


def places(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to every part of a tree of lists and mappings."""
    yield at
    if isinstance(tree, (dict, list)):
        for key, child in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from places(child, (*at, key))


def changed(tree: Any, draw: random.Random) -> Any:
    """A copy of a tree in which one part is another, is gone, or is there under another name."""
    tree = copy.deepcopy(tree)
    at = draw.choice(list(places(tree)))
    if not at:
        return draw.choice(LEAVES)
    parent = tree
    for key in at[:-1]:
        parent = parent[key]
    how = draw.randrange(6)
    if how == 0:
        del parent[at[-1]]
    elif how == 1 and isinstance(parent, dict):
        parent["x" * draw.choice((0, 1, LONG))] = parent.pop(at[-1])
    elif how == 2:
        parent[at[-1]] = [parent[at[-1]]]
    else:
        parent[at[-1]] = draw.choice(LEAVES)
    return tree


def broken_json(tree: Any, draw: random.Random) -> bytes:
    """The text of a tree with one thing wrong."""
    how = draw.randrange(10)
    whole = json.dumps(tree).encode()
    if how == 0:
        return whole[: draw.randrange(len(whole))]
    if how == 1:
        place = draw.randrange(len(whole))
        return whole[:place] + bytes([draw.randrange(256)]) + whole[place + 1 :]
    if how == 2:
        return draw.choice(
            (b"", b"\xff\xfe", b"null", b"[" * 100_000, b'{"a":' * 100_000, DIGITS.encode(), b"NaN", b"\0")
        )
    if how == 3:  # the first number of it, with digits without end
        return whole.replace(b"1", DIGITS.encode(), 1)
    return json.dumps(changed(tree, draw)).encode()


def broken_yaml(tree: Any, draw: random.Random) -> bytes:
    """The text of a tree with one thing wrong, also such as only YAML can have."""
    import yaml

    how = draw.randrange(8)
    whole = yaml.safe_dump(tree, sort_keys=False).encode()
    if how == 0:
        return whole + draw.choice((
            b"\nseed: 2026-99-99\n", b"\nseed: !!timestamp x\n", b"\nseed: !!int ''\n", b"\nseed: !!bool x\n",
            b"\n\t- x",
            b"\nseed: !!python/object:os.system x\n", b"\n? [a]\n: 1\n", b"\nseed: &a [*a]\n",
            b"\nseed: !!binary '\xff'\n",
            b"\nx: &a [z, z]\ny: &b [*a, *a]\nseed: [*b, *b]\n", b"\nseed: " + DIGITS.encode(), b"\nseed: .nan\n",
            b"\n---\na: 1",
            b"\nseed: {a: {b: {c: 1}}}\n", b"\nseed: 12:34:56\n", b"\nseed: !!set {a, b}\n",
        ))  # fmt: skip
    if how == 1:
        return draw.choice(
            (b"[" * 3000, b"{a: " * 3000, b"- " * 3000, b"\xff", b"\0", b"", b"- 1", b"text", b"%", b"&a *a")
        )
    if how == 2:
        place = draw.randrange(len(whole))
        return whole[:place] + bytes([draw.randrange(256)]) + whole[place + 1 :]
    return yaml.safe_dump(changed(tree, draw), sort_keys=False).encode()


#: Kinds of a GGUF's values with their bytes: (kind, bytes) that no count of anything may have.
GGUF_VALUES: tuple[tuple[int, bytes], ...] = (
    (6, struct.pack("<f", 2.0)), (12, struct.pack("<d", 512.5)), (6, struct.pack("<f", math.nan)), (4,
    struct.pack("<I", 0)),
    (5, struct.pack("<i", -1)), (10, struct.pack("<Q", 2**63)), (7, b"\x01"), (8, struct.pack("<Q", 1) + b"2"),
    (8, struct.pack("<Q", 2**63 - 1)), (8, struct.pack("<Q", 2**64 - 1)), (9, struct.pack("<IQ", 4, 2**63 - 1)),
    (9, struct.pack("<IQ", 8, 2**63)), (9, struct.pack("<IQ", 8, 1) + struct.pack("<Q", 2**63)),
    (9, struct.pack("<IQ", 9, 2**64 - 1)), (9, struct.pack("<IQ", 9, 1) * 3000), (9, struct.pack("<IQ", 4, 0)),
    (9, struct.pack("<IQ", 12, 2**61)), (13, b""), (2**32 - 1, b""), (9, struct.pack("<IQ", 13, 1)),
)  # fmt: skip


def with_gguf_value(data: bytes, key: str, value: tuple[int, bytes]) -> bytes:
    """A GGUF whose key of a 32-bit whole number has another value."""
    name = struct.pack("<Q", len(key)) + key.encode()
    at = data.index(name) + len(name)
    return data[:at] + struct.pack("<I", value[0]) + value[1] + data[at + 8 :]


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file and folder in a folder, with its size and time of change."""
    found = {}
    for path in sorted(folder.rglob("*")):
        about = path.lstat()
        found[str(path.relative_to(folder))] = (0 if path.is_dir() else about.st_size, about.st_mtime_ns)
    return found


def shown(value: Any) -> str:
    """What was tried, for a failure's text; ``repr`` alone cannot show all of it."""
    try:
        return repr(value)[:300]
    except (RecursionError, ValueError):
        return ", ".join(f"a {type(part).__name__}" for part in value)


def sample(draw: random.Random, cases: list[Any], count: int) -> list[Any]:
    """``count`` of the cases, or all."""
    return draw.sample(cases, min(count, len(cases)))

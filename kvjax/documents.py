"""JSON and YAML that others may have written: read to a bounded depth, with one error for all that can be wrong."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

from kvjax.errors import quoted

#: Levels of lists and mappings within one another.
DEPTH = 32


class NotADocument(ValueError):
    """Text that is not what it should be; the error is the reason, which a sentence ends by.

    Attributes:
      line: where it is, from 1, or None.
    """

    def __init__(self, reason: str, line: int | None = None):
        super().__init__(reason)
        self.line = line


def parse_json(text: str | bytes) -> Any:
    """The value that JSON text holds.

    Raises:
      NotADocument: bytes that are not UTF-8, text that is not JSON, a number of thousands of digits, more than
        ``DEPTH`` levels, or an object with two values of one key.
    """
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except NotADocument:
        raise
    except UnicodeDecodeError as error:
        raise NotADocument(f"it is not UTF-8 text (byte {error.start + 1})") from error
    except json.JSONDecodeError as error:
        said = error.msg.removesuffix(" at")  # of control characters
        raise NotADocument(f"{said} at line {error.lineno}, column {error.colno}", error.lineno) from error
    except RecursionError as error:
        raise NotADocument(f"it is nested too deeply, more than {DEPTH} levels") from error
    except ValueError as error:  # Python reads whole numbers of a few thousand digits
        raise NotADocument("a number has thousands of digits") from error
    return _shallow(value)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; a key that is there again must say the same, because readers differ in which one counts."""
    found = dict(pairs)
    if len(found) < len(pairs):
        for key, value in pairs:
            if not same(value, found[key]):
                raise NotADocument(f"the key {quoted(key)} is there twice, with different values")
    return found


def same(one: Any, other: Any) -> bool:
    """Whether two values of JSON are equal and of one kind: 1 is neither 1.0 nor True."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def parse_yaml(text: str | bytes) -> Any:
    """The value that YAML text holds: plain values alone, and none that stands for another.

    Raises:
      NotADocument: bytes that are not UTF-8, text that is not YAML, an alias, a key twice, a value that is not what its
        tag says, a number of thousands of digits, or more than ``DEPTH`` levels.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            # Nine aliases of nine aliases are billions of values.
            if self.check_event(yaml.AliasEvent):
                raise yaml.MarkedYAMLError(problem_mark=self.peek_event().start_mark)
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            found = super().construct_mapping(node, deep)
            if len(found) < len(node.value):
                raise NotADocument("a mapping has a key twice", node.start_mark.line + 1)
            return found

    Loader.yaml_implicit_resolvers = _resolvers(yaml.SafeLoader)
    try:
        value = yaml.load(text, Loader)
    except NotADocument:
        raise
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise NotADocument("it is not YAML", None if mark is None else mark.line + 1) from error
    except RecursionError as error:
        raise NotADocument(f"it is nested too deeply, more than {DEPTH} levels") from error
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        # What PyYAML's constructors raise of a date that is none, or of a tag that its value does not fit.
        raise NotADocument("a value is not what it should be") from error
    return _shallow(value)


#: Numbers as YAML 1.2 writes them, with underscores besides. PyYAML's are those of YAML 1.1: 1:30 is 90, 010 is 8, and
#: 1e5 a text.
_NUMBERS = {
    "tag:yaml.org,2002:int": r"[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)",
    "tag:yaml.org,2002:float": (
        r"[-+]?(?:(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)"
    ),
}
#: Plain values that stay texts: days, and what only YAML 1.1 has.
_TEXTS = ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value", "tag:yaml.org,2002:merge")


def _resolvers(loader: Any) -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """The patterns that a loader reads as more than text, by first character, with the numbers of YAML 1.2."""
    kept = {
        first: [(tag, pattern) for tag, pattern in found if tag not in (*_NUMBERS, *_TEXTS)]
        for first, found in loader.yaml_implicit_resolvers.items()
    }
    numbers = [(tag, re.compile(rf"^(?:{pattern})$")) for tag, pattern in _NUMBERS.items()]
    return kept | {first: [*numbers, *kept.get(first, [])] for first in "-+.0123456789"}


def validated(kind: Any, value: Any) -> Any:
    """A value out of JSON as a dataclass, or whatever else type hints describe; its own checks are made too.

    Nothing is converted but lists to tuples: ``"8"`` is no number, and 1 is not True. What a dataclass's own check says
    is the reason as it stands.

    Raises:
      NotADocument: a part is missing or of another kind; the reason names it.
    """
    from pydantic import ValidationError

    try:
        # As JSON, because that is where a list may stand for a tuple.
        return _adapter(kind).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        own = first["type"] == "value_error" and first.get("ctx", {}).get("error")
        what = str(own or first["msg"]).rstrip(".")
        raise NotADocument(f"{where}: {what}" if where else what) from error


@functools.cache
def _adapter(kind: Any) -> Any:
    import pydantic  # what a command without such files does not wait for

    return pydantic.TypeAdapter(kind)


def _shallow(value: Any) -> Any:
    """The value, if its lists and mappings are within one another ``DEPTH`` times at most."""
    level = [value]
    for _ in range(DEPTH + 1):
        level = [
            child
            for item in level
            if isinstance(item, (list, Mapping))
            for child in (item.values() if isinstance(item, Mapping) else item)
            if isinstance(child, (list, Mapping))
        ]
        if not level:
            return value
    raise NotADocument(f"it is nested too deeply, more than {DEPTH} levels")

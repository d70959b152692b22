"""JSON as other tools write it into pictures, read in bounded time."""

import json
from typing import Any

from sdamd.errors import BadMetadata


def load(text: str, what: str) -> Any:
    """Read JSON; NaN and Infinity are taken, since tools in Python write them.

    Raises:
        BadMetadata: not JSON, nested deeper than Python reads, or a key stands twice with two
            values, so that nobody can say which was meant.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise BadMetadata(f"{what} is JSON nested too deep") from error
    except _TwiceError as error:
        raise BadMetadata(f"{what} has {error}") from error
    except ValueError as error:
        raise BadMetadata(f"{what} is not JSON: {error}") from error


def load_object(text: str, what: str) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        BadMetadata: as `load` does, or it is something else.
    """
    values = load(text, what)
    if not isinstance(values, dict):
        raise BadMetadata(f"{what} is a JSON {type(values).__name__}; expected an object")
    return values


class _TwiceError(ValueError):
    """A key stands twice in an object."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: dict[str, Any] = {}
        for key, value in pairs:
            # repr, since NaN is not equal to itself.
            if key in seen and repr(seen[key]) != repr(value):
                shown = key if len(key) <= 60 else f"{key[:57]}..."
                raise _TwiceError(f"the key {shown!r} twice, with two values")
            seen[key] = value
    return values

"""What is asked for (`Request`), what was decided (`Job`), and the limits of every field.

A limit, a default and a help text live on the field itself, so the command line, the UI and the
readers of files are all made from this one list; a new parameter is one line here and its use.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from types import UnionType
from typing import Any, Self, get_args

from sdamd.errors import BadRequest, unknown

SEED_MAX = 2**64 - 1
PROMPT_MAX_BYTES = 64 * 1024

BUCKETS = ((16, 16), (18, 14), (14, 18), (19, 13), (13, 19), (21, 12), (12, 21))
"""Width and height in sixteenths of a model's native side: what is offered as sizes. Few, since a
Radeon searches its kernels anew for every size, and about what the large models were trained on."""


def buckets(width: int, height: int) -> tuple[tuple[int, int], ...]:
    """The sizes to offer for a model of this native size: multiples of 64, each once."""
    scaled = (
        tuple(max(64, round(side * part / 16 / 64) * 64)
              for side, part in zip((width, height), bucket, strict=True))
        for bucket in BUCKETS
    )  # fmt: skip
    return tuple(dict.fromkeys((wide, high) for wide, high in scaled))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a field allows, and how to present it.

    `minimum` and `maximum` are inclusive; `multiple_of` counts from 0; `max_bytes` is of the
    UTF-8 text. `help` is one line for `--help` and the UI.
    """

    help: str
    minimum: float | None = None
    maximum: float | None = None
    multiple_of: int | None = None
    max_bytes: int | None = None
    multiline: bool = False

    def problem(self, name: str, value: object) -> str | None:
        """Say what is wrong with `value`, or nothing."""
        if isinstance(value, str):
            return self._text_problem(name, value)
        if not isinstance(value, int | float):
            return None
        return self._number_problem(name, value)

    def range_text(self) -> str:
        """Say the range in words: `1 to 150`."""
        if self.maximum == SEED_MAX:
            return f"{self.minimum} to 2**64-1"
        return f"{self.minimum} to {self.maximum}"

    def _text_problem(self, name: str, value: str) -> str | None:
        size = len(value.encode("utf-8", "surrogatepass"))
        if self.max_bytes is not None and size > self.max_bytes:
            return f"{name} is {size} bytes; allowed at most {self.max_bytes}"
        if any(0xD800 <= ord(letter) < 0xE000 for letter in value):
            return f"{name} holds a lone surrogate, which is not text; allowed is valid Unicode"
        if "\0" in value:
            return f"{name} holds a NUL character; allowed is text without it"
        return None

    def _number_problem(self, name: str, value: float) -> str | None:
        out_of_range = (
            not math.isfinite(value)
            or (self.minimum is not None and value < self.minimum)
            or (self.maximum is not None and value > self.maximum)
        )
        if out_of_range:
            return f"{name} is {value}; allowed {self.range_text()}"
        if self.multiple_of is not None and value % self.multiple_of:
            below = int(value) // self.multiple_of * self.multiple_of
            around = (below, below + self.multiple_of)
            nearest = [n for n in around if self.problem(name, n) is None]
            return (
                f"{name} is {value}; allowed multiples of {self.multiple_of}, "
                f"the nearest {' and '.join(map(str, nearest))}"
            )
        return None


def _ask(default: Any, help: str, **limits: Any) -> Any:
    """Make a field of a request with its default and limits."""
    return field(default=default, metadata={"limits": Limits(help=help, **limits)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Everything that decides the pixels, and nothing else.

    A field that is None is left to the checkpoint: each family has its own native size, step
    count, guidance scale and scheduler (`checkpoint.Family.defaults`).
    """

    prompt: str = _ask("", "what the picture shows", max_bytes=PROMPT_MAX_BYTES, multiline=True)
    negative_prompt: str = _ask(
        "", "what the picture must not show", max_bytes=PROMPT_MAX_BYTES, multiline=True
    )
    checkpoint: str = _ask("", "model: a name, file, folder or hub id; empty for the embedded one")
    width: int | None = _ask(
        None, "width in pixels, before upscaling", minimum=64, maximum=16384, multiple_of=8
    )
    height: int | None = _ask(
        None, "height in pixels, before upscaling", minimum=64, maximum=16384, multiple_of=8
    )
    steps: int | None = _ask(None, "denoising steps", minimum=1, maximum=150)
    guidance_scale: float | None = _ask(
        None, "how strictly to follow the prompt; 1 turns guidance off", minimum=1, maximum=50
    )
    scheduler: str | None = _ask(None, "scheduler: a diffusers name or an alias such as 'Euler a'")
    seed: int | None = _ask(
        None, "seed of the first picture; drawn when absent", minimum=0, maximum=SEED_MAX
    )
    count: int = _ask(1, "how many pictures; each has the next seed", minimum=1, maximum=100_000)
    upscale: int | None = _ask(
        None, "enlarge the finished picture this many times", minimum=1, maximum=4
    )

    def __post_init__(self) -> None:
        problems = [p for f in fields(self) if (p := problem_of(f, getattr(self, f.name)))]
        if problems:
            raise BadRequest(*problems)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        """Build from loosely typed values: form fields, command-line words, JSON, a file's row.

        Numbers may come as text. None and an absent key both mean the default.

        Raises:
            BadRequest: with every problem at once; unknown names come with the nearest known.
        """
        known = {f.name: f for f in fields(cls)}
        problems: list[str] = []
        parsed: dict[str, object] = {}
        for name, value in values.items():
            if name not in known:
                problems.append(unknown(name, list(known), "field"))
            elif value is not None:
                try:
                    parsed[name] = _parse(known[name], value)
                except ValueError as error:
                    problems.append(str(error))
                    continue
                if problem := problem_of(known[name], parsed[name]):
                    problems.append(problem)
        if problems:
            raise BadRequest(*problems)
        return cls(**parsed)  # type: ignore[arg-type]  # _parse gave each field its own type

    def to_dict(self) -> dict[str, object]:
        """The fields that are not at their defaults; a seed is text: JSON readers round it."""
        given = {f.name: v for f in fields(self) if (v := getattr(self, f.name)) != f.default}
        if "seed" in given:
            given["seed"] = str(given["seed"])
        return given


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request without choices: one picture, in which nothing is left to chance.

    All that is sent to a worker or another machine. `width` and `height` are of the picture
    before upscaling; the file is `width * upscale` by `height * upscale` pixels.
    """

    index: int
    prompt: str
    negative_prompt: str
    checkpoint: str
    width: int
    height: int
    steps: int
    guidance_scale: float
    scheduler: str
    seed: int
    upscale: int

    def to_dict(self) -> dict[str, object]:
        """All fields; the seed as text, since JSON readers round numbers beyond 2**53."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"seed": str(self.seed)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read back what `to_dict` wrote."""
        return cls(**{**values, "seed": int(values["seed"])})

    def to_request(self) -> Request:
        """The request that makes exactly this picture again."""
        values = self.to_dict()
        del values["index"]
        return Request.from_dict(values)


def limits_of(asked: Field[Any]) -> Limits:
    """The limits on a field of `Request`."""
    limits = asked.metadata["limits"]
    assert isinstance(limits, Limits)
    return limits


def problem_of(asked: Field[Any], value: object) -> str | None:
    """Say what is wrong with the value of one field, or nothing."""
    return limits_of(asked).problem(asked.name, value)


def type_of(asked: Field[Any]) -> type:
    """The type of a field's value when it is given: `int` for `int | None`."""
    declared = asked.type
    if isinstance(declared, UnionType):
        declared = next(t for t in get_args(declared) if t is not type(None))
    assert isinstance(declared, type)
    return declared


def _parse(asked: Field[Any], value: object) -> object:
    """Give `value` the field's type.

    Raises:
        ValueError: with the sentence for the user.
    """
    wanted = type_of(asked)
    if wanted is str:
        if isinstance(value, str):
            return value
        raise ValueError(f"{asked.name} is {value!r}; allowed is text")
    read: Callable[[Any], object] = _read_int if wanted is int else _read_float
    what = "a whole number" if wanted is int else "a number"
    try:
        return read(value)
    except (ValueError, TypeError, OverflowError):
        shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
        raise ValueError(
            f"{asked.name} is {shown}; allowed is {what}, {limits_of(asked).range_text()}"
        ) from None


def _read_int(value: object) -> int:
    """Read a whole number; `20.0` is one (UIs send it), `20.5` and True are not."""
    if isinstance(value, bool):
        raise TypeError
    if isinstance(value, str):
        # int() would take underscores and surrounding blanks of any script; a seed of 20 digits
        # must not pass through float.
        text = value.strip()
        digits = text.lstrip("+-")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 40):
            raise ValueError
        return int(text)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, int):
        return value
    raise ValueError


def _read_float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TypeError
    if isinstance(value, str) and "_" in value:
        raise ValueError
    return float(value)

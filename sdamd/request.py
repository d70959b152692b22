"""What is asked for (`Request`), what was decided (`Job`), and the limits of every field.

A limit, a default and a help text live on the field itself, so the command line, the UI and the
readers of files are all made from this one list; a new parameter is one line here and its use.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from enum import StrEnum
from types import UnionType
from typing import Any, Final, Self, get_args

from sdamd.errors import BadRequest, unknown
from sdamd.picture import SIDE_MAX, Picture

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


class ResizeMode(StrEnum):
    """How an init image gets the size that is asked for, where its shape is another."""

    CROP = "crop"
    STRETCH = "stretch"
    PAD = "pad"
    LATENT = "latent"


class MaskMode(StrEnum):
    """Which part of a mask is drawn anew."""

    WHITE = "white"
    BLACK = "black"


class MaskFill(StrEnum):
    """What the masked part holds before it is drawn anew."""

    ORIGINAL = "original"
    FILL = "fill"
    NOISE = "noise"
    ZERO = "zero"


class HiresUpscaler(StrEnum):
    """What enlarges a picture before its second pass: a network, a filter, or one for latents."""

    NETWORK = "network"
    LANCZOS = "lanczos"
    LATENT = "latent"
    LATENT_BICUBIC = "latent bicubic"
    LATENT_NEAREST = "latent nearest"


ALPHA: Final = "alpha"
"""As `mask_image`: what is transparent in the init image is drawn anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a field allows, and how to present it.

    `minimum` and `maximum` are inclusive; `multiple_of` counts from 0; `max_bytes` is of the
    UTF-8 text; `choices` are the only texts allowed. `help` is one line for `--help` and the UI.
    """

    help: str
    minimum: float | None = None
    maximum: float | None = None
    multiple_of: int | None = None
    max_bytes: int | None = None
    multiline: bool = False
    choices: tuple[str, ...] = ()

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
        if self.max_bytes is not None and len(value) * 4 > self.max_bytes:
            size = len(value.encode("utf-8", "surrogatepass"))
            if size > self.max_bytes:
                return f"{name} is {size} bytes; allowed at most {self.max_bytes}"
        if not value.isascii() and any(0xD800 <= ord(letter) < 0xE000 for letter in value):
            return f"{name} holds a lone surrogate, which is not text; allowed is valid Unicode"
        if "\0" in value:
            return f"{name} holds a NUL character; allowed is text without it"
        if self.choices and value not in self.choices:
            shown = value if len(value) <= 60 else f"{value[:57]}..."
            return f"{name} is {shown!r}; allowed {', '.join(self.choices)}"
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


PATH_MAX_BYTES: Final = 4096
_OUTPAINT: Final = {"minimum": 0, "maximum": 4096, "multiple_of": 8}


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
        None, "width in pixels, before upscaling", minimum=64, maximum=SIDE_MAX, multiple_of=8
    )
    height: int | None = _ask(
        None, "height in pixels, before upscaling", minimum=64, maximum=SIDE_MAX, multiple_of=8
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
    init_image: str | None = _ask(None, "picture to start from: a file", max_bytes=PATH_MAX_BYTES)
    strength: float | None = _ask(
        None, "how much of the init image is drawn anew; 0 keeps all of it", minimum=0, maximum=1
    )
    resize_mode: str = _ask(
        ResizeMode.CROP, "how the init image gets the size", choices=tuple(ResizeMode)
    )
    mask_image: str | None = _ask(
        None, "which part is drawn anew: a file, or alpha for what is transparent",
        max_bytes=PATH_MAX_BYTES,
    )  # fmt: skip
    mask_mode: str = _ask(
        MaskMode.WHITE, "which part of the mask is drawn anew", choices=tuple(MaskMode)
    )
    mask_blur: int = _ask(4, "softness of the mask's edge in pixels", minimum=0, maximum=64)
    mask_padding: int | None = _ask(
        None, "work on the masked region alone, with so many pixels around it",
        minimum=0, maximum=1024,
    )  # fmt: skip
    mask_fill: str = _ask(
        MaskFill.ORIGINAL, "what the masked part holds at first", choices=tuple(MaskFill)
    )
    outpaint_left: int = _ask(0, "pixels to add on the left", **_OUTPAINT)
    outpaint_right: int = _ask(0, "pixels to add on the right", **_OUTPAINT)
    outpaint_top: int = _ask(0, "pixels to add above", **_OUTPAINT)
    outpaint_bottom: int = _ask(0, "pixels to add below", **_OUTPAINT)
    outpaint_steps: int = _ask(1, "in how many rounds they are added", minimum=1, maximum=16)
    hires_scale: float = _ask(
        1.0, "draw a second pass at so many times the size; 1 for none", minimum=1, maximum=8
    )
    hires_upscaler: str = _ask(
        HiresUpscaler.NETWORK, "what enlarges before the second pass", choices=tuple(HiresUpscaler)
    )
    hires_steps: int | None = _ask(
        None, "denoising steps of the second pass; empty for as many", minimum=1, maximum=150
    )
    hires_strength: float = _ask(0.5, "how much the second pass draws anew", minimum=0, maximum=1)
    hires_scheduler: str | None = _ask(None, "scheduler of the second pass; empty for the same")
    hires_guidance_scale: float | None = _ask(
        None, "guidance scale of the second pass; empty for the same", minimum=1, maximum=50
    )
    hires_tile: int = _ask(
        0, "second pass tile by tile, each so many pixels wide; 0 for all at once",
        minimum=0, maximum=4096, multiple_of=64,
    )  # fmt: skip
    denoise_tile: int | None = _ask(
        None, "side of the tiles blended at every step; 0 for none, empty for the plan's",
        minimum=0, maximum=4096, multiple_of=64,
    )  # fmt: skip

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise BadRequest(*problems)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        """Build from loosely typed values: form fields, command-line words, JSON, a file's row.

        Numbers may come as text. None and an absent key both mean the default.

        Raises:
            BadRequest: with every problem at once; unknown names come with the nearest known.
        """
        parsed: dict[str, Any] = {}
        wrong: dict[str, str] = {}
        for name, value in values.items():
            asked = _FIELDS.get(name)
            if asked is None:
                wrong[name] = unknown(name, list(_FIELDS), "field")
            elif value is not None:
                try:
                    parsed[name] = _parse(asked, value)
                except ValueError as error:
                    wrong[name] = str(error)
        if not wrong:
            return cls(**parsed)
        said = [wrong.get(n) or problem_of(_FIELDS[n], parsed.get(n)) for n in values]
        raise BadRequest(*(problem for problem in said if problem))

    def to_dict(self) -> dict[str, object]:
        """The fields that are not at their defaults; a seed is text: JSON readers round it."""
        given = {n: v for n, f in _FIELDS.items() if (v := getattr(self, n)) != f.default}
        if "seed" in given:
            given["seed"] = str(given["seed"])
        return given


_FIELDS: Final = {f.name: f for f in fields(Request)}

OF_ONE_PICTURE: Final = frozenset({"index", "prompt", "negative_prompt", "seed"})
"""The fields of a job in which those that share a pass may differ."""


def _problems(request: Request) -> list[str]:
    """What is wrong with each field; a default is always right."""
    return [
        problem
        for name, asked in _FIELDS.items()
        if (value := getattr(request, name)) is not asked.default
        and (problem := problem_of(asked, value))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request without choices: one picture, in which nothing is left to chance.

    All that is sent to a worker or another machine, so pictures are there as their bytes.
    `width` and `height` are what the model works at first; with `mask_padding` that is the
    region's size and not the picture's. `hires_size` is the second pass', and `upscale`
    multiplies the finished picture. What a mode needs is None where the mode is off;
    `denoise_tile` is None where the plan decides.
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
    init_image: Picture | None = None
    strength: float | None = None
    resize_mode: str = ResizeMode.CROP
    mask_image: Picture | None = None
    mask_mode: str = MaskMode.WHITE
    mask_blur: int = 4
    mask_padding: int | None = None
    mask_fill: str = MaskFill.ORIGINAL
    outpaint_left: int = 0
    outpaint_right: int = 0
    outpaint_top: int = 0
    outpaint_bottom: int = 0
    outpaint_steps: int = 1
    hires_scale: float = 1.0
    hires_upscaler: str = HiresUpscaler.NETWORK
    hires_steps: int | None = None
    hires_strength: float = 0.5
    hires_scheduler: str | None = None
    hires_guidance_scale: float | None = None
    hires_tile: int = 0
    denoise_tile: int | None = None

    @property
    def hires_size(self) -> tuple[int, int]:
        """Width and height of the second pass: multiples of 8, the nearest to the scale."""
        sides = (self.width, self.height)
        width, height = (round(side * self.hires_scale / 8) * 8 for side in sides)
        return width, height

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """The pictures that the job starts from."""
        return tuple(p for p in (self.init_image, self.mask_image) if p is not None)

    def with_pictures(self, data: Mapping[str, bytes]) -> Self:
        """The job with the bytes of its pictures, by their sha256; those not in `data` stay."""
        changed = {
            name: replace(picture, data=data[picture.sha256])
            for name in _PICTURES
            if (picture := getattr(self, name)) is not None and picture.sha256 in data
        }
        return replace(self, **changed) if changed else self

    def to_dict(self) -> dict[str, object]:
        """All that is decided, as JSON takes it; fields with a default only if they have another.

        The seed is text, since JSON readers round numbers beyond 2**53; a picture is its name and
        its sha256.
        """
        values = {n: v for n, default in _DECIDED if (v := getattr(self, n)) != default}
        pictures = {n: v.reference for n in _PICTURES if isinstance(v := values.get(n), Picture)}
        return values | pictures | {"seed": str(self.seed)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read back what `to_dict` wrote; pictures are without their bytes.

        Raises:
            BadRequest: a picture is not one that `to_dict` wrote.
        """
        pictures = {
            n: Picture.parse(values[n], n) if values[n] else None for n in _PICTURES if n in values
        }
        return cls(**{**values, **pictures, "seed": int(values["seed"])})

    def without_hires(self) -> Self:
        """The job without its second pass: the first one's picture alone."""
        off = {n: default for n, default in _DECIDED if n.startswith("hires_")}
        return replace(self, **off)  # type: ignore[arg-type]  # each field its own default

    def to_request(self) -> Request:
        """The request that makes exactly this picture again."""
        values = self.to_dict()
        del values["index"]
        return Request.from_dict(values)


_PICTURES: Final = ("init_image", "mask_image")
_DECIDED: Final = tuple((f.name, f.default) for f in fields(Job))


def limits_of(asked: Field[Any]) -> Limits:
    """The limits on a field of `Request`."""
    limits: Limits = asked.metadata["limits"]
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


_TYPES: Final = {name: type_of(asked) for name, asked in _FIELDS.items()}


def _parse(asked: Field[Any], value: object) -> object:
    """Give `value` the field's type.

    Raises:
        ValueError: with the sentence for the user.
    """
    wanted = _TYPES[asked.name]
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

"""What the record of a picture says: the fields of a request, what is not used, and notes."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Final

from sdamd.errors import BadMetadata, BadRequest
from sdamd.metadata import Record
from sdamd.request import Request

FIELDS: Final = frozenset(f.name for f in fields(Request))

_SUFFIX: Final = re.compile(r"\.(?:safetensors|ckpt|pth?|bin|gguf|sft)$", re.IGNORECASE)

# A field that a record lacks is left to the checkpoint, which the reader should hear.
_DECIDES_PIXELS: Final = (
    "checkpoint",
    "width",
    "height",
    "steps",
    "guidance_scale",
    "scheduler",
    "seed",
)

_NOISE_BITS: Final = 32

# What a terminal would obey, or what turns the writing around: shown, not sent. Tabs and line
# ends stay.
_CONTROL: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unused:
    """One thing that a record says and sdamd does not do, with the reason in words.

    `name` is how the tool calls it; `value` is whole, however long.
    """

    name: str
    value: str
    reason: str

    def __str__(self) -> str:
        shown = self.value if len(self.value) <= 200 else f"{self.value[:197]}..."
        said = f"{self.name}: {shown} ({self.reason})" if shown else f"{self.name}: {self.reason}"
        return visible(" ".join(said.splitlines()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A picture's record as sdamd understands it.

    `tool` is the program that wrote it. `values` are fields of a request as the record has them,
    text or numbers, not yet checked: whoever adds flags to them checks all together. `unused`
    says what of the record will not be in a picture made from them; `notes` say what does not
    change pixels. `record` is set for sdamd's own, which is exact.
    """

    tool: str
    values: Mapping[str, object]
    unused: tuple[Unused, ...] = ()
    notes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    record: Record | None = None

    def request(self) -> Request:
        """The request that the record asks for.

        Raises:
            BadMetadata: a value in it is malformed or out of its range; all are named.
        """
        try:
            return Request.from_dict(self.values)
        except BadRequest as error:
            raise BadMetadata(f"the record asks for what is not possible: {error}") from error


@dataclass(slots=True, kw_only=True)
class Draft:
    """A reading in the making; each tool's module fills one."""

    tool: str
    values: dict[str, object] = field(default_factory=dict)
    unused: dict[Unused, None] = field(default_factory=dict)  # in order, each once
    notes: dict[str, str] = field(default_factory=dict)

    def put(self, name: str, value: object, *, said: str) -> None:
        """Set a field of the request, or say that there is no such field yet.

        Args:
            name: the field.
            value: as the record has it, also if it is malformed: then the request is refused,
                and no default takes its place.
            said: what the tool calls it.
        """
        if name in FIELDS:
            self.values[name] = value
        else:
            self.miss(said, value, "sdamd has no such setting")

    def miss(self, name: str, value: object, reason: str) -> None:
        """Say what cannot be used; the same thing is said once."""
        text = value if isinstance(value, str) else str(value)
        self.unused[Unused(name=name, value=text, reason=reason)] = None

    def note(self, name: str, value: object) -> None:
        """Keep what does not change pixels."""
        self.notes[name] = value if isinstance(value, str) else str(value)

    def lora(self, name: str, *weights: object) -> None:
        """A LoRA that the picture was made with: its name, and the weights that are told."""
        given = [w for w in dict.fromkeys(str(weight) for weight in weights) if w]
        self.miss(f"LoRA {model_name(name)}", " / ".join(given), "LoRAs cannot be used yet")

    def began_with(self, picture: object, strength: object) -> None:
        """The tool drew over another picture, which its record never holds.

        The strength is no use without that picture, so it is told and not set.
        """
        self.miss("init image", picture, "the record does not hold it; name it (--init-image)")
        if strength is not None:
            self.miss("strength", strength, "of use with an init image (--strength)")

    def cpu_noise(self) -> None:
        """The tool drew its noise by a generator of torch on the CPU, which sees 32 bits."""
        seed = self.values.get("seed")
        if isinstance(seed, int) and not isinstance(seed, bool) and seed >> _NOISE_BITS:
            low = seed % 2**_NOISE_BITS
            self.miss("seed", seed, f"{self.tool} drew its noise from the seed's low 32 bits, "
                                    f"{low}; sdamd uses all of them")  # fmt: skip

    def gpu_noise(self, where: str = "GPU") -> None:
        """The tool drew its noise on the GPU, or as a GPU does."""
        self.miss("noise", where, "sdamd draws it on the CPU, so the same seed gives another one")

    def done(self) -> Reading:
        """The reading, with a word on each field that decides the picture and was not found."""
        # Such records have no further pass and no upscaling but what was read into fields.
        self.values.setdefault("upscale", 1)
        said = {unused.name for unused in self.unused}
        for name in _DECIDES_PIXELS:
            if name not in self.values and name not in said:
                self.miss(name, "", "the record does not tell it")
        return Reading(
            tool=self.tool,
            values=MappingProxyType(self.values),
            unused=tuple(self.unused),
            notes=MappingProxyType(self.notes),
        )


def visible(text: str) -> str:
    """A stranger's text as it may go to a terminal: no letter in it does anything but show."""
    return _CONTROL.sub(lambda letter: f"\\u{ord(letter[0]):04x}", text)


def asks_nothing(value: object) -> bool:
    """Whether a setting at this value is one that is not used: off, 0, empty or absent."""
    return value is None or value is False or (value is not True and value in ("", 0, [], {}))


def model_name(text: str) -> str:
    """The bare name of a model file, without folders of another machine and without suffix.

    A name is looked up in the models folder; a path of a stranger must not be.
    """
    last = text.replace("\\", "/").rstrip("/").rpartition("/")[2]
    return _SUFFIX.sub("", last)

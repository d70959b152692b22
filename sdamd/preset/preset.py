"""A preset: request fields that people send to each other, as one small TOML file.

    schema = 1
    name = "Portrait"
    description = "Upright pictures of one person"

    [request]
    prompt = "photo of {prompt}, soft light"
    width = 512
    height = 768

    [needs.checkpoint]
    name = "some-model"
    sha256 = "..."
    url = "https://..."        # shown to people, never fetched

    [tiers.16]                 # on cards with 16 GiB and more
    width = 768

Data only: no code, no path, nothing that is fetched. What a preset says goes before the defaults
of the model and behind what a person asks for; of several presets the later one goes first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sdamd.request import Request

TIERS: Final = (8, 12, 16, 24)
"""GiB of memory of the cards that people have."""
PLACEHOLDER: Final = "{prompt}"
TEMPLATES: Final = frozenset({"prompt", "negative_prompt"})

NEVER_SHARED: Final = frozenset({"checkpoint", "init_image", "mask_image"})
"""Fields that name what lies on one machine; a checkpoint is a need, found by name and hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A model that a preset was made for: never where it lies, only what it is.

    `kind` is `checkpoint`, `vae`, `upscaler`, `loras` ...; `sha256` 64 hexadecimal digits or
    empty; `url` where people get it, which sdamd never fetches.
    """

    kind: str
    name: str
    sha256: str = ""
    url: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """What a preset file says. `values` and those of `tiers` are checked request fields.

    `families` are the architectures that it is made for, by their keys in `FAMILIES`; empty is any.
    """

    name: str
    description: str = ""
    author: str = ""
    licence: str = ""
    tags: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    values: Mapping[str, object] = field(default_factory=dict)
    needs: tuple[Need, ...] = ()
    tiers: Mapping[int, Mapping[str, object]] = field(default_factory=dict)

    def values_for(self, vram_gib: float | None) -> dict[str, object]:
        """The fields for a card of this size; without one (None) those of no tier."""
        made = dict(self.values)
        for size in sorted(self.tiers):
            # A card sold as 16 GiB reports a little less.
            if vram_gib is not None and vram_gib >= size * 0.95:
                made |= self.tiers[size]
        return made

    def need(self, kind: str) -> Need | None:
        """The need of a kind of which there is one."""
        return next((need for need in self.needs if need.kind == kind), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a preset makes of one field: None stands for the model's default."""

    field: str
    before: object
    after: object
    preset: str


def applied(
    presets: Sequence[Preset], asked: Mapping[str, object], vram_gib: float | None
) -> tuple[dict[str, object], tuple[Change, ...]]:
    """Request values with presets below what was asked, and what each preset changed.

    A prompt with `{prompt}` takes in what was asked, or what an earlier preset made of it; one
    without is a default like every other field.
    """
    made: dict[str, object] = {}
    changes: list[Change] = []
    for preset in presets:
        for name, value in preset.values_for(vram_gib).items():
            template = name in TEMPLATES and PLACEHOLDER in str(value)
            if name in asked and not template:
                continue
            before = made.get(name, asked.get(name))
            made[name] = _joined(str(value), str(before or "")) if template else value
            if made[name] != before:
                change = Change(field=name, before=before, after=made[name], preset=preset.name)
                changes.append(change)
    return {**asked, **made}, tuple(changes)


def from_request(request: Request, **about: Any) -> Preset:
    """The preset of what a request says, but for its seed and what lies on one machine."""
    values = {
        name: value
        for name, value in request.to_dict().items()
        if name not in NEVER_SHARED | {"seed", "count"}
    }
    return Preset(values=values, **about)


def _joined(template: str, text: str) -> str:
    """Put a prompt into its template; nothing in it leaves no comma behind."""
    if text:
        return template.replace(PLACEHOLDER, text)
    parts = [part.strip() for part in template.replace(PLACEHOLDER, "").split(",")]
    return ", ".join(part for part in parts if part)

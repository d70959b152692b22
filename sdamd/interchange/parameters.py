"""The `parameters` text: AUTOMATIC1111, Forge and its like, Civitai, and tools that write as they.

The text is cut by `metadata.split_parameters`. Here is what its settings mean. SD.Next,
stable-diffusion.cpp and Fooocus write the same form in other words; their modules bring the
settings into those of AUTOMATIC1111 first.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from sdamd import prompt as language
from sdamd.errors import BadMetadata
from sdamd.interchange import json_text, samplers
from sdamd.interchange.reading import Draft, Reading, model_name
from sdamd.metadata import EMBEDDED, HIRES_UPSCALERS, Parameters, split_parameters
from sdamd.request import HiresUpscaler

NO_MASK: Final = "the record does not hold it; name it (--mask-image)"
OWN_NETWORK: Final = "sdamd's own upscaling network takes its place"

# What tells of a picture and does not change it.
_NOTES: Final = frozenset({
    "Model hash", "VAE hash", "Hashes", "Lora hashes", "TI hashes", "Version", "User", "App",
    "Created Date", "Civitai metadata", "Init image hash", "Batch size", "Batch pos",
    "Cache FP16 weight for LoRA", "Operations", "Parser", "Pipeline", "Batch", "Comment",
    "Performance", "Raw prompt", "Raw negative prompt", "Metadata scheme", "LoRA hashes",
})  # fmt: skip

# With these values nothing is asked that sdamd does not do anyway.
_NEUTRAL: Final[Mapping[str, frozenset[str]]] = {
    "Clip skip": frozenset({"0", "1", "-1"}),
    "ENSD": frozenset({"0"}),
    "Variation seed strength": frozenset({"0", "0.0"}),
    "Token merging ratio": frozenset({"0", "0.0"}),
    "Token merging ratio hr": frozenset({"0", "0.0"}),
    "Tiling": frozenset({"False"}),
    "FP8 weight": frozenset({"Disable"}),
    "VAE": frozenset({"None", "none", "Automatic", "Built in", "Default (model)"}),
    "VAE Encoder": frozenset({"Full"}),
    "VAE Decoder": frozenset({"Full"}),
    "Face restoration": frozenset({"None"}),
    "Emphasis": frozenset({"Original"}),
    "Diffusion in Low Bits": frozenset({"Automatic"}),
    "Guidance": frozenset({"3.500000"}),  # of stable-diffusion.cpp, for models that are distilled
    "Hires sampler": frozenset({"Use same sampler"}),
    "Hires schedule type": frozenset({"Use same scheduler"}),
    "Hires checkpoint": frozenset({"Use same checkpoint"}),
    "Hires Module 1": frozenset({"Use same choices", "Built-in"}),
    "Hires steps": frozenset({"0"}),
    "Hires resize": frozenset({"0x0"}),
    "Refiner": frozenset({"None"}),
}

_UPSCALERS: Final = {name: ours for ours, name in HIRES_UPSCALERS.items()} | {
    "Latent (nearest)": HiresUpscaler.LATENT_NEAREST,
    "Latent (antialiased)": HiresUpscaler.LATENT,
    "Latent (bicubic antialiased)": HiresUpscaler.LATENT_BICUBIC,
}

_SIZE: Final = re.compile(r"(\d+)x(\d+)")
_VERSION: Final = re.compile(r"v(\d+)\.(\d+)")
_SURROGATES: Final = re.compile(r"\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})")


@dataclass(slots=True, kw_only=True)
class Settings:
    """The settings of a text by their names, taken out one by one; what is left was not used."""

    left: dict[str, str]

    def take(self, name: str) -> str | None:
        """The value of a setting, which is then done with; None where there is none."""
        return self.left.pop(name, None)


Dialect = Callable[[Draft, Parameters, Settings], None]
"""Brings another tool's settings into those of AUTOMATIC1111, and takes what is its own."""


def read(text: str, dialects: Mapping[str, Dialect] = MappingProxyType({})) -> Reading:
    """Read a `parameters` text of any tool.

    Args:
        text: the text.
        dialects: by the tool's name, for those that write this form in other words.

    Raises:
        BadMetadata: it is too long.
    """
    text = _SURROGATES.sub(_joined, text)
    try:
        parts = split_parameters(text)
    except BadMetadata as error:
        if "no line of settings" not in str(error):
            raise
        draft = Draft(tool="an unknown tool", values={"prompt": text.strip()})
        draft.miss("settings", "", "not understood; the whole text is taken for the prompt")
        return draft.done()
    tool = tool_of(dict(parts.settings))
    draft = Draft(tool=tool)
    draft.values["prompt"] = parts.prompt
    draft.values["negative_prompt"] = parts.negative_prompt
    settings = _settings(draft, parts)
    if tool in dialects:
        dialects[tool](draft, parts, settings)
    _read_settings(draft, settings)
    _read_prompt(draft, settings)
    _read_rest(draft, parts.rest)
    _read_what_is_left(draft, settings)
    return draft.done()


def tool_of(settings: Mapping[str, str]) -> str:
    """Which tool wrote these settings."""
    version = settings.get("Version", "")
    if settings.get("App", "").startswith("SD.Next"):
        return "SD.Next"
    for start, tool in (
        ("sdamd", "sdamd"),
        ("stable-diffusion.cpp", "stable-diffusion.cpp"),
        ("Fooocus", "Fooocus"),
        ("ComfyUI", "ComfyUI"),
        ("neo", "Forge"),
        ("f", "Forge"),
        ("v", "AUTOMATIC1111"),
    ):
        if version.startswith(start):
            return tool
    if {"Civitai resources", "Civitai metadata", "Created Date"} & set(settings):
        return "Civitai"
    return "AUTOMATIC1111"


def _joined(pair: re.Match[str]) -> str:
    """A letter that was written as the escapes of two surrogates."""
    code = bytes.fromhex(pair[1] + pair[2])
    return code.decode("utf-16-be", "replace")


def _settings(draft: Draft, parts: Parameters) -> Settings:
    """The settings by their names; of one that stands twice the last counts, as everywhere."""
    found: dict[str, str] = {}
    for key, value in parts.settings:
        if found.get(key, value) != value:
            draft.miss(key, found[key], "stands there twice; the last one is taken")
        found[key] = value
    for key in [k for k, neutral in _NEUTRAL.items() if found.get(k) in neutral]:
        draft.note(key, found.pop(key))
    return Settings(left=found)


def _read_settings(draft: Draft, settings: Settings) -> None:
    for key, name in (
        ("Steps", "steps"),
        ("CFG scale", "guidance_scale"),
        ("Seed", "seed"),
        ("Upscale", "upscale"),
        ("Denoise tile", "denoise_tile"),
    ):
        if value := settings.take(key):
            draft.put(name, value, said=key)
    if size := settings.take("Size"):
        found = _SIZE.fullmatch(size)
        draft.values["width"] = found[1] if found else size
        draft.values["height"] = found[2] if found else size
    _read_model(draft, settings)
    _read_sampler(draft, settings)
    _read_passes(draft, settings)
    _read_mask(draft, settings)
    _read_noise(draft, settings)


def _read_model(draft: Draft, settings: Settings) -> None:
    model, digits = settings.take("Model"), settings.left.get("Model hash")
    if model:
        draft.values["checkpoint"] = "" if model == EMBEDDED else model_name(model)
    elif digits and "checkpoint" not in draft.values:
        draft.values["checkpoint"] = digits
        draft.miss("Model hash", digits, "the record has the model's hash but no name")


def _read_sampler(draft: Draft, settings: Settings) -> None:
    sampler, kind = settings.take("Sampler"), settings.take("Schedule type") or ""
    if sampler is None or sampler == "Undefined":
        for key, value in (("Sampler", sampler), ("Schedule type", kind)):
            if value:
                draft.miss(key, value, "names no sampler")
        return
    name, known = samplers.of_a1111(sampler, kind)
    draft.values["scheduler"] = name
    if not known:
        draft.miss("Sampler", name, samplers.UNKNOWN)


def _read_passes(draft: Draft, settings: Settings) -> None:
    """A second pass at a larger size, or a picture to begin with; one strength serves either."""
    strength = settings.take("Denoising strength")
    if init_strength := settings.take("Init strength"):
        draft.began_with("", init_strength)
    scale, size = settings.take("Hires upscale"), settings.take("Hires resize")
    upscaler, steps = settings.take("Hires upscaler"), settings.take("Hires steps")
    if not (scale or size or upscaler or steps):
        if strength is not None:
            draft.began_with("", strength)
        return
    if size and not scale:
        scale = _scale(draft, size)
    for name, value, said in (
        ("hires_scale", scale, "Hires upscale"),
        ("hires_strength", strength, "Denoising strength"),
        ("hires_steps", steps, "Hires steps"),
        ("hires_guidance_scale", settings.take("Hires CFG Scale"), "Hires CFG Scale"),
        ("hires_tile", settings.take("Hires tile"), "Hires tile"),
    ):
        if value is not None:
            draft.put(name, value, said=said)
    if upscaler:
        put_upscaler(draft, upscaler, said="Hires upscaler")
    _read_hires_sampler(draft, settings)


def put_upscaler(draft: Draft, name: str, *, said: str) -> None:
    """Set what enlarges before the second pass; unknown networks become sdamd's own, said so."""
    ours = _UPSCALERS.get(name)
    draft.put("hires_upscaler", ours or HiresUpscaler.NETWORK, said=said)
    if ours is None:
        draft.miss(said, name, OWN_NETWORK)


def _scale(draft: Draft, size: str) -> str | None:
    """How many times larger the second pass is, where both sides tell the same."""
    found = _SIZE.fullmatch(size)
    try:
        width, height = (int(str(draft.values.get(name))) for name in ("width", "height"))
    except ValueError:
        found = None
        width = height = 0
    if found and width and height:
        across, down = int(found[1]) / width, int(found[2]) / height
        if math.isclose(across, down, rel_tol=0.01):
            return f"{across:.6g}"
    draft.miss("Hires resize", size, "a second pass has the shape of the first one")
    return None


def _read_hires_sampler(draft: Draft, settings: Settings) -> None:
    sampler, kind = settings.take("Hires sampler"), settings.take("Hires schedule type")
    if sampler is None:
        if kind is not None:
            draft.miss("Hires schedule type", kind, "there is no sampler for it in the record")
        return
    name, known = samplers.of_a1111(sampler, kind or "")
    draft.put("hires_scheduler", name, said="Hires sampler")
    if not known:
        draft.miss("Hires sampler", name, samplers.UNKNOWN)


_MASK: Final[Mapping[str, str]] = {
    "Mask blur": "--mask-blur",
    "Masked area padding": "--mask-padding",
    "Masked content": "--mask-fill",
    "Mask mode": "--mask-mode",
    "Inpaint area": "--mask-padding",
    "Outpaint": "--outpaint-left ...",
}


def _read_mask(draft: Draft, settings: Settings) -> None:
    """Inpainting; like a strength, its settings are of no use without what is not here."""
    asked = [(key, value) for key in _MASK if (value := settings.take(key)) is not None]
    if not asked:
        return
    draft.miss("mask", "", NO_MASK)
    for key, value in asked:
        draft.miss(key, value, f"of use with a mask ({_MASK[key]})")


def _read_noise(draft: Draft, settings: Settings) -> None:
    where = settings.take("RNG")
    on_cpu = {"CPU", "cpu", "std_default"}
    if draft.tool == "sdamd" or (where is None and draft.tool in {"ComfyUI", "Fooocus", "Civitai"}):
        return
    if where in on_cpu:
        draft.note("RNG", where or "")
        seed = str(draft.values.get("seed", ""))
        if seed.isascii() and seed.isdigit() and len(seed) <= 20:
            draft.values["seed"] = int(seed)
            if draft.tool != "stable-diffusion.cpp":
                draft.cpu_noise()
            draft.values["seed"] = seed
    else:
        draft.gpu_noise(where or "GPU")


# -- the prompts ---------------------------------------------------------------------------------


def _read_prompt(draft: Draft, settings: Settings) -> None:
    """What the prompts ask for beside words."""
    named: set[str] = set()
    for field in ("prompt", "negative_prompt"):
        for tag in language.extra_networks(str(draft.values[field]))[1]:
            if tag.kind.casefold() in {"lora", "lyco", "lycoris"}:
                draft.lora(tag.name, *tag.arguments[1:])
                named.add(model_name(tag.name))
            else:
                draft.miss(f"{tag.kind} {tag.name}", ":".join(tag.arguments[1:]),
                           "networks of this kind cannot be used yet")  # fmt: skip
    loras, embeddings = _hashed(settings)
    for name in loras:
        if model_name(name) not in named:
            draft.lora(name)
    for name in embeddings:
        draft.miss(f"embedding {name}", "", "textual inversions cannot be used yet")
    _read_old_timelines(draft, settings.left.get("Version", ""))
    if "Civitai resources" in settings.left:
        _read_resources(draft, settings.left.pop("Civitai resources"))


def _hashed(settings: Settings) -> tuple[list[str], list[str]]:
    """The LoRAs and the embeddings whose hashes the text has, in either of two forms."""
    loras = _names_of(settings.left.get("Lora hashes", ""))
    embeddings = _names_of(settings.left.get("TI hashes", ""))
    try:
        hashes = json_text.load(settings.left.get("Hashes", "{}"), "Hashes")
    except BadMetadata:
        hashes = None  # it stays among the notes as it is
    for key in hashes if isinstance(hashes, dict) else ():
        kind, _, name = key.partition(":")
        if kind.casefold() == "lora" and name:
            loras.append(name)
        elif kind.casefold() == "embed" and name:
            embeddings.append(name)
    return list(dict.fromkeys(loras)), list(dict.fromkeys(embeddings))


def _names_of(hashes: str) -> list[str]:
    """The names in `name: hash, name: hash`."""
    return [part.rpartition(":")[0].strip() for part in hashes.split(",") if ":" in part]


def _read_old_timelines(draft: Draft, version: str) -> None:
    """Before 1.6 the numbers in `[from:to:when]` meant something else."""
    found = _VERSION.match(version)
    steps = str(draft.values.get("steps", ""))
    if (
        not found
        or (int(found[1][:6]), int(found[2][:6])) >= (1, 6)
        or "[" not in str(draft.values["prompt"])
    ):
        return
    count = int(steps) if steps.isascii() and steps.isdigit() and len(steps) <= 4 else 20
    text = str(draft.values["prompt"])
    for part in language.subprompts(text):
        now = language.schedule(part.text, count)
        if now != language.schedule(part.text, count, old_timelines=True):
            draft.miss("Version", version, "before v1.6 the numbers in [from:to:when] counted "
                                           "otherwise; they are read as of today")  # fmt: skip


def _read_resources(draft: Draft, text: str) -> None:
    """What Civitai's own generator used: `[{"type": "lora", "weight": 0.8, ...}]`."""
    try:
        resources = json_text.load(text, "Civitai resources")
    except BadMetadata as error:
        draft.miss("Civitai resources", text, str(error))
        return
    if not isinstance(resources, list):
        draft.miss("Civitai resources", text, "not a list")
        return
    for resource in resources:
        _read_resource(draft, resource)


def _read_resource(draft: Draft, resource: Any) -> None:
    if not isinstance(resource, dict):
        draft.miss("Civitai resources", resource, "not understood")
        return
    kind, name = resource.get("type"), str(resource.get("modelName") or "")
    version = str(resource.get("modelVersionName") or resource.get("versionName") or "")
    shown = " ".join(part for part in (name, version) if part)
    number = resource.get("modelVersionId")
    if kind == "checkpoint" and "checkpoint" not in draft.values and shown:
        draft.values["checkpoint"] = shown
        draft.note("Civitai model version", number)
    elif kind == "checkpoint":
        draft.note("Civitai model version", f"{shown} ({number})" if shown else number)
    elif kind in {"lora", "lycoris", "locon", "dora"}:
        draft.lora(shown or f"of Civitai's version {number}", resource.get("weight", ""))
    else:
        draft.miss(f"{kind} {shown}".strip(), resource.get("weight", ""), "cannot be used yet")


# -- the rest ------------------------------------------------------------------------------------


def _read_rest(draft: Draft, rest: str) -> None:
    """Lines after the settings: Dynamic Prompts writes its templates there."""
    others = []
    key = ""
    for line in rest.splitlines():
        found = re.fullmatch(r"(Template|Negative Template):[ \t]*(.*)", line, re.IGNORECASE)
        if found:
            key = found[1]
            draft.note(key, found[2])
        elif key:
            draft.note(key, f"{draft.notes[key]}\n{line}")
        else:
            others.append(line)
    if others:
        draft.miss("text after the settings", "\n".join(others), "not understood")


def _read_what_is_left(draft: Draft, settings: Settings) -> None:
    for key, value in settings.left.items():
        if key in _NOTES:
            draft.note(key, value)
        else:
            draft.miss(key, value, "sdamd has no such setting")

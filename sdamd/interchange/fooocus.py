"""Fooocus: its record as JSON, its `parameters` text, and its presets.

Fooocus reads lists in records with Python's `eval`; here they are taken apart as text.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from sdamd.interchange import json_text, samplers, weights
from sdamd.interchange.parameters import Settings
from sdamd.interchange.reading import Draft, Reading, model_name
from sdamd.metadata import Parameters

TOOL: Final = "Fooocus"

_FIELDS: Final[Mapping[str, str]] = {
    "steps": "steps",
    "seed": "seed",
    "guidance_scale": "guidance_scale",
}
_NOTES: Final = frozenset({
    "base_model_hash", "metadata_scheme", "version", "created_by", "prompt", "negative_prompt",
    "prompt_expansion", "performance", "styles", "refiner_model_hash", "lora_hashes",
})  # fmt: skip
_NONE: Final = ("None", "", None)
_PAIR: Final = re.compile(r"\(?\s*(\d+)\s*[,*x×]\s*(\d+)\s*\)?")
_LORA_KEY: Final = re.compile(r"lora_combined_\d+")

_STEPS: Final[Mapping[str, int]] = {
    "Quality": 60, "Speed": 30, "Extreme Speed": 8, "Lightning": 4, "Hyper-SD": 4,
}  # fmt: skip
"""Source: Fooocus, modules/flags.py."""


def read(text: str) -> Reading:
    """Read the JSON of the `fooocus` scheme.

    Raises:
        BadMetadata: it is not a JSON object.
    """
    values = json_text.load_object(text, "Fooocus's record")
    draft = Draft(tool=TOOL)
    left = dict(values)
    _read_prompts(draft, left)
    for key, field in _FIELDS.items():
        if key in left:
            draft.put(field, left.pop(key), said=key)
    if "resolution" in left:
        _put_size(draft, left.pop("resolution"), "resolution")
    if "sampler" in left:
        samplers.put(draft, samplers.COMFYUI, left.pop("sampler"), left.pop("scheduler", ""))
    model = left.pop("base_model", None)
    if isinstance(model, str):
        draft.values["checkpoint"] = model_name(model)
    _read_loras(draft, left)
    _read_extras(draft, left)
    seed = draft.values.get("seed")
    if isinstance(seed, str) and seed.isascii() and seed.isdigit() and len(seed) <= 20:
        draft.values["seed"] = int(seed)
    draft.cpu_noise()
    return draft.done()


def _read_prompts(draft: Draft, left: dict[str, Any]) -> None:
    """What was encoded, styles and expansion and all; what was typed is a note beside it.

    Fooocus encodes each text of the list for itself and chains the results, as BREAK does.
    """
    for field, full in (("prompt", "full_prompt"), ("negative_prompt", "full_negative_prompt")):
        texts = left.pop(full, None)
        if isinstance(texts, str):
            texts = [texts]
        if not isinstance(texts, list) or not texts:
            texts = [left.get(field, "")]
            if field == "prompt" and left.get("styles") not in {"[]", None}:
                draft.miss("styles", str(left["styles"]), "what they add is not in the record")
        parts = [weights.from_comfyui(str(text).strip()) for text in texts]
        draft.values[field] = " BREAK ".join(part for part in parts if part)


def _put_size(draft: Draft, value: Any, said: str) -> None:
    found = _PAIR.fullmatch(value) if isinstance(value, str) else None
    if found:
        draft.values |= {"width": found[1], "height": found[2]}
    else:
        # Refused by the request's own check, so that no default takes its place.
        draft.values |= {"width": value, "height": value}
        draft.miss(said, str(value), "not a size")


def _read_loras(draft: Draft, left: dict[str, Any]) -> None:
    """`[[name, weight, hash]]`, or `lora_combined_1: "name : weight"`."""
    loras = left.pop("loras", [])
    for lora in loras if isinstance(loras, list) else [loras]:
        if isinstance(lora, list) and lora:
            draft.lora(str(lora[0]), *lora[1:2])
        else:
            draft.miss("loras", str(lora), "not understood")
    for key in [k for k in left if _LORA_KEY.fullmatch(k)]:
        name, _, weight = str(left.pop(key)).rpartition(" : ")
        draft.lora(name or weight, weight if name else "")


def _read_extras(draft: Draft, left: dict[str, Any]) -> None:
    if left.get("refiner_model") in _NONE:
        for key in ("refiner_model", "refiner_switch", "refiner_model_hash"):
            left.pop(key, None)
    if left.get("vae") in {"Default (model)", "None"}:
        draft.note("vae", left.pop("vae"))
    if left.get("clip_skip") in {2, "2"}:
        draft.note("clip_skip", left.pop("clip_skip"))  # what SDXL always does
    for key, value in left.items():
        if key in _NOTES:
            draft.note(key, value)
        else:
            draft.miss(key, str(value), "sdamd has no such setting")


def adapt(draft: Draft, parts: Parameters, settings: Settings) -> None:
    """Bring the `parameters` text of the `a1111` scheme into AUTOMATIC1111's words."""
    for field, text in (("prompt", parts.prompt), ("negative_prompt", parts.negative_prompt)):
        draft.values[field] = " BREAK ".join(
            weights.from_comfyui(line.strip()) for line in text.split("\n") if line.strip()
        )
    if kind := settings.take("Scheduler"):
        sampler = settings.take("Sampler") or ""
        # The sampler's name is AUTOMATIC1111's and may have the schedule at its end already.
        stem = sampler.removesuffix(" Karras").removesuffix(" Exponential")
        samplers.put(draft, samplers.COMFYUI, stem, kind)
    names = settings.take("Lora hashes") or ""
    if names:
        draft.note("Lora hashes", names)
    given = [w.strip() for w in (settings.take("Lora weights") or "").split(",") if w.strip()]
    by_name = dict(part.rsplit(":", 1) for part in given if ":" in part)
    for part in names.split(","):
        name = part.rpartition(":")[0].strip()
        if name:
            draft.lora(name, by_name.get(name, "").strip())
    if settings.left.get("VAE") == "Default (model)":
        draft.note("VAE", settings.left.pop("VAE"))
    if settings.left.get("Clip skip") == "2":
        draft.note("Clip skip", settings.left.pop("Clip skip"))  # what SDXL always does
    if styles := settings.take("Styles"):
        draft.note("Styles", styles)  # their words are in the prompt


# -- presets -------------------------------------------------------------------------------------

_PRESET_FIELDS: Final[Mapping[str, str]] = {
    "default_cfg_scale": "guidance_scale",
    "default_prompt": "prompt",
    "default_prompt_negative": "negative_prompt",
    "default_image_number": "count",
}
_DOWNLOADS: Final = ("checkpoint_downloads", "lora_downloads", "embeddings_downloads",
                     "vae_downloads")  # fmt: skip


def read_preset(text: str) -> Reading:
    """Read a preset: fields of a request, any of them absent; nothing it names is fetched.

    Raises:
        BadMetadata: it is not a JSON object, or a key stands twice.
    """
    left = json_text.load_object(text, "Fooocus's preset")
    draft = Draft(tool=TOOL)
    for key, field in _PRESET_FIELDS.items():
        if key in left:
            value = left.pop(key)
            if field.endswith("prompt") and isinstance(value, str):
                value = weights.from_comfyui(value)
            draft.put(field, value, said=key)
    if "default_model" in left:
        model = left.pop("default_model")
        draft.values["checkpoint"] = model_name(model) if isinstance(model, str) else model
    if "default_aspect_ratio" in left:
        _put_size(draft, left.pop("default_aspect_ratio"), "default_aspect_ratio")
    _read_preset_sampler(draft, left)
    _read_preset_steps(draft, left)
    _read_preset_loras(draft, left)
    _read_preset_rest(draft, left)
    return Reading(tool=TOOL, values=draft.values, unused=tuple(draft.unused), notes=draft.notes)


def _read_preset_sampler(draft: Draft, left: dict[str, Any]) -> None:
    if "default_sampler" in left:
        sampler, schedule = left.pop("default_sampler"), left.pop("default_scheduler", "")
        samplers.put(draft, samplers.COMFYUI, sampler, schedule)


def _read_preset_rest(draft: Draft, left: dict[str, Any]) -> None:
    for key in _DOWNLOADS:
        for name, url in _items(left.pop(key, {})):
            draft.note(f"{key}: {name}", url)
    if left.get("default_refiner") in _NONE:
        for key in ("default_refiner", "default_refiner_switch"):
            left.pop(key, None)
    for key, value in left.items():
        draft.miss(key, str(value), "sdamd has no such setting")


def _items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def _read_preset_steps(draft: Draft, left: dict[str, Any]) -> None:
    """Steps are told, or follow from the performance that was chosen."""
    steps, performance = (
        left.pop("default_overwrite_step", -1),
        left.pop("default_performance", None),
    )
    if isinstance(steps, int) and steps > 0:
        draft.values["steps"] = steps
    elif performance in _STEPS:
        draft.values["steps"] = _STEPS[performance]
    if performance in {"Extreme Speed", "Lightning", "Hyper-SD"}:
        draft.miss("default_performance", performance, "needs a LoRA that cannot be used yet")
    elif performance is not None and performance not in _STEPS:
        draft.miss("default_performance", str(performance), "not known")


def _read_preset_loras(draft: Draft, left: dict[str, Any]) -> None:
    """`[enabled, file, weight]`, and `[file, weight]` before that."""
    loras = left.pop("default_loras", [])
    for lora in loras if isinstance(loras, list) else [loras]:
        if not isinstance(lora, list) or len(lora) < 2:
            draft.miss("default_loras", str(lora), "not understood")
            continue
        enabled, name, weight = lora[:3] if len(lora) >= 3 else (True, *lora)
        if enabled and name not in _NONE:
            draft.lora(str(name), weight)

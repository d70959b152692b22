"""stable-diffusion.cpp: the `parameters` text with its own names, and all of it as JSON behind.

Source of the keys: stable-diffusion.cpp, examples/common/common.cpp, `get_image_params`.
"""

from typing import Any

from sdamd.errors import BadMetadata
from sdamd.interchange import json_text, samplers
from sdamd.interchange.parameters import Settings
from sdamd.interchange.reading import Draft
from sdamd.metadata import Parameters


def adapt(draft: Draft, _: Parameters, settings: Settings) -> None:
    """Bring the settings into those of AUTOMATIC1111."""
    if sampler := settings.take("Sampler"):
        name, schedule = (*sampler.split(" ", 1), "")[:2]
        samplers.put(draft, samplers.SD_CPP, name, schedule)
    _read_hires(settings)
    for key, neutral in (("Eta", 0.0), ("Clip skip", -1.0)):
        if (text := settings.left.get(key)) and _number(text) == neutral:
            draft.note(key, settings.left.pop(key))
    if text := settings.take("SDCPP"):
        _read_json(draft, text)


def _read_hires(settings: Settings) -> None:
    """Here `Hires upscale` names the upscaler, and the factor is `Hires scale`."""
    left = settings.left
    if "Hires scale" in left:
        left["Hires upscaler"] = left.pop("Hires upscale", "Latent")
        left["Hires upscale"] = left.pop("Hires scale")
        if left.get("Hires resize") == "0x0" or _number(left["Hires upscale"]):
            left.pop("Hires resize", None)
        if left.get("Hires steps") == "0":
            del left["Hires steps"]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _read_json(draft: Draft, text: str) -> None:
    """What the JSON says beyond the text: LoRAs above all."""
    try:
        values = json_text.load_object(text, "SDCPP")
    except BadMetadata as error:
        draft.miss("SDCPP", text, str(error))
        return
    prompts = values.get("prompt")
    if isinstance(prompts, dict) and isinstance(prompts.get("positive"), str):
        draft.values["prompt"] = prompts["positive"]
    loras = values.get("loras", [])
    for lora in loras if isinstance(loras, list) else [loras]:
        _read_lora(draft, lora)
    for key in ("cache", "vae_tiling", "adetailer"):
        if key in values:
            draft.miss(key, values[key], "sdamd has no such setting")
    draft.note("SDCPP", text)


def _read_lora(draft: Draft, lora: Any) -> None:
    if isinstance(lora, dict):
        draft.lora(str(lora.get("name", "")), lora.get("multiplier", ""))
    else:
        draft.miss("loras", lora, "not understood")

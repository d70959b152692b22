"""SD.Next: the `parameters` text with keys of its own."""

import re
from collections.abc import Mapping
from typing import Final

from sdamd.interchange import samplers
from sdamd.interchange.parameters import Settings
from sdamd.interchange.reading import Draft, model_name
from sdamd.metadata import Parameters

# Of SD.Next's own names, those that mean what AUTOMATIC1111 says in other words.
_KEYS: Final[Mapping[str, str]] = {
    "CLiP-skip": "Clip skip",
    "Clip-skip": "Clip skip",
    "Hires scale": "Hires upscale",
    "HiRes scale": "Hires upscale",
    "HiRes upscaler": "Hires upscaler",
    "HiRes steps": "Hires steps",
    "HiRes strength": "Denoising strength",
    "Hires strength": "Denoising strength",
    "HiRes CFG scale": "Hires CFG Scale",
    "Hires CFG scale": "Hires CFG Scale",
}

_LORA: Final = re.compile(r"([^,:]+):([^,\s]+)")


def adapt(draft: Draft, _: Parameters, settings: Settings) -> None:
    """Bring the settings into those of AUTOMATIC1111."""
    left = settings.left
    for theirs, ours in _KEYS.items():
        if theirs in left and ours not in left:
            left[ours] = left.pop(theirs)
    for key in ("Clip skip", "Hires steps"):
        if left.get(key) in {"0", "1"} and not (key == "Hires steps" and left[key] == "1"):
            draft.note(key, left.pop(key))
    if kind := settings.take("Scheduler"):
        draft.note("Scheduler", kind)  # the class of diffusers that the sampler stands for
    if networks := settings.take("LoRA networks"):
        _read_networks(draft, networks)
    if model := left.get("Model"):
        left["Model"] = model_name(model)
    sampler, spread = settings.take("Sampler"), settings.take("Sampler sigma") or ""
    if sampler is None:
        return
    if samplers.put(draft, samplers.SD_NEXT, sampler, spread):
        draft.miss("sampler", sampler, samplers.SPACED_BY_DIFFUSERS.format(tool="SD.Next"))


def _read_networks(draft: Draft, text: str) -> None:
    found = _LORA.findall(text)
    if not found:
        draft.lora(text)
    for name, weight in found:
        draft.lora(name.strip(), weight)

"""NovelAI: `Comment` as JSON beside `Description`, `Software` and `Source`, or hidden as one JSON.

Its models are not published, so such a picture cannot come again; its prompts and settings can.
"""

from collections.abc import Mapping
from typing import Any, Final

from sdamd.errors import BadMetadata
from sdamd.interchange import json_text, samplers, weights
from sdamd.interchange.reading import Draft, Reading, asks_nothing

TOOL: Final = "NovelAI"

_FIELDS: Final[Mapping[str, str]] = {
    "steps": "steps",
    "seed": "seed",
    "scale": "guidance_scale",
    "width": "width",
    "height": "height",
}
_NOTES: Final = frozenset({
    "request_type", "signed_hash", "version", "n_samples", "params_version", "legacy",
    "add_original_image", "ucPreset", "qualityToggle", "qualityTags", "v4_prompt",
    "v4_negative_prompt", "image_format", "legacy_v3_extend", "uncond_per_vibe",
    "wonky_vibe_correlation",
    "extra_noise_seed", "hide_debug_overlay", "lora_unet_weights", "lora_clip_weights", "legacy_uc",
    "normalize_reference_strength_multiple", "stream", "use_order", "inpaintImg2ImgStrength",
})  # fmt: skip
_NEUTRAL_AT_1: Final = frozenset({"uncond_scale", "controlnet_strength", "n_samples"})


def read(texts: Mapping[str, str]) -> Reading:
    """Read the texts of a picture by NovelAI.

    Raises:
        BadMetadata: `Comment` is not a JSON object.
    """
    values = json_text.load_object(texts.get("Comment", "{}"), "NovelAI's comment")
    draft = Draft(tool=TOOL)
    left = dict(values)
    _read_prompts(draft, left, texts.get("Description", ""))
    for key, field in _FIELDS.items():
        if key in left:
            draft.put(field, left.pop(key), said=key)
    if "sampler" in left:
        spread = left.pop("noise_schedule", "")
        samplers.put(draft, samplers.NOVELAI, left.pop("sampler"), spread or "")
    if source := texts.get("Source"):
        draft.values["checkpoint"] = source
        draft.miss("model", source, "NovelAI's models are not published; name another checkpoint")
    _read_image(draft, left)
    for key, value in left.items():
        if key in _NOTES:
            draft.note(key, value)
        elif not (asks_nothing(value) or (key in _NEUTRAL_AT_1 and value == 1)):
            draft.miss(key, value, "sdamd has no such setting")
    for key in ("Title", "Software", "Generation time"):
        if key in texts:
            draft.note(key, texts[key])
    draft.gpu_noise()
    return draft.done()


def _read_prompts(draft: Draft, left: dict[str, Any], description: str) -> None:
    """The prompts: those of version 4 are whole captions, older ones stand for themselves."""
    v4 = _captions(draft, left.get("v4_prompt"), "character prompt")
    v4_negative = _captions(draft, left.get("v4_negative_prompt"), "character negative prompt")
    prompt = v4 or left.pop("prompt", None) or description
    negative = v4_negative or left.pop("uc", None) or left.pop("negative_prompt", None) or ""
    for name in ("prompt", "uc", "negative_prompt"):
        left.pop(name, None)
    _put_prompt(draft, "prompt", str(prompt))
    _put_prompt(draft, "negative_prompt", str(negative))


def read_hidden(text: str) -> Reading:
    """Read the one JSON that is hidden in the pixels; its values are those of the text chunks.

    Raises:
        BadMetadata: it is not a JSON object.
    """
    values = json_text.load_object(text, "NovelAI's record")
    return read({key: v if isinstance(v, str) else str(v) for key, v in values.items()})


def _captions(draft: Draft, prompt: Any, what: str) -> str:
    """The base caption since version 4; characters have captions of their own."""
    caption = prompt.get("caption") if isinstance(prompt, dict) else None
    if not isinstance(caption, dict):
        return ""
    characters = caption.get("char_captions")
    for character in characters if isinstance(characters, list) else []:
        text = character.get("char_caption") if isinstance(character, dict) else character
        if text:
            draft.miss(what, str(text), "sdamd has one prompt for the whole picture")
    base = caption.get("base_caption")
    return base if isinstance(base, str) else ""


def _put_prompt(draft: Draft, field: str, text: str) -> None:
    if "|" in text:
        draft.miss(field, text, "NovelAI mixes what stands around a bar; here it is a letter")
    draft.values[field] = weights.from_novelai(text.strip())


def _read_image(draft: Draft, left: dict[str, Any]) -> None:
    strength, noise = left.pop("strength", None), left.pop("noise", None)
    kind = str(left.get("request_type", ""))
    began = "Img2Img" in kind or "image" in left or "Infill" in kind
    image = left.pop("image", "")
    # The oldest records have a strength for every picture, and no type.
    if began:
        draft.began_with(str(image)[:60], strength)
        if noise:
            draft.miss("noise", noise, "sdamd adds none to the init image")
    elif strength is not None:
        draft.note("strength", strength)


def is_comment(text: str) -> bool:
    """Whether a JSON text is a comment of NovelAI's."""
    try:
        values = json_text.load_object(text, "a comment")
    except BadMetadata:
        return False
    return "uc" in values or "v4_prompt" in values

"""InvokeAI: three generations of records.

`invokeai_metadata` since 3.0, `sd-metadata` of 2.x, and `Dream`, the command line of 1.x, which
2.x wrote as well.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from sdamd.interchange import json_text, samplers, weights
from sdamd.interchange.parameters import NO_MASK
from sdamd.interchange.reading import Draft, Reading, asks_nothing, model_name

TOOL: Final = "InvokeAI"

_NO_SUCH: Final = "sdamd has no such setting"

# -- since 3.0 -----------------------------------------------------------------------------------

_FIELDS: Final[Mapping[str, str]] = {
    "width": "width",
    "height": "height",
    "seed": "seed",
    "steps": "steps",
    "cfg_scale": "guidance_scale",
}
_NOTES: Final = frozenset({
    "app_version", "generation_mode", "rand_device", "created_by", "imageType", "hrf_enabled",
})  # fmt: skip


def read(text: str) -> Reading:
    """Read the text of `invokeai_metadata`.

    Raises:
        BadMetadata: it is not a JSON object.
    """
    values = json_text.load_object(text, "InvokeAI's metadata")
    # Some versions wrote the whole record once more inside.
    inner = values.get("invokeai_metadata")
    if isinstance(inner, dict):
        values = inner
    draft = Draft(tool=TOOL)
    left = dict(values)
    for key, field in _FIELDS.items():
        if key in left:
            draft.put(field, left.pop(key), said=key)
    _read_prompts(draft, left)
    if "scheduler" in left and samplers.put(draft, samplers.INVOKEAI, left.pop("scheduler")):
        draft.miss("scheduler", str(values["scheduler"]),
                   samplers.SPACED_BY_DIFFUSERS.format(tool=TOOL))  # fmt: skip
    if name := _name(left.pop("model", None)):
        draft.values["checkpoint"] = model_name(name)
    _read_networks(draft, left)
    _read_passes(draft, left)
    _read_layers(draft, left)
    if values.get("rand_device", "cpu") == "cpu":
        draft.cpu_noise()
    else:
        draft.gpu_noise()
    for key, value in left.items():
        if key in _NOTES:
            draft.note(key, value)
        elif not asks_nothing(value):
            draft.miss(key, _shown(value), _NO_SUCH)
    return draft.done()


def _read_prompts(draft: Draft, left: dict[str, Any]) -> None:
    """The prompts; those for SDXL's second encoder have no field of their own."""
    # The weights are of compel, which only the models of Stable Diffusion and XL know.
    mode = str(left.get("generation_mode", ""))
    plain = re.match(r"(flux2?|sd3|cogview4|z_image|qwen_image|anima|krea2|wan)_", mode)
    for key, field in (("positive_prompt", "prompt"), ("negative_prompt", "negative_prompt")):
        text = left.pop(key, "")
        if not isinstance(text, str):
            text = "" if text is None else str(text)
        problems: list[str] = []
        if not plain:
            text, problems = weights.from_invokeai(text)
        else:
            text = weights.escape(text)
        draft.values[field] = text
        for problem in problems:
            draft.miss(key, "", problem)
    for key in ("positive_style_prompt", "negative_style_prompt"):
        style = left.pop(key, "")
        if style:
            draft.miss(key, style, "sdamd gives one text to both of SDXL's encoders")


def _read_networks(draft: Draft, left: dict[str, Any]) -> None:
    for lora in _list(left.pop("loras", None)):
        inner = lora if isinstance(lora, dict) else {}
        draft.lora(_name(inner.get("model") or inner.get("lora")) or _shown(lora),
                   inner.get("weight", ""))  # fmt: skip
    for key, kind, model in (
        ("controlnets", "ControlNet", "control_model"),
        ("ipAdapters", "IP-Adapter", "ip_adapter_model"),
        ("t2iAdapters", "T2I-Adapter", "t2i_adapter_model"),
    ):
        for unit in _list(left.pop(key, None)):
            inner = unit if isinstance(unit, dict) else {}
            name = _name(inner.get(model)) or _shown(unit)
            weight = inner.get("control_weight", inner.get("weight", ""))
            draft.miss(f"{kind} {name}", weight, f"{kind}s cannot be used yet")
    if name := _name(left.pop("vae", None)):
        draft.miss("VAE", name, "sdamd decodes with the checkpoint's own")
    if name := _name(left.pop("refiner_model", None)):
        draft.miss("refiner", name, "sdamd has no refiner")
        for key in [k for k in left if k.startswith("refiner_")]:
            draft.miss(key, left.pop(key), "sdamd has no refiner")


def _read_passes(draft: Draft, left: dict[str, Any]) -> None:
    mode = str(left.get("generation_mode", ""))
    strength, init = left.pop("strength", None), left.pop("init_image", None)
    if init or mode.endswith(("img2img", "inpaint", "outpaint")):
        draft.began_with(_shown(init or ""), strength)
        if mode.endswith(("inpaint", "outpaint")):
            draft.miss("mask", "", NO_MASK)
    elif strength is not None:
        draft.miss("strength", strength, "there is no init image in the record")
    if left.get("hrf_enabled"):
        # InvokeAI's high resolution fix draws at the model's own size first; the record has the
        # last size alone.
        draft.miss("hrf_method", str(left.pop("hrf_method", "")), "the first size is not told")
        draft.put("hires_strength", left.pop("hrf_strength", 0.45), said="hrf_strength")
    else:
        left.pop("hrf_method", None)
        left.pop("hrf_strength", None)


def _read_layers(draft: Draft, left: dict[str, Any]) -> None:
    """What was on the canvas: lists of layers, most of them empty."""
    canvas = left.pop("canvas_v2_metadata", None)
    layers = canvas.items() if isinstance(canvas, dict) else [("canvas_v2_metadata", canvas)]
    for kind, layer in layers:
        if not asks_nothing(layer):
            draft.miss(kind, _shown(layer), "sdamd has no layers")


def _list(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _name(model: Any) -> str:
    """A model's name: `name` since 4.0, `model_name` before."""
    if isinstance(model, str):
        return model
    if isinstance(model, dict):
        return str(model.get("name") or model.get("model_name") or "")
    return ""


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else str(value)


# -- 2.x -----------------------------------------------------------------------------------------


def read_sd_metadata(text: str) -> Reading:
    """Read the text of `sd-metadata`.

    Raises:
        BadMetadata: it is not a JSON object.
    """
    values = json_text.load_object(text, "InvokeAI's metadata")
    draft = Draft(tool=TOOL)
    image = values.get("image")
    left = dict(image) if isinstance(image, dict) else {}
    if not left:
        draft.miss("image", values.get("image", ""), "has no settings")
    _read_old_model(draft, values)
    _read_old_prompt(draft, _joined(draft, left.pop("prompt", "")))
    for key, field in _FIELDS.items():
        if key in left:
            draft.put(field, left.pop(key), said=key)
    if "sampler" in left:
        _put_old_sampler(draft, left.pop("sampler"))
    for step in _list(left.pop("postprocessing", None)):
        draft.miss("postprocessing", _shown(step), "not done again")
    _read_old_init_image(draft, left.pop("init_image_path", None), left.pop("strength", None))
    draft.note("type", left.pop("type", ""))
    for key, value in left.items():
        if not asks_nothing(value):
            draft.miss(key, _shown(value), _NO_SUCH)
    draft.cpu_noise()
    return draft.done()


def _read_old_model(draft: Draft, values: Mapping[str, Any]) -> None:
    name = values.get("model_weights")
    if isinstance(name, str):
        draft.values["checkpoint"] = model_name(name)
    for key in ("app_version", "model_hash", "model", "app_id"):
        if key in values:
            draft.note(key, values[key])


def _joined(draft: Draft, prompt: Any) -> str:
    """The parts of a prompt, each with a weight, as one text."""
    parts = [p for p in _list(prompt) if isinstance(p, dict)]
    if not parts:
        return _shown(prompt)
    if any(part.get("weight", 1) != 1 for part in parts):
        draft.miss("prompt", _shown(prompt), "the weights of its parts are not used")
    return " ".join(str(part.get("prompt", "")) for part in parts)


def _put_old_sampler(draft: Draft, name: Any) -> None:
    if samplers.put(draft, samplers.INVOKEAI_2, name):
        draft.miss("sampler", _shown(name), "InvokeAI 2 spaced the steps of some otherwise")


def _read_old_init_image(draft: Draft, path: Any, strength: Any) -> None:
    if path:
        draft.began_with(_shown(path), strength)
    elif not asks_nothing(strength):
        draft.note("strength", strength)


_NEGATIVE: Final = re.compile(r"(?<!\\)\[([^\[\]]*)\]")


def _read_old_prompt(draft: Draft, text: str) -> None:
    """One text for both: what stands in square brackets is the negative prompt."""
    negative = [part.strip(" ,") for part in _NEGATIVE.findall(text)]
    positive = [part.strip(" ,") for part in _NEGATIVE.split(text)[::2]]
    for field, parts in (("prompt", positive), ("negative_prompt", negative)):
        joined = ", ".join(part for part in parts if part)
        draft.values[field], problems = weights.from_invokeai(joined)
        for problem in problems:
            draft.miss(field, "", problem)


# -- 1.x -----------------------------------------------------------------------------------------

_DREAM: Final = re.compile(r'\s*"(?P<prompt>.*)"(?P<flags>[^"]*)', re.DOTALL)
_DREAM_FLAG: Final = re.compile(
    r"\s-{1,2}([A-Za-z]\w*)(?:[ =]+([^\s-]\S*|-\d\S*)((?:\s+[\d.]+)?))?"
)
_DREAM_FIELDS: Final[Mapping[str, str]] = {
    "s": "steps", "steps": "steps", "S": "seed", "seed": "seed", "W": "width", "width": "width",
    "H": "height", "height": "height", "C": "guidance_scale", "cfg_scale": "guidance_scale",
}  # fmt: skip
_DREAM_NAMES: Final[Mapping[str, str]] = {
    "G": "gfpgan_strength", "U": "upscale", "ft": "facetool", "cf": "codeformer_fidelity",
    "v": "variation_amount", "V": "with_variations", "hrf": "hires_fix",
}  # fmt: skip


def read_dream(text: str) -> Reading:
    """Read the text of `Dream`: a prompt in quotes, and the flags of a command line."""
    draft = Draft(tool=TOOL)
    found = _DREAM.fullmatch(text.strip())
    if found is None:
        draft.values["prompt"] = text.strip()
        draft.miss("Dream", text, "not understood; the whole text is taken for the prompt")
        return draft.done()
    _read_old_prompt(draft, found["prompt"])
    init = strength = None
    for flag in _DREAM_FLAG.finditer(found["flags"]):
        name, value, more = flag[1], flag[2] or "", flag[3] or ""
        if name in _DREAM_FIELDS:
            draft.put(_DREAM_FIELDS[name], _whole(value), said=f"-{name}")
        elif name in {"A", "sampler"}:
            _put_old_sampler(draft, value)
        elif name in {"I", "init_img"}:
            init = value
        elif name in {"f", "strength"}:
            strength = value
        else:
            draft.miss(_DREAM_NAMES.get(name, f"-{name}"), f"{value}{more}", _NO_SUCH)
    if rest := _DREAM_FLAG.sub("", found["flags"]).strip():
        draft.miss("Dream", rest, "not understood")
    _read_old_init_image(draft, init, strength)
    draft.cpu_noise()
    return draft.done()


def _whole(text: str) -> object:
    """A whole number as such, so that what reads the seed sees it; anything else as text."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else text

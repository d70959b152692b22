"""Identifies a single file in the layout of the original training code, by its header."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from sdamd.checkpoint.family import (
    ALLOWED,
    EPSILON,
    FAMILIES,
    INPAINTING_CHANNELS,
    UNSUPPORTED_INPUTS,
    V_PREDICTION,
    Checkpoint,
    Family,
    Layout,
    weights_of_inputs,
)
from sdamd.checkpoint.header import PICKLE, Header, Tensor, read_header, stored_dtype
from sdamd.errors import BadCheckpoint

_UNET: Final = "model.diffusion_model."

_ADDONS: Final[Sequence[tuple[str, str]]] = (
    (
        r"^lora_(unet|te\d?|transformer)_|\.lora_[AB]\.|\.lora_?\.?(up|down)\.|\.hada_w1_a$"
        r"|\.lokr_w1(_a)?$",
        "a LoRA: it changes a checkpoint and is none itself",
    ),
    (
        r"^control_model\.|^controlnet_|^input_hint_block\.",
        "a ControlNet: it steers a checkpoint and is none itself",
    ),
    (r"^(image_proj|ip_adapter)\.", "an IP-Adapter: it steers a checkpoint and is none itself"),
    (
        r"^(adapter\.)?body\.\d+\.(block\d|in_conv|resnets)",
        "a T2I-Adapter: it steers a checkpoint and is none itself",
    ),
    (r"motion_modules\.|temporal_transformer\.", "an AnimateDiff motion module"),
    (
        r"\A(emb_params|string_to_param\.\*|\*|clip_l|clip_g)$",
        "a textual inversion embedding: it adds a word to a checkpoint and is none itself",
    ),
)
_OTHER_MODELS: Final[Sequence[tuple[str, str]]] = (
    (r"\.time_stack\.", "Stable Video Diffusion"),
    (r"(^|\.)distilled_guidance_layer\.", "Chroma"),
    (r"(^|\.)joint_blocks\.\d+\.", "Stable Diffusion 3"),
    (r"(^|\.)double_blocks\.\d+\.img_attn\.", "FLUX"),
    (r"(^|\.)double_blocks\.\d+\.img_attn_qkv", "HunyuanVideo"),
    (r"(^|\.)double_layers\.\d+\.", "AuraFlow"),
    (r"(^|\.)transformer_blocks\.\d+\.img_mlp\.", "Qwen-Image"),
    (r"(^|\.)cap_embedder\.", "Lumina or Z-Image"),
    (r"(^|\.)(clip_txt_mapper|effnet_mapper)\.|(^|\.)clf\.1\.", "Stable Cascade"),
    (r"(^|\.)mlp_t5\.", "Hunyuan-DiT"),
    (r"(^|\.)adaln_single\.", "PixArt or LTX-Video"),
    (r"(^|\.)blocks\.\d+\.cross_attn\.k\.", "Wan"),
)
_PARTS: Final[Sequence[tuple[str, str]]] = (
    (
        r"^(first_stage_model\.)?(encoder|decoder)\.(down|up|mid|conv_in)",
        "a VAE: one part of a checkpoint",
    ),
    (
        r"^(unet\.)?(down_blocks|input_blocks)\.\d+\.",
        "a UNet alone: VAE and text encoder are missing",
    ),
    (
        r"^(text_model\.|transformer\.)?(encoder\.layers|resblocks)\.\d+\.|^(encoder\.)?block\.\d+\.layer",
        "a text encoder: one part of a checkpoint",
    ),
    (
        r"^(body\.\d+\.(rdb1\.|weight$)|model\.1\.sub\.0\.|RRDB_trunk|conv_first\.|layers\.\d+\.residual)",
        "an upscaler: it enlarges finished pictures",
    ),
)

_TEXT_ENCODERS: Final[Mapping[str, Sequence[str]]] = {
    "sd15": ("cond_stage_model.transformer.",),
    "sd21": ("cond_stage_model.model.",),
    "sdxl": ("conditioner.embedders.0.transformer.", "conditioner.embedders.1.model."),
}
_FAMILY_OF_UNET: Final[Mapping[tuple[int, int], str]] = {
    (320, 768): "sd15",
    (320, 1024): "sd21",
    (320, 2048): "sdxl",
}
"""By the width of the first block and of the text that the cross-attention reads."""

_REFINER: Final = (384, 1280)
_SPECIAL: Final[Mapping[str, str]] = {
    "edm_mean": "Playground v2.5, which samples by EDM",
    "edm_vpred.sigma_max": "CosXL, which samples by EDM v-prediction",
    _UNET + "time_embed.cond_proj.weight": "an LCM-distilled model, which embeds the guidance",
}


def identify_file(path: Path) -> Checkpoint:
    """Identify the single file at `path`; see `sdamd.checkpoint.identify`."""
    if path.suffix.lower() in {".ckpt", ".pt", ".pth", ".bin", ".pkl"}:
        # An old pickle has no mark that is sure, so the name decides, whatever is inside.
        raise BadCheckpoint(f"{path} is by its suffix {PICKLE}")
    header = read_header(path)
    _refuse_other_kinds(path, header.tensors)
    family = _family_of_unet(path, header.tensors)
    width, channels = _first_convolution(header.tensors)
    prediction_type, reasons = _prediction_type(path, header, family)
    if family.name == "sd21" and prediction_type == EPSILON:
        family = FAMILIES["sd21-base"]
    return Checkpoint(
        name=path.stem,
        path=path,
        layout=Layout.FILE,
        family=family,
        bytes=header.bytes,
        prediction_type=prediction_type,
        zero_terminal_snr="ztsnr" in header.tensors,
        dtype=stored_dtype(t for k, t in header.tensors.items() if k.startswith(_UNET)),
        parameters=replace(
            family.parameters,
            unet=family.parameters.unet + weights_of_inputs(channels, width),
        ),
        reasons=reasons,
        in_channels=channels,
    )


def _refuse_other_kinds(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuse, by its name, whatever is not a whole model with a UNet in the original layout."""
    names = "\n".join(tensors)

    def first(table: Sequence[tuple[str, str]]) -> str | None:
        return next((what for p, what in table if re.search(p, names, re.MULTILINE)), None)

    if addon := first(_ADDONS):
        raise BadCheckpoint(f"{path} is {addon}; {ALLOWED}")
    if other := first(_OTHER_MODELS):
        raise BadCheckpoint(f"{path} is a {other} model; {ALLOWED}")
    for name, what in _SPECIAL.items():
        if name in tensors:
            raise BadCheckpoint(f"{path} is {what}; {ALLOWED}")
    if _UNET + "input_blocks.0.0.weight" not in tensors:
        part = first(_PARTS)
        shown = ", ".join(list(tensors)[:3])
        what = part or f"no checkpoint that sdamd knows (it holds {shown} ...)"
        raise BadCheckpoint(f"{path} is {what}; {ALLOWED}")


def _family_of_unet(path: Path, tensors: Mapping[str, Tensor]) -> Family:
    """The family by the UNet's shapes; everything that cannot run is refused by its name."""
    width, channels = _first_convolution(tensors)
    context = next(
        (
            tensor.shape[-1]
            for name, tensor in tensors.items()
            if name.startswith(_UNET) and name.endswith("attn2.to_k.weight") and tensor.shape
        ),
        0,
    )
    _refuse_unet(path, channels, (width, context))
    family = FAMILIES[_FAMILY_OF_UNET[width, context]]
    if family.name == "sd21" and _UNET + "label_emb.0.0.weight" in tensors:
        raise BadCheckpoint(f"{path} is Stable Diffusion 2.1 unCLIP, made from pictures; {ALLOWED}")
    count = sum(tensor.size for name, tensor in tensors.items() if name.startswith(_UNET))
    count -= weights_of_inputs(channels, width)
    if count != family.parameters.unet:
        raise BadCheckpoint(
            f"{path} resembles {family.title}, but its UNet has {count} parameters instead of "
            f"{family.parameters.unet}: a pruned or extended variant; {ALLOWED}"
        )
    prefixes = {"VAE": ("first_stage_model.",), "text encoder": _TEXT_ENCODERS[family.name]}
    missing = [
        part
        for part, wanted in prefixes.items()
        for prefix in wanted
        if not any(name.startswith(prefix) for name in tensors)
    ]
    if missing:
        raise BadCheckpoint(
            f"{path} is {family.title} without its {' and '.join(missing)}; "
            "allowed are files that hold all parts"
        )
    return family


def _first_convolution(tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """How many channels it gives and takes."""
    width, channels = (*tensors[_UNET + "input_blocks.0.0.weight"].shape, 0, 0)[:2]
    return width, channels


def _refuse_unet(path: Path, channels: int, shape: tuple[int, int]) -> None:
    if shape == _REFINER:
        raise BadCheckpoint(
            f"{path} is the Stable Diffusion XL refiner, which finishes pictures of the base "
            f"model; {ALLOWED}"
        )
    if channels not in {4, INPAINTING_CHANNELS}:
        what = UNSUPPORTED_INPUTS.get(channels, f"a model of {channels} input channels")
        raise BadCheckpoint(f"{path} is {what}; {ALLOWED}")
    if shape not in _FAMILY_OF_UNET:
        raise BadCheckpoint(
            f"{path} has a UNet of {shape[0]} channels that reads text of width {shape[1]}; "
            f"{ALLOWED}"
        )


_V_NAME: Final = re.compile(r"v[-_ .]?pred|(?<!\d)768(?!\d)|[-_ ]v\b|2[-._]1[-_]v", re.IGNORECASE)
_EPSILON_NAME: Final = re.compile(r"(?<!\d)512(?!\d)|base|eps", re.IGNORECASE)


def _prediction_type(path: Path, header: Header, family: Family) -> tuple[str, tuple[str, ...]]:
    """What the UNet was trained to predict, and how that was found.

    The weights of Stable Diffusion 2 look the same either way, so in this order: a `v_pred` key,
    the file's metadata, the training config beside the file, and, for 2.x alone, its name.
    """
    if "v_pred" in header.tensors:
        return V_PREDICTION, ("v-prediction: the file holds the key v_pred",)
    if said := _modelspec_prediction(header.metadata):
        return said, (f"{said}: the file's metadata says so",)
    if said := _sidecar_prediction(path):
        return said, (f"{said}: the .yaml beside the file says so",)
    if family.name != "sd21":
        return family.prediction_type, ()
    hint = (
        "the weights do not tell; put the training config beside the file as "
        f"{path.with_suffix('.yaml').name} to settle it"
    )
    if _V_NAME.search(path.stem):
        return V_PREDICTION, (f"v_prediction: guessed from the name of the file; {hint}",)
    if _EPSILON_NAME.search(path.stem):
        return EPSILON, (f"epsilon: guessed from the name of the file; {hint}",)
    return V_PREDICTION, (f"v_prediction: guessed, since most 2.x models are; {hint}",)


def _modelspec_prediction(metadata: Mapping[str, str]) -> str | None:
    """By the keys of the Stability Model Metadata standard."""
    said = metadata.get("modelspec.prediction_type", "").lower()
    if said in {"v", "v_prediction", "v-prediction"}:
        return V_PREDICTION
    if said == EPSILON:
        return EPSILON
    architecture = metadata.get("modelspec.architecture", "").lower()
    if architecture.startswith("stable-diffusion-v2"):
        return V_PREDICTION if "768-v" in architecture else EPSILON
    return None


def _sidecar_prediction(path: Path) -> str | None:
    """By the original training config (`v2-inference-v.yaml`) saved under the file's name."""
    for suffix in (".yaml", ".yml"):
        sidecar = path.with_suffix(suffix)
        if not sidecar.is_file():
            continue
        with sidecar.open("rb") as file:
            text = file.read(65536).decode("utf-8", "replace")
        if "diffusion" not in text:
            continue
        v = re.search(r"""^\s*parameterization:\s*["']?v["']?\s*(#.*)?$""", text, re.MULTILINE)
        return V_PREDICTION if v else EPSILON
    return None

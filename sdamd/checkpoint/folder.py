"""Identifies a folder in the layout of diffusers, by its configs and the headers of its weights."""

import json
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
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
    Parameters,
    weights_of_inputs,
)
from sdamd.checkpoint.header import (
    PICKLE,
    Header,
    damaged,
    lfs_sentence,
    read_header,
    stored_dtype,
)
from sdamd.errors import BadCheckpoint

_PIPELINES: Final[Mapping[str, str]] = {
    "StableDiffusionPipeline": "StableDiffusionPipeline",
    "StableDiffusionImg2ImgPipeline": "StableDiffusionPipeline",
    "StableDiffusionInpaintPipeline": "StableDiffusionPipeline",
    "StableDiffusionXLPipeline": "StableDiffusionXLPipeline",
    "StableDiffusionXLImg2ImgPipeline": "StableDiffusionXLPipeline",
    "StableDiffusionXLInpaintPipeline": "StableDiffusionXLPipeline",
}
COMPONENTS: Final[Mapping[str, Sequence[str]]] = {
    "StableDiffusionPipeline": ("unet", "vae", "text_encoder"),
    "StableDiffusionXLPipeline": ("unet", "vae", "text_encoder", "text_encoder_2"),
}
_WEIGHTS: Final = re.compile(
    r"(?:diffusion_pytorch_)?model(?:\.(?P<before>fp16))?(?:-\d+-of-\d+)?"
    r"(?:\.(?P<after>fp16))?\.safetensors"
)
_CONFIG_LIMIT: Final = 1_000_000


def identify_folder(path: Path) -> Checkpoint:
    """Identify the folder at `path`; see `sdamd.checkpoint.identify`."""
    pipeline = _pipeline_of_folder(path)
    configs = {
        component: _read_config(path / component / "config.json") for component in ("unet", "vae")
    }
    scheduler = _read_config(path / "scheduler" / "scheduler_config.json")
    _refuse_folder_unet(path, configs["unet"])
    variants = _variants(path, COMPONENTS[pipeline])
    headers = {
        component: [read_header(file) for file in files]
        for component, files in variants[min(variants)].items()
    }
    counts = {
        component: sum(_weight_count(header) for header in found)
        for component, found in headers.items()
    }
    parameters = Parameters(
        unet=counts["unet"],
        vae=counts["vae"],
        text_encoders=tuple(n for name, n in counts.items() if name.startswith("text")),
    )
    prediction_type = str(scheduler.get("prediction_type", EPSILON))
    if prediction_type not in {EPSILON, V_PREDICTION}:
        raise BadCheckpoint(
            f"{path} predicts {prediction_type!r}; allowed are {EPSILON} and {V_PREDICTION}"
        )
    family = _family_of_folder(path, pipeline, configs, prediction_type, parameters)
    return Checkpoint(
        name=path.resolve().name,
        path=path,
        layout=Layout.FOLDER,
        family=family,
        bytes=sum(header.bytes for found in headers.values() for header in found),
        prediction_type=prediction_type,
        zero_terminal_snr=bool(scheduler.get("rescale_betas_zero_snr", False)),
        dtype=stored_dtype(t for header in headers["unet"] for t in header.tensors.values()),
        parameters=parameters,
        variants=tuple(sorted(variants)),
        in_channels=_input_channels(configs["unet"]),
    )


def _pipeline_of_folder(path: Path) -> str:
    """The pipeline class that runs the folder."""
    index = path / "model_index.json"
    if not index.is_file():
        inside = sorted(p.name for p in path.glob("*.safetensors"))
        hint = f"; it holds {', '.join(inside[:5])}: name one of these" if inside else ""
        raise BadCheckpoint(
            f"{path} is a folder without model_index.json; allowed are folders in the layout of "
            f"diffusers, and .safetensors files{hint}"
        )
    entries = _read_config(index)
    name = str(entries.get("_class_name", ""))
    if entries.get("requires_aesthetics_score"):
        raise BadCheckpoint(f"{path} is the Stable Diffusion XL refiner; {ALLOWED}")
    if name not in _PIPELINES:
        raise BadCheckpoint(f"{path} is made for {name or 'no known pipeline'}; {ALLOWED}")
    return _PIPELINES[name]


def weight_variant(name: str) -> str | None:
    """Say which set of weights a file belongs to, `""` or `"fp16"`; None if it holds none."""
    match = _WEIGHTS.fullmatch(name)
    return None if match is None else match["before"] or match["after"] or ""


def _read_config(path: Path) -> Mapping[str, object]:
    """Read one JSON config.

    Raises:
        BadCheckpoint: it is missing, too large or no JSON object.
    """
    if not path.is_file():
        raise BadCheckpoint(f"{path} is missing; the folder is incomplete, download it again")
    with path.open("rb") as file:
        text = file.read(_CONFIG_LIMIT + 1)
    if len(text) > _CONFIG_LIMIT:
        raise BadCheckpoint(f"{path} exceeds {_CONFIG_LIMIT} bytes, too much for a config")
    if text.startswith(b"version https://git-lfs"):
        raise BadCheckpoint(lfs_sentence(path, text))
    try:
        config = json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"it is not JSON ({error})") from error
    if not isinstance(config, dict):
        raise damaged(path, "it is not a JSON object")
    return config


def _refuse_folder_unet(path: Path, config: Mapping[str, object]) -> None:
    name = config.get("_class_name", "UNet2DConditionModel")
    if name != "UNet2DConditionModel":
        raise BadCheckpoint(f"{path} has a {name} as its UNet; {ALLOWED}")
    if config.get("time_cond_proj_dim"):
        raise BadCheckpoint(
            f"{path} is an LCM-distilled model, which embeds the guidance; {ALLOWED}"
        )
    channels = _input_channels(config)
    if channels in UNSUPPORTED_INPUTS:
        raise BadCheckpoint(f"{path} is {UNSUPPORTED_INPUTS[channels]}; {ALLOWED}")


def _input_channels(config: Mapping[str, object]) -> int:
    channels = config.get("in_channels", 4)
    return channels if isinstance(channels, int) else 4


def _without_further_inputs(config: Mapping[str, object], count: int) -> int:
    """How many weights a UNet has but for the further input channels of an inpainting model."""
    widths = config.get("block_out_channels")
    inpaints = _input_channels(config) == INPAINTING_CHANNELS
    if not inpaints or not isinstance(widths, list):
        return count
    width = widths[0] if widths and isinstance(widths[0], int) else 0
    return count - weights_of_inputs(INPAINTING_CHANNELS, width)


def _variants(
    path: Path, components: Collection[str]
) -> Mapping[str, Mapping[str, Sequence[Path]]]:
    """The complete sets of weights: variant -> component -> files.

    Raises:
        BadCheckpoint: no set is complete.
    """
    found = {component: _weight_files(path / component) for component in components}
    complete = {
        variant: {component: files[variant] for component, files in found.items()}
        for variant in ("", "fp16")
        if all(files.get(variant) for files in found.values())
    }
    if complete:
        return complete
    lacking = [name for name, files in found.items() if not any(files.values())] or list(components)
    pickles = [name for name in lacking if list((path / name).glob("*.bin"))]
    if pickles:
        raise BadCheckpoint(
            f"{path} holds the weights of {', '.join(pickles)} only as .bin, {PICKLE}"
        )
    raise BadCheckpoint(
        f"{path} lacks the .safetensors weights of {', '.join(lacking)}; download it again"
    )


def _weight_files(folder: Path) -> Mapping[str, Sequence[Path]]:
    """Weights in one component's folder by variant; a set of parts counts when all are there."""
    if not folder.is_dir():
        return {}
    files: dict[str, list[Path]] = defaultdict(list)
    parts: dict[str, int] = defaultdict(lambda: 1)
    for file in sorted(folder.iterdir()):
        variant = weight_variant(file.name)
        if variant is not None:
            files[variant].append(file)
            if numbered := re.search(r"-of-(\d+)", file.name):
                parts[variant] = int(numbered[1])
    return {variant: found for variant, found in files.items() if len(found) >= parts[variant]}


def _weight_count(header: Header) -> int:
    """Elements of floating-point tensors; position ids and the like are no weights."""
    return sum(t.size for t in header.tensors.values() if t.dtype.startswith(("F", "BF")))


def _family_of_folder(
    path: Path,
    pipeline: str,
    configs: Mapping[str, Mapping[str, object]],
    prediction_type: str,
    parameters: Parameters,
) -> Family:
    """Take the family of the same size, else make one for a model of its own dimensions."""
    unet, vae = configs["unet"], configs["vae"]
    count = _without_further_inputs(unet, parameters.unet)
    known = [
        family
        for family in FAMILIES.values()
        if family.pipeline == pipeline and family.parameters.unet == count
    ]
    if known:
        exact = [family for family in known if family.prediction_type == prediction_type]
        return (exact or known)[0]
    if pipeline != "StableDiffusionPipeline":
        family = FAMILIES["sdxl"]
        return replace(family, title=f"{family.title} variant", parameters=parameters)
    blocks, size, channels = (
        vae.get("block_out_channels"),
        unet.get("sample_size"),
        vae.get("latent_channels", 4),
    )
    if not (isinstance(blocks, list) and isinstance(size, int) and isinstance(channels, int)):
        raise BadCheckpoint(
            f"{path} does not say its size: unet sample_size is {size!r}, "
            f"vae block_out_channels is {blocks!r}"
        )
    scale = 2 ** (len(blocks) - 1)
    tiny = FAMILIES["tiny"]
    pixels = size * scale
    upscale = tiny.defaults.upscale if pixels <= tiny.width else 1
    return replace(
        tiny,
        width=pixels,
        height=pixels,
        prediction_type=prediction_type,
        latent_channels=channels,
        vae_scale_factor=scale,
        parameters=parameters,
        defaults=replace(tiny.defaults, upscale=upscale),
    )

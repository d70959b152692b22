"""Loads a single file in the layout of the original training code into diffusers' classes.

Each model is built without weights, which are found in the file under their new names and read
when they are needed, so at no time is there a second copy. The names of UNet and VAE are converted
by diffusers, those of the text encoders here: diffusers' own conversion follows the classes of
transformers, whose attribute names change between versions, and it fills gaps with random weights.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from accelerate import init_empty_weights
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.loaders.single_file_utils import (
    convert_ldm_unet_checkpoint,
    convert_ldm_vae_checkpoint,
)
from safetensors import safe_open
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from sdamd.backends.weights import Source, sources_of
from sdamd.checkpoint import Checkpoint
from sdamd.errors import BadCheckpoint

Parts: TypeAlias = dict[str, Any]
"""Component name, as the pipeline's argument is called, -> component."""

Tensors: TypeAlias = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Component:
    """Where a component lies in the file and how it becomes a model.

    `convert` gets the tensors under `prefix`, by their full names, and the config.
    """

    name: str
    prefix: str
    build: Callable[[dict[str, Any]], Any]
    convert: Callable[[Tensors, dict[str, Any]], Tensors]


def _clip(tensors: Tensors, prefix: str) -> Tensors:
    """Names of CLIPTextModel. Some early files lack the `text_model.` in between."""
    names = {name: name.removeprefix(prefix).removeprefix("text_model.") for name in tensors}
    return {new: tensors[old] for old, new in names.items() if not new.endswith("position_ids")}


_OPEN_CLIP_NAMES: Final[Sequence[tuple[str, str]]] = (
    (r"^positional_embedding$", "embeddings.position_embedding.weight"),
    (r"^token_embedding\.", "embeddings.token_embedding."),
    (r"^ln_final\.", "final_layer_norm."),
    (r"^transformer\.resblocks\.", "encoder.layers."),
    (r"\.ln_(\d)\.", r".layer_norm\1."),
    (r"\.attn\.", ".self_attn."),
    (r"\.c_fc\.", ".fc1."),
    (r"\.c_proj\.", ".fc2."),
)


def _open_clip(tensors: Tensors, prefix: str, layers: int) -> Tensors:
    """Names of CLIPTextModel, from OpenCLIP's; blocks from `layers` on stay unused."""
    state: Tensors = {}
    for name, tensor in tensors.items():
        new = name.removeprefix(prefix)
        for pattern, replacement in _OPEN_CLIP_NAMES:
            new = re.sub(pattern, replacement, new)
        block = re.match(r"encoder\.layers\.(\d+)\.", new)
        if new in {"logit_scale", "text_projection"} or (block and int(block[1]) >= layers):
            continue
        if packed := re.fullmatch(r"(.*\.)in_proj_(weight|bias)", new):
            # One matrix of three: rows of queries, then keys, then values.
            for which, rows in zip("qkv", tensor.chunk(3), strict=True):
                state[f"{packed[1]}{which}_proj.{packed[2]}"] = rows
        else:
            state[new] = tensor
    return state


def _open_clip_projected(tensors: Tensors, prefix: str, layers: int) -> Tensors:
    """Names of CLIPTextModelWithProjection; OpenCLIP multiplies from the other side."""
    state = {f"text_model.{k}": v for k, v in _open_clip(tensors, prefix, layers).items()}
    projection = tensors.get(f"{prefix}text_projection")
    if projection is not None:
        state["text_projection.weight"] = projection.T
    return state


_UNET: Final = _Component(
    name="unet",
    prefix="model.diffusion_model.",
    build=UNet2DConditionModel.from_config,
    convert=convert_ldm_unet_checkpoint,
)
_VAE: Final = _Component(
    name="vae",
    prefix="first_stage_model.",
    build=AutoencoderKL.from_config,
    convert=convert_ldm_vae_checkpoint,
)


def _text_model(config: dict[str, Any]) -> Any:
    return CLIPTextModel(CLIPTextConfig(**config))


def _projected_text_model(config: dict[str, Any]) -> Any:
    return CLIPTextModelWithProjection(CLIPTextConfig(**config))


def _clip_at(prefix: str) -> _Component:
    return _Component(
        name="text_encoder",
        prefix=prefix,
        build=_text_model,
        convert=lambda tensors, _: _clip(tensors, prefix),
    )


_SD2_PREFIX: Final = "cond_stage_model.model."
_BIG_G_PREFIX: Final = "conditioner.embedders.1.model."
_COMPONENTS: Final[Mapping[str, Sequence[_Component]]] = {
    "sd15": (_UNET, _VAE, _clip_at("cond_stage_model.transformer.")),
    "sd21": (
        _UNET,
        _VAE,
        _Component(
            name="text_encoder",
            prefix=_SD2_PREFIX,
            build=_text_model,
            convert=lambda tensors, config: _open_clip(
                tensors, _SD2_PREFIX, config["num_hidden_layers"]
            ),
        ),
    ),
    "sdxl": (
        _UNET,
        _VAE,
        _clip_at("conditioner.embedders.0.transformer."),
        _Component(
            name="text_encoder_2",
            prefix=_BIG_G_PREFIX,
            build=_projected_text_model,
            convert=lambda tensors, config: _open_clip_projected(
                tensors, _BIG_G_PREFIX, config["num_hidden_layers"]
            ),
        ),
    ),
}


def read_config(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """The config of a component, or of the training schedule (`scheduler`), as it ships."""
    family = checkpoint.family
    file = {"scheduler": "scheduler_config.json"}.get(name, "config.json")
    configs = files("sdamd") / "assets" / "configs" / family.config
    config: dict[str, Any] = json.loads((configs / name / file).read_text("utf-8"))
    if name == "unet":
        config["sample_size"] = family.width // family.vae_scale_factor
        config["in_channels"] = checkpoint.in_channels
    return config


def open_model(checkpoint: Checkpoint, name: str) -> tuple[Any, dict[str, Source]]:
    """Build one component without weights, and say where in the file each of them lies.

    Raises:
        BadCheckpoint: weights are missing, left over or of another shape.
        SafetensorError: the file changed since it was identified.
    """
    model, state, read = _empty_and_state(checkpoint, name)
    return model, sources_of(state, checkpoint.path, read)


def load_weights(checkpoint: Checkpoint, name: str) -> Tensors:
    """The weights of one component under diffusers' names, as stored: views of the file.

    Raises:
        BadCheckpoint: weights are missing, left over or of another shape.
        SafetensorError: the file changed since it was identified.
    """
    return _empty_and_state(checkpoint, name)[1]


def _empty_and_state(checkpoint: Checkpoint, name: str) -> tuple[Any, Tensors, Tensors]:
    """A model without weights, those that it lacks, and what they were made of."""
    by_name = {component.name: component for component in _COMPONENTS[checkpoint.family.config]}
    component, config = by_name[name], read_config(checkpoint, name)
    read = read_tensors(checkpoint.path, component.prefix)
    state = component.convert(dict(read), config)
    # Buffers stay real: the text encoders compute theirs, no file holds them.
    with init_empty_weights(include_buffers=False):
        model = component.build(config)
    refuse_others(checkpoint, name, model, state)
    return model, state, read


def refuse_gaps(
    checkpoint: Checkpoint, component: str, *, missing: Iterable[str], unknown: Iterable[str] = ()
) -> None:
    """Refuse a component whose weights are not exactly those of its architecture.

    Raises:
        BadCheckpoint: with the first names of each kind.
    """
    problems = [
        f"{what} {', '.join(sorted(names)[:3])}{' ...' if len(names) > 3 else ''}"
        for what, names in (("lacks", list(missing)), ("has the unknown", list(unknown)))
        if names
    ]
    if problems:
        raise BadCheckpoint(
            f"{checkpoint.path} does not fit {checkpoint.family.title}: its {component} "
            f"{' and '.join(problems)}"
        )


def refuse_others(
    checkpoint: Checkpoint, component: str, model: Any, state: Mapping[str, torch.Tensor]
) -> None:
    """Refuse weights that are not exactly those of the model, by name and shape.

    Raises:
        BadCheckpoint: with the first names of each kind.
    """
    wanted = {name: tensor.shape for name, tensor in model.state_dict().items()}
    refuse_gaps(
        checkpoint,
        component,
        missing=wanted.keys() - state.keys(),
        unknown=state.keys() - wanted.keys(),
    )
    refuse_gaps(
        checkpoint,
        component,
        missing=[
            f"{name} of shape {list(shape)} (there: {list(state[name].shape)})"
            for name, shape in wanted.items()
            if state[name].shape != shape
        ],
    )


def read_tensors(path: Path, prefix: str = "") -> Tensors:
    """Read what lies under `prefix`; on the CPU these are views of the file."""
    with safe_open(path, framework="pt") as file:
        return {
            name: file.get_tensor(name) for name in file.offset_keys() if name.startswith(prefix)
        }

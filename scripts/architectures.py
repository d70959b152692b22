"""The networks of each family as published, without weights, and what they are fed.

Configs of what sdamd runs are its own (`sdamd/assets/configs`). The others are here: facts of the
published `config.json` files, and each count of weights is held by a test.
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final

import torch
from accelerate import init_empty_weights
from diffusers import (
    AutoencoderKL,
    ControlNetModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    T5Config,
    T5EncoderModel,
)

_REFINER: Final[Mapping[str, Any]] = {
    "act_fn": "silu",
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "attention_head_dim": [6, 12, 24, 24],
    "block_out_channels": [384, 768, 1536, 1536],
    "cross_attention_dim": 1280,
    "down_block_types": [
        "DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D",
    ],
    "layers_per_block": 2,
    "projection_class_embeddings_input_dim": 2560,
    "sample_size": 128,
    "transformer_layers_per_block": 4,
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "use_linear_projection": True,
}  # fmt: skip
"""Source: stabilityai/stable-diffusion-xl-refiner-1.0, unet/config.json."""

_SD35_MEDIUM: Final[Mapping[str, Any]] = {
    "attention_head_dim": 64,
    "caption_projection_dim": 1536,
    "dual_attention_layers": list(range(13)),
    "in_channels": 16,
    "joint_attention_dim": 4096,
    "num_attention_heads": 24,
    "num_layers": 24,
    "out_channels": 16,
    "patch_size": 2,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 384,
    "qk_norm": "rms_norm",
    "sample_size": 128,
}
"""Source: stabilityai/stable-diffusion-3.5-medium, transformer/config.json."""

_SD3_VAE: Final[Mapping[str, Any]] = {
    "act_fn": "silu",
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "force_upcast": True,
    "in_channels": 3,
    "latent_channels": 16,
    "layers_per_block": 2,
    "norm_num_groups": 32,
    "out_channels": 3,
    "sample_size": 1024,
    "scaling_factor": 1.5305,
    "shift_factor": 0.0609,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "use_post_quant_conv": False,
    "use_quant_conv": False,
}
"""Source: stabilityai/stable-diffusion-3.5-medium, vae/config.json."""

_T5_XXL: Final[Mapping[str, Any]] = {
    "d_ff": 10240,
    "d_kv": 64,
    "d_model": 4096,
    "feed_forward_proj": "gated-gelu",
    "num_heads": 64,
    "num_layers": 24,
    "tie_word_embeddings": False,
    "vocab_size": 32128,
}
"""Source: google/t5-v1_1-xxl, config.json."""

_CONFIGS: Final[Mapping[tuple[str, str], tuple[str, Any]]] = {
    ("sd15", "unet"): ("sd15/unet", UNet2DConditionModel),
    ("sd15", "vae"): ("sd15/vae", AutoencoderKL),
    ("sd15", "text_encoder"): ("sd15/text_encoder", CLIPTextModel),
    ("sd15", "controlnet"): ("sd15/unet", ControlNetModel),
    ("sd21", "unet"): ("sd21/unet", UNet2DConditionModel),
    ("sd21", "vae"): ("sd21/vae", AutoencoderKL),
    ("sd21", "text_encoder"): ("sd21/text_encoder", CLIPTextModel),
    ("sdxl", "unet"): ("sdxl/unet", UNet2DConditionModel),
    ("sdxl", "vae"): ("sdxl/vae", AutoencoderKL),
    ("sdxl", "text_encoder"): ("sdxl/text_encoder", CLIPTextModel),
    ("sdxl", "text_encoder_2"): ("sdxl/text_encoder_2", CLIPTextModelWithProjection),
    ("sdxl", "controlnet"): ("sdxl/unet", ControlNetModel),
    ("sdxl-refiner", "unet"): ("", UNet2DConditionModel),
    ("sdxl-refiner", "vae"): ("sdxl/vae", AutoencoderKL),
    ("sdxl-refiner", "text_encoder_2"): ("sdxl/text_encoder_2", CLIPTextModelWithProjection),
    ("sd35-medium", "transformer"): ("", SD3Transformer2DModel),
    ("sd35-medium", "vae"): ("", AutoencoderKL),
    ("sd35-medium", "text_encoder"): ("sdxl/text_encoder", CLIPTextModelWithProjection),
    ("sd35-medium", "text_encoder_2"): ("sdxl/text_encoder_2", CLIPTextModelWithProjection),
    ("sd35-medium", "text_encoder_3"): ("", T5EncoderModel),
}
_OWN: Final[Mapping[tuple[str, str], Mapping[str, Any]]] = {
    ("sdxl-refiner", "unet"): _REFINER,
    ("sd35-medium", "transformer"): _SD35_MEDIUM,
    ("sd35-medium", "vae"): _SD3_VAE,
    ("sd35-medium", "text_encoder_3"): _T5_XXL,
}

FAMILIES: Final = tuple(dict.fromkeys(family for family, _ in _CONFIGS))


def components_of(family: str) -> tuple[str, ...]:
    """The networks of a family, ControlNets among them."""
    return tuple(name for of, name in _CONFIGS if of == family)


@cache
def _built(family: str, name: str, *, shallow: bool) -> torch.nn.Module:
    path, kind = _CONFIGS[family, name]
    config = dict(_OWN[family, name]) if not path else _read(path)
    if shallow:
        config = _shallow(config)
    with init_empty_weights(include_buffers=True):
        if kind is ControlNetModel:
            unet = UNet2DConditionModel.from_config(config)
            made = ControlNetModel.from_unet(unet, load_weights_from_unet=False)
        elif kind is T5EncoderModel:
            made = kind(T5Config(**config))
        elif name.startswith("text_encoder"):
            made = kind(CLIPTextConfig(**config))
        else:
            made = kind.from_config(config)
    return made.eval().requires_grad_(requires_grad=False)  # type: ignore[no-any-return]


def _read(path: str) -> dict[str, Any]:
    text = files("sdamd").joinpath("assets", "configs", path, "config.json").read_text("utf-8")
    config: dict[str, Any] = json.loads(text)
    return config


def _shallow(config: dict[str, Any]) -> dict[str, Any]:
    """One transformer layer where there are up to ten: alike layers have the same peak."""
    if "transformer_layers_per_block" not in config:
        return config
    layers = config["transformer_layers_per_block"]
    one = 1 if isinstance(layers, int) else [1] * len(layers)
    return config | {"transformer_layers_per_block": one}


def build(family: str, name: str, *, shallow: bool = False) -> Any:
    """A network on the device `meta`, that is without weights; a copy of its own.

    `shallow` leaves out all but one layer of each transformer of a UNet.
    """
    return copy.deepcopy(_built(family, name, shallow=shallow))


def parameters_of(family: str, name: str) -> int:
    """How many weights it has, buffers included that are as large (SD 3's positions)."""
    model = _built(family, name, shallow=False)
    held = (*model.parameters(), *(b for b in model.buffers() if b.is_floating_point()))
    return sum(tensor.numel() for tensor in held)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What a call is about: pixels, and samples (two for each picture with guidance)."""

    width: int
    height: int
    samples: int
    factor: int = 8

    def latents(self, channels: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """(samples, channels, height / factor, width / factor)."""
        shape = (self.samples, channels, self.height // self.factor, self.width // self.factor)
        return torch.empty(shape, dtype=dtype, device=device)


def denoise_inputs(
    model: Any, size: Size, dtype: torch.dtype, device: torch.device, *, tokens: int = 77
) -> dict[str, Any]:
    """What a pipeline gives its UNet, ControlNet or transformer in one step."""
    config = model.config
    made: dict[str, Any] = {
        "timestep": torch.empty((), dtype=torch.int64, device=device),
        "return_dict": False,
    }
    latents = size.latents(config.in_channels, dtype, device)
    if isinstance(model, SD3Transformer2DModel):
        width = config.joint_attention_dim
        return made | {
            "hidden_states": latents,
            # The two CLIPs' 77 and T5's 256.
            "encoder_hidden_states": torch.empty(
                (size.samples, 77 + 256, width), dtype=dtype, device=device
            ),
            "pooled_projections": torch.empty(
                (size.samples, config.pooled_projection_dim), dtype=dtype, device=device
            ),
            "timestep": torch.empty(size.samples, dtype=dtype, device=device),
        }
    made["sample"] = latents
    made["encoder_hidden_states"] = torch.empty(
        (size.samples, tokens, config.cross_attention_dim), dtype=dtype, device=device
    )
    if config.addition_embed_type == "text_time":
        pooled = 1280
        numbers = (config.projection_class_embeddings_input_dim - pooled) // (
            config.addition_time_embed_dim
        )
        made["added_cond_kwargs"] = {
            "text_embeds": torch.empty((size.samples, pooled), dtype=dtype, device=device),
            "time_ids": torch.empty((size.samples, numbers), dtype=dtype, device=device),
        }
    return made


def residuals(
    unet: Any, size: Size, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor | tuple[torch.Tensor, ...]]:
    """What one ControlNet, or the sum of several, adds to a UNet: a map for each skip."""
    widths = unet.config.block_out_channels
    maps = [(widths[0], 1)]
    for level, width in enumerate(widths):
        maps += [(width, 2**level)] * unet.config.layers_per_block
        if level + 1 < len(widths):
            maps.append((width, 2 ** (level + 1)))
    height, width = size.height // size.factor, size.width // size.factor

    def empty(channels: int, smaller: int) -> torch.Tensor:
        shape = (size.samples, channels, -(-height // smaller), -(-width // smaller))
        return torch.empty(shape, dtype=dtype, device=device)

    return {
        "down_block_additional_residuals": tuple(empty(*each) for each in maps),
        "mid_block_additional_residual": empty(*maps[-1]),
    }


def add_lora(unet: Any, *, everywhere: bool, rank: int = 32) -> None:
    """Put an unfused LoRA beside a UNet's attention layers, or beside its feed-forwards too."""
    from peft import LoraConfig  # noqa: PLC0415  # seconds

    layers = ["to_q", "to_k", "to_v", "to_out.0"]
    if everywhere:
        layers += ["ff.net.0.proj", "ff.net.2", "proj_in", "proj_out"]
    with init_empty_weights():
        unet.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=layers))

"""Small pipelines with every kind of part that the real ones have, and random weights."""

from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    EulerDiscreteScheduler,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from sdamd.backends.loading import clip_tokenizer

FAMILIES = ("sd", "xl")


def vae() -> AutoencoderKL:
    """Four levels of resolution and the head in the middle that is as wide as the channels."""
    return AutoencoderKL(
        block_out_channels=(8, 16, 16, 16),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
        norm_num_groups=4,
        latent_channels=4,
    )


def unet(family: str = "sd") -> UNet2DConditionModel:
    added: dict[str, Any] = {}
    if family == "xl":
        added = {
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 24 + 6 * 8,
            "use_linear_projection": True,
        }
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4),
        cross_attention_dim=48 if family == "xl" else 16,
        **added,
    )


def pipe(family: str = "sd") -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        parts = {"unet": unet(family), "vae": vae(), "text_encoder": CLIPTextModel(_text(16))}
        if family == "xl":
            parts["text_encoder_2"] = CLIPTextModelWithProjection(_text(32))
    for part in parts.values():
        part.eval().requires_grad_(requires_grad=False)
    common = {
        "tokenizer": clip_tokenizer("<|endoftext|>"),
        "scheduler": EulerDiscreteScheduler(steps_offset=1),
    }
    if family == "xl":
        made = StableDiffusionXLPipeline(
            **parts, **common, tokenizer_2=clip_tokenizer("!"), add_watermarker=False
        )
    else:
        made = StableDiffusionPipeline(
            **parts, **common, safety_checker=None, feature_extractor=None,
            requires_safety_checker=False,
        )  # fmt: skip
    made.set_progress_bar_config(disable=True)
    return made


def training() -> dict[str, object]:
    """A checkpoint's scheduler config."""
    return dict(EulerDiscreteScheduler(steps_offset=1).config)


def _text(width: int) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=49408,
        hidden_size=width,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        projection_dim=24,
        bos_token_id=49406,
        eos_token_id=49407,
    )

"""k-diffusion as an oracle, and a checkpoint's scheduler config."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    EulerDiscreteScheduler,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from sdamd.backends.loading import clip_tokenizer

ORACLE = "k_diffusion_oracle"


@pytest.fixture(scope="session")
def k_diffusion() -> Iterator[SimpleNamespace]:
    """k-diffusion's `sampling` and `external`, without its package.

    The package's own __init__ imports training code and with it torchvision; so does `utils`, of
    which sampling needs one function.
    """
    spec = importlib.util.find_spec("k_diffusion")
    if spec is None or spec.origin is None:
        pytest.skip("k-diffusion is not installed; scripts/test.py installs it")
    package = ModuleType(ORACLE)
    package.__path__ = [str(Path(spec.origin).parent)]
    utils = ModuleType(f"{ORACLE}.utils")
    utils.append_dims = _append_dims  # type: ignore[attr-defined]  # a module made by hand
    package.utils = utils  # type: ignore[attr-defined]
    odeint = ModuleType("torchdiffeq")
    odeint.odeint = None  # type: ignore[attr-defined]  # for log likelihoods alone
    made = {ORACLE: package, f"{ORACLE}.utils": utils}
    if importlib.util.find_spec("torchdiffeq") is None:
        made["torchdiffeq"] = odeint
    sys.modules.update(made)
    yield SimpleNamespace(
        sampling=importlib.import_module(f"{ORACLE}.sampling"),
        external=importlib.import_module(f"{ORACLE}.external"),
    )
    for name in (*made, f"{ORACLE}.sampling", f"{ORACLE}.external"):
        del sys.modules[name]


@pytest.fixture
def sd_config() -> dict[str, object]:
    """What Stable Diffusion 1.5's scheduler_config.json says of its training, and more."""
    return {
        "_class_name": "PNDMScheduler",
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "beta_start": 0.00085,
        "num_train_timesteps": 1000,
        "set_alpha_to_one": False,
        "skip_prk_steps": True,
        "steps_offset": 1,
        "trained_betas": None,
        "clip_sample": False,
    }


def _append_dims(x: torch.Tensor, dimensions: int) -> torch.Tensor:
    return x[(...,) + (None,) * (dimensions - x.ndim)]


@pytest.fixture(scope="session")
def small_xl() -> StableDiffusionXLPipeline:
    """SDXL with the real vocabulary and every kind of part, a few numbers wide; random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        unet = UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(16, 32),
            layers_per_block=1,
            norm_num_groups=8,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=(2, 4),
            use_linear_projection=True,
            cross_attention_dim=48,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=24 + 6 * 8,
        )
        vae = AutoencoderKL(
            block_out_channels=(8, 8, 8, 8),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            norm_num_groups=4,
            latent_channels=4,
        )
        encoders = [
            kind(
                CLIPTextConfig(
                    vocab_size=49408,
                    hidden_size=width,
                    intermediate_size=32,
                    num_hidden_layers=3,
                    num_attention_heads=2,
                    projection_dim=24,
                    bos_token_id=49406,
                    eos_token_id=49407,
                )
            )
            for kind, width in ((CLIPTextModel, 16), (CLIPTextModelWithProjection, 32))
        ]
    parts = {"unet": unet, "vae": vae, "text_encoder": encoders[0], "text_encoder_2": encoders[1]}
    pipe = StableDiffusionXLPipeline(
        **{name: part.eval() for name, part in parts.items()},
        tokenizer=clip_tokenizer("<|endoftext|>"),
        tokenizer_2=clip_tokenizer("!"),
        scheduler=EulerDiscreteScheduler(),
        add_watermarker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe

"""Makes the .json.gz headers beside this file: names, dtypes and shapes, no weights.

    python tests/data/headers/make_headers.py

The shapes are those of the diffusers and transformers models built from `sdamd/assets/configs`
on the meta device. The names are those of the original training code, whose order of blocks is
spelled out below; `tests/backends/test_torch_backend.py` converts them forwards again.
"""

import gzip
import json
import re
from pathlib import Path

from accelerate import init_empty_weights
from diffusers import AutoencoderKL, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel

HERE = Path(__file__).resolve().parent
CONFIGS = HERE.parents[2] / "sdamd" / "assets" / "configs"


def config(family, part):
    return json.loads((CONFIGS / family / part / "config.json").read_text())


def unet_name(name, levels):
    """down_blocks.i.resnets.j -> input_blocks.(3i + j + 1).0 and so on."""
    fixed = {
        "conv_in": "input_blocks.0.0", "time_embedding.linear_1": "time_embed.0",
        "time_embedding.linear_2": "time_embed.2", "conv_norm_out": "out.0", "conv_out": "out.2",
        "add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2",
    }
    for new, old in fixed.items():
        if name.startswith(new + "."):
            return old + name[len(new):]
    resnet = [("norm1", "in_layers.0"), ("conv1", "in_layers.2"), ("time_emb_proj", "emb_layers.1"),
              ("norm2", "out_layers.0"), ("conv2", "out_layers.3"), ("conv_shortcut", "skip_connection")]
    m = re.fullmatch(r"(down|up|mid)_blocks?\.(?:(\d+)\.)?(\w+)\.(\d+)\.(.+)", name)
    where, i, kind, j, rest = m[1], int(m[2] or 0), m[3], int(m[4]), m[5]
    if kind == "resnets":
        for new, old in resnet:
            rest = re.sub(rf"^{new}\.", old + ".", rest)
    if where == "mid":
        return f"middle_block.{ {('resnets', 0): 0, ('attentions', 0): 1, ('resnets', 1): 2}[kind, j]}.{rest}"
    if where == "down":
        if kind == "downsamplers":
            return f"input_blocks.{3 * i + 3}.0.op.{rest.removeprefix('conv.')}"
        return f"input_blocks.{3 * i + j + 1}.{'0' if kind == 'resnets' else '1'}.{rest}"
    if kind == "upsamplers":
        return f"output_blocks.{3 * i + 2}.{2 if levels[i] else 1}.{rest}"
    return f"output_blocks.{3 * i + j}.{'0' if kind == 'resnets' else '1'}.{rest}"


def vae_name(name):
    name = re.sub(r"down_blocks\.(\d)\.resnets\.(\d)", r"down.\1.block.\2", name)
    name = re.sub(r"down_blocks\.(\d)\.downsamplers\.0", r"down.\1.downsample", name)
    name = re.sub(r"up_blocks\.(\d)\.resnets\.(\d)", lambda m: f"up.{3 - int(m[1])}.block.{m[2]}", name)
    name = re.sub(r"up_blocks\.(\d)\.upsamplers\.0", lambda m: f"up.{3 - int(m[1])}.upsample", name)
    name = re.sub(r"mid_block\.resnets\.(\d)", lambda m: f"mid.block_{int(m[1]) + 1}", name)
    name = name.replace("mid_block.attentions.0", "mid.attn_1").replace("conv_shortcut", "nin_shortcut")
    name = name.replace("conv_norm_out", "norm_out")
    for new, old in (("group_norm", "norm"), ("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "proj_out")):
        name = name.replace(f"attn_1.{new}.", f"attn_1.{old}.")
    return name


def unet(family):
    settings = config(family, "unet")
    with init_empty_weights():
        model = UNet2DConditionModel.from_config(settings)
    levels = ["CrossAttn" in kind for kind in settings["up_block_types"]]
    for name, p in model.state_dict().items():
        yield f"model.diffusion_model.{unet_name(name, levels)}", "F16", list(p.shape)


def vae(family):
    with init_empty_weights():
        model = AutoencoderKL.from_config(config(family, "vae"))
    for name, p in model.state_dict().items():
        shape = list(p.shape)
        if "attentions" in name and len(shape) == 2:
            shape += [1, 1]  # the original has 1x1 convolutions where diffusers has linear layers
        yield f"first_stage_model.{vae_name(name)}", "F16", shape


def clip(family, prefix):
    with init_empty_weights():
        model = CLIPTextModel(CLIPTextConfig(**config(family, "text_encoder")))
    yield f"{prefix}text_model.embeddings.position_ids", "I64", [1, 77]
    for name, p in model.state_dict().items():
        yield f"{prefix}text_model.{name}", "F16", list(p.shape)


def open_clip(width, layers, prefix):
    yield f"{prefix}positional_embedding", "F16", [77, width]
    yield f"{prefix}text_projection", "F16", [width, width]
    yield f"{prefix}logit_scale", "F16", []
    yield f"{prefix}token_embedding.weight", "F16", [49408, width]
    for part in ("weight", "bias"):
        yield f"{prefix}ln_final.{part}", "F16", [width]
    for i in range(layers):
        block = f"{prefix}transformer.resblocks.{i}."
        for norm in ("ln_1", "ln_2"):
            for part in ("weight", "bias"):
                yield f"{block}{norm}.{part}", "F16", [width]
        yield f"{block}attn.in_proj_weight", "F16", [3 * width, width]
        yield f"{block}attn.in_proj_bias", "F16", [3 * width]
        for name, rows, columns in (
            ("attn.out_proj", width, width), ("mlp.c_fc", 4 * width, width), ("mlp.c_proj", width, 4 * width),
        ):
            yield f"{block}{name}.weight", "F16", [rows, columns]
            yield f"{block}{name}.bias", "F16", [rows]


def schedule():
    for name in ("betas", "alphas_cumprod"):
        yield name, "F32", [1000]


FILES = {
    "sd15": lambda: [*unet("sd15"), *vae("sd15"), *clip("sd15", "cond_stage_model.transformer."), *schedule()],
    "sd21": lambda: [*unet("sd21"), *vae("sd21"), *open_clip(1024, 24, "cond_stage_model.model."), *schedule()],
    "sdxl": lambda: [*unet("sdxl"), *vae("sdxl"), *clip("sdxl", "conditioner.embedders.0.transformer."),
                     *open_clip(1280, 32, "conditioner.embedders.1.model.")],
}

if __name__ == "__main__":
    for family, entries in FILES.items():
        rows = sorted(entries())
        text = json.dumps(rows, separators=(",", ":")).encode()
        (HERE / f"{family}.json.gz").write_bytes(gzip.compress(text, 9, mtime=0))
        print(family, len(rows), "tensors")

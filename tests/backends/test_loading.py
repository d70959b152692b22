import gzip
import json
import math
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    EulerDiscreteScheduler,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from diffusers.loaders.single_file_utils import convert_open_clip_checkpoint
from safetensors.torch import save_file
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from sdamd.backends import single_file
from sdamd.backends.loading import (
    clip_tokenizer,
    load_components,
    load_weights,
    read_config,
    weight_files,
)
from sdamd.checkpoint import FAMILIES, V_PREDICTION, identify
from sdamd.errors import BadCheckpoint
from sdamd.plan import Plan
from tests.fakes import A_PLAN

HEADERS = Path(__file__).parents[1] / "data" / "headers"
CPU = torch.device("cpu")
Row = tuple[str, str, list[int]]


def plan(dtype: str = "float32", vae_dtype: str | None = None) -> Plan:
    return replace(A_PLAN, dtype=dtype, vae_dtype=vae_dtype or dtype)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any attempt to reach a host fails the test."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("loading must not reach for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


# -- the vocabulary ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("a photo of a cat", [49406, 320, 1125, 539, 320, 2368, 49407]),
        ("A Photo   of a CAT", [49406, 320, 1125, 539, 320, 2368, 49407]),
        ("", [49406, 49407]),
        ("!", [49406, 256, 49407]),
    ],
)
@pytest.mark.parametrize("pad_token", ["<|endoftext|>", "!"])
def test_the_vocabulary_is_the_real_one(text: str, ids: list[int], pad_token: str) -> None:
    """Known ids of CLIP; an exclamation mark stays a word where it is the pad token too."""
    tokenizer = clip_tokenizer(pad_token)
    assert tokenizer(text)["input_ids"] == ids
    assert len(tokenizer) == 49408


@pytest.mark.parametrize(("pad_token", "pad"), [("<|endoftext|>", 49407), ("!", 0)])
def test_prompts_are_padded_as_their_encoder_was_trained(pad_token: str, pad: int) -> None:
    ids = clip_tokenizer(pad_token)("cat", padding="max_length")["input_ids"]
    assert ids == [49406, 2368, 49407, *[pad] * 74]


# -- the names of OpenCLIP, against diffusers' own conversion ----------------------------------


def open_clip_tensors(prefix: str, *, width: int, layers: int) -> dict[str, torch.Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "positional_embedding": (77, width),
        "text_projection": (width, width),
        "logit_scale": (),
        "token_embedding.weight": (99, width),
        "ln_final.weight": (width,),
        "ln_final.bias": (width,),
    }
    for layer in range(layers):
        block = f"transformer.resblocks.{layer}."
        shapes |= {
            f"{block}{name}.{part}": (rows, columns) if part == "weight" else (rows,)
            for name, rows, columns in (
                ("attn.out_proj", width, width),
                ("mlp.c_fc", 4 * width, width),
                ("mlp.c_proj", width, 4 * width),
            )
            for part in ("weight", "bias")
        }
        shapes |= {f"{block}ln_{n}.{p}": (width,) for n in (1, 2) for p in ("weight", "bias")}
        shapes[f"{block}attn.in_proj_weight"] = (3 * width, width)
        shapes[f"{block}attn.in_proj_bias"] = (3 * width,)
    generator = torch.Generator().manual_seed(0)
    return {prefix + k: torch.randn(v, generator=generator) for k, v in shapes.items()}


def small_text_config() -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=99,
        hidden_size=8,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=8,
        bos_token_id=0,
        eos_token_id=1,
    )


def test_open_clip_names_are_converted_as_diffusers_does() -> None:
    prefix = "conditioner.embedders.1.model."
    tensors = open_clip_tensors(prefix, width=8, layers=2)
    model = CLIPTextModelWithProjection(small_text_config())
    expected = convert_open_clip_checkpoint(model, tensors, prefix=prefix)
    found = single_file._open_clip_projected(tensors, prefix, layers=2)
    assert found.keys() == expected.keys() == model.state_dict().keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def test_layers_beyond_the_config_stay_unused() -> None:
    """Stable Diffusion 2 was trained on the last layer but one, and files hold all."""
    prefix = "cond_stage_model.model."
    found = single_file._open_clip(open_clip_tensors(prefix, width=8, layers=3), prefix, layers=2)
    assert found.keys() == CLIPTextModel(small_text_config()).state_dict().keys()


@pytest.mark.parametrize("between", ["text_model.", ""])
def test_clip_names_may_lack_the_wrapper(between: str) -> None:
    """Early merges were saved without `text_model.`."""
    model = CLIPTextModel(small_text_config())
    tensors = {f"x.{between}{name}": tensor for name, tensor in model.state_dict().items()}
    tensors[f"x.{between}embeddings.position_ids"] = torch.arange(77)
    assert single_file._clip(tensors, "x.").keys() == model.state_dict().keys()


# -- folders -----------------------------------------------------------------------------------


def small_unet(**changes: Any) -> UNet2DConditionModel:
    return UNet2DConditionModel(
        **{
            "sample_size": 8,
            "block_out_channels": (8, 16),
            "layers_per_block": 1,
            "cross_attention_dim": 8,
            "attention_head_dim": 4,
            "norm_num_groups": 4,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            **changes,
        }
    )


def small_vae() -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        sample_size=16,
    )


def clip_config() -> CLIPTextConfig:
    return CLIPTextConfig(
        **{**small_text_config().to_dict(), "vocab_size": 49408, "eos_token_id": 2}
    )


def small_pipeline() -> StableDiffusionPipeline:
    torch.manual_seed(0)
    return StableDiffusionPipeline(
        unet=small_unet(),
        vae=small_vae(),
        text_encoder=CLIPTextModel(clip_config()),
        tokenizer=clip_tokenizer("<|endoftext|>"),
        scheduler=EulerDiscreteScheduler(
            beta_start=0.001, timestep_spacing="trailing", steps_offset=1
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def small_xl_pipeline() -> StableDiffusionXLPipeline:
    torch.manual_seed(0)
    return StableDiffusionXLPipeline(
        unet=small_unet(
            cross_attention_dim=16,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + 8,
        ),
        vae=small_vae(),
        text_encoder=CLIPTextModel(clip_config()),
        text_encoder_2=CLIPTextModelWithProjection(clip_config()),
        tokenizer=clip_tokenizer("<|endoftext|>"),
        tokenizer_2=clip_tokenizer("!"),
        scheduler=EulerDiscreteScheduler(prediction_type=V_PREDICTION, rescale_betas_zero_snr=True),
        add_watermarker=False,
    )


@pytest.fixture(scope="module", params=["sd", "xl"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A small pipeline of random weights, and the folder that it was saved to."""
    pipeline = small_pipeline() if request.param == "sd" else small_xl_pipeline()
    path = tmp_path_factory.mktemp(request.param)
    pipeline.save_pretrained(path)
    return pipeline, path


# Of numpy 2, about arrays that diffusers' own scheduler makes of tensors.
ignore_array_copies = pytest.mark.filterwarnings("ignore:__array__ impl:DeprecationWarning")


def picture(pipeline: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    pipeline.set_progress_bar_config(disable=True)
    images: np.ndarray[Any, np.dtype[np.float32]] = pipeline(
        "a cat!",
        num_inference_steps=2,
        width=16,
        height=16,
        output_type="np",
        generator=torch.Generator().manual_seed(1),
    ).images
    return images


@ignore_array_copies
def test_a_folder_gives_the_pipeline_that_was_saved(saved: Any) -> None:
    pipeline, path = saved
    loaded = load_components(identify(path), plan(), CPU)
    assert type(loaded) is type(pipeline)
    for key in ("beta_start", "timestep_spacing", "prediction_type", "rescale_betas_zero_snr"):
        assert loaded.scheduler.config[key] == pipeline.scheduler.config[key]
    assert np.array_equal(picture(loaded), picture(pipeline))
    assert not loaded.unet.training
    assert not any(p.requires_grad for p in loaded.text_encoder.parameters())


def test_each_part_gets_its_dtype(saved: Any) -> None:
    _, path = saved
    loaded = load_components(identify(path), plan("bfloat16", "float32"), CPU)
    assert loaded.unet.dtype == loaded.text_encoder.dtype == torch.bfloat16
    assert loaded.vae.dtype == torch.float32


def test_the_pad_token_of_a_folder_stays_a_word(saved: Any) -> None:
    """OpenCLIP pads with `!`, which folders declare a special token."""
    _, path = saved
    loaded = load_components(identify(path), plan(), CPU)
    tokenizers = [loaded.tokenizer, getattr(loaded, "tokenizer_2", loaded.tokenizer)]
    for tokenizer in tokenizers:
        assert tokenizer("cat!")["input_ids"] == [49406, 2368, 256, 49407]
    if len({tokenizer.pad_token for tokenizer in tokenizers}) > 1:
        assert tokenizers[1].pad_token_id == 0


def test_folders_of_half_size_files_alone_are_loaded(tmp_path: Path) -> None:
    small_pipeline().to(dtype=torch.float16).save_pretrained(tmp_path, variant="fp16")
    found = identify(tmp_path)
    assert found.variants == ("fp16",)
    assert load_components(found, plan("float32"), CPU).unet.dtype == torch.float32


def test_full_files_serve_full_precision_where_both_are_there(tmp_path: Path) -> None:
    pipeline = small_pipeline()
    pipeline.save_pretrained(tmp_path)
    pipeline.to(dtype=torch.float16).save_pretrained(tmp_path, variant="fp16")
    exact = small_pipeline().unet.conv_in.weight
    full = load_components(identify(tmp_path), plan("float32"), CPU).unet.conv_in.weight
    assert torch.equal(full, exact)
    half = load_components(identify(tmp_path), plan("float16"), CPU).unet.conv_in.weight
    assert torch.equal(half, exact.to(torch.float16))


@ignore_array_copies
def test_text_encoders_saved_by_older_versions_are_loaded(tmp_path: Path) -> None:
    """Their names begin with `text_model.`, and they hold position ids."""
    pipeline = small_pipeline()
    pipeline.save_pretrained(tmp_path)
    state = {f"text_model.{k}": v for k, v in pipeline.text_encoder.state_dict().items()}
    state["text_model.embeddings.position_ids"] = torch.arange(77)[None]
    save_file(state, tmp_path / "text_encoder/model.safetensors", metadata={"format": "pt"})
    loaded = load_components(identify(tmp_path), plan(), CPU)
    assert np.array_equal(picture(loaded), picture(pipeline))


def test_a_folder_with_missing_weights_is_refused(tmp_path: Path) -> None:
    """The libraries would fill the gap with random numbers and go on."""
    pipeline = small_pipeline()
    pipeline.save_pretrained(tmp_path)
    state = pipeline.text_encoder.state_dict()
    del state["final_layer_norm.weight"]
    save_file(state, tmp_path / "text_encoder/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadCheckpoint, match=r"its text_encoder lacks final_layer_norm\.weight"):
        load_components(identify(tmp_path), plan(), CPU)


def test_code_beside_the_weights_is_never_run(tmp_path: Path) -> None:
    """F05: a folder may name classes of its own; sdamd's are taken."""
    mark = tmp_path / "ran"
    small_pipeline().save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    index["unet"] = ["evil", "Evil"]
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    for place in (tmp_path / "unet" / "evil.py", tmp_path / "evil.py", tmp_path / "pipeline.py"):
        place.write_text(f"import os\nos.mkdir({str(mark)!r})\nclass Evil: pass\n")
    loaded = load_components(identify(tmp_path), plan(), CPU)
    assert type(loaded.unet) is UNet2DConditionModel
    assert not mark.exists()


def test_a_file_that_went_away_after_it_was_identified_is_a_sentence(tmp_path: Path) -> None:
    small_pipeline().save_pretrained(tmp_path)
    found = identify(tmp_path)
    (tmp_path / "vae/diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match="cannot be loaded"):
        load_components(found, plan(), CPU)


# -- weights without a model -------------------------------------------------------------------


@pytest.mark.parametrize("component", ["unet", "vae"])
def test_weights_are_those_of_the_model_as_they_are_stored(saved: Any, component: str) -> None:
    pipeline, path = saved
    found = identify(path)
    state = load_weights(found, component, "float16")
    expected = getattr(pipeline, component).state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    (file,) = weight_files(found, component, "float16")
    assert file == path / component / "diffusion_pytorch_model.safetensors"
    config = read_config(found, component)
    assert config["block_out_channels"] == list(
        getattr(pipeline, component).config.block_out_channels
    )


def test_weights_of_half_size_are_read_where_they_lose_nothing(tmp_path: Path) -> None:
    pipeline = small_pipeline()
    pipeline.save_pretrained(tmp_path)
    pipeline.to(dtype=torch.float16).save_pretrained(tmp_path, variant="fp16")
    found = identify(tmp_path)
    for dtype, stored_dtype in (("float16", torch.float16), ("float32", torch.float32)):
        state = load_weights(found, "unet", dtype)
        assert {tensor.dtype for tensor in state.values()} == {stored_dtype}


def test_attention_of_a_vae_saved_by_older_versions_is_found(tmp_path: Path) -> None:
    """Published folders of Stable Diffusion 1.5 still have these names."""
    pipeline = small_pipeline()
    pipeline.save_pretrained(tmp_path)
    expected = pipeline.vae.state_dict()
    new_to_old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    old = {}
    for name, tensor in expected.items():
        renamed = name
        for new, before in new_to_old.items():
            renamed = renamed.replace(f"attentions.0.{new}.", f"attentions.0.{before}.")
        old[renamed] = tensor
    assert old.keys() != expected.keys()
    weights = tmp_path / "vae/diffusion_pytorch_model.safetensors"
    save_file(old, weights, metadata={"format": "pt"})
    state = load_weights(identify(tmp_path), "vae", "float32")
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def test_weights_that_are_missing_are_told(tmp_path: Path) -> None:
    pipeline = small_pipeline()
    pipeline.save_pretrained(tmp_path)
    state = pipeline.unet.state_dict()
    del state["conv_out.bias"]
    save_file(state, tmp_path / "unet/diffusion_pytorch_model.safetensors")
    with pytest.raises(BadCheckpoint, match=r"its unet lacks conv_out\.bias"):
        load_weights(identify(tmp_path), "unet", "float32")


@pytest.mark.parametrize(
    ("header", "component"), [("sd15", "unet"), ("sd21", "unet"), ("sdxl", "vae")]
)
def test_weights_of_a_single_file_keep_their_dtype_under_diffusers_names(
    tmp_path: Path, header: str, component: str
) -> None:
    path = tmp_path / "model.safetensors"
    write_header(path, rows_of(header))
    found = identify(path)
    state = load_weights(found, component, "float32")
    assert {tensor.dtype for tensor in state.values()} == {torch.float16}
    known = found.family.parameters
    assert sum(t.numel() for t in state.values()) == getattr(known, component)
    assert weight_files(found, component, "float32") == [path]
    if component == "unet":
        assert read_config(found, component)["sample_size"] * 8 == found.family.width


# -- single files of real size -----------------------------------------------------------------


def rows_of(family: str) -> list[Row]:
    rows: list[Row] = json.loads(gzip.decompress((HEADERS / f"{family}.json.gz").read_bytes()))
    return rows


SIZES = {"F16": 2, "F32": 4, "I64": 8}


def write_header(path: Path, rows: list[Row]) -> int:
    """Write the header and make the file as long as its weights; return where they begin."""
    entries, end = {}, 0
    for name, dtype, shape in rows:
        begin, end = end, end + SIZES[dtype] * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return 8 + len(text)


def write_weights(path: Path, rows: list[Row]) -> None:
    """Fill the file with small random numbers, a few megabytes at a time."""
    noise = np.random.default_rng(0).standard_normal(1 << 20, np.float32) * 0.02
    block = noise.astype(np.float16).tobytes()
    start = write_header(path, rows)
    with path.open("r+b") as file:
        file.seek(start)
        for index, (name, dtype, shape) in enumerate(rows):
            size = SIZES[dtype] * math.prod(shape)
            shift = 2 * (index % 1000)  # so that no two tensors are the same
            if name.endswith("position_ids"):
                file.write(np.arange(size // 8, dtype=np.int64).tobytes())
                continue
            for chunk in chunks(block, size, shift):
                file.write(chunk)


def chunks(block: bytes, size: int, shift: int) -> Iterator[bytes]:
    while size > 0:
        chunk = block[shift : shift + size]
        yield chunk
        size -= len(chunk)
        shift = 0


def counts(pipeline: Any) -> tuple[int, int, tuple[int, ...]]:
    encoders = [pipeline.text_encoder, getattr(pipeline, "text_encoder_2", None)]
    unet, vae, *texts = (
        sum(p.numel() for p in model.parameters())
        for model in (pipeline.unet, pipeline.vae, *encoders)
        if model is not None
    )
    return unet, vae, tuple(texts)


@pytest.mark.parametrize(
    ("header", "family"), [("sd15", "sd15"), ("sd21", "sd21"), ("sdxl", "sdxl")]
)
def test_every_weight_of_a_real_size_file_finds_its_place(
    tmp_path: Path, header: str, family: str
) -> None:
    """None missing, none left over, offline. The file is sparse and the weights are views of it,
    so this costs neither disk nor memory; float16 is the dtype that real files are stored in."""
    path = tmp_path / "model.safetensors"
    write_header(path, rows_of(header))
    found = identify(path)
    loaded = load_components(found, plan("float16"), CPU)
    known = FAMILIES[family].parameters
    assert counts(loaded) == (known.unet, known.vae, known.text_encoders)
    assert all(p.device == CPU and p.dtype == torch.float16 for p in loaded.unet.parameters())
    assert loaded.unet.config.sample_size * 8 == FAMILIES[family].width
    assert loaded.scheduler.config.prediction_type == FAMILIES[family].prediction_type
    assert loaded.tokenizer.pad_token == FAMILIES[family].pad_tokens[0]
    assert loaded.vae.config.force_upcast == FAMILIES[family].vae_needs_float32


def test_what_was_identified_decides_the_training_schedule(tmp_path: Path) -> None:
    rows = [*rows_of("sd15"), ("v_pred", "F32", []), ("ztsnr", "F32", [])]
    path = tmp_path / "model.safetensors"
    write_header(path, rows)
    loaded = load_components(identify(path), plan("float16"), CPU)
    assert loaded.scheduler.config.prediction_type == V_PREDICTION
    assert loaded.scheduler.config.rescale_betas_zero_snr


@pytest.mark.parametrize(
    ("name", "renamed", "said"),
    [
        (
            "cond_stage_model.transformer.text_model.final_layer_norm.bias",
            "unrelated",
            r"its text_encoder lacks final_layer_norm\.bias",
        ),
        (
            "first_stage_model.decoder.norm_out.bias",
            "unrelated",
            r"its vae lacks decoder\.conv_norm_out\.bias",
        ),
        (
            "betas",
            "cond_stage_model.transformer.text_model.extra",
            "its text_encoder has the unknown extra",
        ),
    ],
)
def test_a_single_file_with_other_weights_is_refused(
    tmp_path: Path, name: str, renamed: str, said: str
) -> None:
    path = tmp_path / "model.safetensors"
    write_header(path, [(renamed if n == name else n, d, s) for n, d, s in rows_of("sd15")])
    with pytest.raises(BadCheckpoint, match=said):
        load_components(identify(path), plan("float16"), CPU)


def test_a_weight_of_another_shape_is_refused(tmp_path: Path) -> None:
    name = "first_stage_model.decoder.norm_out.bias"
    path = tmp_path / "model.safetensors"
    write_header(path, [(n, d, [64] if n == name else s) for n, d, s in rows_of("sd15")])
    with pytest.raises(BadCheckpoint, match=r"of shape \[128\] \(there: \[64\]\)"):
        load_components(identify(path), plan("float16"), CPU)


def test_a_file_that_was_cut_after_it_was_identified_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_header(path, rows_of("sd15"))
    found = identify(path)
    os.truncate(path, 1_000_000)
    with pytest.raises(BadCheckpoint, match="cannot be loaded"):
        load_components(found, plan("float16"), CPU)


def stored(path: Path, name: str) -> torch.Tensor:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(length))[name]
        file.seek(8 + length + entry["data_offsets"][0])
        count = entry["data_offsets"][1] - entry["data_offsets"][0]
        array = np.frombuffer(file.read(count), np.float16).reshape(entry["shape"])
    return torch.from_numpy(array.copy())


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A file that does not outlive its test: pytest keeps the folders of three runs."""
    path = tmp_path / "model.safetensors"
    yield path
    path.unlink()


@pytest.mark.slow
@ignore_array_copies
def test_a_real_size_sd15_file_makes_a_picture(path: Path) -> None:
    write_weights(path, rows_of("sd15"))
    loaded = load_components(identify(path), plan("float32"), CPU)
    unet, text = "model.diffusion_model.", "cond_stage_model.transformer.text_model."
    vae = "first_stage_model.decoder."
    for name, module in {
        f"{unet}output_blocks.11.1.proj_out": loaded.unet.up_blocks[3].attentions[2].proj_out,
        f"{unet}input_blocks.3.0.op": loaded.unet.down_blocks[0].downsamplers[0].conv,
        f"{unet}middle_block.1.norm": loaded.unet.mid_block.attentions[0].norm,
        f"{vae}up.3.block.0.conv1": loaded.vae.decoder.up_blocks[0].resnets[0].conv1,
        f"{text}encoder.layers.11.mlp.fc2": loaded.text_encoder.encoder.layers[11].mlp.fc2,
    }.items():
        assert torch.equal(module.weight, stored(path, f"{name}.weight").float()), name
    loaded.set_progress_bar_config(disable=True)
    images = loaded("a cat", num_inference_steps=1, width=64, height=64, output_type="np").images
    assert images.shape == (1, 64, 64, 3)
    assert np.isfinite(images).all()
    assert images.std() > 0


@pytest.mark.slow
@ignore_array_copies
def test_a_real_size_sdxl_file_makes_a_picture(path: Path) -> None:
    """6.9 GB; in float16 the weights are read from the file as they are needed."""
    write_weights(path, rows_of("sdxl"))
    loaded = load_components(identify(path), plan("float16", "float32"), CPU)
    prefix = "conditioner.embedders.1.model."
    packed = stored(path, f"{prefix}transformer.resblocks.31.attn.in_proj_weight")
    attention = loaded.text_encoder_2.text_model.encoder.layers[31].self_attn
    assert torch.equal(attention.k_proj.weight, packed[1280:2560])
    projection = loaded.text_encoder_2.text_projection.weight
    assert torch.equal(projection, stored(path, f"{prefix}text_projection").T)
    loaded.set_progress_bar_config(disable=True)
    latents = loaded(
        "a cat", num_inference_steps=1, width=64, height=64, output_type="latent"
    ).images
    image = loaded.vae.decode(latents.float() / loaded.vae.config.scaling_factor).sample
    assert image.shape == (1, 3, 64, 64)
    assert image.isfinite().all()

"""The run-time half of ONNX: templates are found, weights written, and what comes out is right."""

import hashlib
import json
import math
import os
import shutil
import time
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from accelerate import init_empty_weights
from diffusers import AutoencoderKL, ControlNetModel, UNet2DConditionModel
from safetensors.torch import load_file

from sdamd.backends import onnx_export
from sdamd.backends.onnx_export import (
    ALIGNMENT,
    MANIFEST,
    WEIGHTS,
    Export,
    Template,
    export,
    find_template,
    free_dimensions,
    key_of,
    layout,
    templates,
)
from sdamd.errors import BadCheckpoint, StorageError

ASSETS = Path(__file__).parents[2] / "sdamd" / "assets"
TINY = ASSETS / "tiny"
UNET_WEIGHTS = TINY / "unet" / "diffusion_pytorch_model.safetensors"
VAE_WEIGHTS = TINY / "vae" / "diffusion_pytorch_model.safetensors"
Usage = namedtuple("Usage", "total used free")


def config_of(folder: str, component: str) -> dict[str, Any]:
    copies_unet = component == "controlnet"
    file = ASSETS / folder / ("unet" if copies_unet else component) / "config.json"
    config: dict[str, Any] = json.loads(file.read_text("utf-8"))
    if copies_unet:
        with init_empty_weights():
            unet = UNet2DConditionModel.from_config(config)
            config = dict(ControlNetModel.from_unet(unet, load_weights_from_unet=False).config)
    return config


# -- which template ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folder", "component", "channels", "title"),
    [
        ("tiny", "unet", 4, "embedded model, UNet"),
        ("tiny", "vae", 3, "embedded model, VAE"),
        ("configs/sd15", "unet", 4, "Stable Diffusion 1.x, UNet with 4 channels"),
        ("configs/sd15", "unet", 9, "Stable Diffusion 1.x, UNet with 9 channels"),
        ("configs/sd21", "unet", 4, "Stable Diffusion 2.x, UNet with 4 channels"),
        ("configs/sd21", "unet", 9, "Stable Diffusion 2.x, UNet with 9 channels"),
        ("configs/sdxl", "unet", 4, "Stable Diffusion XL, UNet with 4 channels"),
        ("configs/sdxl", "unet", 9, "Stable Diffusion XL, UNet with 9 channels"),
        ("tiny", "controlnet", 4, "embedded model, ControlNet"),
        ("configs/sd15", "controlnet", 4, "Stable Diffusion 1.x, ControlNet"),
        ("configs/sd21", "controlnet", 4, "Stable Diffusion 2.x, ControlNet"),
        ("configs/sdxl", "controlnet", 4, "Stable Diffusion XL, ControlNet"),
        ("configs/sd15", "vae", 3, "Stable Diffusion 1.x, 2.x and XL, VAE"),
        ("configs/sd21", "vae", 3, "Stable Diffusion 1.x, 2.x and XL, VAE"),
        ("configs/sdxl", "vae", 3, "Stable Diffusion 1.x, 2.x and XL, VAE"),
    ],
)
def test_every_family_has_a_template(
    folder: str, component: str, channels: int, title: str
) -> None:
    template = find_template(component, {**config_of(folder, component), "in_channels": channels})
    assert (template.title, template.component) == (title, component)


PUBLISHED: Mapping[str, dict[str, Any]] = {
    "Stable Diffusion 1.x, ControlNet": {
        "attention_head_dim": 8,
        "cross_attention_dim": 768,
    },
    "Stable Diffusion 2.x, ControlNet": {
        "attention_head_dim": [5, 10, 20, 20],
        "cross_attention_dim": 1024,
        "use_linear_projection": True,
    },
    "Stable Diffusion XL, ControlNet": {
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "attention_head_dim": [5, 10, 20],
        "block_out_channels": [320, 640, 1280],
        "cross_attention_dim": 2048,
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        "projection_class_embeddings_input_dim": 2816,
        "transformer_layers_per_block": [1, 2, 10],
        "upcast_attention": None,
        "use_linear_projection": True,
    },
}
"""What the config.json of published ControlNets sets to other than diffusers' defaults."""


@pytest.mark.parametrize(("title", "config"), PUBLISHED.items())
def test_published_controlnets_have_a_template(title: str, config: dict[str, Any]) -> None:
    spelled = {"mid_block_scale_factor": 1, "num_attention_heads": None, "layers_per_block": 2}
    template = find_template("controlnet", {**spelled, **config})
    assert (template.title, template.component) == (title, "controlnet")
    after = {"controlnet_conditioning_channel_order": "bgr", "global_pool_conditions": True}
    assert find_template("controlnet", {**config, **after}) is template


def test_a_template_is_named_by_its_architecture() -> None:
    for template in templates():
        about = json.loads((template.folder / "template.json").read_text("utf-8"))
        text = json.dumps([template.component, about["architecture"]], sort_keys=True)
        assert hashlib.sha256(text.encode()).hexdigest() == template.key
        assert template.folder.name == template.key[:16]


@pytest.mark.parametrize(
    "change",
    [
        {"sample_size": 96},
        {"upcast_attention": True},
        {"upcast_attention": None},
        {"attention_head_dim": [8, 8, 8, 8]},
        {"attention_head_dim": (8, 8, 8, 8)},
        {"layers_per_block": [2, 2, 2, 2]},
        {"cross_attention_dim": [768, 768, 768, 768]},
        {"only_cross_attention": [False, False, False, False]},
        {"_name_or_path": "somewhere/else", "_diffusers_version": "0.6.0"},
        {"a_field_of_the_future": 1},
    ],
)
def test_what_leaves_the_graph_as_it_is_leaves_the_key(change: dict[str, Any]) -> None:
    config = config_of("configs/sd15", "unet")
    assert key_of("unet", {**config, **change}) == key_of("unet", config)


def test_the_full_config_of_diffusers_has_the_same_key() -> None:
    """Files written by a newer diffusers list every field, with null and defaults."""
    config = config_of("configs/sdxl", "unet")
    with init_empty_weights():
        full = UNet2DConditionModel.from_config(config).config
    assert len(full) > len(config)
    assert key_of("unet", full) == key_of("unet", config)


@pytest.mark.parametrize(
    "change",
    [
        {"in_channels": 9},
        {"block_out_channels": [320, 640, 1280, 1281]},
        {"attention_head_dim": [8, 8, 8, 16]},
        {"time_cond_proj_dim": 256},
        {"act_fn": "mish"},
        {"norm_eps": 1e-6},
    ],
)
def test_what_changes_the_graph_changes_the_key(change: dict[str, Any]) -> None:
    config = config_of("configs/sd15", "unet")
    assert key_of("unet", {**config, **change}) != key_of("unet", config)


@pytest.mark.parametrize(
    ("component", "folder", "change", "sentence"),
    [
        (
            "unet", "configs/sd15", {"act_fn": "mish"},
            "sdamd has no ONNX graph for the unet of this model: unlike Stable Diffusion 1.x, "
            "UNet with 4 channels, it has act_fn mish; known are: Stable Diffusion 1.x, UNet with "
            "4 channels; Stable Diffusion 1.x, UNet with 9 channels; ",
        ),
        (
            "unet", "configs/sdxl", {"in_channels": 8, "use_linear_projection": False},
            "unlike Stable Diffusion XL, UNet with 4 channels, it has in_channels 8, "
            "use_linear_projection by default; known are: ",
        ),
        (
            "controlnet", "configs/sd15", {"conditioning_channels": 6},
            "unlike Stable Diffusion 1.x, ControlNet, it has conditioning_channels 6; known are: "
            "Stable Diffusion 1.x, ControlNet; Stable Diffusion 2.x, ControlNet; ",
        ),
        (
            "vae", "configs/sd15", {"latent_channels": 16},
            "for the vae of this model: unlike Stable Diffusion 1.x, 2.x and XL, VAE, it has "
            "latent_channels 16; known are: Stable Diffusion 1.x, 2.x and XL, VAE; embedded "
            "model, VAE. The engines rocm and cpu run it",
        ),
    ],
)  # fmt: skip
def test_an_unknown_architecture_is_refused_with_what_is_known(
    component: str, folder: str, change: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(BadCheckpoint) as caught:
        find_template(component, {**config_of(folder, component), **change})
    assert sentence in str(caught.value)


# -- where weights lie -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_weights_lie_on_pages_and_apart(dtype: str) -> None:
    weights = find_template("unet", config_of("tiny", "unet")).weights
    offsets, end = layout(weights, dtype)
    size = {"float32": 4, "float16": 2}[dtype]
    assert [*offsets] == [weight.name for weight in weights]
    stop = 0
    for weight in weights:
        assert offsets[weight.name] % ALIGNMENT == 0
        assert 0 <= offsets[weight.name] - stop < ALIGNMENT
        stop = offsets[weight.name] + math.prod(weight.shape) * size
    assert stop == end


# -- the folder in the cache -------------------------------------------------------------------


class Tiny:
    """The embedded VAE in the hand of a caller who counts how often it is read."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "model.safetensors"
        shutil.copyfile(VAE_WEIGHTS, self.file)
        self.cache = folder / "cache"
        self.template = find_template("vae", config_of("tiny", "vae"))
        self.reads = 0

    def state(self) -> Mapping[str, torch.Tensor]:
        self.reads += 1
        state: Mapping[str, torch.Tensor] = load_file(VAE_WEIGHTS)
        return state

    def export(self, dtype: str = "float16") -> Export:
        return export(self.template, dtype, [self.file], self.cache, self.state)


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    return Tiny(tmp_path)


def _files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_what_is_there_is_used_again(tiny: Tiny) -> None:
    first = tiny.export()
    before = _files(first.folder)
    assert sorted(before) == [MANIFEST, "vae-decoder.onnx", "vae-encoder.onnx", WEIGHTS]
    assert tiny.export() == first
    assert tiny.reads == 1
    assert _files(first.folder) == before


def test_each_dtype_and_each_file_has_its_own_folder(tiny: Tiny) -> None:
    folders = {tiny.export("float16").folder, tiny.export("float32").folder}
    other = tiny.file.with_name("other.safetensors")
    shutil.copyfile(tiny.file, other)
    folders.add(export(tiny.template, "float16", [other], tiny.cache, tiny.state).folder)
    assert len(folders) == 3
    assert tiny.reads == 3


def test_weights_are_written_in_the_dtype_and_transposed_where_the_graph_wants_it(
    tiny: Tiny,
) -> None:
    template = find_template("unet", config_of("tiny", "unet"))
    assert {weight.transposed for weight in template.weights} == {True, False}
    state = load_file(UNET_WEIGHTS)
    made = export(template, "float32", [tiny.file], tiny.cache, lambda: state)
    offsets, end = layout(template.weights, "float32")
    content = (made.folder / WEIGHTS).read_bytes()
    assert len(content) == end
    for weight in template.weights:
        found = np.frombuffer(
            content, np.float32, math.prod(weight.shape), offsets[weight.name]
        ).reshape(weight.shape)
        wanted = state[weight.key].float().numpy()
        np.testing.assert_array_equal(found, wanted.T if weight.transposed else wanted)


def _edit(name: str, change: Callable[[Any], Any]) -> Callable[[Tiny, Path], None]:
    def edit(_: Tiny, folder: Path) -> None:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        manifest[name] = change(manifest[name])
        (folder / MANIFEST).write_text(json.dumps(manifest), "utf-8")

    return edit


def _cut(name: str, keep: int) -> Callable[[Tiny, Path], None]:
    def cut(_: Tiny, folder: Path) -> None:
        with (folder / name).open("r+b") as file:
            file.truncate(keep)

    return cut


def _write(name: str, content: bytes) -> Callable[[Tiny, Path], None]:
    def write(_: Tiny, folder: Path) -> None:
        (folder / name).write_bytes(content)

    return write


def _touch(tiny: Tiny, _: Path) -> None:
    tiny.file.touch()


def _grow(tiny: Tiny, _: Path) -> None:
    with tiny.file.open("ab") as file:
        file.write(b"\0")


@pytest.mark.parametrize(
    "damage",
    [
        _edit("format", lambda number: number - 1),
        _edit("format", lambda number: number + 1),
        _edit("template", lambda digest: digest[::-1]),
        _edit("dtype", lambda _: "float32"),
        _edit("source", lambda _: []),
        _edit("source", lambda rows: [[path, size + 1, when] for path, size, when in rows]),
        _write(MANIFEST, b""),
        _write(MANIFEST, b"[]"),
        _write(MANIFEST, b"\xff\xfe\x00"),
        _write(MANIFEST, b'{"format": 1'),
        _cut(WEIGHTS, 1000),
        _cut("vae-encoder.onnx", 0),
        _write("vae-decoder.onnx", b"x"),
        lambda _, folder: (folder / WEIGHTS).unlink(),
        lambda _, folder: (folder / MANIFEST).unlink(),
        lambda _, folder: (folder / "vae-encoder.onnx").unlink(),
        _touch,
        _grow,
    ],
    ids=[
        "of an older version", "of a newer version", "of other graphs", "of another dtype",
        "of no checkpoint", "of another checkpoint", "empty manifest", "manifest is a list",
        "manifest is binary", "half a manifest", "truncated weights", "empty graph",
        "another graph", "weights gone", "manifest gone", "graph gone",
        "checkpoint written again", "checkpoint grown",
    ],
)  # fmt: skip
def test_a_folder_that_is_not_exactly_right_is_written_anew(
    tiny: Tiny, damage: Callable[[Tiny, Path], None]
) -> None:
    made = tiny.export()
    good = _files(made.folder)
    damage(tiny, made.folder)
    again = tiny.export()
    assert tiny.reads == 2
    assert again.folder == made.folder
    files = _files(again.folder)
    assert {**files, MANIFEST: b""} == {**good, MANIFEST: b""}
    tiny.export()
    assert tiny.reads == 2
    assert [entry.name for entry in made.folder.parent.iterdir()] == [made.folder.name]


def test_a_full_disk_is_told_before_anything_is_read(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = layout(tiny.template.weights, "float16")[1]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**12, 0, 2 * needed - 1))
    with pytest.raises(StorageError, match=r"0\.0 GB free; .* takes 0\.0 GB, twice its weights"):
        tiny.export()
    assert tiny.reads == 0
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**12, 0, 2 * needed))
    assert tiny.export().graph("vae-decoder").is_file()


def test_a_disk_that_fills_up_meanwhile_leaves_nothing(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left on device"):
        tiny.export()
    assert list((tiny.cache / "onnx").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_told(tiny: Tiny) -> None:
    tiny.cache.write_bytes(b"a file")
    with pytest.raises(StorageError, match="cannot be written"):
        tiny.export()


def test_a_checkpoint_that_is_gone_is_told(tiny: Tiny) -> None:
    tiny.file.unlink()
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors cannot be read: No such file"):
        tiny.export()


def test_weights_of_another_model_are_refused_with_all_that_is_wrong(tiny: Tiny) -> None:
    state = dict(tiny.state())
    del state["decoder.conv_in.bias"]
    state["encoder.conv_in.weight"] = torch.zeros(32, 4, 3, 3)
    with pytest.raises(BadCheckpoint) as caught:
        export(tiny.template, "float16", [tiny.file], tiny.cache, lambda: state)
    assert str(caught.value) == (
        "the weights do not fit embedded model, VAE: has encoder.conv_in.weight of shape "
        "[32, 4, 3, 3] instead of [32, 3, 3, 3]; lacks decoder.conv_in.bias"
    )
    assert list((tiny.cache / "onnx").iterdir()) == []


def test_what_a_killed_export_left_goes_when_it_is_old(tiny: Tiny) -> None:
    made = tiny.export()
    shutil.rmtree(made.folder)
    old, young = (made.folder.with_name(f"{made.folder.name}.{n}.part") for n in ("aa", "bb"))
    for part in (old, young):
        part.mkdir()
        (part / WEIGHTS).write_bytes(b"half")
    hours_ago = time.time() - 7200
    os.utime(old, (hours_ago, hours_ago))
    tiny.export()
    names = {entry.name for entry in made.folder.parent.iterdir()}
    assert names == {made.folder.name, young.name}


def test_the_export_of_a_faster_process_is_kept(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both wrote the same; the second finds the name taken when it wants to give it."""
    other = Tiny.__new__(Tiny)
    other.__dict__.update(tiny.__dict__)
    sync = onnx_export._put

    def late(part: Path, folder: Path, identity: Mapping[str, Any]) -> None:
        monkeypatch.setattr(onnx_export, "_put", sync)
        other.export()
        rename = Path.rename

        def taken(self: Path, target: Path) -> Path:
            if self == folder:
                raise FileNotFoundError
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", taken)
        sync(part, folder, identity)

    monkeypatch.setattr(onnx_export, "_put", late)
    made = tiny.export()
    assert (tiny.reads, other.reads) == (1, 1)
    assert [entry.name for entry in made.folder.parent.iterdir()] == [made.folder.name]
    tiny.export()
    assert tiny.reads == 1


# -- the same numbers as torch -----------------------------------------------------------------


def run(path: Path, feeds: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> torch.Tensor:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.add_session_config_entry("session.disable_prepacking", "1")
    for name, size in sizes.items():
        options.add_free_dimension_override_by_name(name, size)
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {name: tensor.numpy() for name, tensor in feeds.items()})
    return torch.from_numpy(output)


def halved(size: int, level: int) -> int:
    return size if level == 0 else halved((size + 1) // 2, level - 1)


def residuals(
    channels: list[int], layers: int, batch: int, height: int, width: int
) -> list[torch.Tensor]:
    """What a ControlNet gives: one for each skip connection, and the middle block's."""
    made = [(channels[0], 0)]
    for level, count in enumerate(channels):
        made += [(count, level)] * layers
        made += [(count, level + 1)] if level + 1 < len(channels) else []
    made.append((channels[-1], len(channels) - 1))
    return [
        torch.randn(batch, count, halved(height, level), halved(width, level))
        for count, level in made
    ]


def compare_unet(
    unet: Any, made: Export, shape: tuple[int, int, int, int], *, fixed: bool
) -> dict[str, float]:
    """The largest difference to torch, without and with ControlNet's residuals."""
    batch, height, width, sequence = shape
    config = unet.config
    sample = torch.randn(batch, config.in_channels, height, width)
    feeds = {
        "sample": sample,
        "timestep": torch.rand(batch) * 999,
        "encoder_hidden_states": torch.randn(batch, sequence, config.cross_attention_dim),
    }
    extra = residuals(config.block_out_channels, config.layers_per_block, batch, height, width)
    named = {f"residual_{number}": tensor for number, tensor in enumerate(extra)}
    sizes = free_dimensions(batch=batch, height=height, width=width, sequence=sequence)
    with torch.no_grad():
        plain = unet(*feeds.values()).sample
        steered = unet(
            *feeds.values(),
            down_block_additional_residuals=tuple(extra[:-1]),
            mid_block_additional_residual=extra[-1],
        ).sample
    assert (plain - steered).abs().max() > 0.1
    sizes = sizes if fixed else {}
    return {
        "unet": float((run(made.graph("unet"), feeds, sizes) - plain).abs().max()),
        "unet-controlnet": float(
            (run(made.graph("unet-controlnet"), feeds | named, sizes) - steered).abs().max()
        ),
    }


@pytest.fixture(scope="module")
def tiny_unet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    folder = tmp_path_factory.mktemp("unet")
    unet = UNet2DConditionModel.from_pretrained(TINY, subfolder="unet").float().eval()
    yield unet, folder
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("shape", "fixed"),
    [
        ((1, 16, 16, 77), True),
        ((2, 16, 24, 77), False),
        ((3, 13, 18, 154), True),
        ((2, 17, 9, 5), False),
    ],
)
def test_the_embedded_unet_is_the_same_at_any_size(
    tiny_unet: tuple[Any, Path], shape: tuple[int, int, int, int], *, fixed: bool
) -> None:
    """Also where sizes are no multiple of the UNet's factor, which 8 pixels allow."""
    unet, folder = tiny_unet
    template = find_template("unet", unet.config)
    made = export(template, "float32", [UNET_WEIGHTS], folder, unet.state_dict)
    torch.manual_seed(0)
    differences = compare_unet(unet, made, shape, fixed=fixed)
    assert max(differences.values()) < 1e-5, differences


def test_a_graph_in_float16_takes_fractional_timesteps(tiny_unet: tuple[Any, Path]) -> None:
    unet, folder = tiny_unet
    template = find_template("unet", unet.config)
    made = export(template, "float16", [UNET_WEIGHTS], folder, unet.state_dict)
    torch.manual_seed(0)
    feeds = {
        "sample": torch.randn(2, 4, 16, 16),
        # In float16 both would be 999.5.
        "timestep": torch.tensor([999.6, 999.4]),
        "encoder_hidden_states": torch.randn(2, 77, 128),
    }
    with torch.no_grad():
        wanted = unet(*feeds.values()).sample
    narrow = {name: t if name == "timestep" else t.half() for name, t in feeds.items()}
    output = run(made.graph("unet"), narrow, {})
    assert output.dtype == torch.float16
    assert (output.float() - wanted).abs().max() < 5e-3


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-5), ("float16", 2e-2)], ids=["float32", "float16"]
)
@pytest.mark.parametrize("half", ["encoder", "decoder"])
def test_the_embedded_vae_is_the_same(tiny: Tiny, dtype: str, tolerance: float, half: str) -> None:
    vae = AutoencoderKL.from_pretrained(TINY, subfolder="vae").float().eval()
    torch.manual_seed(0)
    sample = torch.randn(2, 3, 104, 72) if half == "encoder" else torch.randn(2, 4, 13, 9)
    with torch.no_grad():
        wanted = getattr(vae, half)(sample)
    output = run(
        tiny.export(dtype).graph(f"vae-{half}"),
        {"sample": sample.to(getattr(torch, dtype))},
        free_dimensions(batch=2, height=sample.shape[2], width=sample.shape[3]),
    )
    scale = max(1.0, float(wanted.abs().max()))
    assert (output.float() - wanted).abs().max() < tolerance * scale


# -- real size ---------------------------------------------------------------------------------


def random_unet(config: Mapping[str, Any]) -> Any:
    """A UNet with weights as after its construction, which are views of few random numbers.

    So drawing them takes three seconds, and the whole net half of its memory.
    """
    with init_empty_weights():
        unet = UNet2DConditionModel.from_config(dict(config)).eval()
    shapes = {name: tensor.shape for name, tensor in unet.state_dict().items()}
    largest = max(shape.numel() for shape in shapes.values())
    noise = torch.rand(largest + 2 * len(shapes), generator=torch.Generator().manual_seed(3))
    noise = 2 * noise - 1
    scaled: dict[int, torch.Tensor] = {}
    state = {}
    for number, (name, shape) in enumerate(shapes.items()):
        inputs = shape[1:].numel() if len(shape) > 1 else 1000
        if inputs not in scaled:
            scaled[inputs] = noise / math.sqrt(inputs)
        state[name] = scaled[inputs][number : number + shape.numel()].view(shape)
        if "norm" in name and name.endswith("weight"):
            state[name] = state[name] + 1
    unet.load_state_dict(state, assign=True)
    return unet


@pytest.mark.slow
def test_stable_diffusion_1_5_is_the_same_at_its_real_size(tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < 8e9:
        pytest.skip("the weights in float32 take 3.4 GB, and twice that must be free")
    unet = random_unet(config_of("configs/sd15", "unet"))
    file = tmp_path / "model.safetensors"
    file.touch()
    try:
        made = export(
            find_template("unet", unet.config), "float32", [file], tmp_path, unet.state_dict
        )
        torch.manual_seed(0)
        differences = compare_unet(unet, made, (2, 16, 16, 77), fixed=True)
    finally:
        # pytest keeps the folders of three runs.
        shutil.rmtree(tmp_path)
    assert max(differences.values()) < 1e-5, differences


def test_templates_are_read_once(tiny: Tiny) -> None:
    assert isinstance(tiny.template, Template)
    assert find_template("vae", config_of("tiny", "vae")) is tiny.template

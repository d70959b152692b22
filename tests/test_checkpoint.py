import gzip
import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import sdamd
from sdamd.checkpoint import (
    EPSILON,
    FAMILIES,
    V_PREDICTION,
    Layout,
    identify,
    read_header,
)
from sdamd.errors import BadCheckpoint

HEADERS = Path(__file__).parent / "data" / "headers"
BYTES = {"F16": 2, "BF16": 2, "F32": 4, "I64": 8, "F8_E4M3": 1}
Row = tuple[str, str, list[int]]


def rows_of(family: str) -> list[Row]:
    """The tensors of a real-size file: name, dtype, shape."""
    rows: list[Row] = json.loads(gzip.decompress((HEADERS / f"{family}.json.gz").read_bytes()))
    return rows


def head(rows: Iterable[Row], metadata: dict[str, str] | None = None) -> tuple[bytes, int]:
    """A header, and how many bytes of weights belong to it."""
    entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, dtype, shape in rows:
        begin, end = end, end + BYTES[dtype] * int_product(shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text, end


def int_product(shape: Iterable[int]) -> int:
    result = 1
    for side in shape:
        result *= side
    return result


def write(path: Path, rows: Iterable[Row], metadata: dict[str, str] | None = None) -> Path:
    """A file of the true size without weights: the disk stores only the header."""
    start, size = head(rows, metadata)
    with path.open("wb") as file:
        file.write(start)
        file.truncate(len(start) + size)
    return path


def without(rows: Iterable[Row], *prefixes: str) -> list[Row]:
    return [row for row in rows if not row[0].startswith(prefixes)]


def reshaped(rows: Iterable[Row], name: str, shape: list[int]) -> list[Row]:
    return [(n, d, shape if n == name else s) for n, d, s in rows]


def refusal(path: Path) -> str:
    with pytest.raises(BadCheckpoint) as caught:
        identify(path)
    return str(caught.value)


# -- what is recognised ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "family", "prediction", "size"),
    [
        ("sd15", "sd15", EPSILON, 512),
        ("sd21", "sd21", V_PREDICTION, 768),
        ("sdxl", "sdxl", EPSILON, 1024),
    ],
)
def test_a_single_file_is_identified_by_its_header(
    tmp_path: Path, header: str, family: str, prediction: str, size: int
) -> None:
    found = identify(write(tmp_path / "My Model.safetensors", rows_of(header)))
    assert found.name == "My Model"
    assert found.layout is Layout.FILE
    assert found.family is FAMILIES[family]
    assert found.prediction_type == prediction
    assert (found.family.width, found.family.height) == (size, size)
    assert found.dtype == "float16"
    assert found.bytes == found.path.stat().st_size > 2e9


@pytest.mark.parametrize("header", ["sd15", "sd21", "sdxl"])
def test_an_inpainting_model_is_its_family_with_nine_input_channels(
    tmp_path: Path, header: str
) -> None:
    first = "model.diffusion_model.input_blocks.0.0.weight"
    rows = reshaped(rows_of(header), first, [320, 9, 3, 3])
    found = identify(write(tmp_path / "inpainting-v.safetensors", rows))
    assert found.in_channels == 9
    assert found.family is FAMILIES[header]
    assert found.parameters.unet == FAMILIES[header].parameters.unet + 5 * 320 * 9
    assert identify(write(tmp_path / "plain-v.safetensors", rows_of(header))).in_channels == 4


def test_only_the_header_is_read(tmp_path: Path) -> None:
    """A real-size file would take a second to read; its first bytes are all that is touched."""
    path = write(tmp_path / "model.safetensors", rows_of("sdxl"))
    start, _ = head(rows_of("sdxl"))
    before = Path("/proc/self/io").read_text() if Path("/proc/self/io").exists() else ""
    identify(path)
    if before:
        after = Path("/proc/self/io").read_text()
        read = [int(text.split("rchar: ")[1].split()[0]) for text in (before, after)]
        assert read[1] - read[0] < len(start) + 100_000


@pytest.mark.parametrize(
    ("file", "metadata", "sidecar", "family"),
    [
        ("x", {"modelspec.prediction_type": "epsilon"}, None, "sd21-base"),
        ("x", {"modelspec.prediction_type": "v"}, None, "sd21"),
        ("x-512", {"modelspec.prediction_type": "v"}, None, "sd21"),
        ("x", {"modelspec.architecture": "stable-diffusion-v2-512"}, None, "sd21-base"),
        ("x", {"modelspec.architecture": "stable-diffusion-v2-768-v"}, None, "sd21"),
        ("x", {}, 'model:\n  target: diffusion\n  params:\n    parameterization: "v"\n', "sd21"),
        ("v2-1_768", {}, "model:\n  target: ldm.models.diffusion\n", "sd21-base"),
        ("v2-1_512-ema-pruned", {}, None, "sd21-base"),
        ("512-base-ema", {}, None, "sd21-base"),
        ("v2-1_768-ema-pruned", {}, None, "sd21"),
        ("some-mix", {}, None, "sd21"),
    ],
)
def test_stable_diffusion_2_predicts_what_its_surroundings_say(
    tmp_path: Path, file: str, metadata: dict[str, str], sidecar: str | None, family: str
) -> None:
    path = write(tmp_path / f"{file}.safetensors", rows_of("sd21"), metadata)
    if sidecar:
        path.with_suffix(".yaml").write_text(sidecar)
    found = identify(path)
    assert found.family is FAMILIES[family]
    assert found.prediction_type == found.family.prediction_type
    assert len(found.reasons) == 1, "how it was found is always said"


def test_a_guess_says_how_to_settle_it(tmp_path: Path) -> None:
    found = identify(write(tmp_path / "mix.safetensors", rows_of("sd21")))
    assert "guessed" in found.reasons[0]
    assert "mix.yaml" in found.reasons[0]


def test_sdxl_v_prediction_and_zero_snr_are_told_by_marker_keys(tmp_path: Path) -> None:
    markers: list[Row] = [("v_pred", "F32", []), ("ztsnr", "F32", [])]
    found = identify(write(tmp_path / "noob.safetensors", [*rows_of("sdxl"), *markers]))
    assert found.family is FAMILIES["sdxl"]
    assert found.prediction_type == V_PREDICTION
    assert found.zero_terminal_snr


def test_stored_eight_bit_weights_are_recognised(tmp_path: Path) -> None:
    rows = [(n, "F8_E4M3" if d == "F16" else d, s) for n, d, s in rows_of("sdxl")]
    assert identify(write(tmp_path / "x.safetensors", rows)).dtype == "float8_e4m3fn"


# -- what is refused, by its name --------------------------------------------------------------

UNET = "model.diffusion_model."
IN = f"{UNET}input_blocks.0.0.weight"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        pytest.param(
            lambda: reshaped(rows_of("sd15"), IN, [320, 8, 3, 3]), "InstructPix2Pix", id="8ch"
        ),
        pytest.param(
            lambda: reshaped(rows_of("sd21"), IN, [320, 5, 3, 3]), "depth-guided", id="5ch"
        ),
        pytest.param(
            lambda: [
                (IN, "F16", [384, 4, 3, 3]),
                (
                    f"{UNET}input_blocks.4.1.transformer_blocks.0.attn2.to_k.weight",
                    "F16",
                    [768, 1280],
                ),
            ],
            "Stable Diffusion XL refiner",
            id="refiner",
        ),
        pytest.param(
            lambda: [*rows_of("sd21"), (f"{UNET}label_emb.0.0.weight", "F16", [1280, 2048])],
            "unCLIP",
            id="unclip",
        ),
        pytest.param(
            lambda: without(rows_of("sdxl"), f"{UNET}middle_block.1.transformer_blocks.9."),
            "a pruned or extended variant",
            id="pruned",
        ),
        pytest.param(
            lambda: without(rows_of("sd15"), "first_stage_model."), "without its VAE", id="no-vae"
        ),
        pytest.param(
            lambda: without(rows_of("sdxl"), "conditioner."),
            "without its text encoder",
            id="no-text",
        ),
        pytest.param(
            lambda: [
                (n.removeprefix(UNET), d, s) for n, d, s in rows_of("sd15") if n.startswith(UNET)
            ],
            "a UNet alone",
            id="unet",
        ),
        pytest.param(
            lambda: [r for r in rows_of("sd15") if r[0].startswith("first_stage_model.")],
            "a VAE",
            id="vae",
        ),
        pytest.param(lambda: [*rows_of("sdxl"), ("edm_mean", "F32", [4])], "Playground", id="edm"),
        pytest.param(
            lambda: [(IN, "F16", [320]), ("x", "F16", [1])], "a model of 0 input channels", id="odd"
        ),
    ],
)
def test_models_that_cannot_run_are_refused_by_name(
    tmp_path: Path, rows: Callable[[], list[Row]], said: str
) -> None:
    message = refusal(write(tmp_path / "x.safetensors", rows()))
    assert said in message
    assert "allowed are" in message


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("lora_unet_mid_block_attentions_0_proj_in.lora_down.weight", [4, 320], "a LoRA"),
        ("unet.down_blocks.1.attentions.0.proj_in.lora_A.weight", [4, 320], "a LoRA"),
        ("unet.up_blocks.1.attentions.0.to_q.lora.up.weight", [4, 320], "a LoRA"),
        ("lora_te_text_model_encoder_layers_0_mlp_fc1.hada_w1_a", [4, 4], "a LoRA"),
        ("control_model.input_hint_block.0.weight", [16, 3, 3, 3], "a ControlNet"),
        ("controlnet_cond_embedding.conv_in.weight", [16, 3, 3, 3], "a ControlNet"),
        ("ip_adapter.1.to_k_ip.weight", [320, 768], "an IP-Adapter"),
        ("body.0.block1.weight", [320, 320, 3, 3], "a T2I-Adapter"),
        ("down_blocks.0.motion_modules.0.x.weight", [1], "AnimateDiff"),
        ("emb_params", [4, 768], "a textual inversion embedding"),
        ("clip_g", [4, 1280], "a textual inversion embedding"),
        ("decoder.up.0.block.0.conv1.weight", [128, 256, 3, 3], "a VAE"),
        ("encoder.down_blocks.0.resnets.0.conv1.weight", [1], "a VAE"),
        ("down_blocks.0.resnets.0.conv1.weight", [1], "a UNet alone"),
        ("text_model.encoder.layers.0.mlp.fc1.weight", [1], "a text encoder"),
        ("encoder.block.0.layer.0.SelfAttention.q.weight", [1], "a text encoder"),
        ("conv_first.weight", [64, 3, 3, 3], "an upscaler"),
        ("model.1.sub.0.RDB1.conv1.0.weight", [1], "an upscaler"),
        ("model.diffusion_model.joint_blocks.0.x_block.attn.qkv.weight", [1], "Stable Diffusion 3"),
        ("double_blocks.0.img_attn.qkv.weight", [1], "FLUX"),
        ("model.diffusion_model.double_layers.0.attn.w1q.weight", [1], "AuraFlow"),
        ("transformer_blocks.0.img_mlp.net.0.proj.weight", [1], "Qwen-Image"),
        ("blocks.0.cross_attn.k.weight", [1], "Wan"),
        ("something.else", [1], "no checkpoint that sdamd knows (it holds something.else"),
    ],
)
def test_other_files_are_named_for_what_they_are(
    tmp_path: Path, name: str, shape: list[int], said: str
) -> None:
    """E19 and its like: a LoRA among the checkpoints gets one sentence."""
    assert said in refusal(write(tmp_path / "x.safetensors", [(name, "F16", shape)]))


# -- damage: each kind gets its own cause ------------------------------------------------------


class Bomb:
    """Leaves a mark wherever it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.mark),)


def zipped(payload: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", payload)
    return buffer.getvalue()


GOOD, WEIGHTS = head([("a", "F16", [4]), ("b", "F16", [4])])
GOOD += bytes(WEIGHTS)


def header_only(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def entry(dtype: str = "F16", shape: object = (4,), offsets: object = (0, 8)) -> bytes:
    tensor = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    return header_only(json.dumps({"a": tensor}).encode()) + bytes(8)


LFS = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 4265146304\n"
)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param(LFS, "a Git LFS pointer, not the file of 4265146304 bytes", id="E17-lfs"),
        pytest.param(b"<!DOCTYPE html><html>", "an HTML page", id="E17-html"),
        pytest.param(b"\n  <html lang=en>", "an HTML page", id="E17-html-2"),
        pytest.param(b'{"error":"Access denied"}', "Access denied", id="E17-json"),
        pytest.param(
            GOOD[: len(GOOD) - 8], "8 of 16 bytes of weights are there (50 %)", id="E17-half"
        ),
        pytest.param(GOOD + bytes(16), "16 bytes follow the last tensor", id="E17-trailing"),
        pytest.param(b"", "is empty (0 bytes)", id="E17-empty"),
        pytest.param(b"12345", "has 5 bytes, too few", id="E17-5-bytes"),
        pytest.param(bytes(4096), "zero bytes of 4096: the download only reserved", id="E17-zeros"),
        pytest.param(GOOD[:20], "is cut off: 20 bytes are there", id="E17-20-bytes"),
        pytest.param(zipped(b"x"), "a zip archive, such as torch.save makes", id="E17-zip"),
        pytest.param(b"GGUF\3\0\0\0" + b"\1" * 99, "a GGUF file", id="gguf"),
        pytest.param(b"\x89PNG\r\n\x1a\n" + b"\1" * 99, "a picture", id="png"),
        pytest.param(b"just some text, not a model", "is not a .safetensors file", id="text"),
        pytest.param(header_only(b"[1, 2]    "), "not a JSON object", id="list"),
        pytest.param(header_only(b'{"a": '), "its header is not JSON", id="cut-json"),
        pytest.param(header_only(b"{" + b'"a":{' * 9999), "its header is not JSON", id="deep"),
        pytest.param(header_only(b'{"\xff": 1}'), "its header is not JSON", id="not-utf8"),
        pytest.param(header_only(b'{"a": 1, "a": 2}'), "names 'a' twice", id="twice"),
        pytest.param(header_only(b'{"__metadata__": 3}'), "__metadata__", id="metadata"),
        pytest.param(header_only(b"{        }"), "holds no tensors", id="no-tensors"),
        pytest.param(header_only(b'{"a": {"dtype": "F16"}}'), "'a' incompletely", id="incomplete"),
        pytest.param(entry(dtype="F7"), "'a' as F7; allowed are", id="dtype"),
        pytest.param(entry(shape=[-4]), "sizes that no tensor has", id="negative"),
        pytest.param(entry(shape=[2.0]), "sizes that no tensor has", id="float"),
        pytest.param(entry(shape=[True]), "sizes that no tensor has", id="bool"),
        pytest.param(entry(shape=[1] * 99), "sizes that no tensor has", id="99-d"),
        pytest.param(entry(shape=[2**70], offsets=[0, 8]), "sizes that no tensor has", id="huge"),
        pytest.param(entry(shape=[5]), "takes 10 bytes, its header says 8", id="wrong-size"),
        pytest.param(entry(offsets=[8, 0]), "takes 8 bytes, its header says -8", id="backwards"),
        pytest.param(entry(offsets=[8, 16]), "8 bytes before 'a'", id="hole-in-front"),
        pytest.param(
            struct.pack("<Q", 2**63) + b"{" * 99, f"a header of {2**63} bytes", id="huge-header"
        ),
    ],
)
def test_a_damaged_file_is_told_its_own_cause(tmp_path: Path, content: bytes, said: str) -> None:
    """E17: causes are found in the bytes, not in the text of a library's exception."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    message = refusal(path)
    assert said in message
    assert str(path) in message


@pytest.mark.parametrize(("second", "said"), [(4, "overlap"), (12, "leave a gap")])
def test_tensors_must_fill_the_file(tmp_path: Path, second: int, said: str) -> None:
    tensors = {
        "a": {"dtype": "F16", "shape": [4], "data_offsets": [0, 8]},
        "b": {"dtype": "F16", "shape": [4], "data_offsets": [second, second + 8]},
    }
    path = tmp_path / "x.safetensors"
    path.write_bytes(header_only(json.dumps(tensors).encode()) + bytes(second + 8))
    assert f"'a' and 'b' {said}" in refusal(path)


@pytest.mark.parametrize("letter", [0x7B, 0x20, 0x80, 0x0A, 0x3C])
def test_a_good_file_is_read_whatever_byte_its_length_begins_with(
    tmp_path: Path, letter: int
) -> None:
    """A header of 123 bytes makes a file that begins with `{`, which is no JSON text."""
    start, size = head([("a", "F16", [4])])
    text = start[8:]
    text += b" " * ((letter - len(text)) % 256)
    path = tmp_path / "x.safetensors"
    path.write_bytes(header_only(text) + bytes(size))
    assert path.read_bytes()[0] == letter
    assert read_header(path).tensors["a"].shape == (4,)


@pytest.mark.parametrize("name", ["x.ckpt", "x.pt", "x.pth", "x.bin", "x.safetensors"])
@pytest.mark.parametrize("wrap", [bytes, zipped], ids=["bare", "zip"])
def test_a_pickle_is_refused_and_never_opened(
    tmp_path: Path, name: str, wrap: Callable[[bytes], bytes]
) -> None:
    """E18, F05: whatever it is called; the message says to convert it."""
    mark = tmp_path / "opened"
    path = tmp_path / name
    path.write_bytes(wrap(pickle.dumps({"state_dict": Bomb(mark)}, protocol=2)))
    message = refusal(path)
    assert "a pickle, which can run any code" in message
    assert "convert it" in message
    assert not mark.exists()


def test_the_bomb_of_these_tests_is_live(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(tmp_path / "opened")))
    assert (tmp_path / "opened").is_dir()


def test_a_missing_path_says_so(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "none.safetensors")


def test_a_device_is_no_file() -> None:
    assert "neither a file nor a folder" in refusal(Path(os.devnull))


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="file modes are of Unix")
def test_a_file_without_rights_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", [("a", "F16", [4])])
    path.chmod(0)
    user = os.geteuid()
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if parent.stat().st_uid == user and parent != Path(parent.anchor):
            parent.chmod(parent.stat().st_mode | 0o011)
    try:
        if user == 0:
            os.seteuid(65534)
        message = refusal(path)
    finally:
        if user == 0:
            os.seteuid(0)
    assert "cannot be read: Permission denied" in message


@given(
    st.one_of(
        st.binary(max_size=300),
        st.binary(max_size=300).map(header_only),
        st.tuples(st.integers(0, len(GOOD)), st.integers(0, 255)).map(
            lambda change: GOOD[: change[0]] + bytes([change[1]]) + GOOD[change[0] + 1 :]
        ),
        st.dictionaries(
            st.text(max_size=3),
            st.recursive(
                st.none() | st.integers() | st.floats() | st.text(max_size=3),
                lambda inner: (
                    st.lists(inner, max_size=3)
                    | st.dictionaries(
                        st.sampled_from(["dtype", "shape", "data_offsets", "x"]), inner, max_size=4
                    )
                ),
                max_leaves=12,
            ),
            max_size=3,
        ).map(lambda entries: header_only(json.dumps(entries).encode()) + bytes(8)),
    )
)
@example(GOOD)
def test_no_bytes_cause_anything_but_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("any") / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(BadCheckpoint, match=r"x\.safetensors"):
        identify(path)


# -- folders -----------------------------------------------------------------------------------

UNETS = {
    "sd15": {"in_channels": 4, "sample_size": 64, "cross_attention_dim": 768},
    "sd21": {"in_channels": 4, "sample_size": 96, "cross_attention_dim": 1024},
    "sdxl": {"in_channels": 4, "sample_size": 128, "cross_attention_dim": 2048},
}


def part_rows(count: int) -> list[Row]:
    """One tensor of so many elements stands for a component."""
    return [("weight", "F16", [count]), ("position_ids", "I64", [1, 77])]


def make_folder(
    path: Path,
    *,
    unet: dict[str, Any],
    counts: dict[str, int],
    pipeline: str = "StableDiffusionPipeline",
    scheduler: dict[str, Any] | None = None,
    variant: str = "",
) -> Path:
    """A folder in the layout of diffusers with weights of the true size, stored sparsely."""
    configs = {
        "model_index.json": {"_class_name": pipeline},
        "unet/config.json": {"_class_name": "UNet2DConditionModel", **unet},
        "vae/config.json": {"block_out_channels": [1, 2, 3, 4], "latent_channels": 4},
        "scheduler/scheduler_config.json": scheduler or {},
        "tokenizer/vocab.json": {},
    }
    for name, config in configs.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(config))
    for component, count in counts.items():
        (path / component).mkdir(exist_ok=True)
        stem = "model" if component.startswith("text") else "diffusion_pytorch_model"
        write(path / component / f"{stem}{variant}.safetensors", part_rows(count))
    return path


def counts_of(family: str) -> dict[str, int]:
    parameters = FAMILIES[family].parameters
    names = ("text_encoder", "text_encoder_2")
    encoders = dict(zip(names, parameters.text_encoders, strict=False))
    return {"unet": parameters.unet, "vae": parameters.vae, **encoders}


@pytest.mark.parametrize(
    ("config", "scheduler", "family"),
    [
        ("sd15", {}, "sd15"),
        ("sd15", {"prediction_type": "v_prediction"}, "sd15"),
        ("sd21", {"prediction_type": "v_prediction"}, "sd21"),
        ("sd21", {"prediction_type": "epsilon"}, "sd21-base"),
        ("sdxl", {}, "sdxl"),
        ("sdxl", {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}, "sdxl"),
    ],
)
def test_a_folder_is_identified_by_its_configs(
    tmp_path: Path, config: str, scheduler: dict[str, Any], family: str
) -> None:
    path = make_folder(
        tmp_path / "model",
        unet=UNETS[config],
        counts=counts_of(family),
        pipeline=FAMILIES[family].pipeline,
        scheduler=scheduler,
    )
    found = identify(path)
    assert found.name == "model"
    assert found.layout is Layout.FOLDER
    assert found.family is FAMILIES[family]
    assert found.parameters == FAMILIES[family].parameters, "position ids are no weights"
    assert found.prediction_type == scheduler.get("prediction_type", EPSILON)
    assert found.zero_terminal_snr == scheduler.get("rescale_betas_zero_snr", False)


def test_a_model_of_its_own_size_is_small_stable_diffusion(tmp_path: Path) -> None:
    path = make_folder(
        tmp_path / "mine",
        unet={"sample_size": 16},
        counts={"unet": 1000, "vae": 200, "text_encoder": 30},
    )
    found = identify(path)
    assert found.family.name == "tiny"
    assert (found.family.width, found.family.vae_scale_factor) == (128, 8)
    assert found.family.defaults.upscale == 4
    assert found.parameters.total == 1230
    larger = make_folder(
        tmp_path / "larger",
        unet={"sample_size": 32},
        counts={"unet": 1000, "vae": 200, "text_encoder": 30},
    )
    assert identify(larger).family.width == 256
    assert identify(larger).family.defaults.upscale == 1


def test_the_embedded_model_is_the_one_that_the_table_describes() -> None:
    found = identify(Path(sdamd.__file__).parent / "assets" / "tiny")
    assert found.family is FAMILIES["tiny"]
    assert found.parameters == found.family.parameters
    assert found.prediction_type == found.family.prediction_type


@pytest.mark.parametrize(
    ("variants", "known"), [([""], ("",)), ([".fp16"], ("fp16",)), (["", ".fp16"], ("", "fp16"))]
)
def test_complete_sets_of_weights_are_found(
    tmp_path: Path, variants: list[str], known: tuple[str, ...]
) -> None:
    for variant in variants:
        make_folder(tmp_path / "m", unet=UNETS["sd15"], counts=counts_of("sd15"), variant=variant)
    assert identify(tmp_path / "m").variants == known


def test_weights_in_parts_count_together(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "m", unet=UNETS["sd15"], counts=counts_of("sd15"))
    (path / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    first, second = 800_000_000, FAMILIES["sd15"].parameters.unet - 800_000_000
    write(path / "unet/diffusion_pytorch_model-00001-of-00002.safetensors", part_rows(first))
    assert "lacks the .safetensors weights of unet" in refusal(path)
    write(path / "unet/diffusion_pytorch_model-00002-of-00002.safetensors", part_rows(second))
    assert identify(path).family is FAMILIES["sd15"]


def break_index(path: Path, **entries: object) -> None:
    (path / "model_index.json").write_text(json.dumps(entries))


def break_unet(path: Path, **entries: object) -> None:
    (path / "unet/config.json").write_text(json.dumps(entries))


def only_pickles(path: Path) -> None:
    (path / "unet/diffusion_pytorch_model.safetensors").rename(
        path / "unet/diffusion_pytorch_model.bin"
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(
            lambda p: (p / "model_index.json").unlink(), "without model_index.json", id="no-index"
        ),
        pytest.param(
            lambda p: break_index(p, _class_name="FluxPipeline"), "made for FluxPipeline", id="flux"
        ),
        pytest.param(break_index, "made for no known pipeline", id="no-class"),
        pytest.param(
            lambda p: break_index(
                p, _class_name="StableDiffusionXLImg2ImgPipeline", requires_aesthetics_score=True
            ),
            "refiner",
            id="refiner",
        ),
        pytest.param(lambda p: break_unet(p, time_cond_proj_dim=256), "LCM-distilled", id="lcm"),
        pytest.param(lambda p: break_unet(p, _class_name="X"), "has a X as its UNet", id="class"),
        pytest.param(
            lambda p: (p / "vae/config.json").unlink(), "config.json is missing", id="no-config"
        ),
        pytest.param(
            lambda p: (p / "vae/config.json").write_text("{"), "it is not JSON", id="bad-config"
        ),
        pytest.param(
            lambda p: (p / "vae/config.json").write_text("[]"), "not a JSON object", id="list"
        ),
        pytest.param(
            lambda p: (p / "vae/config.json").write_bytes(LFS), "a Git LFS pointer", id="lfs-config"
        ),
        pytest.param(
            lambda p: (p / "vae/config.json").write_bytes(b" " * 1_000_001), "exceeds", id="large"
        ),
        pytest.param(
            lambda p: (p / "unet/diffusion_pytorch_model.safetensors").write_bytes(LFS),
            "a Git LFS pointer",
            id="E17-lfs",
        ),
        pytest.param(
            lambda p: (p / "text_encoder/model.safetensors").unlink(),
            "lacks the .safetensors weights of text_encoder",
            id="no-weights",
        ),
        pytest.param(only_pickles, "weights of unet only as .bin, a pickle", id="F05-bin"),
        pytest.param(
            lambda p: (p / "scheduler/scheduler_config.json").write_text(
                '{"prediction_type": "sample"}'
            ),
            "predicts 'sample'",
            id="prediction",
        ),
    ],
)
def test_a_folder_that_cannot_run_is_refused(
    tmp_path: Path, change: Callable[[Path], object], said: str
) -> None:
    path = make_folder(tmp_path / "m", unet=UNETS["sd15"], counts=counts_of("sd15"))
    change(path)
    assert said in refusal(path)


def test_a_folder_of_single_files_names_them(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", [("x", "F16", [1])])
    assert "it holds a.safetensors: name one of these" in refusal(tmp_path)

"""DirectML's graphs on onnxruntime's CPU provider, against torch with the same weights."""

import gc
import gzip
import multiprocessing
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from diffusers import (
    ControlNetModel,
    StableDiffusionControlNetPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLControlNetPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLInpaintPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from diffusers.models.controlnets.controlnet import ControlNetOutput
from PIL import Image

from sdamd import models
from sdamd.backends import means, onnx_export, onnx_session
from sdamd.backends.backend import open_backend
from sdamd.backends.directml import DirectMLBackend, DirectMLPipeline
from sdamd.backends.loading import load_weights, read_config
from sdamd.backends.onnx_modules import (
    OrtControlNet,
    OrtUNet,
    full_config,
    ort_controlnet,
    ort_vae,
)
from sdamd.backends.onnx_session import Session, Sessions
from sdamd.backends.torch_backend import TorchBackend, TorchPipeline
from sdamd.errors import BadImage, BadRequest, HardwareError, OutOfVram
from sdamd.hardware.device import CPU, Device
from sdamd.hardware.runtime import Engine
from sdamd.picture import Picture
from sdamd.plan import Plan, make_plan
from sdamd.render import LocalRender, Rendered
from sdamd.request import Job
from sdamd.sampling.sample import decode
from sdamd.settings import Settings
from sdamd.worker import WorkerRender
from tests.backends.test_loading import small_xl_pipeline
from tests.fakes import never

DIRECTML_CPU = Device(gpu=None, engine=Engine.DIRECTML_CPU)
EMBEDDED = models.find("", Path("/nowhere"))
PARITY = 1e-4
"""In pixels of 0 to 1, and in latents. Measured: below 1e-5."""

# Of numpy 2, about arrays that diffusers' own scheduler makes of tensors.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ impl:DeprecationWarning")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """The tests share the machine, and the model is small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def job(job: Job) -> Job:
    """A small one: what is tested here does not hang on the size."""
    return replace(job, width=64, height=64, steps=2)


@pytest.fixture
def plan(job: Job) -> Plan:
    return plan_of(job)


def plan_of(job: Job, engine: Engine = Engine.DIRECTML_CPU) -> Plan:
    settings = Settings(home=Path("/nowhere"), device=str(engine))
    return make_plan(job, None, EMBEDDED, settings, engine=engine)


A_JOB = Job(index=0, prompt="", negative_prompt="", checkpoint="", width=64, height=64, steps=1,
            guidance_scale=1.0, scheduler="Euler", seed=0, upscale=1)  # fmt: skip


@pytest.fixture(scope="module")
def on_onnx(cache: Path) -> DirectMLPipeline:
    return DirectMLBackend(cache).load(EMBEDDED, plan_of(A_JOB))


@pytest.fixture(scope="module")
def on_torch() -> TorchPipeline:
    plan = plan_of(A_JOB, Engine.CPU)
    pipeline = TorchBackend().load(EMBEDDED, plan)
    means.apply(pipeline._pipe, plan, pipeline.device)  # weights come with it
    return pipeline


def going_on(step: int, steps: int) -> bool:
    return False


def difference(a: object, b: object) -> int:
    """The largest difference in any channel of any pixel."""
    assert isinstance(a, Image.Image), a
    assert isinstance(b, Image.Image), b
    assert a.size == b.size
    return int(np.abs(np.asarray(a, np.int16) - np.asarray(b, np.int16)).max())


# -- every mode, through diffusers' own pipelines ------------------------------------------------


def painting() -> torch.Tensor:
    """A picture to start from: (1, 3, 64, 64), in 0 to 1."""
    return (
        torch.rand((1, 3, 8, 8), generator=torch.Generator().manual_seed(5))
        .repeat_interleave(8, dim=2)
        .repeat_interleave(8, dim=3)
    )


def mask() -> torch.Tensor:
    made = torch.zeros(1, 1, 64, 64)
    made[:, :, 16:56, 24:64] = 1
    return made


Run = Callable[..., torch.Tensor]
TEXT = (StableDiffusionPipeline, StableDiffusionXLPipeline)
IMAGE = (StableDiffusionImg2ImgPipeline, StableDiffusionXLImg2ImgPipeline)
INPAINT = (StableDiffusionInpaintPipeline, StableDiffusionXLInpaintPipeline)
CONTROL = (StableDiffusionControlNetPipeline, StableDiffusionXLControlNetPipeline)


def run(kinds: tuple[Any, Any], pipe: Any, **more: Any) -> torch.Tensor:
    """Pixels (2, 3, 64, 64) in 0 to 1, or latents; `kinds` are the classes for SD and for SDXL."""
    extra = {name: more.pop(name) for name in ("unet", "controlnet") if name in more}
    is_xl = isinstance(pipe, StableDiffusionXLPipeline)
    without = {"add_watermarker": False} if is_xl else {"requires_safety_checker": False}
    made = kinds[is_xl](**{**pipe.components, **extra}, **without)
    made.set_progress_bar_config(disable=True)
    options = {
        "output_type": "pt",
        "generator": [torch.Generator().manual_seed(seed) for seed in (1, 2)],
        "num_inference_steps": 2,
        "guidance_scale": 4.0,
        **more,
    }
    with torch.inference_mode():
        images = made(
            ["a red circle", "two trees by the sea"], negative_prompt=["blue", ""], **options
        ).images
    return torch.as_tensor(images)


def txt2img(pipe: Any, **more: Any) -> torch.Tensor:
    return run(TEXT, pipe, **{"width": 64, "height": 64, **more})


def txt2img_unguided(pipe: Any) -> torch.Tensor:
    return txt2img(pipe, guidance_scale=1.0)


def txt2img_of_odd_size(pipe: Any) -> torch.Tensor:
    return txt2img(pipe, width=72, height=104)


def img2img(pipe: Any) -> torch.Tensor:
    start = painting().expand(2, -1, -1, -1)
    return run(IMAGE, pipe, image=start, strength=0.7)


def inpaint(pipe: Any, **more: Any) -> torch.Tensor:
    start = painting().expand(2, -1, -1, -1)
    pictures: dict[str, Any] = {
        "image": start,
        "mask_image": mask().expand(2, -1, -1, -1),
        "strength": 0.8,
    }
    return run(INPAINT, pipe, width=64, height=64, **pictures, **more)


def hires(pipe: Any) -> torch.Tensor:
    """First small, then larger from the enlarged latents."""
    small = txt2img(pipe, output_type="latent")
    large = torch.nn.functional.interpolate(small, scale_factor=1.5, mode="bilinear")
    return run(IMAGE, pipe, image=large, strength=0.6)


MODES = (txt2img, txt2img_unguided, txt2img_of_odd_size, img2img, inpaint, hires)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
def test_unchanged_pipelines_give_what_they_give_on_torch(
    on_onnx: DirectMLPipeline, on_torch: TorchPipeline, mode: Run
) -> None:
    expected, found = mode(on_torch._pipe), mode(on_onnx._pipe)
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) < PARITY
    assert float(expected.std()) > 0.01


def nine_channels() -> UNet2DConditionModel:
    """The embedded UNet, for inpainting: it sees the mask and what is behind it as well."""
    config = read_config(EMBEDDED, "unet") | {"in_channels": 9}
    unet = UNet2DConditionModel.from_config(config)
    state = {k: t.float() for k, t in load_weights(EMBEDDED, "unet", "float32").items()}
    more = torch.randn((64, 5, 3, 3), generator=torch.Generator().manual_seed(9)) * 0.05
    state["conv_in.weight"] = torch.cat([state["conv_in.weight"], more], dim=1)
    unet.load_state_dict(state)
    return unet.eval()


def nine_channel_template(folder: Path) -> onnx_export.Template:
    """The embedded UNet's graphs for nine channels, which do not ship: one shape differs."""
    four = onnx_export.find_template("unet", read_config(EMBEDDED, "unet"))
    weights = tuple(
        replace(w, shape=(64, 9, 3, 3)) if w.key == "conv_in.weight" else w for w in four.weights
    )
    offsets, _ = onnx_export.layout(weights, "float32")
    sizes = {w.name: w.size * 4 for w in weights}
    for name in onnx_export.GRAPHS["unet"]:
        model = onnx.load_model_from_string(four.graph(name, "float32"))
        (sample,) = (value for value in model.graph.input if value.name == "sample")
        sample.type.tensor_type.shape.dim[1].dim_value = 9
        for tensor in model.graph.initializer:
            if tensor.name not in offsets:
                continue
            if list(tensor.dims) == [64, 4, 3, 3]:
                tensor.dims[1] = 9
            place = {"offset": offsets[tensor.name], "length": sizes[tensor.name]}
            for entry in tensor.external_data:
                entry.value = str(place.get(entry.key, entry.value))
        packed = gzip.compress(model.SerializeToString())
        (folder / f"{name}.float32.onnx.gz").write_bytes(packed)
    return replace(four, key="nine", weights=weights, folder=folder)


def graph_of(unet: UNet2DConditionModel, folder: Path, template: onnx_export.Template) -> OrtUNet:
    """The same UNet on onnxruntime."""
    identity = folder / "weights.safetensors"
    identity.write_bytes(b"")
    config = full_config(UNet2DConditionModel, unet.config)
    exported = onnx_export.export(template, "float32", [identity], folder, unet.state_dict)
    return OrtUNet(config, exported, Sessions("directml-cpu", keep=1))


def test_inpainting_with_nine_channels_is_that_of_torch(
    on_onnx: DirectMLPipeline, on_torch: TorchPipeline, tmp_path: Path
) -> None:
    unet = nine_channels()
    expected = inpaint(on_torch._pipe, unet=unet)
    graph = graph_of(unet, tmp_path, nine_channel_template(tmp_path))
    found = inpaint(on_onnx._pipe, unet=graph)
    assert float((found - expected).abs().max()) < PARITY
    without = inpaint(on_torch._pipe)
    assert float((without - expected).abs().max()) > 0.01


def controlnet_like(unet: Any, seed: int = 3, **config: Any) -> ControlNetModel:
    """One for this UNet; its layers that begin as zeros here give residuals of about 1."""
    torch.manual_seed(seed)
    made = ControlNetModel.from_unet(unet, **config).eval()
    first = made.controlnet_cond_embedding.conv_out
    for block in (*made.controlnet_down_blocks, made.controlnet_mid_block, first):
        torch.nn.init.normal_(block.weight, std=0.03)
        torch.nn.init.normal_(block.bias, std=0.03)
    return made


def controlnet_graph(
    controlnet: ControlNetModel, folder: Path, dtype: str = "float32", rows: int | None = None
) -> OrtControlNet:
    """The same ControlNet on onnxruntime."""
    identity = folder / "weights.safetensors"
    identity.write_bytes(b"")
    sessions = Sessions("directml-cpu", keep=2)
    return ort_controlnet(
        controlnet.config, dtype, [identity], folder, controlnet.state_dict, sessions, rows=rows
    )


@pytest.fixture(scope="module")
def steering(on_torch: TorchPipeline) -> ControlNetModel:
    return controlnet_like(on_torch._pipe.unet)


@pytest.fixture(scope="module")
def steering_graph(
    steering: ControlNetModel, tmp_path_factory: pytest.TempPathFactory
) -> OrtControlNet:
    return controlnet_graph(steering, tmp_path_factory.mktemp("controlnet"))


def controlled(pipe: Any, controlnet: Any, pictures: int = 1, **more: Any) -> torch.Tensor:
    pictured = painting().expand(2, -1, -1, -1)
    image = pictured if pictures == 1 else [pictured.roll(n, dims=3) for n in range(pictures)]
    return run(CONTROL, pipe, controlnet=controlnet, image=image, width=64, height=64, **more)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"guess_mode": True},
        {"controlnet_conditioning_scale": 0.6, "control_guidance_end": 0.5},
        {"guidance_scale": 1.0},
    ],
    ids=str,
)
def test_a_controlnet_steers_as_on_torch(
    on_onnx: DirectMLPipeline, on_torch: TorchPipeline, steering: Any, steering_graph: Any,
    more: dict[str, Any],
) -> None:  # fmt: skip
    expected = controlled(on_torch._pipe, steering, **more)
    found = controlled(on_onnx._pipe, steering_graph, **more)
    assert float((found - expected).abs().max()) < PARITY
    without = {k: v for k, v in more.items() if k == "guidance_scale"}
    assert float((txt2img(on_torch._pipe, **without) - expected).abs().max()) > 0.01


def test_a_controlnet_may_stay_in_torch(
    on_onnx: DirectMLPipeline, on_torch: TorchPipeline, steering: ControlNetModel
) -> None:
    expected, found = (controlled(on._pipe, steering) for on in (on_torch, on_onnx))
    assert float((found - expected).abs().max()) < PARITY


@pytest.mark.parametrize("more", [{}, {"guess_mode": True}], ids=str)
def test_two_controlnets_steer_together(
    on_onnx: DirectMLPipeline, on_torch: TorchPipeline, steering: Any, steering_graph: Any,
    tmp_path: Path, more: dict[str, Any],
) -> None:  # fmt: skip
    other = controlnet_like(on_torch._pipe.unet, seed=4)
    more["controlnet_conditioning_scale"] = [0.8, 0.4]
    expected = controlled(on_torch._pipe, [steering, other], 2, **more)
    graphs = [steering_graph, controlnet_graph(other, tmp_path)]
    found = controlled(on_onnx._pipe, graphs, 2, **more)
    assert float((found - expected).abs().max()) < PARITY
    more["controlnet_conditioning_scale"] = [0.8, 0.0]
    alone = controlled(on_torch._pipe, [steering, other], 2, **more)
    assert float((alone - expected).abs().max()) > 0.01


class TorchSessions(Sessions):
    """Computes in torch what a graph of the same inputs would: for architectures without one."""

    def __init__(self, **modules: Any) -> None:
        super().__init__("directml-cpu", keep=1)
        self._modules = modules
        self.fed: set[str] = set()

    def run(self, model: Path, sizes: Any, feeds: Any) -> list[Any]:
        self.fed |= feeds.keys()
        given: dict[str, Any] = {
            name: torch.from_numpy(array.copy()) for name, array in feeds.items()
        }
        added = {k: given.pop(k) for k in ("text_embeds", "time_ids") if k in given}
        if added:
            given["added_cond_kwargs"] = added
        if model.name == "unet-controlnet":
            *down, middle = (given.pop(k) for k in [*given] if k.startswith("residual_"))
            given["down_block_additional_residuals"] = down
            given["mid_block_additional_residual"] = middle
        made = self._modules[model.name](**given)
        if isinstance(made, ControlNetOutput):
            return [t.numpy() for t in (*made.down_block_res_samples, made.mid_block_res_sample)]
        return [(made if isinstance(made, torch.Tensor) else made.sample).numpy()]


@pytest.fixture(scope="module")
def xl() -> tuple[Any, Any, TorchSessions]:
    """A small SDXL of random weights, and the same behind the modules for onnxruntime."""
    pipe, stand_in = small_xl_pipeline(), small_xl_pipeline()
    unet, vae = pipe.unet.eval(), pipe.vae.eval()
    graphs: Any = SimpleNamespace(graph=Path)
    sessions = TorchSessions(
        **{"unet": unet, "unet-controlnet": unet},
        **{"vae-encoder": vae.encoder, "vae-decoder": vae.decoder},
    )
    stand_in.unet = OrtUNet(full_config(UNet2DConditionModel, unet.config), graphs, sessions)
    stand_in.vae = ort_vae(vae.config, lambda _: graphs, sessions, vae.state_dict())
    return pipe, stand_in, sessions


@pytest.mark.parametrize("mode", [txt2img, img2img, inpaint], ids=lambda mode: mode.__name__)
def test_unchanged_pipelines_of_sdxl_give_what_they_give_on_torch(xl: Any, mode: Run) -> None:
    """That its conditions arrive; that its graph is right is proven where it is exported."""
    pipe, stand_in, sessions = xl
    sessions.fed.clear()
    assert float((mode(stand_in) - mode(pipe)).abs().max()) < PARITY
    assert {"text_embeds", "time_ids"} <= sessions.fed


@pytest.mark.parametrize("guess_mode", [False, True])
def test_a_controlnet_of_sdxl_steers_as_on_torch(xl: Any, guess_mode: bool) -> None:
    pipe, stand_in, _ = xl
    # Its VAE halves once, and so does what looks at the picture.
    controlnet = controlnet_like(pipe.unet, conditioning_embedding_out_channels=(8, 16))
    graphs: Any = SimpleNamespace(graph=Path)
    own = TorchSessions(controlnet=controlnet)
    graph = OrtControlNet(full_config(ControlNetModel, controlnet.config), graphs, own)
    steered = partial(controlled, guess_mode=guess_mode, controlnet_conditioning_scale=0.7)
    expected = steered(pipe, controlnet)
    assert float((steered(stand_in, graph) - expected).abs().max()) < PARITY
    assert float((txt2img(pipe) - expected).abs().max()) > 1e-3
    assert {"text_embeds", "time_ids", "controlnet_cond"} <= own.fed


# -- ControlNet's arguments ----------------------------------------------------------------------


def residuals(controlnet: Any, height: int = 8, width: int = 8, **more: Any) -> list[torch.Tensor]:
    """What a ControlNet gives for two rows, the middle block's last."""
    generator = torch.Generator().manual_seed(4)
    given = {
        "sample": torch.randn((2, 4, height, width), generator=generator),
        "timestep": 321,
        "encoder_hidden_states": torch.randn((2, 77, 128), generator=generator),
        "controlnet_cond": torch.rand((2, 3, 8 * height, 8 * width), generator=generator),
    }
    with torch.inference_mode():
        made = controlnet(**{**given, **more})
    down, middle = made.to_tuple() if isinstance(made, ControlNetOutput) else made
    return [*down, middle]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"height": 13, "width": 18},
        {"height": 9, "width": 8, "return_dict": False},
        {"timestep": 321.25},
        {"timestep": torch.tensor([1.0, 800.0])},
        {"conditioning_scale": 0.35},
        {"conditioning_scale": 0.35, "guess_mode": True},
        {"controlnet_cond": torch.ones(1, 3, 64, 64)},
    ],
    ids=lambda more: " ".join(more) or "plain",
)
def test_residuals_are_those_of_torch(
    steering: ControlNetModel, steering_graph: OrtControlNet, more: dict[str, Any]
) -> None:
    expected, found = residuals(steering, **more), residuals(steering_graph, **more)
    assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in expected]
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).abs().max()) < 1e-5
        assert float(b.std()) > 1e-3


@pytest.mark.parametrize("guess_mode", [False, True])
def test_channel_order_and_pooling_are_those_of_torch(
    on_torch: TorchPipeline, tmp_path: Path, guess_mode: bool
) -> None:
    """Neither is in the graph: it is that of every ControlNet of this architecture."""
    controlnet = controlnet_like(
        on_torch._pipe.unet, controlnet_conditioning_channel_order="bgr"
    )  # fmt: skip
    controlnet.register_to_config(global_pool_conditions=True)
    found = residuals(controlnet_graph(controlnet, tmp_path), guess_mode=guess_mode)
    expected = residuals(controlnet, guess_mode=guess_mode)
    assert {t.shape[2:] for t in expected} == {(1, 1)}
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).abs().max()) < 1e-5


def test_rows_one_at_a_time_are_the_same(
    steering: ControlNetModel, tmp_path: Path, opened: list[str]
) -> None:
    graph = controlnet_graph(steering, tmp_path, rows=1)
    for a, b in zip(residuals(graph), residuals(steering), strict=True):
        assert float((a - b).abs().max()) < 1e-5
    assert opened == ["controlnet 1 beside none"]


def test_a_controlnet_in_half_precision_is_close(
    steering: ControlNetModel, tmp_path: Path
) -> None:  # fmt: skip
    graph = controlnet_graph(steering, tmp_path, "float16")
    assert (graph.dtype, graph.device) == (torch.float32, torch.device("cpu"))
    for a, b in zip(residuals(graph), residuals(steering), strict=True):
        assert a.dtype == torch.float32
        assert float((a - b).abs().max()) < 5e-3 * max(1.0, float(b.abs().max()))


def test_a_controlnet_is_read_once(steering: ControlNetModel, tmp_path: Path) -> None:
    def refuse() -> dict[str, torch.Tensor]:
        raise AssertionError("read again")

    first = controlnet_graph(steering, tmp_path)
    again = ort_controlnet(
        steering.config, "float32", [tmp_path / "weights.safetensors"], tmp_path, refuse,
        Sessions("directml-cpu", keep=1),
    )  # fmt: skip
    for a, b in zip(residuals(again), residuals(first), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            {"cross_attention_kwargs": {"scale": 0.5}, "class_labels": torch.ones(2)},
            "graphs of the ControlNet take no class_labels, cross_attention_kwargs; the engines",
        ),
        (
            {"controlnet_cond": torch.ones(2, 3, 64, 96)},
            "picture for ControlNet is 96 x 64 pixels; it must be 64 x 64",
        ),
    ],
    ids=["arguments", "size"],
)
def test_what_the_graph_of_a_controlnet_does_not_take_is_refused(
    steering_graph: OrtControlNet, more: Any, said: str
) -> None:
    with pytest.raises(BadRequest, match=said):
        residuals(steering_graph, **more)


# -- the UNet's arguments ------------------------------------------------------------------------


def call(unet: Any, **more: Any) -> Any:
    generator = torch.Generator().manual_seed(4)
    sample = torch.randn((2, 4, 8, 8), generator=generator)
    text = torch.randn((2, 77, 128), generator=generator)
    with torch.inference_mode():
        return unet(sample, more.pop("timestep", 321), encoder_hidden_states=text, **more)


@pytest.mark.parametrize(
    "timestep", [321, 321.25, torch.tensor(999), torch.tensor([3.5]), torch.tensor([1.0, 800.0])]
)
def test_timesteps_may_be_fractions_and_one_for_each_row(
    on_onnx: DirectMLPipeline, on_torch: TorchPipeline, timestep: Any
) -> None:
    expected = call(on_torch._pipe.unet, timestep=timestep).sample
    found = call(on_onnx._pipe.unet, timestep=timestep).sample
    assert found.dtype == torch.float32
    assert float((found - expected).abs().max()) < 1e-5


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ({"timestep_cond": torch.ones(1)}, "take no timestep_cond"),
        ({"cross_attention_kwargs": {"scale": 0.5}}, "take no cross_attention_kwargs"),
        ({"down_block_additional_residuals": (torch.ones(1),)}, "take no residuals of some blocks"),
        ({"attention_mask": torch.ones(2), "class_labels": torch.ones(2)}, "attention_mask, class"),
    ],
    ids=str,
)
def test_what_the_graph_does_not_take_is_refused_and_not_ignored(
    on_onnx: DirectMLPipeline, argument: Any, said: str
) -> None:
    with pytest.raises(BadRequest, match=said):
        call(on_onnx._pipe.unet, **argument)


def test_conditions_of_another_architecture_are_refused(on_onnx: DirectMLPipeline) -> None:
    with pytest.raises(ValueError, match=r"inputs are .*image_embeds"):
        call(on_onnx._pipe.unet, added_cond_kwargs={"image_embeds": torch.ones(2, 1)})


def test_fields_that_a_config_leaves_out_have_diffusers_defaults() -> None:
    """Pipelines read some that the config.json of 2022 does not have."""
    config = full_config(UNet2DConditionModel, {"in_channels": 4, "_class_name": "x"})
    assert config.time_cond_proj_dim is None
    assert config.in_channels == 4
    assert "_class_name" not in config


def test_rows_can_go_one_at_a_time(on_onnx: DirectMLPipeline) -> None:
    unet = on_onnx._pipe.unet
    single = OrtUNet(unet.config, unet._export, Sessions("directml-cpu", keep=1), rows=1)
    alone = call(single, return_dict=False)[0]
    assert float((alone - call(unet).sample).abs().max()) < 1e-5


# -- the same pictures as TorchBackend -----------------------------------------------------------

SAME = 2


@pytest.mark.parametrize(
    ("scheduler", "prompt"),
    [
        ("Euler", "a red circle"),
        ("DPM++ 2M Karras", "two (trees:1.3) by the [sea:lake:0.5]"),
        ("Euler a", "a house AND a tree :0.7"),
    ],
)
def test_the_same_seed_gives_the_same_picture(
    on_onnx: DirectMLPipeline, on_torch: TorchPipeline, plan: Plan, job: Job,
    scheduler: str, prompt: str,
) -> None:  # fmt: skip
    """C07, C10: noise, prompts and schedulers are one code."""
    job = replace(job, scheduler=scheduler, prompt=prompt, negative_prompt="grey")
    (expected,) = on_torch.sample([job], plan, going_on)
    (found,) = on_onnx.sample([job], plan, going_on)
    assert difference(found, expected) <= SAME
    (other,) = on_onnx.sample([replace(job, seed=job.seed + 1)], plan, going_on)
    assert difference(found, other) > SAME


@pytest.mark.report("B15")
def test_a_batch_of_any_size_gives_the_pictures_of_single_ones(
    on_onnx: DirectMLPipeline, on_torch: TorchPipeline, plan: Plan, job: Job
) -> None:
    """Graphs of fixed batch failed beyond it, in the middle of a request."""
    jobs = [replace(job, seed=seed, prompt=f"{seed} trees", steps=2) for seed in range(3)]
    singles = [on_torch.sample([one], plan, going_on)[0] for one in jobs]
    for count in (1, 3, 2):
        made = on_onnx.sample(jobs[:count], plan, going_on)
        assert [difference(a, b) <= SAME for a, b in zip(made, singles, strict=False)] == (
            [True] * count
        )


def test_one_size_after_the_other(
    on_onnx: DirectMLPipeline, on_torch: TorchPipeline, plan: Plan, job: Job
) -> None:
    for width, height in ((64, 64), (136, 72), (64, 64)):
        asked = replace(job, width=width, height=height)
        (expected,) = on_torch.sample([asked], plan, going_on)
        (found,) = on_onnx.sample([asked], plan, going_on)
        assert difference(found, expected) <= SAME


def test_diffusers_own_tiles_are_those_of_torch(
    on_onnx: DirectMLPipeline, on_torch: TorchPipeline
) -> None:
    latents = torch.randn((1, 4, 10, 12), generator=torch.Generator().manual_seed(6))
    made = []
    for vae in (on_onnx._pipe.vae, on_torch._pipe.vae):
        vae.enable_tiling()
        vae.tile_sample_min_size, vae.tile_latent_min_size = 64, 8
        with torch.inference_mode():
            pixels = vae.decode(latents).sample
            made.append((pixels, vae.encode(pixels).latent_dist.mean))
        vae.disable_tiling()
    for found, expected in zip(*made, strict=True):
        assert float((found - expected).abs().max()) < PARITY


@pytest.mark.report("B10")
def test_tiles_are_those_of_torch(
    on_onnx: DirectMLPipeline, on_torch: TorchPipeline, plan: Plan, job: Job
) -> None:
    tiled = replace(plan, vae_tile=64)
    job = replace(job, width=160, height=128)
    (expected,) = on_torch.sample([job], tiled, going_on)
    (found,) = on_onnx.sample([job], tiled, going_on)
    assert difference(found, expected) <= SAME
    (whole,) = on_onnx.sample([job], plan, going_on)
    assert difference(found, whole) > SAME


@pytest.mark.parametrize(
    "mode",
    [
        {},
        {"mask_image": "mask", "mask_fill": "noise"},
        {"mask_image": "mask", "mask_padding": 8},
        {"width": 96, "outpaint_right": 32},
        {"hires_scale": 1.5, "hires_steps": 2, "hires_scheduler": "Euler",
         "hires_guidance_scale": 3.0},
        {"width": 128, "denoise_tile": 64},
    ],
    ids=["image", "inpaint", "region", "outpaint", "hires", "tiles"],
)  # fmt: skip
def test_a_mode_gives_the_same_picture(
    on_onnx: DirectMLPipeline, on_torch: TorchPipeline, plan: Plan, job: Job, mode: dict[str, Any]
) -> None:
    """The modes are written once, above the components."""
    pixels = (painting()[0].permute(1, 2, 0) * 255).to(torch.uint8).numpy()
    mask = Image.new("L", (64, 64), 0)
    mask.paste(255, (16, 16, 48, 40))
    given: dict[str, Any] = {"init_image": as_given(Image.fromarray(pixels)), "strength": 0.5}
    asked = mode | ({"mask_image": as_given(mask)} if "mask_image" in mode else {})
    job = replace(job, **(given | asked))
    (expected,) = on_torch.sample([job], plan, going_on)
    (found,) = on_onnx.sample([job], plan, going_on)
    assert difference(found, expected) <= SAME


def as_given(image: Image.Image) -> Picture:
    """As a file that a user names."""
    written = BytesIO()
    image.save(written, "PNG")
    data = written.getvalue()
    return Picture(sha256=sha256(data).hexdigest(), name="given.png", data=data)


def test_a_finished_picture_is_enlarged(on_onnx: DirectMLPipeline, plan: Plan, job: Job) -> None:
    (image,) = on_onnx.sample([replace(job, steps=1, upscale=2)], plan, going_on)
    assert isinstance(image, Image.Image)
    assert image.size == (128, 128)


def test_the_weights_are_written_once(
    on_onnx: DirectMLPipeline, cache: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("written again")

    monkeypatch.setattr(onnx_export, "_write", refuse)
    assert DirectMLBackend(cache).load(EMBEDDED, plan) is not on_onnx


def test_without_a_cache_the_weights_last_as_long_as_the_backend(plan: Plan, job: Job) -> None:
    backend = DirectMLBackend()
    folder = backend._cache
    pipeline = backend.load(EMBEDDED, plan)
    assert isinstance(pipeline.sample([job], plan, going_on)[0], Image.Image)
    assert list(folder.rglob("weights.bin"))
    del backend, pipeline
    gc.collect()
    assert not folder.exists()


def test_directml_without_directml_is_an_error_before_anything_is_loaded(
    cache: Path, plan: Plan
) -> None:
    with pytest.raises(HardwareError, match="directml:0 needs DmlExecutionProvider"):
        DirectMLBackend(cache).load(EMBEDDED, replace(plan, device="directml:0"))


# -- half precision ------------------------------------------------------------------------------


def test_half_precision_is_close(cache: Path, plan: Plan, job: Job, on_torch: Any) -> None:
    """What a card computes in; the CPU provider does so too, by way of float32."""
    half = replace(plan, dtype="float16", vae_dtype="float16")
    pipeline = DirectMLBackend(cache).load(EMBEDDED, half)
    assert (pipeline._pipe.unet.dtype, pipeline._pipe.vae.dtype) == (torch.float32, torch.float16)
    assert pipeline._pipe.text_encoder.dtype == torch.float32
    (found,) = pipeline.sample([job], half, going_on)
    (expected,) = on_torch.sample([job], plan, going_on)
    assert difference(found, expected) < 12


@pytest.mark.report("C06")
def test_a_picture_that_leaves_half_precision_is_decoded_in_float32(
    cache: Path, plan: Plan, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The same rule as on torch: what came out as NaN is decoded once more, by float32 graphs."""
    identity = tmp_path / "loud.safetensors"
    identity.write_bytes(b"")
    config = read_config(EMBEDDED, "vae")
    state = {k: t.float() for k, t in load_weights(EMBEDDED, "vae", "float32").items()}
    # Activations beyond 65504, which the last normalisation brings back to the same picture.
    norm = "decoder.up_blocks.3.resnets.1.conv2"
    loud = {k: t * 3e5 if k.startswith(norm) else t for k, t in state.items()}
    template = onnx_export.find_template("vae", config)

    def export(dtype: str) -> onnx_export.Export:
        return onnx_export.export(template, dtype, [identity], cache, lambda: loud)

    vae = ort_vae(config, export, Sessions("directml-cpu", keep=2), loud).half()
    latents = torch.randn((1, 4, 8, 8), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        assert not vae.decode(latents).sample.isfinite().all()
        (image,) = decode(vae, latents, replace(plan, vae_dtype="float16"))
    assert isinstance(image, Image.Image)
    assert vae.dtype == torch.float16
    assert "decoding again in float32" in caplog.text


@pytest.mark.report("C06")
def test_a_unet_that_gives_nan_is_no_picture(
    plan: Plan, job: Job, tmp_path: Path, on_onnx: DirectMLPipeline
) -> None:
    unet = UNet2DConditionModel.from_config(read_config(EMBEDDED, "unet")).eval()
    torch.nn.init.constant_(unet.conv_out.bias, torch.nan)
    template = onnx_export.find_template("unet", unet.config)
    pipe = StableDiffusionPipeline(
        **{**on_onnx._pipe.components, "unet": graph_of(unet, tmp_path, template)},
        requires_safety_checker=False,
    )
    (made,) = DirectMLPipeline(pipe, []).sample([job], plan, going_on)
    assert isinstance(made, BadImage)
    assert str(made).startswith("the UNet gave NaN or infinity")


# -- little memory -------------------------------------------------------------------------------


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each opening of a session: the graph, its batch, and which other graphs were open then."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    log: list[str] = []

    class Watched(Session):
        def __init__(self, model: Path, device: str, sizes: Any, *args: Any, **named: Any) -> None:
            others = sorted({each.model for each in alive})
            log.append(f"{model.stem} {sizes['batch']} beside {','.join(others) or 'none'}")
            self.model = model.stem
            super().__init__(model, device, sizes, *args, **named)
            alive.add(self)

    monkeypatch.setattr(onnx_session, "Session", Watched)
    return log


def test_with_little_memory_one_component_is_open_at_a_time(
    cache: Path, plan: Plan, job: Job, on_torch: TorchPipeline, opened: list[str]
) -> None:
    """UNet, steps, gone; decoder, tiles, gone; and one row of guidance's two at a time."""
    frugal = replace(plan, offload="model", vae_tile=64)
    pipeline = DirectMLBackend(cache).load(EMBEDDED, frugal)
    jobs = [replace(job, width=128, seed=seed) for seed in (1, 2)]
    made = pipeline.sample(jobs, frugal, going_on)
    assert opened == ["unet 1 beside none", "vae-decoder 1 beside none"]
    assert [len(sessions) for sessions in pipeline._sessions] == [0, 0]
    expected = on_torch.sample(jobs, frugal, going_on)
    assert max(difference(a, b) for a, b in zip(made, expected, strict=True)) <= SAME


def test_with_memory_enough_sessions_stay_for_the_next_picture(
    cache: Path, plan: Plan, job: Job, opened: list[str]
) -> None:
    pipeline = DirectMLBackend(cache).load(EMBEDDED, plan)
    for seed in (1, 2):
        pipeline.sample([replace(job, seed=seed)], plan, going_on)
    assert opened == ["unet 2 beside none", "vae-decoder 1 beside unet"]


@pytest.mark.parametrize(
    ("spare", "unets"),
    [
        (EMBEDDED.parameters.unet * 4, ["unet 2 beside none", "unet 1 beside unet"]),
        (EMBEDDED.parameters.unet * 4 - 1, ["unet 1 beside none"]),
    ],
)
def test_prompts_with_and_open_no_session_between_steps(
    cache: Path, plan: Plan, job: Job, opened: list[str], spare: int, unets: list[str]
) -> None:
    """They ask the UNet for single rows; without room for both, all rows go alone."""
    plan = replace(plan, budget_bytes=plan.stages.peak + spare)
    pipeline = DirectMLBackend(cache).load(EMBEDDED, plan)
    pipeline.sample([replace(job, prompt="a tree AND a house")], plan, going_on)
    assert opened == [*unets, "vae-decoder 1 beside unet"]


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """References to all sessions of onnxruntime that are made."""
    made = []
    real = onnxruntime.InferenceSession

    def watched(*args: Any, **named: Any) -> Any:
        session = real(*args, **named)
        made.append(weakref.ref(session))
        return session

    monkeypatch.setattr(onnxruntime, "InferenceSession", watched)
    return made


@pytest.mark.report("B09")
@pytest.mark.parametrize("fails", [False, True])
def test_a_pipeline_that_is_let_go_leaves_no_session(
    cache: Path, plan: Plan, job: Job, monkeypatch: pytest.MonkeyPatch,
    sessions: list[weakref.ref[Any]], fails: bool,
) -> None:  # fmt: skip
    """At once, and not when Python happens to look for cycles; also after running out of memory."""
    gc.collect()
    gc.disable()
    try:
        pipeline = DirectMLBackend(cache).load(EMBEDDED, plan)
        pipeline.sample([job], plan, going_on)
        assert [ref() is None for ref in sessions] == [False, False]
        if fails:
            Driver(monkeypatch, lambda *_: True, "8007000E Not enough memory")
            wider = replace(job, width=72)
            with pytest.raises(OutOfVram):
                pipeline.sample([wider], plan, going_on)
        del pipeline
        assert {ref() for ref in sessions} == {None}
    finally:
        gc.enable()


# -- what a driver does --------------------------------------------------------------------------


class Driver:
    """Fails runs of a graph as DirectML does, when `fails` says so of graph, batch and width."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: Callable[..., bool], said: str):
        self.runs: list[tuple[str, int, int]] = []
        driver = self

        class Failing(Session):
            def __init__(self, model: Path, *args: Any, **named: Any) -> None:
                self._name = model.stem
                super().__init__(model, *args, **named)

            def run(self, feeds: Any) -> Any:
                batch, _, _, width = feeds["sample"].shape
                driver.runs.append((self._name, batch, width))
                if fails(self._name, batch, width):
                    with onnx_session.translated("directml:0"):
                        raise RuntimeError(said)
                return super().run(feeds)

        monkeypatch.setattr(onnx_session, "Session", Failing)


def render(cache: Path, settings: Settings) -> LocalRender:
    return LocalRender(settings, DIRECTML_CPU, partial(open_backend, Engine.DIRECTML_CPU, cache))


@pytest.mark.report("B10")
def test_a_decoder_that_fails_above_a_size_gets_tiles(
    monkeypatch: pytest.MonkeyPatch, cache: Path, machine: Settings, job: Job
) -> None:
    """The heap was full of weights, and one buffer was too large for what was left."""
    said = "Could not allocate tensor with 377487360 bytes"
    driver = Driver(monkeypatch, lambda graph, _, side: "decoder" in graph and side > 32, said)
    large = replace(job, width=512, steps=1, guidance_scale=1.0)
    events = list(render(cache, machine)([large], never))
    assert isinstance(events[-1], Rendered)
    assert events[-1].record.means == "VAE in tiles of 256"
    assert [side for name, _, side in driver.runs if "decoder" in name] == [64, 64, 32, 32, 32]
    # The latents were kept: no step was made again.
    assert len([name for name, *_ in driver.runs if name == "unet"]) == 1
    (tiled,) = pictures(render(cache, replace(machine, vae_tile=256)), [large])
    assert Image.open(BytesIO(events[-1].png)).convert("RGB").tobytes() == tiled.tobytes()


@pytest.mark.report("B15")
def test_a_batch_that_the_device_cannot_take_is_split(
    monkeypatch: pytest.MonkeyPatch, cache: Path, machine: Settings, job: Job
) -> None:
    """Ten pictures where four fit; the pictures are those of single runs."""
    said = "8007000E Not enough memory resources are available to complete this operation."
    driver = Driver(monkeypatch, lambda graph, batch, _: graph == "unet" and batch > 4, said)
    jobs = [replace(job, index=n, seed=n, steps=1, guidance_scale=1.0) for n in range(10)]
    many = replace(machine, batch_size=8)
    made = {e.job.seed: e.png for e in render(cache, many)(jobs, never) if isinstance(e, Rendered)}
    assert sorted(made) == list(range(10))
    assert [batch for name, batch, _ in driver.runs if name == "unet"] == [8, 4, 4, 2]
    alone = render(cache, replace(machine, batch_size=1))
    for seed, single in enumerate(pictures(alone, jobs)):
        assert difference(Image.open(BytesIO(made[seed])).convert("RGB"), single) <= SAME


@pytest.mark.report("B10", "B18")
def test_where_no_tile_is_small_enough_the_cpu_decodes_the_kept_latents(
    monkeypatch: pytest.MonkeyPatch, cache: Path, plan: Plan, job: Job, opened: list[str],
    on_torch: TorchPipeline,
) -> None:  # fmt: skip
    """On a card; the CPU's provider stands for it, but for what the plan calls the device."""
    job = replace(job, steps=1)
    (expected,) = on_torch.sample([job], plan, going_on)
    real = Session.run

    def run(self: Any, feeds: Any) -> Any:
        if self._device == "directml:0" and "decoder" in self.model:
            with onnx_session.translated("directml:0"):
                raise RuntimeError("Could not allocate tensor with 377487360 bytes")
        return real(self, feeds)

    monkeypatch.setattr(Session, "run", run)
    monkeypatch.setattr(onnx_session, "provider_of", lambda device: (onnx_session.CPU, {}))
    on_card = replace(plan, device="directml:0", dtype="float16", vae_dtype="float16")
    half = DirectMLBackend(cache).load(EMBEDDED, on_card)
    (found,) = half.sample([job], on_card, going_on)
    assert difference(found, expected) < 12  # the UNet's half precision, as above
    outcome = half.outcome
    assert outcome is not None
    assert outcome.plan.vae_tile == 64
    assert outcome.plan.offload == "model"
    assert set(outcome.fell) == {"decode"}
    assert sum(each.startswith("unet") for each in opened) == 1
    assert opened[-1] == "vae-decoder 1 beside none"


@pytest.mark.report("B09")
def test_after_a_reset_of_the_driver_new_sessions_are_opened(
    monkeypatch: pytest.MonkeyPatch, cache: Path, plan: Plan, job: Job, opened: list[str]
) -> None:
    pipeline = DirectMLBackend(cache).load(EMBEDDED, plan)
    run = Session.run
    broken = True

    def reset(self: Session, feeds: Any) -> Any:
        if broken:
            with onnx_session.translated("directml:0"):
                raise RuntimeError("887A0006 The GPU will not respond to more commands")
        return run(self, feeds)

    monkeypatch.setattr(Session, "run", reset)
    with pytest.raises(HardwareError, match="reset by its driver") as caught:
        pipeline.sample([job], plan, going_on)
    assert type(caught.value) is HardwareError
    broken = False
    del caught
    assert isinstance(pipeline.sample([job], plan, going_on)[0], Image.Image)
    assert [each.split()[0] for each in opened] == ["unet", "unet", "vae-decoder"]


# -- through the straight line -------------------------------------------------------------------


def pictures(render: Any, jobs: list[Job]) -> list[Image.Image]:
    made = [e.png for e in render(jobs, never) if isinstance(e, Rendered)]
    return [Image.open(BytesIO(png)).convert("RGB") for png in made]


@pytest.mark.slow
def test_renders_give_the_same_pictures_on_both_engines(
    cache: Path, machine: Settings, job: Job
) -> None:
    """In this process and in a worker's."""
    jobs = [replace(job, index=n, seed=seed, steps=2) for n, seed in enumerate((3, 2**40))]
    on_torch = pictures(LocalRender(machine, CPU), jobs)
    opening = partial(open_backend, Engine.DIRECTML_CPU, cache)
    local = pictures(LocalRender(machine, DIRECTML_CPU, opening), jobs)
    worker = WorkerRender(machine, DIRECTML_CPU, {}, opening)
    in_worker = pictures(worker, jobs)
    worker.close()
    assert multiprocessing.active_children() == []
    assert len(on_torch) == len(local) == len(in_worker) == 2
    for expected, here, there in zip(on_torch, local, in_worker, strict=True):
        assert difference(here, expected) <= SAME
        assert difference(there, expected) <= SAME

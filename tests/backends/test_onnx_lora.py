"""LoRA on graphs against LoRA on torch: by peft, and by hand."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sdamd import models
from sdamd.backends import onnx_lora
from sdamd.backends.directml import DirectMLBackend, DirectMLPipeline
from sdamd.backends.loading import load_components, load_weights
from sdamd.backends.onnx_lora import Change, Lora
from sdamd.errors import BadCheckpoint
from tests.fakes import A_PLAN

EMBEDDED = models.find("", Path("/nowhere"))
CPU = torch.device("cpu")
PLAN = replace(A_PLAN, device="directml-cpu")
BLOCK = "down_blocks.1.attentions.0.transformer_blocks.0"
UNET = (
    f"{BLOCK}.attn1.to_q",
    f"{BLOCK}.attn1.to_out.0",
    f"{BLOCK}.attn2.to_k",
    f"{BLOCK}.attn2.to_v",
    f"{BLOCK}.ff.net.0.proj",
    f"{BLOCK}.ff.net.2",
    "down_blocks.1.attentions.0.proj_in",
    "up_blocks.0.attentions.1.proj_out",
    "mid_block.resnets.0.conv1",
    "up_blocks.1.resnets.0.conv_shortcut",
    "mid_block.resnets.1.time_emb_proj",
    "down_blocks.0.downsamplers.0.conv",
)
"""Matrices and convolutions, some of which lie transposed in the graph."""
TEXT = ("encoder.layers.0.self_attn.q_proj", "encoder.layers.1.mlp.fc1")

Halves = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Module -> (down, up)."""


@pytest.fixture(scope="module")
def on_torch() -> Any:
    return load_components(EMBEDDED, PLAN, CPU)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def halves(model: Any, modules: Sequence[str], rank: int = 4) -> Halves:
    generator = torch.Generator().manual_seed(len(modules))
    made = {}
    for module in modules:
        shape = model.get_submodule(module).weight.shape
        sides = [1] * (len(shape) - 2)
        down = torch.randn((rank, *shape[1:]), generator=generator)
        up = torch.randn((shape[0], rank, *sides), generator=generator)
        made[module] = (down / math.sqrt(down[0].numel()), up * 0.2)
    return made


def kohya(unet: Halves, text: Halves, alpha: Callable[[str], float]) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    for prefix, part in (("lora_unet_", unet), ("lora_te_text_model_", text)):
        for module, (down, up) in part.items():
            name = prefix + module.replace(".", "_")
            state |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
            state[f"{name}.alpha"] = torch.tensor(alpha(module))
    return state


def peft(unet: Halves, text: Halves) -> dict[str, torch.Tensor]:
    state = {}
    for prefix, part in (("unet", unet), ("text_encoder.text_model", text)):
        for module, (down, up) in part.items():
            state[f"{prefix}.{module}.lora_A.weight"] = down
            state[f"{prefix}.{module}.lora_B.weight"] = up
    return state


def of_2023(unet: Halves) -> dict[str, torch.Tensor]:
    """The attention's names in diffusers 0.1x."""
    state = {}
    for module, (down, up) in unet.items():
        block, _, name = module.removesuffix(".0").rpartition(".")
        state[f"unet.{block}.processor.{name}_lora.down.weight"] = down
        state[f"unet.{block}.processor.{name}_lora.up.weight"] = up
    return state


def save(state: Mapping[str, torch.Tensor], path: Path, about: Any = None) -> Path:
    metadata = {"lora_adapter_metadata": json.dumps(about)} if about else None
    save_file({k: t.contiguous() for k, t in state.items()}, path, metadata=metadata)
    return path


def by_hand(model: Any, part: Halves, scale: Callable[[str], float]) -> dict[str, torch.Tensor]:
    """The merged weights, one rank at a time."""
    merged = {}
    for module, (down, up) in part.items():
        weight = model.get_submodule(module).weight.detach().double()
        added = torch.zeros_like(weight)
        for rank in range(len(down)):
            added += (
                up[:, rank].double().reshape(-1, *[1] * (weight.ndim - 1)) * down[rank].double()
            )
        merged[f"{module}.weight"] = (weight + scale(module) * added).float()
    return merged


def predict(unet: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    sample = torch.randn((2, 4, 8, 8), generator=generator)
    text = torch.randn((2, 77, 128), generator=generator)
    with torch.inference_mode():
        made: torch.Tensor = unet(sample, 321, encoder_hidden_states=text).sample
    return made


def encoded(pipe: Any) -> torch.Tensor:
    ids = pipe.tokenizer("a red circle", return_tensors="pt").input_ids
    with torch.inference_mode():
        made: torch.Tensor = pipe.text_encoder(ids).last_hidden_state
    return made


def with_merged(pipe: Any, unet: Mapping[str, torch.Tensor], text: Any = None) -> Any:
    """A fresh pipeline on torch, with the weights in it."""
    made = load_components(EMBEDDED, PLAN, CPU)
    made.unet.load_state_dict(dict(unet), strict=False)
    made.text_encoder.load_state_dict(dict(text or {}), strict=False)
    return made


def load(cache: Path, *loras: Lora) -> DirectMLPipeline:
    return DirectMLBackend(cache).load(EMBEDDED, PLAN, loras)


# -- the effect ----------------------------------------------------------------------------------


def alpha(module: str) -> float:
    """Another one for each module, as kohya's files may have."""
    return 2.0 + len(module) % 3


@pytest.mark.parametrize("strength", [1.0, 0.35, -1.0])
def test_kohyas_file_changes_unet_and_text_encoder_as_on_torch(
    on_torch: Any, cache: Path, tmp_path: Path, strength: float
) -> None:
    unet, text = halves(on_torch.unet, UNET), halves(on_torch.text_encoder, TEXT)
    path = save(kohya(unet, text, alpha), tmp_path / "k.safetensors")
    pipe = load(cache, Lora(path=path, strength=strength))._pipe

    def scale(module: str) -> float:
        return strength * alpha(module) / 4

    expected = with_merged(
        on_torch,
        by_hand(on_torch.unet, unet, scale),
        by_hand(on_torch.text_encoder, text, scale),
    )
    found = predict(pipe.unet)
    assert float((found - predict(expected.unet)).abs().max()) < 1e-5
    assert float((found - predict(on_torch.unet)).abs().max()) > 1e-2
    assert float((encoded(pipe) - encoded(expected)).abs().max()) < 1e-5
    assert float((encoded(pipe) - encoded(on_torch)).abs().max()) > 1e-2


def test_the_effect_is_that_of_peft(on_torch: Any, cache: Path, tmp_path: Path) -> None:
    """The file is read by diffusers and applied by peft, as on the torch backend."""
    pytest.importorskip("peft")
    unet, text = halves(on_torch.unet, UNET), halves(on_torch.text_encoder, TEXT)
    about = {
        f"{part}.{key}": value
        for part, modules in (("unet", UNET), ("text_encoder", TEXT))
        for key, value in {"r": 4, "lora_alpha": 6, "target_modules": list(modules)}.items()
    }
    path = save(peft(unet, text), tmp_path / "p.safetensors", about)
    expected = load_components(EMBEDDED, PLAN, CPU)
    expected.load_lora_weights(str(tmp_path), weight_name=path.name, adapter_name="it")
    expected.set_adapters(["it"], [0.7])
    pipe = load(cache, Lora(path=path, strength=0.7))._pipe
    assert float((predict(pipe.unet) - predict(expected.unet)).abs().max()) < 1e-5
    assert float((predict(pipe.unet) - predict(on_torch.unet)).abs().max()) > 1e-2
    assert float((encoded(pipe) - encoded(expected)).abs().max()) < 1e-5


def test_two_loras_add_up_and_none_is_left_behind(
    on_torch: Any, cache: Path, tmp_path: Path
) -> None:
    first, second = halves(on_torch.unet, UNET[:4]), halves(on_torch.unet, UNET[2:9])
    loras = [
        Lora(path=save(peft(part, {}), tmp_path / f"{name}.safetensors"), strength=strength)
        for name, part, strength in (("a", first, 0.5), ("b", second, -0.8))
    ]
    found = predict(load(cache, *loras)._pipe.unet)
    half = with_merged(on_torch, by_hand(on_torch.unet, first, lambda _: 0.5))
    both = with_merged(
        on_torch,
        by_hand(on_torch.unet, first, lambda _: 0.5) | by_hand(half.unet, second, lambda _: -0.8),
    )
    assert float((found - predict(both.unet)).abs().max()) < 1e-5
    plain = predict(load(cache)._pipe.unet)
    assert float((plain - predict(on_torch.unet)).abs().max()) < 1e-5


def test_a_lora_holds_in_half_precision_too(on_torch: Any, cache: Path, tmp_path: Path) -> None:
    unet = halves(on_torch.unet, UNET)
    lora = Lora(path=save(peft(unet, {}), tmp_path / "l.safetensors"))
    half = replace(PLAN, dtype="float16")
    pipe = DirectMLBackend(cache).load(EMBEDDED, half, [lora])._pipe
    expected = with_merged(on_torch, by_hand(on_torch.unet, unet, lambda _: 1.0))
    assert float((predict(pipe.unet) - predict(expected.unet)).abs().max()) < 0.02


# -- what a file says ----------------------------------------------------------------------------


def read(path: Path) -> dict[str, Change]:
    return {c.module: c for c in onnx_lora.read(Lora(path=path, strength=0.5), {})}


@pytest.mark.parametrize(
    ("about", "scale"),
    [
        (None, 0.5),
        ({"r": 4, "lora_alpha": 8}, 1.0),
        ({"r": 4, "lora_alpha": 8, "use_rslora": True}, 2.0),
        ({"r": 4, "lora_alpha": 8, "alpha_pattern": {"attn1.to_q": 2}}, 0.25),
        ({"r": 4, "lora_alpha": 8, "alpha_pattern": {"attn2.to_q": 2}}, 1.0),
    ],
)
def test_the_scale_is_alpha_over_rank_from_the_files_metadata(
    on_torch: Any, tmp_path: Path, about: Any, scale: float
) -> None:
    """Without alpha, which is lost easily, a LoRA counts as if alpha were its rank."""
    prefixed = about and {f"unet.{key}": value for key, value in about.items()}
    path = save(peft(halves(on_torch.unet, UNET[:1]), {}), tmp_path / "l.safetensors", prefixed)
    assert read(path)[UNET[0]].scale == scale


def test_names_of_2023_are_read(on_torch: Any, tmp_path: Path) -> None:
    part = halves(on_torch.unet, UNET[:4])
    found = read(save(of_2023(part), tmp_path / "l.safetensors"))
    assert found.keys() == part.keys()
    for module, (down, up) in part.items():
        assert torch.equal(found[module].down, down)
        assert torch.equal(found[module].up, up)


def test_only_what_is_touched_is_overridden(on_torch: Any, tmp_path: Path) -> None:
    from sdamd.backends.onnx_export import find_template

    weights = find_template("unet", on_torch.unet.config).weights
    path = save(peft(halves(on_torch.unet, UNET), {}), tmp_path / "l.safetensors")
    state = load_weights(EMBEDDED, "unet", "float32")
    made = onnx_lora.overrides(weights, state, read(path).values(), "float32")
    touched = {w.name: w for w in weights if w.key.removesuffix(".weight") in UNET}
    assert made.keys() == touched.keys()
    assert any(w.transposed for w in touched.values())
    assert all(made[name].shape == w.shape for name, w in touched.items())


# -- what is refused -----------------------------------------------------------------------------

ONE = torch.ones(4, 64)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"unet.conv_in.lora_A.weight": ONE}, "without its other half"),
        ({"something.else": ONE}, "has something.else, which is no part of a LoRA"),
        ({"lora_unet_x.hada_w1_a": ONE}, "is no plain LoRA: it has lora_unet_x.hada_w1_a"),
        ({"lora_unet_x.lokr_w1": ONE}, "is no plain LoRA"),
        ({"lora_unet_x.dora_scale": ONE}, "is no plain LoRA"),
        ({"lora_unet_x.other": ONE}, "cannot be read as a LoRA"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_files_that_hold_something_else_are_refused(tmp_path: Path, state: Any, said: str) -> None:
    with pytest.raises(BadCheckpoint, match=said):
        read(save(state, tmp_path / "l.safetensors"))


@pytest.mark.parametrize("content", [b"", b"x" * 100])
def test_damaged_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "l.safetensors"
    path.write_bytes(content)
    with pytest.raises(BadCheckpoint, match="cannot be read as a LoRA"):
        read(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="cannot be read as a LoRA"):
        read(tmp_path / "none.safetensors")


@pytest.mark.parametrize(
    ("module", "down", "said"),
    [
        ("down_blocks.7.resnets.0.conv1", (4, 64), "which this checkpoint does not have"),
        (UNET[0], (4, 320), "does not fit down_blocks.1"),
    ],
)
def test_a_lora_for_another_architecture_is_refused(
    cache: Path, tmp_path: Path, module: str, down: tuple[int, int], said: str
) -> None:
    state = peft({module: (torch.ones(down), torch.ones(320, 4))}, {})
    lora = Lora(path=save(state, tmp_path / "l.safetensors"))
    with pytest.raises(BadCheckpoint, match=f"{said}.*another architecture"):
        load(cache, lora)

from functools import partial
from typing import Any

import pytest
import torch
from diffusers import ControlNetModel, UNet2DConditionModel
from diffusers.models.attention import FeedForward

from scripts.bench import peak_bytes
from sdamd.backends import forwards
from sdamd.backends.frugal_unet import lighten
from sdamd.backends.passes import in_passes
from tests.backends import pipes


@pytest.fixture(scope="module", params=pipes.FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def unet(family: str) -> UNet2DConditionModel:
    torch.manual_seed(0)
    return pipes.unet(family).eval().requires_grad_(requires_grad=False)


def asked(unet: Any, rows: int = 4, side: int = 12) -> dict[str, Any]:
    torch.manual_seed(1)
    width = unet.config.cross_attention_dim
    options: dict[str, Any] = {
        "sample": torch.randn(rows, 4, side, side + 4),
        "timestep": torch.tensor(500.0),
        "encoder_hidden_states": torch.randn(rows, 7, width),
    }
    if unet.config.addition_embed_type:
        options["added_cond_kwargs"] = {
            "text_embeds": torch.randn(rows, 24), "time_ids": torch.randn(rows, 6),
        }  # fmt: skip
    return options


def answer(forward: Any, options: dict[str, Any]) -> torch.Tensor:
    options = dict(options)
    given = options.pop("sample"), options.pop("timestep")
    with torch.inference_mode():
        made: torch.Tensor = forward(*given, **options, return_dict=False)[0]
    return made


def test_in_place_is_the_same_to_the_bit_and_leaves_the_inputs(unet: Any) -> None:
    options = asked(unet)
    kept = options["sample"].clone()
    expected = answer(unet, options)
    lighten(unet, 1)
    made = answer(unet, options)
    forwards.restore(unet)
    assert torch.equal(made, expected)
    assert torch.equal(options["sample"], kept)
    assert torch.equal(answer(unet, options), expected)


@pytest.mark.parametrize("chunks", [2, 3, 8, 1000])
def test_a_feed_forward_layer_in_chunks_gives_the_same(unet: Any, chunks: int) -> None:
    options = asked(unet)
    expected = answer(unet, options)
    lighten(unet, chunks)
    made = answer(unet, options)
    forwards.restore(unet)
    assert torch.allclose(made, expected, atol=1e-5)


def test_a_feed_forward_layer_in_chunks_holds_less() -> None:
    layer, tokens = FeedForward(32), torch.zeros(2, 4096, 32)
    with torch.inference_mode():
        whole = peak_bytes(partial(layer, tokens))
        lighten(layer, 8)
        assert peak_bytes(partial(layer, tokens)) < 0.4 * whole


@pytest.mark.parametrize("passes", [1, 2, 3, 4, 9])
def test_in_passes_the_answers_are_those_of_one_call(unet: Any, passes: int) -> None:
    options = asked(unet)
    sizes = []

    def noting(sample: torch.Tensor, *rest: Any, **others: Any) -> Any:
        sizes.append(sample.shape[0])
        return unet.forward(sample, *rest, **others)

    made = answer(lambda *a, **k: in_passes(noting, passes, *a, **k), options)
    assert torch.allclose(made, answer(unet, options), atol=1e-5)
    assert sizes == {1: [4], 2: [2, 2], 3: [2, 2], 4: [1] * 4, 9: [1] * 4}[passes]


def test_residuals_of_a_controlnet_and_a_timestep_for_each_sample_are_divided(unet: Any) -> None:
    torch.manual_seed(0)
    control = ControlNetModel.from_unet(
        unet, conditioning_embedding_out_channels=(8, 8)
    ).eval()  # fmt: skip
    for weights in control.parameters():  # its ends are zero before it is trained
        torch.nn.init.normal_(weights, std=0.05)
    options = asked(unet, side=16)
    options["timestep"] = torch.tensor([10, 20, 500, 900])
    with torch.inference_mode():
        down, middle = control(
            **options, controlnet_cond=torch.randn(4, 3, 32, 40), return_dict=False
        )
    options |= {"down_block_additional_residuals": down, "mid_block_additional_residual": middle}
    expected = answer(unet, options)
    made = answer(lambda *a, **k: in_passes(unet.forward, 4, *a, **k), options)
    assert torch.allclose(made, expected, atol=1e-5)
    without = {k: v for k, v in options.items() if "residual" not in k}
    assert not torch.allclose(expected, answer(unet, without), atol=1e-3)


def test_lists_that_a_unet_empties_are_given_anew_to_each_pass() -> None:
    def greedy(sample: torch.Tensor, *, taken: list[torch.Tensor], **_: Any) -> Any:
        return (sample + taken.pop(0),)

    rows = torch.arange(6.0)[:, None]
    (made,) = in_passes(greedy, 3, rows, taken=[rows, rows], return_dict=False)
    assert torch.equal(made, 2 * rows)


def test_an_answer_has_the_form_that_was_asked_for() -> None:
    def same(sample: torch.Tensor, **_: Any) -> Any:
        return (sample,)

    assert in_passes(same, 2, torch.ones(2, 1)).sample.shape == (2, 1)
    assert in_passes(same, 2, torch.ones(2, 1), return_dict=False)[0].shape == (2, 1)

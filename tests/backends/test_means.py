from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL.Image import Image

from sdamd.backends import means
from sdamd.backends.placement import placement_of
from sdamd.plan import Plan
from sdamd.request import Job
from sdamd.sampling.sample import sample
from tests.backends import pipes
from tests.fakes import A_PLAN

CPU = torch.device("cpu")
EXACT: Final = 1e-5

EXACT_WAYS: Final[list[dict[str, Any]]] = [
    {},
    {"passes": 2},
    {"passes": 4, "feed_forward_chunks": 8},
    {"vae_bands": 20},
    {"vae_bands": 5, "vae_attention": "chunked", "block_bytes": 2**12},
    {"attention": "chunked", "block_bytes": 2**12, "channels_last": True},
    {"offload": "model"},
    {"offload": "stream"},
    {"offload": "stream", "resident_bytes": 50_000, "passes": 2, "vae_bands": 16,
     "feed_forward_chunks": 3},
]  # fmt: skip
"""Each of the means, and some together: none changes a number by more than rounding."""


@pytest.fixture(scope="module", params=pipes.FAMILIES)
def pipe(request: pytest.FixtureRequest) -> Any:
    return pipes.pipe(str(request.param))


@pytest.fixture(scope="module")
def calls(pipe: Any) -> dict[str, Callable[[], torch.Tensor]]:
    """A call of each component."""
    torch.manual_seed(0)
    width = pipe.unet.config.cross_attention_dim
    latents, texts = torch.randn(4, 4, 10, 12), torch.randn(4, 7, width)
    small, pixels = torch.randn(2, 4, 6, 5), torch.randn(2, 3, 48, 40)
    added = {"text_embeds": torch.randn(4, 24), "time_ids": torch.randn(4, 6)}
    ids = torch.tensor([[49406, 320, 2368, 49407]])
    return {
        "unet": lambda: (
            pipe.unet(latents, 500, encoder_hidden_states=texts, added_cond_kwargs=added).sample
        ),
        "decode": lambda: pipe.vae.decode(small).sample,
        "encode": lambda: pipe.vae.encode(pixels).latent_dist.parameters,
        "text": lambda: pipe.text_encoder(ids)[0],
    }


def answers(calls: dict[str, Callable[[], torch.Tensor]]) -> dict[str, torch.Tensor]:
    with torch.inference_mode():
        return {name: call() for name, call in calls.items()}


@pytest.mark.parametrize("way", EXACT_WAYS, ids=str)
def test_each_of_the_means_gives_what_plain_gives(
    pipe: Any, calls: dict[str, Any], way: dict[str, Any]
) -> None:
    means.apply(pipe, A_PLAN, CPU)
    plain = answers(calls)
    means.apply(pipe, replace(A_PLAN, **way), CPU)
    for name, made in answers(calls).items():
        scale = max(1.0, float(plain[name].abs().max()))
        assert float((made - plain[name]).abs().max()) < EXACT * scale, name


plans = st.builds(
    lambda **way: replace(A_PLAN, **way),
    attention=st.sampled_from(["fused", "chunked", "sliced"]),
    vae_attention=st.sampled_from(["fused", "chunked"]),
    block_bytes=st.sampled_from([2**12, 2**20]),
    passes=st.integers(1, 4),
    feed_forward_chunks=st.sampled_from([1, 3, 8]),
    vae_bands=st.sampled_from([0, 7, 16]),
    vae_tile=st.sampled_from([0, 0, 128]),
    offload=st.sampled_from(["none", "model", "stream"]),
    resident_bytes=st.sampled_from([0, 50_000, 10**9]),
    storage=st.sampled_from(["", "", "float8_e4m3fn"]),
    channels_last=st.booleans(),
    miopen=st.booleans(),
)


@settings(
    deadline=None, max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(first=plans, second=plans)
def test_from_any_plan_to_any_other_and_back_gives_the_same_to_the_bit(
    pipe: Any, calls: dict[str, Any], first: Plan, second: Plan
) -> None:
    means.apply(pipe, A_PLAN, CPU)
    plain = answers(calls)
    means.apply(pipe, first, CPU)
    one = answers(calls)
    means.apply(pipe, second, CPU)
    answers(calls)
    means.apply(pipe, first, CPU)
    again = answers(calls)
    assert all(torch.equal(one[name], again[name]) for name in one)
    means.apply(pipe, A_PLAN, CPU)
    back = answers(calls)
    assert all(torch.equal(plain[name], back[name]) for name in plain)


def picture(pipe: Any, job: Job, plan: Plan) -> np.ndarray[Any, Any]:
    means.apply(pipe, plan, CPU)
    made = sample(
        pipe, [job, replace(job, index=1, seed=8)], plan, pipes.training(), lambda *_: False
    )
    assert all(isinstance(image, Image) for image in made)
    return np.stack([np.asarray(image, np.int16) for image in made])


@pytest.mark.parametrize("way", EXACT_WAYS[2:9:3], ids=str)
def test_a_run_gives_the_same_pictures(pipe: Any, job: Job, way: dict[str, Any]) -> None:
    one = replace(job, width=64, height=64, steps=2, guidance_scale=5.0, upscale=1)
    plain = picture(pipe, one, A_PLAN)
    made = picture(pipe, one, replace(A_PLAN, **way))
    assert np.abs(made - plain).max() <= 1
    assert np.array_equal(picture(pipe, one, A_PLAN), plain)


def test_a_plan_may_change_in_the_middle_of_a_run(pipe: Any, job: Job) -> None:
    """As after memory ran out in a step: the latents go on as they are."""
    one = replace(job, width=64, height=64, steps=3, guidance_scale=5.0, upscale=1)
    plain = picture(pipe, one, A_PLAN)
    ways = [replace(A_PLAN, offload="stream", passes=2), replace(A_PLAN, offload="model")]

    def watch(*_: int) -> bool:
        if ways:
            means.apply(pipe, ways.pop(), CPU)
        return False

    means.apply(pipe, A_PLAN, CPU)
    jobs = [one, replace(one, index=1, seed=8)]
    made = sample(pipe, jobs, A_PLAN, pipes.training(), watch)
    assert not ways
    assert np.abs(np.stack([np.asarray(m, np.int16) for m in made]) - plain).max() <= 1


def test_what_wraps_a_component_stays_outside(pipe: Any, calls: dict[str, Any]) -> None:
    means.apply(pipe, A_PLAN, CPU)
    inner, seen = pipe.unet.forward, []

    def guard(*given: Any, **options: Any) -> Any:
        seen.append(given[0].shape[0])
        return inner(*given, **options)

    pipe.unet.forward = guard
    try:
        for way in ({"passes": 2}, {"offload": "stream"}, {}):
            means.apply(pipe, replace(A_PLAN, **way), CPU)
            calls["unet"]()
    finally:
        pipe.unet.forward = inner
    assert seen == [4, 4, 4]


@pytest.mark.parametrize("offload", ["model", "stream"])
def test_one_component_at_a_time_has_its_weights(
    pipe: Any, calls: dict[str, Any], offload: str
) -> None:
    means.apply(pipe, replace(A_PLAN, offload=offload), CPU)

    def present() -> set[str]:
        return {
            name
            for name, model in pipe.components.items()
            if isinstance(model, torch.nn.Module) and any(p.numel() for p in model.parameters())
        }

    assert present() == set()
    for call, name in (("text", "text_encoder"), ("unet", "unet"), ("decode", "vae")):
        calls[call]()
        assert present() == {name}
    assert pipe._execution_device == CPU


def test_a_second_decode_in_float32_works_wherever_the_weights_are() -> None:
    """As when a picture came out black in half precision."""
    pipe = pipes.pipe()
    latents = torch.randn(1, 4, 6, 6)
    means.apply(pipe, A_PLAN, CPU)
    pipe.vae.to(torch.bfloat16)
    for way in ({}, {"offload": "model"}, {"offload": "stream", "vae_bands": 9}):
        means.apply(pipe, replace(A_PLAN, **way), CPU)
        with torch.inference_mode():
            narrow = pipe.vae.decode(latents.bfloat16()).sample
            wide = pipe.vae.float().decode(latents).sample
            pipe.vae.to(torch.bfloat16)
            again = pipe.vae.decode(latents.bfloat16()).sample
        assert (narrow.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(narrow, again)
        assert torch.allclose(narrow.float(), wide, atol=0.1)


def test_tiles_make_about_the_same_picture_and_latents(pipe: Any) -> None:
    latents, pixels = torch.randn(1, 4, 20, 40), torch.randn(1, 3, 160, 320)
    means.apply(pipe, A_PLAN, CPU)
    with torch.inference_mode():
        whole = pipe.vae.decode(latents).sample, pipe.vae.encode(pixels).latent_dist.mean
        means.apply(pipe, replace(A_PLAN, vae_tile=128), CPU)
        tiled = pipe.vae.decode(latents).sample, pipe.vae.encode(pixels).latent_dist.mean
        means.apply(pipe, replace(A_PLAN, vae_tile=512), CPU)
        one_tile = pipe.vae.decode(latents).sample
    assert torch.allclose(one_tile, whole[0], atol=1e-5)
    for made, expected in zip(tiled, whole, strict=True):
        assert made.shape == expected.shape
        near = torch.nn.functional.cosine_similarity(made.flatten(), expected.flatten(), dim=0)
        assert 0.9 < float(near) < 0.99999


def test_a_vae_can_be_had_on_the_cpu_wherever_its_weights_are(pipe: Any) -> None:
    latents = torch.randn(1, 4, 6, 6)
    means.apply(pipe, A_PLAN, CPU)
    with torch.inference_mode():
        expected = pipe.vae.decode(latents).sample
        for offload in ("none", "model", "stream"):
            means.apply(pipe, replace(A_PLAN, offload=offload), CPU)
            (made,) = means.on_cpu(pipe.vae).decode(latents, return_dict=False)
            assert torch.allclose(made, expected, atol=1e-5)


def test_the_same_plan_again_moves_nothing(
    pipe: Any, calls: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(A_PLAN, offload="model")
    means.apply(pipe, plan, CPU)
    calls["unet"]()
    moved = []
    monkeypatch.setattr(type(placement_of(pipe.unet)), "settle", lambda *_: moved.append(1))
    means.apply(pipe, plan, CPU)
    assert not moved
    assert any(p.numel() for p in pipe.unet.parameters())


def test_other_passes_leave_the_weights_where_they_are(pipe: Any, calls: dict[str, Any]) -> None:
    means.apply(pipe, replace(A_PLAN, offload="model"), CPU)
    calls["unet"]()
    means.apply(pipe, replace(A_PLAN, offload="model", passes=2, feed_forward_chunks=8), CPU)
    assert all(p.numel() for p in pipe.unet.parameters())

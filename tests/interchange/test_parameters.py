"""The `parameters` text: what is written here reads back, whatever the mode."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdamd.errors import BadMetadata
from sdamd.interchange import parameters
from sdamd.metadata import HIRES_UPSCALERS, Record, to_parameters
from sdamd.picture import Picture
from sdamd.request import HiresUpscaler, Job, MaskFill, MaskMode
from sdamd.scheduler import names

JOB = Job(
    index=0, prompt="a red house", negative_prompt="fog", checkpoint="dream", width=512, height=768,
    steps=20, guidance_scale=6.5, scheduler="Euler", seed=7, upscale=1,
)  # fmt: skip
PICTURE = Picture(sha256="ab" * 32, name="in.png", data=b"")


def text_of(**changes: Any) -> str:
    values = {name: getattr(JOB, name) for name in JOB.__dataclass_fields__} | changes
    return to_parameters(Record(job=Job(**values), version="1", checkpoint_name="dream"))


@given(
    hires_scale=st.floats(1.01, 8).map(lambda scale: round(scale, 4)),
    hires_strength=st.floats(0, 1),
    hires_steps=st.integers(1, 150),
    hires_upscaler=st.sampled_from(HiresUpscaler),
    hires_scheduler=st.sampled_from(names()),
    hires_guidance_scale=st.floats(1, 50),
    hires_tile=st.sampled_from([0, 512, 1024]),
    denoise_tile=st.sampled_from([None, 0, 768]),
)
def test_a_second_pass_reads_back(**modes: Any) -> None:
    reading = parameters.read(text_of(**modes))
    assert reading.unused == ()
    request = reading.request()
    for name, value in modes.items():
        same = {"hires_scheduler": JOB.scheduler, "hires_guidance_scale": JOB.guidance_scale}
        got = getattr(request, name)
        assert got == value or (got is None and value == same.get(name)), name


@pytest.mark.parametrize("fill", MaskFill)
@pytest.mark.parametrize("mode", MaskMode)
@pytest.mark.parametrize("padding", [None, 32])
def test_inpainting_is_told_with_the_flags_that_make_it_again(
    fill: MaskFill, mode: MaskMode, padding: int | None
) -> None:
    text = text_of(
        init_image=PICTURE, mask_image=PICTURE, strength=0.75, mask_mode=mode, mask_fill=fill,
        mask_padding=padding, mask_blur=8, outpaint_left=64,
    )  # fmt: skip
    reading = parameters.read(text)
    told = {unused.name: unused for unused in reading.unused}
    assert told["strength"].value == "0.75"
    assert told["Mask blur"].value == "8"
    assert told["Outpaint"].value == "left 64"
    assert ("Masked area padding" in told) is (padding is not None)
    flags = " ".join(unused.reason for unused in reading.unused)
    for flag in ("--init-image", "--strength", "--mask-image", "--mask-blur", "--mask-fill"):
        assert flag in flags
    reading.request()


def test_modes_that_are_off_write_nothing() -> None:
    assert text_of().splitlines()[-1].count(",") == 8


def test_every_way_to_enlarge_has_its_own_name() -> None:
    assert set(HIRES_UPSCALERS) == set(HiresUpscaler)
    assert len(set(HIRES_UPSCALERS.values())) == len(HiresUpscaler)


@pytest.mark.parametrize(
    ("settings", "values", "told"),
    [
        ("Hires resize: 1000x1000", {}, ["Hires resize"]),
        ("Hires resize: 1024x1536", {"hires_scale": "2"}, []),
        ("Hires resize: wide", {}, ["Hires resize"]),
        ("Hires schedule type: Karras", {}, ["Hires schedule type"]),
        ("Hires sampler: Restart, Hires upscale: 2", {"hires_scheduler": "Restart"},
         ["Hires sampler"]),
        ("Hires upscale: two", {"hires_scale": "two"}, []),
        ("Civitai resources: [3]", {}, ["Civitai resources"]),
        ("Civitai resources: {}", {}, ["Civitai resources"]),
        ("Civitai resources: [oh]", {}, ["Civitai resources"]),
        ("RNG: NV", {}, ["noise"]),
        ("Hashes: [1]", {}, []),
    ],
)  # fmt: skip
def test_odd_settings_are_told(settings: str, values: dict[str, str], told: list[str]) -> None:
    text = (
        f"a\nSteps: 20, Sampler: Euler, Seed: 1, CFG scale: 7, Size: 512x768, Model: m, {settings}"
    )
    reading = parameters.read(text)
    assert {name: reading.values[name] for name in values} == values
    found = [u.name for u in reading.unused if (u.name, u.value) != ("noise", "GPU")]
    assert found == told


def test_a_text_that_is_too_long_is_refused() -> None:
    with pytest.raises(BadMetadata, match="allowed at most"):
        parameters.read("x" * 2**21)

"""What the user can force, what the plan puts on by itself, and what it says of both."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as how_often
from hypothesis import strategies as st

from sdamd import learnt
from sdamd.checkpoint import Checkpoint
from sdamd.hardware.memory import Memory
from sdamd.hardware.products import find_card
from sdamd.hardware.runtime import Engine
from sdamd.picture import Picture
from sdamd.plan import GIB, Verdict, make_plan
from sdamd.settings import Offload, Settings, Storage, VaeTiling, VramMode
from tests.plan.made import a_job

Published = dict[str, Checkpoint]
PLAIN = Settings(home=Path("/nowhere"))
LARGE = find_card("RX 7900 XTX")
SMALL = find_card("RX 6600")


@pytest.mark.parametrize("family", ["sd15", "sd21", "sdxl"])
def test_nothing_is_on_that_is_not_needed(published: Published, family: str) -> None:
    plan = make_plan(a_job(family), LARGE, published[family], PLAIN, count=4)
    assert (plan.means, plan.verdict) == ("", Verdict.FITS)
    assert not any("to fit" in reason for reason in plan.reasons)


@pytest.mark.parametrize(
    ("mode", "offload"),
    [(VramMode.FAST, "none"), (VramMode.BALANCED, "model"), (VramMode.MINIMAL, "stream")],
)
@pytest.mark.parametrize("card", [LARGE, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_a_mode_is_kept_to_whatever_the_card(
    published: Published, card: object, family: str, mode: VramMode, offload: str
) -> None:
    settings = replace(PLAIN, vram_mode=mode)
    plan = make_plan(a_job(family), card, published[family], settings)  # type: ignore[arg-type]
    assert plan.offload == offload
    if mode is VramMode.FAST:
        assert plan.means == ""
    else:
        assert any(f"as vram_mode {mode} asks" in reason for reason in plan.reasons)


def test_each_mode_needs_less_than_the_one_before(published: Published) -> None:
    for family in ("sd15", "sdxl"):
        peaks = [
            make_plan(
                a_job(family), LARGE, published[family], replace(PLAIN, vram_mode=mode)
            ).stages.peak
            for mode in (VramMode.FAST, VramMode.BALANCED, VramMode.MINIMAL)
        ]
        assert peaks == sorted(peaks, reverse=True)
        assert len(set(peaks)) == 3


@pytest.mark.parametrize(
    ("family", "side", "minimal", "balanced"),
    [("sd15", 512, 0.5, 1.8), ("sd15", 1024, 0.6, 2.1), ("sdxl", 1024, 0.8, 5.3),
     ("sdxl", 2048, 2.2, 6.8)],
)  # fmt: skip
@pytest.mark.parametrize("card", ["RX 6800 XT", "RX 7900 XTX"])
def test_the_figures_that_sdamd_is_made_for(
    published: Published, card: str, family: str, side: int, minimal: float, balanced: float
) -> None:
    """Weights that lie there and activations, as torch would count them, without a margin."""
    for mode, most in ((VramMode.MINIMAL, minimal), (VramMode.BALANCED, balanced)):
        plan = make_plan(
            a_job(family, width=side, height=side), find_card(card), published[family],
            replace(PLAIN, vram_mode=mode),
        )  # fmt: skip
        weights = published[family].parameters
        there = 2 * weights.unet if mode is VramMode.BALANCED else 0
        denoise = (there + plan.activations.denoise) / GIB
        assert denoise <= most


@pytest.mark.parametrize(
    ("forced", "expected"),
    [
        ({"offload": Offload.MODEL}, {"offload": "model"}),
        ({"offload": Offload.STREAM}, {"offload": "stream"}),
        ({"vae_tiling": VaeTiling.ALWAYS}, {"vae_tile": 512}),
        ({"vae_tile": 320}, {"vae_tile": 320}),
        ({"vae_bands": 24}, {"vae_bands": 24}),
        ({"passes": 2}, {"passes": 2}),
        ({"passes": 9}, {"passes": 2}),
        ({"feed_forward_chunks": 4}, {"feed_forward_chunks": 4}),
        ({"storage": Storage.FLOAT8}, {"storage": "float8_e4m3fn"}),
        ({"vram_mode": VramMode.MINIMAL, "offload": Offload.NONE}, {"offload": "none"}),
        ({"vram_mode": VramMode.MINIMAL, "vae_tiling": VaeTiling.NEVER}, {"vae_tile": 0}),
        ({"vram_mode": VramMode.FAST, "passes": 2}, {"passes": 2}),
    ],
    ids=str,
)
def test_every_single_choice_can_be_forced(
    published: Published, forced: Mapping[str, object], expected: Mapping[str, object]
) -> None:
    settings = replace(PLAIN, **forced)  # type: ignore[arg-type]
    plan = make_plan(a_job("sdxl"), LARGE, published["sdxl"], settings)
    for name, value in expected.items():
        assert getattr(plan, name) == value
    shown = plan.to_dict()["choices"]
    assert isinstance(shown, dict)
    assert shown.items() >= expected.items()


def test_what_is_forced_is_said_to_be_asked_for(published: Published) -> None:
    settings = replace(PLAIN, passes=2, storage=Storage.FLOAT8)
    reasons = make_plan(a_job("sdxl"), LARGE, published["sdxl"], settings).reasons
    assert "each step in 2 calls of the UNet, as you asked" in reasons
    assert "the UNet's weights are kept in float8_e4m3fn, as you asked" in reasons


@pytest.mark.report("B17")
def test_always_tile_tiles_also_what_would_fit_whole(published: Published) -> None:
    """B17: a card hung at the decode, and its owner wants tiles at 512 pixels too."""
    always = replace(PLAIN, vae_tiling=VaeTiling.ALWAYS)
    plan = make_plan(a_job("sd15"), LARGE, published["sd15"], always)
    assert plan.vae_tile == 512
    assert "VAE in tiles of 512 pixels, as you asked" in plan.reasons
    assert make_plan(a_job("sd15"), LARGE, published["sd15"], PLAIN).vae_tile == 0


def test_tiles_are_never_taken_where_they_are_forbidden(published: Published) -> None:
    never = replace(PLAIN, vae_tiling=VaeTiling.NEVER)
    job = a_job("sdxl", width=2048, height=2048)
    assert make_plan(job, SMALL, published["sdxl"], PLAIN).vae_tile > 0
    plan = make_plan(job, SMALL, published["sdxl"], never)
    assert plan.vae_tile == 0


@pytest.mark.report("B12")
def test_sdxl_at_1536_two_at_a_time_without_a_kernel_goes_in_blocks(published: Published) -> None:
    """B12: a single allocation of 35 GiB on a card of 20."""
    job, card = a_job("sdxl", width=1536, height=1536), find_card("gfx1030:20")
    settings = replace(PLAIN, batch_size=2)
    plan = make_plan(job, card, published["sdxl"], settings, count=2)
    assert (plan.attention, plan.batch, plan.verdict) == ("chunked", 2, Verdict.FITS)
    assert "attention in blocks: gfx1030 has no fused kernel" in plan.reasons


@pytest.mark.report("B11")
def test_the_second_pass_is_planned_before_the_first(published: Published) -> None:
    """B11: 512 x 768 twice as large ran out of memory when the first picture was there."""
    job = a_job("sd15", width=512, height=768)
    larger = a_job("sd15", width=512, height=768, hires_scale=2.0)
    once = make_plan(job, LARGE, published["sd15"], PLAIN)
    twice = make_plan(larger, LARGE, published["sd15"], PLAIN)
    assert once.stages.hires == 0
    assert twice.stages.hires > twice.stages.denoise
    assert twice.activations.decode > once.activations.decode
    assert twice.stages.encode > 0
    assert twice.verdict is not Verdict.DOES_NOT_FIT
    assert (twice.seconds or 0) > (once.seconds or 0)


def test_a_second_pass_in_tiles_is_planned_for_one_of_them(published: Published) -> None:
    whole = a_job("sd15", hires_scale=4.0)
    tiled = a_job("sd15", hires_scale=4.0, hires_tile=512)
    plans = [make_plan(job, SMALL, published["sd15"], PLAIN) for job in (whole, tiled)]
    assert plans[1].activations.hires < plans[0].activations.hires / 8


def test_an_image_to_start_from_is_encoded_and_shortens_the_steps(published: Published) -> None:
    job = a_job("sd15")
    picture = Picture(sha256="0" * 64, name="a.png", data=b"")
    image = replace(job, init_image=picture, strength=0.4)
    from_noise, from_image = (
        make_plan(each, LARGE, published["sd15"], PLAIN) for each in (job, image)
    )
    assert from_noise.stages.encode == 0 < from_image.stages.encode
    assert from_noise.times is not None
    assert from_image.times is not None
    assert from_image.times.denoise == pytest.approx(0.4 * from_noise.times.denoise)


def test_without_guidance_a_step_has_half_of_the_samples(published: Published) -> None:
    guided, plain = (
        make_plan(
            a_job("sd15", width=1024, height=1024, guidance_scale=scale), LARGE,
            published["sd15"], PLAIN, count=4,
        )
        for scale in (7, 1)
    )  # fmt: skip
    assert plain.activations.denoise < 0.6 * guided.activations.denoise
    assert plain.activations.text < 0.6 * guided.activations.text


def test_the_canvas_is_cut_only_where_nothing_else_fits_or_it_is_asked_for(
    published: Published,
) -> None:
    job = a_job("sdxl", width=4096, height=4096)
    assert make_plan(job, find_card("MI300X"), published["sdxl"], PLAIN).denoise_tile == 0
    cut = make_plan(job, SMALL, published["sdxl"], PLAIN)
    assert cut.denoise_tile == 1024
    assert any("changes what is in the picture" in reason for reason in cut.reasons)
    whole = make_plan(replace(job, denoise_tile=0), SMALL, published["sdxl"], PLAIN)
    assert whole.denoise_tile == 0
    asked = make_plan(replace(job, denoise_tile=768), find_card("MI300X"), published["sdxl"], PLAIN)
    assert asked.denoise_tile == 768


# -- what was learnt, and what is free -----------------------------------------------------------


def test_a_stage_that_took_more_than_predicted_is_planned_with_that(published: Published) -> None:
    job, checkpoint = a_job("sdxl"), published["sdxl"]
    before = make_plan(job, LARGE, checkpoint, PLAIN)
    key = learnt.key(
        "decode", dtype=before.dtype, vae_dtype=before.vae_dtype, attention=before.attention,
        vae_attention=before.vae_attention,
    )  # fmt: skip
    after = make_plan(job, LARGE, checkpoint, PLAIN, factors={key: 2.5})
    assert after.means != ""
    plain = replace(PLAIN, vram_mode=VramMode.FAST)
    before, after = (
        make_plan(job, LARGE, checkpoint, plain, factors={key: factor}, time_factors={key: factor})
        for factor in (1.0, 1.5)
    )
    assert after.activations.decode == pytest.approx(1.5 * before.activations.decode)
    assert after.stages.denoise == before.stages.denoise
    assert before.times is not None
    assert after.times is not None
    assert after.times.decode == pytest.approx(1.5 * before.times.decode)


def test_weights_that_the_ram_has_no_room_for_are_not_left_there(published: Published) -> None:
    job, checkpoint = a_job("sdxl"), published["sdxl"]
    roomy = Memory(used_bytes=0, ram_bytes=32 * GIB, available_bytes=20 * GIB)
    short = replace(roomy, available_bytes=4 * GIB)
    assert make_plan(job, SMALL, checkpoint, PLAIN, memory=roomy).offload == "model"
    plan = make_plan(job, SMALL, checkpoint, PLAIN, memory=short)
    assert any("read from the disk each time" in reason for reason in plan.reasons)


def test_a_cpu_with_little_free_ram_lets_parts_wait_in_their_file(published: Published) -> None:
    job, checkpoint = a_job("sd15"), published["sd15"]
    for gib, offload in ((16, "none"), (5.5, "model"), (3, "stream")):
        memory = Memory(ram_bytes=8 * GIB, available_bytes=round(gib * GIB))
        plan = make_plan(job, None, checkpoint, PLAIN, memory=memory)
        assert (plan.device, plan.offload) == ("cpu", offload)
        assert plan.verdict is not Verdict.DOES_NOT_FIT


@how_often(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    budget=st.floats(0.25, 48),
    width=st.integers(8, 300).map(lambda n: 8 * n),
    height=st.integers(8, 300).map(lambda n: 8 * n),
    count=st.integers(1, 9),
    family=st.sampled_from(["sd15", "sd21", "sdxl", "tiny"]),
    engine=st.sampled_from([Engine.ROCM, Engine.DIRECTML]),
)
def test_what_is_called_fitting_is_within_the_budget(
    published: Published, budget: float, width: int, height: int, count: int, family: str,
    engine: Engine,
) -> None:  # fmt: skip
    plan = make_plan(
        a_job(family, width=width, height=height), SMALL, published[family], PLAIN,
        engine=engine, count=count, budget_bytes=round(budget * GIB),
    )  # fmt: skip
    assert (plan.stages.peak <= round(budget * GIB)) == (plan.verdict is not Verdict.DOES_NOT_FIT)
    assert 1 <= plan.batch <= count
    assert plan.passes <= 2 * plan.batch
    assert plan.stages.peak >= max(plan.activations.denoise, plan.activations.decode)

from dataclasses import replace
from pathlib import Path

import pytest

from sdamd.checkpoint import Checkpoint
from sdamd.errors import DoesNotFit
from sdamd.hardware.device import CPU, Device
from sdamd.hardware.products import find_card
from sdamd.hardware.runtime import Engine
from sdamd.plan import GIB, Verdict, make_plan, nearest_that_fits, plan_or_refuse
from sdamd.request import Request
from sdamd.settings import Offload, Settings, VramMode
from tests.plan.made import a_job

Published = dict[str, Checkpoint]
PLAIN = Settings(home=Path("/nowhere"))
CARD = find_card("RX 6600")


@pytest.mark.parametrize(
    ("family", "width", "height", "gib"),
    [("sdxl", 2048, 3072, 1.0), ("sd15", 4096, 2048, 0.7), ("sd15", 2048, 2048, 0.5)],
)
def test_the_nearest_size_fits_and_keeps_the_shape(
    published: Published, family: str, width: int, height: int, gib: float
) -> None:
    job = a_job(family, width=width, height=height, denoise_tile=0)
    checkpoint, budget = published[family], round(gib * GIB)
    plan = make_plan(job, CARD, checkpoint, PLAIN, budget_bytes=budget)
    assert plan.verdict is Verdict.DOES_NOT_FIT
    nearest = nearest_that_fits(job, CARD, checkpoint, PLAIN, budget_bytes=budget)
    assert nearest is not None
    assert str(nearest) == f"{nearest.request['width']} x {nearest.request['height']}"
    smaller = replace(job, **nearest.request)  # type: ignore[arg-type]
    plan = make_plan(smaller, CARD, checkpoint, PLAIN, budget_bytes=budget)
    assert plan.verdict is not Verdict.DOES_NOT_FIT
    Request.from_dict(dict(nearest.request))  # they are fields of a request, in their ranges
    assert smaller.width / smaller.height == pytest.approx(width / height, rel=0.15)


def test_a_setting_that_stands_in_the_way_is_the_nearest(published: Published) -> None:
    forced = replace(PLAIN, offload=Offload.NONE)
    nearest = nearest_that_fits(a_job("sdxl"), CARD, published["sdxl"], forced)
    assert nearest is not None
    assert (str(nearest), dict(nearest.settings)) == ("offload auto", {"offload": "auto"})
    fast = replace(PLAIN, vram_mode=VramMode.FAST)
    nearest = nearest_that_fits(a_job("sdxl"), CARD, published["sdxl"], fast)
    assert str(nearest) == "vram_mode auto"


@pytest.mark.report("B11")
def test_less_of_a_second_pass_is_nearer_than_a_smaller_picture(published: Published) -> None:
    """B11: with room for the first pass alone the job is refused, and the picture not lost."""
    job = a_job("sd15", width=512, height=768, hires_scale=4.0, denoise_tile=0)
    budget = round(0.62 * GIB)
    first = a_job("sd15", width=512, height=768, denoise_tile=0)
    for each, fits in ((job, False), (first, True)):
        plan = make_plan(each, CARD, published["sd15"], PLAIN, budget_bytes=budget)
        assert (plan.verdict is not Verdict.DOES_NOT_FIT) is fits
    nearest = nearest_that_fits(job, CARD, published["sd15"], PLAIN, budget_bytes=budget)
    assert nearest is not None
    assert nearest.request.keys() == {"hires_scale"}
    assert 1 <= nearest.request["hires_scale"] < 4


def test_where_not_even_a_layer_fits_no_size_does(published: Published) -> None:
    card = find_card("gfx1030:1")
    assert nearest_that_fits(a_job("sdxl"), card, published["sdxl"], PLAIN) is None


def test_what_no_plan_can_run_is_refused_with_the_figures(
    published: Published, tmp_path: Path
) -> None:
    device = Device(gpu=replace(CARD, vram_bytes=round(1.8 * GIB)), engine=Engine.ROCM)
    job = a_job("sdxl", width=2048, height=2048, denoise_tile=0)
    settings = Settings(home=tmp_path)
    with pytest.raises(DoesNotFit) as raised:
        plan_or_refuse(job, device, published["sdxl"], settings, root=tmp_path, platform="linux")
    said = str(raised.value)
    assert said.startswith("2048 x 2048 with Stable Diffusion XL needs ")
    assert " GiB on Radeon RX 6600 in the most frugal way, and a run may take 1.0 GiB; " in said
    assert "nearest that fits: " in said
    for settings in (
        Settings(home=tmp_path, vram_mode=VramMode.MINIMAL),
        Settings(home=tmp_path, vram_budget_gb=0.5),
    ):
        plan = plan_or_refuse(job, device, published["sdxl"], settings, root=tmp_path)
        assert plan.verdict is Verdict.DOES_NOT_FIT


def test_what_fits_is_planned_with_what_is_free(published: Published, tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    text = "MemTotal: 16000000 kB\nMemAvailable: 8000000 kB\n"
    (tmp_path / "proc/meminfo").write_text(text)
    plan = plan_or_refuse(
        a_job("tiny"), CPU, published["tiny"], Settings(home=tmp_path), root=tmp_path
    )
    assert plan.budget_bytes == 8000000 * 1024 - GIB
    assert plan.verdict is Verdict.FITS


def test_what_other_programs_hold_now_is_no_reason_to_refuse(
    published: Published, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They may end before memory is short; a busy minute never says that no size fits."""
    held = tmp_path / "sys/class/drm/card0/device/mem_info_vram_used"
    held.parent.mkdir(parents=True)
    held.write_text(str(7 * GIB))
    device = Device(gpu=replace(CARD, card="card0"), engine=Engine.ROCM)
    plan = plan_or_refuse(
        a_job("sdxl"), device, published["sdxl"], Settings(home=tmp_path), root=tmp_path
    )
    assert plan.verdict is Verdict.DOES_NOT_FIT
    assert plan.offload == "stream"
    assert "is short of memory now" in caplog.text

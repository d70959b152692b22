from dataclasses import replace
from pathlib import Path

import pytest

from sdamd.checkpoint import Checkpoint
from sdamd.errors import BadRequest, DoesNotFit
from sdamd.hardware.device import Device
from sdamd.hardware.gpu import Gpu, Kind
from sdamd.hardware.memory import Memory
from sdamd.hardware.products import find_card
from sdamd.hardware.runtime import Engine
from sdamd.plan import GIB, Verdict, budget_of, make_plan, plan_or_refuse
from sdamd.plan.budget import CONTEXT_BYTES, DESKTOP_BYTES, RESERVE_BYTES, RESERVE_BYTES_WINDOWS
from sdamd.settings import Settings
from tests.plan.made import a_job

Published = dict[str, Checkpoint]
PLAIN = Settings(home=Path("/nowhere"))
CARD = find_card("RX 7900 XTX")


def an_apu(vram: float, gtt: float, bank_bytes: int = 0) -> Gpu:
    return Gpu(
        index=0, name="Radeon 680M", arch="gfx1035", kind=Kind.APU, bank_bytes=bank_bytes,
        vram_bytes=round(vram * GIB), gtt_bytes=round(gtt * GIB),
    )  # fmt: skip


def bytes_of(gpu: Gpu | None, settings: Settings = PLAIN, **how: object) -> int | None:
    engine = Engine.CPU if gpu is None else Engine.ROCM
    given: dict[str, object] = {"engine": engine, "platform": "linux"} | how
    return budget_of(gpu, settings=settings, **given).bytes  # type: ignore[arg-type]


def test_a_card_elsewhere_is_taken_to_drive_a_screen() -> None:
    assert bytes_of(CARD) == 24 * GIB - CONTEXT_BYTES - RESERVE_BYTES - DESKTOP_BYTES


def test_what_other_programs_hold_now_is_subtracted_and_said() -> None:
    found = budget_of(CARD, Engine.ROCM, PLAIN, memory=Memory(used_bytes=5 * GIB), platform="linux")
    assert found.bytes == 24 * GIB - CONTEXT_BYTES - RESERVE_BYTES - 5 * GIB
    assert found.reasons == ("other programs hold 5.0 GiB of it now",)


@pytest.mark.parametrize(
    ("platform", "reserve"),
    [
        ("linux", RESERVE_BYTES),
        ("win32", RESERVE_BYTES_WINDOWS),
        ("windows", RESERVE_BYTES_WINDOWS),
    ],
)
def test_each_system_has_its_reserve(platform: str, reserve: int) -> None:
    free = bytes_of(CARD, memory=Memory(used_bytes=0), platform=platform)
    assert free == 24 * GIB - CONTEXT_BYTES - reserve


def test_a_card_smaller_than_what_is_spoken_for_leaves_nothing() -> None:
    assert bytes_of(find_card("gfx1030:1")) == 0
    assert bytes_of(CARD, memory=Memory(used_bytes=30 * GIB)) == 0


@pytest.mark.report("B17")
@pytest.mark.parametrize("reserve", [0.0, 0.4, 2.0, 30.0])
def test_a_reserve_is_kept_free_of_what_the_machine_has_and_of_a_budget(reserve: float) -> None:
    settings = replace(PLAIN, vram_reserve_gb=reserve)
    asked = round(reserve * GIB)
    free = bytes_of(CARD, settings, memory=Memory(used_bytes=0))
    assert free == max(0, 24 * GIB - CONTEXT_BYTES - asked)
    with_budget = replace(settings, vram_budget_gb=8)
    assert bytes_of(CARD, with_budget) == max(0, 8 * GIB - asked)
    said = budget_of(CARD, Engine.ROCM, settings).reasons
    assert f"{reserve:.1f} GiB are kept free, as you asked" in said


@pytest.mark.report("B04")
def test_a_budget_above_what_is_there_is_taken_with_a_warning() -> None:
    """B04: HIP says 15.49 GiB of an APU with 96 GiB that it could map."""
    strix = an_apu(0, 96)
    strix = replace(strix, vram_bytes=16_636_528_640, name="Radeon 8060S", arch="gfx1151")
    usual = budget_of(strix, Engine.ROCM, PLAIN, platform="linux")
    assert usual.bytes is not None
    assert usual.bytes < 16_636_528_640
    raised = replace(PLAIN, vram_budget_gb=60)
    found = budget_of(strix, Engine.ROCM, raised)
    assert found.bytes == 60 * GIB
    assert found.warnings == (
        "the budget of 60.0 GiB is above the 15.5 GiB that the machine reports; taken as you asked",
    )
    assert budget_of(CARD, Engine.ROCM, replace(PLAIN, vram_budget_gb=8)).warnings == ()


@pytest.mark.report("B04")
@pytest.mark.parametrize("value", ["0", "-1", "abc", "1000000000", "nan", "inf", "1e3", "0.2", ""])
def test_a_budget_that_is_none_is_refused_with_what_is_allowed(value: str) -> None:
    with pytest.raises(BadRequest) as raised:
        Settings.load({"home": "/nowhere", "vram_budget_gb": value}, {})
    assert str(raised.value).startswith("vram_budget_gb is ")
    assert "allowed 0.25 to 1024" in str(raised.value)


def test_of_the_kernel_and_hip_the_smaller_one_counts_on_a_card() -> None:
    """A RX 9060 XT with 16 GiB of which HIP hands out 7.9."""
    card = replace(find_card("RX 9060 XT:16"), hip_bytes=round(7.9 * GIB))
    found = budget_of(card, Engine.ROCM, PLAIN, memory=Memory(used_bytes=0), platform="linux")
    assert found.bytes == round(7.9 * GIB) - CONTEXT_BYTES - RESERVE_BYTES
    assert found.reasons[0].startswith("HIP reports 7.9 of 16.0 GiB")


# -- APUs ----------------------------------------------------------------------------------------


@pytest.mark.report("B03")
def test_an_apu_with_a_small_carve_out_refuses_sdxl_with_the_hint_about_the_bios(
    published: Published, tmp_path: Path
) -> None:
    """B03: a Ryzen 6800U with 512 MiB set aside, and 15.25 GiB that it could map."""
    gpu = an_apu(0.5, 0)
    gpu = replace(gpu, gtt_bytes=16_377_958_400)
    settings = Settings(home=tmp_path)
    with pytest.raises(DoesNotFit) as raised:
        plan_or_refuse(
            a_job("sdxl"), Device(gpu=gpu, engine=Engine.ROCM), published["sdxl"], settings,
            environ={}, root=tmp_path,
        )  # fmt: skip
    said = str(raised.value)
    assert raised.value.exit_status == 3
    assert "0.5 GiB set aside for it and 15.3 GiB of RAM that it can map" in said
    assert "set the UMA frame buffer size in the BIOS higher" in said
    assert "\n" not in said


def test_an_apu_whose_kernel_lists_the_ram_is_planned_with_that() -> None:
    gpu = an_apu(0.5, 58.8, bank_bytes=round(58.8 * GIB))
    memory = Memory(gtt_used_bytes=GIB, ram_bytes=118 * GIB, available_bytes=100 * GIB)
    found = budget_of(gpu, Engine.ROCM, PLAIN, memory=memory, platform="linux")
    assert found.bytes == round(58.8 * GIB) - CONTEXT_BYTES - RESERVE_BYTES - GIB
    assert found.pooled
    short = replace(memory, available_bytes=20 * GIB)
    assert bytes_of(gpu, memory=short) == 17 * GIB


def test_parts_of_an_apu_never_wait_in_the_ram_that_is_its_memory(
    published: Published,
) -> None:
    gpu = an_apu(0.5, 7.0, bank_bytes=7 * GIB)
    for family in ("sd15", "sdxl"):
        plan = make_plan(a_job(family), gpu, published[family], PLAIN)
        assert plan.offload == "none"
    carved = an_apu(4, 8)
    plan = make_plan(a_job("sdxl"), carved, published["sdxl"], PLAIN)
    assert plan.offload == "stream"


def test_more_memory_than_the_ram_that_it_lies_in_is_not_believed() -> None:
    gpu = an_apu(0.5, 96, bank_bytes=96 * GIB)
    memory = Memory(gtt_used_bytes=0, ram_bytes=32 * GIB, available_bytes=30 * GIB)
    found = budget_of(gpu, Engine.ROCM, PLAIN, memory=memory, platform="linux")
    assert found.bytes == 27 * GIB
    assert "96.0 GiB are reported, of 32.0 GiB of RAM" in found.reasons


# -- the unknown ---------------------------------------------------------------------------------


@pytest.mark.report("B08")
@pytest.mark.parametrize("vram", [0, 2**30, 2**29, None])
@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_a_size_that_directml_cannot_know_forces_nothing(
    published: Published, family: str, vram: int | None
) -> None:
    """B08: DirectML said 0 or 1 GiB, and a large card was put into the low-memory mode."""
    gpu = replace(find_card("RX 6750 XT"), vram_bytes=vram)  # type: ignore[arg-type]
    plan = make_plan(a_job(family), gpu, published[family], PLAIN, engine=Engine.DIRECTML)
    assert plan.budget_bytes is None
    assert plan.verdict is Verdict.FITS
    assert plan.means == ""
    assert any("the size of the memory is unknown" in reason for reason in plan.reasons)
    settled = replace(PLAIN, vram_budget_gb=8)
    plan = make_plan(a_job(family), gpu, published[family], settled, engine=Engine.DIRECTML)
    assert plan.budget_bytes == 8 * GIB


def test_a_card_of_one_gib_is_one_where_the_kernel_says_so() -> None:
    assert bytes_of(find_card("gfx1100:1")) == 0


def test_directml_leaves_a_tenth_of_the_card_alone() -> None:
    memory = Memory(used_bytes=0)
    free = bytes_of(CARD, engine=Engine.DIRECTML, memory=memory, platform="win32")
    assert free == 24 * GIB * 9 // 10 - CONTEXT_BYTES - RESERVE_BYTES_WINDOWS


def test_the_cpu_has_the_ram_that_is_free_or_an_unknown_size() -> None:
    assert bytes_of(None) is None
    memory = Memory(ram_bytes=32 * GIB, available_bytes=12 * GIB)
    assert bytes_of(None, memory=memory) == 11 * GIB
    busy = replace(memory, available_bytes=2 * GIB)
    assert bytes_of(None, memory=busy) == 8 * GIB

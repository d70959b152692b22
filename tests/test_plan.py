from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from sdamd.batch import expand
from sdamd.checkpoint import FAMILIES, Checkpoint
from sdamd.errors import BadRequest
from sdamd.hardware.gpu import ARCHITECTURES, Gpu, Kind
from sdamd.hardware.products import find_card
from sdamd.hardware.runtime import Engine
from sdamd.plan import (
    BATCH_MAX,
    BATCH_MAX_SMALL,
    GIB,
    Plan,
    Verdict,
    make_plan,
)
from sdamd.plan.budget import CONTEXT_BYTES, DESKTOP_BYTES, RESERVE_BYTES
from sdamd.request import Job, Request
from sdamd.settings import Attention, Dtype, Settings, VramMode
from sdamd.tuned import Tuned

Published = Mapping[str, Checkpoint]

SPOKEN_FOR = CONTEXT_BYTES + RESERVE_BYTES + DESKTOP_BYTES
FITS, SLOWER, NO = Verdict.FITS, Verdict.SLOWER, Verdict.DOES_NOT_FIT


def a_job(family: str, **asked: int) -> Job:
    return next(expand(Request(seed=1, **asked), FAMILIES[family]))  # type: ignore[arg-type]


def a_plan(
    published: Published, card: str | None, family: str, *, count: int = 1, **asked: int
) -> Plan:
    gpu = None if card is None else find_card(card)
    settings = Settings(home=Path("/nowhere"))
    return make_plan(a_job(family, **asked), gpu, published[family], settings, count=count)


# -- verdicts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("card", "family", "side", "verdict"),
    [
        ("RX 7900 XTX", "sd15", 512, FITS),
        ("RX 7900 XTX", "sd21", 768, FITS),
        ("RX 7900 XTX", "sdxl", 1024, FITS),
        ("RX 9070 XT", "sdxl", 1024, FITS),
        ("RX 6800 XT", "sd15", 512, FITS),
        ("RX 6800 XT", "sdxl", 1024, FITS),
        ("RX 6600", "sd15", 512, FITS),
        ("RX 6600", "sd15", 1024, FITS),
        ("RX 6600", "sdxl", 1024, SLOWER),
        ("RX 580:8", "sd15", 512, FITS),
        ("RX 580:4", "sdxl", 1024, SLOWER),
        ("RX 6500 XT:4", "sd15", 512, FITS),
        ("RX 6500 XT:4", "sdxl", 512, SLOWER),
        ("RX 550:2", "sdxl", 512, SLOWER),
        ("RX 7900 XTX", "sd15", 8192, SLOWER),
        ("RX 6600", "sdxl", 4096, SLOWER),
        ("gfx1030:1", "sd15", 512, NO),
        ("MI300X", "sdxl", 2048, FITS),
        ("RX 550:2", "tiny", 128, FITS),
    ],
)
def test_the_verdict_over_cards_and_families(
    published: Published, card: str, family: str, side: int, verdict: Verdict
) -> None:
    plan = a_plan(published, card, family, width=side, height=side)
    assert plan.verdict is verdict
    assert plan.budget_bytes == find_card(card).vram_bytes - SPOKEN_FOR or verdict is NO
    assert (plan.stages.peak > (plan.budget_bytes or 0)) == (verdict is NO)


def cards() -> Iterator[Gpu]:
    for arch, row in ARCHITECTURES.items():
        kind = Kind.APU if row.apu else Kind.DISCRETE
        for gib in (1, 2, 24):
            yield Gpu(index=0, name=arch, arch=arch, vram_bytes=gib * GIB, kind=kind)


@pytest.mark.parametrize(
    "gpu", list(cards()), ids=lambda gpu: f"{gpu.arch}:{gpu.vram_bytes // GIB}"
)
def test_what_is_said_to_fit_fits_and_what_does_not_has_tried_everything(
    gpu: Gpu, published: Published, machine: Settings
) -> None:
    for family in FAMILIES:
        for side in (512, 2048):
            job = a_job(family, width=side, height=side)
            plan = make_plan(job, gpu, published[family], machine, count=4)
            assert plan.budget_bytes is not None
            if plan.verdict is NO:
                assert plan.stages.peak > plan.budget_bytes
                least = replace(machine, vram_mode=VramMode.MINIMAL)
                frugal = make_plan(job, gpu, published[family], least)
                assert frugal.verdict is NO
            else:
                assert plan.stages.peak <= plan.budget_bytes
            assert plan.reasons


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_a_faster_way_is_never_passed_over(
    published: Published, machine: Settings, family: str
) -> None:
    """With more memory the plan is as fast or faster, and spares no more."""
    job, card = a_job(family), find_card("RX 7900 XTX")
    times = []
    plan = make_plan(job, card, published[family], machine, count=4)
    assert (plan.means, plan.verdict) == ("", FITS)
    for gib in (0.75, 1, 1.5, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48):
        plan = make_plan(
            job, card, published[family], machine, count=4, budget_bytes=round(gib * GIB)
        )
        assert plan.seconds is not None
        assert plan.verdict is not NO
        times.append(plan.seconds)
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]


@pytest.mark.report("B10", "B12")
def test_no_card_ever_holds_the_scores_of_the_vae(published: Published, machine: Settings) -> None:
    """B10: decoding failed above a size, though the UNet ran."""
    job = a_job("sd15", width=4096, height=4096)
    scores = 9 * (4096 * 4096 // 64) ** 2
    for arch in ARCHITECTURES:
        gpu = find_card(f"{arch}:24")
        plan = make_plan(job, gpu, published["sd15"], machine, budget_bytes=2000 * GIB)
        assert plan.vae_attention in {"chunked", "fused"}
        assert plan.activations.decode < scores


# -- attention -----------------------------------------------------------------------------------


@pytest.mark.report("B12")
def test_attention_is_in_blocks_where_no_kernel_fuses_it(published: Published) -> None:
    for arch, row in ARCHITECTURES.items():
        plan = a_plan(published, f"{arch}:24", "sd15")
        without = row.fused_attention == "no"
        assert plan.attention == ("chunked" if without else "fused")
        said = any(f"attention in blocks: {arch} has no fused kernel" in r for r in plan.reasons)
        assert said == without
    on_cpu = a_plan(published, None, "sd15")
    assert (on_cpu.attention, on_cpu.vae_attention) == ("fused", "fused")


@pytest.mark.parametrize("arch", [a for a in ARCHITECTURES if a.startswith("gfx11")])
def test_the_head_of_the_vae_is_never_fused_on_gfx11(published: Published, arch: str) -> None:
    for asked in ("auto", "fused", "sliced", "chunked"):
        settings = Settings(home=Path("/nowhere"), attention=Attention(asked))
        plan = make_plan(a_job("sd15"), find_card(f"{arch}:24"), published["sd15"], settings)
        assert plan.vae_attention == "chunked"


@pytest.mark.parametrize("asked", ["fused", "chunked", "sliced"])
@pytest.mark.parametrize("card", ["RX 6600", "RX 7900 XTX", None])
def test_attention_can_be_chosen_by_name(
    published: Published, card: str | None, asked: str
) -> None:
    settings = Settings(home=Path("/nowhere"), attention=Attention(asked))
    gpu = None if card is None else find_card(card)
    plan = make_plan(a_job("sd15"), gpu, published["sd15"], settings)
    if (card, asked) == ("RX 6600", "fused"):
        assert plan.attention == "math"
        return
    assert plan.attention == asked
    assert (f"attention {asked}, as you asked" in plan.reasons) == (card is not None)


@pytest.mark.report("B12")
def test_fused_without_a_kernel_is_predicted_with_all_scores(published: Published) -> None:
    """B12: SDXL at 1536 pixels, two at a time; what sdamd chooses itself fits."""
    job, checkpoint = a_job("sdxl", width=1536, height=1536), published["sdxl"]
    gpu = find_card("gfx1030:24")
    needs = {}
    for asked in (Attention.FUSED, Attention.AUTO):
        settings = Settings(home=Path("/nowhere"), attention=asked, batch_size=2)
        plan = make_plan(job, gpu, checkpoint, settings, count=2, budget_bytes=64 * GIB)
        needs[asked] = plan.stages.denoise
        assert plan.batch == 2
    assert needs[Attention.FUSED] > 16 * GIB + needs[Attention.AUTO]
    settings = Settings(home=Path("/nowhere"), attention=Attention.FUSED)
    said = make_plan(job, gpu, checkpoint, settings).reasons
    assert "attention fused was asked for; gfx1030 has no kernel, so it holds all scores" in said


@pytest.mark.parametrize(("asked", "package"), [("xformers", "xformers"), ("flash", "flash_attn")])
def test_a_package_that_is_not_installed_is_named(
    published: Published, asked: str, package: str
) -> None:
    settings = Settings(home=Path("/nowhere"), attention=Attention(asked))
    with pytest.raises(BadRequest, match=f"attention is {asked}, but {package} is not installed"):
        make_plan(a_job("sd15"), find_card("RX 7900 XTX"), published["sd15"], settings)
    with pytest.raises(BadRequest, match=f"attention is {asked}; allowed on the CPU auto, fused"):
        make_plan(a_job("sd15"), None, published["sd15"], settings)


@pytest.mark.parametrize("engine", [Engine.DIRECTML, Engine.DIRECTML_CPU])
def test_directml_brings_its_own_attention(published: Published, engine: Engine) -> None:
    gpu = find_card("RX 6600") if engine is Engine.DIRECTML else None
    for asked in Attention:
        settings = Settings(home=Path("/nowhere"), attention=asked)
        plan = partial(make_plan, a_job("sd15"), gpu, published["sd15"], settings, engine=engine)
        if asked in {Attention.AUTO, Attention.FUSED}:
            assert (plan().attention, plan().vae_attention) == ("fused", "fused")
        else:
            with pytest.raises(BadRequest, match="allowed with DirectML auto, fused"):
                plan()


# -- what the user has set -----------------------------------------------------------------------


def test_a_variable_of_the_user_is_said_with_what_it_replaces(
    published: Published, machine: Settings
) -> None:
    """D03: the user's own choice wins, and the plan says so."""
    plan = partial(make_plan, a_job("sd15"), find_card("RX 7900 XTX"), published["sd15"], machine)
    said = plan(environ={"MIOPEN_FIND_MODE": "1", "HOME": "/home/somebody"}).reasons
    (reason,) = set(said) - set(plan().reasons)
    assert reason.startswith("MIOPEN_FIND_MODE is '1', as you set it; sdamd would set '2': ")


# -- what was measured ---------------------------------------------------------------------------


def a_winner(**changed: object) -> Tuned:
    winner = Tuned(
        gfx="gfx1100", torch="2.9.1+rocm6.4", sdamd="0", family="sdxl", date="2026-11-30",
        seconds=3.5, attention="chunked", batch=2, vae_dtype="float32", vae_tile=512,
        miopen=False, channels_last=True,
    )  # fmt: skip
    return replace(winner, **changed)  # type: ignore[arg-type]


def test_what_was_measured_goes_before_the_table(published: Published, machine: Settings) -> None:
    plan = make_plan(
        a_job("sdxl"), find_card("RX 7900 XTX"), published["sdxl"], machine, count=9,
        tuned=a_winner(),
    )  # fmt: skip
    assert (plan.attention, plan.batch, plan.vae_dtype, plan.vae_tile) == (
        "chunked", 2, "float32", 512,
    )  # fmt: skip
    assert (plan.miopen, plan.channels_last) == (False, True)
    assert (
        "measured on this card on 2026-11-30: attention chunked, 2 at a time, the VAE in float32 "
        "in tiles of 512 pixels, without MIOpen, channels last"
    ) in plan.reasons
    assert not any("to fit" in reason for reason in plan.reasons)


def test_what_was_measured_gives_way_to_what_fits(published: Published, machine: Settings) -> None:
    winner = a_winner(batch=4, vae_tile=0, vae_dtype="bfloat16")
    plan = make_plan(
        a_job("sdxl"), find_card("RX 6600"), published["sdxl"], machine, count=9, tuned=winner
    )
    assert plan.verdict is SLOWER
    assert plan.vae_bands > 0


def test_what_the_user_asks_for_goes_before_what_was_measured(published: Published) -> None:
    settings = Settings(
        home=Path("/nowhere"), attention=Attention.SLICED, dtype=Dtype.FLOAT32, batch_size=1
    )
    plan = make_plan(
        a_job("sdxl"), find_card("RX 7900 XTX"), published["sdxl"], settings, count=9,
        tuned=a_winner(vae_dtype="bfloat16", vae_tile=0),
    )  # fmt: skip
    assert (plan.attention, plan.batch, plan.vae_dtype) == ("sliced", 1, "float32")


def test_a_vae_that_overflows_float16_is_never_tuned_to_it(
    published: Published, machine: Settings
) -> None:
    for family, expected in (("sdxl", "float32"), ("sd15", "float16")):
        plan = make_plan(
            a_job(family), find_card("gfx1030:16"), published[family], machine,
            tuned=a_winner(vae_dtype="float16"),
        )  # fmt: skip
        assert plan.vae_dtype == expected


# -- dtypes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "family", "dtype", "vae_dtype"),
    [
        ("gfx803:8", "sd15", "float16", "float16"),
        ("gfx906:16", "sd15", "float16", "float16"),
        pytest.param("gfx906:16", "sdxl", "float16", "float32", id="C01 SDXL VAE on GCN"),
        pytest.param("gfx1010:8", "sd15", "float32", "float32", id="C04 RDNA1"),
        pytest.param("gfx1012:8", "sdxl", "float32", "float32", id="C04 RDNA1 SDXL"),
        pytest.param("gfx908:32", "sd15", "float16", "float16", id="CDNA1's bfloat16 is slow"),
        ("gfx1030:16", "sd15", "float16", "float16"),
        pytest.param("gfx1030:16", "sdxl", "float16", "float32", id="C01 SDXL VAE on RDNA2"),
        ("gfx1100:24", "sd15", "float16", "bfloat16"),
        ("gfx1100:24", "sdxl", "float16", "bfloat16"),
        ("gfx1201:16", "sdxl", "float16", "bfloat16"),
        ("gfx942:192", "sd21", "float16", "bfloat16"),
        ("gfx90a:64", "tiny", "float16", "bfloat16"),
        (None, "sd15", "float32", "float32"),
        (None, "sdxl", "float32", "float32"),
    ],
)
def test_the_dtype_left_to_sdamd(
    published: Published, target: str | None, family: str, dtype: str, vae_dtype: str
) -> None:
    plan = a_plan(published, target, family)
    assert (plan.dtype, plan.vae_dtype) == (dtype, vae_dtype)


@pytest.mark.parametrize("arch", [a for a, row in ARCHITECTURES.items() if not row.bf16])
def test_bfloat16_is_refused_where_no_unit_computes_it(arch: str, published: Published) -> None:
    settings = Settings(home=Path("/nowhere"), dtype=Dtype.BFLOAT16)
    with pytest.raises(BadRequest) as raised:
        make_plan(a_job("sd15"), find_card(f"{arch}:8"), published["sd15"], settings)
    assert str(raised.value) == f"dtype is bfloat16; allowed on {arch} are float16 and float32"


def test_rdna2_and_rdna1_are_among_those_without_bfloat16() -> None:
    without = {row.generation for row in ARCHITECTURES.values() if not row.bf16}
    assert without == {"GCN4", "GCN5", "RDNA1", "RDNA2"}


@pytest.mark.report("C04")
def test_rdna1_computes_in_float32_and_its_memory_is_predicted_for_that(
    published: Published, machine: Settings
) -> None:
    """C04: float16 gave grey pictures on gfx1010; on RDNA 2 it is right."""
    plans = {
        arch: make_plan(
            a_job("sd15"), find_card(f"{arch}:24"), published["sd15"], machine
        )
        for arch in ("gfx1010", "gfx1030")
    }  # fmt: skip
    assert [plan.dtype for plan in plans.values()] == ["float32", "float16"]
    old, new = (plan.stages for plan in plans.values())
    assert old.denoise > 1.9 * new.denoise
    assert old.decode > 1.9 * new.decode
    settings = Settings(home=Path("/nowhere"), dtype=Dtype.FLOAT16)
    own = make_plan(a_job("sd15"), find_card("gfx1010:24"), published["sd15"], settings)
    assert (own.dtype, own.vae_dtype) == ("float16", "float32")
    assert "float16 was asked for; the VAE stays in float32" in own.reasons


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
def test_the_cpu_takes_two_dtypes(published: Published, dtype: Dtype) -> None:
    settings = Settings(home=Path("/nowhere"), dtype=dtype)
    plan = make_plan(a_job("sd15"), None, published["sd15"], settings)
    assert (plan.device, plan.dtype, plan.vae_dtype) == ("cpu", dtype, "float32")


def test_the_cpu_refuses_float16(published: Published) -> None:
    settings = Settings(home=Path("/nowhere"), dtype=Dtype.FLOAT16)
    with pytest.raises(BadRequest, match="dtype is float16; allowed on the CPU are"):
        make_plan(a_job("sd15"), None, published["sd15"], settings)


def test_float32_is_of_everything_when_asked_for(published: Published) -> None:
    settings = Settings(home=Path("/nowhere"), dtype=Dtype.FLOAT32)
    plan = make_plan(a_job("sdxl"), find_card("gfx1100:24"), published["sdxl"], settings)
    assert (plan.dtype, plan.vae_dtype) == ("float32", "float32")
    half = a_plan(published, "gfx1100:24", "sdxl")
    assert plan.stages.text > 1.9 * half.stages.text


# -- how many at once ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("card", "family", "count", "asked", "batch"),
    [
        (None, "sd15", 10, 0, 1),
        (None, "tiny", 100, 0, BATCH_MAX_SMALL),
        (None, "tiny", 3, 0, 3),
        (None, "sd15", 10, 3, 3),
        ("MI300X", "sd15", 100, 0, BATCH_MAX),
        ("MI300X", "sd15", 100, 16, 16),
        ("MI300X", "sd15", 2, 16, 2),
        ("RX 6600", "sd15", 4, 0, 4),
        ("RX 6600", "sdxl", 16, 16, 16),
    ],
)
def test_how_many_pictures_share_a_pass(
    published: Published, card: str | None, family: str, count: int, asked: int, batch: int
) -> None:
    settings = Settings(home=Path("/nowhere"), batch_size=asked)
    gpu = None if card is None else find_card(card)
    plan = make_plan(a_job(family), gpu, published[family], settings, count=count)
    assert plan.batch == batch


# -- reasons -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("card", "family", "reason"),
    [
        ("RX 6600", "sdxl", "VAE in bands of 16 rows, exactly as whole, to fit"),
        ("RX 6600", "sdxl", "parts wait in RAM until their turn, to fit"),
        ("RX 6600", "sdxl", "attention in blocks: gfx1032 has no fused kernel"),
        (
            "RX 7900 XTX",
            "sd15",
            "attention fused, behind AOTriton's experimental flag; in blo",
        ),
        ("RX 9070 XT", "sd15", "attention fused; in blocks in the VAE, whose head is 512 wide"),
        ("RX 5700 XT", "sd15", "float32: float16 gave grey pictures on RDNA 1"),
        ("RX 580", "sd15", "no current ROCm build has kernels for gfx803"),
        ("RX 6600", "sd15", "MIOpen in find mode 2; channels first; without hipBLASLt"),
        ("RX 7900 XTX", "sd15", "float16; the VAE in bfloat16"),
        (None, "sd15", "float32 on the CPU"),
    ],
)
def test_each_choice_has_its_reason(
    published: Published, card: str | None, family: str, reason: str
) -> None:
    plan = a_plan(published, card, family, count=4)
    assert any(said.startswith(reason) for said in plan.reasons)


def test_a_smaller_batch_than_asked_for_has_its_reason(published: Published) -> None:
    settings = Settings(home=Path("/nowhere"), vram_budget_gb=6)
    plan = make_plan(a_job("sdxl"), find_card("RX 7900 XTX"), published["sdxl"], settings, count=4)
    assert "2 at a time instead of 4, to fit" in plan.reasons


def test_a_card_of_an_unknown_architecture_is_planned_for_carefully(
    published: Published, machine: Settings
) -> None:
    gpu = Gpu(index=0, name="Radeon X", arch="gfx1399", vram_bytes=16 * GIB, kind=Kind.DISCRETE)
    plan = make_plan(a_job("sd15"), gpu, published["sd15"], machine)
    assert (plan.dtype, plan.attention) == ("float16", "chunked")
    assert any(r.startswith("nothing is known about gfx1399") for r in plan.reasons)


# -- JSON ----------------------------------------------------------------------------------------


def test_the_json_has_the_keys_that_tools_rely_on(published: Published) -> None:
    shown = a_plan(published, "RX 6600", "sdxl").to_dict()
    assert shown["verdict"] == "slower"
    assert shown.keys() >= {"budget_bytes", "peak_bytes", "stages", "choices", "reasons", "seconds"}
    stages, choices = shown["stages"], shown["choices"]
    assert isinstance(stages, dict)
    assert isinstance(choices, dict)
    assert stages.keys() >= {"text", "denoise", "decode"}
    assert shown["peak_bytes"] == max(stages.values())
    assert choices.keys() >= {
        "dtype", "attention", "offload", "vae_tile", "denoise_tile", "batch"
    }  # fmt: skip

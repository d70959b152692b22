from dataclasses import replace

import pytest

from sdamd import speed
from sdamd.checkpoint import FAMILIES
from sdamd.hardware.gpu import ARCHITECTURES, Gpu, Kind
from sdamd.hardware.products import find_card, speed_of
from sdamd.hardware.runtime import Engine


def steps_per_second(card: str, family: str, side: int, batch: int = 1) -> float:
    """Steps of a picture with guidance, as users count them."""
    rates = speed.rates_of(find_card(card), Engine.ROCM)
    assert rates is not None
    fused = ARCHITECTURES[find_card(card).arch].fused_attention != "no"
    seconds = speed.call_seconds(
        rates, speed.UNETS[family], half=True, pixels=side**2, samples=2 * batch,
        attention="fused" if fused else "chunked", weights=0,
    )  # fmt: skip
    return batch / seconds


@pytest.mark.parametrize(
    ("card", "family", "side", "batch", "reported"),
    [
        # SD.Next's benchmark database, 2023: whole runs, with the decode.
        ("RX 7900 XTX", "sd15", 512, 4, 17.1),
        ("RX 6900 XT", "sd15", 512, 4, 11.2),
        ("RX 6800 XT", "sd15", 512, 4, 10.3),
        ("RX 6700 XT", "sd15", 512, 4, 7.0),
        ("RX 6600 XT", "sd15", 512, 4, 5.0),
        ("RX Vega 64", "sd15", 512, 4, 2.4),
        # Users of ROCm and ComfyUI, 2025.
        ("RX 7900 XTX", "sdxl", 1024, 1, 3.7),
        ("RX 6900 XT", "sdxl", 1024, 1, 1.62),
        ("RX 9060 XT", "sdxl", 1024, 1, 2.5),
        ("MI300X", "sdxl", 1024, 1, 5.0),
    ],
)
def test_a_step_is_predicted_within_a_factor_of_two_of_what_users_report(
    card: str, family: str, side: int, batch: int, reported: float
) -> None:
    assert 0.5 < steps_per_second(card, family, side, batch) / reported < 2


def test_a_faster_card_of_a_kind_is_faster() -> None:
    for cards in (
        ("RX 6600", "RX 6700 XT", "RX 6800", "RX 6800 XT", "RX 6950 XT"),
        ("RX 7600", "RX 7700 XT", "RX 7800 XT", "RX 7900 XT", "RX 7900 XTX"),
        ("Radeon 740M", "Radeon 760M", "Radeon 780M"),
    ):
        found = [steps_per_second(card, "sdxl", 1024) for card in cards]
        assert found == sorted(found)


@pytest.mark.parametrize(
    ("family", "side", "teraflops"),
    [("sd15", 512, 0.803), ("sd15", 1024, 4.67), ("sd15", 2048, 42.2), ("sdxl", 1024, 6.76),
     ("sdxl", 2048, 35.9), ("sdxl", 4096, 287.8)],
)  # fmt: skip
def test_operations_are_those_that_were_counted(family: str, side: int, teraflops: float) -> None:
    assert speed.UNETS[family].of(side**2) == pytest.approx(teraflops * 1e12, rel=0.02)


def test_a_decode_of_1024_pixels_is_ten_teraflops() -> None:
    assert speed.DECODE_SD.of(1024**2) == pytest.approx(10.47e12, rel=0.01)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_its_operations(family: str) -> None:
    assert speed.UNETS[family].of(512**2) > 0


def test_an_unknown_card_has_no_rates_unless_it_tells_its_compute_units() -> None:
    unknown = Gpu(index=0, name="Radeon X", arch="gfx1399", vram_bytes=0, kind=Kind.DISCRETE)
    assert speed.rates_of(unknown, Engine.ROCM) is None
    silent = replace(unknown, arch="gfx1100")
    assert speed.rates_of(silent, Engine.ROCM) is None
    telling = replace(silent, compute_units=96)
    told, listed = (speed.rates_of(g, Engine.ROCM) for g in (telling, find_card("RX 7900 XTX")))
    assert told is not None
    assert listed is not None
    assert told.flops == pytest.approx(listed.flops, rel=0.15)


def test_the_names_of_detected_cards_are_found_in_the_table() -> None:
    for name in ("Radeon 890M / 880M", "Radeon RX 9060 XT LP", "Radeon 8060S / 8050S / 8040S"):
        assert speed_of(name) is not None


def test_directml_is_slower_and_more_cores_are_faster() -> None:
    card = find_card("RX 6600")
    rocm, directml = (speed.rates_of(card, e) for e in (Engine.ROCM, Engine.DIRECTML))
    assert rocm is not None
    assert directml is not None
    assert directml.flops == rocm.flops / 2
    few, many = (speed.rates_of(None, Engine.CPU, cores) for cores in (2, 16))
    assert few is not None
    assert many is not None
    assert many.flops_float32 == 8 * few.flops_float32
    assert few.bus == 0


def test_what_streams_takes_as_long_as_the_bus_where_that_is_the_slower_one() -> None:
    rates = speed.rates_of(find_card("RX 6500 XT"), Engine.ROCM)
    assert rates is not None
    arguments = {"half": True, "pixels": 512.0**2, "samples": 2, "attention": "fused"}
    there, streamed = (
        speed.call_seconds(
            rates, speed.UNETS["sdxl"], weights=5 * 2**30, streamed=size, **arguments  # type: ignore[arg-type]
        )
        for size in (0, 20 * 2**30)
    )  # fmt: skip
    assert streamed > 20 * 2**30 / rates.bus > there


@pytest.mark.parametrize(
    ("width", "height", "side", "number"),
    [(1024, 1024, 0, 1), (1024, 1024, 1024, 1), (2048, 2048, 1024, 9), (4096, 4096, 1024, 25),
     (512, 2048, 512, 5)],
)  # fmt: skip
def test_tiles_overlap_by_a_quarter(width: int, height: int, side: int, number: int) -> None:
    assert speed.cut(width, height, side)[0] == number


def test_tiles_of_sdxl_at_4096_pixels_take_at_most_seven_tenths_of_the_whole() -> None:
    number, pixels = speed.cut(4096, 4096, 1024)
    flops = speed.UNETS["sdxl"]
    assert number * flops.of(pixels) <= 0.7 * flops.of(4096.0**2)

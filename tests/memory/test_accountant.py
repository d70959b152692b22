"""What the accountant measures: against earlier measurements, and against its own cached grid."""

import csv
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import architectures
from scripts.fake_gpu import DEVICE, FUSED, FakeGpu, placed
from scripts.measure_vram import GIB, GRID, Point, accountant, grid, planned_bytes, read

PEAKS = Path(__file__).parent.parent / "data/vram/peaks.csv"
COUNTS = {
    # In millions, as published; SD 3.5's with the 226.5 of its table of positions.
    ("sd15", "unet"): 859.52, ("sd15", "text_encoder"): 123.06, ("sd15", "vae"): 83.65,
    ("sd15", "controlnet"): 361.28, ("sd21", "unet"): 865.91, ("sdxl", "unet"): 2567.46,
    ("sdxl", "text_encoder_2"): 694.66, ("sdxl", "controlnet"): 1251.01,
    ("sdxl-refiner", "unet"): 2259.53, ("sd35-medium", "transformer"): 2243.17 + 226.49,
    ("sd35-medium", "text_encoder_3"): 4762.31,
}  # fmt: skip


@pytest.mark.parametrize(("family", "component"), COUNTS)
def test_networks_have_the_weights_of_the_published_ones(family: str, component: str) -> None:
    count = architectures.parameters_of(family, component) / 1e6
    assert count == pytest.approx(COUNTS[family, component], abs=0.01)


def plain(row: dict[str, str]) -> Point:
    """A row of the earlier measurements, which were of diffusers alone."""
    family, _, part = row["component"].partition(".")
    usual: dict[str, Any] = {"code": "plain", "dtype": row["dtype"], "attention": row["attention"]}
    side, batch = int(row["size"]), int(row["batch"])
    if family == "vae":
        stage = {"dec": "decode", "enc": "encode"}[part]
        return Point(
            family="sdxl", component="vae", stage=stage, width=side, height=side, batch=batch,
            **usual,
        )  # fmt: skip
    if part.startswith("text"):
        name = {"text": "text_encoder", "text2": "text_encoder_2", "text3": "text_encoder_3"}[part]
        return Point(family=family, component=name, stage="text", batch=2 * batch, **usual)
    return Point(
        family=family, component=part, stage="denoise", width=side, height=side, batch=batch,
        guided=True, **usual,
    )  # fmt: skip


ROWS = [
    ("sd15.text", 77, 2, "float16", "math"),
    ("sd15.unet", 512, 1, "float16", "math"),
    ("sd21.unet", 768, 2, "float16", "fused"),
    ("sdxl.unet", 1024, 1, "float16", "fused"),
    ("sd35-medium.transformer", 1024, 1, "float16", "fused"),
    ("vae.dec", 512, 1, "float16", "math"),
    ("vae.dec", 1024, 1, "float32", "math"),
    ("vae.enc", 512, 2, "float16", "fused"),
]


@pytest.mark.slow
def test_it_finds_what_was_measured_before_it_existed() -> None:
    keys = ("component", "size", "batch", "dtype", "attention")
    with PEAKS.open(encoding="utf-8", newline="") as file:
        known = {tuple(row[key] for key in keys): row for row in csv.DictReader(file)}
    with accountant() as here:
        for wanted in ROWS:
            row = known[tuple(map(str, wanted))]
            found = here.measure(plain(row))
            for column in ("tensors_bytes", "im2col_bytes", "miopen16_bytes"):
                assert getattr(found, column) == pytest.approx(int(row[column]), rel=0.001), wanted


def test_the_grid_is_complete() -> None:
    cached, wanted = read(), list(grid())
    assert len(wanted) >= 400
    assert set(cached) == set(wanted), f"run python -m scripts.measure_vram grid ({GRID})"
    assert min(Counter(point.family for point in wanted).values()) >= 7


@pytest.mark.slow
def test_a_dozen_of_the_grid_at_random_are_what_they_were() -> None:
    """So code that takes more, or less, cannot leave the grid behind."""
    cheap = [
        point for point in read()
        if point.passes <= 2 and point.attention in {"fused", "math"} and point.width <= 1536
        and point.component != "text_encoder_3"
    ]  # fmt: skip
    known = read()
    with accountant() as here:
        for point in random.sample(cheap, 12):
            assert here.measure(point) == known[point], point


def test_memory_is_given_back_when_the_last_view_of_it_dies() -> None:
    with FakeGpu() as gpu:
        whole = torch.empty(1024, 1024, device=DEVICE)
        view = whole[100:200, ::2]
        assert gpu.ledger.live["cuda"] == 4 * 1024 * 1024
        del whole
        assert gpu.ledger.live["cuda"] == 4 * 1024 * 1024
        del view
        assert gpu.ledger.live["cuda"] == 0


def test_host_and_device_are_counted_apart_when_a_module_moves() -> None:
    with FakeGpu() as gpu:
        layer = placed(torch.nn.Linear(1024, 512, bias=False), torch.float32)
        assert gpu.ledger.live == {"cuda": 2 * 2**20, "cpu": 0}
        layer.to("cpu")
        assert gpu.ledger.live == {"cuda": 0, "cpu": 2 * 2**20}
        layer.to("cuda").half()
        assert gpu.ledger.live == {"cuda": 2**20, "cpu": 0}
        assert layer.weight.device == DEVICE


@pytest.mark.parametrize(
    "index",
    [
        0, -1, slice(2, None), (slice(None), 3), (..., 1), (None, 2),
        (slice(1, 9, 2), None, ..., -1),
        (0, slice(None), 2), torch.tensor([1, 3]), (slice(None), torch.tensor([0, 2])),
    ],
    ids=str,
)  # fmt: skip
def test_indices_see_what_they_see_on_a_real_device(index: Any) -> None:
    real = torch.zeros(10, 5, 4)[index]
    with FakeGpu(FUSED):
        fake = torch.zeros(10, 5, 4, device=DEVICE)
        seen = fake[index]
        assert (seen.shape, seen.stride()) == (real.shape, real.stride())
        fake[index] = 1.0
        fake[index] = seen


@pytest.mark.slow
def test_a_picture_of_sd15_takes_1_8_gib_at_most_with_its_parts_in_ram() -> None:
    """Plain diffusers takes 4.3 on a card without fused attention, as this one is."""
    assert 1.6 * GIB < planned_bytes("sd15", 512, "balanced") <= 1.8 * GIB

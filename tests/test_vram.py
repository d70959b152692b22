import csv
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sdamd import vram
from sdamd.checkpoint import FAMILIES, Checkpoint

PEAKS = Path(__file__).parent / "data/vram/peaks.csv"
TILES = {"plain": 0, "tile256": 256, "tile512": 512}


def measured(component: str) -> Iterator[dict[str, str]]:
    with PEAKS.open(encoding="utf-8", newline="") as file:
        yield from (row for row in csv.DictReader(file) if row["component"].startswith(component))


def row_id(row: dict[str, str]) -> str:
    return "-".join(row[key] for key in ("component", "size", "batch", "dtype", "attn", "mode"))


def unet_rows() -> list[dict[str, str]]:
    return [row for row in measured("sd") if row["component"].endswith(".unet")]


@pytest.mark.parametrize("row", unet_rows(), ids=row_id)
def test_a_denoising_step_is_never_more_than_predicted(
    row: dict[str, str], published: dict[str, Checkpoint]
) -> None:
    predicted = vram.denoise_bytes(
        published[row["component"].removesuffix(".unet")],
        row["dtype"],
        width=int(row["size"]),
        height=int(row["size"]),
        batch=int(row["batch"]),
        attention="fused" if row["attn"] == "fused" else "sliced",
    )
    needed = max(int(row["extra_bytes"]), int(row["extra_im2col_bytes"]))
    assert needed <= predicted <= 1.3 * needed


@pytest.mark.parametrize("row", list(measured("vae.dec")), ids=row_id)
def test_decoding_is_never_more_than_predicted(row: dict[str, str]) -> None:
    tile = TILES[row["mode"]]
    predicted = vram.decode_bytes(
        row["dtype"],
        width=int(row["size"]),
        height=int(row["size"]),
        batch=int(row["batch"]),
        tile=tile,
        attention=row["attn"],
    )
    needed = max(int(row["extra_bytes"]), int(row["extra_im2col_bytes"]))
    assert needed <= predicted <= 1.3 * needed


@pytest.mark.parametrize(
    "row", [r for r in measured("sd") if ".text" in r["component"]], ids=row_id
)
def test_a_text_encoder_is_never_more_than_predicted(
    row: dict[str, str], published: dict[str, Checkpoint]
) -> None:
    family = row["component"].partition(".")[0]
    predicted = vram.text_bytes(published[family], row["dtype"], batch=int(row["batch"]))
    assert int(row["weights_bytes"]) + int(row["extra_bytes"]) <= predicted


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_weights_are_those_of_the_measured_unets_and_more(
    family: str, published: dict[str, Checkpoint]
) -> None:
    (unet,) = {r["weights_bytes"] for r in measured(f"{family}.unet") if r["dtype"] == "float16"}
    parameters = published[family].parameters
    assert int(unet) == parameters.unet * 2
    weights = vram.weights_bytes(published[family], "float16", "float32")
    assert weights == int(unet) + sum(parameters.text_encoders) * 2 + parameters.vae * 4


SIDES = st.integers(8, 256).map(lambda n: n * 8)


def denoise(
    checkpoint: Checkpoint,
    width: int,
    height: int,
    batch: int,
    dtype: str = "float16",
    attention: str = "sliced",
) -> int:
    return vram.denoise_bytes(
        checkpoint, dtype, width=width, height=height, batch=batch, attention=attention
    )


def decode(width: int, height: int, batch: int, tile: int = 0) -> int:
    return vram.decode_bytes(
        "float16", width=width, height=height, batch=batch, tile=tile, attention="math"
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # it never changes
@given(width=SIDES, height=SIDES, batch=st.integers(1, 8))
def test_more_pixels_or_pictures_never_need_less(
    published: dict[str, Checkpoint], width: int, height: int, batch: int
) -> None:
    for stage in (partial(denoise, published["sdxl"]), decode):
        here = stage(width, height, batch)
        assert stage(height, width, batch) == here
        assert stage(width + 64, height, batch) > here
        assert stage(width, height, batch + 1) > here


@given(SIDES, SIDES, st.integers(1, 8))
def test_tiles_need_no_more_than_one_of_them_and_the_joined_pictures(
    width: int, height: int, batch: int
) -> None:
    rounded = (-(-width // 64) * 64) * (-(-height // 64) * 64)
    joined = max((5 + 6 * (batch - 1)) * 2, 12 * batch) * rounded
    assert decode(width, height, batch, tile=256) <= decode(256, 256, 1) + joined + 1


@pytest.mark.report("B12")
def test_all_scores_at_once_need_more_than_a_large_card(
    published: dict[str, Checkpoint],
) -> None:
    """B12: SDXL at 1536 pixels, two at a time, where torch's attention has no kernel."""
    needs = {
        attention: vram.denoise_bytes(
            published["sdxl"], "float16", width=1536, height=1536, batch=2, attention=attention,
            block_bytes=64 * 2**20,
        )
        for attention in ("math", "sliced", "chunked", "fused")
    }  # fmt: skip
    assert needs["math"] > 16 * 2**30
    assert needs["sliced"] < 4 * 2**30
    assert needs["fused"] <= needs["chunked"] <= needs["fused"] + 128 * 2**20


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # it never changes
@given(width=SIDES, height=SIDES, batch=st.integers(1, 8), block=st.integers(2**20, 2**28))
def test_a_block_of_scores_is_all_that_blocks_add(
    published: dict[str, Checkpoint], width: int, height: int, batch: int, block: int
) -> None:
    size = {"width": width, "height": height, "batch": batch}
    for family in ("sd15", "sd21", "sdxl"):
        checkpoint = published[family]
        fused = vram.denoise_bytes(checkpoint, "float16", attention="fused", **size)
        blocks = vram.denoise_bytes(
            checkpoint, "float16", attention="chunked", block_bytes=block, **size
        )
        assert fused <= blocks <= fused + 1.2 * block + 1
    whole = vram.decode_bytes("float16", tile=0, attention="fused", **size)
    blocks = vram.decode_bytes("float16", tile=0, attention="chunked", block_bytes=block, **size)
    assert whole <= blocks <= whole + block + 1


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_form(family: str, published: dict[str, Checkpoint]) -> None:
    assert denoise(published[family], 512, 512, 1) > 0

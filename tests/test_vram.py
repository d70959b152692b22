"""The formulas against the bytes of the real modules, counted one allocation after another."""

import csv
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sdamd import vram
from sdamd.checkpoint import FAMILIES, Checkpoint
from sdamd.vram import Need

DATA = Path(__file__).parent / "data"
GRID, EARLIER = DATA / "memory/grid.csv", DATA / "vram/peaks.csv"
CARD = 16 * 2**30
"""The card for which the grid has MIOpen's workspace."""
OVER = 1.05

Row = dict[str, str]


def rows() -> Iterator[Row]:
    """What was measured of sdamd's own code, and of families that have formulas."""
    with GRID.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["code"] == "sdamd" and row["family"] in vram.UNETS:
                yield row


def earlier_rows() -> Iterator[Row]:
    """The points of an earlier measurement, in the grid's words."""
    stages = {"unet": "denoise", "transformer": "denoise", "dec": "decode", "enc": "encode"}
    with EARLIER.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            family, _, part = row["component"].partition(".")
            text = part.startswith("text")
            yield row | {
                "family": "sdxl" if family == "vae" else family,
                "component": f"text_encoder_{part[4:] or 1}" if text else
                "vae" if family == "vae" else part,
                "stage": "text" if text else stages[part],
                "width": row["size"], "height": row["size"], "beside": "",
                "guided": str(family != "vae"),
                "block_bytes": str(2**26 if row["attention"] == "chunked" else 0),
                "passes": "1", "feed_forward_chunks": "1", "vae_bands": "0", "vae_tile": "0",
            }  # fmt: skip


ROWS = [*rows(), *earlier_rows()]
KINDS = list(dict.fromkeys((r["family"], r["component"], r["stage"], r["beside"]) for r in ROWS))


def predicted(row: Row, workspace_limit: int | None) -> Need:
    """What the formulas say about one point of the grid."""
    number = {name: int(row[name]) for name in (
        "width", "height", "batch", "block_bytes", "passes", "feed_forward_chunks", "vae_bands",
        "vae_tile",
    )}  # fmt: skip
    size = {"width": number["width"], "height": number["height"]}
    samples = number["batch"] * (2 if row["guided"] == "True" else 1)
    if row["stage"] == "text":
        fused = row["attention"] == "fused"
        needed = vram.text_bytes(
            row["family"],
            row["dtype"],
            samples=samples,
            fused=fused,
            encoder=int(row["component"].removeprefix("text_encoder").lstrip("_") or 1) - 1,
        )
        return Need(tensors=needed)
    if row["component"] == "vae":
        return vram.vae_need(
            vram.DECODE if row["stage"] == "decode" else vram.ENCODE, row["dtype"],
            batch=number["batch"], attention=row["attention"], tile=number["vae_tile"],
            bands=number["vae_bands"], block_bytes=number["block_bytes"],
            workspace_limit=workspace_limit, **size,
        )  # fmt: skip
    if row["stage"] == "control":
        return vram.control_need(
            row["family"], row["dtype"], samples=samples, workspace_limit=workspace_limit, **size
        )
    together = -(-samples // number["passes"])
    return vram.denoise_need(
        row["family"], row["dtype"], samples=together, waiting=samples - together,
        attention=row["attention"], block_bytes=number["block_bytes"],
        feed_forward_chunks=number["feed_forward_chunks"], workspace_limit=workspace_limit,
        loras=row["beside"] if row["beside"].startswith("lora") else "",
        controlnets=int(row["beside"] == "controlnet"), **size,
    )  # fmt: skip


def shares(row: Row) -> Iterator[tuple[str, float]]:
    """Predicted over measured: of the tensors, and with each model of the workspace."""
    limit = vram.miopen_limit(row["dtype"], CARD)
    yield "tensors", predicted(row, None).tensors / int(row["tensors_bytes"])
    yield "im2col", predicted(row, None).bytes / int(row["im2col_bytes"])
    yield "miopen16", predicted(row, limit).bytes / int(row["miopen16_bytes"])


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_a_formula_is_never_under_what_was_measured_and_at_most_5_percent_over(
    kind: tuple[str, ...],
) -> None:
    points = [r for r in ROWS if (r["family"], r["component"], r["stage"], r["beside"]) == kind]
    wrong = [
        (name, round(share, 4), {key: row[key] for key in row if row[key] not in {"", "0"}})
        for row in points
        for name, share in shares(row)
        if not 1 <= share <= OVER
    ]
    assert points
    assert wrong == []


def test_the_grid_is_large_and_has_every_kind_of_work() -> None:
    assert len(list(rows())) >= 400
    for name, values in {
        "stage": {"text", "denoise", "control", "decode", "encode"},
        "family": {"sd15", "sd21", "sdxl", "sd35-medium"},
        "attention": {"fused", "chunked", "math", "sliced"},
        "dtype": {"float16", "float32"},
        "beside": {"", "controlnet", "lora-attention", "lora-all"},
        "passes": {"1", "2", "4"},
        "feed_forward_chunks": {"1", "8"},
        "vae_tile": {"0", "256", "512"},
        "guided": {"True", "False"},
    }.items():
        assert {row[name] for row in ROWS} >= values
    assert len({row["vae_bands"] for row in ROWS}) > 2


def test_weights_are_those_that_were_counted(published: dict[str, Checkpoint]) -> None:
    for family in ("sd15", "sd21", "sdxl"):
        weights = vram.weights_of(published[family], "float16", "float32")
        (unet,) = {
            int(row["weights_bytes"]) for row in ROWS
            if row["component"] == "unet" and row["family"] == family
            and row["dtype"] == "float16" and not row["beside"]
        }  # fmt: skip
        assert weights.unet == unet
        assert weights.vae == 83_653_863 * 4
        assert weights.total == weights.unet + weights.vae + weights.text
        kept = vram.weights_of(published[family], "float16", "float16", storage="float8_e4m3fn")
        assert kept.unet < 0.55 * unet


def test_a_controlnet_has_the_weights_that_were_counted(published: dict[str, Checkpoint]) -> None:
    for family in ("sd15", "sdxl"):
        (counted,) = {
            int(row["weights_bytes"]) for row in ROWS
            if row["component"] == "controlnet" and row["family"] == family
        }  # fmt: skip
        plain, with_two = (
            vram.weights_of(published[family], "float16", "float16", controlnets=number)
            for number in (0, 2)
        )
        assert with_two.unet - plain.unet == 2 * counted


# -- what must hold everywhere -------------------------------------------------------------------

SIDES = st.integers(8, 256).map(lambda n: n * 8)


def denoise(width: int, height: int, samples: int, **how: object) -> int:
    given: dict[str, object] = {"attention": "fused"} | how
    return vram.denoise_need(
        "sdxl", "float16", width=width, height=height, samples=samples, **given  # type: ignore[arg-type]
    ).bytes  # fmt: skip


def decode(width: int, height: int, batch: int, **how: object) -> int:
    given: dict[str, object] = {"attention": "fused"} | how
    return vram.vae_need(
        vram.DECODE, "float16", width=width, height=height, batch=batch, **given  # type: ignore[arg-type]
    ).bytes  # fmt: skip


@given(width=SIDES, height=SIDES, batch=st.integers(1, 8), bands=st.sampled_from([0, 16, 64]))
def test_more_pixels_or_pictures_never_need_less(
    width: int, height: int, batch: int, bands: int
) -> None:
    for stage in (denoise, partial(decode, bands=bands)):
        here = stage(width, height, batch)
        assert stage(width + 64, height, batch) > here
        assert stage(width, height + 64, batch) > here
        assert stage(width, height, batch + 1) > here


@given(width=SIDES, height=SIDES, samples=st.integers(2, 16))
def test_every_means_needs_less(width: int, height: int, samples: int) -> None:
    whole = denoise(width, height, samples)
    assert denoise(width, height, samples, feed_forward_chunks=8) <= whole
    assert denoise(width, height, -(-samples // 2)) < whole
    assert decode(width, height, samples, bands=16) < decode(width, height, samples)
    large = denoise(width, height, samples, attention="math")
    block = denoise(width, height, samples, attention="chunked", block_bytes=2**26)
    assert whole <= block <= max(whole + 2**26, large)


@given(SIDES, SIDES, st.integers(1, 8))
def test_tiles_need_one_of_them_and_the_joined_pictures(
    width: int, height: int, batch: int
) -> None:
    joined = 12 * batch * width * height + 4 * 256**2
    one = decode(min(width, 256), min(height, 256), 1)
    assert decode(width, height, batch, tile=256) <= one + joined + 1


@given(st.sampled_from(["float16", "float32"]), st.integers(0, 2**40))
def test_miopen_never_asks_for_more_than_its_limit(dtype: str, card: int) -> None:
    limit = vram.miopen_limit(dtype, card)
    assert 0 < limit <= 2 * vram.MIOPEN_MAX
    assert not card or limit <= card


@pytest.mark.report("B12")
def test_all_scores_at_once_need_more_than_a_large_card() -> None:
    """B12: SDXL at 1536 pixels, two at a time, where torch's attention has no kernel."""
    needs = {
        attention: denoise(1536, 1536, 4, attention=attention, block_bytes=64 * 2**20)
        for attention in ("math", "sliced", "chunked", "fused")
    }
    assert needs["math"] > 16 * 2**30
    assert needs["sliced"] < 4 * 2**30
    assert needs["fused"] <= needs["chunked"] <= needs["fused"] + 128 * 2**20


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # it never changes
@given(st.sampled_from(sorted(FAMILIES)), st.integers(1, 16))
def test_every_family_has_its_forms(
    published: dict[str, Checkpoint], family: str, samples: int
) -> None:
    assert vram.text_bytes(family, "float16", samples=samples) > 0
    assert vram.weights_of(published[family], "float16", "float16").total > 0
    assert vram.in_flight(vram.UNETS[family].largest_layer, "float16") < 150 * 2**20

"""Measures the device memory of a network, with no GPU: what `sdamd/vram.py` predicts.

    python -m scripts.measure_vram point --family sdxl --stage decode --width 1024 --height 1024
    python -m scripts.measure_vram grid            all points that tests/data/memory/grid.csv lacks
    python -m scripts.measure_vram figures         whole runs: plain diffusers and sdamd

Bytes come from the real modules on a GPU that is not there (`scripts/fake_gpu.py`).
"""

import argparse
import csv
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch

from scripts import architectures
from scripts.architectures import Size
from scripts.fake_gpu import (
    DEVICE,
    FUSED,
    MATH,
    RDNA2,
    RDNA3,
    Attention,
    FakeGpu,
    aside,
    im2col,
    miopen,
    placed,
)
from sdamd.plan import Plan, Stages, make_plan
from sdamd.request import Job

ROOT: Final = Path(__file__).resolve().parent.parent
GRID: Final = ROOT / "tests" / "data" / "memory" / "grid.csv"
GIB: Final = 2**30

WORKSPACES: Final = {"im2col": im2col, "miopen16": miopen(16 * GIB)}
"""What convolutions take: all columns, and what MIOpen asks for on a card of 16 GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One call of one network.

    `code` is `sdamd` (through `sdamd.backends.means`) or `plain` (diffusers alone). `component` is
    the pipeline's name for the network, `stage` one of `Stages` or `control`. `batch` is pictures
    (of `text`: prompts of 77 tokens, of 256 for T5); with `guided` a step has two samples for each.
    `attention` is `fused`, `math`, `sliced`, `chunked` (in blocks of `block_bytes`), or for plain
    code `eager`, which is diffusers' oldest. The means are as in `sdamd.plan.Plan`. `beside` is
    what comes with a UNet: the residuals of a `controlnet`, or an unfused `lora-attention` or
    `lora-all` of rank 32.
    """

    code: str = "sdamd"
    family: str
    component: str
    stage: str
    width: int = 0
    height: int = 0
    batch: int = 1
    guided: bool = False
    dtype: str = "float16"
    attention: str = "fused"
    block_bytes: int = 0
    passes: int = 1
    feed_forward_chunks: int = 1
    vae_bands: int = 0
    vae_tile: int = 0
    beside: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Bytes of a point: the weights, and the peak above those and the inputs.

    `tensors_bytes` is what tensors take, `im2col_bytes` and `miopen16_bytes` the same with the
    workspace of convolutions. `at` is the operator at the peak.
    """

    weights_bytes: int
    tensors_bytes: int
    im2col_bytes: int
    miopen16_bytes: int
    at: str


class Accountant:
    """Networks on one fake GPU, kept between points."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self._models: dict[tuple[str, ...], Any] = {}

    def measure(self, point: Point) -> Measured:
        """Run the call of a point."""
        model = self._model(point)
        self._gpu.attention = MATH if point.attention == "math" else FUSED
        (_apply_means if point.code == "sdamd" else _leave_plain)(model, point)
        dtype = getattr(torch, point.dtype)
        call = _STAGES[point.stage](model, point, dtype)
        with self._gpu.measured() as peak:
            call()
        with aside():
            weights = architectures.parameters_of(point.family, point.component)
        return Measured(
            weights_bytes=weights * dtype.itemsize,
            tensors_bytes=peak.extra,
            im2col_bytes=peak.extra_with("im2col"),
            miopen16_bytes=peak.extra_with("miopen16"),
            at=peak.at,
        )

    def _model(self, point: Point) -> Any:
        beside = "" if point.beside == "controlnet" else point.beside
        key = (point.code, point.family, point.component, point.dtype, beside)
        if key not in self._models:
            with aside():
                made = architectures.build(point.family, point.component, shallow=True)
                if beside.startswith("lora"):
                    architectures.add_lora(made, everywhere=beside == "lora-all")
            self._models[key] = placed(made, getattr(torch, point.dtype))
        return self._models[key]


@contextmanager
def accountant(attention: Attention = FUSED) -> Iterator[Accountant]:
    """An accountant with a fake GPU of its own."""
    with FakeGpu(attention, WORKSPACES) as gpu:
        yield Accountant(gpu)


def plan_of(point: Point) -> Plan:
    """The plan under which a network computes as the point says, with its weights on the device."""
    is_vae = point.component == "vae"
    return Plan(
        device="cuda",
        dtype=point.dtype,
        vae_dtype=point.dtype,
        batch=point.batch,
        vae_tile=point.vae_tile,
        attention="fused" if is_vae else point.attention,
        vae_attention=point.attention if is_vae else "fused",
        block_bytes=point.block_bytes,
        offload="none",
        stages=Stages(text=0, denoise=0, decode=0),
        budget_bytes=None,
        reasons=(),
        passes=point.passes,
        feed_forward_chunks=point.feed_forward_chunks,
        vae_bands=point.vae_bands,
    )


def _apply_means(model: Any, point: Point) -> None:
    from sdamd.backends import means  # noqa: PLC0415  # seconds

    means.apply(SimpleNamespace(components={point.component: model}), plan_of(point), DEVICE)


def _leave_plain(model: Any, point: Point) -> None:
    from diffusers.models.attention_processor import (  # noqa: PLC0415  # seconds
        AttnProcessor,
        AttnProcessor2_0,
    )

    if hasattr(model, "set_attn_processor") and point.component != "transformer":
        kind = AttnProcessor if point.attention == "eager" else AttnProcessor2_0
        model.set_attn_processor(kind())
    if point.vae_tile:
        model.enable_tiling()
        model.tile_sample_min_size = point.vae_tile
        model.tile_latent_min_size = point.vae_tile // 8
    elif point.component == "vae":
        model.disable_tiling()


def _text(model: Any, point: Point, _: torch.dtype) -> Callable[[], Any]:
    is_t5 = point.component == "text_encoder_3"
    ids = torch.zeros((point.batch, 256 if is_t5 else 77), dtype=torch.int64, device=DEVICE)
    # Of a CLIP's layers SDXL and SD 3 want the last but one, so all are kept.
    return lambda: model(ids, output_hidden_states=not is_t5)


def _denoise(model: Any, point: Point, dtype: torch.dtype) -> Callable[[], Any]:
    size = _size(point)
    inputs = architectures.denoise_inputs(model, size, dtype, DEVICE)
    if point.beside == "controlnet":
        inputs |= architectures.residuals(model, size, dtype, DEVICE)
    return lambda: model(**inputs)


def _control(model: Any, point: Point, dtype: torch.dtype) -> Callable[[], Any]:
    size = _size(point)
    inputs = architectures.denoise_inputs(model, size, dtype, DEVICE)
    shape = (size.samples, 3, point.height, point.width)
    inputs["controlnet_cond"] = torch.empty(shape, dtype=dtype, device=DEVICE)
    return lambda: model(**inputs)


def _decode(model: Any, point: Point, dtype: torch.dtype) -> Callable[[], Any]:
    latents = _size(point).latents(model.config.latent_channels, dtype, DEVICE)

    def call() -> torch.Tensor:
        made: torch.Tensor = model.decode(latents, return_dict=False)[0].float()
        return made

    return call


def _encode(model: Any, point: Point, dtype: torch.dtype) -> Callable[[], Any]:
    shape = (point.batch, 3, point.height, point.width)
    pixels = torch.empty(shape, dtype=dtype, device=DEVICE)
    return lambda: model.encode(pixels, return_dict=False)


def _size(point: Point) -> Size:
    samples = point.batch * (2 if point.guided else 1)
    return Size(width=point.width, height=point.height, samples=samples)


_STAGES: Final[Mapping[str, Callable[[Any, Point, torch.dtype], Callable[[], Any]]]] = {
    "text": _text,
    "denoise": _denoise,
    "control": _control,
    "decode": _decode,
    "encode": _encode,
}


# -- the grid -------------------------------------------------------------------------------------

SQUARES: Final = tuple((side, side) for side in (512, 768, 1024, 1536, 2048))
OTHERS: Final = ((512, 768), (832, 1216), (1344, 768), (1920, 1080), (520, 776), (72, 200))
"""Portrait, landscape, and what is no multiple of 64."""
SIZES: Final = (*SQUARES, *OTHERS)
FEW: Final = ((512, 512), (1024, 1024), (520, 776))
BLOCKS: Final = 64 * 2**20
UNETS: Final = ("sd15", "sd21", "sdxl")


def grid() -> Iterator[Point]:
    """Every point of the cached grid, each once."""
    parts = (
        _grid_vae(), _grid_denoise(), _grid_beside(), _grid_text(), _grid_others(), _grid_plain(),
    )  # fmt: skip
    yield from dict.fromkeys(point for part in parts for point in part)


def _grid_text() -> Iterator[Point]:
    for family in architectures.FAMILIES:
        for name in architectures.components_of(family):
            if name.startswith("text_encoder"):
                usual = Point(family=family, component=name, stage="text", attention="math")
                for batch, dtype in product((1, 2, 8), ("float16", "float32")):
                    yield replace(usual, batch=batch, dtype=dtype)
                yield replace(usual, attention="fused")


def _unet(family: str, size: tuple[int, int], **more: Any) -> Point:
    width, height = size
    return Point(
        family=family, component="unet", stage="denoise", width=width, height=height, guided=True,
        **more,
    )  # fmt: skip


def _grid_denoise() -> Iterator[Point]:
    for size, family in product(SIZES, UNETS):
        usual = _unet(family, size)
        yield from (usual, replace(usual, feed_forward_chunks=8), replace(usual, attention="math"))
        yield replace(usual, guided=False)
        yield replace(usual, batch=4)
    for size, family in product(FEW, UNETS):
        usual = _unet(family, size)
        yield from (replace(usual, attention="sliced"), replace(usual, dtype="float32"))
        yield replace(usual, attention="math", batch=3)
        yield replace(usual, attention="math", guided=False, dtype="float32")
        # More blocks than these are more than anybody waits for, and take no more bytes.
        yield replace(usual, attention="chunked", block_bytes=BLOCKS)
        yield replace(usual, passes=2)
        yield replace(usual, passes=2, feed_forward_chunks=8)
        yield replace(usual, feed_forward_chunks=2, batch=2)
        yield replace(usual, feed_forward_chunks=4, guided=False)
    for family, (passes, chunks) in product(UNETS, ((2, 8), (3, 1), (4, 8))):
        yield _unet(family, (512, 512), batch=4, passes=passes, feed_forward_chunks=chunks)


def _grid_others() -> Iterator[Point]:
    for side, batch, attention in product((512, 1024, 1536), (1, 2), ("fused", "math")):
        yield Point(
            family="sd35-medium", component="transformer", stage="denoise", width=side, height=side,
            batch=batch, guided=True, attention=attention,
        )  # fmt: skip
    for size, attention in product(FEW, ("fused", "math")):
        yield _unet("sdxl-refiner", size, attention=attention)
    for stage, bands in product(("decode", "encode"), (0, 32)):
        yield Point(
            family="sd35-medium", component="vae", stage=stage, width=1024, height=1024,
            vae_bands=bands,
        )  # fmt: skip


def _vae(stage: str, size: tuple[int, int], **more: Any) -> Point:
    width, height = size
    return Point(family="sdxl", component="vae", stage=stage, width=width, height=height, **more)


def _grid_vae() -> Iterator[Point]:
    for stage, size in product(("decode", "encode"), ((256, 256), *SIZES)):
        usual = _vae(stage, size)
        yield from (usual, replace(usual, batch=2), replace(usual, attention="math"))
        yield replace(usual, vae_bands=32)
    for stage, size in product(("decode", "encode"), FEW):
        usual = _vae(stage, size, attention="chunked", block_bytes=BLOCKS)
        yield from (usual, replace(usual, dtype="float32"))
        for rows in (8, 16, 64):
            yield replace(usual, vae_bands=rows)
        yield replace(usual, vae_bands=32, batch=4)
        yield replace(usual, vae_bands=32, dtype="float32")
    for size, tile, batch in product(((1024, 1024), (2048, 2048)), (256, 512), (1, 4)):
        if size[0] // tile * batch < 12:
            usual = _vae("decode", size, attention="chunked", block_bytes=BLOCKS, vae_tile=tile)
            yield replace(usual, batch=batch)
            if batch == 1:
                yield from (replace(usual, stage="encode"), replace(usual, vae_bands=32))
    yield from (_vae("decode", (4096, 4096)), _vae("encode", (4096, 4096)))


def _grid_beside() -> Iterator[Point]:
    for family, side, batch in product(("sd15", "sdxl"), (512, 1024), (1, 2)):
        usual = _unet(family, (side, side), batch=batch)
        for beside in ("controlnet", "lora-attention", "lora-all"):
            yield replace(usual, beside=beside)
        yield replace(usual, component="controlnet", stage="control")


def _grid_plain() -> Iterator[Point]:
    for size, family in product(FEW[:2], UNETS):
        for attention in ("fused", "math"):
            yield _unet(family, size, code="plain", attention=attention)
        yield _unet(family, size, code="plain", attention="eager", batch=2)
    for stage in ("decode", "encode"):
        usual = _vae(stage, (1024, 1024), code="plain")
        yield from (usual, replace(usual, attention="math", dtype="float32"))


def read(path: Path = GRID) -> dict[Point, Measured]:
    """The cached points."""
    made: dict[Point, Measured] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            made[_typed(Point, row)] = _typed(Measured, row)
    return made


def _typed(kind: Any, row: Mapping[str, str]) -> Any:
    makes: Mapping[Any, Callable[[str], Any]] = {
        int: int,
        str: str,
        bool: lambda text: text == "True",
    }
    return kind(**{field.name: makes[field.type](row[field.name]) for field in fields(kind)})


def write(points: Mapping[Point, Measured], path: Path = GRID) -> None:
    """Replace the cached points."""
    names = [field.name for kind in (Point, Measured) for field in fields(kind)]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(point) | asdict(found) for point, found in points.items())
    partial.replace(path)


def fill(points: Iterable[Point], known: Mapping[Point, Measured]) -> dict[Point, Measured]:
    """Measure what is not known, in a few processes; no other points are kept.

    What is done is written after each portion, so that little is lost when it is stopped.
    """
    wanted = list(points)
    made = {point: known[point] for point in wanted if point in known}
    missing = [point for point in wanted if point not in known]
    first = {_model_of(point): -number for number, point in enumerate(reversed(missing))}
    missing.sort(key=lambda point: first[_model_of(point)])
    portions = [missing[start : start + PORTION] for start in range(0, len(missing), PORTION)]
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as workers:
        for done in as_completed([workers.submit(_measured, portion) for portion in portions]):
            made |= done.result()
            write({point: made[point] for point in wanted if point in made})
            print(f"{len(made)} of {len(wanted)} points", file=sys.stderr)
    return made


PORTION: Final = 12
WORKERS: Final = 4


def _model_of(point: Point) -> tuple[str, ...]:
    """What it shares with others that use the same weights."""
    return point.component, point.dtype, point.family, point.beside


def _measured(points: Sequence[Point]) -> dict[Point, Measured]:
    with accountant() as here:
        return {point: here.measure(point) for point in points}


# -- the table of whole runs ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Peaks of one kind of picture in bytes, with the workspace of convolutions; fp16.

    `plain_rdna2` and `plain_rdna3` are diffusers alone, as on a card of 16 GiB; `offloaded` and
    `minimal` what sdamd plans with `--vram-mode balanced` and `minimal` for `CARD`, of 8 GiB and
    without fused attention.
    """

    family: str
    side: int
    plain_rdna2: int | None
    plain_rdna3: int | None
    offloaded: int
    minimal: int


PICTURES: Final = (("sd15", 512), ("sd15", 1024), ("sdxl", 1024), ("sdxl", 2048), ("sdxl", 4096))
CARD: Final = "RX 6600"
DENOISE_TILE: Final = 1024


def figures(pictures: Sequence[tuple[str, int]] = PICTURES) -> Iterator[Figure]:
    """Measure whole runs, which takes minutes; plain ones of 4096 pixels fit no card anyway."""
    for family, side in pictures:
        plain = [
            plain_bytes(family, side, attention) if side <= 2048 else None
            for attention in (RDNA2, RDNA3)
        ]
        yield Figure(
            family=family,
            side=side,
            plain_rdna2=plain[0],
            plain_rdna3=plain[1],
            offloaded=planned_bytes(family, side, "balanced"),
            minimal=planned_bytes(family, side, "minimal"),
        )


def plain_bytes(family: str, side: int, attention: Attention) -> int:
    """The peak of a picture by diffusers alone."""
    from scripts.vram_runs import plain_run_of  # noqa: PLC0415  # seconds

    return plain_run_of(_job(side), family, attention).bytes


def planned_bytes(family: str, side: int, mode: str) -> int:
    """The peak of a picture as sdamd plans it for `CARD` with a `--vram-mode`."""
    from scripts.vram_runs import run_of  # noqa: PLC0415  # seconds
    from sdamd.checkpoint import FAMILIES, Checkpoint, Layout  # noqa: PLC0415
    from sdamd.hardware.products import find_card  # noqa: PLC0415
    from sdamd.settings import Settings, VramMode  # noqa: PLC0415

    known = FAMILIES[family]
    checkpoint = Checkpoint(
        name=family, path=Path(), layout=Layout.FILE, family=known, dtype="float16",
        bytes=2 * known.parameters.total, prediction_type=known.prediction_type,
        parameters=known.parameters,
    )  # fmt: skip
    card, job = find_card(CARD), _job(side, tile=DENOISE_TILE if side > 2048 else 0)
    settings = Settings(home=Path(), vram_mode=VramMode(mode))
    plan = make_plan(job, card, checkpoint, settings)
    print(f"{family} {side}, {mode}: {plan.means}", file=sys.stderr)
    return run_of(plan, job, family, card_bytes=card.vram_bytes).bytes


def _job(side: int, *, tile: int | None = None) -> Job:
    return Job(
        index=0, prompt="a house by the sea", negative_prompt="", checkpoint="", width=side,
        height=side, steps=20, guidance_scale=7.0, scheduler="Euler", seed=0, upscale=1,
        denoise_tile=tile,
    )  # fmt: skip


def table(rows: Iterable[Figure]) -> Iterator[str]:
    """The figures in GiB, as lines of a table in Markdown."""
    yield "| | plain, RDNA2 | plain, RDNA3 | sdamd, model offload | sdamd minimal |"
    yield "|---|---|---|---|---|"
    for row in rows:
        sizes = (row.plain_rdna2, row.plain_rdna3, row.offloaded, row.minimal)
        cells = ("no card" if size is None else f"{size / GIB:.2f}" for size in sizes)
        yield f"| {row.family} {row.side} x {row.side} | {' | '.join(cells)} |"


# -- the command ----------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    point = commands.add_parser("point", help="one call, as JSON")
    for field in fields(Point):
        flag = f"--{field.name.replace('_', '-')}"
        if field.type is bool:
            point.add_argument(flag, action="store_true")
        else:
            required = field.name in {"family", "component", "stage"}
            default = None if required else getattr(Point, field.name, None)
            point.add_argument(flag, type=field.type, required=required, default=default)
    commands.add_parser("figures", help="whole runs, as a table in GiB: minutes")
    again = commands.add_parser("grid", help="measure what the grid lacks")
    again.add_argument("--again", action="store_true", help="measure all of it anew")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run a command; the exit status is 0, or 1 where a check failed."""
    asked = vars(_parser().parse_args(argv))
    command = asked.pop("command")
    if command == "point":
        with accountant() as here:
            print(json.dumps(asdict(here.measure(Point(**asked))), indent=2))
    elif command == "figures":
        for line in table(figures()):
            print(line, flush=True)
    elif command == "grid":
        known = read() if GRID.exists() and not asked["again"] else {}
        fill(grid(), known)
    return 0


if __name__ == "__main__":
    sys.exit(main())

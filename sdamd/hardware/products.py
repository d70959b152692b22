"""Cards as they are sold, for plans on a card that is not here."""

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sdamd.errors import BadRequest, unknown
from sdamd.hardware.gpu import ARCHITECTURES, Gpu, Kind

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What a product does at most: compute units, their clock, and GB/s of memory and bus.

    `pcie_gbs` is what copies from pinned RAM reach, 0 for an APU, which needs none.
    """

    cus: int
    ghz: float
    bandwidth_gbs: float
    pcie_gbs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A row of the table; `sizes` in GiB, `speed` None where nobody has published it."""

    arch: str
    sizes: tuple[int, ...]
    speed: Speed | None


def find_card(text: str) -> Gpu:
    """A card by name (`RX 7900 XTX`, `RX 580:4`) or by target and size (`gfx1100:24`).

    The number after the colon is GiB of memory; without it a name means its largest version. An
    APU may have any size, since the BIOS and the RAM decide.

    Raises:
        BadRequest: no such card, or no such size of it.
    """
    name, colon, size = (part.strip() for part in text.partition(":"))
    if name.casefold() in ARCHITECTURES:
        return _of_target(name.casefold(), size)
    wanted = _key(name)
    for product, row in _products().items():
        if wanted and _key(product) == wanted:
            arch, sizes = row.arch, row.sizes
            gib = _gib(size) if colon else sizes[-1]
            if ARCHITECTURES[arch].apu and 1 <= gib <= 1024:
                return _gpu(product, arch, gib)
            if gib not in sizes:
                allowed = " or ".join(map(str, sizes))
                raise BadRequest(
                    f"{product} is asked for with {size or 'no'} GiB; it was sold with {allowed}"
                )
            return _gpu(product, arch, gib)
    raise BadRequest(unknown(text, [*_products(), *ARCHITECTURES], "card"))


def _of_target(arch: str, size: str) -> Gpu:
    gib = _gib(size)
    if not 1 <= gib <= 1024:
        raise BadRequest(
            f"{arch} is asked for with {size or 'no'} GiB; allowed 1 to 1024, as {arch}:16"
        )
    return _gpu(arch, arch, gib)


def _gib(size: str) -> int:
    """The number; 0, which no card has, for anything else."""
    return int(size) if re.fullmatch(r"[0-9]{1,4}", size) else 0


def _gpu(name: str, arch: str, gib: int) -> Gpu:
    kind = Kind.APU if ARCHITECTURES[arch].apu else Kind.DISCRETE
    return Gpu(index=0, name=name, arch=arch, vram_bytes=gib * GIB, kind=kind)


def _key(name: str) -> str:
    """Names are compared without maker, series words, blanks and case: `7900xtx`."""
    return re.sub(r"amd|radeon|instinct|rx|[\s_-]", "", name.casefold())


def speed_of(name: str) -> Speed | None:
    """The speed of the product of this name, or of the first of several (`890M / 880M`)."""
    products = _products()
    for part in (name, name.removesuffix(" LP"), *name.split(" / ")):
        row = products.get(part)
        if row is not None:
            return row.speed
    return None


@cache
def _products() -> Mapping[str, Product]:
    """The products by name.

    Source: AMD's GPU specification table (2025-03) for memory and compute units; clocks (the boost
    clock), bandwidth and bus from AMD's product pages as remembered, not looked up again, so what
    follows of them is an estimate. Several sizes of one name share a row.
    """
    with Path(__file__).with_name("products.csv").open(encoding="utf-8", newline="") as file:
        return {row["name"]: _product(row) for row in csv.DictReader(file)}


def _product(row: Mapping[str, str]) -> Product:
    speed = Speed(
        cus=int(row["cus"]), ghz=float(row["ghz"]), bandwidth_gbs=float(row["bandwidth_gbs"]),
        pcie_gbs=float(row["pcie_gbs"] or 0),
    ) if row["cus"] else None  # fmt: skip
    sizes = tuple(int(n) for n in row["vram_gib"].split())
    return Product(arch=row["gfx"], sizes=sizes, speed=speed)

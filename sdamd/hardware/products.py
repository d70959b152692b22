"""Cards as they are sold, for plans on a card that is not here."""

import csv
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from sdamd.errors import BadRequest, unknown
from sdamd.hardware.gpu import ARCHITECTURES, Gpu, Kind

GIB = 2**30


def find_card(text: str) -> Gpu:
    """A card by name (`RX 7900 XTX`, `RX 580:4`) or by target and size (`gfx1100:24`).

    The number after the colon is GiB of memory; without it a name means its largest version.

    Raises:
        BadRequest: no such card, or no such size of it.
    """
    name, colon, size = (part.strip() for part in text.partition(":"))
    if name.casefold() in ARCHITECTURES:
        return _of_target(name.casefold(), size)
    wanted = _key(name)
    for product, (arch, sizes) in _products().items():
        if wanted and _key(product) == wanted:
            gib = _gib(size) if colon else sizes[-1]
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


@cache
def _products() -> Mapping[str, tuple[str, tuple[int, ...]]]:
    """Target and sizes in GiB by name. Source: AMD's GPU specification table, 2025-03."""
    with Path(__file__).with_name("products.csv").open(encoding="utf-8", newline="") as file:
        return {
            row["name"]: (row["gfx"], tuple(int(n) for n in row["vram_gib"].split()))
            for row in csv.DictReader(file)
        }

"""What a GPU is to sdamd, and the table of AMD architectures and cards."""

from collections.abc import Mapping
from csv import DictReader
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import MappingProxyType

AMD = 0x1002
"""The PCI vendor id of AMD's graphics cards."""

MI300A = 0x74A0
"""The PCI device id of the one APU whose architecture is that of discrete cards too."""


class Kind(StrEnum):
    """How a device holds its memory, which decides how much of it can be used."""

    DISCRETE = "discrete"
    APU = "apu"
    CPU = "cpu"


class ArchSource(StrEnum):
    """Where the gfx target was read; only the kernel's own number (`KFD`) is not a guess."""

    KFD = "kfd"
    RUNTIME = "rocminfo"
    IP_DISCOVERY = "ip discovery table"
    DEVICE_ID = "device-id table"


class FusedAttention(StrEnum):
    """Whether torch's ROCm builds hold fused attention kernels (AOTriton) for an architecture.

    `EXPERIMENTAL` needs `TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1`; with `NO`, scaled dot
    product attention materialises the whole score matrix.
    """

    YES = "yes"
    EXPERIMENTAL = "experimental flag"
    NO = "no"


class Fp16(StrEnum):
    """What half precision brings: on `STORAGE` hardware it saves memory and no time."""

    STORAGE = "the rate of float32; halves memory"
    PACKED = "twice the rate of float32"
    MATRIX = "matrix units"


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One gfx target, as far as it decides how a model runs.

    `wave` is the width of a wavefront in lanes, `simd_per_cu` the divisor from the kernel's
    SIMD count to compute units. `fp8` is about arithmetic, not storage (gfx942 has the FNUZ format,
    newer ones OCP). `rocm` says whether a ROCm wheel that can be had now, from
    PyTorch or from AMD, holds kernels for it. `override` is the `HSA_OVERRIDE_GFX_VERSION` that
    lets it run the kernels of a sibling with the same instruction set, for wheels that lack
    its own; an empty string where none is known to work.

    Source: AMD's GPU specification table, TheRock's SUPPORTED_GPUS, the arch lists of PyTorch's
    ROCm builds and of AOTriton (2026-08).
    """

    gfx: str
    generation: str
    chip: str
    wave: int
    simd_per_cu: int
    apu: bool
    fp16: Fp16
    bf16: bool
    fp8: bool
    fused_attention: FusedAttention
    rocm: bool
    override: str = ""

    @property
    def matrix(self) -> bool:
        """Whether it has matrix units (MFMA or WMMA)."""
        return self.fp16 is Fp16.MATRIX

    @property
    def target_version(self) -> int:
        """The number that the kernel writes for it: 110001 for gfx1101."""
        return encode_target(self.gfx)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device that could run a checkpoint, as the operating system describes it.

    `index` counts as HIP counts without a visibility mask (KFD order) on Linux, and as DXGI
    counts on Windows (the `device_id` of DirectML); -1 for a card that no runtime lists.
    `arch` is the gfx target (`gfx1100`), or an empty string where the platform does not tell.
    `vram_bytes` is the card's own memory, 0 where nothing tells it; an APU's `gtt_bytes` is
    the part of the RAM that it can map, and its `bank_bytes` what KFD lists as its memory, which is
    what HIP counts. `hip_bytes` is what HIP itself said, 0 before anybody asked. `uuid` is what
    `ROCR_VISIBLE_DEVICES` takes in the place of an index. `device_id` and `revision` are the PCI
    numbers.
    """

    index: int
    name: str
    arch: str
    vram_bytes: int
    kind: Kind
    gtt_bytes: int = 0
    bank_bytes: int = 0
    hip_bytes: int = 0
    compute_units: int = 0
    wave: int = 0
    node: int | None = None
    pci: str = ""
    device_id: int = 0
    revision: int = 0
    card: str = ""
    render: str = ""
    uuid: str = ""
    driver: str = ""
    arch_source: ArchSource | None = None

    @property
    def is_apu(self) -> bool:
        """Whether it shares the memory of the CPU."""
        return self.kind is Kind.APU

    @property
    def usable_bytes(self) -> int:
        """The memory that a runtime can hand out: an APU's is the larger of its two pools."""
        return max(self.vram_bytes, self.gtt_bytes) if self.is_apu else self.vram_bytes

    @property
    def architecture(self) -> Architecture | None:
        """The row of its gfx target, or nothing for one that the table does not know."""
        return ARCHITECTURES.get(self.arch)

    def to_dict(self) -> dict[str, str | int | bool | None]:
        """Return the machine-readable form, for `--json`; PCI numbers as hexadecimal text."""
        return {
            "gfx": self.arch,
            "gfx_source": None if self.arch_source is None else str(self.arch_source),
            "name": self.name,
            "vram_bytes": self.vram_bytes,
            "gtt_bytes": self.gtt_bytes,
            "usable_bytes": self.usable_bytes,
            "is_apu": self.is_apu,
            "cus": self.compute_units,
            "wave": self.wave,
            "hip_index": self.index,
            "node": self.node,
            "pci": self.pci,
            "device_id": f"0x{self.device_id:04x}",
            "revision": f"0x{self.revision:02x}",
            "card": self.card,
            "render": self.render,
            "uuid": self.uuid,
            "driver": self.driver,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A product as PCI numbers tell it; `revision` is None for every revision of the device."""

    device_id: int
    revision: int | None
    arch: str
    name: str


def decode_target(version: int) -> str:
    """Return the gfx name of the kernel's `gfx_target_version`, or an empty string for a CPU's 0.

    The number is major * 10000 + minor * 100 + stepping in decimal, while the name writes minor
    and stepping as hexadecimal digits: 90010 is gfx90a, 90402 is gfx942.
    Source: Linux, drivers/gpu/drm/amd/amdkfd/kfd_device.c.
    """
    major, rest = divmod(version, 10000)
    minor, stepping = divmod(rest, 100)
    if version <= 0 or major == 0 or minor > 15 or stepping > 15:
        return ""
    return f"gfx{major}{minor:x}{stepping:x}"


def encode_target(gfx: str) -> int:
    """Return the `gfx_target_version` of a gfx name.

    Raises:
        ValueError: it is not `gfx`, a decimal major and two hexadecimal digits.
    """
    digits = gfx.removeprefix("gfx")
    if digits == gfx or len(digits) < 3 or not digits.isascii():
        raise ValueError(f"gfx target is {gfx!r}; allowed are names like gfx1100")
    major, minor, stepping = int(digits[:-2]), int(digits[-2], 16), int(digits[-1], 16)
    return major * 10000 + minor * 100 + stepping


def arch_of_device(device_id: int) -> str:
    """Return the gfx target of a PCI device id, or an empty string for one that is not known.

    Source: rocminfo, libhsakmt and AMD's rocm-cli (2025-08 to 2026-08).
    """
    for row in _cards().get(device_id, ()):
        return row.arch
    for first, last, gfx in _DEVICE_RANGES:
        if first <= device_id <= last:
            return gfx
    return ""


def name_of_device(device_id: int, revision: int | None, arch: str) -> str:
    """Return the product's name, or the chip's where the PCI numbers stand for several."""
    rows = _cards().get(device_id, ())
    for row in rows:
        if revision is not None and row.revision == revision:
            return row.name
    names = {row.name for row in rows if row.revision is None} or {row.name for row in rows}
    if len(names) == 1:
        return names.pop()
    known = ARCHITECTURES.get(arch or arch_of_device(device_id))
    return f"Radeon ({known.chip})" if known else f"AMD GPU {AMD:04x}:{device_id:04x}"


def kind_of_device(device_id: int, arch: str) -> Kind | None:
    """Whether it is an APU, or nothing where neither number is known."""
    if device_id == MI300A:
        return Kind.APU
    known = ARCHITECTURES.get(arch)
    if known is None:
        return None
    return Kind.APU if known.apu else Kind.DISCRETE


@cache
def _cards() -> Mapping[int, tuple[Card, ...]]:
    """Return the rows of cards.csv by device id. Source: libdrm's amdgpu.ids and pci.ids (2026)."""
    cards: dict[int, list[Card]] = {}
    with Path(__file__).with_name("cards.csv").open(encoding="utf-8", newline="") as file:
        for row in DictReader(file):
            card = Card(
                device_id=int(row["device"], 16),
                revision=None if row["revision"] == "*" else int(row["revision"], 16),
                arch=row["gfx"],
                name=row["name"],
            )
            cards.setdefault(card.device_id, []).append(card)
    return {device_id: tuple(rows) for device_id, rows in cards.items()}


def _arch(
    gfx: str,
    generation: str,
    chip: str,
    fp16: Fp16,
    fused_attention: FusedAttention,
    override: str = "",
    *,
    apu: bool = False,
    fp8: bool = False,
    rocm: bool = True,
) -> Architecture:
    """One row; what follows from the generation is not written twice."""
    rdna = generation.startswith("RDNA")
    return Architecture(
        gfx=gfx,
        generation=generation,
        chip=chip,
        wave=32 if rdna else 64,
        simd_per_cu=2 if rdna else 4,
        apu=apu,
        fp16=fp16,
        # Matrix units came with bfloat16; nothing older has a usable path for it.
        bf16=fp16 is Fp16.MATRIX,
        fp8=fp8,
        fused_attention=fused_attention,
        rocm=rocm,
        override=override,
    )


_YES, _FLAG, _NO = FusedAttention.YES, FusedAttention.EXPERIMENTAL, FusedAttention.NO
_STORAGE, _PACKED, _MATRIX = Fp16.STORAGE, Fp16.PACKED, Fp16.MATRIX

# Overrides that only hang (gfx90x APUs), that only worked with torch 1.13 (gfx101x) or that
# nobody confirmed (gfx1152, gfx1153) are left out on purpose.
_ROWS = (
    _arch("gfx803", "GCN4", "Polaris / Fiji", _STORAGE, _NO, rocm=False),
    _arch("gfx900", "GCN5", "Vega 10", _PACKED, _NO),
    _arch("gfx902", "GCN5", "Raven", _PACKED, _NO, apu=True, rocm=False),
    _arch("gfx906", "GCN5", "Vega 20", _PACKED, _NO),
    _arch("gfx908", "CDNA1", "MI100", _MATRIX, _NO),
    _arch("gfx90a", "CDNA2", "MI200", _MATRIX, _YES),
    _arch("gfx90c", "GCN5", "Renoir / Cezanne", _PACKED, _NO, apu=True, rocm=False),
    _arch("gfx942", "CDNA3", "MI300", _MATRIX, _YES, fp8=True),
    _arch("gfx950", "CDNA4", "MI350", _MATRIX, _YES, fp8=True),
    _arch("gfx1010", "RDNA1", "Navi 10", _PACKED, _NO),
    _arch("gfx1011", "RDNA1", "Navi 12", _PACKED, _NO),
    _arch("gfx1012", "RDNA1", "Navi 14", _PACKED, _NO),
    _arch("gfx1013", "RDNA1", "BC-250", _PACKED, _NO, apu=True, rocm=False),
    _arch("gfx1030", "RDNA2", "Navi 21", _PACKED, _NO),
    _arch("gfx1031", "RDNA2", "Navi 22", _PACKED, _NO, "10.3.0"),
    _arch("gfx1032", "RDNA2", "Navi 23", _PACKED, _NO, "10.3.0"),
    _arch("gfx1033", "RDNA2", "Van Gogh", _PACKED, _NO, "10.3.0", apu=True),
    _arch("gfx1034", "RDNA2", "Navi 24", _PACKED, _NO, "10.3.0"),
    _arch("gfx1035", "RDNA2", "Rembrandt", _PACKED, _NO, "10.3.0", apu=True),
    _arch("gfx1036", "RDNA2", "Raphael / Granite Ridge", _PACKED, _NO, "10.3.0", apu=True),
    _arch("gfx1100", "RDNA3", "Navi 31", _MATRIX, _FLAG),
    _arch("gfx1101", "RDNA3", "Navi 32", _MATRIX, _FLAG, "11.0.0"),
    _arch("gfx1102", "RDNA3", "Navi 33", _MATRIX, _FLAG, "11.0.0"),
    _arch("gfx1103", "RDNA3", "Phoenix / Hawk Point", _MATRIX, _FLAG, "11.0.0", apu=True),
    _arch("gfx1150", "RDNA3.5", "Strix Point", _MATRIX, _FLAG, "11.0.0", apu=True),
    _arch("gfx1151", "RDNA3.5", "Strix Halo", _MATRIX, _FLAG, "11.0.0", apu=True),
    _arch("gfx1152", "RDNA3.5", "Krackan", _MATRIX, _FLAG, apu=True),
    _arch("gfx1153", "RDNA3.5", "Krackan 2", _MATRIX, _FLAG, apu=True),
    _arch("gfx1200", "RDNA4", "Navi 44", _MATRIX, _YES, fp8=True),
    _arch("gfx1201", "RDNA4", "Navi 48", _MATRIX, _YES, fp8=True),
)

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType({row.gfx: row for row in _ROWS})
"""Every AMD architecture that sdamd knows, by gfx target."""

# Device ids that are reserved for a chip, where cards.csv does not list the product.
_DEVICE_RANGES = (
    (0x67C0, 0x67DF, "gfx803"),
    (0x67E0, 0x67FF, "gfx803"),
    (0x694C, 0x694F, "gfx803"),
    (0x6980, 0x699F, "gfx803"),
    (0x730F, 0x730F, "gfx803"),
    (0x6860, 0x687F, "gfx900"),
    (0x66A0, 0x66AF, "gfx906"),
    (0x7388, 0x7390, "gfx908"),
    (0x7408, 0x7410, "gfx90a"),
    (0x74A0, 0x74BD, "gfx942"),
    (0x7310, 0x731F, "gfx1010"),
    (0x7360, 0x7362, "gfx1011"),
    (0x7340, 0x734F, "gfx1012"),
    (0x73A0, 0x73BF, "gfx1030"),
    (0x73C0, 0x73DF, "gfx1031"),
    (0x73E0, 0x73EF, "gfx1032"),
    (0x73F0, 0x73F0, "gfx1102"),
    (0x73FF, 0x73FF, "gfx1032"),
    (0x7420, 0x743F, "gfx1034"),
    (0x7448, 0x745E, "gfx1100"),
)

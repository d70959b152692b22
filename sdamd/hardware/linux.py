"""Finds AMD GPUs in the files of a Linux kernel: KFD for compute, DRM for names and memory.

Everything is read below a root, so that a recorded machine can stand in for this one. No tool is
asked, since `lspci`, `rocminfo` and `amd-smi` are missing on many healthy machines.
"""

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sdamd.hardware.gpu import (
    AMD,
    ARCHITECTURES,
    ArchSource,
    Gpu,
    Kind,
    arch_of_device,
    decode_target,
    kind_of_device,
    name_of_device,
)

log = logging.getLogger(__name__)

Access = Callable[[Path, int], bool]
"""What `os.access` does: may this process open the path in this mode?"""

KFD_NODES = "sys/class/kfd/kfd/topology/nodes"
_DRM = "sys/class/drm"
_PCI = "sys/bus/pci/devices"

_GC_PARTS = ("major", "minor", "revision")

# A display, VGA or 3D controller, or a processing accelerator (Instinct).
_GPU_CLASSES = (0x03, 0x12)

# Hardware IP versions that differ from the instruction set's version, or that several chips
# share. Source: Linux, drivers/gpu/drm/amd/amdkfd/kfd_device.c.
_GC_TO_GFX = {
    (9, 4, 3): "gfx942",
    (9, 4, 4): "gfx942",
    (9, 5, 0): "gfx950",
    (10, 3, 1): "gfx1033",
    (10, 3, 2): "gfx1031",
    (10, 3, 3): "gfx1035",
    (10, 3, 4): "gfx1032",
    (10, 3, 5): "gfx1034",
    (10, 3, 7): "gfx1036",
    (11, 0, 1): "gfx1103",
    (11, 0, 3): "gfx1101",
    (11, 0, 4): "gfx1103",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the kernel's files tell.

    `gpus` are in KFD order, which is the order of HIP. `unlisted` are AMD cards that have a
    graphics driver but no place in KFD, so that no ROCm program can use them.
    """

    gpus: tuple[Gpu, ...]
    unlisted: tuple[Gpu, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PciGpu:
    """An AMD GPU as the bus lists it; `driver` is empty where none has claimed it."""

    pci: str
    name: str
    driver: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """A GPU node of KFD; `bank_bytes` is the video memory of its memory banks."""

    number: int
    properties: Mapping[str, int]
    bank_bytes: int

    @property
    def pci(self) -> str:
        """Its PCI address; empty where the kernel does not tell."""
        if "location_id" not in self.properties:
            return ""
        place = self.properties["location_id"]
        domain = self.properties.get("domain", 0)
        return f"{domain:04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7:x}"

    @property
    def uuid(self) -> str:
        """How `ROCR_VISIBLE_DEVICES` may name it; empty for a GPU without a number."""
        number = self.properties.get("unique_id", 0)
        return f"GPU-{number:016x}" if number else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Card:
    """An AMD card of DRM. `gc` is the version of its graphics core hardware."""

    card: str
    pci: str
    device_id: int
    revision: int | None
    driver: str
    vram_bytes: int
    gtt_bytes: int
    gc: tuple[int, int, int] | None
    render: str


def read_gpus(root: Path) -> Found:
    """Find the GPUs of the machine whose root directory is `root`."""
    notes: list[str] = []
    cards = _read_cards(root)
    nodes = _read_nodes(root, notes)
    pairs = [(node, _card_of(node, nodes, cards)) for node in nodes]
    gpus = tuple(_gpu_of_node(hip, *pair) for hip, pair in enumerate(pairs))
    notes += [
        f"{gpu.name}: the kernel does not tell its architecture; {gpu.arch or 'nothing'} is a "
        f"guess from the {gpu.arch_source or 'tables'}"
        for gpu in gpus
        if gpu.arch_source is not ArchSource.KFD
    ]
    listed = {card.card for _, card in pairs if card is not None}
    unlisted = [card for card in cards if card.card not in listed]
    usable = tuple(_gpu_of_card(card) for card in unlisted if card.driver in {"amdgpu", ""})
    notes += [
        f"{name_of_device(card.device_id, card.revision, '')} at {card.pci or card.card} is bound "
        f"to the driver {card.driver}, so ROCm cannot use it"
        for card in unlisted
        if card.driver not in {"amdgpu", ""}
    ]
    notes += [
        f"{gpu.name} at {gpu.pci or gpu.card} has a display driver but the kernel's compute driver "
        "(KFD) does not list it, so ROCm cannot use it"
        for gpu in usable
    ]
    if not gpus and not cards:
        notes += _pci_notes(root)
    return Found(gpus=gpus, unlisted=usable, notes=tuple(notes))


def parse_properties(text: str) -> dict[str, int]:
    """Return the `key value` lines of a KFD file; lines of another shape are left out."""
    properties: dict[str, int] = {}
    for line in text.splitlines():
        key, _, value = line.strip().partition(" ")
        number = _decimal(value)
        if key and number is not None:
            properties[key] = number
    return properties


def is_container(root: Path) -> bool:
    """Whether it is the inside of a Docker or Podman container."""
    return (root / ".dockerenv").exists() or (root / "run/.containerenv").exists()


def device_notes(root: Path, access: Access) -> tuple[str, ...]:
    """Say what keeps this process from the device files that a GPU in KFD needs."""
    kfd = root / "dev/kfd"
    inside = " in this container" if is_container(root) else ""
    absent = [
        str(Path("/") / name)
        for name, present in (
            ("dev/kfd", kfd.exists()),
            ("dev/dri", any((root / "dev/dri").glob("renderD*"))),
        )
        if not present
    ]
    if absent:
        needed = "; start it with --device=/dev/kfd --device=/dev/dri" if inside else ""
        return (f"{' and '.join(absent)} cannot be found{inside}, which ROCm needs{needed}",)
    if not access(kfd, os.R_OK | os.W_OK):
        return (
            f"this process may not open /dev/kfd for reading and writing{inside}; it belongs to "
            f"the group with number {kfd.stat().st_gid}",
        )
    return ()


def read_text(path: Path) -> str:
    """Return a file's text, stripped, or an empty string if it cannot be read."""
    try:
        return path.read_bytes().decode("utf-8", "replace").strip()
    except OSError as error:
        log.debug("%s: %s", path, error)
        return ""


def _decimal(text: str) -> int | None:
    text = text.strip()
    # No kernel number has more digits, and int() refuses thousands of them with an error.
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else None


def _hexadecimal(path: Path) -> int | None:
    text = read_text(path)
    return int(text, 16) if re.fullmatch(r"0x[0-9a-fA-F]{1,8}", text) else None


def read_number(path: Path) -> int | None:
    """Return the decimal number that a file holds, or None."""
    return _decimal(read_text(path))


def _bytes(path: Path) -> int:
    return read_number(path) or 0


def _numbered(folder: Path, prefix: str) -> list[tuple[int, Path]]:
    """Return the entries called prefix and a number, by number: card2 comes before card10."""
    try:
        names = os.listdir(folder)  # noqa: PTH208 - a missing folder raises here, not while reading
    except OSError:
        return []
    pattern = re.compile(rf"{prefix}([0-9]{{1,9}})")
    return sorted((int(m[1]), folder / m[0]) for m in map(pattern.fullmatch, names) if m)


def _read_nodes(root: Path, notes: list[str]) -> list[_Node]:
    nodes = []
    for number, folder in _numbered(root / KFD_NODES, ""):
        properties = parse_properties(read_text(folder / "properties"))
        if not properties:
            # A container without rights on the device: ROCr skips the node as well, so it does
            # not count in the numbering either.
            notes.append(f"KFD node {number} cannot be read and is skipped")
            continue
        computes = properties.get("simd_count") or properties.get("gfx_target_version")
        if properties.get("vendor_id") == AMD and computes:
            bank_bytes = _bank_bytes(folder)
            nodes.append(_Node(number=number, properties=properties, bank_bytes=bank_bytes))
    return nodes


def _bank_bytes(folder: Path) -> int:
    """Return the size of the frame buffer heaps, visible to the CPU (1) or not (2)."""
    banks = [
        parse_properties(read_text(bank / "properties"))
        for _, bank in _numbered(folder / "mem_banks", "")
    ]
    return sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in {1, 2})


def _read_cards(root: Path) -> list[_Card]:
    folders = [folder for _, folder in _numbered(root / _DRM, "card")]
    renders = {
        address: folder.name
        for _, folder in _numbered(root / _DRM, "renderD")
        if (address := _uevent(folder / "device").get("PCI_SLOT_NAME"))
    }
    return [
        _read_card(folder, renders)
        for folder in folders
        if _hexadecimal(folder / "device/vendor") == AMD and _is_gpu_class(folder / "device/class")
    ]


def _is_gpu_class(path: Path) -> bool:
    device_class = _hexadecimal(path)
    return device_class is None or device_class >> 16 in _GPU_CLASSES


def _read_card(folder: Path, renders: Mapping[str, str]) -> _Card:
    device = folder / "device"
    uevent = _uevent(device)
    pci = uevent.get("PCI_SLOT_NAME", "")
    gc = [_decimal(read_text(device / "ip_discovery/die/0/GC/0" / part)) for part in _GC_PARTS]
    major, minor, revision = gc
    known = major is not None and minor is not None and revision is not None
    return _Card(
        card=folder.name,
        pci=pci,
        device_id=_hexadecimal(device / "device") or 0,
        revision=_hexadecimal(device / "revision"),
        driver=uevent.get("DRIVER", ""),
        vram_bytes=_bytes(device / "mem_info_vram_total"),
        gtt_bytes=_bytes(device / "mem_info_gtt_total"),
        gc=(major or 0, minor or 0, revision or 0) if known else None,
        render=renders.get(pci, ""),
    )


def _uevent(device: Path) -> dict[str, str]:
    lines = read_text(device / "uevent").splitlines()
    return {key: value for key, _, value in (line.partition("=") for line in lines)}


def _card_of(node: _Node, nodes: Sequence[_Node], cards: Sequence[_Card]) -> _Card | None:
    """Find the card of a KFD node: by address, else by the only pair with the same device id.

    The partitions of an Instinct card count up in the function of the address, although the bus
    has function 0 alone.
    """
    for address in (node.pci, f"{node.pci[:-1]}0"):
        match = next((card for card in cards if card.pci and card.pci == address), None)
        if match is not None:
            return match
    device_id = node.properties.get("device_id")
    alike = [card for card in cards if card.device_id == device_id and not card.pci]
    twins = [other for other in nodes if other.properties.get("device_id") == device_id]
    return alike[0] if len(alike) == len(twins) == 1 else None


def _gpu_of_node(index: int, node: _Node, card: _Card | None) -> Gpu:
    properties = node.properties
    device_id = properties.get("device_id", 0)
    arch = decode_target(properties.get("gfx_target_version", 0))
    source: ArchSource | None = ArchSource.KFD
    if not arch:
        arch, source = _guess_arch(device_id, card.gc if card else None)
    kind = kind_of_device(device_id, arch) or _kind_by_memory(node, card)
    wave = properties.get("wave_front_size", 0) or _wave_of(arch)
    minor = properties.get("drm_render_minor")
    gpu = Gpu(
        index=index,
        name=name_of_device(device_id, card.revision if card else None, arch),
        arch=arch,
        arch_source=source,
        kind=kind,
        vram_bytes=node.bank_bytes or (card.vram_bytes if card else 0),
        compute_units=properties.get("simd_count", 0) // _simd_per_cu(properties, arch, wave),
        wave=wave,
        node=node.number,
        pci=node.pci or (card.pci if card else ""),
        device_id=device_id,
        revision=(card.revision or 0) if card else 0,
        card=card.card if card else "",
        render=f"renderD{minor}" if minor else (card.render if card else ""),
        uuid=node.uuid,
        driver=card.driver if card else "",
    )
    if kind is not Kind.APU:
        return gpu
    # An APU's memory bank in KFD is the RAM that it can map; the part that the BIOS set aside
    # is in DRM alone.
    return replace(
        gpu,
        vram_bytes=card.vram_bytes if card else 0,
        gtt_bytes=(card.gtt_bytes if card else 0) or node.bank_bytes,
        bank_bytes=node.bank_bytes,
    )


def _gpu_of_card(card: _Card) -> Gpu:
    arch, source = _guess_arch(card.device_id, card.gc)
    kind = kind_of_device(card.device_id, arch) or Kind.DISCRETE
    return Gpu(
        index=-1,
        name=name_of_device(card.device_id, card.revision, arch),
        arch=arch,
        arch_source=source,
        kind=kind,
        vram_bytes=card.vram_bytes,
        gtt_bytes=card.gtt_bytes if kind is Kind.APU else 0,
        wave=_wave_of(arch),
        pci=card.pci,
        device_id=card.device_id,
        revision=card.revision or 0,
        card=card.card,
        render=card.render,
        driver=card.driver,
    )


def _guess_arch(device_id: int, gc: tuple[int, int, int] | None) -> tuple[str, ArchSource | None]:
    """Guess the architecture without the kernel's own number; return it with its source."""
    arch = arch_of_device(device_id)
    if arch:
        return arch, ArchSource.DEVICE_ID
    if gc is None:
        return "", None
    major, minor, revision = gc
    arch = _GC_TO_GFX.get(gc) or decode_target(major * 10000 + minor * 100 + revision)
    return (arch, ArchSource.IP_DISCOVERY) if arch in ARCHITECTURES else ("", None)


def _kind_by_memory(node: _Node, card: _Card | None) -> Kind:
    """Call it an APU if KFD counts far more memory than the carve-out: no table knows it."""
    shares = card is not None and 0 < 2 * card.vram_bytes < node.bank_bytes
    return Kind.APU if shares else Kind.DISCRETE


def _wave_of(arch: str) -> int:
    known = ARCHITECTURES.get(arch)
    return known.wave if known else 0


def _simd_per_cu(properties: Mapping[str, int], arch: str, wave: int) -> int:
    known = ARCHITECTURES.get(arch)
    fallback = known.simd_per_cu if known else (4 if wave == 64 else 2)
    return properties.get("simd_per_cu", 0) or fallback


def _pci_notes(root: Path) -> list[str]:
    """AMD GPUs on the bus that no driver has claimed."""
    return [
        f"{gpu.name} at {gpu.pci} is "
        f"{f'bound to the driver {gpu.driver}' if gpu.driver else 'without a driver'}, "
        "so ROCm cannot use it"
        for gpu in read_pci_gpus(root)
    ]


def read_pci_gpus(root: Path) -> tuple[PciGpu, ...]:
    """Find the AMD GPUs of the PCI bus; a laptop's card may be a 3D or a display controller."""
    try:
        addresses = sorted(os.listdir(root / _PCI))  # noqa: PTH208 - as in _numbered
    except OSError:
        return ()
    devices = (root / _PCI / address for address in addresses)
    return tuple(
        PciGpu(
            pci=device.name,
            name=name_of_device(
                _hexadecimal(device / "device") or 0, _hexadecimal(device / "revision"), ""
            ),
            driver=_uevent(device).get("DRIVER", ""),
        )
        for device in devices
        if _hexadecimal(device / "vendor") == AMD
        and (_hexadecimal(device / "class") or 0) >> 16 in _GPU_CLASSES
    )

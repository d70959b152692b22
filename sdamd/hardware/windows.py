"""Finds AMD GPUs in what Windows tells: adapters from DXGI, sizes and drivers from the registry.

This module is the pure part, from readings to GPUs; `dxgi.py` takes the readings.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sdamd.hardware.gpu import (
    AMD,
    ARCHITECTURES,
    ArchSource,
    Gpu,
    Kind,
    arch_of_device,
    kind_of_device,
    name_of_device,
)

MEMORY_SIZE = "HardwareInformation.qwMemorySize"
"""The registry's 64-bit size; its 32-bit neighbour and WMI's AdapterRAM stop near 4 GiB."""

_PCI_ID = re.compile(
    r"VEN_(?P<vendor>[0-9A-F]{4})&DEV_(?P<device>[0-9A-F]{4})(?:.*?&REV_(?P<revision>[0-9A-F]{2}))?",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One adapter as DXGI describes it, in the order of DXGI (and so of DirectML).

    `luid` identifies the adapter until the next restart; DXGI may list one twice.
    """

    description: str
    vendor_id: int
    device_id: int
    revision: int
    dedicated_bytes: int
    shared_bytes: int
    luid: int
    software: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverKey:
    """One display driver's registry key; `memory_bytes` is 0 where the value is missing."""

    vendor_id: int
    device_id: int
    revision: int | None
    memory_bytes: int
    driver_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """Everything that is read from a Windows machine."""

    adapters: Sequence[Adapter]
    drivers: Sequence[DriverKey] = ()


def gpus_from_readings(readings: Readings) -> tuple[Gpu, ...]:
    """Return the AMD GPUs, each with the `device_id` that DirectML knows it by as its index."""
    gpus: list[Gpu] = []
    seen: set[int] = set()
    for index, adapter in enumerate(readings.adapters):
        if adapter.vendor_id != AMD or adapter.software or adapter.luid in seen:
            continue
        seen.add(adapter.luid)
        gpus.append(_gpu(index, adapter, _drivers_of(adapter, readings.drivers)))
    return tuple(gpus)


def parse_driver_key(values: Mapping[str, object]) -> DriverKey | None:
    """Read a key of the display class; return nothing for one that is not of a PCI card."""
    match = _PCI_ID.search(str(values.get("MatchingDeviceId", "")))
    if match is None:
        return None
    size = values.get(MEMORY_SIZE, 0)
    return DriverKey(
        vendor_id=int(match["vendor"], 16),
        device_id=int(match["device"], 16),
        revision=int(match["revision"], 16) if match["revision"] else None,
        memory_bytes=_size(size),
        driver_version=str(values.get("DriverVersion", "")),
    )


def _size(value: object) -> int:
    """Read a size in the registry: a number, or little-endian bytes from some drivers."""
    if isinstance(value, bytes):
        return int.from_bytes(value[:8], "little")
    return value if isinstance(value, int) and value > 0 else 0


def _drivers_of(adapter: Adapter, drivers: Iterable[DriverKey]) -> list[DriverKey]:
    """Return the keys of the same product; keys of cards that were taken out may be among them."""
    return [
        key
        for key in drivers
        if (key.vendor_id, key.device_id) == (adapter.vendor_id, adapter.device_id)
        and key.revision in {None, adapter.revision}
    ]


def _gpu(index: int, adapter: Adapter, drivers: Sequence[DriverKey]) -> Gpu:
    arch = arch_of_device(adapter.device_id)
    known = ARCHITECTURES.get(arch)
    # The adapter's own figure is for this very card. Keys cannot be told apart where two cards
    # of one product differ in size, so the smallest is the one that is safe to plan with.
    sizes = [key.memory_bytes for key in drivers if key.memory_bytes]
    vram_bytes = adapter.dedicated_bytes or min(sizes, default=0)
    kind = kind_of_device(adapter.device_id, arch) or _kind_by_memory(vram_bytes)
    return Gpu(
        index=index,
        name=_name(adapter, arch),
        arch=arch,
        arch_source=ArchSource.DEVICE_ID if arch else None,
        kind=kind,
        vram_bytes=vram_bytes,
        gtt_bytes=adapter.shared_bytes if kind is Kind.APU else 0,
        wave=known.wave if known else 0,
        device_id=adapter.device_id,
        revision=adapter.revision,
        driver=next((key.driver_version for key in drivers if key.driver_version), ""),
    )


def _name(adapter: Adapter, arch: str) -> str:
    """Return the product by its PCI numbers, else as its driver calls it."""
    if arch or not adapter.description:
        return name_of_device(adapter.device_id, adapter.revision, arch)
    return adapter.description


def _kind_by_memory(vram_bytes: int) -> Kind:
    """Call it an APU if it sets aside less than 1.5 GiB: no table knows it."""
    return Kind.APU if 0 < vram_bytes < 3 * 2**29 else Kind.DISCRETE

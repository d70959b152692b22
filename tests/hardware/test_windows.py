import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sdamd.hardware.gpu import Kind
from sdamd.hardware.windows import (
    Adapter,
    DriverKey,
    Readings,
    gpus_from_readings,
    parse_driver_key,
)

GIB = 2**30


def adapter(
    device_id: int,
    revision: int = 0,
    dedicated: int = 0,
    *,
    shared: int = 16 * GIB,
    vendor_id: int = 0x1002,
    luid: int | None = None,
    software: bool = False,
    description: str = "",
) -> Adapter:
    return Adapter(
        description=description,
        vendor_id=vendor_id,
        device_id=device_id,
        revision=revision,
        dedicated_bytes=dedicated,
        shared_bytes=shared,
        luid=device_id if luid is None else luid,
        software=software,
    )


def driver(
    device_id: int, memory_bytes: int, revision: int | None = None, version: str = ""
) -> DriverKey:
    return DriverKey(
        vendor_id=0x1002,
        device_id=device_id,
        revision=revision,
        memory_bytes=memory_bytes,
        driver_version=version,
    )


@pytest.fixture
def drivers(reports: Path) -> list[DriverKey]:
    keys = json.loads((reports / "windows-registry.json").read_text(encoding="utf-8"))
    parsed = [parse_driver_key(values) for values in keys.values() if isinstance(values, dict)]
    return [key for key in parsed if key is not None]


def test_the_registry_is_read_without_its_foreign_keys(drivers: list[DriverKey]) -> None:
    assert drivers == [
        driver(0x744C, 25753026560, 0xC8, "32.0.21025.1024"),
        driver(0x164E, 536870912),
    ]


def test_the_index_is_directmls_and_foreign_adapters_count(drivers: list[DriverKey]) -> None:
    """A27: the order is DXGI's, in which an iGPU may be first."""
    readings = Readings(
        adapters=[
            adapter(0x164E, 0xC1, 512 * 2**20),
            adapter(0x2684, 0xA1, 24 * GIB, vendor_id=0x10DE),
            adapter(0x744C, 0xC8, 25 * 10**9),
            adapter(0x8C, 0, 0, vendor_id=0x1414, software=True),
        ],
        drivers=drivers,
    )
    igpu, card = gpus_from_readings(readings)
    assert (igpu.index, igpu.kind, igpu.gtt_bytes) == (0, Kind.APU, 16 * GIB)
    assert (card.index, card.kind, card.name) == (2, Kind.DISCRETE, "Radeon RX 7900 XTX")
    assert (card.arch, card.driver, card.vram_bytes) == ("gfx1100", "32.0.21025.1024", 25 * 10**9)


@pytest.mark.parametrize(
    ("dedicated", "sizes", "vram"),
    [
        (12 * GIB, [12 * GIB], 12 * GIB),
        (12 * GIB - 2**24, [12 * GIB], 12 * GIB - 2**24),
        (0, [12 * GIB], 12 * GIB),  # DXGI does not tell: the registry's 64-bit value
        (0, [], 0),  # unknown, which is better than 1024 MB
        (0, [0], 0),
        (0, [8 * GIB, 4 * GIB], 4 * GIB),  # two keys of one product: the safe one
    ],
)
def test_memory_is_the_adapters_or_the_registrys_and_never_invented(
    dedicated: int, sizes: list[int], vram: int
) -> None:
    """B08: an RX 6750 XT with 12 GB was shown as 1024 MB."""
    readings = Readings(
        adapters=[adapter(0x73DF, 0xC0, dedicated)],
        drivers=[driver(0x73DF, size) for size in sizes],
    )
    (gpu,) = gpus_from_readings(readings)
    assert (gpu.name, gpu.vram_bytes) == ("Radeon RX 6750 XT", vram)


def test_the_32_bit_size_is_never_used() -> None:
    """B08."""
    values = {
        "MatchingDeviceId": r"PCI\VEN_1002&DEV_744C&SUBSYS_00000000&REV_C8",
        "HardwareInformation.MemorySize": 4293918720,
        "HardwareInformation.AdapterRAM": 4293918720,
    }
    assert parse_driver_key(values) == driver(0x744C, 0, 0xC8)


def test_the_key_of_another_revision_is_another_product() -> None:
    readings = Readings(
        adapters=[adapter(0x7480, 0xCF)],
        drivers=[driver(0x7480, 16 * GIB, 0xC0), driver(0x7480, 8 * GIB, 0xCF)],
    )
    assert gpus_from_readings(readings)[0].vram_bytes == 8 * GIB


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (8 * GIB, 8 * GIB),
        ((8 * GIB).to_bytes(8, "little"), 8 * GIB),
        (b"", 0),
        (-1, 0),
        ("8589934592", 0),
        (None, 0),
    ],
)
def test_the_registrys_size_is_a_number_or_bytes(value: object, size: int) -> None:
    values = {
        "MatchingDeviceId": r"pci\ven_1002&dev_73df",
        "HardwareInformation.qwMemorySize": value,
    }
    assert parse_driver_key(values) == driver(0x73DF, size)


def test_an_adapter_that_dxgi_lists_twice_is_one_gpu() -> None:
    twice = [adapter(0x73DF, 0xC0, 12 * GIB, luid=7), adapter(0x73DF, 0xC0, 12 * GIB, luid=7)]
    assert [gpu.index for gpu in gpus_from_readings(Readings(adapters=twice))] == [0]


def test_two_equal_cards_are_two_gpus() -> None:
    two = [adapter(0x73DF, 0xC0, 12 * GIB, luid=7), adapter(0x73DF, 0xC0, 12 * GIB, luid=8)]
    assert [gpu.index for gpu in gpus_from_readings(Readings(adapters=two))] == [0, 1]


@pytest.mark.parametrize(
    ("dedicated", "kind"),
    [(512 * 2**20, Kind.APU), (8 * GIB, Kind.DISCRETE), (0, Kind.DISCRETE)],
)
def test_a_card_that_no_table_knows_keeps_its_drivers_name(dedicated: int, kind: Kind) -> None:
    new = adapter(0xFFFF, 0, dedicated, description="AMD Radeon RX 99000")
    (gpu,) = gpus_from_readings(Readings(adapters=[new]))
    assert (gpu.name, gpu.arch, gpu.kind) == ("AMD Radeon RX 99000", "", kind)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.just("MatchingDeviceId") | st.text(), st.text() | st.binary()))
def test_any_registry_key_can_be_read(values: dict[str, str | bytes]) -> None:
    key = parse_driver_key(values)
    assert key is None or key.memory_bytes >= 0

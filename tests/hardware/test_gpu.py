import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdamd.hardware.gpu import (
    ARCHITECTURES,
    FusedAttention,
    Gpu,
    Kind,
    arch_of_device,
    decode_target,
    encode_target,
    kind_of_device,
    name_of_device,
)


@pytest.mark.parametrize(
    ("version", "gfx"),
    [
        (90402, "gfx942"),
        (90010, "gfx90a"),
        (90012, "gfx90c"),
        (80003, "gfx803"),
        (90008, "gfx908"),
        (90500, "gfx950"),
        (100100, "gfx1010"),
        (100302, "gfx1032"),
        (100306, "gfx1036"),
        (110000, "gfx1100"),
        (110003, "gfx1103"),
        (110501, "gfx1151"),
        (120001, "gfx1201"),
        (0, ""),
        (-1, ""),
        (7, ""),
        (99999, ""),
    ],
)
def test_minor_and_stepping_are_hexadecimal_digits(version: int, gfx: str) -> None:
    """A06: 90402 was read as gfx943, and 90010 is gfx90a, not gfx9010."""
    assert decode_target(version) == gfx


@given(major=st.integers(1, 99), minor=st.integers(0, 15), stepping=st.integers(0, 15))
def test_a_target_survives_the_round_trip(major: int, minor: int, stepping: int) -> None:
    version = major * 10000 + minor * 100 + stepping
    assert encode_target(decode_target(version)) == version


@given(st.integers())
def test_any_number_decodes_to_a_name_or_to_nothing(version: int) -> None:
    gfx = decode_target(version)
    assert gfx == "" or re.fullmatch(r"gfx[1-9][0-9]*[0-9a-f]{2}", gfx)


@pytest.mark.parametrize("gfx", ["", "gfx", "1100", "gfx11", "gfxzz0", "gfx11g0", "gfx1１00"])
def test_a_name_of_another_shape_is_refused(gfx: str) -> None:
    with pytest.raises(ValueError, match=r"gfx|int"):
        encode_target(gfx)


def test_every_architecture_is_filed_under_its_own_name() -> None:
    assert all(row.gfx == gfx for gfx, row in ARCHITECTURES.items())
    assert all(decode_target(row.target_version) == gfx for gfx, row in ARCHITECTURES.items())


def test_an_override_names_a_sibling_of_the_same_generation() -> None:
    """A10: 10.3.0 must never be offered to gfx11, nor 11.0.0 to gfx10."""
    for gfx, row in ARCHITECTURES.items():
        if row.override:
            major, minor, stepping = (int(part) for part in row.override.split("."))
            sibling = ARCHITECTURES[decode_target(major * 10000 + minor * 100 + stepping)]
            assert sibling.gfx[:-2] == gfx[:-2]
            assert sibling.gfx != gfx
            assert sibling.matrix == row.matrix


@pytest.mark.parametrize(
    ("gfx", "override"),
    [
        ("gfx1030", ""),
        ("gfx1031", "10.3.0"),
        ("gfx1032", "10.3.0"),
        ("gfx1036", "10.3.0"),
        ("gfx1100", ""),
        ("gfx1103", "11.0.0"),
        ("gfx1151", "11.0.0"),
        ("gfx803", ""),
        ("gfx1010", ""),
    ],
)
def test_only_architectures_that_can_run_a_siblings_kernels_have_an_override(
    gfx: str, override: str
) -> None:
    """A09, A10."""
    assert ARCHITECTURES[gfx].override == override


@pytest.mark.parametrize(
    ("gfx", "generation", "wave", "bf16", "attention", "rocm"),
    [
        ("gfx803", "GCN4", 64, False, FusedAttention.NO, False),
        ("gfx906", "GCN5", 64, False, FusedAttention.NO, True),
        ("gfx942", "CDNA3", 64, True, FusedAttention.YES, True),
        ("gfx1032", "RDNA2", 32, False, FusedAttention.NO, True),
        ("gfx1100", "RDNA3", 32, True, FusedAttention.EXPERIMENTAL, True),
        ("gfx1151", "RDNA3.5", 32, True, FusedAttention.EXPERIMENTAL, True),
        ("gfx1201", "RDNA4", 32, True, FusedAttention.YES, True),
    ],
)
def test_the_table_tells_what_a_plan_needs(
    gfx: str, generation: str, wave: int, bf16: bool, attention: FusedAttention, rocm: bool
) -> None:
    row = ARCHITECTURES[gfx]
    assert (row.generation, row.wave, row.bf16, row.fused_attention, row.rocm) == (
        generation,
        wave,
        bf16,
        attention,
        rocm,
    )


@pytest.mark.parametrize(
    ("device", "revision", "name"),
    [
        (0x744C, 0xC8, "Radeon RX 7900 XTX"),
        (0x744C, 0xCC, "Radeon RX 7900 XT"),
        (0x744C, 0xCE, "Radeon RX 7900 GRE"),
        (0x747E, 0xFF, "Radeon RX 7700 XT"),
        (0x7480, 0x00, "Radeon Pro W7600"),
        (0x7480, 0xCF, "Radeon RX 7600"),
        (0x7480, None, "Radeon (Navi 33)"),
        (0x7590, 0xC0, "Radeon RX 9060 XT"),
        (0x1586, 0xC2, "Radeon 8050S"),
        (0x13C0, 0xC9, "Radeon Graphics (Granite Ridge)"),
        (0x74A1, None, "Instinct MI300X"),
        (0x73FF, 0x99, "Radeon (Navi 23)"),
        (0x67C4, 0x00, "Radeon (Polaris / Fiji)"),
        (0xFFFF, 0x00, "AMD GPU 1002:ffff"),
    ],
)
def test_the_revision_tells_products_of_one_chip_apart(
    device: int, revision: int | None, name: str
) -> None:
    """A31: a PCI name covers many products, so the name follows from device and revision."""
    assert name_of_device(device, revision, "") == name


@pytest.mark.parametrize(
    ("device", "gfx"),
    [
        (0x73DF, "gfx1031"),  # AMD's page of HIP SDK 5.7 called it gfx1032
        (0x150E, "gfx1150"),  # the 880M, which others list as gfx1151
        (0x1902, "gfx1153"),
        (0x6995, "gfx803"),
        (0x7314, "gfx1010"),
        (0xFFFF, ""),
    ],
)
def test_the_device_id_tells_the_architecture(device: int, gfx: str) -> None:
    assert arch_of_device(device) == gfx


@pytest.mark.parametrize(
    ("device", "gfx", "kind"),
    [
        (0x74A0, "gfx942", Kind.APU),  # MI300A
        (0x74A1, "gfx942", Kind.DISCRETE),
        (0x15BF, "gfx1103", Kind.APU),
        (0x7480, "gfx1102", Kind.DISCRETE),
        (0xFFFF, "", None),
    ],
)
def test_the_numbers_tell_apus_from_cards(device: int, gfx: str, kind: Kind | None) -> None:
    assert kind_of_device(device, gfx) is kind


def test_an_apu_uses_the_larger_of_its_pools_and_a_card_its_own_memory() -> None:
    apu = Gpu(
        index=0, name="", arch="gfx1151", kind=Kind.APU, vram_bytes=2**29, gtt_bytes=60 * 2**30
    )
    carved = Gpu(
        index=0, name="", arch="gfx1151", kind=Kind.APU, vram_bytes=96 * 2**30, gtt_bytes=2**34
    )
    card = Gpu(
        index=0, name="", arch="gfx1100", kind=Kind.DISCRETE, vram_bytes=2**34, gtt_bytes=2**35
    )
    assert [gpu.usable_bytes for gpu in (apu, carved, card)] == [60 * 2**30, 96 * 2**30, 2**34]

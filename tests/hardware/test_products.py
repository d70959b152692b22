import pytest

from sdamd.errors import BadRequest
from sdamd.hardware.gpu import ARCHITECTURES, Kind
from sdamd.hardware.products import GIB, _products, find_card, speed_of


@pytest.mark.parametrize(
    ("text", "name", "arch", "gib"),
    [
        ("Radeon RX 7900 XTX", "Radeon RX 7900 XTX", "gfx1100", 24),
        ("rx7900xtx", "Radeon RX 7900 XTX", "gfx1100", 24),
        ("AMD Radeon RX-7900-XTX", "Radeon RX 7900 XTX", "gfx1100", 24),
        (" 7900 xtx ", "Radeon RX 7900 XTX", "gfx1100", 24),
        ("Instinct MI210", "Instinct MI210", "gfx90a", 64),
        ("RX 580", "Radeon RX 580", "gfx803", 8),
        ("RX 580:4", "Radeon RX 580", "gfx803", 4),
        ("RX 580 : 8", "Radeon RX 580", "gfx803", 8),
        ("RX 6600", "Radeon RX 6600", "gfx1032", 8),
        ("gfx1100:24", "gfx1100", "gfx1100", 24),
        ("GFX90A:1", "gfx90a", "gfx90a", 1),
        ("gfx1201:1024", "gfx1201", "gfx1201", 1024),
    ],
)
def test_a_card_is_found_by_its_name_or_target(text: str, name: str, arch: str, gib: int) -> None:
    card = find_card(text)
    assert (card.name, card.arch, card.vram_bytes) == (name, arch, gib * GIB)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("RX 580:12", "Radeon RX 580 is asked for with 12 GiB; it was sold with 4 or 8"),
        ("RX 580:", "Radeon RX 580 is asked for with no GiB; it was sold with 4 or 8"),
        ("RX 580:big", "Radeon RX 580 is asked for with big GiB; it was sold with 4 or 8"),
        ("RX 580:²", "Radeon RX 580 is asked for with ² GiB; it was sold with 4 or 8"),
        ("gfx1100", "gfx1100 is asked for with no GiB; allowed 1 to 1024, as gfx1100:16"),
        ("gfx1100:0", "gfx1100 is asked for with 0 GiB; allowed 1 to 1024, as gfx1100:16"),
        ("gfx1100:-8", "gfx1100 is asked for with -8 GiB; allowed 1 to 1024, as gfx1100:16"),
        ("gfx1100:1025", "gfx1100 is asked for with 1025 GiB; allowed 1 to 1024, as gfx1100:16"),
        ("gfx1100:" + "9" * 5000, "gfx1100 is asked for with 999"),
        ("gfx1100:²", "gfx1100 is asked for with ² GiB; allowed 1 to 1024, as gfx1100:16"),
        ("RX 7900 XTZ", "card 'RX 7900 XTZ' is not known; the nearest: Radeon RX 7900 XT"),
        ("GeForce RTX 4090", "card 'GeForce RTX 4090' is not known; "),
        ("", "card '' is not known; known: "),
        ("Radeon", "card 'Radeon' is not known; "),
    ],
)
def test_a_card_that_was_never_sold_is_refused(text: str, said: str) -> None:
    with pytest.raises(BadRequest) as raised:
        find_card(text)
    assert str(raised.value).startswith(said)


def test_every_product_can_be_asked_for_in_each_of_its_sizes() -> None:
    assert len(_products()) > 60
    for name, row in _products().items():
        arch, sizes = row.arch, row.sizes
        known = ARCHITECTURES[arch]
        assert list(sizes) == sorted(set(sizes))
        for gib in sizes:
            card = find_card(f"{name}:{gib}")
            assert (card.name, card.arch, card.vram_bytes) == (name, arch, gib * GIB)
            assert card.kind is (Kind.APU if known.apu else Kind.DISCRETE)
        assert find_card(name).vram_bytes == sizes[-1] * GIB


def test_an_apu_may_have_any_size() -> None:
    """The BIOS and the RAM decide."""
    assert find_card("Radeon 8060S:60").vram_bytes == 60 * GIB
    with pytest.raises(BadRequest, match="it was sold with 96"):
        find_card("Radeon 8060S:0")


def test_compute_units_clock_and_bandwidth_are_those_of_one_product() -> None:
    speed = speed_of("Radeon RX 7900 XTX")
    assert speed is not None
    assert (speed.cus, speed.bandwidth_gbs) == (96, 960)
    assert speed_of("Radeon RX 7400") is None  # nobody has published it
    assert speed_of("no such card") is None
    for name, row in _products().items():
        if row.speed is not None:
            assert 2 <= row.speed.cus <= 304, name
            assert 1 <= row.speed.ghz <= 3.2, name
            assert (row.speed.pcie_gbs == 0) == ARCHITECTURES[row.arch].apu, name

from pathlib import Path

import pytest

from sdamd.hardware.sensors import NONE, Sensors

PCI = "0000:03:00.0"


def card(root: Path, files: dict[str, str]) -> Sensors:
    folder = root / "sys/bus/pci/devices" / PCI / "hwmon" / "hwmon3"
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return Sensors.of(PCI, root)


RDNA3 = {
    "temp1_label": "edge\n", "temp1_input": "41000\n",
    "temp2_label": "junction\n", "temp2_input": "46000\n",
    "temp3_label": "mem\n", "temp3_input": "52000\n",
    "power1_average": "19000000\n",
}  # fmt: skip


@pytest.mark.parametrize(
    ("files", "celsius", "watts"),
    [
        (RDNA3, 46.0, 19.0),
        ({"temp1_label": "edge\n", "temp1_input": "41000\n"}, 41.0, None),  # an APU
        ({"temp1_input": "38000\n", "power1_input": "7500000\n"}, 38.0, 7.5),
        ({**RDNA3, "temp2_input": "-5000\n"}, -5.0, 19.0),
        ({**RDNA3, "temp2_input": ""}, None, 19.0),
        ({**RDNA3, "temp2_input": "N/A\n", "power1_average": "1e9\n"}, None, None),
        ({}, None, None),
    ],
)
def test_the_hottest_spot_and_the_power_are_read(
    tmp_path: Path, files: dict[str, str], celsius: float | None, watts: float | None
) -> None:
    sensors = card(tmp_path, files)
    assert (sensors.celsius(), sensors.watts()) == (celsius, watts)


def test_a_card_that_goes_to_sleep_or_away_tells_nothing(tmp_path: Path) -> None:
    sensors = card(tmp_path, RDNA3)
    (folder,) = tmp_path.rglob("hwmon3")
    for path in folder.iterdir():
        path.unlink()
    assert (sensors.celsius(), sensors.watts()) == (None, None)


def test_there_are_no_sensors_where_there_is_no_card(tmp_path: Path) -> None:
    assert Sensors.of(PCI, tmp_path) == Sensors.of("", tmp_path) == NONE

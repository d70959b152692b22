"""What a card says of itself while it works: how hot it is, and how much power it takes.

Source: amdgpu's hwmon files (docs.kernel.org, "GPU Power/Thermal Controls and Monitoring"):
temperatures in thousandths of a degree, power in millionths of a watt.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

HOTTEST_FIRST: Final = ("junction", "edge")
"""Which sensor speaks for the card: the hottest spot, or where there is none the chip's edge."""

_POWER: Final = ("power1_average", "power1_input")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensors:
    """The sensors of one card; either may be missing."""

    temperature: Path | None
    power: Path | None

    @classmethod
    def of(cls, pci: str, root: Path = Path("/")) -> Self:
        """The sensors of the card at a PCI address such as `0000:03:00.0`."""
        found: dict[str, Path] = {}
        for folder in _hwmon(root / "sys/bus/pci/devices" / pci / "hwmon") if pci else ():
            for label in sorted(folder.glob("temp*_label")):
                value = label.with_name(label.name.replace("_label", "_input"))
                found.setdefault(_read(label), value)
            if not found and (folder / "temp1_input").exists():
                found["edge"] = folder / "temp1_input"  # old kernels give no labels
            for name in _POWER:
                if _number(folder / name) is not None:
                    found.setdefault("power", folder / name)
        spots = (found[name] for name in HOTTEST_FIRST if name in found)
        return cls(temperature=next(spots, None), power=found.get("power"))

    def celsius(self) -> float | None:
        """The temperature now; None where nothing tells it, as of a card that sleeps."""
        value = None if self.temperature is None else _number(self.temperature)
        return None if value is None else value / 1000

    def watts(self) -> float | None:
        """The power now, as the card averages it; None where nothing tells it."""
        value = None if self.power is None else _number(self.power)
        return None if value is None else value / 1_000_000


NONE: Final = Sensors(temperature=None, power=None)
"""Of a CPU, and of a card that no file speaks for."""


def _hwmon(folder: Path) -> Iterator[Path]:
    try:
        yield from sorted(folder.iterdir())
    except OSError:
        return


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text.removeprefix("-").isdecimal() and len(text) < 16 else None

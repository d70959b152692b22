"""What torch says when it is asked in a child process, and what a run of its kernels shows."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sdamd.hardware.child import Ended, run_module

_PROBE = "sdamd.backends.probe"
_SELFTEST = "sdamd.backends.selftest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device as torch lists it; `gfx` is what it poses as where an override is set."""

    name: str
    gfx: str
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The child's answer; without one (`answered` is false) only how it ended is known."""

    ended: Ended
    answered: bool = False
    version: str = ""
    hip: str | None = None
    cuda: str | None = None
    device_count: int = 0
    archs: frozenset[str] = frozenset()
    devices: tuple[Device, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One computation on the device against the same on the CPU in float32."""

    name: str
    ok: bool
    reading: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTest:
    """What the self-test printed; without checks only how it ended is known."""

    ended: Ended
    device: str = ""
    checks: tuple[Check, ...] = ()

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that gave wrong numbers."""
        return tuple(check for check in self.checks if not check.ok)

    def to_dict(self) -> dict[str, object]:
        """Return the machine-readable form, for `--json`."""
        checks = [{"name": c.name, "ok": c.ok, "reading": c.reading} for c in self.checks]
        return {"device": self.device, "ended": self.ended.how, "checks": checks}


def ask_torch(environ: Mapping[str, str], seconds: float = 120.0, module: str = _PROBE) -> Probe:
    """Ask for its build and devices, in a child with this environment."""
    return read_probe(run_module(module, environ=environ, seconds=seconds))


def run_selftest(
    device: str, environ: Mapping[str, str], seconds: float = 600.0, module: str = _SELFTEST
) -> SelfTest:
    """Run the kernels on `cuda` (ROCm's name too) or `cpu`, in a child with this environment."""
    arguments = ("--device", device, "--json")
    return read_selftest(run_module(module, *arguments, environ=environ, seconds=seconds))


def read_probe(ended: Ended) -> Probe:
    """Read what the child printed; text that is not its JSON counts as no answer."""
    told = _last_object(ended.out)
    if not told or ended.status != 0:
        return Probe(ended=ended)
    return Probe(
        ended=ended,
        answered=True,
        version=_text(told.get("version")),
        hip=_text(told.get("hip")) or None,
        cuda=_text(told.get("cuda")) or None,
        device_count=_number(told.get("device_count")),
        archs=frozenset(_text(arch).partition(":")[0] for arch in _list(told.get("archs"))),
        devices=tuple(
            Device(
                name=_text(device.get("name")),
                gfx=_text(device.get("gfx")),
                memory_bytes=_number(device.get("memory_bytes")),
            )
            for device in _list(told.get("devices"))
            if isinstance(device, dict)
        ),
    )


def read_selftest(ended: Ended) -> SelfTest:
    """Read what the child printed; status 3 says that a check failed."""
    told = _last_object(ended.out)
    checks = [check for check in _list(told.get("checks")) if isinstance(check, dict)]
    return SelfTest(
        ended=ended,
        device=_text(told.get("device")),
        checks=tuple(
            Check(
                name=_text(check.get("name")) or "?",
                ok=check.get("ok") is True,
                reading=_text(check.get("reading")) or _figures(check),
            )
            for check in checks
        ),
    )


def _figures(check: Mapping[str, Any]) -> str:
    return f"error {check.get('error')}, allowed {check.get('limit')}"


def _last_object(out: str) -> dict[str, Any]:
    """Return the last line that is a JSON object; libraries may print others before it."""
    for text in (*reversed(out.splitlines()), out):
        if text.strip().startswith("{"):
            try:
                told = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if isinstance(told, dict):
                return told
    return {}


def _text(value: object) -> str:
    return value[:200] if isinstance(value, str) else ""


def _number(value: object) -> int:
    return value if type(value) is int and 0 <= value < 2**63 else 0


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []

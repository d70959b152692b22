"""Which GPUs are here and which one sdamd takes: the one door to detection, without torch."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sdamd.errors import BadRequest, HardwareError
from sdamd.hardware import linux, wsl
from sdamd.hardware.gpu import Gpu, decode_target
from sdamd.hardware.visibility import VARIABLES, mask_for, masks_in_force, visible_indices
from sdamd.hardware.windows import Adapter, Readings, gpus_from_readings

_GIB = 2**30
_DISPLAY_ONLY_CUS = 2
_OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """The GPUs of a machine and the choice among them.

    `platform` is `linux`, `wsl`, `windows`, or what Python calls another system. `gpus` are all
    AMD GPUs that a runtime lists, in its order; `visible` those of them that the environment's
    masks leave, in the order that torch (or DirectML) counts. `unlisted` are AMD cards that no
    runtime can use. `preferred` is the visible GPU to use, if there is one, `reason` says why,
    and `mask` holds the visibility variable to set before torch is loaded so that it sees that
    GPU alone; it is empty where that is so already. `notes` are sentences about what is wrong;
    those of them that only say how sure the readings are, are the `remarks`.
    """

    platform: str
    gpus: tuple[Gpu, ...] = ()
    visible: tuple[Gpu, ...] = ()
    unlisted: tuple[Gpu, ...] = ()
    preferred: Gpu | None = None
    reason: str
    mask: Mapping[str, str]
    notes: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


def detect(
    root: Path = Path("/"),
    platform: str = sys.platform,
    environ: Mapping[str, str] = os.environ,
    *,
    access: linux.Access = os.access,
    read_windows: Callable[[], Readings] | None = None,
) -> Detection:
    """Find the GPUs of the machine whose root directory is `root`.

    A root other than `/` stands for a recorded machine. With `platform` `windows` (or `win32`)
    the readings come from `read_windows`; without it from this machine if it runs Windows and
    none is recorded, else from the recorded graphics cards, as Windows would see them.
    """
    if platform in {"win32", "windows"}:
        return _detect_windows(root, read_windows)
    if not platform.startswith("linux"):
        reason = f"sdamd uses GPUs on Linux and Windows, and this is {platform}"
        return Detection(platform=platform, reason=reason, mask={})
    if wsl.is_wsl(root):
        return _detect_wsl(root, environ)
    found = linux.read_gpus(root)
    notes = linux.device_notes(root, access) if found.gpus else ()
    return _choose_on_linux("linux", found.gpus, found.unlisted, environ, notes, found.notes)


def pick(detection: Detection, device: str, *, asked: str = "") -> Gpu | None:
    """Return the GPU that a person asks for: `auto`, `cpu` (nothing), an index, a part of a name.

    `asked` is what was said, where `device` is a part of it.

    Raises:
        BadRequest: no visible GPU, or more than one, is meant; the message lists them all.
    """
    wanted = device.strip().lower()
    if wanted == "auto":
        return detection.preferred
    if wanted == "cpu":
        return None
    matches = [gpu for gpu in detection.visible if str(gpu.index) == wanted]
    if not matches and len(wanted) > 2:  # shorter ones are indices, or say too little
        matches = [gpu for gpu in detection.visible if wanted in gpu.name.lower()]
        # "7900 XT" is the whole of one name and the start of another.
        matches = [gpu for gpu in matches if gpu.name.lower().endswith(wanted)] or matches
    if len(matches) != 1:
        choices = ["auto", "cpu", *(f"{gpu.index} ({gpu.name})" for gpu in detection.visible)]
        raise BadRequest(f"device is {asked or device}; allowed {', '.join(choices)}")
    return matches[0]


def _detect_wsl(root: Path, environ: Mapping[str, str]) -> Detection:
    tool = wsl.find_rocminfo(root)
    if tool is None:
        text, note = "", "this is WSL, where only ROCm's rocminfo can tell the GPU; it is missing"
    else:
        text, note = _run_rocminfo(tool, environ)
    gpus = wsl.parse_rocminfo(text)
    if not gpus and not note:
        note = "this is WSL, and rocminfo lists no GPU"
    return _choose_on_linux("wsl", gpus, (), environ, (note,) if note else ())


def _run_rocminfo(tool: Path, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the tool's output, and what went wrong.

    ROCm before 7.13 finds the GPU only with this variable. Source: ROCm/librocdxg#34.
    """
    unmasked = {name: text for name, text in environ.items() if name not in VARIABLES}
    try:
        done = subprocess.run(
            [tool],
            env=unmasked | {"HSA_ENABLE_DXG_DETECTION": "1"},
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"this is WSL, and rocminfo cannot be run: {error}"
    return done.stdout, ""


def _choose_on_linux(
    platform: str,
    gpus: tuple[Gpu, ...],
    unlisted: tuple[Gpu, ...],
    environ: Mapping[str, str],
    notes: tuple[str, ...],
    remarks: tuple[str, ...] = (),
) -> Detection:
    uuids = [gpu.uuid for gpu in gpus]
    visible = tuple(gpus[index] for index in visible_indices(uuids, environ))
    supported = [gpu for gpu in visible if gpu.architecture is None or gpu.architecture.rocm]
    preferred = _best(supported, visible)
    notes = remarks + notes
    notes += tuple(_support_note(gpu) for gpu in visible if gpu not in supported)
    notes += _mask_notes(gpus, visible, environ)
    if preferred is not None:
        remarks += _gpu_notes(preferred)
        notes += _gpu_notes(preferred) + _override_notes(preferred, environ)
    return Detection(
        platform=platform,
        gpus=gpus,
        visible=visible,
        unlisted=unlisted,
        preferred=preferred,
        reason=_reason(preferred, supported, visible, gpus or unlisted),
        mask={} if preferred is None else mask_for(preferred.index, uuids, environ),
        notes=notes,
        remarks=remarks,
    )


def _detect_windows(root: Path, read_windows: Callable[[], Readings] | None) -> Detection:
    notes: tuple[str, ...] = ()
    readings = Readings(adapters=())
    try:
        if read_windows is not None:
            readings = read_windows()
        elif sys.platform == "win32" and root == Path("/"):
            # Here, since ctypes is only wanted on Windows.
            from sdamd.hardware import dxgi  # noqa: PLC0415

            readings = dxgi.read_machine()
        else:
            readings = _readings_of_recorded_cards(root)
    except HardwareError as error:
        notes = (str(error),)
    gpus = gpus_from_readings(readings)
    preferred = _best(gpus, gpus)
    if preferred is not None:
        notes += _gpu_notes(preferred)
    return Detection(
        platform="windows",
        gpus=gpus,
        visible=gpus,
        preferred=preferred,
        reason=_reason(preferred, gpus, gpus, gpus),
        mask={},
        notes=notes,
        remarks=notes,
    )


def _readings_of_recorded_cards(root: Path) -> Readings:
    """Read a recorded Linux machine as Windows would see it, to try out what it would get."""
    found = linux.read_gpus(root)
    return Readings(
        adapters=[
            Adapter(
                description=gpu.name,
                vendor_id=0x1002,
                device_id=gpu.device_id,
                revision=gpu.revision,
                dedicated_bytes=gpu.vram_bytes,
                shared_bytes=gpu.gtt_bytes,
                luid=luid,
            )
            for luid, gpu in enumerate(found.gpus + found.unlisted)
        ]
    )


def _best(candidates: Sequence[Gpu], visible: Sequence[Gpu]) -> Gpu | None:
    """Return the GPU to use; one that only drives a desktop never stands in for a real card."""
    if not all(gpu.is_apu for gpu in visible):
        candidates = [gpu for gpu in candidates if not _is_display_only(gpu)]
    return max(candidates, key=_rank, default=None)


def _is_display_only(gpu: Gpu) -> bool:
    # DXGI does not count compute units; the iGPU of desktop Ryzens has an architecture of its own.
    return gpu.is_apu and (0 < gpu.compute_units <= _DISPLAY_ONLY_CUS or gpu.arch == "gfx1036")


def _rank(gpu: Gpu) -> tuple[bool, int, int, int]:
    """Discrete before integrated, then memory, then compute units, then the first."""
    return not gpu.is_apu, gpu.usable_bytes, gpu.compute_units, -gpu.index


def _reason(
    preferred: Gpu | None, candidates: Sequence[Gpu], visible: Sequence[Gpu], present: Sequence[Gpu]
) -> str:
    if preferred is None:
        return _reason_against(candidates, visible, present)
    others = [gpu for gpu in candidates if gpu is not preferred]
    if not others:
        return f"{preferred.name} is the only GPU that can be used"
    rivals = [gpu for gpu in others if gpu.is_apu == preferred.is_apu]
    size = f"{preferred.usable_bytes / _GIB:.1f} GiB"
    if not rivals:
        are = "is" if len(others) == 1 else "are"
        return f"{preferred.name} is the discrete card ({size}), {_list(others)} {are} integrated"
    kind = "integrated GPUs" if preferred.is_apu else "discrete cards"
    if all(_rank(gpu)[:3] == _rank(preferred)[:3] for gpu in rivals):
        return f"{preferred.name} ({size}) is the first of {len(rivals) + 1} equal {kind}"
    return f"{preferred.name} ({size}): none of the {len(rivals) + 1} {kind} has more memory"


def _reason_against(
    candidates: Sequence[Gpu], visible: Sequence[Gpu], present: Sequence[Gpu]
) -> str:
    if not present:
        return "no AMD GPU was found"
    if not visible:
        return f"{_list(present)} cannot be used, as the notes say"
    desktop = f", and {_list(candidates)} can only drive a desktop" if candidates else ""
    unsupported = [gpu for gpu in visible if gpu not in candidates]
    return f"no current ROCm build has kernels for {_list(unsupported)}{desktop}"


def _list(gpus: Sequence[Gpu]) -> str:
    return ", ".join(f"{gpu.name} ({gpu.arch})" if gpu.arch else gpu.name for gpu in gpus)


def _support_note(gpu: Gpu) -> str:
    return f"{gpu.name} ({gpu.arch}) is not supported: no current ROCm build has kernels for it"


def _gpu_notes(gpu: Gpu) -> tuple[str, ...]:
    notes: list[str] = []
    if gpu.architecture is None:
        notes.append(f"{gpu.name} has an architecture that sdamd does not know ({gpu.arch or '?'})")
    if _is_display_only(gpu):
        notes.append(f"{gpu.name} has compute units for a desktop only; the CPU may be faster")
    if gpu.usable_bytes == 0:
        notes.append(f"{gpu.name}: the size of its memory is unknown")
    return tuple(notes)


def _mask_notes(
    gpus: Sequence[Gpu], visible: Sequence[Gpu], environ: Mapping[str, str]
) -> tuple[str, ...]:
    masks = masks_in_force(environ)
    shown = " and ".join(f"{name}={text}" for name, text in masks.items())
    if gpus and not visible and len(masks) > 1:
        return (f"{shown} together hide every GPU: each counts in what the one before leaves",)
    if gpus and not visible:
        return (f"{shown} hides every GPU",)
    if len(masks) > 1:
        return (f"{shown} are set; each counts in what the one before leaves, so set one only",)
    return ()


def _override_notes(gpu: Gpu, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return what is wrong with an override of the instruction set, for the GPU that is chosen."""
    name = f"{_OVERRIDE}_{gpu.node}" if f"{_OVERRIDE}_{gpu.node}" in environ else _OVERRIDE
    if name not in environ:
        return ()
    text = environ[name]
    parts = re.fullmatch(r"([0-9]{1,2})\.([0-9]{1,3})\.([0-9]{1,3})", text)
    if parts is None:
        return (f"{name} is {text}; allowed is a version like 10.3.0",)
    major, minor, stepping = (int(part) for part in parts.groups())
    forced = decode_target(major * 10000 + minor * 100 + stepping)
    if gpu.arch and gpu.arch[:-2] != f"gfx{major}":
        return (
            f"{name}={text} makes {gpu.name} ({gpu.arch}) run code for {forced or text}, which is "
            "another generation; unset it",
        )
    return ()

"""One text file to attach to a bug report: everything that was read, and nothing about a person."""

import getpass
import ipaddress
import json
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from sdamd.errors import BadRequest, StorageError
from sdamd.hardware.doctor import Diagnosis, lines
from sdamd.hardware.linux import KFD_NODES, parse_properties, read_text

DEFAULT_NAME = "sdamd-doctor.txt"

# Only these are shown at all; what else is in an environment is nobody's business.
_VARIABLES = re.compile(
    r"(HSA|HIP|ROCR|ROCM|AMD|GPU|MIOPEN|PYTORCH|TORCH|CUDA|TRITON|HSAKMT|ONNXRUNTIME|ORT|SDAMD"
    r"|FLASH_ATTENTION|OMP|AOTRITON)_\w+|SDAMD_HOME|LD_LIBRARY_PATH|container"
)
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|KEY|AUTH|CREDENTIAL|COOKIE|PROXY", re.IGNORECASE)
_KERNEL_WORDS = re.compile(
    r"(amdgpu|radeon|ttm|drm|amd_iommu|iommu|pci|pcie_\w+|nomodeset|module_blacklist"
    r"|modprobe\.blacklist|vfio\S*|rd\.driver\S*|video|hugepages\w*|mem|mitigations|nomodule)\b"
)
_KERNEL_LOG = re.compile(r"amdgpu|kfd|\bdrm\b|\bttm\b|radeon", re.IGNORECASE)
_MOST_LOG_LINES = 200

# These properties of a KFD node tell one card from all others.
_SERIALS = {"unique_id", "hive_id"}

_PATTERNS = (
    # what | what stands in its place
    (r"(?<=://)[^/\s@]+@", "<credentials>@"),
    (r"\b(hf|gh[pousr]|github_pat|sk|glpat|xox[abp])[_-][A-Za-z0-9_-]{8,}", "<token>"),
    (r"(?i)\bbearer\s+[\w.~+/=-]{8,}", "<token>"),
    (r"(?i)\b(token|secret|password|passwd|api_?key)(\s*[=:]\s*)\S+", r"\1\2<removed>"),
    (r"[\w.+-]+@[\w-]+(\.[\w-]+)+", "<address>"),
    (r"\bGPU-[0-9a-fA-F]{8,}\b", "GPU-<serial>"),
    (r"(?i)\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "<uuid>"),
    (r"(?<![\w:])([0-9a-fA-F]{2}[:-]){5}[0-9a-fA-F]{2}(?![\w:])", "<mac>"),
    (r"(?i)\b(serial|s/n|unique_id)(\s*(number|no\.?)?\s*[:=]?\s*)[\w-]{6,}", r"\1\2<removed>"),
    (r"(/home/|/Users/|/media/|/run/media/|/run/user/)[^/\s'\":,;]+", r"\1<user>"),
    (r"(?i)([A-Z]:\\Users\\)[^\\\s'\":,;]+", r"\1<user>"),
)
_ADDRESS = r"(?<![\w:.])[0-9a-fA-F:.]{3,45}(?![\w:.])"


@dataclass(frozen=True, slots=True, kw_only=True)
class Private:
    """What must not be in a report, as it is spelled on this machine."""

    homes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()


def private_of(environ: Mapping[str, str], root: Path = Path("/")) -> Private:
    """Collect the names of the user and of the machine, home folders, and values of secrets."""
    names = {environ.get(n, "") for n in ("USER", "LOGNAME", "USERNAME", "HOSTNAME",
                                          "COMPUTERNAME", "USERDOMAIN", "SUDO_USER")}  # fmt: skip
    names |= {socket.gethostname(), read_text(root / "proc/sys/kernel/hostname"), _user()}
    names |= {name.partition(".")[0] for name in names}
    homes = {environ.get(n, "") for n in ("HOME", "USERPROFILE")} | {os.path.expanduser("~")}  # noqa: PTH111 - a folder that may not be there
    homes |= {environ.get("SDAMD_HOME", ""), sys.prefix if sys.prefix != sys.base_prefix else ""}
    secrets = {text for name, text in environ.items() if _SECRET_NAME.search(name)}
    return Private(
        homes=tuple(sorted((h for h in homes if len(h) > 2), key=len, reverse=True)),
        names=tuple(sorted(n for n in names if len(n) > 1 and n not in {"root", "localhost"})),
        secrets=tuple(sorted((s for s in secrets if len(s) > 3), key=len, reverse=True)),
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a number without a name, as in many containers
        return ""


def scrub(text: str, private: Private) -> str:
    """Take out what tells who and where somebody is, and what would let others in."""
    for secret in private.secrets:
        text = text.replace(secret, "<removed>")
    for home in private.homes:
        text = text.replace(home, "~")
    for pattern, instead in _PATTERNS:
        text = re.sub(pattern, instead, text)
    for name in private.names:
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "<name>", text, flags=re.IGNORECASE)
    return re.sub(_ADDRESS, _without_address, text)


def _without_address(match: re.Match[str]) -> str:
    """Addresses of machines go; versions, times and PCI addresses have another shape."""
    text = match[0]
    try:
        ipaddress.ip_address(text.strip("."))
    except ValueError:
        return text
    return "<ip>"


def report(
    diagnosis: Diagnosis, version: str, private: Private, root: Path = Path("/"), pasted: str = ""
) -> str:
    """Write what `doctor` shows, and the readings behind it."""
    found = diagnosis.to_dict()
    sections = {
        f"sdamd {version}: doctor": lines(diagnosis),
        "Readings": _readings(diagnosis),
        "Variables": _variables(diagnosis.survey.environ),
        "KFD": _nodes(root),
        "The kernel's log": _log(diagnosis.survey.dmesg),
        "The pasted text": iter(pasted.splitlines()),
        "As JSON": iter([json.dumps(_without_serials(found), indent=1)]),
    }
    text = "".join(
        f"== {title} ==\n\n{body}\n\n"
        for title, section in sections.items()
        if (body := "\n".join(section))
    )
    return scrub(text, private)


def save_report(text: str, file: str) -> Path:
    """Write the report to a new file; without a name to the next free one in this folder.

    Raises:
        BadRequest: the file is there already.
        StorageError: it cannot be written.
    """
    if file:
        return _write_new(text, Path(file))
    stem, suffix = DEFAULT_NAME.rsplit(".", 1)
    names = (DEFAULT_NAME if n == 1 else f"{stem}-{n}.{suffix}" for n in count(1))
    return _write_new(text, next(path for name in names if not (path := Path(name)).exists()))


def _write_new(text: str, path: Path) -> Path:
    try:
        with path.open("x", encoding="utf-8", errors="backslashreplace") as out:
            out.write(text)
    except FileExistsError as error:
        raise BadRequest(f"report is {str(path)!r}; allowed is a file that is not there") from error
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error
    return path


def _readings(diagnosis: Diagnosis) -> Iterator[str]:
    survey = diagnosis.survey
    installed = survey.installed
    torch = installed.torch
    words = survey.command_line.split()
    yield f"recorded: {survey.recorded}"
    yield f"place: {survey.place}"
    yield f"kernel: {survey.kernel}"
    yield f"command line: {' '.join(word for word in words if _KERNEL_WORDS.match(word))}"
    yield f"amdgpu loaded: {survey.driver_loaded}"
    yield f"system ROCm: {survey.rocm or 'none'}"
    yield f"RAM: {survey.ram_bytes}"
    yield f"groups: {sorted(survey.membership.ids or ())}"
    for device in (survey.kfd, *survey.renders):
        yield f"{device.path}: {device.present=} {device.group=} {device.may_open=} {device.error=}"
    for card in survey.pci:
        yield f"PCI: {card}"
    for folder in survey.folders:
        yield f"{folder.what}: {folder.problem or 'can be written'}, {folder.free_bytes} bytes free"
    yield f"Python: {installed.python[0]}.{installed.python[1]}"
    yield f"torch: {f'{torch.version}, {torch.kind}' if torch else 'none'}"
    for name, version in sorted(installed.packages.items()):
        yield f"package: {name} {version}"
    for child in (survey.probe, survey.selftest):
        if child is not None:
            yield f"child: {type(child).__name__} {child.ended.how}; it printed: {child.ended.out}"


def _variables(environ: Mapping[str, str]) -> Iterator[str]:
    for name, value in sorted(environ.items()):
        if _VARIABLES.fullmatch(name) and not _SECRET_NAME.search(name):
            yield f"{name}={value}"


def _nodes(root: Path) -> Iterator[str]:
    """Yield the properties of the GPU nodes, without those that identify a card."""
    try:
        names = sorted(filter(str.isdigit, os.listdir(root / KFD_NODES)), key=int)  # noqa: PTH208 - a missing folder raises here
    except OSError:
        return
    for name in names:
        properties = parse_properties(read_text(root / KFD_NODES / name / "properties"))
        shown = (f"{key} {value}" for key, value in properties.items() if key not in _SERIALS)
        yield f"node {name}: {', '.join(shown) or 'cannot be read'}"


def _log(dmesg: str | None) -> Iterator[str]:
    if dmesg is None:
        yield "cannot be read by this user"
        return
    yield from [line for line in dmesg.splitlines() if _KERNEL_LOG.search(line)][-_MOST_LOG_LINES:]


def _without_serials(found: dict[str, object]) -> dict[str, object]:
    gpus = found["gpus"]
    shown = [{k: v for k, v in gpu.items() if k != "uuid"} for gpu in gpus] if isinstance(
        gpus, list) else []  # fmt: skip
    return {**found, "gpus": shown}

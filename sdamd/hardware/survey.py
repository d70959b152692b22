"""Everything that `doctor` judges, read from one machine and held in one value.

All of it is read below a root, so that a recorded machine can stand in for this one. What a
recording lacks is None: unknown, and never taken for well.
"""

import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from sdamd.errors import BadRequest
from sdamd.hardware.detect import Detection, detect
from sdamd.hardware.folders import Folder, read_folders
from sdamd.hardware.gpu import Gpu
from sdamd.hardware.installed import Installed, read_installed
from sdamd.hardware.linux import (
    KFD_NODES,
    Access,
    PciGpu,
    parse_properties,
    read_pci_gpus,
    read_text,
)
from sdamd.hardware.place import Place, read_place
from sdamd.hardware.rights import (
    Asking,
    DeviceFile,
    Membership,
    Open,
    read_device_file,
    read_membership,
    try_open,
)
from sdamd.hardware.torch_probe import Probe, SelfTest

log = logging.getLogger(__name__)

_MOST_DMESG = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """One machine as `doctor` sees it.

    `recorded`: the files are another machine's; Python, torch and the variables are then still
    this one's, unless the recording has them. `driver_loaded` is about the kernel module amdgpu.
    `devices_known` is false for a recording without a folder `dev`. `hidden_nodes` counts KFD nodes
    that may not be read. `ram_bytes` is 0 where it is not known.
    `probe` and `selftest` are None where torch was not asked.
    """

    recorded: bool
    detection: Detection
    place: Place
    installed: Installed
    environ: Mapping[str, str]
    kernel: str = ""
    command_line: str = ""
    dmesg: str | None = None
    driver_loaded: bool | None = None
    pci: tuple[PciGpu, ...] = ()
    devices_known: bool = True
    hidden_nodes: int = 0
    kfd: DeviceFile = field(default_factory=lambda: DeviceFile(path="/dev/kfd"))
    renders: tuple[DeviceFile, ...] = ()
    membership: Membership = field(default_factory=Membership)
    rocm: str = ""
    librocdxg: bool = False
    docker_context: str = ""
    ram_bytes: int = 0
    folders: tuple[Folder, ...] = ()
    probe: Probe | None = None
    selftest: SelfTest | None = None

    @property
    def platform(self) -> str:
        """`linux`, `wsl`, `windows`, or what Python calls another system."""
        return self.detection.platform

    @property
    def gpu(self) -> Gpu | None:
        """The GPU that this is about: the one to use, else any that could have been."""
        found = self.detection
        known = (found.preferred, *found.visible, *found.gpus, *found.unlisted)
        return next((gpu for gpu in known if gpu is not None), None)

    @property
    def has_amd(self) -> bool:
        """Whether anything at all shows an AMD GPU."""
        return bool(self.gpu or self.pci or self.hidden_nodes)


def survey(
    root: Path = Path("/"),
    platform: str = sys.platform,
    environ: Mapping[str, str] | None = None,
    *,
    home: Path | None = None,
    installed: Installed | None = None,
    access: Access = os.access,
    opens: Open = try_open,
    dmesg: Callable[[], str | None] | None = None,
    detection: Detection | None = None,
) -> Survey:
    """Read the machine whose root directory is `root`; `home` is sdamd's data folder.

    A root other than `/` is a recorded machine. Its variables are those of
    `proc/self/environ` below it, else `environ`. `detection` replaces the usual one.

    Raises:
        BadRequest: `root` is not a folder.
    """
    if not root.is_dir():
        raise BadRequest(f"root is {str(root)!r}; allowed is a folder that is there")
    recorded = root != Path("/")
    environ, own = _variables(root, os.environ if environ is None else environ, recorded=recorded)
    found = detection or detect(root, platform, environ, access=access)
    membership = read_membership(root, own)
    asking = Asking(live=not recorded, membership=membership, access=access, opens=opens)
    linux = found.platform in {"linux", "wsl"}
    return Survey(
        recorded=recorded,
        detection=found,
        place=read_place(root, own, wsl=found.platform == "wsl") if linux else Place.BARE,
        installed=installed or _installed(root, found.platform, recorded=recorded),
        environ=environ,
        kernel=_kernel(root),
        command_line=read_text(root / "proc/cmdline"),
        dmesg=_dmesg(root, dmesg, recorded=recorded) if linux else None,
        driver_loaded=_driver_loaded(root),
        pci=read_pci_gpus(root) if linux else (),
        devices_known=not recorded or (root / "dev").is_dir(),
        hidden_nodes=_hidden_nodes(root) if linux else 0,
        kfd=read_device_file(root, "dev/kfd", asking),
        renders=_render_files(root, found, asking),
        membership=membership,
        rocm=_rocm_version(root),
        librocdxg=_has_librocdxg(root),
        docker_context=_docker_context(own),
        ram_bytes=_ram_bytes(root),
        folders=() if recorded else read_folders(environ, home),
    )


def _variables(
    root: Path, environ: Mapping[str, str], *, recorded: bool
) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Return the variables to judge, and those that tell of the machine's own process."""
    if not recorded:
        return environ, environ
    lines = read_text(root / "proc/self/environ").replace("\0", "\n").splitlines()
    own = {name: value for name, equals, value in (x.partition("=") for x in lines) if equals}
    return own or environ, own


def _installed(root: Path, platform: str, *, recorded: bool) -> Installed:
    """Return what this Python has, or the packages that were recorded in a folder `python`.

    Of a machine of another system nothing is known.
    """
    if (platform == "windows") == (sys.platform == "win32"):
        if recorded and (root / "python").is_dir():
            return read_installed([str(root / "python")], "python3")
        return replace(read_installed(), borrowed=recorded)
    return Installed(executable="py", python=sys.version_info[:2], known=False)


def _kernel(root: Path) -> str:
    release = read_text(root / "proc/sys/kernel/osrelease")
    match = re.search(r"Linux version (\S+)", read_text(root / "proc/version"))
    return release or (match[1] if match else "")


def _driver_loaded(root: Path) -> bool | None:
    """Whether amdgpu is in the kernel; a recording may have neither list."""
    if (root / "sys/module/amdgpu").is_dir():
        return True
    # A kernel without modules has no such file, and has the driver built in or not at all.
    modules = read_text(root / "proc/modules")
    return bool(re.search(r"(?m)^amdgpu\s", modules)) if modules else None


def _hidden_nodes(root: Path) -> int:
    """Count KFD nodes without readable properties: a device cgroup hides them from a container."""
    try:
        names = os.listdir(root / KFD_NODES)  # noqa: PTH208 - a missing folder raises here
    except OSError:
        return 0
    return sum(
        not parse_properties(read_text(root / KFD_NODES / name / "properties"))
        for name in names
        if name.isdigit()
    )


def _render_files(root: Path, found: Detection, asking: Asking) -> tuple[DeviceFile, ...]:
    """Read the render nodes of the AMD GPUs; all of them where no GPU tells its own."""
    own = {gpu.render for gpu in (*found.gpus, *found.unlisted) if gpu.render}
    try:
        there = sorted(os.listdir(root / "dev/dri"))  # noqa: PTH208 - as above
    except OSError:
        return ()
    names = [name for name in there if re.fullmatch(r"renderD[0-9]{1,9}", name)]
    return tuple(
        read_device_file(root, f"dev/dri/{name}", asking)
        for name in names
        if name in own or not own.intersection(names)
    )


def _rocm_version(root: Path) -> str:
    places = ("opt/rocm/.info/version", "opt/rocm/core/.info/version")
    version = next(filter(None, (read_text(root / place) for place in places)), "")
    return version.splitlines()[0][:40] if version else ""


def _has_librocdxg(root: Path) -> bool:
    places = ("opt/rocm/lib", "opt/rocm/core/lib", "usr/lib", "usr/lib/x86_64-linux-gnu")
    return any(True for place in places for _ in (root / place).glob("librocdxg.so*"))


def _docker_context(environ: Mapping[str, str]) -> str:
    """Return the engine that `docker run` would ask, as its own settings name it."""
    if "DOCKER_CONTEXT" in environ:
        return environ["DOCKER_CONTEXT"]
    home = environ.get("HOME")
    text = read_text(Path(home, ".docker/config.json")) if home else ""
    match = re.search(r'"currentContext"\s*:\s*"([^"]{1,80})"', text)
    return match[1] if match else ""


def _ram_bytes(root: Path) -> int:
    match = re.search(r"(?m)^MemTotal:\s*([0-9]{1,15}) kB", read_text(root / "proc/meminfo"))
    return int(match[1]) * 1024 if match else 0


def _dmesg(root: Path, ask: Callable[[], str | None] | None, *, recorded: bool) -> str | None:
    """Return the kernel's log: asked for, or recorded, or as far as this process may read it."""
    if ask is not None:
        return ask()
    if recorded:
        return read_text(root / "var/log/dmesg") or None
    return read_kernel_log(root / "dev/kmsg") or read_text(root / "var/log/dmesg") or None


def read_kernel_log(path: Path) -> str | None:
    """Read what /dev/kmsg holds, which needs no root where the kernel is set so; else None."""
    lines: list[str] = []
    size = 0
    try:
        log_file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return None
    try:
        while size < _MOST_DMESG and (record := os.read(log_file, 8192)):
            size += len(record)
            lines.append(record.decode("utf-8", "replace").partition(";")[2].split("\n")[0])
    except OSError as error:  # EAGAIN at its end; EPIPE where records were overwritten meanwhile
        log.debug("%s: %s", path, error)
    finally:
        os.close(log_file)
    return "\n".join(lines) or None

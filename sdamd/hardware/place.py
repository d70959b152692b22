"""Where this process runs: on the machine itself, in which kind of container, under WSL."""

import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from sdamd.hardware.linux import read_text


class Place(StrEnum):
    """What stands between this process and the kernel's device files."""

    BARE = "bare machine"
    WSL = "WSL"
    DOCKER = "Docker container"
    DOCKER_DESKTOP = "Docker Desktop"
    PODMAN = "Podman container"
    KUBERNETES = "Kubernetes pod"
    LXC = "LXC container"
    NSPAWN = "systemd-nspawn container"
    FLATPAK = "Flatpak sandbox"
    CONTAINER = "container"
    """A container of a kind that is not known."""

    @property
    def is_container(self) -> bool:
        """Whether device files are there only if somebody outside hands them in."""
        return self not in {Place.BARE, Place.WSL}


# What systemd writes to /run/systemd/container, and container engines to the variable
# `container`. Source: systemd's Container Interface. Under WSL systemd writes "wsl".
_NAMES = {
    "docker": Place.DOCKER,
    "podman": Place.PODMAN,
    "lxc": Place.LXC,
    "lxc-libvirt": Place.LXC,
    "systemd-nspawn": Place.NSPAWN,
    "flatpak": Place.FLATPAK,
}

_MARKS = {
    # file that only this kind has
    "run/secrets/kubernetes.io": Place.KUBERNETES,
    "var/run/secrets/kubernetes.io": Place.KUBERNETES,
    "run/.containerenv": Place.PODMAN,
    ".dockerenv": Place.DOCKER,
    ".flatpak-info": Place.FLATPAK,
    "dev/lxd": Place.LXC,
    "dev/.lxc-boot-id": Place.LXC,
}

_CGROUPS = (
    (r"kubepods", Place.KUBERNETES),
    (r"libpod", Place.PODMAN),
    (r"docker", Place.DOCKER),
    (r"/lxc[./]", Place.LXC),
    (r"containerd|crio", Place.CONTAINER),
)


def read_place(root: Path, environ: Mapping[str, str], *, wsl: bool) -> Place:
    """Tell by marks that engines leave below `root`, and by this process's own variables."""
    if "linuxkit" in read_text(root / "proc/version").lower():
        return Place.DOCKER_DESKTOP
    if "KUBERNETES_SERVICE_HOST" in environ:
        return Place.KUBERNETES
    for path, place in _MARKS.items():
        if (root / path).exists():
            return place
    name = read_text(root / "run/systemd/container") or environ.get("container", "")
    if name and name != "wsl":
        return _NAMES.get(name, Place.CONTAINER)
    groups = read_text(root / "proc/1/cgroup")
    place = next((place for mark, place in _CGROUPS if re.search(mark, groups)), Place.BARE)
    return Place.WSL if wsl and place is Place.BARE else place

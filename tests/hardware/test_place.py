from pathlib import Path

import pytest

from sdamd.hardware.place import Place, read_place
from tests.hardware.made import write

LINUXKIT = {"proc/version": "Linux version 6.10.14-linuxkit (root@buildkitsandbox)"}


@pytest.mark.parametrize(
    ("files", "environ", "place"),
    [
        ({}, {}, Place.BARE),
        ({".dockerenv": ""}, {}, Place.DOCKER),
        ({"run/.containerenv": 'engine="podman-5"'}, {}, Place.PODMAN),
        ({"run/.containerenv": "", "run/.toolboxenv": ""}, {}, Place.PODMAN),
        ({"run/systemd/container": "systemd-nspawn"}, {}, Place.NSPAWN),
        ({"run/systemd/container": "lxc"}, {}, Place.LXC),
        ({"run/systemd/container": "of-tomorrow"}, {}, Place.CONTAINER),
        ({"dev/lxd/sock": ""}, {}, Place.LXC),
        ({}, {"container": "podman"}, Place.PODMAN),
        ({".flatpak-info": "[Application]"}, {}, Place.FLATPAK),
        ({".dockerenv": "", "run/secrets/kubernetes.io/x": ""}, {}, Place.KUBERNETES),
        ({".dockerenv": ""}, {"KUBERNETES_SERVICE_HOST": "x"}, Place.KUBERNETES),
        ({".dockerenv": "", **LINUXKIT}, {}, Place.DOCKER_DESKTOP),
        ({"proc/1/cgroup": "0::/docker/0123"}, {}, Place.DOCKER),
        ({"proc/1/cgroup": "0::/kubepods/burstable/pod1"}, {}, Place.KUBERNETES),
        ({"proc/1/cgroup": "0::/machine.slice/libpod-01.scope"}, {}, Place.PODMAN),
        ({"proc/1/cgroup": "4:cpu:/lxc/box"}, {}, Place.LXC),
        ({"proc/1/cgroup": "0::/init.scope"}, {}, Place.BARE),
    ],
)
def test_the_place_is_told_by_what_engines_leave(
    tmp_path: Path, files: dict[str, str], environ: dict[str, str], place: Place
) -> None:
    assert read_place(write(tmp_path, files), environ, wsl=False) is place
    assert place.is_container is (place is not Place.BARE)


@pytest.mark.report("A18")
@pytest.mark.parametrize(
    ("files", "place"),
    [
        ({}, Place.WSL),
        ({"run/systemd/container": "wsl"}, Place.WSL),  # systemd calls it a container
        ({".dockerenv": ""}, Place.DOCKER),
    ],
)
def test_wsl_is_no_container_but_can_hold_one(
    tmp_path: Path, files: dict[str, str], place: Place
) -> None:
    assert read_place(write(tmp_path, files), {}, wsl=True) is place
    assert place.is_container is (place is Place.DOCKER)

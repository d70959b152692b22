"""Rules about where sdamd runs: containers, Docker Desktop, WSL."""

import re

from sdamd.hardware.place import Place
from sdamd.hardware.rules.rule import (
    FAULT,
    INFO,
    Case,
    Rule,
    Rung,
    Seen,
    Severity,
    Stage,
    export,
    said,
)

_NOT_LOADED = r"ROCk module is NOT loaded"
# How each kind of container is handed a GPU.
_HAND_IN = {
    Place.DOCKER: "docker run --device=/dev/kfd --device=/dev/dri --group-add video --group-add "
    "$(stat -c %g /dev/kfd) --security-opt seccomp=unconfined IMAGE",
    Place.PODMAN: "podman run --device=/dev/kfd --device=/dev/dri --group-add keep-groups "
    "--security-opt label=disable IMAGE",
    Place.KUBERNETES: 'kubectl patch deployment NAME --type=json -p \'[{"op": "add", "path": '
    '"/spec/template/spec/containers/0/resources", "value": {"limits": {"amd.com/gpu": 1}}}]\'',
    Place.LXC: "lxc config device add CONTAINER kfd unix-char path=/dev/kfd && "
    "lxc config device add CONTAINER gpu gpu",
    Place.NSPAWN: "systemd-nspawn --bind=/dev/kfd --bind=/dev/dri "
    "--property='DeviceAllow=char-kfd rw' --property='DeviceAllow=char-drm rw' -D FOLDER",
    Place.FLATPAK: "flatpak override --user --device=all APP",
    Place.DOCKER_DESKTOP: "docker context use default",
}
_HAND_IN_WSL = (
    "docker run --device=/dev/dxg -v /usr/lib/wsl/lib/libdxcore.so:/usr/lib/libdxcore.so "
    "-e HSA_ENABLE_DXG_DETECTION=1 IMAGE"
)


def _not_handed_in(case: Case) -> Seen | None:
    survey = case.survey
    if not survey.place.is_container:
        return None
    if survey.platform == "wsl":
        return _wsl_not_handed_in(case)
    absent = [] if survey.kfd.present else ["/dev/kfd"]
    absent += [] if survey.renders else ["/dev/dri/renderD*"]
    fix = {"fix": _HAND_IN.get(survey.place, _HAND_IN[Place.DOCKER])}
    if absent:
        reading = f"this {survey.place} has no {' and no '.join(absent)}"
        # Without a sign of a Radeon outside it may be as its owner wants it.
        if not survey.has_amd and survey.place is Place.DOCKER_DESKTOP:
            return None
        severity = Severity.FAULT if survey.has_amd else Severity.INFO
        return Seen(reading=reading, values=fix, severity=severity)
    if survey.kfd.error == "EPERM" or (survey.hidden_nodes and not survey.detection.gpus):
        reading = f"/dev/kfd is in this {survey.place}, but its device rules forbid to use it"
        return Seen(reading=reading, values=fix)
    return None


def _wsl_not_handed_in(case: Case) -> Seen | None:
    if case.survey.detection.gpus or case.survey.librocdxg:
        return None
    reading = f"this {case.survey.place} under WSL has no ROCm that reaches /dev/dxg"
    return Seen(reading=reading, values={"fix": _HAND_IN_WSL}, severity=Severity.INFO)


def _docker_desktop(case: Case) -> Seen | None:
    survey = case.survey
    if survey.place is Place.DOCKER_DESKTOP:
        reading = f"the kernel is {survey.kernel}, that of Docker Desktop's virtual machine"
        severity = Severity.INFO if not survey.has_amd and not case.text else None
        return Seen(reading=reading, severity=severity)
    line = said(case, r"adding custom device \"?/dev/(kfd|dri)\"?: no such file")
    if line:
        return Seen(reading=line)
    if survey.has_amd and survey.docker_context.startswith("desktop"):
        reading = f"docker's context is {survey.docker_context}"
        return Seen(reading=reading, severity=Severity.WARNING)
    return None


def _wsl_incomplete(case: Case) -> Seen | None:
    survey = case.survey
    if survey.platform != "wsl" or survey.place.is_container:
        return None
    version = re.match(r"(\d{1,3})\.(\d{1,3})", survey.rocm)
    old = version is not None and (int(version[1]), int(version[2])) < (7, 13)
    hidden = old and survey.environ.get("HSA_ENABLE_DXG_DETECTION") != "1"
    unseen = survey.probe is not None and survey.probe.answered and not survey.probe.device_count
    if survey.detection.gpus and not hidden and not unseen:
        return None
    have = f"ROCm {survey.rocm}" if survey.rocm else "no ROCm under /opt/rocm"
    bridge = "with" if survey.librocdxg else "without"
    sees = "it lists a GPU" if survey.detection.gpus else "no GPU is listed"
    fix = "ldconfig -p | grep librocdxg"
    if hidden and (survey.librocdxg or survey.detection.gpus):
        fix = export(case, HSA_ENABLE_DXG_DETECTION="1")
    severity = Severity.WARNING if survey.detection.gpus and not unseen else None
    return Seen(
        reading=f"WSL (kernel {survey.kernel}), {have} {bridge} librocdxg; {sees}",
        values={"fix": fix},
        severity=severity,
    )


def _normal_there(case: Case) -> Seen | None:
    line = said(case, _NOT_LOADED)
    inside = case.in_wsl or case.survey.place.is_container
    return Seen(reading=line) if line and inside else None


RULES = (
    Rule(number=5, name="devices-not-passed", stage=Stage.PLACE, severity=FAULT, rung=Rung.KFD,
         sees=_not_handed_in,
         cause="A container sees only the devices that it is started with; run this on the host, "
         "and leave the driver alone.",
         fix="{fix}", source="ROCm-docker#39; ROCm/ROCm#1893; stable-diffusion-webui-rocm#17"),
    Rule(number=6, name="docker-desktop", stage=Stage.PLACE, severity=FAULT, rung=Rung.KFD,
         sees=_docker_desktop,
         cause="Docker Desktop runs containers in a virtual machine of its own, which has no "
         "Radeon in it; only the plain engine on a Linux host can hand one in.",
         fix="docker context use default", source="vllm#7207"),
    Rule(number=9, name="wsl-incomplete", stage=Stage.PLACE, severity=FAULT, rung=Rung.RUNTIME,
         sees=_wsl_incomplete,
         cause="Under WSL the GPU comes through /dev/dxg: it takes AMD's librocdxg, a Windows "
         "driver and a ROCm that fit each other, and before ROCm 7.13 the variable "
         "HSA_ENABLE_DXG_DETECTION=1. Kernel modules and groups play no part.",
         fix="{fix}", source="ROCm/librocdxg#34, #35; ROCm/ROCm#5461"),
    Rule(number=10, name="normal-in-wsl", stage=Stage.PLACE, severity=INFO, sees=_normal_there,
         cause="WSL and containers load no kernel modules of their own, so rocminfo always says "
         "this there; look at what comes after it.",
         fix="nothing to do about this line; sdamd doctor shows the first layer that fails",
         source="ROCm/ROCm#1794, #1361"),
)  # fmt: skip

"""Rules about rights: who may open the device files."""

from sdamd.hardware.place import Place
from sdamd.hardware.rights import DeviceFile
from sdamd.hardware.rules.rule import FAULT, Case, Rule, Rung, Seen, Stage, said

# Membership in these makes a user root, or nearly; no GPU is worth that.
_DANGEROUS = {"root", "docker", "lxd", "incus", "incus-admin", "sudo", "wheel", "adm", "disk",
              "shadow", "kmem", "libvirt"}  # fmt: skip
_NO_RIGHTS = r"/dev/(kfd|dri/renderD\d+)\b.{0,40}(permission denied|operation not permitted)"


def blocked_file(case: Case) -> DeviceFile | None:
    """The first device file that this process may not open for want of rights."""
    if case.survey.platform != "linux" or not case.survey.has_amd:
        return None
    files = (case.survey.kfd, *case.survey.renders)
    return next(
        (f for f in files if f.may_open is False and f.error in {"", "EACCES", "EPERM"}), None
    )


def _pasted(case: Case) -> str:
    """The pasted line that speaks of rights, to stand before the reading that explains it."""
    line = said(case, _NO_RIGHTS)
    return f"{line}; " if line else ""


def _no_rights(case: Case) -> Seen | None:
    blocked, membership = blocked_file(case), case.survey.membership
    if blocked is None:
        line = said(case, _NO_RIGHTS)
        if not line or not case.on_bare_linux:
            return None
        return Seen(reading=line, values={"fix": "sudo usermod -aG render,video $USER", "why": ""})
    if case.survey.place.is_container or _waits_for_login(case, blocked):
        return None
    group = f"{blocked.group_name or 'with the number'} ({blocked.group})"
    reading = f"this process may not open {blocked.path}, which belongs to the group {group}"
    return Seen(
        reading=_pasted(case) + reading,
        values=_way_in(blocked, membership.ids, nameless=membership.names is None),
    )


def _way_in(file: DeviceFile, ids: frozenset[int] | None, *, nameless: bool) -> dict[str, str]:
    """The command that gives a user rights on a device file, without giving more."""
    reset = f"sudo udevadm trigger --name-match={file.path.removeprefix('/dev/')}"
    if file.group_name in _DANGEROUS or file.group == 0:
        owner = file.group_name or "root"
        why = f"; joining {owner} would hand out far more than a GPU, so udev must set its group"
        return {"fix": reset, "why": why}
    if ids is not None and file.group in ids:
        return {"fix": reset, "why": "; this user is in that group, so the file's mode is wrong"}
    if file.group_name:
        extra = "" if file.group_name == "video" else ",video"
        return {"fix": f"sudo usermod -aG {file.group_name}{extra} $USER", "why": ""}
    if nameless:
        return {"fix": f"sudo usermod -aG {file.group},video $USER", "why": ""}
    make = f"sudo groupadd --gid {file.group} kfd && sudo usermod -aG kfd,video $USER"
    return {"fix": make, "why": "; /etc/group has no name for that number"}


def _waits_for_login(case: Case, file: DeviceFile) -> bool:
    membership = case.survey.membership
    return (
        file.group in membership.listed
        and membership.ids is not None
        and file.group not in membership.ids
    )


def _old_session(case: Case) -> Seen | None:
    blocked = blocked_file(case)
    if blocked is None or case.survey.place.is_container or not _waits_for_login(case, blocked):
        return None
    name = blocked.group_name
    return Seen(
        reading=_pasted(case)
        + f"/etc/group has this user in {name} ({blocked.group}), which owns {blocked.path}, "
        "and this session does not have that group yet",
        values={"group": name},
    )


def _other_number(case: Case) -> Seen | None:
    blocked = blocked_file(case)
    if blocked is None or not case.survey.place.is_container or blocked.error == "EPERM":
        return None
    ids = case.survey.membership.ids
    if ids is not None and blocked.group in ids:
        return None
    have = "" if ids is None else f"; its own are {', '.join(map(str, sorted(ids)))}"
    fix = f"docker run --group-add {blocked.group} ..."
    if case.survey.place is Place.PODMAN:
        fix = f"podman run --group-add keep-groups ... (rootful: --group-add {blocked.group})"
    return Seen(
        reading=_pasted(case)
        + f"{blocked.path} belongs to the group with number {blocked.group}, and this "
        f"container's process is not in it{have}",
        values={"fix": fix},
    )


RULES = (
    Rule(number=2, name="no-rights", stage=Stage.RIGHTS, severity=FAULT, rung=Rung.RIGHTS,
         sees=_no_rights,
         cause="ROCm opens these files as you, so you must be in the group that owns them; a new "
         "group counts from the next login on, and some desktops need a restart for it{why}.",
         fix="{fix}", source="ROCm/ROCm#1211; Fooocus#1079; rocminfo#34; unsloth#10473"),
    Rule(number=3, name="old-session", stage=Stage.RIGHTS, severity=FAULT, rung=Rung.RIGHTS,
         sees=_old_session,
         cause="You were added to the group after this session began, and a session keeps the "
         "groups that it began with.",
         fix="log out and log in again, or restart (to try it in one shell: newgrp {group})",
         source="Fooocus#1079"),
    Rule(number=4, name="other-group-number", stage=Stage.RIGHTS, severity=FAULT, rung=Rung.RIGHTS,
         sees=_other_number,
         cause="A container may call a group render and still mean another one: only its number "
         "counts, and that is the host's.",
         fix="{fix}", source="kyuz0/amd-strix-halo-vllm-toolboxes#6"),
)  # fmt: skip

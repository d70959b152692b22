"""Finds AMD GPUs under WSL, whose kernel has neither KFD nor DRM: only `rocminfo` can tell."""

import re
from collections.abc import Mapping
from pathlib import Path

from sdamd.hardware.gpu import ArchSource, Gpu, Kind, arch_of_device, kind_of_device
from sdamd.hardware.linux import KFD_NODES, read_text


def is_wsl(root: Path) -> bool:
    """Whether the machine whose root directory is `root` is Windows' Linux."""
    if (root / KFD_NODES).is_dir():
        return False
    return (root / "dev/dxg").exists() or "microsoft" in read_text(root / "proc/version").lower()


def find_rocminfo(root: Path) -> Path | None:
    """Where `rocminfo` lies, if ROCm is installed."""
    places = ("opt/rocm/bin", "opt/rocm/core/bin", "usr/bin")
    return next((p for place in places if (p := root / place / "rocminfo").is_file()), None)


def parse_rocminfo(text: str) -> tuple[Gpu, ...]:
    """Return the GPU agents in the output of `rocminfo`; agents of the CPU are left out.

    The memory is the largest pool. The architecture follows from the chip's id where that is
    known, since an override in the environment changes the agent's name.
    """
    agents = (_fields(block) for block in re.split(r"(?m)^\s*Agent \d+\s*$", text)[1:])
    gpus = [agent for agent in agents if agent.get("Device Type") == "GPU"]
    return tuple(_gpu_of_agent(index, agent) for index, agent in enumerate(gpus))


def _fields(block: str) -> dict[str, str]:
    """Return an agent's `Key: value` lines, each key's first, and its largest pool."""
    fields: dict[str, str] = {}
    pools = [0]
    for line in block.splitlines():
        key, colon, value = line.strip().partition(":")
        if not colon:
            continue
        if key == "Size" and (size := _leading_number(value.strip())):
            pools.append(size * 1024)
        fields.setdefault(key, value.strip())
    return fields | {"Pool bytes": str(max(pools))}


def _gpu_of_agent(index: int, agent: Mapping[str, str]) -> Gpu:
    device_id = _leading_number(agent.get("Chip ID", ""))
    arch = arch_of_device(device_id) or agent.get("Name", "")
    is_apu = "APU" in agent.get("Memory Properties", "") or (
        kind_of_device(device_id, arch) is Kind.APU
    )
    pool_bytes = int(agent["Pool bytes"])
    uuid = agent.get("Uuid", "")
    return Gpu(
        index=index,
        name=agent.get("Marketing Name") or arch,
        arch=arch,
        arch_source=ArchSource.RUNTIME,
        kind=Kind.APU if is_apu else Kind.DISCRETE,
        vram_bytes=0 if is_apu else pool_bytes,
        gtt_bytes=pool_bytes if is_apu else 0,
        compute_units=_leading_number(agent.get("Compute Unit", "")),
        wave=_leading_number(agent.get("Wavefront Size", "")),
        device_id=device_id,
        uuid="" if uuid == "GPU-XX" else uuid,
    )


def _leading_number(text: str) -> int:
    """Return the number before its hexadecimal form in parentheses: 32 of `32(0x20)`."""
    match = re.match(r"[0-9]{1,15}", text)
    return int(match[0]) if match else 0

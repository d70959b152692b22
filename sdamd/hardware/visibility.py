"""Which GPUs a process may see: the visibility variables of ROCm, applied in their layers."""

import re
from collections.abc import Mapping, Sequence

# ROCr filters and numbers anew from 0; ROCclr filters what ROCr left, and HIP what ROCclr left.
# Within a layer the first variable that is set counts. Source: AMD's documentation of GPU
# isolation, and the filters in ROCR-Runtime and clr.
_LAYERS = (
    ("ROCR_VISIBLE_DEVICES",),
    ("GPU_DEVICE_ORDINAL",),
    ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
)

VARIABLES = tuple(name for layer in _LAYERS for name in layer)
"""Every variable that hides GPUs, the lowest layer first."""

_INDEX = re.compile(r"[0-9]{1,6}")


def masks_in_force(environ: Mapping[str, str], platform: str = "linux") -> dict[str, str]:
    """Return the variables that count, with their values; set but empty hides every GPU."""
    masks: dict[str, str] = {}
    # There is no ROCr on Windows, and nobody reads its variable.
    for layer in _LAYERS[1:] if platform == "windows" else _LAYERS:
        name = next((name for name in layer if name in environ), None)
        if name is not None:
            masks[name] = environ[name]
    return masks


def visible_indices(
    uuids: Sequence[str], environ: Mapping[str, str], platform: str = "linux"
) -> tuple[int, ...]:
    """Return the GPUs that torch sees, in its order, as indices without any mask.

    `uuids` has one entry per GPU in KFD order: `GPU-` and 16 hexadecimal digits, or an empty
    string for a GPU without one.
    """
    seen = tuple(range(len(uuids)))
    for text in masks_in_force(environ, platform).values():
        seen = _filter(text, seen, uuids)
    return seen


def mask_for(
    index: int, uuids: Sequence[str], environ: Mapping[str, str], platform: str = "linux"
) -> dict[str, str]:
    """Return the variable to set so that torch sees GPU `index` alone; empty if it already does.

    A second variable would be read in the numbering that the first one leaves, so the topmost
    one that is already set is narrowed; without any it is `ROCR_VISIBLE_DEVICES`, which hides
    the other GPUs from every layer, or on Windows `HIP_VISIBLE_DEVICES`. There `index` and
    `uuids` are those of AMD's GPUs alone, which are all that HIP lists.

    Raises:
        ValueError: the variables that are set hide this GPU.
    """
    seen = visible_indices(uuids, environ, platform)
    if index not in seen:
        raise ValueError(f"GPU {index} is hidden; visible are {list(seen)}")
    if seen == (index,):
        return {}
    masks = masks_in_force(environ, platform)
    if not masks:
        name = "HIP_VISIBLE_DEVICES" if platform == "windows" else "ROCR_VISIBLE_DEVICES"
        return {name: str(index)}
    topmost = list(masks)[-1]
    below = {name: text for name, text in masks.items() if name != topmost}
    return {topmost: str(visible_indices(uuids, below, platform).index(index))}


def _filter(text: str, seen: Sequence[int], uuids: Sequence[str]) -> tuple[int, ...]:
    """One layer. As in the runtimes, the first entry that is not valid ends the list."""
    kept: list[int] = []
    for entry in text.split(","):
        index = _find(entry.strip(), seen, uuids)
        if index is None:
            break
        if index not in kept:
            kept.append(index)
    return tuple(kept)


def _find(entry: str, seen: Sequence[int], uuids: Sequence[str]) -> int | None:
    """Find the GPU that an entry names: by position in `seen`, or by the start of its UUID."""
    if _INDEX.fullmatch(entry):
        return seen[int(entry)] if int(entry) < len(seen) else None
    if not entry.lower().startswith("gpu-") or len(entry) == len("gpu-"):
        return None
    matches = [index for index in seen if uuids[index].lower().startswith(entry.lower())]
    return matches[0] if len(matches) == 1 else None

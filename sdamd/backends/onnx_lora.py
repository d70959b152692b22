"""LoRA for graphs: the weights that it touches are merged and override those of the export.

W' = W + strength * alpha / rank * up @ down, so a session with other weights is as fast as one
without, and the export in the cache stays the checkpoint's. Another strength is another session.
Source: https://arxiv.org/abs/2106.09685, section 4.1
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from diffusers import StableDiffusionPipeline
from safetensors import SafetensorError, safe_open

from sdamd.backends.onnx_export import Weight
from sdamd.backends.onnx_session import Array
from sdamd.errors import BadCheckpoint

_COMPONENTS: Final = ("unet", "text_encoder", "text_encoder_2")
_DOWN: Final = re.compile(r"(.+)\.(?:lora_A|lora\.down|lora_linear_layer\.down)\.weight")
_DOWN_OF_ATTENTION: Final = re.compile(r"(.+?)(?:\.processor)?\.to_(q|k|v|out)_lora\.down\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """A file of small matrices, and how strongly they count; 1 is as they were trained."""

    path: Path
    strength: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a LoRA adds to the weight of one module.

    `down` is (rank, in, ...), `up` (out, rank, ...); those of convolutions have two more
    dimensions. `scale` is strength * alpha / rank.
    """

    component: str
    module: str
    down: torch.Tensor
    up: torch.Tensor
    scale: float

    def applied(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight with the change in it, in float32.

        Raises:
            ValueError: the shapes do not fit.
        """
        added = self.up.float().flatten(1) @ self.down.float().flatten(1)
        if added.numel() != weight.numel() or len(added) != len(weight):
            raise ValueError(f"{list(added.shape)} for a weight of {list(weight.shape)}")
        return weight.float() + self.scale * added.reshape(weight.shape)


def read(lora: Lora, unet_config: Mapping[str, Any]) -> list[Change]:
    """Read a file in kohya's, diffusers' or peft's spelling.

    Raises:
        BadCheckpoint: it cannot be read, or holds something else than LoRA.
    """
    try:
        with safe_open(lora.path, framework="pt") as file:
            keys = list(file.keys())
        _refuse_relatives(lora, keys)
        state, alphas, about = StableDiffusionPipeline.lora_state_dict(
            str(lora.path),
            unet_config=unet_config,
            return_lora_metadata=True,
            use_safetensors=True,
            local_files_only=True,
        )
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise BadCheckpoint(f"{lora.path} cannot be read as a LoRA: {error}") from error
    changes, used = [], set()
    for key in state:
        if (found := _module_of(key)) is None:
            continue
        up_key = key.replace("lora_A", "lora_B").replace(".down.", ".up.")
        if up_key not in state:
            raise BadCheckpoint(f"{lora.path} has {key} without its other half")
        used |= {key, up_key}
        rank = len(state[key])
        trained = _trained_scale(found, rank, _alpha_of(key, alphas), about or {})
        changes.append(
            Change(
                component=found[0],
                module=found[1],
                down=state[key],
                up=state[up_key],
                scale=lora.strength * trained,
            )
        )
    if other := sorted(state.keys() - used):
        raise BadCheckpoint(f"{lora.path} has {other[0]}, which is no part of a LoRA that is known")
    return changes


def overrides(
    weights: Sequence[Weight],
    state: Mapping[str, torch.Tensor],
    changes: Iterable[Change],
    dtype: str,
) -> dict[str, Array]:
    """The merged values of the UNet's initialisers that are touched, by their names in the graph.

    Raises:
        BadCheckpoint: a change is for a weight that is not there.
    """
    merged = _merged(state, "unet", changes)
    wanted = getattr(torch, dtype)
    return {w.name: w.of(merged[w.key], wanted).numpy() for w in weights if w.key in merged}


def fuse(encoder: torch.nn.Module, component: str, changes: Iterable[Change]) -> None:
    """Merge the changes of one text encoder into it.

    Raises:
        BadCheckpoint: a change is for a weight that is not there.
    """
    state = encoder.state_dict()
    merged = _merged(state, component, changes)
    fused = {name: tensor.to(state[name].dtype) for name, tensor in merged.items()}
    encoder.load_state_dict(state | fused, assign=True)
    encoder.requires_grad_(requires_grad=False)


def _merged(
    state: Mapping[str, torch.Tensor], component: str, changes: Iterable[Change]
) -> dict[str, torch.Tensor]:
    merged: dict[str, torch.Tensor] = {}
    for change in changes:
        if change.component != component:
            continue
        key = f"{change.module}.weight"
        if key not in state:
            # transformers took the wrapper `text_model` away from CLIPTextModel in version 5.
            key = key.removeprefix("text_model.")
        if key not in state:
            raise BadCheckpoint(
                f"a LoRA changes {change.module} of the {component}, which this checkpoint does "
                "not have; it was made for another architecture"
            )
        try:
            merged[key] = change.applied(merged.get(key, state[key]))
        except (RuntimeError, ValueError) as error:
            raise BadCheckpoint(
                f"a LoRA does not fit {change.module} of the {component}: {error}; it was made "
                "for another architecture"
            ) from error
    return merged


def _module_of(key: str) -> tuple[str, str] | None:
    """Component and module, in today's spelling, of the key of a lower half; else None."""
    component, _, name = key.partition(".")
    if component not in _COMPONENTS:
        return None
    if match := _DOWN.fullmatch(name):
        return component, match[1]
    if match := _DOWN_OF_ATTENTION.fullmatch(name):
        if component != "unet":
            return component, f"{match[1]}.{match[2]}_proj"
        return component, f"{match[1]}.to_{match[2]}{'.0' if match[2] == 'out' else ''}"
    return None


def _alpha_of(key: str, alphas: Mapping[str, float] | None) -> float | None:
    """Kohya's files have one number for each module, which diffusers names by the lower half."""
    return (alphas or {}).get(f"{key.partition('.lora.')[0]}.alpha")


def _trained_scale(
    found: tuple[str, str], rank: int, alpha: float | None, about: Mapping[str, Any]
) -> float:
    """Give alpha / rank, where alpha is the module's own, else the metadata's, else rank.

    Raises:
        BadCheckpoint: the metadata ask for a variant of LoRA.
    """
    component, module = found
    if alpha is not None:
        return alpha / rank
    if f"{component}.lora_alpha" not in about:
        return 1.0
    if about.get(f"{component}.use_dora"):
        raise BadCheckpoint("the LoRA is a DoRA, which sdamd does not know")
    patterns = about.get(f"{component}.alpha_pattern") or {}
    own = (v for name, v in patterns.items() if re.fullmatch(rf"(.*\.)?({name})", module))
    asked = float(next(own, about[f"{component}.lora_alpha"]))
    # Source: https://arxiv.org/abs/2312.03732 for the root.
    return asked / (math.sqrt(rank) if about.get(f"{component}.use_rslora") else rank)


def _refuse_relatives(lora: Lora, keys: Iterable[str]) -> None:
    """Refuse DoRA, LoHa and LoKr, of which diffusers would drop a part with a warning."""
    for sign in ("dora_scale", "magnitude_vector", "hada_", "lokr_"):
        if found := [key for key in keys if sign in key]:
            raise BadCheckpoint(
                f"{lora.path} is no plain LoRA: it has {found[0]}; sdamd knows LoRA alone"
            )

"""A live pipeline under a plan: how its components compute, and where their weights are.

    pipeline of diffusers, unchanged
      unet.forward, text_encoder.forward ...    stand-ins, put there once: the component's turn,
      vae.decode, vae.encode                    passes, tiles; what is asked outside sees nothing
        layers                                  bands, chunks, lent weights: put there anew by each
                                                plan

A plan can be changed at any time between two calls, to any other and back. Whoever wants to see
the calls from outside (a guard, tiles of the picture) wraps the stand-ins after the first `apply`;
they stay the same.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from accelerate import init_empty_weights
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKLOutput
from diffusers.models.autoencoders.vae import DecoderOutput, DiagonalGaussianDistribution

from sdamd.backends import forwards
from sdamd.backends.attention import attend_with, has_fused_kernel
from sdamd.backends.bands import band
from sdamd.backends.frugal_unet import lighten
from sdamd.backends.passes import in_passes
from sdamd.backends.placement import Placement, Turn, Way, placement_of
from sdamd.plan import Plan
from sdamd.sampling import tiling

log = logging.getLogger(__name__)

DENOISERS: Final = ("unet", "controlnet")
"""Components that are called in every step, and share a turn."""
BANDS_ON_THE_CPU: Final = 32
"""Rows at a time where the CPU has to finish what the device could not."""


@dataclass(slots=True, eq=False)
class Part:
    """A component under its plan. Its stand-ins hold it, so that they see each new plan."""

    model: Any
    plan: Plan
    device: torch.device
    turn: Turn | None = None
    group: str = ""

    def begin(self) -> None:
        """Have the weights on the device, if they are not always."""
        if self.turn is not None:
            self.turn.take(self.group)


def apply(pipe: Any, plan: Plan, device: torch.device) -> None:
    """Let the components of a pipeline compute, and lie, as planned.

    Weights may have to come from their files. A pipeline of other makes (onnxruntime) has no
    weights to place and no layers to change, and gets passes and tiles alone.

    Args:
        pipe: of diffusers; state lies on its components, which pipelines may share.
        plan: of which `attention`, `vae_attention`, `block_bytes`, `channels_last`, `miopen`,
            `passes`, `feed_forward_chunks`, `vae_bands`, `vae_tile`, `offload`,
            `resident_bytes` and `storage` are heeded.
        device: where it computes.

    Raises:
        torch.OutOfMemoryError: the weights do not fit; a more frugal plan can be applied then.
        BadRequest: a package for the attention is not installed.
    """
    device = _numbered(device)
    models = dict(_components(pipe))
    parts = {name: _part(name, model, plan, device) for name, model in models.items()}
    before = {(part.plan, part.device) for part in parts.values()}
    for part in parts.values():
        part.plan, part.device = plan, device
    if before == {(plan, device)} and all(vars(m).get(_DONE) for m in models.values()):
        return
    for name, model in models.items():
        vars(model)[_DONE] = False  # until everything below has been done
        forwards.restore(model)
        _compute(name, model, plan, device)
    _place(parts, plan, device)
    for model in models.values():
        vars(model)[_DONE] = True


def on_cpu(vae: Any) -> Any:
    """A VAE of the same weights in float32 on the CPU, in bands, whatever became of the first."""
    with init_empty_weights(include_buffers=False):
        model = type(vae).from_config(vae.config)
    weights = placement_of(vae).read()
    with torch.inference_mode(mode=False):
        copied = {name: weight.to("cpu", torch.float32) for name, weight in weights.items()}
        model.load_state_dict(copied, strict=False, assign=True)
    model.eval().requires_grad_(requires_grad=False)
    attend_with(model, "chunked", block_bytes=2**24, upcast=True)
    band(model, BANDS_ON_THE_CPU)
    return model


def _components(pipe: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, component in pipe.components.items():
        if isinstance(component, torch.nn.Module):
            yield name, component


def _numbered(device: torch.device) -> torch.device:
    """The device as tensors on it tell it: `cuda` alone is the current one."""
    if str(device) == "cuda":
        current = torch.cuda.current_device() if torch.cuda.is_available() else 0
        return torch.device("cuda", current)
    return device


_PART: Final = "_sdamd_part"
_DONE: Final = "_sdamd_done"


def _part(name: str, model: torch.nn.Module, plan: Plan, device: torch.device) -> Part:
    """The part of a component; with it, its stand-ins are put there when it is first asked for."""
    found = vars(model).get(_PART)
    if isinstance(found, Part):
        return found
    part = Part(model, plan, device)
    vars(model)[_PART] = part
    for method, stand_in in _STAND_INS.get(name, {"forward": _forward}).items():
        vars(model)[method] = partial(stand_in, part, getattr(model, method))
    return part


def _compute(name: str, model: Any, plan: Plan, device: torch.device) -> None:
    """Let a component's layers compute as planned; where its weights are comes afterwards."""
    if name == "vae":
        # One head for the whole picture, whose scores leave float16's range in some VAEs.
        attend_with(model, plan.vae_attention, block_bytes=plan.block_bytes, upcast=True)
        if plan.vae_bands:
            band(model, plan.vae_bands)
    elif name in DENOISERS and hasattr(model, "set_attn_processor"):
        kind = plan.attention
        if kind == "fused" and not has_fused_kernel(device, model.dtype):
            log.warning("this torch has no fused attention for the card; attending in blocks")
            kind = "chunked"
        attend_with(model, kind, block_bytes=plan.block_bytes)
        lighten(model, plan.feed_forward_chunks)


def _place(parts: dict[str, Part], plan: Plan, device: torch.device) -> None:
    last = torch.channels_last if plan.channels_last else torch.contiguous_format
    ways = {}
    for name in parts:
        is_unet = name == "unet"
        ways[name] = Way(
            offload=plan.offload,
            device=device,
            layout=last if name in {"unet", "vae"} else torch.contiguous_format,
            resident_bytes=plan.resident_bytes if is_unet else 0,
            storage=getattr(torch, plan.storage) if is_unet and plan.storage else None,
        )
    placements = {name: placement_of(part.model) for name, part in parts.items()}
    if any(placements[name].way != way for name, way in ways.items()):
        # Whoever had the turn lay in another way.
        turn = None if plan.offload == "none" else _turn(placements)
        for name, part in parts.items():
            part.turn, part.group = turn, _group(name)
    for name, way in ways.items():
        placements[name].settle(way)


def _turn(placements: dict[str, Placement]) -> Turn:
    groups: dict[str, list[Placement]] = {}
    for name, placement in placements.items():
        groups.setdefault(_group(name), []).append(placement)
    return Turn(groups)


def _group(name: str) -> str:
    return "denoisers" if name in DENOISERS else name


def _forward(part: Part, inner: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """In the place of a text encoder's forward."""
    part.begin()
    return inner(*given, **options)


def _denoise(part: Part, inner: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """In the place of a UNet's forward."""
    part.begin()
    return in_passes(inner, part.plan.passes, *given, **options)


def _decode(
    part: Part,
    inner: Callable[..., Any],
    z: torch.Tensor,
    return_dict: bool = True,  # noqa: FBT001, FBT002  # as diffusers has it
    generator: Any = None,  # noqa: ARG001  # as diffusers has it
) -> Any:
    """In the place of a VAE's decode; tiles come in float32."""
    part.begin()
    plan = part.plan
    whole = partial(_first, inner)
    # MIOpen is what torch calls cudnn on ROCm; the VAE is where it can be slower than nothing.
    with torch.backends.cudnn.flags(enabled=plan.miopen, benchmark=False):
        if plan.vae_tile:
            factor = tiling.vae_factor(part.model)
            made = tiling.decode(whole, z, tile=plan.vae_tile, factor=factor)
        elif plan.vae_bands:
            made = _one_by_one(whole, z)
        else:
            made = whole(z)
    return DecoderOutput(sample=made) if return_dict else (made,)


def _encode(
    part: Part,
    inner: Callable[..., Any],
    x: torch.Tensor,
    return_dict: bool = True,  # noqa: FBT001, FBT002  # as diffusers has it
) -> Any:
    """In the place of a VAE's encode."""
    part.begin()
    plan = part.plan

    def moments(pixels: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = inner(pixels, return_dict=False)[0].parameters
        return made

    with torch.backends.cudnn.flags(enabled=plan.miopen, benchmark=False):
        if plan.vae_tile:
            factor = tiling.vae_factor(part.model)
            made = tiling.encode(moments, x, tile=plan.vae_tile, factor=factor).to(x.dtype)
        elif plan.vae_bands:
            made = _one_by_one(moments, x)
        else:
            made = moments(x)
    latents = DiagonalGaussianDistribution(made)
    return AutoencoderKLOutput(latent_dist=latents) if return_dict else (latents,)


def _first(inner: Callable[..., Any], z: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = inner(z, return_dict=False)[0]
    return made


def _one_by_one(
    compute: Callable[[torch.Tensor], torch.Tensor], pictures: torch.Tensor
) -> torch.Tensor:
    if pictures.shape[0] == 1:
        return compute(pictures)
    return torch.cat([compute(pictures.narrow(0, n, 1)) for n in range(pictures.shape[0])])


_STAND_INS: Final[Mapping[str, Mapping[str, Callable[..., Any]]]] = {
    "vae": {"decode": _decode, "encode": _encode},
    "unet": {"forward": _denoise},
}
"""What stands in the place of which method; of other components it is `_forward`."""

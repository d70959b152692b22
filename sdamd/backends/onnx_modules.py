"""UNet, VAE and ControlNet as diffusers' pipelines know them, computed by onnxruntime.

The pipelines stay unchanged: they see modules on the CPU. UNet and ControlNet take and give
float32 whatever their graphs compute in, so that schedulers lose nothing. The VAE has a dtype, as
every AutoencoderKL has: with `vae.float()` its float32 graphs are taken, which mend a picture that
left the range of float16.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers import AutoencoderKL, ControlNetModel
from diffusers.configuration_utils import FrozenDict
from diffusers.models.controlnets.controlnet import ControlNetOutput
from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput
from torch import nn

from sdamd.backends import onnx_export
from sdamd.backends.onnx_export import Export, free_dimensions
from sdamd.backends.onnx_session import Sessions
from sdamd.errors import BadRequest


class OrtUNet(nn.Module):
    """Stands for a UNet2DConditionModel in a pipeline.

    `rows` is how many rows of a batch go into one call of the graph; None is all.
    """

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(
        self, config: FrozenDict, export: Export, sessions: Sessions, rows: int | None = None
    ) -> None:
        """`config` is complete; see `full_config`."""
        super().__init__()
        self.config = config
        self._export = export
        self._sessions = sessions
        self._rows = rows
        if self.config.addition_embed_type == "text_time":
            # SDXL's pipelines read how wide this layer is.
            wide = self.config.projection_class_embeddings_input_dim
            self.add_embedding = SimpleNamespace(linear_1=SimpleNamespace(in_features=wide))

    def forward(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor | float,
        encoder_hidden_states: torch.Tensor,
        *,
        added_cond_kwargs: Mapping[str, torch.Tensor] | None = None,
        down_block_additional_residuals: tuple[torch.Tensor, ...] | None = None,
        mid_block_additional_residual: torch.Tensor | None = None,
        return_dict: bool = True,
        **others: object,
    ) -> UNet2DConditionOutput | tuple[torch.Tensor]:
        """Predict as UNet2DConditionModel.forward does.

        Raises:
            BadRequest: an argument is given for which the graph has no input.
            OutOfVram: the device ran out of memory.
        """
        feeds = _feeds(sample, timestep, encoder_hidden_states, added_cond_kwargs)
        graph = "unet"
        if down_block_additional_residuals and mid_block_additional_residual is not None:
            graph = "unet-controlnet"
            residuals = (*down_block_additional_residuals, mid_block_additional_residual)
            feeds |= {f"residual_{number}": each for number, each in enumerate(residuals)}
        elif down_block_additional_residuals or mid_block_additional_residual is not None:
            others["residuals of some blocks alone"] = True
        _refuse("UNet", others)
        (made,) = _run(self._export.graph(graph), self._sessions, self._rows, feeds)
        return UNet2DConditionOutput(sample=made) if return_dict else (made,)


class OrtControlNet(ControlNetModel):  # type: ignore[misc]  # which pipelines ask for by its class
    """Stands for a ControlNetModel in a pipeline, alone or in a MultiControlNetModel.

    `sessions` are its own, and in no `Turn`: every step runs it and the UNet. `rows` is as in
    `OrtUNet`.
    """

    width: torch.Tensor
    """Empty; in the place of weights, which say what dtype and device a module has."""

    def __init__(
        self, config: FrozenDict, export: Export, sessions: Sessions, rows: int | None = None
    ) -> None:
        """`config` is complete; see `full_config`."""
        super(ControlNetModel, self).__init__()  # without the layers
        self.register_to_config(**config)
        self.register_buffer("width", torch.empty(0), persistent=False)
        self._export = export
        self._sessions = sessions
        self._rows = rows

    def forward(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor | float,
        encoder_hidden_states: torch.Tensor,
        controlnet_cond: torch.Tensor,
        conditioning_scale: float = 1.0,
        *,
        added_cond_kwargs: Mapping[str, torch.Tensor] | None = None,
        guess_mode: bool = False,
        return_dict: bool = True,
        **others: object,
    ) -> ControlNetOutput | tuple[list[torch.Tensor], torch.Tensor]:
        """Give residuals as ControlNetModel.forward does, but pooled ones in their full size.

        Raises:
            BadRequest: an argument is given for which the graph has no input, or the picture has
                another size than the sample.
            OutOfVram: the device ran out of memory.
        """
        _refuse("ControlNet", others)
        halvings = len(self.config.conditioning_embedding_out_channels) - 1
        _refuse_other_size(controlnet_cond, sample, 2**halvings)
        if self.config.controlnet_conditioning_channel_order == "bgr":
            controlnet_cond = controlnet_cond.flip(1)
        feeds = _feeds(sample, timestep, encoder_hidden_states, added_cond_kwargs)
        feeds["controlnet_cond"] = controlnet_cond.expand(len(sample), -1, -1, -1)
        made = _run(self._export.graph("controlnet"), self._sessions, self._rows, feeds)
        pools = self.config.global_pool_conditions
        scales = torch.full([len(made)], conditioning_scale)
        if guess_mode and not pools:
            scales *= torch.logspace(-1, 0, len(made))
        *down, middle = (each * scale for each, scale in zip(made, scales, strict=True))
        if pools:
            *down, middle = (
                t.mean((2, 3), keepdim=True).expand_as(t).clone() for t in (*down, middle)
            )
        if return_dict:
            return ControlNetOutput(down_block_res_samples=down, mid_block_res_sample=middle)
        return down, middle


def _feeds(
    sample: torch.Tensor,
    timestep: torch.Tensor | float,
    encoder_hidden_states: torch.Tensor,
    added_cond_kwargs: Mapping[str, torch.Tensor] | None,
) -> dict[str, torch.Tensor]:
    return {
        "sample": sample,
        "timestep": torch.as_tensor(timestep, dtype=torch.float32).expand(len(sample)),
        "encoder_hidden_states": encoder_hidden_states,
        **(added_cond_kwargs or {}),
    }


def _run(
    model: Path, sessions: Sessions, step: int | None, feeds: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    """All outputs in float32, computed for `step` rows at a time."""
    batch = len(feeds["sample"])
    made = []
    for start in range(0, batch, step or batch):
        rows = {name: t[start : start + (step or batch)].numpy() for name, t in feeds.items()}
        sizes = free_dimensions(
            batch=len(rows["sample"]),
            height=feeds["sample"].shape[2],
            width=feeds["sample"].shape[3],
            sequence=feeds["encoder_hidden_states"].shape[1],
        )
        made.append(sessions.run(model, sizes, rows))
    return [
        torch.cat([torch.from_numpy(part).float() for part in parts])
        for parts in zip(*made, strict=True)
    ]


class OrtHalf(nn.Module):
    """Stands for the `encoder` or the `decoder` of an AutoencoderKL.

    `graph` gives the model's path for a dtype (`float16`, `float32`).
    """

    width: torch.Tensor
    """Empty; its dtype is the module's, and follows `half()` and `float()` as weights would."""

    def __init__(self, graph: Callable[[str], Path], sessions: Sessions) -> None:
        super().__init__()
        self.register_buffer("width", torch.empty(0), persistent=False)
        self._graph = graph
        self._sessions = sessions

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        """Moments of pixels, or pixels of latents: (pictures, channels, height, width)."""
        model = self._graph(str(self.width.dtype).removeprefix("torch."))
        batch, _, height, width = sample.shape
        sizes = free_dimensions(batch=batch, height=height, width=width)
        (output,) = self._sessions.run(model, sizes, {"sample": sample.numpy()})
        return torch.from_numpy(output).to(self.width.dtype)


class _Casting(nn.Conv2d):
    """Takes any dtype: latents are float32 where the VAE may not be."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.weight.dtype))


def ort_vae(
    config: Mapping[str, Any],
    export: Callable[[str], Export],
    sessions: Sessions,
    state: Mapping[str, torch.Tensor],
) -> AutoencoderKL:
    """Make an AutoencoderKL whose encoder and decoder are graphs; tiles and slices stay its own.

    `state` is the VAE's; of it only the two small convolutions around the latents are taken.
    """
    with init_empty_weights():
        vae = AutoencoderKL.from_config(dict(config))
    vae.encoder = OrtHalf(lambda dtype: export(dtype).graph("vae-encoder"), sessions)
    vae.decoder = OrtHalf(lambda dtype: export(dtype).graph("vae-decoder"), sessions)
    for name in ("quant_conv", "post_quant_conv"):
        if (conv := getattr(vae, name)) is not None:
            cast = _Casting(conv.in_channels, conv.out_channels, 1)
            cast.load_state_dict({k: state[f"{name}.{k}"] for k in ("weight", "bias")})
            setattr(vae, name, cast)
    return vae.eval().requires_grad_(requires_grad=False)


def ort_controlnet(
    config: Mapping[str, Any],
    dtype: str,
    paths: Sequence[Path],
    cache: Path,
    state: Callable[[], Mapping[str, torch.Tensor]],
    sessions: Sessions,
    *,
    rows: int | None = None,
) -> OrtControlNet:
    """Make a ControlNet whose weights are in `cache`, or are written there first.

    `config` is that of a ControlNetModel, `paths` are the files of its weights, and `state` reads
    them, by diffusers' names; it is called only where the cache lacks them.

    Raises:
        BadCheckpoint: a tensor is missing, or no graph of this architecture ships with sdamd.
        StorageError: there is too little room, or the cache cannot be written.
    """
    template = onnx_export.find_template("controlnet", config)
    exported = onnx_export.export(template, dtype, paths, cache, state)
    return OrtControlNet(full_config(ControlNetModel, config), exported, sessions, rows)


def full_config(kind: type, config: Mapping[str, Any]) -> FrozenDict:
    """Add the fields that a config.json leaves at the defaults of its class `kind`."""
    parameters = inspect.signature(kind.__init__).parameters  # type: ignore[misc]  # of a class
    defaults = {k: p.default for k, p in parameters.items() if p.default is not p.empty}
    return FrozenDict(defaults | {k: v for k, v in config.items() if not k.startswith("_")})


def _refuse(whose: str, arguments: Mapping[str, object]) -> None:
    given = sorted(name for name, value in arguments.items() if not _is_nothing(value))
    if given:
        raise BadRequest(
            f"DirectML's graphs of the {whose} take no {', '.join(given)}; "
            "the engines rocm and cpu do"
        )


def _refuse_other_size(picture: torch.Tensor, sample: torch.Tensor, scale: int) -> None:
    height, width = picture.shape[2:]
    wanted_height, wanted_width = (scale * side for side in sample.shape[2:])
    if (height, width) != (wanted_height, wanted_width):
        raise BadRequest(
            f"the picture for ControlNet is {width} x {height} pixels; it must be "
            f"{wanted_width} x {wanted_height}, as large as what is drawn"
        )


def _is_nothing(value: object) -> bool:
    return value is None or (isinstance(value, Mapping) and not value)

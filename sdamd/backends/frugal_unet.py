"""A UNet that holds less at a time, bit for bit the same: in place, and in chunks of tokens.

What a module has just made and nobody else sees is changed in place. A feed-forward layer looks
at each token alone, so it may take some at a time: its inner layer is eight times as wide as what
goes in.
"""

from typing import Any

import torch
from diffusers.models.attention import FeedForward
from diffusers.models.resnet import ResnetBlock2D
from torch.nn import functional

from sdamd.backends.forwards import replace


def lighten(unet: Any, feed_forward_chunks: int) -> None:
    """Let a UNet or ControlNet compute in place, and its feed-forward layers in so many chunks.

    `sdamd.backends.forwards.restore` takes it back.
    """
    for module in unet.modules():
        if isinstance(module, ResnetBlock2D) and _is_plain(module):
            replace(module, _resnet, module)
        elif isinstance(module, FeedForward) and feed_forward_chunks > 1:
            replace(module, _feed_forward, module, feed_forward_chunks)


def _is_plain(block: ResnetBlock2D) -> bool:
    return (
        isinstance(block.nonlinearity, torch.nn.SiLU)
        and block.time_embedding_norm == "default"
        and block.upsample is None
        and block.downsample is None
    )


def _resnet(block: Any, entered: torch.Tensor, temb: torch.Tensor | None = None) -> torch.Tensor:
    """A ResnetBlock2D; what it is given is left as it is, since the UNet keeps it for later."""
    hidden: torch.Tensor = functional.silu(block.norm1(entered), inplace=True)
    hidden = block.conv1(hidden)
    if block.time_emb_proj is not None and temb is not None:
        active = temb if block.skip_time_act else functional.silu(temb)
        hidden += block.time_emb_proj(active)[:, :, None, None]
    hidden = functional.silu(block.norm2(hidden), inplace=True)
    hidden = block.conv2(hidden)
    if block.conv_shortcut is not None:
        entered = block.conv_shortcut(entered)
    hidden += entered
    return hidden if block.output_scale_factor == 1 else hidden.div_(block.output_scale_factor)


def _feed_forward(layer: Any, chunks: int, entered: torch.Tensor) -> torch.Tensor:
    """A FeedForward over (pictures, tokens, channels)."""
    size = -(-entered.shape[1] // chunks)
    made: torch.Tensor | None = None
    for start in range(0, entered.shape[1], size):
        tokens = min(size, entered.shape[1] - start)
        part = entered.narrow(1, start, tokens)
        for module in layer.net:
            part = module(part)
        if made is None:
            made = torch.empty(
                (*entered.shape[:-1], part.shape[-1]), dtype=part.dtype, device=part.device
            )
        made.narrow(1, start, tokens).copy_(part)
    assert made is not None
    return made

"""The VAE in bands of rows: the same numbers, without what whole maps take.

A 3x3 convolution over a whole map wants up to nine times its input as workspace, and the norm and
the activation before it each a copy of that input. Here a convolution makes some rows at a time
from those rows and their neighbours, and norms them on the way. A norm's statistics are those of
the whole map, so there is no seam. What remains alive is the map that goes in and the one that
comes out.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.upsampling import Upsample2D
from torch.nn import functional

from sdamd.backends.forwards import replace

Prepare: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""What becomes of rows before they are convolved."""

STATISTICS_ROWS: Final = 64
"""Rows that are summed at a time in float32, where the map itself is not."""


def band(vae: Any, rows: int) -> None:
    """Let the encoder and the decoder of an `AutoencoderKL` work on `rows` rows at a time.

    Only what is known to be the same in bands: whatever else a VAE has works on whole maps.
    `sdamd.backends.forwards.restore` takes it back.
    """
    for coder in (vae.encoder, vae.decoder):
        convolutions = [m for m in coder.modules() if isinstance(m, torch.nn.Conv2d)]
        for module in convolutions:
            if _is_known(module):
                replace(module, convolve, module, rows)
        for module in coder.modules():
            if isinstance(module, ResnetBlock2D) and _is_plain(module):
                replace(module, _resnet, module)
                for norm in (module.norm1, module.norm2):
                    replace(norm, normed, norm)
            elif isinstance(module, Upsample2D) and _is_convolution(module):
                replace(module, _upsample, module)
            elif isinstance(module, Downsample2D) and module.padding == 0:
                replace(module, _downsample, module)
        if isinstance(getattr(coder, "conv_norm_out", None), torch.nn.GroupNorm):
            replace(coder, _coder, coder)
            replace(coder.conv_norm_out, normed, coder.conv_norm_out)


def _is_known(conv: torch.nn.Conv2d) -> bool:
    return (
        conv.kernel_size == (3, 3)
        and conv.padding_mode == "zeros"
        and conv.dilation == (1, 1)
        and conv.stride in {(1, 1), (2, 2)}
    )


def _is_plain(block: ResnetBlock2D) -> bool:
    return (
        isinstance(block.nonlinearity, torch.nn.SiLU)
        and block.time_emb_proj is None
        and block.upsample is None
        and block.downsample is None
    )


def _is_convolution(module: Upsample2D) -> bool:
    return bool(
        module.interpolate
        and module.use_conv
        and not module.use_conv_transpose
        and module.norm is None
        and module.name == "conv"
    )


def convolve(
    conv: torch.nn.Conv2d,
    rows: int,
    entered: torch.Tensor,
    *,
    prepare: Prepare | None = None,
    onto: torch.Tensor | None = None,
    scale: int = 1,
    below: int = 0,
) -> torch.Tensor:
    """A convolution of 3x3 that makes `rows` rows at a time; all bands are of one shape.

    Args:
        conv: with a stride of 1 or 2.
        rows: how many are made at a time.
        entered: (pictures, channels, height, width).
        prepare: for each band of `entered`, which is a new tensor already where it is scaled.
        onto: the result is added to it, in place.
        scale: enlarge `entered` so many times first, each pixel repeated.
        below: rows and columns of zeros below and right of `entered`, for a `conv` without padding.
    """
    top, side = conv.padding if isinstance(conv.padding, tuple) else (0, 0)
    stride = conv.stride[0]
    pictures, _, height, width = entered.shape
    height, width = height * scale, width * scale
    out_height = (height + 2 * top + below - 3) // stride + 1
    out_width = (width + 2 * side + below - 3) // stride + 1
    rows = min(rows, out_height)
    made = onto
    if made is None:
        shape = (pictures, conv.out_channels, out_height, out_width)
        made = torch.empty(
            shape, dtype=entered.dtype, device=entered.device, memory_format=_layout(entered)
        )
    for start in range(0, out_height, rows):
        # The last band begins earlier rather than being smaller, since a GPU looks for its
        # kernels anew at each shape; what it makes again is left out.
        begin = min(start, out_height - rows)
        first = begin * stride - top
        last = first + (rows - 1) * stride + 3
        part = _rows(entered, first, last, scale, prepare)
        if below:
            part = functional.pad(part, (0, below, 0, 0))
        part = functional.conv2d(part, conv.weight, conv.bias, conv.stride, (0, side))
        target = made.narrow(2, start, rows - (start - begin))
        part = part.narrow(2, start - begin, rows - (start - begin))
        if onto is None:
            target.copy_(part)
        else:
            target.add_(part)
    return made


def _rows(
    entered: torch.Tensor, first: int, last: int, scale: int, prepare: Prepare | None
) -> torch.Tensor:
    """The rows [first, last) of the map enlarged `scale` times; those outside of it are zeros."""
    height = entered.shape[2] * scale
    above, beneath = max(0, -first), max(0, last - height)
    begin, end = first + above, last - beneath
    part = entered.narrow(2, begin // scale, -(-end // scale) - begin // scale)
    if prepare is not None:
        part = prepare(part)
    if scale > 1:
        part = functional.interpolate(part, scale_factor=float(scale), mode="nearest")
        part = part.narrow(2, begin - begin // scale * scale, end - begin)
    return functional.pad(part, (0, 0, above, beneath)) if above or beneath else part


def _layout(pixels: torch.Tensor) -> torch.memory_format:
    last = pixels.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last and not pixels.is_contiguous() else torch.contiguous_format


def normed(norm: torch.nn.GroupNorm, entered: torch.Tensor) -> Prepare:
    """The norm over the whole map and the SiLU after it, as a function of rows of the map.

    Sums are in float32 whatever the dtype, and those of blocks of rows are joined as Chan et al.
    do, which loses nothing to a mean that is far from zero.
    Source: https://doi.org/10.1080/00031305.1983.10483115
    """
    pictures, channels, height, _ = entered.shape
    groups = norm.num_groups
    count = 0
    mean = torch.zeros((pictures, groups, 1), device=entered.device)
    squares = torch.zeros_like(mean)
    for start in range(0, height, STATISTICS_ROWS):
        rows = min(STATISTICS_ROWS, height - start)
        part = entered.narrow(2, start, rows).float().reshape(pictures, groups, -1)
        more = part.shape[2]
        variance, middle = torch.var_mean(part, dim=2, correction=0, keepdim=True)
        apart = middle - mean
        mean = mean + apart * (more / (count + more))
        squares = squares + variance * more + apart.square() * (count * more / (count + more))
        count += more
    spread = (squares / count + norm.eps).rsqrt()
    each = (pictures, groups, channels // groups)
    factor = spread.expand(each).reshape(pictures, channels, 1, 1)
    shift = -mean.expand(each).reshape(pictures, channels, 1, 1) * factor
    if norm.affine:
        weight, bias = (value.float().view(1, channels, 1, 1) for value in (norm.weight, norm.bias))
        factor, shift = factor * weight, shift * weight + bias
    return partial(_scaled_and_active, factor=factor, shift=shift)


def _scaled_and_active(
    rows: torch.Tensor, *, factor: torch.Tensor, shift: torch.Tensor
) -> torch.Tensor:
    made = torch.addcmul(shift, rows.float(), factor).to(rows.dtype)
    return functional.silu(made, inplace=True)


def _resnet(block: Any, entered: torch.Tensor, temb: torch.Tensor | None = None) -> torch.Tensor:
    """A ResnetBlock2D of a VAE. Without a shortcut it changes what it is given: nobody keeps it."""
    assert temb is None
    hidden = block.conv1(entered, prepare=block.norm1(entered))
    base = entered if block.conv_shortcut is None else block.conv_shortcut(entered)
    made: torch.Tensor = block.conv2(hidden, prepare=block.norm2(hidden), onto=base)
    return made if block.output_scale_factor == 1 else made.div_(block.output_scale_factor)


def _upsample(
    module: Any, entered: torch.Tensor, output_size: tuple[int, int] | None = None
) -> torch.Tensor:
    assert output_size is None
    made: torch.Tensor = module.conv(entered, scale=2)
    return made


def _downsample(module: Any, entered: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = module.conv(entered, below=1)
    return made


def _coder(coder: Any, sample: torch.Tensor) -> torch.Tensor:
    """An encoder or a decoder: what they share is the order of their parts."""
    sample = coder.conv_in(sample)
    if hasattr(coder, "down_blocks"):
        for block in coder.down_blocks:
            sample = block(sample)
        sample = coder.mid_block(sample)
    else:
        sample = coder.mid_block(sample, None)
        for block in coder.up_blocks:
            sample = block(sample, None)
    made: torch.Tensor = coder.conv_out(sample, prepare=coder.conv_norm_out(sample))
    return made

"""Which kernel attends: fused, in blocks of a byte budget, or what else is asked for by name.

Where a card has no fused kernel, torch's attention holds the score of every pair of pixels:
16 GiB for SD 1.5 at 1024 pixels. `chunked` gives the same numbers and holds one block of scores.
"""

import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import torch
from diffusers.models.attention_processor import AttnProcessor2_0

from sdamd.errors import BadRequest
from sdamd.plan import BLOCK_BYTES_CPU


class Kernel(Protocol):
    """What takes the place of scaled dot product attention."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        upcast: bool = False,
    ) -> torch.Tensor:
        """Attend; the result has the shape and the dtype of `query`.

        Args:
            query: (batch, heads, tokens, width).
            key: (batch, heads, keys, width).
            value: as `key`.
            mask: added to the scores, or False where no attention may go; broadcast to
                (batch, heads, tokens, keys).
            upcast: compute the scores in float32.
        """
        ...


MIN_ROWS: Final = 64
"""With fewer queries a block is a thin product of matrices, so the keys are divided instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """How many heads, queries and keys of one picture are taken at once."""

    heads: int
    rows: int
    keys: int


def blocks_of(heads: int, tokens: int, keys: int, scores: int) -> Blocks:
    """Divide so that at most `scores` scores are alive, in as few and as even blocks as that takes.

    Whole heads first, then some queries of one head over all keys, then some of both.
    """
    if tokens * keys <= scores:
        return Blocks(heads=_even(heads, scores // (tokens * keys)), rows=tokens, keys=keys)
    least = min(tokens, MIN_ROWS)
    if least * keys <= scores:
        return Blocks(heads=1, rows=_even(tokens, scores // keys), keys=keys)
    return Blocks(heads=1, rows=least, keys=_even(keys, max(1, scores // least)))


def chunked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    block_bytes: int,
    upcast: bool = False,
) -> torch.Tensor:
    """Exact attention that holds about `block_bytes` of scores and what becomes of them.

    Softmax and sums are in float32 whatever the dtype. The scores themselves are in the dtype of
    `query`, as the products of matrices give them, or in float32 with `upcast` and for bfloat16,
    whose eight bits would blur them.

    Source: https://arxiv.org/abs/2112.05682 (Rabe and Staats, blocks of queries and of keys).
    """
    wide = torch.float32 if upcast or query.dtype == torch.bfloat16 else query.dtype
    # The scores, their softmax, and that once more where the values have another dtype.
    each = 2 * wide.itemsize + (0 if wide == value.dtype else value.dtype.itemsize)
    batch, heads, tokens, _ = query.shape
    if query.device.type == "cpu":
        block_bytes = min(block_bytes, BLOCK_BYTES_CPU)
    scores = max(1, block_bytes // each)
    if batch * heads * tokens * key.shape[2] <= scores:
        return _over_all_keys(query.to(wide), key.to(wide), value, mask).to(query.dtype)
    if mask is not None:
        mask = mask.expand(batch, heads, -1, key.shape[2])
    size = blocks_of(heads, tokens, key.shape[2], scores)
    made = torch.empty_like(query)
    for picture in range(batch):
        for some in _slices(heads, size.heads):
            keys, values = key[picture, some].to(wide), value[picture, some]
            for rows in _slices(tokens, size.rows):
                asked = query[picture, some, rows].to(wide)
                over = None if mask is None else _of_rows(mask[picture, some], rows)
                made[picture, some, rows] = (
                    _over_all_keys(asked, keys, values, over)
                    if size.keys == key.shape[2]
                    else _over_some_keys(asked, keys, values, over, size.keys)
                )
    return made


def _over_all_keys(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    scores = _scores(query, key, mask)
    # Kernels for half precision round the result alone; they compute in float32.
    weights = scores.softmax(-1)
    if mask is not None:
        # Torch's own attention gives zero to a query that may look nowhere.
        weights.masked_fill_(scores.amax(-1, keepdim=True) == -torch.inf, 0)
    del scores
    return weights.to(value.dtype) @ value


def _over_some_keys(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    size: int,
) -> torch.Tensor:
    """The softmax as a running sum, made smaller whenever a higher score turns up.

    Source: https://arxiv.org/abs/1805.02867 (Milakov and Gimelshein, algorithm 3).
    """
    shape = (*query.shape[:-1], 1)
    # Not minus infinity: the difference of two of those would be NaN.
    highest = query.new_full(shape, torch.finfo(torch.float32).min, dtype=torch.float32)
    total = torch.zeros_like(highest)
    made = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=torch.float32)
    for keys in _slices(key.shape[-2], size):
        over = None if mask is None else mask[..., keys]
        scores = _scores(query, key[..., keys, :], over).float()
        higher = torch.maximum(highest, scores.amax(-1, keepdim=True))
        shrink = (highest - higher).exp_()
        weights = scores.sub_(higher).exp_()
        total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
        made.mul_(shrink).add_(weights.to(value.dtype) @ value[..., keys, :])
        highest = higher
        del scores, weights
    return made.div_(total.clamp_min_(torch.finfo(torch.float32).tiny))


def _scores(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    # The query is made smaller and not the product, which could leave the range of float16.
    scores = (query / math.sqrt(query.shape[-1])) @ key.transpose(-1, -2)
    if mask is None:
        return scores
    if mask.dtype == torch.bool:
        return scores.masked_fill_(~mask, -torch.inf)
    return scores.add_(mask)


def _of_rows(mask: torch.Tensor, rows: slice) -> torch.Tensor:
    """The part of a mask for some queries; one row stands for all."""
    return mask if mask.shape[-2] == 1 else mask[..., rows, :]


def _even(whole: int, most: int) -> int:
    """The size of the fewest parts of at most `most`, so that the last one is no sliver."""
    return -(-whole // -(-whole // most))


def _slices(whole: int, part: int) -> Iterator[slice]:
    return (slice(start, min(start + part, whole)) for start in range(0, whole, part))


class Processor:
    """The projections around a kernel, as diffusers' `Attention` modules want them done.

    For UNets and for the one-headed attention in a VAE's middle, with its norm and residual.
    """

    def __init__(self, kernel: Kernel, *, upcast: bool | None = None) -> None:
        self._kernel = kernel
        self._upcast = upcast

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        temb: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend over (batch, tokens, channels) or (batch, channels, height, width)."""
        entered = hidden_states
        if attn.spatial_norm is not None:
            hidden_states = attn.spatial_norm(hidden_states, temb)
        image = hidden_states.shape if hidden_states.ndim == 4 else None
        if image is not None:
            hidden_states = hidden_states.flatten(2).transpose(1, 2)
        if attn.group_norm is not None:
            hidden_states = attn.group_norm(hidden_states.transpose(1, 2)).transpose(1, 2)
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        if encoder_hidden_states is not None and attn.norm_cross:
            context = attn.norm_encoder_hidden_states(context)
        made = self._attend(attn, hidden_states, context, attention_mask)
        made = attn.to_out[1](attn.to_out[0](made))
        if image is not None:
            made = made.transpose(1, 2).reshape(image)
        if attn.residual_connection:
            made = made + entered
        result: torch.Tensor = made / attn.rescale_output_factor
        return result

    def _attend(
        self, attn: Any, asking: torch.Tensor, context: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        batch, keys, _ = context.shape
        query, key, value = (
            projected.unflatten(-1, (attn.heads, -1)).transpose(1, 2)
            for projected in (attn.to_q(asking), attn.to_k(context), attn.to_v(context))
        )
        if attn.norm_q is not None:
            query = attn.norm_q(query)
        if attn.norm_k is not None:
            key = attn.norm_k(key)
        if mask is not None:
            mask = attn.prepare_attention_mask(mask, keys, batch)
            mask = mask.view(batch, attn.heads, -1, mask.shape[-1])
        upcast = attn.upcast_attention if self._upcast is None else self._upcast
        made = self._kernel(query, key, value, mask, upcast=upcast)
        return made.transpose(1, 2).flatten(2).to(query.dtype)


def has_fused_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch would attend here without holding all scores.

    On ROCm the kernels (AOTriton) are files beside torch, one for each architecture, and where
    they are missing torch falls back in silence. Elsewhere there always is one.
    """
    if device.type != "cuda" or torch.version.hip is None:
        return True
    heads = torch.empty(1, 1, 8, 64, device=device, dtype=dtype)
    causal = grouped = False
    asked = torch.backends.cuda.SDPAParams(heads, heads, heads, None, 0.0, causal, grouped)
    return bool(
        torch.backends.cuda.can_use_flash_attention(asked)
        or torch.backends.cuda.can_use_efficient_attention(asked)
    )


def attend_with(model: Any, kind: str, *, block_bytes: int, upcast: bool | None = None) -> None:
    """Let a UNet, ControlNet or VAE of diffusers attend in the way of this name.

    Args:
        model: has `set_attn_processor`.
        kind: one of `Plan.attention`.
        block_bytes: how much the scores may take where blocks are made.
        upcast: compute scores in float32; None leaves it to the model's config.

    Raises:
        BadRequest: the package for it is not installed.
    """
    if kind == "sliced":
        model.set_attention_slice("max")
    elif kind in {"fused", "math"}:  # torch's own, which takes a kernel where there is one
        model.set_attn_processor(AttnProcessor2_0())
    else:
        model.set_attn_processor(Processor(_kernel(kind, block_bytes), upcast=upcast))


def _kernel(kind: str, block_bytes: int) -> Kernel:
    blocks: Kernel = partial(chunked, block_bytes=block_bytes)
    if kind == "chunked":
        return blocks
    module, name = _PACKAGES[kind]
    try:
        attend = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise BadRequest(f"attention is {kind}, and its package cannot be used: {error}") from error

    def packaged(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        upcast: bool = False,
    ) -> torch.Tensor:
        half = query.dtype in {torch.float16, torch.bfloat16}
        if mask is not None or upcast or not half or query.shape[-1] > WIDEST_PACKAGED:
            # Neither package takes all of these; blocks do, with the same numbers.
            return blocks(query, key, value, mask, upcast=upcast)
        # They want (batch, tokens, heads, width).
        swapped = (part.transpose(1, 2) for part in (query, key, value))
        made: torch.Tensor = attend(*swapped)
        return made.transpose(1, 2)

    return packaged


_PACKAGES: Final = {
    "xformers": ("xformers.ops", "memory_efficient_attention"),
    "flash": ("flash_attn", "flash_attn_func"),
}

WIDEST_PACKAGED: Final = 256
"""The widest head of flash-attention. Source: its README, 2026-08."""

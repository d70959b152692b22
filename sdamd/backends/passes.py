"""A UNet's call in several passes: some samples at a time, and the answers joined.

Kernels look at each sample alone, so the numbers are those of one call, up to how a kernel rounds
at another size of the batch.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput


def in_passes(
    forward: Callable[..., Any],
    passes: int,
    sample: torch.Tensor,
    *others: Any,
    return_dict: bool = True,
    **options: Any,
) -> Any:
    """Call `forward` as diffusers' pipelines call a UNet, in up to `passes` passes.

    Every tensor with one row for each sample is divided, wherever it lies: embeddings, residuals
    of a ControlNet, masks, what SDXL adds. The rest goes to all passes.
    """
    rows = sample.shape[0]
    size = -(-rows // max(1, passes))
    if size == rows:
        return forward(sample, *others, return_dict=return_dict, **options)
    given = (sample, *others)
    made = [
        forward(*_rows(given, some, rows), return_dict=False, **_rows(options, some, rows))[0]
        for some in _slices(rows, size)
    ]
    joined = torch.cat(made)
    return UNet2DConditionOutput(sample=joined) if return_dict else (joined,)


def _slices(rows: int, size: int) -> Iterator[tuple[int, int]]:
    """(first, how many), of as even a size as there is."""
    return ((start, min(size, rows - start)) for start in range(0, rows, size))


def _rows(value: Any, some: tuple[int, int], rows: int) -> Any:
    """The same value for some of the samples; lists are new ones, since the UNet empties them."""
    if isinstance(value, torch.Tensor):
        divided = value.ndim > 0 and value.shape[0] == rows
        return value.narrow(0, *some) if divided else value
    if isinstance(value, dict):
        return {key: _rows(each, some, rows) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_rows(each, some, rows) for each in value)
    return value

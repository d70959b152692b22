"""Several prompts for one picture: what AND asks for, beside an unchanged pipeline.

Source: Liu et al. 2022, arXiv:2206.01714. With guidance scale g and weights w, the noise is
`negative + g * sum(w * (prompt - negative))`. The pipeline knows one prompt, so what the UNet
says of it is replaced by `negative + sum(w * (prompt - negative))`, and the pipeline does the rest.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from sdamd.sampling.conditioning import Conditioning, Conditions, Embedding


@contextmanager
def composed(unet: Any, conditioning: Conditioning, step: Callable[[], int]) -> Iterator[None]:
    """Let the UNet answer for all subprompts of each job while the context lasts.

    Args:
        unet: a `torch.nn.Module` that diffusers' pipelines can call.
        conditioning: of the jobs of the pass.
        step: the step that the UNet is called for, which counts from 1.
    """
    rows = [(row, job) for row, job in enumerate(conditioning.jobs) if job.composed]
    if not rows:
        yield
        return

    def answer(
        unet: Any, args: tuple[Any, ...], options: dict[str, Any], output: tuple[torch.Tensor]
    ) -> tuple[torch.Tensor]:
        noise = output[0].clone()
        first = len(conditioning.jobs) if conditioning.guided else 0
        for row, job in rows:
            at = slice(first + row, first + row + 1)
            negative = noise[row : row + 1] if conditioning.guided else None

            def predict(text: Embedding, at: slice = at) -> torch.Tensor:
                return _predict(unet, args, options, text, at)

            noise[at] = _composition(job, step(), noise[at], negative, predict)
        return (noise,)

    handle = unet.register_forward_hook(answer, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _composition(
    job: Conditions,
    step: int,
    first: torch.Tensor,
    negative: torch.Tensor | None,
    predict: Callable[[Embedding], torch.Tensor],
) -> torch.Tensor:
    """What stands for the prediction of one prompt; all are (1, channels, height, width)."""
    if negative is None:
        assert job.negative is not None
        negative = predict(job.negative.at(step))
    base = negative.float()
    others = [predict(line.at(step)) for _, line in job.parts[1:]]
    shifts = [
        weight * (prediction.float() - base)
        for (weight, _), prediction in zip(job.parts, [first, *others], strict=True)
    ]
    return (base + sum(shifts)).to(first.dtype)


def _predict(
    unet: Any, args: tuple[Any, ...], options: Mapping[str, Any], text: Embedding, row: slice
) -> torch.Tensor:
    """Ask the UNet once more, for one picture and another text, past the hook.

    One at a time, so that neither memory nor the others' rounding change.
    """
    latents, timestep, *rest = args
    asked = dict(options, encoder_hidden_states=text.tokens)
    if text.pooled is not None:
        added = options["added_cond_kwargs"]
        asked["added_cond_kwargs"] = dict(
            added, text_embeds=text.pooled, time_ids=added["time_ids"][row]
        )
    prediction: torch.Tensor = unet.forward(latents[row], timestep, *rest, **asked)[0]
    return prediction

"""Prompts to the embeddings that condition the UNet."""

import logging
from collections.abc import Sequence
from typing import Any

import torch

from sdamd.request import Job

log = logging.getLogger(__name__)


def encode(pipe: Any, jobs: Sequence[Job]) -> dict[str, torch.Tensor]:
    """The embeddings of all jobs, as keyword arguments of the pipeline's call.

    Each distinct pair of prompts is encoded once. The tensors are (jobs, tokens, channels) in the
    text encoder's dtype; SDXL's pooled ones are (jobs, channels). What goes beyond the 75 tokens
    that CLIP reads is cut off, with a warning.
    """
    pairs = list(dict.fromkeys((job.prompt, job.negative_prompt) for job in jobs))
    for text in dict.fromkeys(t for pair in pairs for t in pair):
        _warn_of_cut(pipe, text)
    # One at a time, so that a prompt's rounding does not depend on its neighbours.
    encoded = [_encode_pair(pipe, pair, guided=jobs[0].guidance_scale > 1) for pair in pairs]
    rows = [pairs.index((job.prompt, job.negative_prompt)) for job in jobs]
    return {name: torch.cat([encoded[row][name] for row in rows]) for name in encoded[0]}


def _encode_pair(pipe: Any, pair: tuple[str, str], *, guided: bool) -> dict[str, torch.Tensor]:
    made = pipe.encode_prompt(
        prompt=pair[0],
        negative_prompt=pair[1] if guided else None,
        device=pipe._execution_device,
        num_images_per_prompt=1,
        do_classifier_free_guidance=guided,
    )
    names = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds",
             "negative_pooled_prompt_embeds")  # fmt: skip
    # SD 1 and 2 have no pooled ones, and without guidance there are no negative ones.
    return {name: t for name, t in zip(names, made, strict=False) if t is not None}


def _warn_of_cut(pipe: Any, text: str) -> None:
    limit = pipe.tokenizer.model_max_length
    ids = pipe.tokenizer(text, truncation=False, verbose=False).input_ids
    if len(ids) > limit:
        lost = pipe.tokenizer.decode(ids[limit - 1 : -1]).strip()
        shown = lost if len(lost) <= 80 else f"{lost[:77]}..."
        log.warning(
            "the prompt has %d tokens and the model reads %d; ignored: %s",
            len(ids) - 2, limit - 2, shown,
        )  # fmt: skip

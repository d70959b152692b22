"""Prompts to embeddings, with the real CLIP vocabulary and an encoder that only counts."""

import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from sdamd.backends.loading import clip_tokenizer
from sdamd.request import Job
from sdamd.sampling.conditioning import encode


class Encoder:
    """In the place of a pipeline: each prompt's embedding is its number among those encoded."""

    _execution_device = torch.device("cpu")

    def __init__(self, *, pooled: bool = False) -> None:
        self.tokenizer = clip_tokenizer("<|endoftext|>")
        self.asked: list[tuple[str, str | None]] = []
        self._pooled = pooled

    def encode_prompt(
        self, prompt: str, negative_prompt: str | None, **options: object
    ) -> tuple[torch.Tensor | None, ...]:
        number = float(len(self.asked))
        self.asked.append((prompt, negative_prompt))
        embeds = torch.full((1, 77, 8), number)
        negative = None if negative_prompt is None else -embeds
        if not self._pooled:
            return embeds, negative
        pooled = torch.full((1, 8), number)
        return embeds, negative, pooled, None if negative_prompt is None else -pooled


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder()


def jobs(job: Job, *pairs: tuple[str, str]) -> list[Job]:
    return [replace(job, prompt=a, negative_prompt=b) for a, b in pairs]


def numbers(tensor: torch.Tensor) -> list[float]:
    return [float(row.flatten()[0]) for row in tensor]


def test_each_pair_of_prompts_is_encoded_once_and_given_to_its_jobs(job: Job) -> None:
    """And alone: in one batch with others it would round by their number."""
    encoder = Encoder()
    made = encode(encoder, jobs(job, ("a", ""), ("b", ""), ("a", ""), ("a", "no"), ("b", "")))
    assert encoder.asked == [("a", ""), ("b", ""), ("a", "no")]
    assert made.keys() == {"prompt_embeds", "negative_prompt_embeds"}
    assert numbers(made["prompt_embeds"]) == [0, 1, 0, 2, 1]
    assert numbers(made["negative_prompt_embeds"]) == [0, -1, 0, -2, -1]
    assert made["prompt_embeds"].shape == (5, 77, 8)


def test_without_guidance_there_is_no_negative_prompt(job: Job) -> None:
    encoder = Encoder()
    made = encode(encoder, [replace(job, guidance_scale=1.0, negative_prompt="no")])
    assert encoder.asked[0][1] is None
    assert made.keys() == {"prompt_embeds"}


def test_pooled_embeddings_go_along(job: Job) -> None:
    made = encode(Encoder(pooled=True), jobs(job, ("a", ""), ("b", "")))
    assert numbers(made["pooled_prompt_embeds"]) == [0, 1]
    assert numbers(made["negative_pooled_prompt_embeds"]) == [0, -1]


def said(caplog: pytest.LogCaptureFixture) -> Sequence[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("prompt", "warnings"),
    [
        ("", []),
        ("house " * 75, []),
        (
            "house " * 75 + "by the sea",
            ["the prompt has 78 tokens and the model reads 75; ignored: by the sea"],
        ),
        (
            "house " * 74 + "wow!!! 100",
            ["the prompt has 79 tokens and the model reads 75; ignored: !!! 1 0 0"],
        ),
    ],
)
def test_what_is_cut_off_is_told(
    job: Job,
    encoder: Encoder,
    caplog: pytest.LogCaptureFixture,
    prompt: str,
    warnings: list[str],
) -> None:
    encode(encoder, [replace(job, prompt=prompt)])
    assert said(caplog) == warnings


def test_a_long_end_is_shown_shortened_and_each_text_once(
    job: Job, encoder: Encoder, caplog: pytest.LogCaptureFixture
) -> None:
    text = "mountain " * 200
    encode(encoder, jobs(job, (text, text), (text, "")))
    (warning,) = said(caplog)
    assert warning.startswith(
        "the prompt has 200 tokens and the model reads 75; ignored: mountain "
    )
    assert warning.endswith("...")
    assert len(warning) < 150


def test_a_negative_prompt_is_measured_too(
    job: Job, encoder: Encoder, caplog: pytest.LogCaptureFixture
) -> None:
    encode(encoder, [replace(job, negative_prompt="ugly " * 76)])
    assert len(said(caplog)) == 1

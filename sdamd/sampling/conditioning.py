"""Prompts to the embeddings that condition the UNet, for every step."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import torch

from sdamd.prompt import BREAK, parse_weights, schedule, subprompts
from sdamd.request import Job

COMMA_BACKTRACK: Final = 20
"""How many tokens before the end of a full chunk a comma may stand to be the place to cut.

Source: AUTOMATIC1111's default of `comma_padding_backtrack`.
"""


class Emphasis(StrEnum):
    """What becomes of an embedding whose tokens were multiplied by their weights.

    ORIGINAL brings its mean back to what it was before, which keeps the picture's contrast;
    NO_NORM leaves it. Source: AUTOMATIC1111's `Emphasis` of the same names.
    """

    ORIGINAL = "original"
    NO_NORM = "no norm"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Embedding:
    """A text as the UNet takes it.

    `tokens` is (1, tokens, channels), in the text encoder's dtype; `pooled` is (1, channels) for
    SDXL, and None elsewhere.
    """

    tokens: torch.Tensor
    pooled: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A text that may change on the way: each embedding with the last step it holds for."""

    phases: tuple[tuple[int, Embedding], ...]

    def at(self, step: int) -> Embedding:
        """The embedding of a step, which counts from 1."""
        return next(embedding for until, embedding in self.phases if step <= until)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What one job asks of the UNet: its subprompts with their weights, and what it must not be.

    `negative` is None where nobody looks at it.
    """

    parts: tuple[tuple[float, Timeline], ...]
    negative: Timeline | None

    @property
    def composed(self) -> bool:
        """Whether it takes more than a prompt and a guidance scale."""
        return len(self.parts) > 1 or self.parts[0][0] != 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditioning:
    """The conditions of all jobs of a pass, and the tensors that a pipeline wants of them."""

    jobs: tuple[Conditions, ...]
    guided: bool

    def changes_at(self, step: int) -> bool:
        """Whether a step has another embedding than the one before."""
        timelines = [line for job in self.jobs for _, line in job.parts]
        timelines += [job.negative for job in self.jobs if job.negative]
        return any(until == step - 1 for line in timelines for until, _ in line.phases)

    def arguments(self, step: int) -> dict[str, torch.Tensor]:
        """The embeddings as keyword arguments of the pipeline's call.

        They are (jobs, tokens, channels), the pooled ones (jobs, channels). Texts of fewer chunks
        than others are repeated until all are of one length: attention to a text and to the same
        text twice are the same, so nothing depends on who shares the pass.
        """
        texts = {"prompt": [job.parts[0][1].at(step) for job in self.jobs]}
        if self.guided:
            texts["negative_prompt"] = [job.negative.at(step) for job in self.jobs if job.negative]
        length = math.lcm(*(e.tokens.shape[1] for row in texts.values() for e in row))
        made = {f"{name}_embeds": _as_long(row, length) for name, row in texts.items()}
        for name, row in texts.items():
            pooled = [e.pooled for e in row if e.pooled is not None]
            if pooled:
                made[name.replace("prompt", "pooled_prompt_embeds")] = torch.cat(pooled)
        return made

    def loop_tensors(self, step: int) -> dict[str, torch.Tensor]:
        """The same, as the pipelines hold them within their loop: the negative ones go first."""
        made = self.arguments(step)
        named = {"prompt_embeds": "prompt_embeds", "pooled_prompt_embeds": "add_text_embeds"}
        return {
            there: torch.cat([made[f"negative_{here}"], made[here]]) if self.guided else made[here]
            for here, there in named.items()
            if here in made
        }


def encode(
    pipe: Any, jobs: Sequence[Job], *, emphasis: Emphasis = Emphasis.ORIGINAL
) -> Conditioning:
    """Read the prompts of all jobs, and encode each text that comes of them once.

    Prompts may have any number of tokens. AND is read in prompts alone; in a negative prompt it
    is a word.
    """
    guided = jobs[0].guidance_scale > 1
    encoder = _Encoder(pipe, emphasis)
    return Conditioning(jobs=tuple(encoder.conditions(j, guided) for j in jobs), guided=guided)


def _as_long(row: Iterable[Embedding], length: int) -> torch.Tensor:
    return torch.cat([e.tokens.repeat(1, length // e.tokens.shape[1], 1) for e in row])


class _Encoder:
    """The text encoders of a pipeline, with the embeddings that they have made."""

    def __init__(self, pipe: Any, emphasis: Emphasis) -> None:
        self._emphasis = emphasis
        self._device = pipe._execution_device
        self._tokenizers = [pipe.tokenizer]
        self._encoders = [pipe.text_encoder]
        self._is_xl = hasattr(pipe, "text_encoder_2")
        if self._is_xl:
            self._tokenizers.append(pipe.tokenizer_2)
            self._encoders.append(pipe.text_encoder_2)
        self._made: dict[str, Embedding] = {}

    def conditions(self, job: Job, guided: bool) -> Conditions:  # noqa: FBT001  # one caller
        parts = tuple(
            (part.weight, self._timeline(part.text, job.steps)) for part in subprompts(job.prompt)
        )
        alone = Conditions(parts=parts, negative=None)
        if not (guided or alone.composed):
            return alone
        return Conditions(parts=parts, negative=self._timeline(job.negative_prompt, job.steps))

    def _timeline(self, text: str, steps: int) -> Timeline:
        phases = schedule(text, steps)
        return Timeline(
            phases=tuple((phase.until, self._embedding(phase.text)) for phase in phases)
        )

    def _embedding(self, text: str) -> Embedding:
        if text not in self._made:
            self._made[text] = self._encode(text)
        return self._made[text]

    def _encode(self, text: str) -> Embedding:
        chunked = [_chunks(tokenizer, text) for tokenizer in self._tokenizers]
        count = _rounded_up(max(len(chunks) for chunks in chunked))
        channels = []
        pooled = None
        for tokenizer, encoder, chunks in zip(
            self._tokenizers, self._encoders, chunked, strict=True
        ):
            chunks += [[] for _ in range(count - len(chunks))]
            made = [self._encode_chunk(tokenizer, encoder, chunk) for chunk in chunks]
            channels.append(torch.cat([hidden for hidden, _ in made], dim=1))
            pooled = made[0][1]
        tokens = torch.cat(channels, dim=-1)
        return Embedding(tokens=tokens.to(self._encoders[-1].dtype), pooled=pooled)

    def _encode_chunk(
        self, tokenizer: Any, encoder: Any, chunk: "Chunk"
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One chunk alone, so that its rounding has no neighbours: (1, tokens, channels).

        With it what SDXL's second encoder says of the whole, (1, channels).
        """
        padding = tokenizer.model_max_length - 2 - len(chunk)
        ids = [tokenizer.bos_token_id, *(number for number, _ in chunk), tokenizer.eos_token_id]
        ids += [tokenizer.pad_token_id] * padding
        batch = torch.tensor([ids], device=self._device)
        if self._is_xl:
            made = encoder(batch, output_hidden_states=True)
            # All of SDXL looks at the last layer but one.
            hidden, pooled = made.hidden_states[-2], made[0] if made[0].ndim == 2 else None
        else:
            hidden, pooled = encoder(batch, attention_mask=None)[0], None
        weights = [1.0, *(weight for _, weight in chunk), *[1.0] * (padding + 1)]
        return self._weighted(hidden, weights), pooled

    def _weighted(self, hidden: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
        if all(weight == 1 for weight in weights):
            return hidden
        plain = hidden.float()
        scaled = plain * torch.tensor(weights, device=hidden.device)[:, None]
        if self._emphasis is Emphasis.ORIGINAL:
            scaled *= plain.mean() / scaled.mean()
        return scaled.to(hidden.dtype)


Chunk = list[tuple[int, float]]
"""Tokens with their weights; as many as the text encoder has places, less start and end."""


def _chunks(tokenizer: Any, text: str) -> list[Chunk]:
    """Cut a text into what the text encoder can read at a time.

    A full chunk is cut behind a comma near its end, so that what belongs together stays together.
    """
    limit = tokenizer.model_max_length - 2
    comma = tokenizer.convert_tokens_to_ids(",</w>")
    if comma == tokenizer.unk_token_id:
        comma = None  # a small vocabulary may be without
    chunks: list[Chunk] = [[]]
    for fragment in parse_weights(text):
        if fragment == BREAK:
            chunks.append([])
            continue
        for number in _tokens(tokenizer, fragment.text):
            if len(chunks[-1]) == limit:
                cut = limit if number == comma else _cut(chunks[-1], comma)
                chunks.append(chunks[-1][cut:])
                del chunks[-2][cut:]
            chunks[-1].append((number, fragment.weight))
    if len(chunks) > 1 and not chunks[-1]:
        del chunks[-1]
    return chunks


def _tokens(tokenizer: Any, text: str) -> list[int]:
    numbers: list[int] = tokenizer(
        text, add_special_tokens=False, truncation=False, verbose=False
    ).input_ids
    return numbers


def _cut(chunk: Chunk, comma: int | None) -> int:
    """Behind the last comma near the end of a full chunk, or else at its end."""
    for number in range(len(chunk), len(chunk) - COMMA_BACKTRACK, -1):
        if chunk[number - 1][0] == comma:
            return number
    return len(chunk)


def _rounded_up(count: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24 ...: what an embedding may have in chunks.

    Chunks without words fill the rest. Two such numbers have no common multiple beyond three
    times the larger, so that a pass of prompts of many lengths stays within bounds.
    """
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power

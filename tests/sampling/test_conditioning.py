"""Prompts to embeddings: the pipelines' own encoding as oracle, and an encoder that only counts."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from transformers import CLIPTokenizer

from sdamd import models
from sdamd.backends import means
from sdamd.backends.loading import clip_tokenizer
from sdamd.backends.torch_backend import TorchBackend
from sdamd.plan import make_plan
from sdamd.request import Job
from sdamd.sampling.conditioning import Conditioning, Emphasis, encode
from sdamd.settings import Settings

START, END, COMMA = 49406, 49407, 267


class Counter:
    """In the place of a text encoder: a token's embedding is its number, eight times."""

    dtype = torch.float32

    def __init__(self) -> None:
        self.read: list[list[int]] = []

    def __call__(self, ids: torch.Tensor, **_: object) -> tuple[torch.Tensor]:
        self.read += ids.tolist()
        assert len(ids) == 1, "each chunk is encoded alone, so that its rounding has no neighbours"
        return (ids[:, :, None].expand(-1, -1, 8).float(),)


@pytest.fixture(scope="module")
def tokenizer() -> CLIPTokenizer:
    return clip_tokenizer("<|endoftext|>")


@pytest.fixture
def counting(tokenizer: CLIPTokenizer) -> Any:
    return SimpleNamespace(
        tokenizer=tokenizer, text_encoder=Counter(), _execution_device=torch.device("cpu")
    )


@pytest.fixture(scope="module")
def embedded() -> Iterator[Any]:
    """The embedded model's pipeline."""
    job = Job(index=0, prompt="", negative_prompt="", checkpoint="", width=64, height=64,
              steps=1, guidance_scale=1.0, scheduler="Euler", seed=0, upscale=1)  # fmt: skip
    checkpoint = models.find("", Path("/nowhere"))
    plan = make_plan(job, None, checkpoint, Settings(home=Path("/nowhere"), device="cpu"))
    pipe = TorchBackend().load(checkpoint, plan)._pipe
    means.apply(pipe, plan, torch.device("cpu"))
    with torch.inference_mode():
        yield pipe


def jobs(job: Job, *pairs: tuple[str, str]) -> list[Job]:
    return [replace(job, prompt=a, negative_prompt=b) for a, b in pairs]


def embeddings(pipe: Any, job: Job, prompt: str, **options: Any) -> torch.Tensor:
    """Of a prompt's first step: (tokens, channels)."""
    made = encode(pipe, [replace(job, prompt=prompt)], **options).arguments(1)
    return made["prompt_embeds"][0]


# -- the pipelines' own encoding -----------------------------------------------------------------

PLAIN = [
    "",
    "a red circle",
    "  two\n\ttrees ",
    "house " * 75,
    "wow! 100%, a, b,",
    "猫 über I <3 :)",
]


@pytest.mark.parametrize("prompt", PLAIN)
def test_a_plain_prompt_is_encoded_as_the_pipeline_does(
    embedded: Any, job: Job, prompt: str
) -> None:
    (want, unwanted) = embedded.encode_prompt(prompt, "cpu", 1, True, "ugly, ")
    made = encode(embedded, jobs(job, (prompt, "ugly, "))).arguments(1)
    assert made.keys() == {"prompt_embeds", "negative_prompt_embeds"}
    assert torch.equal(made["prompt_embeds"], want)
    assert torch.equal(made["negative_prompt_embeds"], unwanted)


@pytest.mark.parametrize("prompt", PLAIN)
@torch.inference_mode()
def test_a_plain_prompt_of_sdxl_too(
    small_xl: StableDiffusionXLPipeline, job: Job, prompt: str
) -> None:
    """Two encoders, the last layer but one of each, padded with `!` in the second."""
    made = encode(small_xl, jobs(job, (prompt, "ugly"))).arguments(1)
    oracle = small_xl.encode_prompt(prompt, negative_prompt="ugly", device="cpu")
    names = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds",
             "negative_pooled_prompt_embeds")  # fmt: skip
    for name, expected in zip(names, oracle, strict=True):
        assert torch.equal(made[name], expected), name
    assert made.keys() == set(names)


# -- who is encoded ------------------------------------------------------------------------------


def test_each_text_is_encoded_once_and_given_to_its_jobs(counting: Any, job: Job) -> None:
    made = encode(counting, jobs(job, ("a", ""), ("b", ""), ("a", "b"), ("b", ""))).arguments(1)
    first = [ids[1] for ids in counting.text_encoder.read]
    a, b = counting.tokenizer("a b").input_ids[1:-1]
    assert first == [a, END, b]
    assert made["prompt_embeds"][:, 1, 0].tolist() == [a, b, a, b]
    assert made["negative_prompt_embeds"][:, 1, 0].tolist() == [END, END, b, END]
    assert made["prompt_embeds"].shape == (4, 77, 8)


def test_without_guidance_there_is_no_negative_prompt(counting: Any, job: Job) -> None:
    conditions = encode(counting, [replace(job, guidance_scale=1.0, negative_prompt="no")])
    assert conditions.arguments(1).keys() == {"prompt_embeds"}
    assert conditions.loop_tensors(1).keys() == {"prompt_embeds"}
    assert len(counting.text_encoder.read) == 1


def test_within_the_loop_the_negative_ones_go_first(
    small_xl: StableDiffusionXLPipeline, job: Job
) -> None:
    made = encode(small_xl, jobs(job, ("a", "b"), ("c", "d")))
    outside, inside = made.arguments(1), made.loop_tensors(1)
    for there, here in (("prompt_embeds", ""), ("add_text_embeds", "pooled_")):
        name = f"{here}prompt_embeds"
        both = torch.cat([outside[f"negative_{name}"], outside[name]])
        assert torch.equal(inside[there], both)


# -- chunks --------------------------------------------------------------------------------------


def words_of_chunks(counting: Any) -> list[str]:
    """What the counter read, without start, end and padding."""
    tokenizer = counting.tokenizer
    read = counting.text_encoder.read
    assert all(len(ids) == 77 and ids[0] == START and ids[-1] == END for ids in read)
    return [tokenizer.decode([n for n in ids[1:] if n != END]).strip() for ids in read]


@pytest.mark.parametrize(
    ("prompt", "chunks"),
    [
        ("a " * 75, ["a " * 75]),
        ("a " * 76, ["a " * 75, "a"]),
        ("a BREAK b", ["a", "b"]),
        ("BREAK a", ["", "a"]),
        ("a BREAK", ["a"]),
        ("BREAK", [""]),
        ("a BREAK BREAK b", ["a", "", "b"]),
        ("a " * 75 + "BREAK b", ["a " * 75, "b"]),
        ("(a BREAK b)", ["a break b"]),
        ("a " * 60 + "(b:1.3)" * 20, ["a " * 60 + "b " * 15, "b " * 5]),
    ],
)
def test_a_prompt_is_read_in_chunks(
    counting: Any, job: Job, prompt: str, chunks: list[str]
) -> None:
    prompt = prompt.replace("(b:1.3)", " (b:1.3)")
    encode(counting, [replace(job, guidance_scale=1.0, prompt=prompt)])
    read = words_of_chunks(counting)
    assert read[: len(chunks)] == [chunk.strip() for chunk in chunks]
    assert not any(read[len(chunks) :])


@pytest.mark.parametrize(
    ("comma_at", "first"),
    [(0, 75), (54, 75), (55, 56), (60, 61), (73, 74), (74, 75), (75, 75), (76, 75)],
)
def test_a_full_chunk_is_cut_behind_a_comma_of_its_last_20_tokens(
    counting: Any, job: Job, comma_at: int, first: int
) -> None:
    words = ["house"] * 90
    words[comma_at] = ","
    encode(counting, [replace(job, guidance_scale=1.0, prompt=" ".join(words))])
    one, two = counting.text_encoder.read
    assert one.index(END) - 1 == first
    assert two.index(END) - 1 == 90 - first


def test_a_vocabulary_without_a_comma_cuts_at_the_end(counting: Any, job: Job) -> None:
    """And its word for what it does not know is not taken for one."""
    tokens = ["a</w>", "<|startoftext|>", "<|endoftext|>"]
    tokenizer = CLIPTokenizer(
        vocab={token: n for n, token in enumerate(tokens)}, merges=[], model_max_length=77
    )
    counting.tokenizer = tokenizer
    encode(counting, [replace(job, guidance_scale=1.0, prompt="a " * 74 + ", a a")])
    one, two = counting.text_encoder.read
    assert one == [1, *[0] * 74, 2, 2]
    assert two == [1, 0, 0, *[2] * 74]


def test_a_long_prompts_end_changes_the_embeddings_of_its_own_chunk(
    embedded: Any, job: Job
) -> None:
    text = "a red house by the sea, " * 15
    one, two = embeddings(embedded, job, text + "snow"), embeddings(embedded, job, text + "sun")
    assert one.shape[0] == 154
    assert torch.equal(one[:77], two[:77])
    assert not torch.equal(one[77:], two[77:])


def test_the_pooled_embedding_is_of_the_first_chunk(
    small_xl: StableDiffusionXLPipeline, job: Job
) -> None:
    made = encode(small_xl, jobs(job, ("a BREAK b", "c BREAK d"), ("a", "c"))).arguments(1)
    assert made["prompt_embeds"].shape == (2, 154, 48)
    assert torch.equal(*made["pooled_prompt_embeds"])
    assert torch.equal(*made["negative_pooled_prompt_embeds"])


@pytest.mark.parametrize(
    ("prompt", "negative", "chunks"),
    [(1, 1, 1), (2, 1, 2), (1, 3, 3), (2, 3, 6), (4, 3, 12), (5, 1, 6), (7, 6, 24)],
)
def test_texts_of_a_pass_are_repeated_to_one_length(
    counting: Any, job: Job, prompt: int, negative: int, chunks: int
) -> None:
    pair = (" BREAK ".join("a" * prompt), " BREAK ".join("b" * negative))
    conditions = encode(counting, jobs(job, pair, ("c", "c"))).arguments(1)
    for name, own in (("prompt_embeds", prompt), ("negative_prompt_embeds", negative)):
        long, short = conditions[name]
        assert long.shape == short.shape == (chunks * 77, 8)
        assert torch.equal(short, short[:77].repeat(chunks, 1))
        period = next(n for n in (1, 2, 3, 4, 6, 8) if n >= own) * 77
        assert torch.equal(long, long[:period].repeat(chunks * 77 // period, 1))


# -- weights -------------------------------------------------------------------------------------


def test_without_norm_a_words_embedding_is_multiplied(counting: Any, job: Job) -> None:
    plain = embeddings(counting, job, "a house b c")
    made = embeddings(counting, job, "a (house:1.5) [b] (c:-1)", emphasis=Emphasis.NO_NORM)
    factors = torch.ones(77)
    factors[2], factors[3], factors[4] = 1.5, 1 / 1.1, -1
    assert torch.allclose(made, plain * factors[:, None])


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.4])
def test_as_in_the_original_the_mean_is_restored(embedded: Any, job: Job, weight: float) -> None:
    plain = embeddings(embedded, job, "a red circle")
    made = embeddings(embedded, job, f"a (red:{weight}) circle")
    assert made.mean() == pytest.approx(float(plain.mean()), rel=1e-3)
    scale = made[0] / plain[0]  # the start's weight is 1, so this is the mean's doing
    assert torch.allclose(scale, scale[0].expand_as(scale), rtol=1e-4)
    assert torch.allclose(made[2], plain[2] * weight * scale[0], rtol=1e-4, atol=1e-6)
    assert torch.allclose(made[3], plain[3] * scale[0], rtol=1e-4, atol=1e-6)


def test_each_chunk_and_each_encoder_has_its_own_mean(
    small_xl: StableDiffusionXLPipeline, job: Job
) -> None:
    made = embeddings(small_xl, job, "(a:1.5) BREAK b")
    plain = embeddings(small_xl, job, "a BREAK b")
    assert torch.equal(made[77:], plain[77:])
    for channels in (slice(0, 16), slice(16, 48)):
        assert made[:77, channels].mean() == pytest.approx(
            float(plain[:77, channels].mean()), rel=1e-3
        )
        assert not torch.allclose(made[:77, channels], plain[:77, channels])


def test_a_weight_of_1_changes_nothing(embedded: Any, job: Job) -> None:
    plain = embeddings(embedded, job, "a red circle")
    assert torch.equal(embeddings(embedded, job, r"a (red:1) circle"), plain)
    assert torch.equal(embeddings(embedded, job, r"([a (red:1) circle])"), plain)


# -- steps ---------------------------------------------------------------------------------------


def first_tokens(conditions: Conditioning, steps: int, name: str = "prompt_embeds") -> list[float]:
    return [float(conditions.arguments(step)[name][0, 1, 0]) for step in range(1, steps + 1)]


def test_a_prompt_may_change_from_step_to_step(counting: Any, job: Job) -> None:
    a, b = map(float, counting.tokenizer("a b").input_ids[1:-1])
    job = replace(job, steps=4, prompt="[a:b:0.5]", negative_prompt="[a|b]")
    conditions = encode(counting, [job])
    assert first_tokens(conditions, 4) == [a, a, b, b]
    assert first_tokens(conditions, 4, "negative_prompt_embeds") == [a, b, a, b]
    assert len(counting.text_encoder.read) == 2
    alone = encode(counting, [replace(job, negative_prompt="")])
    assert [alone.changes_at(step) for step in range(1, 5)] == [False, False, True, False]


def test_and_in_a_negative_prompt_is_a_word(counting: Any, job: Job) -> None:
    (conditions,) = encode(counting, jobs(job, ("a:0.5", "a AND b:0.5"))).jobs
    assert [weight for weight, _ in conditions.parts] == [0.5]
    assert words_of_chunks(counting) == ["a", "a and b : 0 . 5"]

"""Memory runs out at every phase and every step of real pipelines: the picture always arrives."""

import gc
import io
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from sdamd import models
from sdamd.backends.backend import Made, Outcome
from sdamd.backends.torch_backend import TorchBackend, TorchPipeline
from sdamd.checkpoint import Checkpoint
from sdamd.errors import OutOfVram, Unfinished
from sdamd.hardware.device import CPU
from sdamd.plan import Plan
from sdamd.render import Ended, Event, Failed, LocalRender, Rendered, Step
from sdamd.request import Job
from sdamd.settings import Settings
from tests.fakes import A_PLAN, never, seeds

EMBEDDED = models.find("", Path("/nowhere"))
SPELLINGS = tuple(
    line
    for line in (Path(__file__).parent / "data/reports/B01.txt").read_text("utf-8").splitlines()
    if line
)
ON_A_CARD = replace(A_PLAN, device="cuda")
"""What the ladder of a card makes of it; it computes on the CPU all the same."""
STEPS = 3


@dataclass
class Faults:
    """Lets a pipeline's networks run out of memory, in their calls of these numbers, from 1.

    `too_large` says of a shape of latents that there is no room for it, however often it comes.
    It strikes in a layer that each way of computing goes through, below all that stands in the
    place of a component's method.
    """

    numbers: Mapping[str, Collection[int]] = field(default_factory=dict)
    too_large: Callable[[str, torch.Size], bool] = lambda stage, shape: False
    errors: Iterator[str] = field(default_factory=lambda: cycle(SPELLINGS))
    counts: dict[str, int] = field(default_factory=dict)
    struck: int = 0

    def watch(self, pipe: Any) -> list[Any]:
        layers = {
            "text": pipe.text_encoder.embeddings,
            "denoise": pipe.unet.conv_in,
            "encode": pipe.vae.quant_conv,
            "decode": pipe.vae.post_quant_conv,
        }
        return [
            layer.register_forward_pre_hook(
                lambda _, given, options, stage=stage: self.strike(stage, given), with_kwargs=True
            )
            for stage, layer in layers.items()
        ]

    def strike(self, stage: str, given: tuple[Any, ...]) -> None:
        self.counts[stage] = self.counts.get(stage, 0) + 1
        shape = given[0].shape if given else torch.Size()
        if self.counts[stage] in self.numbers.get(stage, ()) or self.too_large(stage, shape):
            self.struck += 1
            said = next(self.errors)
            kind = torch.OutOfMemoryError if self.struck % 2 else RuntimeError
            raise kind(said)


@pytest.fixture(scope="module")
def pipeline() -> Iterator[TorchPipeline]:
    made = TorchBackend().load(EMBEDDED, A_PLAN)
    # Each fault looks for cycles, which takes half a second among all that torch has made.
    gc.freeze()
    yield made
    gc.unfreeze()


@pytest.fixture
def small(job: Job) -> Job:
    return replace(job, width=64, height=64, steps=STEPS)


def sampled(
    pipeline: TorchPipeline, jobs: list[Job], plan: Plan, faults: Faults
) -> tuple[list[Made], Outcome]:
    # What decodes at the very end where the device is a card; here that is the CPU already.
    on_cpu = pipeline._on_cpu
    vars(pipeline)["_on_cpu"] = lambda: pipeline._decode_on_cpu
    hooks = faults.watch(pipeline._pipe)
    try:
        made = pipeline.sample(jobs, plan, lambda *_: False)
    finally:
        vars(pipeline)["_on_cpu"] = on_cpu
        for hook in hooks:
            hook.remove()
    assert pipeline.outcome is not None
    return made, pipeline.outcome


def difference(a: object, b: object) -> int:
    assert isinstance(a, Image.Image), a
    assert isinstance(b, Image.Image), b
    return int(np.abs(np.asarray(a, np.int16) - np.asarray(b, np.int16)).max())


@pytest.fixture(scope="module")
def undisturbed(pipeline: TorchPipeline) -> Callable[..., list[Made]]:
    known: dict[tuple[Job, ...], list[Made]] = {}

    def make(*jobs: Job) -> list[Made]:
        if jobs not in known:
            known[jobs] = sampled(pipeline, list(jobs), A_PLAN, Faults())[0]
        return known[jobs]

    return make


CALLS = [("text", 1), ("text", 2), *(("denoise", n + 1) for n in range(STEPS)), ("decode", 1)]


@pytest.mark.report("B01")
@pytest.mark.parametrize(("stage", "call"), CALLS)
def test_a_fault_at_any_call_changes_no_picture(
    pipeline: TorchPipeline, undisturbed: Callable[..., list[Made]], small: Job,
    stage: str, call: int,
) -> None:  # fmt: skip
    faults = Faults({stage: {call}})
    (made,), outcome = sampled(pipeline, [small], ON_A_CARD, faults)
    assert outcome.fell == (stage,)
    assert faults.struck == 1
    assert difference(made, undisturbed(small)[0]) <= 1
    # No step is made twice, but for the call that failed and those of a step in two passes.
    assert faults.counts["text"] == 2 + (stage == "text")


@settings(max_examples=10)
@given(
    text=st.sets(st.integers(1, 4), max_size=2),
    denoise=st.sets(st.integers(1, 9), max_size=5),
    decode=st.sets(st.integers(1, 7), max_size=7),
    start=st.integers(0, len(SPELLINGS) - 1),
)
def test_whatever_fails_the_picture_arrives_or_the_error_says_where(
    pipeline: TorchPipeline, undisturbed: Callable[..., list[Made]],
    text: set[int], denoise: set[int], decode: set[int], start: int,
) -> None:  # fmt: skip
    job = Job(
        index=0, prompt="a red house", negative_prompt="", checkpoint="", width=64, height=64,
        steps=STEPS, guidance_scale=4.0, scheduler="Euler", seed=7, upscale=1,
    )  # fmt: skip
    errors = cycle((*SPELLINGS[start:], *SPELLINGS[:start]))
    faults = Faults({"text": text, "denoise": denoise, "decode": decode}, errors=errors)
    failed = None
    made: list[Made] = []
    try:
        made, _ = sampled(pipeline, [job], ON_A_CARD, faults)
    except OutOfVram as error:
        failed = (error.stage, str(error))
    assert pipeline.outcome is not None
    assert len(pipeline.outcome.fell) == faults.struck
    if failed is None:
        assert difference(made[0], undisturbed(job)[0]) <= 1
        return
    # Four more frugal ways to denoise, two of which are also the text encoder's.
    stage, said = failed
    assert faults.struck > 2
    assert stage in {"text", "denoise"}
    assert not any(word in said for word in ("HIP", "CUDA", "DML", "8007000E"))


@pytest.mark.report("B18")
def test_when_no_tile_is_small_enough_the_cpu_finishes_from_the_kept_latents(
    pipeline: TorchPipeline, undisturbed: Callable[..., list[Made]], small: Job
) -> None:
    """The retry in tiles ran out of memory as well, and the picture was lost."""
    jobs = seeds(small, 7, 8)
    faults = Faults(too_large=lambda stage, _: stage == "decode")
    made, outcome = sampled(pipeline, jobs, replace(ON_A_CARD, batch=2), faults)
    # Whole, in bands, with the UNet away, in tiles of 512, 256 and 128.
    assert outcome.fell == ("decode",) * 6
    assert (outcome.plan.vae_tile, outcome.plan.batch) == (128, 2)
    assert faults.counts["denoise"] == STEPS
    for found, expected in zip(made, undisturbed(*jobs), strict=True):
        assert difference(found, expected) <= 1


def test_pictures_that_share_a_pass_and_subprompts_come_out_the_same(
    pipeline: TorchPipeline, undisturbed: Callable[..., list[Made]], small: Job
) -> None:
    jobs = [
        replace(each, prompt=prompt)
        for each, prompt in zip(
            seeds(small, 1, 2, 3), ("a tree AND a house :0.7", "a lake", "a dog"), strict=True
        )
    ]
    faults = Faults({"denoise": {2, 3, 5}, "text": {2}, "decode": {1, 2}})
    made, outcome = sampled(pipeline, jobs, replace(ON_A_CARD, batch=3), faults)
    assert sorted(set(outcome.fell)) == ["decode", "denoise", "text"]
    for found, expected in zip(made, undisturbed(*jobs), strict=True):
        assert difference(found, expected) <= 1


@pytest.mark.report("B11")
def test_a_second_pass_without_room_leaves_the_first_ones_picture(
    pipeline: TorchPipeline, undisturbed: Callable[..., list[Made]], small: Job
) -> None:
    """The base picture was lost with the second pass, after all of its steps."""
    asked = replace(small, hires_scale=2.0, hires_upscaler="latent")
    faults = Faults(too_large=lambda stage, shape: stage == "denoise" and shape[-1] > 8)
    (made,), outcome = sampled(pipeline, [asked], ON_A_CARD, faults)
    assert isinstance(made, Unfinished)
    assert "ran out of memory" in str(made)
    assert set(outcome.fell) == {"hires"}
    assert difference(made.image, undisturbed(small)[0]) <= 1


# -- through the straight line -------------------------------------------------------------------


@dataclass
class Failing(TorchBackend):
    """The real backend, whose pipelines run out of memory."""

    faults: Faults

    def __post_init__(self) -> None:
        super().__init__()

    def load(self, checkpoint: Checkpoint, plan: Plan) -> TorchPipeline:
        pipeline = super().load(checkpoint, plan)
        self.faults.watch(pipeline._pipe)
        return pipeline


def opened(event: Rendered) -> Image.Image:
    return Image.open(io.BytesIO(event.png)).convert("RGB")


@pytest.mark.report("B01", "B18")
def test_a_decoder_that_fails_above_a_size_gets_tiles_and_the_next_job_starts_clean(
    machine: Settings, small: Job
) -> None:
    """The first picture was fine; at the second the memory was full and the decoder crashed."""
    one = replace(machine, batch_size=1)
    large = replace(small, width=256, steps=1)
    faults = Faults(too_large=lambda stage, shape: stage == "decode" and shape[-1] > 16)
    told: list[Event] = []
    render = LocalRender(one, CPU, lambda: Failing(faults))
    jobs = [small, replace(large, index=1), replace(small, index=2)]
    assert render.run(jobs, told.append, never) == Ended(worn=True)
    first, second, third = (e for e in told if isinstance(e, Rendered))
    assert [e.record.means for e in (first, second, third)] == ["", "VAE in tiles of 128", ""]
    assert difference(opened(first), opened(third)) == 0
    # Its one step is told once: it was not made again.
    assert len([e for e in told if isinstance(e, Step) and e.jobs[0].index == 1]) == 1
    tiled = list(LocalRender(replace(one, vae_tile=128), CPU, TorchBackend)([large], never))
    assert isinstance(tiled[-1], Rendered)
    assert difference(opened(second), opened(tiled[-1])) <= 1


def test_at_the_end_of_the_ladder_the_job_fails_with_figures_and_the_others_go_on(
    machine: Settings, small: Job
) -> None:
    faults = Faults(too_large=lambda stage, shape: stage == "denoise" and shape[-1] > 8)
    render = LocalRender(machine, CPU, lambda: Failing(faults))
    told = list(render([replace(small, width=128), replace(small, index=1)], never))
    (failed,) = (e for e in told if isinstance(e, Failed))
    (rendered,) = (e for e in told if isinstance(e, Rendered))
    assert (failed.job.index, rendered.job.index) == (0, 1)
    said = str(failed.error)
    assert "while denoising, and there is no more frugal way to do it" in said
    assert "GiB" in said
    assert "nearest that fits: 64 x 64" in said
    assert failed.error.__traceback__ is None

"""Sampling with the embedded model's real parts; what is tested holds for any weights."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sdamd import models
from sdamd.backends.torch_backend import TorchBackend, TorchPipeline
from sdamd.errors import BadImage, Stopped
from sdamd.plan import Plan, make_plan
from sdamd.request import Job
from sdamd.sampling import noise
from sdamd.sampling.sample import decode, sample
from sdamd.settings import Settings


@pytest.fixture(scope="module")
def plan() -> Plan:
    job = Job(index=0, prompt="", negative_prompt="", checkpoint="", width=128, height=128,
              steps=1, guidance_scale=1.0, scheduler="Euler", seed=0, upscale=1)  # fmt: skip
    checkpoint = models.find("", Path("/nowhere"))
    return make_plan(job, None, checkpoint, Settings(home=Path("/nowhere"), device="cpu"))


@pytest.fixture(scope="module")
def pipeline(plan: Plan) -> Iterator[TorchPipeline]:
    """The embedded model, on one thread: the tests share the machine, and the model is small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield TorchBackend().load(models.find("", Path("/nowhere")), plan)
    torch.set_num_threads(threads)


def going_on(step: int, steps: int) -> bool:
    return False


@pytest.fixture
def job(job: Job) -> Job:
    """A small one: what is tested here does not hang on the size."""
    return replace(job, width=64, height=64, steps=3)


@pytest.fixture
def make(pipeline: TorchPipeline, plan: Plan) -> Callable[..., list[Image.Image]]:
    def sample(*jobs: Job) -> list[Image.Image]:
        made = pipeline.sample(jobs, plan, going_on)
        assert all(isinstance(image, Image.Image) for image in made), made
        return [image for image in made if isinstance(image, Image.Image)]

    return sample


Make = Callable[..., list[Image.Image]]


def difference(a: Image.Image, b: Image.Image) -> int:
    """The largest difference in any channel of any pixel."""
    assert a.size == b.size
    return int(np.abs(np.asarray(a, np.int16) - np.asarray(b, np.int16)).max())


# -- the same picture again ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "scheduler",
    ["Euler", "Euler a", "DPM++ 2M", "DPM++ SDE", "DPM++ 3M SDE Karras", "DDIM", "LCM", "UniPC"],
)
def test_a_picture_of_a_batch_is_the_single_picture(make: Make, job: Job, scheduler: str) -> None:
    """C07: the noise of a batch came from one generator, so its size changed the pictures."""
    jobs = [
        replace(job, scheduler=scheduler, seed=2**40 + n, prompt=prompt, negative_prompt="b")
        for n, prompt in enumerate(("a red circle", "two trees", ""))
    ]
    together = make(*jobs)
    assert difference(together[0], together[1]) > 1
    (single,) = make(jobs[1])
    assert difference(together[1], single) <= 1


def test_the_same_job_twice_is_the_same_bytes(make: Make, job: Job) -> None:
    """C10: noise of the GPU differs from maker to maker; that of the CPU is the same anywhere."""
    job = replace(job, scheduler="Euler a")
    assert make(job)[0].tobytes() == make(job)[0].tobytes()
    assert make(job)[0].tobytes() != make(replace(job, seed=8))[0].tobytes()


def test_every_generator_is_on_the_cpu() -> None:
    """C10."""
    assert {g.device.type for g in noise.generators([0, 1, 2**64 - 1])} == {"cpu"}


def test_the_order_of_a_batch_does_not_matter(make: Make, job: Job) -> None:
    """C07."""
    a, b = job, replace(job, seed=99, prompt="a blue square")
    first, second = make(a, b)
    swapped_second, swapped_first = make(b, a)
    assert difference(first, swapped_first) <= 1
    assert difference(second, swapped_second) <= 1


LONG = "a red house by the sea, " * 14  # two chunks
PROMPTS = ("a red circle", LONG, "x BREAK (y:1.3) BREAK z", "[red:green:0.5] circle",
           "[a|b] tree", "a red circle AND (snow:1.2):0.5", "sea:0.5")  # fmt: skip


def test_prompts_of_any_length_and_kind_share_a_pass(make: Make, job: Job) -> None:
    """C07: with others of other lengths, each is the picture that it is alone."""
    jobs = [
        replace(job, prompt=prompt, negative_prompt=LONG[:n], steps=2)
        for n, prompt in zip((0, 9, 999, 0, 999, 9, 1), PROMPTS, strict=True)
    ]
    for one, image in zip(jobs, make(*jobs), strict=True):
        (alone,) = make(one)
        assert difference(image, alone) <= 1


def test_a_composed_neighbour_does_not_change_a_byte(make: Make, job: Job) -> None:
    together = make(job, replace(job, prompt="two trees"))
    beside = make(job, replace(job, prompt="two trees AND snow"))
    assert together[0].tobytes() == beside[0].tobytes()
    assert together[1].tobytes() != beside[1].tobytes()


# -- what a prompt can say -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "same_as"),
    [
        ("[red:green:0] circle", "green circle"),
        ("[red:green:3] circle", "red circle"),
        ("[red|red] circle", "red circle"),
        ("a (red:1) circle", "a red circle"),
        (r"a (red\(\):1.1) circle", r"a (red\(\)) circle"),
    ],
)
def test_what_means_the_same_gives_the_same_bytes(
    make: Make, job: Job, prompt: str, same_as: str
) -> None:
    first, second = make(replace(job, prompt=prompt)), make(replace(job, prompt=same_as))
    assert first[0].tobytes() == second[0].tobytes()


@pytest.mark.parametrize(
    ("prompt", "other"),
    [
        ("[red:green:0.5] circle", "red circle"),
        ("[red:green:0.5] circle", "green circle"),
        ("[red|green] circle", "[green|red] circle"),
        ("a (red:1.4) circle", "a red circle"),
        (LONG + "snow", LONG + "a green tree"),
        ("red BREAK circle", "red circle"),
        ("red circle AND snow", "red circle"),
        ("red circle AND snow", "red circle AND snow:0.5"),
    ],
)
def test_what_means_another_thing_gives_another_picture(
    make: Make, job: Job, prompt: str, other: str
) -> None:
    job = replace(job, steps=2)
    assert difference(*make(replace(job, prompt=prompt), replace(job, prompt=other))) > 1


@pytest.mark.parametrize(
    ("prompt", "same_as"),
    [
        ("red circle:0.5 AND red circle:0.5", "red circle"),
        ("red circle AND snow:0", "red circle"),
        ("snow:0 AND red circle", "red circle"),
        ("snow:0", "ugly"),
        ("snow:-0.5 AND snow:1.5", "snow"),
    ],
)
@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
def test_weights_of_subprompts_add_up(
    make: Make, job: Job, prompt: str, same_as: str, guidance_scale: float
) -> None:
    """Guided by nothing, a picture is that of its negative prompt."""
    job = replace(job, negative_prompt="ugly", guidance_scale=guidance_scale, steps=1)
    (made,), (expected,) = make(replace(job, prompt=prompt)), make(replace(job, prompt=same_as))
    assert difference(made, expected) <= 1


@pytest.mark.parametrize(
    ("scheduler", "read"),
    [("Euler", "aba"), ("Heun", "aabba"), ("PNDM", "abaa"), ("DDIM", "aba")],
)
def test_prompts_change_with_the_step_and_not_within_it(
    pipeline: TorchPipeline, plan: Plan, job: Job, scheduler: str, read: str
) -> None:
    """Samplers of two calls per step see one text in both; PLMS calls once more than it steps."""
    given: list[torch.Tensor] = []

    def listen(_: object, args: object, options: dict[str, Any]) -> None:
        given.append(options["encoder_hidden_states"][-1])

    handle = pipeline._pipe.unet.register_forward_pre_hook(listen, with_kwargs=True)
    pipeline.sample([replace(job, scheduler=scheduler, prompt="[a|b]")], plan, going_on)
    handle.remove()
    assert "".join("a" if torch.equal(e, given[0]) else "b" for e in given) == read


def test_after_a_composed_prompt_the_unet_is_as_before(
    pipeline: TorchPipeline, plan: Plan, job: Job
) -> None:
    composed = replace(job, prompt="a AND b")
    pipeline.sample([composed], plan, going_on)
    with pytest.raises(Stopped):
        pipeline.sample([composed], plan, lambda step, steps: True)
    assert not pipeline._pipe.unet._forward_hooks


@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
@pytest.mark.parametrize(
    ("prompt", "same_as"),
    [
        ("[a:b:0]", "b"),
        ("[a:b:3]", "a"),
        ("a:0.5 AND a:0.5", "a"),
        ("b:0 AND a", "a"),
        ("b:0", "ugly"),
        (LONG + "snow", LONG + "snow"),
    ],
)
def test_sdxl_can_say_all_of_it_too(
    small_xl: Any, plan: Plan, job: Job, prompt: str, same_as: str, guidance_scale: float
) -> None:
    """In a pass with others of other lengths."""
    job = replace(job, negative_prompt="ugly", guidance_scale=guidance_scale)
    training = dict(small_xl.scheduler.config)
    first, _ = sample(
        small_xl,
        [replace(job, prompt=prompt), replace(job, prompt="x AND y BREAK z")],
        plan, training, going_on,
    )  # fmt: skip
    (second,) = sample(small_xl, [replace(job, prompt=same_as)], plan, training, going_on)
    assert isinstance(first, Image.Image)
    assert isinstance(second, Image.Image)
    assert difference(first, second) <= 1


def test_in_sdxl_what_changes_on_the_way_changes_the_pooled_embedding_too(
    small_xl: Any, plan: Plan, job: Job
) -> None:
    given: list[torch.Tensor] = []

    def listen(_: object, args: object, options: dict[str, Any]) -> None:
        given.append(options["added_cond_kwargs"]["text_embeds"])

    handle = small_xl.unet.register_forward_pre_hook(listen, with_kwargs=True)
    training = dict(small_xl.scheduler.config)
    sample(small_xl, [replace(job, prompt="[a:b:2]")], plan, training, going_on)
    handle.remove()
    first, second, third = given
    assert torch.equal(first, second)
    assert torch.equal(second[0], third[0])
    assert not torch.equal(second[1], third[1])


# -- sizes and edges -----------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "height"), [(72, 136), (104, 64), (128, 128)])
def test_sizes_need_only_be_multiples_of_8(make: Make, job: Job, width: int, height: int) -> None:
    """E29: sizes that are no multiple of 64 died with `Sizes of tensors must match`."""
    (image,) = make(replace(job, width=width, height=height, steps=2))
    assert (image.mode, image.size) == ("RGB", (width, height))


def test_the_finished_picture_is_enlarged(make: Make, job: Job) -> None:
    (image,) = make(replace(job, width=72, height=64, steps=1, upscale=3))
    assert image.size == (216, 192)


def test_an_empty_prompt_gives_a_picture(make: Make, job: Job) -> None:
    (image,) = make(replace(job, prompt=""))
    assert image.size == (64, 64)


def test_a_guidance_of_1_takes_no_notice_of_the_negative_prompt(make: Make, job: Job) -> None:
    plain = replace(job, guidance_scale=1.0)
    (image,) = make(plain)
    assert image.tobytes() == make(replace(plain, negative_prompt="x"))[0].tobytes()
    assert image.tobytes() != make(replace(plain, guidance_scale=4.0))[0].tobytes()


def test_one_step_is_enough_for_a_picture(make: Make, job: Job) -> None:
    assert len(make(replace(job, steps=1))) == 1


# -- steps ---------------------------------------------------------------------------------------


def test_every_step_is_told(pipeline: TorchPipeline, plan: Plan, job: Job) -> None:
    told: list[tuple[int, int]] = []

    def watch(step: int, steps: int) -> bool:
        told.append((step, steps))
        return False

    pipeline.sample([job], plan, watch)
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_it_stops_after_the_step_that_says_so(
    pipeline: TorchPipeline, plan: Plan, job: Job, make: Make
) -> None:
    (before,) = make(job)
    told: list[int] = []

    def watch(step: int, steps: int) -> bool:
        told.append(step)
        return step == 2

    with pytest.raises(Stopped):
        pipeline.sample([replace(job, steps=50)], plan, watch)
    assert told == [1, 2]
    assert make(job)[0].tobytes() == before.tobytes()  # nothing of it is left behind


# -- checking what comes out ---------------------------------------------------------------------

WHOLE = 64


class Decoder(torch.nn.Module):
    """In the place of a VAE: a picture is what its latent's first number stands for.

    0 is a gradient, 1 NaN, 2 infinity, 3 one colour, 4 black, 5 a faint gradient. From 10 on the
    same, but only in half precision; in float32 it is the gradient.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros((), dtype=dtype))
        self.config = SimpleNamespace(scaling_factor=1.0, block_out_channels=(1, 1, 1, 1))
        self.device = torch.device("cpu")
        self.decoded: list[tuple[torch.dtype, list[int]]] = []
        self.fails_in_float32 = False

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def enable_tiling(self) -> None: ...
    def disable_tiling(self) -> None: ...
    def enable_slicing(self) -> None: ...
    def disable_slicing(self) -> None: ...

    def decode(self, latents: torch.Tensor, return_dict: bool) -> tuple[torch.Tensor]:
        assert latents.dtype == self.dtype
        kinds = [int(n) for n in latents[:, 0, 0, 0]]
        self.decoded.append((self.dtype, kinds))
        if self.dtype == torch.float32 and self.fails_in_float32:
            raise torch.OutOfMemoryError("no room")
        return (torch.stack([self._picture(kind) for kind in kinds]).to(self.dtype),)

    def _picture(self, kind: int) -> torch.Tensor:
        if kind >= 10:
            kind = 0 if self.dtype == torch.float32 else kind - 10
        picture = torch.linspace(-1, 1, WHOLE).expand(3, WHOLE, WHOLE).clone()
        if kind == 1:
            picture[1, 5, 5] = torch.nan
        elif kind == 2:
            picture[0, 0, 0] = torch.inf
        elif kind == 3:
            picture[:] = 0.5
        elif kind == 4:
            picture[:] = -1
        elif kind == 5:
            picture = picture * 0.02
        return picture


def latents(*kinds: int) -> torch.Tensor:
    return torch.tensor(kinds, dtype=torch.float32).view(-1, 1, 1, 1).expand(-1, 4, 8, 8).clone()


@pytest.mark.report("C01")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [11, 12, 13, 14])
def test_a_bad_picture_is_decoded_once_more_in_float32(
    plan: Plan, caplog: pytest.LogCaptureFixture, dtype: torch.dtype, kind: int
) -> None:
    """C01: half precision overflows in some VAEs, and black pictures were saved."""
    vae = Decoder(dtype)
    made = decode(vae, latents(0, kind, 0), plan)
    assert vae.decoded == [(dtype, [0, kind, 0]), (torch.float32, [kind])]
    assert vae.dtype == dtype
    assert [type(image) for image in made] == [Image.Image] * 3
    (warning,) = (r.message for r in caplog.records if r.levelno == logging.WARNING)
    assert warning.endswith("; decoding again in float32")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (1, "the picture is NaN or infinite"),
        (2, "the picture is NaN or infinite"),
        (3, "the picture is one colour throughout: 191, 191, 191 of 255"),
        (4, "the picture is black throughout"),
    ],
)
def test_a_picture_that_stays_bad_fails_and_the_others_do_not(
    plan: Plan, kind: int, said: str
) -> None:
    """C01."""
    vae = Decoder(torch.float16)
    first, bad, last = decode(vae, latents(0, kind, 0), plan)
    assert len(vae.decoded) == 2
    assert isinstance(first, Image.Image)
    assert isinstance(last, Image.Image)
    assert isinstance(bad, BadImage)
    assert str(bad) == said


@pytest.mark.parametrize("kind", [1, 3, 4])
def test_what_was_decoded_in_float32_is_not_decoded_again(plan: Plan, kind: int) -> None:
    vae = Decoder(torch.float32)
    (bad,) = decode(vae, latents(kind), plan)
    assert isinstance(bad, BadImage)
    assert len(vae.decoded) == 1


@pytest.mark.report("C02", "C03")
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_unet_that_gave_nan_is_told_from_the_vae(plan: Plan, number: float) -> None:
    """C02: decoding in float32 does not help where the UNet is at fault."""
    vae = Decoder(torch.float16)
    broken = latents(0, 0)
    broken[1, 2, 3, 4] = number
    good, bad = decode(vae, broken, plan)
    assert isinstance(good, Image.Image)
    assert isinstance(bad, BadImage)
    assert str(bad).startswith("the UNet gave NaN or infinity")
    assert len(vae.decoded) == 1


def test_a_faint_picture_is_a_picture(plan: Plan) -> None:
    vae = Decoder(torch.float16)
    (image,) = decode(vae, latents(5), plan)
    assert isinstance(image, Image.Image)
    assert len(vae.decoded) == 1


def test_a_vae_is_back_in_its_dtype_also_after_an_error(plan: Plan) -> None:
    vae = Decoder(torch.float16)
    vae.fails_in_float32 = True
    with pytest.raises(torch.OutOfMemoryError):
        decode(vae, latents(11), plan)
    assert vae.dtype == torch.float16


def test_pixels_are_rounded_and_clipped(plan: Plan) -> None:
    class Wide(Decoder):
        def _picture(self, kind: int) -> torch.Tensor:
            return super()._picture(0) * 3

    (image,) = decode(Wide(torch.float32), latents(0), plan)
    assert isinstance(image, Image.Image)
    assert image.getextrema() == ((0, 255),) * 3
    assert image.getpixel((0, 0)) == (0, 0, 0)


# -- tiles ---------------------------------------------------------------------------------------


@pytest.mark.report("D01")
def test_the_vae_works_in_the_tiles_of_the_plan(
    pipeline: TorchPipeline, plan: Plan, job: Job
) -> None:
    vae: Any = pipeline._pipe.vae
    jobs = [replace(job, width=160, height=128, steps=1, seed=seed) for seed in (7, 8)]
    shapes: list[tuple[int, ...]] = []
    noting = vae.decoder.register_forward_pre_hook(
        lambda _, given: shapes.append(tuple(given[0].shape))
    )
    tiled = pipeline.sample(jobs, replace(plan, vae_tile=128), going_on)
    assert shapes == [(1, 4, 16, 16)] * 4
    whole = pipeline.sample(jobs, plan, going_on)
    assert shapes[4:] == [(2, 4, 16, 20)]
    noting.remove()
    for a, b in zip(tiled, whole, strict=True):
        assert isinstance(a, Image.Image)
        assert isinstance(b, Image.Image)
        assert a.size == b.size == (160, 128)
        assert a.tobytes() != b.tobytes()
        assert np.abs(np.asarray(a, np.int16) - np.asarray(b, np.int16)).mean() < 32

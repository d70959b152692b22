"""The guard by itself, over components and a device's memory that the tests make."""

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sdamd.backends.guard import Guard
from sdamd.errors import HardwareError, OutOfVram
from sdamd.plan import Plan, Stage, Stages
from tests.fakes import A_PLAN

SPELLINGS = tuple(
    line
    for line in (Path(__file__).parents[1] / "data/reports/B01.txt").read_text("utf-8").splitlines()
    if line
)
ON_A_CARD = replace(A_PLAN, device="cuda", batch=2, attention="math", budget_bytes=2**32)


@dataclass
class Meter:
    """A device's memory that says what it is told to say, and notes what is asked of it."""

    now: int | None = None
    highest: int | None = None
    done: list[str] = field(default_factory=list)

    def limit(self, budget_bytes: int | None) -> None:
        self.done.append(f"limit {budget_bytes}")

    def give_back(self) -> None:
        self.done.append("give back")

    def trim(self) -> None:
        self.done.append("trim")

    def held(self) -> int | None:
        return self.now

    def start_peak(self) -> None:
        self.highest = self.now

    def peak(self) -> int | None:
        return self.highest

    def wait(self) -> None:
        self.done.append("wait")


class Component(torch.nn.Module):
    """Adds one. Fails as often as `faults` has errors, and keeps what it allocated in its frame."""

    def __init__(self, *faults: Exception) -> None:
        super().__init__()
        self.faults = list(faults)
        self.calls: list[tuple[Any, ...]] = []
        self.scratch: list[weakref.ref[torch.Tensor]] = []

    def _compute(self, sample: torch.Tensor, *args: Any, **named: Any) -> tuple[torch.Tensor]:
        held = sample + 1  # lives in the traceback for as long as that lives
        self.scratch.append(weakref.ref(held))
        self.calls.append((sample.clone(), *args, named))
        if self.faults:
            raise self.faults.pop(0)
        return (held,)

    def forward(self, sample: torch.Tensor, *args: Any, **named: Any) -> tuple[torch.Tensor]:
        return self._compute(sample, *args, **named)

    def decode(self, latents: torch.Tensor, *, return_dict: bool = True) -> tuple[torch.Tensor]:
        return self._compute(latents, return_dict)

    def encode(self, pixels: torch.Tensor) -> tuple[torch.Tensor]:
        return self._compute(pixels)


@dataclass
class Parts:
    """A pipeline, and the plans that it was put under."""

    unet: Component = field(default_factory=Component)
    vae: Component = field(default_factory=Component)
    text_encoder: Component = field(default_factory=Component)
    controlnet: Component | None = None
    memory: Meter = field(default_factory=Meter)
    plans: list[Plan] = field(default_factory=list)
    heavy: Callable[[Plan], bool] = lambda plan: False

    def apply(self, plan: Plan) -> None:
        self.plans.append(plan)
        if self.heavy(plan):
            raise torch.OutOfMemoryError("HIP out of memory")

    @contextmanager
    def guarded(
        self, plan: Plan = A_PLAN, on_cpu: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> Iterator[Guard]:
        pipe = SimpleNamespace(
            unet=self.unet, vae=self.vae, text_encoder=self.text_encoder,
            controlnet=self.controlnet, text_encoder_2=None,
        )  # fmt: skip
        guard = Guard(plan=plan, apply=self.apply, memory=self.memory, base=(8, 8), on_cpu=on_cpu)
        with guard.over(pipe):
            yield guard


def full(count: int) -> list[Exception]:
    said = "HIP out of memory. Tried to allocate 2.25 GiB."
    return [torch.OutOfMemoryError(said) for _ in range(count)]


LATENTS = torch.arange(2 * 4 * 8 * 8, dtype=torch.float32).reshape(2, 4, 8, 8)


# -- one call ------------------------------------------------------------------------------------


@pytest.mark.report("B01")
@pytest.mark.parametrize("said", SPELLINGS)
@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError, torch.AcceleratorError])
def test_every_spelling_makes_the_call_again(said: str, kind: type[Exception]) -> None:
    parts = Parts(vae=Component(kind(said)))
    with parts.guarded(ON_A_CARD) as guard:
        (pixels,) = parts.vae.decode(LATENTS)
    assert torch.equal(pixels, LATENTS + 1)
    assert guard.outcome.fell == ("decode",)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError(""), MemoryError(), OutOfVram("directml:0 has no room")],
    ids=repr,
)
def test_the_kind_of_an_error_is_enough(error: Exception) -> None:
    parts = Parts(unet=Component(error))
    with parts.guarded(ON_A_CARD):
        assert torch.equal(parts.unet(LATENTS)[0], LATENTS + 1)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        torch.AcceleratorError("HIP error: an illegal memory access was encountered"),
        HardwareError("directml:0 was reset by its driver"),
        KeyError("out of memory"),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_other_errors_pass_through_unchanged_and_nothing_is_done_again(
    error: BaseException,
) -> None:
    parts = Parts(unet=Component(error))  # type: ignore[arg-type]  # one is no Exception
    with pytest.raises(type(error)) as caught, parts.guarded(ON_A_CARD):
        parts.unet(LATENTS)
    assert caught.value is error
    assert len(parts.unet.calls) == 1
    assert parts.plans == [ON_A_CARD]


def test_the_call_is_made_again_with_the_same_inputs() -> None:
    """A UNet empties the lists of residuals that it is given; the second try needs them, too."""

    class Emptying(Component):
        def forward(self, sample: torch.Tensor, *args: Any, **named: Any) -> tuple[torch.Tensor]:
            seen = [*named["residuals"], named["added"]["ids"]]
            named["residuals"].clear()
            named["added"].clear()
            return self._compute(sample, *seen)

    parts = Parts(unet=Emptying(*full(3)))
    residuals, added = [1, 2], {"ids": 3}
    with parts.guarded(ON_A_CARD):
        parts.unet(LATENTS, residuals=residuals, added=added)
    assert [call[1:] for call in parts.unet.calls] == [(1, 2, 3, {})] * 4
    assert all(torch.equal(call[0], LATENTS) for call in parts.unet.calls)
    assert (residuals, added) == ([1, 2], {"ids": 3})


def test_what_the_failed_call_held_is_gone_before_memory_is_given_back() -> None:
    """The traceback of an error holds the frames, and they the tensors."""
    alive: list[int] = []

    class Looking(Meter):
        def give_back(self) -> None:
            # Without the help of the collector, which is slow and may be too late.
            alive.append(sum(ref() is not None for ref in parts.unet.scratch))

    gc.disable()
    try:
        parts = Parts(unet=Component(*full(3)), memory=Looking())
        with parts.guarded(ON_A_CARD):
            parts.unet(LATENTS)
    finally:
        gc.enable()
    assert alive == [0, 0, 0]


def test_memory_is_given_back_and_the_next_plan_applied_before_the_next_try() -> None:
    parts = Parts(unet=Component(*full(2)))
    with parts.guarded(ON_A_CARD) as guard:
        parts.unet(LATENTS)
    assert parts.memory.done == [f"limit {2**32}", "give back", "give back", "wait", "trim"]
    assert parts.plans[-1] == guard.plan
    assert len(parts.plans) == 3
    assert len({(p.attention, p.passes, p.feed_forward_chunks) for p in parts.plans}) == 3


def test_the_plan_that_helped_stays_for_the_calls_that_follow() -> None:
    parts = Parts(unet=Component(*full(1)))
    with parts.guarded(ON_A_CARD) as guard:
        for _ in range(5):
            parts.unet(LATENTS)
    assert len(parts.unet.calls) == 6
    assert guard.outcome.fell == ("denoise",)


def test_what_went_wrong_is_said_without_the_drivers_words(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parts = Parts(vae=Component(*full(1)))
    with parts.guarded(ON_A_CARD):
        parts.vae.decode(LATENTS)
    (said,) = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    assert said.startswith(
        "cuda ran out of memory when 2.2 GiB more were asked for while decoding the picture; "
        "going on with "
    )
    assert "HIP" not in said


# -- what is over what ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "stage"),
    [
        (lambda parts: parts.text_encoder(LATENTS), "text"),
        (lambda parts: parts.unet(LATENTS), "denoise"),
        (lambda parts: parts.unet(sample=LATENTS), "denoise"),
        (lambda parts: parts.unet(LATENTS[..., :4]), "denoise"),
        (lambda parts: parts.unet(torch.zeros(1, 4, 16, 16)), "hires"),
        (lambda parts: parts.controlnet(LATENTS), "denoise"),
        (lambda parts: parts.vae.encode(LATENTS), "encode"),
        (lambda parts: parts.vae.decode(LATENTS), "decode"),
    ],
)
def test_each_component_has_its_stage(call: Callable[[Parts], Any], stage: str) -> None:
    parts = Parts(controlnet=Component())
    with parts.guarded() as guard:
        call(parts)
    assert list(guard.outcome.measured) == [stage]


def test_a_call_within_a_call_is_one_call() -> None:
    """Tiles go through the VAE's decode, too; their failing is that of the picture."""
    parts = Parts()
    inner = Component(*full(1))
    vars(parts.vae)["decode"] = lambda latents: inner(parts.text_encoder(latents)[0])
    with parts.guarded(ON_A_CARD) as guard:
        parts.vae.decode(LATENTS)
    assert len(parts.text_encoder.calls) == 2
    assert guard.outcome.fell == ("decode",)


@pytest.mark.parametrize("fails", [False, True])
def test_afterwards_all_components_are_as_they_were(fails: bool) -> None:
    parts = Parts(unet=Component(KeyError("x")) if fails else Component(), controlnet=Component())
    put_there = parts.vae.decode
    vars(parts.vae)["decode"] = put_there
    try:
        with parts.guarded():
            parts.unet(LATENTS)
    except KeyError:
        assert fails
    for component in (parts.unet, parts.vae, parts.text_encoder, parts.controlnet):
        assert not {"forward", "encode", "float"} & vars(component).keys()
    assert vars(parts.vae)["decode"] is put_there


# -- the ladder ----------------------------------------------------------------------------------


def ladder(parts: Parts, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(getattr(plan, name) for name in names) for plan in parts.plans]


@pytest.mark.report("B18")
def test_decoding_goes_from_whole_to_bands_to_ever_smaller_tiles_and_to_the_cpu() -> None:
    """The tiled retry failed as well, with a full cache and tiles of one size, and all was lost."""
    parts = Parts(vae=Component(*full(99)))
    given_to_cpu = []

    def on_cpu(latents: torch.Tensor) -> torch.Tensor:
        given_to_cpu.append(latents)
        assert parts.memory.done[-1] == "give back"
        return latents * 2

    with parts.guarded(ON_A_CARD, on_cpu) as guard:
        made = parts.vae.decode(LATENTS, return_dict=False)
    assert isinstance(made, tuple)
    assert torch.equal(made[0], LATENTS * 2)
    assert torch.equal(given_to_cpu[0], LATENTS)
    steps = ladder(parts, "vae_bands", "vae_tile")
    assert steps[0] == (0, 0)
    assert steps[1][0] > 0
    assert [tile for _, tile in steps if tile] == [512, 256, 128]
    assert [plan.batch for plan in parts.plans] == [2] * len(steps)
    assert guard.outcome.fell == ("decode",) * len(steps)
    assert guard.outcome.means.endswith("VAE in tiles of 128, offload model, decoded on the CPU")


@pytest.mark.report("C06")
def test_a_decoder_that_is_to_be_made_wider_may_run_out_of_memory_half_way() -> None:
    """Some of its weights are float32 by then; the next try makes the rest so."""

    class Wide(Component):
        def __init__(self) -> None:
            super().__init__(*full(1))
            self.first, self.second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
            self.half()

        def float(self) -> "Wide":
            self.first.float()
            if self.faults:
                raise self.faults.pop()
            return super().float()

    parts = Parts(vae=Wide())
    with parts.guarded(ON_A_CARD) as guard:
        assert parts.vae.float() is parts.vae
    assert {p.dtype for p in parts.vae.parameters()} == {torch.float32}
    assert guard.outcome.fell == ("decode",)


def test_a_decoder_that_is_asked_for_an_object_gives_one() -> None:
    parts = Parts(vae=Component(*full(99)))
    with parts.guarded(ON_A_CARD, lambda latents: latents):
        made: Any = parts.vae.decode(LATENTS)
    assert torch.equal(made.sample, LATENTS)


def test_a_cpu_that_has_no_room_either_is_the_end() -> None:
    def on_cpu(latents: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9")

    parts = Parts(vae=Component(*full(99)))
    with (
        pytest.raises(OutOfVram, match="the CPU, too, ran out of memory while decoding") as caught,
        parts.guarded(ON_A_CARD, on_cpu),
    ):
        parts.vae.decode(LATENTS)
    assert caught.value.stage == Stage.DECODE


@pytest.mark.parametrize(
    ("component", "call", "stage", "ended"),
    [
        ("unet", lambda parts: parts.unet(LATENTS), "denoise", {"passes": 4, "offload": "stream"}),
        ("unet", lambda parts: parts.unet(torch.zeros(1, 4, 9, 9)), "hires", {"passes": 4}),
        ("text_encoder", lambda parts: parts.text_encoder(LATENTS), "text", {"offload": "stream"}),
        ("vae", lambda parts: parts.vae.encode(LATENTS), "encode", {"vae_tile": 128}),
        ("vae", lambda parts: parts.vae.decode(LATENTS), "decode", {"vae_tile": 128}),
    ],
)
def test_at_the_end_of_the_ladder_the_error_says_in_which_stage_and_how_much(
    component: str, call: Callable[[Parts], Any], stage: str, ended: dict[str, object]
) -> None:
    said = "HIP out of memory. Tried to allocate 2.00 GiB; 6.00 GiB is allocated by PyTorch"
    parts = Parts(**{component: Component(*[torch.OutOfMemoryError(said)] * 99)})  # type: ignore[arg-type]
    with (
        pytest.raises(OutOfVram, match="there is no more frugal way") as caught,
        parts.guarded(ON_A_CARD) as guard,
    ):
        call(parts)
    assert caught.value.stage == stage
    assert caught.value.needed_bytes == 8 * 2**30
    assert "HIP" not in str(caught.value)
    assert {name: getattr(guard.plan, name) for name in ended} == ended
    assert len(parts.plans) == len(set(parts.plans)) < 20


@pytest.mark.parametrize(("needs", "limit"), [(2**31, 2**32), (2**33, None)])
def test_the_budget_is_a_limit_unless_the_plan_is_known_to_exceed_it(
    needs: int, limit: int | None
) -> None:
    """Who forces what does not fit by prediction may try it with all of the card."""
    parts = Parts()
    with parts.guarded(replace(ON_A_CARD, stages=Stages(text=0, denoise=needs, decode=0))):
        assert parts.memory.done == [f"limit {limit}"]


def test_weights_that_find_no_room_are_left_in_ram() -> None:
    parts = Parts(heavy=lambda plan: plan.offload == "none")
    with parts.guarded(ON_A_CARD) as guard:
        parts.unet(LATENTS)
    assert [plan.offload for plan in parts.plans] == ["none", "model"]
    assert guard.plan.offload == "model"
    assert guard.outcome.fell == ("load",)


def test_weights_that_find_no_room_in_any_way_are_an_error() -> None:
    parts = Parts(heavy=lambda plan: True)
    with (
        pytest.raises(OutOfVram, match="while loading the weights") as caught,
        parts.guarded(ON_A_CARD),
    ):
        pytest.fail("nothing is loaded")
    assert caught.value.stage == "load"
    assert [plan.offload for plan in parts.plans] == ["none", "model", "stream"]


@settings(max_examples=50)
@given(
    faults=st.fixed_dictionaries({
        "text_encoder": st.integers(0, 1), "unet": st.integers(0, 4), "vae": st.integers(0, 6),
    }),
    heavy=st.booleans(),
)  # fmt: skip
def test_whatever_fails_and_how_often_the_answer_is_the_same(
    faults: dict[str, int], heavy: bool
) -> None:
    parts = Parts(
        **{name: Component(*full(count)) for name, count in faults.items()},  # type: ignore[arg-type]
        heavy=(lambda plan: plan.offload == "none") if heavy else (lambda plan: False),
    )
    on_card = replace(ON_A_CARD, budget_bytes=None)
    with parts.guarded(on_card, lambda latents: latents + 1) as guard:
        text = parts.text_encoder(LATENTS)[0]
        for _ in range(4):
            text = parts.unet(text)[0]
        (pixels,) = parts.vae.decode(text, return_dict=False)
    assert torch.equal(pixels, LATENTS + 6)
    counts = guard.outcome.fell
    assert counts.count("text") == faults["text_encoder"]
    assert counts.count("denoise") == faults["unet"]


# -- what is measured ----------------------------------------------------------------------------


class Taking(Component):
    """Takes memory of a meter: `live` while it runs, and keeps its result and `kept` weights."""

    def __init__(self, memory: Meter, live: Iterator[int], kept: int = 0) -> None:
        super().__init__()
        self.memory, self.live, self.kept = memory, live, kept

    def _compute(self, sample: torch.Tensor, *args: Any, **named: Any) -> tuple[torch.Tensor]:
        assert self.memory.now is not None
        self.memory.highest = self.memory.now + self.kept + next(self.live)
        self.memory.now += self.kept
        return super()._compute(sample, *args, **named)


def test_a_stage_took_what_it_held_at_most_beyond_what_lay_there() -> None:
    memory = Meter(now=1000)
    parts = Parts(unet=Taking(memory, iter([50, 80, 60])), memory=memory)
    with parts.guarded(ON_A_CARD) as guard:
        for _ in range(3):
            parts.unet(LATENTS)
    assert guard.outcome.measured["denoise"].bytes == 80


def test_weights_that_come_in_the_call_are_not_counted() -> None:
    memory = Meter(now=1000)
    parts = Parts(unet=Taking(memory, iter([50]), kept=700), memory=memory)
    with parts.guarded(ON_A_CARD) as guard:
        parts.unet(LATENTS)
    assert guard.outcome.measured["denoise"].bytes == 50


def test_where_weights_leave_in_the_call_nothing_is_known() -> None:
    memory = Meter(now=1000)
    parts = Parts(vae=Taking(memory, iter([50]), kept=-700), memory=memory)
    with parts.guarded(ON_A_CARD) as guard:
        parts.vae.decode(LATENTS)
    assert guard.outcome.measured["decode"].bytes is None


def test_of_a_call_that_failed_what_it_asked_for_is_known_and_nothing_afterwards() -> None:
    memory = Meter(now=1 * 2**30)
    said = "HIP out of memory. Tried to allocate 2.00 GiB; 6.00 GiB is allocated by PyTorch"
    parts = Parts(memory=memory)
    parts.unet = Taking(memory, iter([10, 10**12]))
    parts.unet.faults = [torch.OutOfMemoryError(said)]
    with parts.guarded(ON_A_CARD) as guard:
        parts.unet(LATENTS)
    assert guard.outcome.measured["denoise"].bytes == 7 * 2**30


def test_a_device_without_counts_gives_times_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 100, 10))
    monkeypatch.setattr("sdamd.backends.guard.time.monotonic", lambda: float(next(now)))
    parts = Parts()
    with parts.guarded() as guard:
        parts.text_encoder(LATENTS)
        parts.unet(LATENTS)
        parts.unet(LATENTS)
        parts.vae.decode(LATENTS)
    measured = guard.outcome.measured
    assert {stage: each.seconds for stage, each in measured.items()} == {
        "text": 10, "denoise": 10, "decode": 10,
    }  # fmt: skip
    assert {each.bytes for each in measured.values()} == {None}


def test_between_two_stages_the_device_is_waited_for_and_its_cache_given_back() -> None:
    parts = Parts()
    with parts.guarded():
        parts.text_encoder(LATENTS)
        parts.unet(LATENTS)
        parts.unet(LATENTS)
        parts.vae.decode(LATENTS)
    assert parts.memory.done == ["limit None", *["wait", "trim"] * 3]

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from sdamd import gallery
from sdamd.errors import BadRequest, DoesNotFit, StorageError, UserError
from sdamd.hardware.detect import Detection, detect
from sdamd.hardware.device import CPU, Device
from sdamd.hardware.products import find_card
from sdamd.hardware.runtime import Engine
from sdamd.render import Failed, LocalRender, Rendered, Started, Step
from sdamd.request import SEED_MAX, Request
from sdamd.settings import Settings
from sdamd.studio import Saved, Studio
from tests.fakes import FakeBackend, Fault, never, stop_after

MACHINES = Path(__file__).parent / "data/machines"
NO_GPU = Detection(platform="linux", reason="no AMD GPU was found", mask={})


class Lab:
    """A studio whose render has a fake backend."""

    def __init__(self, settings: Settings, faults: Mapping[int, Fault] | None = None) -> None:
        self.backend = FakeBackend(faults=faults or {})
        render = LocalRender(settings, CPU, lambda: self.backend)
        self.studio = Studio(settings, render=render, detection=NO_GPU, environ={})


def of(name: str, environ: Mapping[str, str] | None = None) -> Detection:
    return detect(MACHINES / name, "linux", environ or {})


# -- pictures ------------------------------------------------------------------------------------


def test_each_picture_is_saved_as_soon_as_it_is_rendered(machine: Settings) -> None:
    lab = Lab(replace(machine, batch_size=1, filename="[seed]"))
    request = Request(prompt="a", seed=SEED_MAX, count=2, steps=1)
    happened = list(lab.studio.generate([request]))
    assert [type(event) for event in happened] == [Started, Step, Rendered, Saved] * 2
    saved = [event for event in happened if isinstance(event, Saved)]
    rendered = [event for event in happened if isinstance(event, Rendered)]
    assert [event.path for event in saved] == [
        machine.outputs / f"{SEED_MAX}.png",
        machine.outputs / "0.png",
    ]
    for event, made in zip(saved, rendered, strict=True):
        assert event.path.read_bytes() == made.png
        assert gallery.read_record(event.path).job == event.job
        again = gallery.request_from_png(event.path)
        assert lab.studio.jobs([again]) == (replace(event.job, index=0),)


@pytest.mark.parametrize(
    ("prompt", "warned"),
    [
        ("a poster, ratio 16:9", True),
        ("a poster, ratio 16:9,", False),
        ("sea AND sky:0.5", False),
        ("(sea:0.5)", False),
    ],
)
def test_a_number_at_the_end_that_becomes_a_weight_is_told(
    machine: Settings, caplog: pytest.LogCaptureFixture, prompt: str, warned: bool
) -> None:
    Lab(machine).studio.jobs([Request(prompt=prompt)])
    assert ("the prompt ends in 9, which is taken as its weight" in caplog.text) is warned


def test_a_failed_picture_is_not_saved_and_the_others_are(machine: Settings) -> None:
    """C01: a black picture was saved as a success."""
    lab = Lab(machine, {2: Fault.BAD_IMAGE})
    happened = list(lab.studio.generate([Request(seed=1, count=3)]))
    assert [event.job.seed for event in happened if isinstance(event, Failed)] == [2]
    assert [event.job.seed for event in happened if isinstance(event, Saved)] == [1, 3]
    assert len(list(machine.outputs.glob("*.png"))) == 2


def test_stopping_keeps_what_is_saved(machine: Settings) -> None:
    lab = Lab(replace(machine, batch_size=1))
    request = Request(seed=1, count=3, steps=2)
    happened = list(lab.studio.generate([request], stop_after(5)))
    assert sum(isinstance(event, Saved) for event in happened) == 1
    assert [path.suffix for path in machine.outputs.iterdir() if path.name[0] != "."] == [".png"]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"output": "/proc/version/pictures"}, StorageError),
        ({"output": "/proc/pictures"}, StorageError),
        ({"filename": "[sead]"}, BadRequest),
        ({"filename": "../[seed]"}, BadRequest),
    ],
    ids=str,
)
def test_what_cannot_be_saved_is_told_before_anything_is_rendered(
    machine: Settings, change: dict[str, str], error: type[Exception]
) -> None:
    lab = Lab(replace(machine, **change))  # type: ignore[arg-type]
    with pytest.raises(error):
        list(lab.studio.generate([Request()]))
    assert lab.backend.passes == []


# -- jobs ----------------------------------------------------------------------------------------


def test_jobs_of_several_requests_are_numbered_through(machine: Settings) -> None:
    jobs = Lab(machine).studio.jobs([Request(seed=5, count=2), Request(seed=50, count=2)])
    assert [(job.index, job.seed) for job in jobs] == [(0, 5), (1, 6), (2, 50), (3, 51)]


def test_the_problems_of_all_requests_are_told_at_once(machine: Settings) -> None:
    requests = [Request(scheduler="Eular"), Request(scheduler="LCM", steps=51), Request()]
    with pytest.raises(BadRequest) as raised:
        Lab(machine).studio.jobs(requests)
    nearest, steps = raised.value.problems
    assert nearest.startswith("scheduler 'Eular' is not known; the nearest: Euler")
    assert steps == "steps is 51; LCM allows 1 to 50"


def test_a_checkpoint_that_is_missing_is_told_before_anything_is_rendered(
    machine: Settings,
) -> None:
    lab = Lab(machine)
    with pytest.raises(UserError, match="checkpoint 'x' is not known"):
        list(lab.studio.generate([Request(checkpoint="x")]))
    assert lab.backend.loads == []


def test_the_plan_is_that_of_the_render(machine: Settings) -> None:
    lab = Lab(machine)
    jobs = lab.studio.jobs([Request(seed=1, count=3)])
    started = next(e for e in lab.studio.run(jobs) if isinstance(e, Started))
    plan = lab.studio.plan(jobs[0], count=3)
    # The RAM that is free differs from one moment to the next.
    plan, made = (replace(p, budget_bytes=None, reasons=()) for p in (plan, started.plan))
    assert plan == made


@pytest.mark.report("D04")
def test_sizes_are_rounded_only_where_the_user_lets_them_be(machine: Settings) -> None:
    asked = [Request(seed=1, width=width, height=128) for width in range(128, 256, 8)]
    as_asked = Lab(machine).studio.jobs(asked)
    assert [job.width for job in as_asked] == list(range(128, 256, 8))
    rounded = Lab(replace(machine, round_sizes=64)).studio.jobs(asked)
    assert {job.width for job in rounded} == {128, 192, 256}


def test_what_no_plan_can_run_is_refused_before_anything_is_loaded(machine: Settings) -> None:
    gpu = replace(find_card("RX 6600"), vram_bytes=2**29)
    device = Device(gpu=gpu, engine=Engine.ROCM)
    lab = Lab(machine)
    lab.studio.device = device
    with pytest.raises(DoesNotFit, match="64 x 64 with small Stable Diffusion model needs"):
        list(lab.studio.generate([Request(seed=1, width=64, height=64)]))
    assert lab.backend.loads == []


# -- the device ----------------------------------------------------------------------------------


def studio(name: str, device: str = "auto", environ: Mapping[str, str] | None = None) -> Studio:
    environ = environ or {}
    settings = Settings(home=Path("/nowhere"), device=device)
    return Studio(settings, detection=of(name, environ), environ=environ)


def test_the_worker_sees_its_gpu_alone() -> None:
    """A03: an integrated GPU beside the card was taken, or crashed the run."""
    masked = studio("rx7800xt-raphael").worker_environment()
    assert "0" in {v for k, v in masked.items() if k.endswith("VISIBLE_DEVICES")}
    second = studio("rx7900xtx-x2", "1").worker_environment()
    assert "1" in {v for k, v in second.items() if k.endswith("VISIBLE_DEVICES")}


def test_the_worker_gets_what_its_card_needs_and_the_users_own_stays() -> None:
    name = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"
    assert studio("rx7900xtx").worker_environment()[name] == "1"
    assert name not in studio("rx7900xtx", environ={name: "0"}).worker_environment()


def test_a_worker_on_the_cpu_needs_nothing() -> None:
    assert studio("kfd-cpu-only").worker_environment() == {}
    assert studio("rx7900xtx", "cpu").worker_environment() == {}


def test_closing_closes_the_render(machine: Settings) -> None:
    lab = Lab(machine)
    list(lab.studio.generate([Request(seed=1)]))
    lab.studio.close()
    list(lab.studio.generate([Request(seed=1)], never))
    assert len(lab.backend.loads) == 2

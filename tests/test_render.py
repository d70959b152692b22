import io
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import sdamd
from sdamd import gallery, learnt, models
from sdamd import render as render_module
from sdamd.backends.backend import Measured, Outcome
from sdamd.errors import (
    BadCheckpoint,
    BadImage,
    DoesNotFit,
    OutOfVram,
    StorageError,
    Unfinished,
    UserError,
)
from sdamd.hardware.device import CPU, Device
from sdamd.hardware.products import find_card
from sdamd.hardware.runtime import Engine
from sdamd.plan import Plan, plan_on
from sdamd.render import Ended, Event, Failed, LocalRender, Rendered, Started, Step, in_pass_of
from sdamd.request import Job
from sdamd.settings import Settings
from tests import fakes
from tests.fakes import FakeBackend, FakePipeline, Fault, never, picture, seeds, stop_after

EMBEDDED = models.find("", Path("/nowhere"))


def events(
    backend: FakeBackend, settings: Settings, jobs: Sequence[Job], watch: object = never
) -> list[Event]:
    render = LocalRender(settings, CPU, lambda: backend)
    assert callable(watch)
    return list(render(jobs, watch))


def shape(happened: Sequence[Event]) -> list[str]:
    """Events as short words: `S7` started, `.` step, `R7` rendered, `F7` failed, by seed."""
    words = []
    for event in happened:
        match event:
            case Started(job=job):
                words.append(f"S{job.seed}")
            case Step():
                words.append(".")
            case Rendered(job=job):
                words.append(f"R{job.seed}")
            case Failed(job=job):
                words.append(f"F{job.seed}")
    return words


@pytest.fixture
def one_at_a_time(machine: Settings) -> Settings:
    return replace(machine, batch_size=1)


# -- order ---------------------------------------------------------------------------------------


def test_a_job_starts_steps_and_is_rendered(job: Job, machine: Settings) -> None:
    happened = events(FakeBackend(), machine, [job])
    assert shape(happened) == ["S7", ".", ".", ".", ".", "R7"]
    steps = [(e.jobs, e.step, e.steps) for e in happened if isinstance(e, Step)]
    assert steps == [((job,), n, 4) for n in (1, 2, 3, 4)]


def test_jobs_follow_each_other_in_order(job: Job, one_at_a_time: Settings) -> None:
    jobs = seeds(replace(job, steps=1), 5, 3, 4)
    happened = events(FakeBackend(), one_at_a_time, jobs)
    assert shape(happened) == ["S5", ".", "R5", "S3", ".", "R3", "S4", ".", "R4"]


def test_jobs_of_one_pass_start_together_and_end_in_order(job: Job, machine: Settings) -> None:
    jobs = seeds(replace(job, steps=2), 5, 3, 4)
    happened = events(FakeBackend(), machine, jobs)
    assert shape(happened) == ["S5", "S3", "S4", ".", ".", "R5", "R3", "R4"]
    assert all(e.jobs == tuple(jobs) for e in happened if isinstance(e, Step))


def test_the_picture_carries_its_record(job: Job, machine: Settings) -> None:
    (rendered,) = (e for e in events(FakeBackend(), machine, [job]) if isinstance(e, Rendered))
    image = Image.open(io.BytesIO(rendered.png))
    assert image.tobytes() == picture(job).tobytes()
    record = rendered.record
    assert (record.job, record.version, record.device) == (job, sdamd.__version__, "CPU")
    assert (record.dtype, record.vae_dtype) == ("float32", "float32")
    assert record.checkpoint_name == "embedded"
    assert record.checkpoint_sha256 == models.sha256(models.EMBEDDED, machine.cache)
    machine.outputs.mkdir(parents=True)
    saved = gallery.save(rendered.png, machine.outputs, "[seed]", record)
    assert gallery.read_record(saved) == record


def test_a_record_names_its_model_and_not_the_path_to_it(job: Job, machine: Settings) -> None:
    """A path tells who somebody is."""
    made = events(FakeBackend(), machine, [replace(job, checkpoint=str(models.EMBEDDED))])
    (rendered,) = (event for event in made if isinstance(event, Rendered))
    assert rendered.record.job.checkpoint == models.EMBEDDED.name
    assert str(models.EMBEDDED.parent).encode() not in rendered.png


def test_no_jobs_are_no_events_and_no_backend(machine: Settings) -> None:
    render = LocalRender(machine, CPU, lambda: pytest.fail("nothing is to be rendered"))
    assert list(render([], never)) == []


# -- what shares a pass --------------------------------------------------------------------------


def passes(backend: FakeBackend) -> list[tuple[int, ...]]:
    return [taken for taken, _ in backend.passes]


def test_a_pass_takes_no_more_than_the_plan_says(job: Job, machine: Settings) -> None:
    backend = FakeBackend()
    events(backend, replace(machine, batch_size=2), seeds(job, 1, 2, 3, 4, 5))
    assert passes(backend) == [(1, 2), (3, 4), (5,)]


def test_fillers_make_a_pass_as_large_as_it_was_and_are_never_reported(
    job: Job, machine: Settings
) -> None:
    backend = FakeBackend()
    happened = events(backend, machine, in_pass_of(job, 3))
    assert [len(together) for together, _ in backend.passes] == [3]
    assert shape(happened)[0] == f"S{job.seed}"
    assert shape(happened).count(f"R{job.seed}") == 1
    assert {e.job for e in happened if isinstance(e, Started | Rendered)} == {job}
    assert {e.jobs for e in happened if isinstance(e, Step)} == {(job,)}
    assert [e.record.together for e in happened if isinstance(e, Rendered)] == [3]


def test_prompts_may_differ_within_a_pass(job: Job, machine: Settings) -> None:
    backend = FakeBackend()
    jobs = [replace(job, prompt=text, negative_prompt=text[::-1]) for text in ("ab", "cd")]
    events(backend, machine, jobs)
    assert passes(backend) == [(7, 7)]


@pytest.mark.parametrize(
    "change",
    [
        {"width": 192},
        {"height": 192},
        {"steps": 3},
        {"guidance_scale": 1.0},
        {"scheduler": "Heun"},
        {"upscale": 2},
    ],
    ids=str,
)
def test_nothing_else_may(job: Job, machine: Settings, change: dict[str, int]) -> None:
    backend = FakeBackend()
    changed = replace(job, seed=8, **change)  # type: ignore[arg-type]
    events(backend, machine, [job, changed, replace(job, seed=9)])
    assert passes(backend) == [(7,), (8,), (9,)]


# -- the pipeline --------------------------------------------------------------------------------


def test_a_pipeline_is_kept_for_the_next_jobs(job: Job, machine: Settings) -> None:
    backend = FakeBackend()
    render = LocalRender(machine, CPU, lambda: backend)
    list(render(seeds(job, 1, 2), never))
    list(render([replace(job, steps=3, width=192)], never))
    assert [name for name, _ in backend.loads] == ["embedded"]


def test_another_checkpoint_is_loaded_in_its_place(job: Job, machine: Settings) -> None:
    backend = FakeBackend()
    render = LocalRender(machine, CPU, lambda: backend)
    jobs = [job, replace(job, checkpoint=str(models.EMBEDDED)), job]
    assert shape(list(render(jobs, never))).count("R7") == 3
    assert [name for name, _ in backend.loads] == ["embedded", models.EMBEDDED.name, "embedded"]


def test_a_closed_render_loads_again(job: Job, machine: Settings) -> None:
    backend = FakeBackend()
    render = LocalRender(machine, CPU, lambda: backend)
    list(render([job], never))
    render.close()
    list(render([job], never))
    assert len(backend.loads) == 2


def test_a_checkpoint_that_is_missing_ends_it(job: Job, machine: Settings) -> None:
    with pytest.raises(UserError, match="checkpoint 'nothing' is not known"):
        events(FakeBackend(), machine, [replace(job, checkpoint="nothing")])


def test_what_the_backend_raises_reaches_the_caller(job: Job, machine: Settings) -> None:
    with pytest.raises(RuntimeError, match="nobody expected this"):
        events(FakeBackend(faults={7: Fault.CRASH}), machine, [job])


def test_a_backend_that_cannot_be_opened_reaches_the_caller(job: Job, machine: Settings) -> None:
    def broken() -> FakeBackend:
        raise BadCheckpoint("no weights")

    with pytest.raises(BadCheckpoint, match="no weights"):
        list(LocalRender(machine, CPU, broken)([job], never))


# -- bad pictures --------------------------------------------------------------------------------


def test_a_bad_picture_fails_and_the_others_go_on(job: Job, machine: Settings) -> None:
    """C01: a black picture was saved as a success, or ended the batch."""
    backend = FakeBackend(faults={2: Fault.BAD_IMAGE})
    happened = events(
        backend, replace(machine, batch_size=2), seeds(replace(job, steps=1), 1, 2, 3)
    )
    assert shape(happened) == ["S1", "S2", ".", "R1", "F2", "S3", ".", "R3"]
    (failed,) = (e for e in happened if isinstance(e, Failed))
    assert isinstance(failed.error, BadImage)
    assert str(failed.error) == "the picture is black throughout"


# -- out of memory -------------------------------------------------------------------------------


def test_a_run_that_cannot_go_on_begins_again_with_fewer_pictures(
    job: Job, machine: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    backend = FakeBackend(largest_batch=1)
    jobs = seeds(replace(job, steps=1), 1, 2, 3, 4)
    happened = events(backend, machine, jobs)
    assert passes(backend) == [(1, 2, 3, 4), (1, 2), (1,), (2,), (3,), (4,)]
    assert [e.job.seed for e in happened if isinstance(e, Rendered)] == [1, 2, 3, 4]
    assert [e.plan.batch for e in happened if isinstance(e, Started)] == [4] * 4 + [2] * 2 + [1] * 4
    assert [r.message for r in caplog.records] == [
        "no room for 4; trying again with 2 at a time",
        "no room for 2; trying again with 1 at a time",
    ]


def test_what_was_finished_before_is_not_rendered_again(job: Job, machine: Settings) -> None:
    backend = FakeBackend(out_of_vram=(2,))
    happened = events(backend, replace(machine, batch_size=2), seeds(job, 1, 2, 3, 4))
    assert passes(backend) == [(1, 2), (3, 4), (3,), (4,)]
    assert [e.job.seed for e in happened if isinstance(e, Rendered)] == [1, 2, 3, 4]


def test_the_pipeline_is_given_up_before_another_try(job: Job, machine: Settings) -> None:
    backend = FakeBackend(out_of_vram=(1,))
    events(backend, replace(machine, batch_size=2), seeds(job, 1, 2))
    assert [plan.batch for _, plan in backend.loads] == [2, 1]


CARD = Device(gpu=find_card("RX 7900 XTX"), engine=Engine.ROCM)


def test_at_the_end_of_the_ladder_the_job_fails_with_figures_and_the_others_go_on(
    job: Job, one_at_a_time: Settings
) -> None:
    backend = FakeBackend(faults={1: Fault.OUT_OF_VRAM})
    render = LocalRender(one_at_a_time, CARD, lambda: backend)
    happened = list(render(seeds(replace(job, steps=1), 1, 2), never))
    assert shape(happened) == ["S1", ".", "F1", "S2", ".", "R2"]
    (failed,) = (e for e in happened if isinstance(e, Failed))
    assert isinstance(failed.error, OutOfVram)
    assert failed.error.__traceback__ is None  # it would hold on to the device's memory
    said = str(failed.error)
    assert re.fullmatch(
        r"no room; the run needs \d+\.\d GiB, and a run may take 2\d\.\d GiB; "
        r"nearest that fits: 64 x 64",
        said,
    ), said


@pytest.mark.report("B09")
def test_a_process_whose_memory_is_lost_is_replaced_before_a_job_fails(
    job: Job, one_at_a_time: Settings
) -> None:
    """B09: torch-directml gave nothing back, and grew until it crashed."""
    backend = FakeBackend(out_of_vram=(3, 4))
    events_of: list[Event] = []
    render = LocalRender(one_at_a_time, CPU, lambda: backend)
    jobs = seeds(replace(job, steps=1), 1, 2, 3, 4)
    ended = render.run(jobs, events_of.append, never)
    # The third found no room, where two had found it before.
    assert ended == Ended(left=tuple(jobs[2:]), worn=True)
    assert [e.job.seed for e in events_of if isinstance(e, Rendered)] == [1, 2]
    render.renew()
    # In a process as new as it can be it fails, and the last one does not.
    assert render.run(ended.left, events_of.append, never) == Ended(worn=True)
    assert shape(events_of)[-4:] == ["S3", "F3", "S4", ".", "R4"][-4:]


@pytest.mark.report("B09")
def test_a_batch_completes_on_memory_that_never_comes_back(
    job: Job, one_at_a_time: Settings
) -> None:
    """A new process has all of it again; here it is the counter that is new."""
    made = fakes.made_here

    class Renewed(LocalRender):
        def renew(self) -> None:
            made.clear()
            super().renew()

    made.clear()
    backend = FakeBackend(leaks_after=8)
    jobs = seeds(replace(job, steps=1), *range(50))
    happened = list(Renewed(one_at_a_time, CPU, lambda: backend)(jobs, never))
    assert [e.job for e in happened if isinstance(e, Rendered)] == jobs
    assert not [e for e in happened if isinstance(e, Failed)]


def test_what_fails_in_a_fresh_process_does_not_need_one_for_each_like_it(
    job: Job, one_at_a_time: Settings
) -> None:
    backend = FakeBackend(out_of_vram=range(1, 9))
    render = LocalRender(one_at_a_time, CPU, lambda: backend)
    told: list[Event] = []
    assert render.run(seeds(job, 1, 2, 3), told.append, never) == Ended(worn=True)
    assert [e.job.seed for e in told if isinstance(e, Failed)] == [1, 2, 3]


@pytest.mark.report("B09")
def test_with_directml_a_process_makes_so_many_pictures_and_no_more(
    job: Job, one_at_a_time: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render_module, "DIRECTML_LIFETIME", 3)
    device = Device(gpu=find_card("RX 6700 XT"), engine=Engine.DIRECTML)
    jobs = seeds(replace(job, steps=1), *range(8))
    local = LocalRender(one_at_a_time, device, FakeBackend)
    told: list[Event] = []
    assert local.run(jobs, told.append, never) == Ended(left=tuple(jobs[3:]), worn=True)
    assert [e.job for e in told if isinstance(e, Rendered)] == jobs[:3]
    happened = list(LocalRender(one_at_a_time, device, FakeBackend)(jobs, never))
    assert [e.job for e in happened if isinstance(e, Rendered)] == jobs


def test_what_no_plan_can_run_fails_before_anything_is_loaded_and_the_others_go_on(
    job: Job, machine: Settings
) -> None:
    backend = FakeBackend()
    small = replace(find_card("RX 7900 XTX"), vram_bytes=1300 * 2**20)
    render = LocalRender(machine, Device(gpu=small, engine=Engine.ROCM), lambda: backend)
    large = replace(job, seed=1, width=2048, height=2048)
    happened = list(render([large, replace(job, seed=2, steps=1)], never))
    assert shape(happened) == ["F1", "S2", ".", "R2"]
    (failed,) = (e for e in happened if isinstance(e, Failed))
    assert isinstance(failed.error, DoesNotFit)
    assert re.search(r"2048 x 2048 .* needs \d+\.\d GiB .* nearest that fits", str(failed.error))
    assert [seed for taken, _ in backend.passes for seed in taken] == [2]


# -- how a run ended -----------------------------------------------------------------------------


def fell(**changes: Any) -> Callable[[Plan], Outcome]:
    """A run in which memory ran out, and which ended with a plan of these changes."""
    return lambda plan: Outcome(plan=replace(plan, **changes), fell=("decode",))


@pytest.mark.report("B01")
def test_what_it_ended_with_is_in_the_record_and_the_worker_is_worn(
    job: Job, machine: Settings
) -> None:
    render = LocalRender(machine, CPU, lambda: FakeBackend(ends=fell(vae_tile=256, passes=2)))
    told: list[Event] = []
    assert render.run([job], told.append, never) == Ended(worn=True)
    (rendered,) = (e for e in told if isinstance(e, Rendered))
    assert rendered.record.means == "passes 2, VAE in tiles of 256"
    image = Image.open(io.BytesIO(rendered.png))
    assert b"VAE in tiles of 256" in rendered.png
    assert image.size == (128, 128)


@pytest.mark.parametrize(
    ("asked", "used", "kept"), [(None, 512, 512), (None, 0, None), (64, 512, 64)]
)
def test_tiles_of_the_unet_are_in_the_records_job_since_they_change_the_picture(
    job: Job, machine: Settings, asked: int | None, used: int, kept: int | None
) -> None:
    backend = FakeBackend(ends=fell(denoise_tile=used))
    happened = events(backend, machine, [replace(job, denoise_tile=asked)])
    assert [e.record.job.denoise_tile for e in happened if isinstance(e, Rendered)] == [kept]


def test_a_run_without_trouble_says_nothing_and_wears_nothing(job: Job, machine: Settings) -> None:
    render = LocalRender(machine, CPU, FakeBackend)
    told: list[Event] = []
    assert render.run([job], told.append, never) == Ended()
    assert {e.record.means for e in told if isinstance(e, Rendered)} == {""}


@pytest.mark.report("B01")
def test_the_next_picture_keeps_what_changes_no_pixel_and_tries_without_tiles(
    job: Job, one_at_a_time: Settings
) -> None:
    backend = FakeBackend(ends=fell(vae_tile=256, passes=2))
    events(backend, one_at_a_time, seeds(replace(job, steps=1), 1, 2))
    assert [(plan.vae_tile, plan.passes) for _, plan in backend.passes] == [(0, 1), (0, 2)]


@pytest.mark.report("B01")
def test_the_next_job_of_another_kind_starts_clean(job: Job, one_at_a_time: Settings) -> None:
    backend = FakeBackend(ends=fell(vae_tile=256, passes=2))
    other = replace(job, seed=8, width=192, steps=1)
    happened = events(backend, one_at_a_time, [job, other])
    assert [(plan.vae_tile, plan.passes) for _, plan in backend.passes] == [(0, 1), (0, 1)]
    assert len(backend.loads) == 1
    assert shape(happened)[-1] == "R8"


@pytest.mark.report("B11")
def test_a_second_pass_that_fails_leaves_the_first_ones_picture(
    job: Job, machine: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = picture(job)

    def sample(self: object, jobs: Sequence[Job], *_: object) -> list[Unfinished]:
        return [Unfinished("cuda ran out of memory", small) for _ in jobs]

    monkeypatch.setattr(FakePipeline, "sample", sample)
    asked = replace(job, hires_scale=2.0, hires_steps=3)
    happened = events(FakeBackend(), machine, [asked])
    assert shape(happened) == [f"S{job.seed}", f"R{job.seed}"]
    (rendered,) = (e for e in happened if isinstance(e, Rendered))
    assert rendered.job.index == asked.index
    assert rendered.said == (
        "the second pass failed, so the picture of the first one is kept: cuda ran out of memory"
    )
    # The record tells how to make this picture, which had no second pass.
    assert (rendered.record.job.hires_scale, rendered.record.job.hires_steps) == (1.0, None)
    assert Image.open(io.BytesIO(rendered.png)).tobytes() == small.tobytes()


# -- what is learnt ------------------------------------------------------------------------------


def measuring(took: int, seconds: float, *, falls: bool = False) -> Callable[[Plan], Outcome]:
    return lambda plan: Outcome(
        plan=plan, fell=("decode",) if falls else (),
        measured={"decode": Measured(bytes=took, seconds=seconds)},
    )  # fmt: skip


def learnt_factors(settings: Settings, plan: Plan) -> tuple[float | None, float | None]:
    found = learnt.for_device(settings.cache, CARD.gpu, CARD.engine, "tiny")
    key = learnt.key(
        "decode", dtype=plan.dtype, vae_dtype=plan.vae_dtype, attention=plan.attention,
        vae_attention=plan.vae_attention,
    )  # fmt: skip
    assert found.bytes.keys() | found.seconds.keys() <= {key}
    return found.bytes.get(key), found.seconds.get(key)


@pytest.mark.parametrize("falls", [False, True])
def test_what_a_stage_took_over_what_was_predicted_is_kept_and_used(
    job: Job, one_at_a_time: Settings, falls: bool
) -> None:
    first = plan_on(job, CARD, EMBEDDED, one_at_a_time)
    assert first.times is not None
    took, seconds = first.activations.decode * 3 // 2, first.times.decode * 2
    backend = FakeBackend(ends=measuring(took, seconds, falls=falls))
    jobs = seeds(replace(job, steps=job.steps), 1)
    list(LocalRender(one_at_a_time, CARD, lambda: backend)(jobs, never))
    kept_bytes, kept_seconds = learnt_factors(one_at_a_time, first)
    assert kept_bytes == pytest.approx(1.5, rel=0.01)
    assert kept_seconds == (None if falls else pytest.approx(2.0, rel=0.01))
    second = plan_on(job, CARD, EMBEDDED, one_at_a_time)
    assert second.activations.decode == pytest.approx(took, rel=0.02)
    # The same again confirms the factor, and does not multiply it.
    list(LocalRender(one_at_a_time, CARD, lambda: backend)(jobs, never))
    assert learnt_factors(one_at_a_time, first)[0] == pytest.approx(1.5, rel=0.02)


def test_a_cache_that_cannot_be_written_costs_no_picture(
    job: Job, machine: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(cache: object, observations: object) -> None:
        raise StorageError("the disk is full")

    monkeypatch.setattr(learnt, "keep", full)
    backend = FakeBackend(ends=measuring(10**9, 1.0))
    happened = list(LocalRender(machine, CARD, lambda: backend)([job], never))
    assert shape(happened)[-1] == "R7"
    assert "what this run has taught is not kept: the disk is full" in caplog.text


# -- stopping ------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", [2, 3, 5])
def test_it_stops_between_two_steps_without_a_word_about_the_rest(
    job: Job, one_at_a_time: Settings, calls: int
) -> None:
    """The first call of `watch` is before the first job."""
    happened = events(FakeBackend(), one_at_a_time, seeds(job, 1, 2), stop_after(calls))
    assert shape(happened) == ["S1"] + ["."] * (calls - 1)


def test_it_stops_before_the_first_job(job: Job, machine: Settings) -> None:
    backend = FakeBackend()
    assert events(backend, machine, [job], stop_after(1)) == []
    assert backend.passes == []


def test_what_is_finished_is_told_before_it_stops(job: Job, one_at_a_time: Settings) -> None:
    happened = events(FakeBackend(), one_at_a_time, seeds(job, 1, 2), stop_after(6))
    assert shape(happened) == ["S1", ".", ".", ".", ".", "R1"]


def test_a_stopped_render_goes_on_with_other_jobs(job: Job, machine: Settings) -> None:
    backend = FakeBackend()
    render = LocalRender(machine, CPU, lambda: backend)
    list(render([job], stop_after(3)))
    assert shape(list(render(seeds(job, 8), never)))[-1] == "R8"
    assert len(backend.loads) == 1


def test_leaving_in_the_middle_ends_the_thread(job: Job, machine: Settings) -> None:
    render = LocalRender(machine, CPU, partial(FakeBackend))
    happening = render(seeds(replace(job, steps=100), *range(5)), never)
    next(happening)
    happening.close()  # type: ignore[attr-defined]  # a generator has it
    assert "render" not in {thread.name for thread in threading.enumerate()}

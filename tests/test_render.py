import io
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
from PIL import Image

import sdamd
from sdamd import gallery, models
from sdamd.errors import BadCheckpoint, BadImage, OutOfVram, UserError
from sdamd.hardware.device import CPU, Device
from sdamd.hardware.products import find_card
from sdamd.hardware.runtime import Engine
from sdamd.render import Event, Failed, LocalRender, Rendered, Started, Step, in_pass_of
from sdamd.request import Job
from sdamd.settings import Settings
from tests.fakes import FakeBackend, Fault, never, picture, seeds, stop_after


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


def test_out_of_memory_takes_the_next_way_down_until_it_fits(
    job: Job, machine: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    backend = FakeBackend(largest_batch=1)
    jobs = seeds(replace(job, steps=1), 1, 2, 3, 4)
    happened = events(backend, machine, jobs)
    assert passes(backend) == [(1, 2, 3, 4), (1, 2), (1,), (2,), (3,), (4,)]
    assert [e.job.seed for e in happened if isinstance(e, Rendered)] == [1, 2, 3, 4]
    assert [e.plan.batch for e in happened if isinstance(e, Started)] == [4] * 4 + [2] * 2 + [1] * 4
    assert [r.message.partition(";")[0] for r in caplog.records] == [
        "no room for 4",
        "no room for 2",
    ]


def test_what_was_finished_before_is_not_rendered_again(job: Job, machine: Settings) -> None:
    backend = FakeBackend(out_of_vram=(2,))
    happened = events(backend, replace(machine, batch_size=2), seeds(job, 1, 2, 3, 4))
    assert passes(backend) == [(1, 2), (3, 4), (3,), (4,)]
    assert [e.job.seed for e in happened if isinstance(e, Rendered)] == [1, 2, 3, 4]


def test_the_pipeline_is_given_up_before_another_try(job: Job, machine: Settings) -> None:
    backend = FakeBackend(out_of_vram=(1, 2))
    events(backend, machine, [job])
    assert [plan.vae_tile for _, plan in backend.loads] == [0, 512, 256]


def test_at_the_end_of_the_ladder_the_job_fails_and_the_others_go_on(
    job: Job, one_at_a_time: Settings
) -> None:
    backend = FakeBackend(faults={1: Fault.OUT_OF_VRAM})
    device = Device(gpu=find_card("RX 7900 XTX"), engine=Engine.ROCM)
    render = LocalRender(one_at_a_time, device, lambda: backend)
    happened = list(render(seeds(replace(job, steps=1), 1, 2), never))
    assert shape(happened) == ["S1", "."] * 4 + ["F1", "S2", ".", "R2"]
    (failed,) = (e for e in happened if isinstance(e, Failed))
    assert isinstance(failed.error, OutOfVram)
    assert failed.error.__traceback__ is None  # it would hold on to the device's memory
    tried = [(plan.vae_tile, plan.offload) for _, plan in backend.loads]
    assert tried == [(0, "none"), (512, "none"), (256, "none"), (256, "model"), (256, "model")]


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

"""Real child processes, which really die."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeAlias

import pytest

from sdamd.backends.backend import Backend
from sdamd.errors import BadCheckpoint, BadImage, HardwareError, UserError, WorkerDied
from sdamd.hardware.device import CPU
from sdamd.render import Event, Failed, LocalRender, Rendered, Started, Step
from sdamd.request import Job
from sdamd.settings import Settings
from sdamd.worker import WorkerRender, how
from tests.fakes import FakeBackend, Fault, fail, never, report_variable, seeds, stop_after

ROOT = Path(__file__).parents[1]
FAULTS = {
    11: Fault.ABORT,
    12: Fault.KILL,
    13: Fault.CRASH,
    14: Fault.HANG,
    15: Fault.CHATTER,
    16: Fault.BAD_IMAGE,
}

FAULTY = partial(FakeBackend, faults=FAULTS)

Make: TypeAlias = Callable[..., WorkerRender]


@pytest.fixture
def make(machine: Settings) -> Iterator[Make]:
    """Make renders whose children fail at the seeds of FAULTS; all are closed at the end."""
    made = []

    def render(
        settings: Settings = machine,
        environment: dict[str, str] | None = None,
        open_backend: Callable[[], Backend] = FAULTY,
    ) -> WorkerRender:
        made.append(WorkerRender(settings, CPU, environment or {}, open_backend))
        return made[-1]

    yield render
    for render_made in made:
        render_made.close()
    assert multiprocessing.active_children() == []


def child() -> BaseProcess:
    (process,) = multiprocessing.active_children()
    return process


def gone(pid: int, seconds: float = 30.0) -> bool:
    """Wait until no process has this id."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        stat = Path(f"/proc/{pid}/stat")
        if stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True  # nobody waits for it here, and it runs no more
        time.sleep(0.05)
    return False


def same(event: Event) -> object:
    """An event without what differs from run to run."""
    if isinstance(event, Rendered):
        return replace(event, record=replace(event.record, created=""), png=b"")
    if isinstance(event, Started):
        # The room that there is, and what is learnt of the time, change from one run to the next.
        return event.job, event.plan.to_dict()["choices"]
    return (event.job, str(event.error)) if isinstance(event, Failed) else event


# -- what it does when nothing goes wrong --------------------------------------------------------


def test_it_tells_what_a_render_in_this_process_tells_and_keeps_its_child(
    make: Make, machine: Settings, job: Job
) -> None:
    jobs = seeds(replace(job, steps=2), 1, 16, 3)
    local = list(LocalRender(machine, CPU, lambda: FakeBackend(faults=FAULTS))(jobs, never))
    render = make()
    assert [same(e) for e in render(jobs, never)] == [same(e) for e in local]
    first = child().pid
    (failed,) = (e for e in render(jobs, never) if isinstance(e, Failed))
    assert isinstance(failed.error, BadImage)
    assert child().pid == first

    # A wrong request is told by its own error, and the child can go on.
    with pytest.raises(UserError, match="checkpoint 'nothing' is not known"):
        list(render([replace(job, checkpoint="nothing")], never))
    assert isinstance(list(render([job], never))[-1], Rendered)
    assert child().pid == first


def test_it_stops_between_two_steps_and_goes_on_with_other_jobs(
    make: Make, machine: Settings, job: Job
) -> None:
    render = make(replace(machine, batch_size=1))
    many = seeds(replace(job, steps=100), *range(100, 200))
    happened = list(render(many, stop_after(2)))
    assert sum(isinstance(e, Rendered) for e in happened) < 100
    first = child().pid
    assert isinstance(list(render([job], never))[-1], Rendered)
    assert child().pid == first


def test_its_child_may_be_started_before_it_is_needed(make: Make, job: Job) -> None:
    render = make()
    render.start()
    first = child().pid
    render.start()
    list(render([job], never))
    assert child().pid == first


def test_closing_ends_the_child_without_force_and_may_be_done_twice(make: Make, job: Job) -> None:
    render = make()
    render.close()
    list(render([job], never))
    process = child()
    render.close()
    render.close()
    assert process.exitcode == 0


def test_what_the_child_prints_goes_to_stderr(
    make: Make, job: Job, capfd: pytest.CaptureFixture[str]
) -> None:
    happened = list(make()([replace(job, seed=15, steps=1)], never))
    assert [type(e) for e in happened] == [Started, Step, Rendered]
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == "chatter from Python\nchatter from a driver\n"


def test_the_environment_is_set_before_the_backend_is_opened(make: Make, job: Job) -> None:
    """The mask must be there before torch is, which counts GPUs once."""
    name = "HIP_VISIBLE_DEVICES"
    render = make(environment={name: "2"}, open_backend=partial(report_variable, name))
    with pytest.raises(BadCheckpoint, match="HIP_VISIBLE_DEVICES is 2"):
        list(render([job], never))
    assert os.environ.get(name) != "2"


# -- death ---------------------------------------------------------------------------------------


def test_a_child_that_dies_is_named_with_its_end_and_replaced(
    make: Make, machine: Settings, job: Job
) -> None:
    """C18: a fault of the GPU killed the whole program."""
    render = make(replace(machine, batch_size=1))
    for seed, said in ((11, "SIGABRT"), (12, "SIGKILL"), (13, "exit status 1")):
        happening = render(seeds(replace(job, steps=1), 1, seed, 2), never)
        before_its_death: list[Event] = []
        with pytest.raises(WorkerDied) as raised:
            before_its_death.extend(happening)
        assert f"has died ({said})" in str(raised.value)
        assert "\n" not in str(raised.value)
        assert [e.job.seed for e in before_its_death if isinstance(e, Rendered)] == [1]
        assert multiprocessing.active_children() == []
    assert isinstance(list(render([job], never))[-1], Rendered)


def test_a_child_that_was_killed_between_two_calls_is_replaced(make: Make, job: Job) -> None:
    render = make()
    list(render([job], never))
    process = child()
    process.kill()
    process.join()
    assert isinstance(list(render([job], never))[-1], Rendered)


def test_after_a_fault_of_the_device_the_next_jobs_get_a_new_child(make: Make, job: Job) -> None:
    fault = HardwareError("cuda failed: HIP error: unspecified launch failure")
    render = make(open_backend=partial(fail, fault))
    with pytest.raises(HardwareError, match="unspecified launch failure"):
        list(render([job], never))
    assert multiprocessing.active_children() == []


def test_leaving_in_the_middle_ends_a_child_that_hangs(make: Make, job: Job) -> None:
    happening = make()([replace(job, seed=14)], never)
    next(happening)
    process = child()
    happening.close()  # type: ignore[attr-defined]  # a generator has it
    assert process.exitcode == 0


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signal for one process")
def test_ctrl_c_is_not_for_the_child(make: Make, job: Job) -> None:
    render = make()
    list(render([job], never))
    pid = child().pid
    assert pid is not None
    os.kill(pid, signal.SIGINT)
    assert isinstance(list(render([job], never))[-1], Rendered)
    assert child().pid == pid


PARENT = """
import sys
from dataclasses import replace
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from sdamd.hardware.device import CPU
from sdamd.request import Job
from sdamd.settings import Settings
from sdamd.worker import WorkerRender
from tests.fakes import FakeBackend, Fault, never

job = Job(index=0, prompt="", negative_prompt="", checkpoint="", width=64, height=64, steps=2,
          guidance_scale=1.0, scheduler="Euler", seed=int(sys.argv[2]), upscale=1)
render = WorkerRender(Settings(home=Path(sys.argv[1])), CPU, {},
                      partial(FakeBackend, faults={14: Fault.HANG}))
for event in render([job], never):
    print(active_children()[0].pid, flush=True)
"""


def parent(home: Path, seed: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PARENT, str(home), str(seed)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_child_ends_when_its_parent_is_killed(home: Path) -> None:
    with parent(home, 14) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert not gone(pid, seconds=0.2)
        process.kill()
    assert gone(pid)


def test_a_parent_that_forgets_to_close_ends_with_its_child_and_in_silence(home: Path) -> None:
    with parent(home, 1) as process:
        out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert gone(int(out.split()[0]))


# -- words ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("exitcode", "said"),
    [
        (None, "it does not answer"),
        (0, "exit status 0"),
        (1, "exit status 1"),
        (-6, "SIGABRT"),
        (-9, "SIGKILL"),
        (-11, "SIGSEGV"),
        (-63, "signal 63"),
        (0xC0000005, "access violation"),
        (0xC0000409, "abort or stack overrun"),
        (0xC0000135, "a DLL was not found"),
        (0xC0000194, "exit status 0xC0000194"),
    ],
)
def test_an_end_is_told_in_words(exitcode: int | None, said: str) -> None:
    assert how(exitcode) == said

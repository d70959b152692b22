"""What a click on Generate does, without a browser."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sdamd import models
from sdamd.errors import BadCheckpoint, StorageError, WorkerDied
from sdamd.gallery import read_record
from sdamd.hardware.detect import Detection
from sdamd.hardware.device import CPU
from sdamd.metadata import to_parameters
from sdamd.plan import make_plan
from sdamd.render import Event, LocalRender, Started, Step, Watch
from sdamd.request import SEED_MAX, Job, Request
from sdamd.settings import Settings
from sdamd.studio import Studio
from tests.fakes import Clock, FakeBackend, Fault
from ui.generate import follow, offered, record_of, start, status_of, status_text
from ui.i18n import CHINESE, ENGLISH
from ui.runs import SHOWN, Run, Runs, Stage

NO_GPU = Detection(platform="linux", reason="no AMD GPU was found", mask={})
SMALL = {"width": "64", "height": "64", "steps": "2", "upscale": "1"}


class HeldRender:
    """Waits at its start until it is let go; then it renders, or raises what it is told to."""

    def __init__(
        self, settings: Settings, faults: Mapping[int, Fault], error: Exception | None = None
    ) -> None:
        backend = FakeBackend(faults=faults)
        self._inner = LocalRender(settings, CPU, lambda: backend)
        self._error = error
        self.let_go = threading.Event()
        self.calls: list[tuple[Job, ...]] = []

    def __call__(self, jobs: Sequence[Job], watch: Watch) -> Iterator[Event]:
        self.calls.append(tuple(jobs))
        assert self.let_go.wait(60)
        if self._error:
            raise self._error
        yield from self._inner(jobs, watch)

    def start(self) -> None:
        self._inner.start()

    def close(self) -> None:
        self._inner.close()


class Desk:
    """A server's runs, and the render behind them."""

    def __init__(
        self,
        settings: Settings,
        faults: Mapping[int, Fault] | None = None,
        error: Exception | None = None,
        *,
        held: bool = False,
    ) -> None:
        self.render = HeldRender(settings, faults or {}, error)
        if not held:
            self.render.let_go.set()
        studio = Studio(settings, render=self.render, detection=NO_GPU, environ={})
        self.runs = Runs(studio)

    def click(self, language: str = ENGLISH, **values: str) -> "Shown":
        return Shown().see(start(self.runs, SMALL | values, language))


class Shown:
    """A page: what the updates have made of it."""

    def __init__(self) -> None:
        self.parts: dict[str, Any] = {}
        self.history: list[str] = []

    def see(self, updates: Iterator[dict[str, Any]], at_most: int = 1000) -> "Shown":
        for _, update in zip(range(at_most), updates, strict=False):
            for name, new in update.items():
                if isinstance(new, dict):
                    self.parts.setdefault(name, {}).update(new)
                else:
                    self.parts[name] = new
            self.history.append(self.parts.get("status", ""))
        return self

    @property
    def pictures(self) -> list[tuple[str, str]]:
        shown: list[tuple[str, str]] = self.parts["gallery"]["value"]
        return shown

    @property
    def problems(self) -> str:
        return str(self.parts["problems"]["value"])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "shown"))
    return tmp_path / "shown"


def test_a_click_makes_the_pictures_and_shows_them_with_their_records(
    machine: Settings, cache: Path
) -> None:
    page = Desk(machine).click(prompt="a red house", count="2", seed=str(SEED_MAX))
    assert [caption for _, caption in page.pictures] == [f"1 · {SEED_MAX}", "2 · 0"]
    saved = sorted(machine.outputs.glob("*.png"))
    assert len(saved) == 2
    assert page.parts["record"] == to_parameters(read_record(saved[0]))
    assert f"Seed: {SEED_MAX}" in page.parts["record"]
    for shown, _ in page.pictures:
        assert Path(shown).is_relative_to(cache)
        assert Path(shown).read_bytes() in [path.read_bytes() for path in saved]
    assert "2 of 2 done" in page.parts["status"]
    assert page.parts["generate"]["interactive"]
    assert not page.parts["stop"]["interactive"]
    assert page.parts["problems"]["visible"] is False


def test_all_problems_are_shown_and_nothing_is_started(machine: Settings) -> None:
    desk = Desk(machine)
    page = desk.click(width="100", steps="9999", seed="1e5")
    assert page.parts["problems"]["visible"]
    assert [line.split()[0] for line in page.problems.splitlines()] == ["width", "steps", "seed"]
    assert "Not started" in page.parts["status"]
    assert desk.render.calls == []
    assert desk.runs.current() is None


def test_an_unknown_scheduler_is_answered_with_the_nearest(machine: Settings) -> None:
    assert "the nearest: Euler" in Desk(machine).click(scheduler="Eular").problems


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (WorkerDied("the process that renders has died (SIGSEGV)"), "has died (SIGSEGV)"),
        (StorageError("the disk is full"), "the disk is full"),
        (BadCheckpoint("x.safetensors is an HTML page"), "is an HTML page"),
        (RuntimeError("nobody expected this"), "unexpected RuntimeError: nobody expected this"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_is_a_sentence_and_the_next_run_starts(
    machine: Settings, error: Exception, sentence: str
) -> None:
    desk = Desk(machine, error=error)
    for _ in range(2):
        page = desk.click()
        assert sentence in page.problems
        assert "Traceback" not in page.problems
        assert "Failed; 0 of 1 saved" in page.parts["status"]
        assert page.parts["generate"]["interactive"]
    assert len(desk.render.calls) == 2


def test_a_picture_that_failed_is_named_and_the_others_are_shown(machine: Settings) -> None:
    page = Desk(machine, {8: Fault.BAD_IMAGE}).click(seed="7", count="3")
    assert page.problems == "picture 2 (seed 8): the picture is black throughout"
    assert [caption for _, caption in page.pictures] == ["1 · 7", "3 · 9"]
    assert "Failed; 2 of 3 saved" in page.parts["status"]


def test_the_next_click_clears_what_the_last_one_said(machine: Settings) -> None:
    desk = Desk(machine)
    page = desk.click(steps="0")
    page.see(start(desk.runs, SMALL, ENGLISH))
    assert page.parts["problems"] == {"__type__": "update", "value": "", "visible": False}


def test_a_page_that_goes_does_not_end_the_run_and_one_that_comes_finds_it(
    machine: Settings,
) -> None:
    desk = Desk(machine, held=True)
    updates = start(desk.runs, SMALL, ENGLISH)
    page = Shown().see(updates, at_most=2)
    assert page.parts["stop"]["interactive"]
    updates.close()  # type: ignore[attr-defined]  # it is a generator
    run = desk.runs.current()
    assert run is not None
    assert run.id == page.parts["id"]
    other = follow(run, ENGLISH, desk.runs.studio)
    desk.render.let_go.set()
    assert "1 of 1 done" in Shown().see(other).parts["status"]
    assert desk.runs.current() is run


def test_stop_ends_a_run_between_two_steps(machine: Settings) -> None:
    desk = Desk(replace(machine, batch_size=1), held=True)
    run = desk.runs.start([Request(width=64, height=64, steps=2, count=5)])
    while run.state.stage is Stage.WAITING:
        time.sleep(0.01)
    updates = follow(run, ENGLISH, desk.runs.studio)
    Shown().see(updates, at_most=1)
    run.stop()
    page = Shown().see(updates, at_most=1)
    assert "Stopping after this step" in page.parts["status"]
    desk.render.let_go.set()
    assert "Stopped; 0 of 5 saved" in page.see(updates).parts["status"]
    assert page.parts["generate"]["interactive"]


def test_a_second_click_waits_and_can_be_stopped_while_it_does(machine: Settings) -> None:
    desk = Desk(machine, held=True)
    first, second, third = (
        desk.runs.start([Request(width=64, height=64, steps=1, seed=seed)]) for seed in (1, 2, 3)
    )
    assert "Waiting for the run before it" in status_of(second, second.state, ENGLISH)
    second.stop()
    assert second.state.stage is Stage.STOPPED
    assert desk.runs.current() is first
    desk.render.let_go.set()
    for run in (first, third):
        assert "1 of 1 done" in Shown().see(follow(run, ENGLISH, desk.runs.studio)).history[-1]
    assert [jobs[0].seed for jobs in desk.render.calls] == [1, 3]


def test_closing_stops_what_runs_and_what_waits(machine: Settings) -> None:
    desk = Desk(machine, held=True)
    runs = [desk.runs.start([Request(width=64, height=64)]) for _ in range(2)]
    threading.Timer(0.2, desk.render.let_go.set).start()
    desk.runs.close(30)
    assert [run.state.stage for run in runs] == [Stage.STOPPED, Stage.STOPPED]


def test_the_record_of_a_selected_picture_is_its_own(machine: Settings) -> None:
    desk = Desk(machine)
    desk.click(seed="7", count="3")
    run = desk.runs.current()
    assert run is not None
    assert "Seed: 9," in record_of(run, {"caption": "3 · 9", "image": {"path": "/etc/passwd"}})
    assert record_of(run, {"caption": "4 · 10"}) == ""
    assert record_of(run, None) == ""


def test_only_the_last_pictures_are_shown_and_the_folder_is_named(machine: Settings) -> None:
    page = Desk(machine).click(count=str(SHOWN + 5), steps="1", seed="1")
    assert len(page.pictures) == SHOWN
    assert page.pictures[-1][1] == f"{SHOWN + 5} · {SHOWN + 5}"
    assert str(machine.outputs) in page.parts["status"]


def test_the_models_folder_is_offered_and_a_wrong_model_changes_nothing_else(
    machine: Settings,
) -> None:
    studio = Studio(machine, render=HeldRender(machine, {}), detection=NO_GPU, environ={})
    updates = offered(studio, "", CHINESE)
    assert updates["checkpoint"]["choices"] == [("内置模型", "")]
    assert updates["width"]["placeholder"] == "128"
    assert list(offered(studio, "no such model", ENGLISH)) == ["checkpoint"]


# -- the status line -----------------------------------------------------------------------------


class SteppedRender:
    """Tells the steps of a pass, of 2 seconds each."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._settings, self._clock = settings, clock

    def __call__(self, jobs: Sequence[Job], watch: Watch) -> Iterator[Event]:
        checkpoint = models.find("", self._settings.models)
        plan = make_plan(jobs[0], None, checkpoint, self._settings)
        for job in jobs[:2]:
            yield Started(job=job, plan=plan)
        for step in range(1, 5):
            self._clock.now += 2
            yield Step(jobs=tuple(jobs[:2]), step=step, steps=4)

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("language", "expected"),
    [
        (
            ENGLISH,
            [
                "Loading the model",
                "Loading the model",
                "Pictures 1 to 2 of 3 · step 1 of 4",
                "Pictures 1 to 2 of 3 · step 2 of 4 · 8 s left",
                "Pictures 1 to 2 of 3 · step 3 of 4 · 6 s left",
                "Pictures 1 to 2 of 3 · step 4 of 4 · 4 s left",
            ],
        ),
        (
            CHINESE,
            [
                "正在加载模型",
                "正在加载模型",
                "第 1 至 2 张，共 3 张 · 第 1 步，共 4 步",
                "第 1 至 2 张，共 3 张 · 第 2 步，共 4 步 · 剩余 8 s",
                "第 1 至 2 张，共 3 张 · 第 3 步，共 4 步 · 剩余 6 s",
                "第 1 至 2 张，共 3 张 · 第 4 步，共 4 步 · 剩余 4 s",
            ],
        ),
    ],
)
def test_the_status_tells_pictures_steps_and_the_time_that_is_left(
    machine: Settings, job: Job, language: str, expected: list[str]
) -> None:
    clock = Clock()
    run = Run([replace(job, index=i, seed=i) for i in range(3)], clock)
    seen: list[str] = []

    class Recording(SteppedRender):
        """Notes the status when the run has taken an event in and asks for the next."""

        def __call__(self, jobs: Sequence[Job], watch: Watch) -> Iterator[Event]:
            for event in super().__call__(jobs, watch):
                yield event
                seen.append(status_of(run, run.state, language))

    studio = Studio(machine, render=Recording(machine, clock), detection=NO_GPU, environ={})
    run.carry_out(studio)
    texts = [text.partition("</p>")[0].rpartition(">")[2] for text in seen]
    # Two pictures' steps take 2 seconds. The first one's time is not known, since loading came
    # before it. After the second, 4 of the 12 steps are done.
    assert texts == expected


def test_the_status_is_text_whatever_it_says() -> None:
    """F10: text from elsewhere was shown as HTML."""
    assert "&lt;img src=x onerror=alert(1)&gt;" in status_text("<img src=x onerror=alert(1)>", None)

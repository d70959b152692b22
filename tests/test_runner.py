"""A batch from the queue to the disk: in this process, and with real children that die."""

import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import pytest
from PIL import Image

from sdamd import gallery, runner
from sdamd.errors import DoesNotFit, HardwareError, OutOfVram, StorageError, WorkerDied
from sdamd.hardware.device import CPU
from sdamd.hardware.sensors import Sensors
from sdamd.jobs import Asked, JobQueue, State
from sdamd.lease import Process
from sdamd.metadata import Record
from sdamd.render import FILLER, Event, Failed, LocalRender, Render, Rendered, Started
from sdamd.request import Job
from sdamd.runner import Cooling, Device, Happening, Left, Limits, Retried, Runner, Saved, Wish
from sdamd.settings import Settings
from sdamd.store import Store
from sdamd.watchdog import Patience
from sdamd.worker import WorkerRender
from tests.fake_sdamd import SlowBackend
from tests.fakes import Clock, FakeBackend, Fault, picture, seeds

Make: TypeAlias = Callable[..., Device]
TRACES = Path(__file__).parent / "data/sensors"


class Bench:
    """A queue, an output folder, and runs over them with whatever renders."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.output = settings.outputs
        self.queue = JobQueue(Store(settings.home / "sdamd.db"))

    def put(self, jobs: Sequence[Job], filename: str = "[number]-[seed]") -> int:
        asked = map(Asked, jobs)
        return self.queue.enqueue(asked, name="a", output=self.output, filename=filename)

    def run(self, number: int, *devices: Device, size: int = 1, **more: object) -> list[Happening]:
        wish = more.pop("wish", lambda: Wish.GO_ON)
        running = Runner(self.queue, number, devices, lambda *_: size, **more)  # type: ignore[arg-type]
        return list(running.run(wish))  # type: ignore[arg-type]

    def names(self) -> list[str]:
        return sorted(
            str(path.relative_to(self.output))
            for path in self.output.rglob("*")
            if path.is_file() and path.name != ".sdamd-number"
        )

    def states(self, number: int) -> list[str]:
        return [str(row.state) for row in self.queue.rows(number)]


@pytest.fixture
def bench(machine: Settings) -> Iterator[Bench]:
    made = Bench(replace(machine, batch_size=1))
    yield made
    made.queue._store.close()


def local(bench: Bench, backend: FakeBackend | None = None, size: int = 1) -> Device:
    backend = backend or FakeBackend()
    render = LocalRender(replace(bench.settings, batch_size=size), CPU, lambda: backend)
    return Device(name="the CPU", render=render)


@pytest.fixture
def child(bench: Bench) -> Iterator[object]:
    """Make devices with a real child whose backend fails at the seeds that are said."""
    made: list[WorkerRender] = []

    def device(
        faults: Mapping[int, Fault] | None = None,
        name: str = "the CPU",
        size: int = 1,
        **more: object,
    ) -> Device:
        backend = partial(FakeBackend, faults=faults or {})
        settings = replace(bench.settings, batch_size=size)
        made.append(WorkerRender(settings, CPU, {}, backend, **more))  # type: ignore[arg-type]
        return Device(name=name, render=made[-1])

    yield device
    for render in made:
        render.close()
    assert multiprocessing.active_children() == []


def of(kind: type, happened: Sequence[Happening]) -> list[int]:
    return [e.job.seed for e in happened if isinstance(e, kind)]  # type: ignore[union-attr]


# -- the straight line ---------------------------------------------------------------------------


def test_each_picture_is_in_its_file_with_the_id_of_its_job_and_marked(
    bench: Bench, job: Job
) -> None:
    number = bench.put(seeds(job, 7, 8, 9))
    happened = bench.run(number, local(bench))
    assert of(Saved, happened) == [7, 8, 9]
    assert not [e for e in happened if isinstance(e, Left)]
    batch = bench.queue.batch(number)
    for row in bench.queue.rows(number):
        assert (row.state, row.attempts) == (State.DONE, 1)
        assert row.path is not None
        record = gallery.read_record(row.path)
        assert record.job == row.job
        assert dict(gallery.job_ids(bench.output))[row.path] == batch.job_id(row.job.index)
        with Image.open(row.path) as image:
            assert image.tobytes() == picture(row.job).tobytes()
    assert bench.names() == ["00001-7.png", "00002-8.png", "00003-9.png"]


@pytest.mark.report("D01")
def test_mixed_sizes_run_grouped_and_their_files_keep_the_order_of_the_rows(
    bench: Bench, job: Job
) -> None:
    made = [replace(job, seed=n, width=64 * (1 + n % 3)) for n in range(9)]
    backend = FakeBackend()
    number = bench.put(made)
    bench.run(number, local(bench, backend, 2), size=2)
    order = [seed for of_pass, _ in backend.passes for seed in dict.fromkeys(of_pass)]
    assert order == [0, 3, 6, 1, 4, 7, 2, 5, 8]
    assert bench.names() == [f"{n + 1:05d}-{n}.png" for n in range(9)]


@pytest.mark.report("E13")
@pytest.mark.report("E15")
@pytest.mark.parametrize("pattern", ["out", "[date]-[time]", "[steps]/[prompt]", "[date]/[number]"])
def test_no_pattern_makes_a_picture_replace_another(bench: Bench, job: Job, pattern: str) -> None:
    for _ in range(2):
        bench.run(bench.put(seeds(job, 1, 2, 3, 4, 5), pattern), local(bench))
    assert len(bench.names()) == 10


@pytest.mark.report("E16")
def test_numbers_of_deleted_pictures_do_not_come_again(bench: Bench, job: Job) -> None:
    bench.run(bench.put(seeds(job, 1, 2, 3)), local(bench))
    for name in ("00002-2.png", "00003-3.png"):
        (bench.output / name).unlink()
    bench.run(bench.put(seeds(job, 1, 2)), local(bench))
    assert bench.names() == ["00001-1.png", "00004-1.png", "00005-2.png"]


@pytest.mark.report("E24")
def test_names_of_any_script_are_paths_like_others(bench: Bench, job: Job, tmp_path: Path) -> None:
    bench.output = tmp_path / "žluťoučký kůň" / "通义"
    number = bench.put(seeds(replace(job, prompt="модель é 🐴"), 1), "[prompt]")
    (path,) = (e.path for e in bench.run(number, local(bench)) if isinstance(e, Saved))
    assert path.is_file()
    assert [row.path for row in bench.queue.rows(number)] == [path]


def test_a_picture_that_fails_is_told_and_the_others_are_made(bench: Bench, job: Job) -> None:
    backend = FakeBackend(faults={2: Fault.BAD_IMAGE})
    number = bench.put(seeds(job, 1, 2, 3))
    happened = bench.run(number, local(bench, backend))
    assert (of(Saved, happened), of(Failed, happened)) == ([1, 3], [2])
    (failed,) = bench.queue.rows(number, State.FAILED)
    assert failed.error == "the picture is black throughout"
    assert bench.names() == ["00001-1.png", "00003-3.png"]  # its number stays its own


@pytest.mark.report("B15")
def test_a_batch_that_does_not_fit_at_once_is_divided(bench: Bench, job: Job) -> None:
    backend = FakeBackend(largest_batch=4)
    number = bench.put(seeds(job, *range(10)))
    bench.run(number, local(bench, backend, 8), size=8)
    assert bench.states(number) == ["done"] * 10


@pytest.mark.report("E17")
def test_a_checkpoint_that_is_gone_fails_its_pictures_and_no_others(bench: Bench, job: Job) -> None:
    made = [replace(job, seed=1, checkpoint="gone"), replace(job, seed=2)]
    number = bench.put(made)
    happened = bench.run(number, local(bench))
    assert (of(Saved, happened), of(Failed, happened)) == ([2], [1])
    (failed,) = bench.queue.rows(number, State.FAILED)
    assert str(failed.error).startswith("checkpoint 'gone' is not known")


# -- going on ------------------------------------------------------------------------------------


def cut_off(bench: Bench, number: int, *, claimed: int, saved: Sequence[int]) -> None:
    """What a process leaves that is killed between saving and marking."""
    gone = Process(pid=2**22 + 5, started="1", boot=Process.this().boot,
                   space=Process.this().space, host=Process.this().host)  # fmt: skip
    queue = JobQueue(bench.queue._store, here=gone)
    claim = queue.claim(number, lambda *_: claimed)
    assert claim is not None
    batch = queue.batch(number)
    gallery.check_folder(bench.output)
    for job in claim.jobs:
        if job.index in saved:
            record = Record(job=job, version="1", checkpoint_name="tiny")
            png = gallery.with_job_id(gallery.encode(picture(job), record), batch.job_id(job.index))

            def numbers(folder: Path, free: int, at: int = job.index) -> gallery.Number:
                first = queue.first_number(number, folder, free)
                return gallery.Number(number=first + at, last=first + batch.total - 1)

            gallery.save(png, bench.output, batch.filename, record, numbers=numbers)


@pytest.mark.report("E21")
@pytest.mark.parametrize("pattern", ["[number]-[seed]", "[steps]/[seed]", "out"])
def test_pictures_that_were_saved_and_not_marked_are_found_and_not_made_again(
    bench: Bench, job: Job, pattern: str
) -> None:
    number = bench.put(seeds(job, *range(6)), pattern)
    cut_off(bench, number, claimed=4, saved=[1, 3])
    leftover = next(bench.output.rglob(".sdamd-number")).with_name(".sdamd-00aa.tmp")
    leftover.write_bytes(b"half a picture")
    happened = bench.run(number, local(bench))
    assert sorted(of(Saved, happened)) == [0, 2, 4, 5]
    assert bench.states(number) == ["done"] * 6
    assert len(bench.names()) == 6  # and nothing half-written
    paths = [row.path for row in bench.queue.rows(number)]
    assert len(set(paths)) == 6
    assert all(path is not None and path.is_file() for path in paths)


def test_a_pass_that_lost_members_is_filled_up_so_that_it_rounds_the_same(
    bench: Bench, job: Job
) -> None:
    number = bench.put(seeds(job, *range(10)))
    cut_off(bench, number, claimed=4, saved=[0, 2])
    backend = FakeBackend()
    happened = bench.run(number, local(bench, backend, 4), size=4)
    assert [of_pass for of_pass, _ in backend.passes] == [
        (1, 3, 1, 1), (4, 5, 6, 7), (8, 9)
    ]  # fmt: skip
    assert sorted(of(Saved, happened)) == [1, 3, 4, 5, 6, 7, 8, 9]
    assert not [e for e in happened if isinstance(e, Started) and e.job.index == FILLER]
    records = [e.record.together for e in happened if isinstance(e, Rendered)]
    assert records == [4] * 6 + [2] * 2


def test_a_finished_batch_has_nothing_to_do(bench: Bench, job: Job) -> None:
    number = bench.put(seeds(job, 1))
    bench.run(number, local(bench))
    backend = FakeBackend()
    assert bench.run(number, local(bench, backend)) == []
    assert backend.loads == []


def test_pictures_that_somebody_deleted_are_not_made_again_unasked(bench: Bench, job: Job) -> None:
    number = bench.put(seeds(job, 1, 2))
    bench.run(number, local(bench))
    (bench.output / "00001-1.png").unlink()
    assert bench.run(number, local(bench)) == []
    bench.queue.retry(number, missing=True)
    assert of(Saved, bench.run(number, local(bench))) == [1]
    assert bench.names() == ["00001-1.png", "00002-2.png"]


def slow(bench: Bench, monkeypatch: pytest.MonkeyPatch, size: int = 1) -> Device:
    """A device whose passes take a while, so that the reader of the run is never behind."""
    monkeypatch.setenv("FAKE_SECONDS", "0.02")
    return local(bench, SlowBackend(), size)


def test_stopping_lets_the_running_pass_be_finished_and_gives_the_rest_back(
    bench: Bench, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = bench.put(seeds(job, *range(80)))
    device = slow(bench, monkeypatch, size=4)
    happened: list[Happening] = []
    running = Runner(bench.queue, number, [device], lambda *_: 4)
    for event in running.run(lambda: Wish.FINISH if of(Started, happened) else Wish.GO_ON):
        happened.append(event)  # noqa: PERF402  # it is read above meanwhile
    (left,) = (e for e in happened if isinstance(e, Left))
    made = len(of(Saved, happened))
    assert 4 <= made < 80
    assert made % 4 == 0  # whole passes
    assert (left.count, left.why) == (80 - made, "it was interrupted")
    assert bench.states(number).count("pending") == 80 - made
    monkeypatch.setenv("FAKE_SECONDS", "0")
    bench.run(number, device, size=4)
    assert bench.states(number) == ["done"] * 80


def test_leaving_in_the_middle_gives_back_what_was_not_saved(bench: Bench, job: Job) -> None:
    number = bench.put(seeds(job, *range(6)))
    running = Runner(bench.queue, number, [local(bench)], lambda *_: 1).run()
    for event in running:
        if isinstance(event, Saved):
            break
    running.close()  # type: ignore[attr-defined]  # a generator has it
    states = bench.states(number)
    assert set(states) == {"done", "pending"}
    assert len(bench.names()) == states.count("done")
    bench.run(number, local(bench))
    assert len(bench.names()) == 6


@pytest.mark.parametrize("say", ["pause", "cancel"])
def test_another_process_may_pause_or_cancel(
    bench: Bench, job: Job, say: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_LOOK_SECONDS", 0.0)
    number = bench.put(seeds(job, *range(30)))
    happened: list[Happening] = []
    device = slow(bench, monkeypatch)
    for event in Runner(bench.queue, number, [device], lambda *_: 1).run():
        happened.append(event)
        if len(of(Saved, happened)) == 2 and isinstance(event, Saved):
            getattr(JobQueue(bench.queue._store), say)(number)
    made = len(of(Saved, happened))
    assert 2 <= made < 30
    counts = bench.queue.batch(number).counts
    rest = State.PENDING if say == "pause" else State.CANCELLED
    assert (counts[State.DONE], counts[rest]) == (made, 30 - made)
    assert [e.why for e in happened if isinstance(e, Left)] == (
        ["it was paused"] if say == "pause" else []
    )


def test_nothing_is_claimed_after_the_time_is_over(
    bench: Bench, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    number = bench.put(seeds(job, *range(40)))
    device = slow(bench, monkeypatch)
    limits = Limits(until=1500.0, until_text="it is 07:00")
    happened: list[Happening] = []
    running = Runner(bench.queue, number, [device], lambda *_: 1, limits=limits, clock=clock)
    for event in running.run():
        happened.append(event)
        clock.now += 100 * isinstance(event, Saved)
    (left,) = (e for e in happened if isinstance(e, Left))
    assert left.why == "it is 07:00"
    assert 0 < left.count < 40
    assert bench.states(number).count("pending") == left.count


# -- disks ---------------------------------------------------------------------------------------


@pytest.mark.report("E23")
def test_an_output_folder_that_is_gone_stops_the_batch_and_keeps_the_queue(
    bench: Bench, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = bench.put(seeds(job, *range(40)))
    running = Runner(bench.queue, number, [slow(bench, monkeypatch)], lambda *_: 1).run()

    def unplug_after_two() -> None:
        saved = 0
        for event in running:
            saved += isinstance(event, Saved)
            if saved == 2 and bench.output.exists():
                bench.output.rename(bench.output.with_name("unplugged"))

    with pytest.raises(StorageError):
        unplug_after_two()
    assert not bench.output.exists()  # no empty folder takes its place
    assert bench.queue.batch(number).counts[State.FAILED] == 0
    with pytest.raises(StorageError, match="which is not there; is its disk connected"):
        bench.run(number, local(bench))
    bench.output.with_name("unplugged").rename(bench.output)
    bench.run(number, local(bench))
    assert bench.states(number) == ["done"] * 40
    assert len(bench.names()) == 40


# -- children that die ---------------------------------------------------------------------------


@pytest.mark.report("C18")
def test_a_picture_that_kills_its_process_is_tried_once_more_and_the_batch_goes_on(
    bench: Bench, job: Job, child: Make
) -> None:
    number = bench.put(seeds(replace(job, steps=1), 1, 2, 3, 4, 5))
    happened = bench.run(number, child({3: Fault.ABORT}))
    assert sorted(of(Saved, happened)) == [1, 2, 4, 5]
    assert (of(Retried, happened), of(Failed, happened)) == ([3], [3])
    (failed,) = bench.queue.rows(number, State.FAILED)
    assert "has died (SIGABRT)" in str(failed.error)
    assert failed.attempts == 2
    assert bench.names() == ["00001-1.png", "00002-2.png", "00004-4.png", "00005-5.png"]


@pytest.mark.report("C03")
def test_those_that_shared_a_pass_with_it_are_made_alone(
    bench: Bench, job: Job, child: Make
) -> None:
    number = bench.put(seeds(replace(job, steps=1), 1, 2, 3))
    happened = bench.run(number, child({3: Fault.CRASH}, size=4), size=4)
    assert sorted(of(Saved, happened)) == [1, 2]
    assert (sorted(of(Retried, happened)), of(Failed, happened)) == ([1, 2, 3], [3])
    (failed,) = bench.queue.rows(number, State.FAILED)
    assert "Its last words: " in str(failed.error)
    assert "RuntimeError: nobody expected this" in str(failed.error)


def test_a_child_that_hangs_is_replaced(bench: Bench, job: Job, child: Make) -> None:
    patience = Patience(first=60, least=0.5, factor=5)
    number = bench.put(seeds(replace(job, steps=2), 1, 2))
    happened = bench.run(number, child({2: Fault.HANG}, patience=patience))
    assert sorted(of(Saved, happened)) == [1]
    (failed,) = bench.queue.rows(number, State.FAILED)
    assert "hung (no progress for " in str(failed.error)


@pytest.mark.report("B09")
def test_memory_that_never_comes_back_costs_processes_and_no_picture(
    bench: Bench, job: Job
) -> None:
    render = WorkerRender(bench.settings, CPU, {}, partial(FakeBackend, leaks_after=20))
    with closing(render):
        number = bench.put(seeds(replace(job, steps=1), *range(50)))
        happened = bench.run(number, Device(name="the CPU", render=render))
    assert of(Failed, happened) == []
    assert bench.names() == [f"{n + 1:05d}-{n}.png" for n in range(50)]


def test_a_process_makes_room_for_a_new_one_after_some_pictures(
    bench: Bench, job: Job, child: Make
) -> None:
    device = child(recycle_after=2)
    number = bench.put(seeds(replace(job, steps=1), *range(5)))
    pids = set()
    for event in Runner(bench.queue, number, [device], lambda *_: 1).run():
        if isinstance(event, Started):
            pids |= {process.pid for process in multiprocessing.active_children()}
    assert bench.states(number) == ["done"] * 5
    assert len(pids) == 2  # four jobs are handed over at once


class Broken:
    """A render whose device never works."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, jobs: Sequence[Job], watch: Callable[[], bool]) -> Iterator[Event]:
        yield from ()
        raise self.error

    def start(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


def test_a_minute_without_memory_fails_nothing_that_has_fitted_before(
    bench: Bench, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "SHORT_SECONDS", 0.01)
    number = bench.put([*seeds(job, *range(8)), replace(job, width=4096)])
    inner = local(bench)

    class Short(Broken):
        """Has no room for large pictures, and for a while for no picture."""

        calls = 0

        def __call__(self, jobs: Sequence[Job], watch: Callable[[], bool]) -> Iterator[Event]:
            Short.calls += 1
            if jobs[0].width > 1024 or 2 <= Short.calls <= 4:
                yield from (Failed(job=job, error=DoesNotFit("no room")) for job in jobs)
            else:
                yield from inner.render(jobs, watch)

    short: Render = Short(DoesNotFit("no room"))
    happened = bench.run(number, Device(name="the CPU", render=short))
    assert bench.states(number) == ["done"] * 8 + ["failed"]
    assert len(of(Failed, happened)) == 1


def test_when_no_device_works_the_batch_stops_and_loses_nothing(bench: Bench, job: Job) -> None:
    number = bench.put(seeds(job, *range(5)))
    broken: Render = Broken(WorkerDied("torch cannot be loaded"))
    with pytest.raises(HardwareError, match="GPU 0 renders no picture any more: torch cannot be"):
        bench.run(number, Device(name="GPU 0", render=broken))
    assert bench.states(number) == ["pending"] * 5


def test_a_device_that_does_not_work_is_left_out_and_the_other_makes_all(
    bench: Bench, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    number = bench.put(seeds(job, *range(8)))
    broken: Render = Broken(OutOfVram("no room"))
    bench.run(number, Device(name="GPU 1", render=broken), local(bench))
    assert bench.states(number) == ["done"] * 8
    assert "GPU 1 is left out from here on: no room" in caplog.text


def test_what_nobody_expected_comes_out_and_loses_nothing(bench: Bench, job: Job) -> None:
    number = bench.put(seeds(job, 1, 2))
    broken: Render = Broken(ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        bench.run(number, Device(name="GPU 0", render=broken))
    assert bench.states(number) == ["pending"] * 2


def test_two_devices_share_one_batch(bench: Bench, job: Job, child: Make) -> None:
    number = bench.put(seeds(replace(job, steps=1), *range(16)))
    devices = [child(name="GPU 0", size=2), child({5: Fault.KILL}, name="GPU 1", size=2)]
    happened = bench.run(number, *devices, size=2)
    assert sorted(of(Saved, happened)) == list(range(16))  # a child that dies once is no matter
    assert bench.names() == [f"{n + 1:05d}-{n}.png" for n in range(16)]


# -- kind to the card ----------------------------------------------------------------------------


class Card:
    """A recorded card: its files say what the trace says at the time."""

    def __init__(self, root: Path, trace: str) -> None:
        lines = (TRACES / trace).read_text().splitlines()
        rows = [line.split("\t") for line in lines if line and line[0].isdigit()]
        self.rows = [(float(t), c, w) for t, c, w in rows]
        pci = root / "sys/bus/pci/devices/0000:03:00.0/hwmon/hwmon4"
        pci.mkdir(parents=True)
        for at, label in enumerate(("edge", "junction", "mem"), start=1):
            (pci / f"temp{at}_label").write_text(f"{label}\n")
            (pci / f"temp{at}_input").write_text("41000\n")
        (pci / "power1_average").write_text("19000000\n")
        self.folder = pci
        self.sensors = Sensors.of("0000:03:00.0", root)
        self.now = 0.0

    def advance(self, seconds: float) -> None:
        self.now += seconds
        _, celsius, watts = max(row for row in self.rows if row[0] <= self.now)
        (self.folder / "temp2_input").write_text(f"{celsius}\n")
        (self.folder / "power1_average").write_text(f"{watts}\n")


def test_a_card_rests_between_pictures_until_it_is_cooler(
    bench: Bench, job: Job, tmp_path: Path
) -> None:
    card = Card(tmp_path, "warming.tsv")
    number = bench.put(seeds(job, *range(6)))
    clock = Clock(now=0.0)
    started: list[float] = []

    def wish() -> Wish:
        card.advance(1.0)
        clock.now = card.now
        return Wish.GO_ON

    running = Runner(
        bench.queue, number,
        [replace(local(bench), name="GPU 0", sensors=card.sensors)], lambda *_: 1,
        limits=Limits(celsius=95.0), clock=clock,
    )  # fmt: skip
    cooling = []
    for event in running.run(wish):
        if isinstance(event, Started):
            started.append(card.sensors.celsius() or 0.0)
        if isinstance(event, Cooling):
            cooling.append(event)
    assert bench.states(number) == ["done"] * 6
    assert [(e.device, e.until) for e in cooling] == [("GPU 0", 90.0)] * len(cooling)
    assert cooling
    assert all(e.celsius > 95 for e in cooling)


def test_energy_is_noted_where_the_card_tells_its_power(
    bench: Bench, job: Job, tmp_path: Path
) -> None:
    card = Card(tmp_path, "warming.tsv")
    clock = Clock(now=0.0)
    number = bench.put(seeds(replace(job, steps=20), 1, 2))
    running = Runner(
        bench.queue, number, [replace(local(bench, size=2), sensors=card.sensors)],
        lambda *_: 2,
        clock=clock,
    )  # fmt: skip
    for event in running.run():
        if not isinstance(event, Saved):
            clock.now += 1.0
            card.advance(1.0)
        del event
    joules = [row.joules for row in bench.queue.rows(number)]
    assert joules[0] == joules[1]  # they shared the pass
    assert joules[0] is not None
    assert 50 < joules[0] < 10_000


def test_where_no_power_is_told_no_energy_is_made_up(bench: Bench, job: Job) -> None:
    number = bench.put(seeds(job, 1))
    bench.run(number, local(bench))
    assert [row.joules for row in bench.queue.rows(number)] == [None]

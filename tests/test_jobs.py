"""The queue against a model of it, and with real processes at once."""

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sdamd import batch, jobs
from sdamd.checkpoint import FAMILIES
from sdamd.errors import BadRequest, UserError
from sdamd.jobs import DEATHS_MAX, Asked, Claim, JobQueue, Made, State
from sdamd.lease import Process
from sdamd.request import Job, Request
from sdamd.store import Store
from tests.fakes import seeds

ROOT = Path(__file__).parents[1]
HERE = Process(pid=1, started="100", boot="b", space="s", host="h")


class Desk:
    """One store, and queues of several processes that live until they are said to be gone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.living: dict[int, str] = {}
        self.now = 1e9
        self.stores: list[Store] = []

    def queue(self, pid: int = 1, **other: str) -> JobQueue:
        self.living[pid] = "100"
        self.stores.append(Store(self.path))
        return JobQueue(
            self.stores[-1],
            here=replace(HERE, pid=pid, **other),
            started_of=lambda pid: self.living.get(pid, ""),
            now=lambda: self.now,
        )

    def close(self) -> None:
        for store in self.stores:
            store.close()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path / "sdamd.db")
    yield made
    made.close()


def put(queue: JobQueue, made: list[Job]) -> int:
    return queue.enqueue(map(Asked, made), name="a file", output=Path("/out"), filename="[number]")


def one(job: Job, count: int) -> int:
    return 1


def of_four(job: Job, count: int) -> int:
    return 4


def numbers(claim: Claim | None) -> list[int]:
    assert claim is not None
    return [job.index for job in claim.jobs]


def states(queue: JobQueue, number: int) -> list[str]:
    return [str(row.state) for row in queue.rows(number)]


# -- taking in -----------------------------------------------------------------------------------


def test_a_batch_comes_back_as_it_went_in(desk: Desk, job: Job) -> None:
    queue = desk.queue()
    made = [
        replace(job, index=7, prompt='it\'s a "dog"\n', seed=2**64 - 1),
        replace(job, negative_prompt="通义", seed=0, width=256),
    ]
    number = put(queue, made)
    rows = list(desk.queue(2).rows(number))
    assert [row.job for row in rows] == [replace(j, index=i) for i, j in enumerate(made)]
    assert {(row.state, row.attempts, row.path, row.error) for row in rows} == {
        (State.PENDING, 0, None, None)
    }
    found = queue.batch(number)
    assert (found.name, found.output, found.filename) == ("a file", Path("/out"), "[number]")
    assert (found.total, found.left, found.state) == (2, 2, "ready")


def test_an_error_while_the_rows_are_read_leaves_no_trace(desk: Desk, job: Job) -> None:
    def rows() -> Iterator[Job]:
        yield from seeds(job, *range(2500))
        raise BadRequest("line 2501: steps is 151; allowed 1 to 150")

    queue = desk.queue()
    with pytest.raises(BadRequest, match="line 2501"):
        queue.enqueue(map(Asked, rows()), name="a", output=Path("/o"), filename="")
    assert queue.batches() == []
    assert desk.stores[0].rows("SELECT count(*) FROM job") == [(0,)]
    assert put(queue, seeds(job, 1)) == 1  # the queue is of use as before


def test_nobody_waits_while_rows_are_read(desk: Desk, job: Job) -> None:
    """Rows may come from a pipe, for hours."""
    queue, other = desk.queue(), desk.queue(2)
    first = put(other, seeds(job, *range(4)))

    def rows() -> Iterator[Job]:
        for row in seeds(job, *range(3)):
            claim = other.claim(first, one)
            other.finish(first, [Made(number=numbers(claim)[0], path=Path("/a"))])
            yield row

    queue.enqueue(map(Asked, rows()), name="a", output=Path("/o"), filename="")
    assert other.batch(first).counts[State.DONE] == 3


def test_a_batch_without_pictures_or_with_too_many_is_refused(
    desk: Desk, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = desk.queue()
    with pytest.raises(BadRequest, match="a file asks for no picture"):
        put(queue, [])
    monkeypatch.setattr(jobs, "JOBS_MAX", 3)
    put(queue, seeds(job, 1, 2, 3))
    with pytest.raises(BadRequest, match="more than 3 pictures, which is the most"):
        put(queue, seeds(job, 1, 2, 3, 4))
    assert len(queue.batches()) == 1


MEMORY = """
import json, resource, sys, time
from pathlib import Path
from sdamd import batch
from sdamd.checkpoint import FAMILIES
from sdamd.jobs import Asked, JobQueue
from sdamd.request import Request
from sdamd.store import Store

def rows(count):
    for number in range(count):
        request = Request.from_dict({
            "prompt": f"a red house number {number} by the sea", "steps": 20, "seed": str(number),
            "width": 128 + 64 * (number % 3), "height": 128,
        })
        yield from batch.expand(request, FAMILIES["tiny"])

queue = JobQueue(Store(Path(sys.argv[1])))
queue.enqueue(map(Asked, rows(100)), name="a", output=Path("/o"), filename="")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began, cpu = time.perf_counter(), time.process_time()
queue.enqueue(map(Asked, rows(int(sys.argv[2]))), name="a", output=Path("/o"), filename="")
print(json.dumps({
    "seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu,
    "KiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before,
}))
"""


@pytest.mark.slow
@pytest.mark.report("E21")
def test_a_hundred_thousand_rows_are_on_the_disk_in_ten_seconds_and_take_no_memory(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "a.db"), "100000"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    took = json.loads(done.stdout)
    assert took["KiB"] < 16 * 1024
    # Of the CPU: others may be at work on this machine.
    assert took["cpu"] < 10, took


# -- order ---------------------------------------------------------------------------------------


@pytest.mark.report("D01")
@pytest.mark.report("D04")
def test_jobs_come_by_checkpoint_then_size_then_number(desk: Desk, job: Job) -> None:
    """A mixed batch would load and look for kernels at every picture."""
    made = [
        replace(job, checkpoint=c, width=w, scheduler=s)
        for c, w, s in [
            ("b", 128, "Euler"), ("a", 128, "Euler"), ("b", 256, "Euler"), ("b", 128, "DDIM"),
            ("a", 128, "Euler"), ("b", 128, "Euler"), ("a", 64, "Euler"), ("b", 256, "Euler"),
        ]
    ]  # fmt: skip
    queue = desk.queue()
    number = put(queue, made)
    order = []
    while claim := queue.claim(number, of_four):
        order.append(numbers(claim))
    assert order == [[0, 5], [3], [2, 7], [1, 4], [6]]
    assert [(kind.checkpoint, kind.width, count) for kind, count in queue.kinds(number)] == [
        ("b", 128, 2), ("b", 128, 1), ("b", 256, 2), ("a", 128, 2), ("a", 64, 1),
    ]  # fmt: skip


def test_twenty_widths_are_twenty_kinds_and_one_load(desk: Desk, job: Job) -> None:
    made = [replace(job, width=1000 + 8 * (n % 20), seed=n) for n in range(100)]
    queue = desk.queue()
    assert [count for _, count in queue.kinds(put(queue, made))] == [5] * 20


def test_passes_are_the_same_whatever_was_made_before(desk: Desk, job: Job) -> None:
    """So an interrupted batch rounds as an undisturbed one does."""
    queue = desk.queue()
    number = put(queue, seeds(job, *range(10)))
    claim = queue.claim(number, of_four, passes=2)
    assert claim is not None
    assert [[j.index for j in one] for one in claim.passes] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    queue.finish(number, [Made(number=n, path=Path("/a")) for n in (0, 2, 3, 5)])
    queue.give_back(number, numbers(claim))
    again = queue.claim(number, lambda *_: pytest.fail("the size of a pass is kept"), passes=2)
    assert again is not None
    assert [[j.index for j in one] for one in again.passes] == [[1], [4, 6, 7]]
    assert again.sizes == (4, 4)
    last = queue.claim(number, of_four)
    assert (numbers(last), last and last.sizes) == ([8, 9], (2,))
    assert queue.claim(number, of_four) is None


def test_the_size_of_a_pass_is_asked_with_a_job_and_how_many_it_is_one_of(
    desk: Desk, job: Job
) -> None:
    queue = desk.queue()
    number = put(queue, seeds(job, *range(10)))
    asked = []

    def pass_size(job: Job, count: int) -> int:
        asked.append((job.seed, count))
        return 3

    queue.claim(number, pass_size)
    queue.claim(number, pass_size)
    assert asked == [(0, 10)]


# -- what a person says --------------------------------------------------------------------------


def test_a_paused_batch_gives_no_job_until_it_is_ready(desk: Desk, job: Job) -> None:
    queue = desk.queue()
    number = put(queue, seeds(job, 1))
    queue.pause(number)
    assert queue.claim(number, one) is None
    queue.ready(number)
    assert numbers(queue.claim(number, one)) == [0]


def test_cancelling_gives_up_what_is_not_made_and_retry_takes_it_up(desk: Desk, job: Job) -> None:
    queue = desk.queue()
    number = put(queue, seeds(job, 1, 2, 3, 4))
    queue.claim(number, one)
    queue.finish(number, [Made(number=0, path=Path("/a"))])
    queue.claim(number, one)
    assert queue.cancel(number) == 2
    queue.give_back(number, [1])  # it was being made
    assert states(queue, number) == ["done", "cancelled", "cancelled", "cancelled"]
    assert queue.unfinished() == []
    with pytest.raises(UserError, match=f"`sdamd batch retry {number}`"):
        queue.ready(number)
    assert queue.retry(number) == 3
    assert states(queue, number) == ["done", "pending", "pending", "pending"]
    assert queue.unfinished() == [number]


def test_retry_makes_failed_pictures_again_and_on_request_those_whose_file_is_gone(
    desk: Desk, job: Job, tmp_path: Path
) -> None:
    queue = desk.queue()
    number = put(queue, seeds(job, 1, 2, 3))
    queue.claim(number, of_four)
    there = tmp_path / "there.png"
    there.touch()
    queue.finish(number, [Made(number=0, path=there), Made(number=1, path=tmp_path / "gone.png")])
    queue.fail(number, 2, "black")
    assert queue.retry(number) == 1
    assert states(queue, number) == ["done", "done", "pending"]
    assert queue.retry(number, missing=True) == 1
    assert states(queue, number) == ["done", "pending", "pending"]


def test_a_batch_that_is_not_there_is_told_with_those_that_are(desk: Desk, job: Job) -> None:
    queue = desk.queue()
    with pytest.raises(UserError, match="batch 3 is not known; there is none yet"):
        queue.batch(3)
    put(queue, seeds(job, 1))
    put(queue, seeds(job, 1))
    for ask in (queue.pause, queue.cancel, queue.retry, lambda n: list(queue.rows(n))):
        with pytest.raises(UserError, match="batch 3 is not known; there are 1, 2"):
            ask(3)


# -- workers that go -----------------------------------------------------------------------------


def test_the_jobs_of_a_worker_that_is_gone_come_back_and_those_of_a_living_one_stay(
    desk: Desk, job: Job
) -> None:
    first, second, third = (desk.queue(pid) for pid in (1, 2, 3))
    number = put(first, seeds(job, *range(4)))
    assert numbers(first.claim(number, one)) == [0]
    assert numbers(second.claim(number, one)) == [1]
    del desk.living[1]
    assert third.recover(number) == 1
    assert states(third, number) == ["pending", "running", "pending", "pending"]
    assert [row.attempts for row in third.rows(number)] == [1, 1, 0, 0]
    desk.living[2] = "200"  # its id came again
    assert third.recover(number) == 0
    assert states(third, number) == ["pending"] * 4


def test_being_killed_from_outside_is_never_a_jobs_fault(desk: Desk, job: Job) -> None:
    queue = desk.queue()
    number = put(queue, seeds(job, 1))
    for pid in range(2, 12):
        queue = desk.queue(pid)
        queue.recover(number)
        assert numbers(queue.claim(number, one)) == [0]
        del desk.living[pid]
    (row,) = queue.rows(number)
    assert (row.attempts, row.deaths) == (10, 0)


def test_a_worker_of_another_container_counts_as_long_as_it_says_so(desk: Desk, job: Job) -> None:
    there, here = desk.queue(1, space="other"), desk.queue(1)
    number = put(there, seeds(job, 1, 2))
    there.claim(number, one)
    desk.now += 100
    there.beat()
    desk.now += 100
    assert here.recover(number) == 1
    desk.now += 100
    assert here.recover(number) == 0
    assert states(here, number) == ["pending", "pending"]


def test_a_job_that_takes_the_machine_down_twice_fails(desk: Desk, job: Job) -> None:
    """C03: a batch that is resumed at every start would never get past it."""
    last = desk.queue()
    number = put(last, seeds(job, 1))
    for boot in ("b1", "b2"):
        desk.queue(1, boot=boot).claim(number, one)
        last = desk.queue(1, boot=f"{boot} and after")
        last.recover(number)
    (row,) = last.rows(number)
    assert row.state is State.FAILED
    assert row.error == "the machine went down while this picture was being made"


@pytest.mark.report("C18")
def test_a_job_that_a_process_died_of_is_tried_alone_and_then_failed(desk: Desk, job: Job) -> None:
    queue = desk.queue()
    number = put(queue, seeds(job, *range(8)))
    claim = queue.claim(number, of_four)
    assert numbers(claim) == [0, 1, 2, 3]
    queue.blame(number, 1, "SIGABRT")
    queue.blame(number, 2, "SIGABRT")
    queue.give_back(number, [0, 3])
    shared = queue.claim(number, of_four)
    assert shared is not None
    assert (numbers(shared), shared.sizes) == ([0, 3], (4,))
    for suspect in (1, 2):
        alone = queue.claim(number, of_four)
        assert alone is not None
        assert (numbers(alone), alone.sizes) == ([suspect], (4,))
    assert queue.blame(number, 1, "SIGKILL") is State.FAILED
    queue.finish(number, [Made(number=2, path=Path("/a"))])
    found = {row.job.index: row for row in queue.rows(number, State.FAILED, State.DONE)}
    assert (found[1].error, found[2].error) == ("SIGKILL", None)
    assert numbers(queue.claim(number, of_four)) == [4, 5, 6, 7]


def test_a_job_is_done_once(desk: Desk, job: Job) -> None:
    queue = desk.queue()
    number = put(queue, seeds(job, 1))
    queue.claim(number, one)
    queue.finish(number, [Made(number=0, path=Path("/first"))])
    queue.finish(number, [Made(number=0, path=Path("/second"))])
    queue.blame(number, 0, "late news")
    queue.fail(number, 0, "late news")
    queue.give_back(number, [0])
    (row,) = queue.rows(number)
    assert (row.state, row.path) == (State.DONE, Path("/first"))


def test_the_first_number_of_a_batch_in_a_folder_is_decided_once(desk: Desk, job: Job) -> None:
    queue = desk.queue()
    number, other = put(queue, seeds(job, 1)), put(queue, seeds(job, 1))
    assert queue.first_number(number, Path("/a"), 5) == 5
    assert desk.queue(2).first_number(number, Path("/a"), 99) == 5
    assert queue.first_number(number, Path("/b"), 1) == 1
    assert queue.first_number(other, Path("/a"), 6) == 6


def test_the_files_of_a_batch_carry_what_tells_them_from_all_others(desk: Desk, job: Job) -> None:
    queue = desk.queue()
    mine, other = (queue.batch(put(queue, seeds(job, 1))) for _ in range(2))
    assert mine.number_of(mine.job_id(123)) == 123
    for stranger in (other.job_id(1), "", "-", mine.token, f"{mine.token}-", f"{mine.token}-²",
                     f"{mine.token}-{'9' * 30}"):  # fmt: skip
        assert mine.number_of(stranger) is None


# -- against a model -----------------------------------------------------------------------------


class AgainstAModel(RuleBasedStateMachine):
    """Three processes that claim, finish, fail, die and come again, and what must hold always."""

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        self.desk = Desk(Path(self.folder.name) / "a.db")
        self.queues = {pid: self.desk.queue(pid) for pid in (1, 2, 3)}
        job = next(batch.expand(Request(seed=1), FAMILIES["tiny"]))
        made = [replace(job, seed=n, width=64 * (1 + n % 2)) for n in range(11)]
        self.batch = put(self.queues[1], made)
        self.held: dict[int, int] = {}  # job -> pid
        self.model = dict.fromkeys(range(11), "pending")
        self.deaths: Counter[int] = Counter()
        self.ready = True
        self.next_pid = 4

    @rule(pid=st.sampled_from([1, 2, 3]), passes=st.integers(1, 3))
    def claim(self, pid: int, passes: int) -> None:
        claim = self.queues[pid].claim(self.batch, of_four, passes=passes)
        pending = {n for n, state in self.model.items() if state == "pending"}
        if not self.ready or not pending:
            assert claim is None
            return
        taken = numbers(claim)
        assert taken
        assert set(taken) <= pending
        assert taken[0] == min(pending, key=lambda n: (n % 2, n))
        for number in taken:
            self.held[number], self.model[number] = pid, "running"

    @precondition(lambda self: self.held)
    @rule(data=st.data(), end=st.sampled_from(["finish", "fail", "give back", "blame"]))
    def end(self, data: st.DataObject, end: str) -> None:
        number = data.draw(st.sampled_from(sorted(self.held)))
        queue = self.queues[self.held.pop(number)]
        if end == "finish":
            queue.finish(self.batch, [Made(number=number, path=Path(f"/{number}"))])
            self.model[number] = "done"
        elif end == "fail":
            queue.fail(self.batch, number, "black")
            self.model[number] = "failed"
        elif end == "give back":
            queue.give_back(self.batch, [number])
            self.model[number] = "pending"
        else:
            self.deaths[number] += 1
            queue.blame(self.batch, number, "died")
            self.model[number] = "failed" if self.deaths[number] >= DEATHS_MAX else "pending"

    @rule(pid=st.sampled_from([1, 2, 3]))
    def die_and_come_again(self, pid: int) -> None:
        """The new process has another id; what the old one held comes back, and nothing else."""
        for real in [r for r, q in self.pids().items() if q is self.queues[pid]]:
            del self.desk.living[real]
        self.queues[pid] = self.desk.queue(self.next_pid)
        self.next_pid += 1
        alive = self.queues[pid].recover(self.batch)
        for number in [n for n, p in self.held.items() if p == pid]:
            del self.held[number]
            self.model[number] = "pending"
        assert alive == len(self.held)

    def pids(self) -> dict[int, JobQueue]:
        return {queue._here.pid: queue for queue in self.queues.values()}

    @rule()
    def pause(self) -> None:
        self.queues[1].pause(self.batch)
        self.ready = False

    @rule()
    def go_on(self) -> None:
        self.queues[2].ready(self.batch)
        self.ready = True

    @rule()
    def retry(self) -> None:
        again = [n for n, state in self.model.items() if state == "failed"]
        assert self.queues[3].retry(self.batch) == len(again)
        for number in again:
            self.model[number], self.deaths[number] = "pending", 0
        self.ready = True

    @invariant()
    def the_rows_are_as_the_model_says(self) -> None:
        assert states(self.queues[1], self.batch) == list(self.model.values())

    def teardown(self) -> None:
        self.desk.close()
        self.folder.cleanup()


AgainstAModel.TestCase.settings = settings(max_examples=12, stateful_step_count=20, deadline=None)
test_it_does_what_the_model_does = AgainstAModel.TestCase


# -- several processes at once -------------------------------------------------------------------

WORK = """
import sys
from pathlib import Path
from sdamd.jobs import JobQueue, Made
from sdamd.store import Store

queue, batch = JobQueue(Store(Path(sys.argv[1]))), int(sys.argv[2])
claim = queue.claim(batch, lambda job, count: 2)
print("held", flush=True)
input()
while claim:
    for job in claim.jobs:
        print(job.index)
        queue.finish(batch, [Made(number=job.index, path=Path("/a"))])
    claim = queue.claim(batch, lambda job, count: 2)
"""


def test_four_processes_at_once_take_each_job_once(tmp_path: Path, job: Job) -> None:
    path = tmp_path / "a.db"
    with closing(Store(path)) as store:
        queue = JobQueue(store)
        number = put(queue, seeds(job, *range(120)))
        workers = [
            subprocess.Popen(
                [sys.executable, "-c", WORK, str(path), str(number)],
                cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for _ in range(4)
        ]  # fmt: skip
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "held\n"  # all four at once
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("\n")
            worker.stdin.flush()
        taken = [[int(line) for line in w.communicate(timeout=120)[0].split()] for w in workers]
        assert [w.returncode for w in workers] == [0] * 4
        assert sorted(n for of_one in taken for n in of_one) == list(range(120))
        assert all(len(of_one) >= 2 for of_one in taken)
        assert queue.batch(number).counts[State.DONE] == 120


def test_the_queue_costs_at_most_two_milliseconds_a_picture(tmp_path: Path, job: Job) -> None:
    """Of the CPU, with passes of one: how fast a disk syncs is the disk's."""
    with closing(Store(tmp_path / "a.db")) as store:
        queue = JobQueue(store)
        number = put(queue, seeds(job, *range(5000)))
        began = time.process_time()
        for _ in range(100):
            claim = queue.claim(number, one)
            queue.finish(number, [Made(number=numbers(claim)[0], path=Path("/a"))])
        assert (time.process_time() - began) / 100 < 0.002

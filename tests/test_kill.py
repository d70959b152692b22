"""A batch of the embedded model that is killed over fifty times, against one that nobody disturbs.

Every kill is SIGKILL, at a random moment, of the process group of a real `sdamd batch`. Most of
these processes are forked from one that has loaded torch already, and render in the process
itself; starting torch fifty times would take ten minutes here. In the others the command starts
from nothing and its child renders, and the kill is of both, or of one of the two.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sdamd import gallery
from sdamd.jobs import JobQueue, State
from sdamd.store import Store

ROOT = Path(__file__).parents[1]
PICTURES = 200
KILLS = 50
WITH_CHILD = 3
MODEL = ["--device", "cpu", "--batch-size", "2"]
FIELDS = [
    "--steps", "1", "--guidance-scale", "1", "--width", "64", "--height", "64", "--upscale", "1",
    "--seed", "7",
]  # fmt: skip

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no fork and no process groups")


class Machine:
    """Starts sdamd over one data folder, in the two ways."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.outputs = home / "outputs"
        self.said = home.with_name(f"{home.name}.txt")
        self._zygote: subprocess.Popen[str] | None = None

    def fork(self, *arguments: str) -> int:
        """Start the command in one process; its id."""
        if self._zygote is None:
            self._zygote = subprocess.Popen(
                [sys.executable, "-m", "tests.zygote"], cwd=ROOT, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        assert self._zygote.stdin is not None
        command = [*arguments, "--in-process"]
        line = json.dumps({"arguments": command, "out": str(self.said)})
        self._zygote.stdin.write(f"{line}\n")
        self._zygote.stdin.flush()
        return int(self.answer())

    def answer(self) -> str:
        """What the zygote says next: an id, or how the process ended."""
        assert self._zygote is not None
        assert self._zygote.stdout is not None
        return self._zygote.stdout.readline()

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        """Start the command from nothing; it has a child."""
        with self.said.open("a") as said:
            return subprocess.Popen(
                [sys.executable, "-m", "sdamd", *arguments], cwd=ROOT, text=True,
                stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    def close(self) -> None:
        if self._zygote is not None:
            assert self._zygote.stdin is not None
            assert self._zygote.stdout is not None
            self._zygote.stdin.close()
            self._zygote.wait()
            self._zygote.stdout.close()

    def made(self) -> int:
        """How many pictures are there."""
        with suppress(FileNotFoundError):
            return sum(entry.name.endswith(".png") for entry in os.scandir(self.outputs))
        return 0

    def wait_for(self, count: int, alive: int) -> None:
        """Wait until so many pictures are there, or the process is gone."""
        end = time.monotonic() + 300
        while self.made() < count and time.monotonic() < end:
            with suppress(OSError):
                if Path(f"/proc/{alive}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    time.sleep(0.002)
                    continue
            return

    def files(self) -> list[str]:
        return sorted(p.name for p in self.outputs.iterdir() if p.name != ".sdamd-number")

    def command(self, word: str, *more: str) -> list[str]:
        return ["batch", word, *more, "--home", str(self.home), *MODEL]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    made = Machine(tmp_path / "killed"), Machine(tmp_path / "undisturbed")
    yield made
    for machine in made:
        machine.close()


def descendants(pid: int) -> list[int]:
    """The children of a process, from /proc."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def kill_forked(machine: Machine, command: Sequence[str], chance: random.Random) -> bool:
    """Kill one after some pictures, at a moment that nobody chose; whether it was still there."""
    before = machine.made()
    pid = machine.fork(*command)
    if chance.random() < 0.15:
        time.sleep(chance.uniform(0, 0.5))  # it may not have got anywhere
    else:
        machine.wait_for(before + chance.randint(1, 3), pid)
        time.sleep(chance.uniform(0, 0.05))
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return os.WIFSIGNALED(int(machine.answer()))


def kill_with_child(machine: Machine, command: Sequence[str], which: str) -> bool:
    """Kill the command and its child, or one of them."""
    before = machine.made()
    with machine.start(*command) as process:
        machine.wait_for(before + 3, process.pid)
        children = descendants(process.pid)
        if which == "both":
            os.killpg(process.pid, signal.SIGKILL)
        elif which == "parent":
            process.kill()
        else:
            for child in children:
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            machine.wait_for(before + 6, process.pid)  # it goes on by itself
            process.kill()
        process.wait()
    end = time.monotonic() + 60
    while any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < end:
        time.sleep(0.01)  # a child ends when its parent has
    return process.returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.timeout(1800)  # two minutes where nothing else runs
@pytest.mark.report("E21")
def test_a_batch_that_is_killed_fifty_times_is_the_same_as_one_that_is_not(
    tmp_path: Path, machines: tuple[Machine, Machine]
) -> None:
    rows = tmp_path / "rows.txt"
    rows.write_text("".join(f"a red house, number {n}\n" for n in range(PICTURES)))
    machine, undisturbed = machines
    run = [*machine.command("run", str(rows)), *FIELDS]
    resume = machine.command("resume")
    chance = random.Random(20)

    kills = 0
    command = run
    for which in ("both", "parent", "child")[:WITH_CHILD]:
        kills += kill_with_child(machine, command, which)
        command = resume
    attempts = 0
    while kills < KILLS and machine.made() < PICTURES and attempts < 3 * KILLS:
        attempts += 1
        kills += kill_forked(machine, command, chance)
    assert kills >= KILLS, machine.said.read_text()[-2000:]
    machine.fork(*command)
    assert machine.answer() == "0\n", machine.said.read_text()[-2000:]

    undisturbed.fork(*undisturbed.command("run", str(rows)), *FIELDS)
    assert undisturbed.answer() == "0\n", undisturbed.said.read_text()[-2000:]

    assert machine.files() == undisturbed.files()
    assert len(machine.files()) == PICTURES
    for name in machine.files():
        one, other = machine.outputs / name, undisturbed.outputs / name
        assert np.array_equal(np.asarray(Image.open(one)), np.asarray(Image.open(other))), name
        assert gallery.read_record(one).job == gallery.read_record(other).job
    with closing(Store(machine.home / "sdamd.db")) as store:
        (batch,) = JobQueue(store).batches()
        assert batch.counts[State.DONE] == PICTURES
        ids = sorted(job_id for _, job_id in gallery.job_ids(machine.outputs))
        assert ids == sorted(batch.job_id(n) for n in range(PICTURES))
        paths = {row.path for row in JobQueue(store).rows(batch.id)}
        assert paths == {machine.outputs / name for name in machine.files()}
        assert max(row.attempts for row in JobQueue(store).rows(batch.id)) > 1

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from sdamd.lease import BEAT_SECONDS, Process, lives, started, was_cut_off

HERE = Process(pid=1, started="100", boot="b", space="pid:[1]", host="h")
NOW = 1e9


def test_this_process_is_alive_and_was_always_the_same() -> None:
    here = Process.this()
    assert here == Process.this()
    assert here.pid == os.getpid()
    assert lives(here, 0, NOW, here, started)


def test_a_process_that_has_ended_is_gone_also_before_anybody_waits_for_it() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        here = Process.this()
        worker = replace(here, pid=child.pid, started=started(child.pid))
        assert lives(worker, 0, NOW, here, started)
        child.kill()
        end = time.monotonic() + 20
        while lives(worker, 0, NOW, here, started) and time.monotonic() < end:
            time.sleep(0.01)
        assert not lives(worker, 0, NOW, here, started)  # a zombie until the with ends


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGSTOP")
def test_a_process_that_was_stopped_is_alive() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        worker = replace(Process.this(), pid=child.pid, started=started(child.pid))
        os.kill(child.pid, signal.SIGSTOP)
        assert lives(worker, 0, NOW, Process.this(), started)
        child.kill()


def test_a_thread_or_a_child_shares_boot_and_space() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        there = pool.apply(Process.this)
    here = Process.this()
    assert replace(there, pid=here.pid, started=here.started) == here
    assert there.pid != here.pid


@pytest.mark.parametrize(
    ("worker", "beat", "started_now", "alive"),
    [
        (HERE, 0, "100", True),
        (HERE, NOW, "101", False),  # the id came again, for another process
        (HERE, NOW, "", False),  # no such process
        (replace(HERE, started=""), NOW, "", False),
        (replace(HERE, boot="a"), NOW, "100", False),  # the machine was started anew
        (replace(HERE, space="pid:[2]"), NOW - 5, "", True),  # another container
        (replace(HERE, space="pid:[2]"), NOW - BEAT_SECONDS - 1, "100", False),
        (replace(HERE, space="pid:[2]"), NOW + BEAT_SECONDS + 1, "100", False),  # a clock set back
        (replace(HERE, host="g", boot="a"), NOW - 5, "", True),  # another machine
        (replace(HERE, host="g", boot="a"), NOW - BEAT_SECONDS - 1, "", False),
    ],
)
def test_who_lives(worker: Process, beat: float, started_now: str, alive: bool) -> None:
    assert lives(worker, beat, NOW, HERE, lambda _: started_now) is alive


def test_only_a_new_boot_of_this_machine_cuts_off() -> None:
    assert was_cut_off(replace(HERE, boot="a"), HERE)
    assert not was_cut_off(HERE, HERE)
    assert not was_cut_off(replace(HERE, boot="a", host="g"), HERE)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_name_with_brackets_and_blanks_does_not_shift_the_fields(tmp_path: Path) -> None:
    folder = tmp_path / "proc" / "42"
    folder.mkdir(parents=True)
    fields = " ".join(str(number) for number in range(4, 53))
    (folder / "stat").write_text(f"42 (a) b (c) S {fields}\n")
    assert started(42, tmp_path) == "22"  # field 22 of proc_pid_stat(5)
    (folder / "stat").write_text(f"42 (a) b (c) Z {fields}\n")
    assert started(42, tmp_path) == ""
    assert started(43, tmp_path) == ""

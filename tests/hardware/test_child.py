import os
import sys

import pytest

from sdamd.hardware.child import Ended, run, run_module


@pytest.mark.parametrize(
    ("status", "crashed", "how"),
    [
        (0, False, "ended with status 0"),
        (-6, True, "was ended by SIGABRT (exit -6)"),
        (-250, True, "was ended by signal 250 (exit -250)"),
        (0xC0000005, True, "was ended by an access violation (0xC0000005)"),
        (None, False, "did not answer in 7 s"),
    ],
)
def test_how_a_child_ended_is_said(status: int | None, crashed: bool, how: str) -> None:
    ended = Ended(status=status, seconds=7)
    assert (ended.crashed, ended.how) == (crashed, how)


def test_a_program_that_is_not_there_has_ended() -> None:
    ended = run(["/nowhere/program"], environ={}, seconds=5)
    assert ended.status == 127
    assert "/nowhere/program" in ended.how


def test_a_module_is_found_as_this_process_finds_it() -> None:
    environ = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    ended = run_module("sdamd", "--version", environ=environ, seconds=120)
    assert (ended.status, ended.out.partition(" ")[0]) == (0, "sdamd")
    assert ended.seconds > 0


def test_what_a_slow_child_said_is_kept() -> None:
    code = "import time; print('hello', flush=True); time.sleep(60)"
    ended = run([sys.executable, "-c", code], environ=os.environ, seconds=2)
    assert (ended.status, ended.out) == (None, "hello\n")

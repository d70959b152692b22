from dataclasses import replace

import pytest

from sdamd.render import Rendered, Started, Step
from sdamd.request import Job
from sdamd.watchdog import Patience, Watchdog
from tests.fakes import A_PLAN, Clock, seeds

PATIENCE = Patience(first=1800, factor=20, least=120, silent=600)


class Watched:
    """A watchdog, and a render whose pace the test decides."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.dog = Watchdog(PATIENCE, self.clock)

    def wait(self, seconds: float) -> str:
        self.clock.now += seconds
        self.dog.hear()  # it says that it lives
        return self.dog.hung()

    def one(self, job: Job, load: float, step: float, decode: float) -> None:
        self.dog.begin()
        self.dog.see(Started(job=job, plan=A_PLAN))
        self.clock.now += load
        for number in range(1, job.steps + 1):
            self.clock.now += step
            self.dog.see(Step(jobs=(job,), step=number, steps=job.steps))
        self.clock.now += decode
        self.dog.see(Rendered(job=job, png=b"", record=None))  # type: ignore[arg-type]  # not read


@pytest.mark.report("D01")
def test_a_first_run_may_compile_for_half_an_hour(job: Job) -> None:
    """ROCm/TheRock#3266 and others: it looked hung, and was killed."""
    watched = Watched()
    watched.dog.see(Started(job=job, plan=A_PLAN))
    assert watched.wait(1799) == ""
    assert watched.wait(2) == "no progress for 30 min 01 s; 30 min 00 s are allowed here"


def test_what_was_measured_is_the_limit_times_twenty_and_not_under_two_minutes(job: Job) -> None:
    watched = Watched()
    watched.one(job, load=5, step=10, decode=1)
    watched.dog.begin()
    watched.dog.see(Started(job=job, plan=A_PLAN))
    watched.clock.now += 15
    watched.dog.see(Step(jobs=(job,), step=1, steps=job.steps))
    assert watched.wait(199) == ""
    assert watched.wait(2) == "no progress for 3 min 21 s; 3 min 20 s are allowed here"
    quick = Watched()
    quick.one(job, load=0.1, step=0.1, decode=0.1)
    quick.dog.begin()
    quick.dog.see(Started(job=job, plan=A_PLAN))
    assert quick.wait(119) == ""
    assert "2 min 00 s are allowed" in quick.wait(2)


@pytest.mark.report("D04")
def test_a_new_size_has_the_patience_of_a_first_run_again(job: Job) -> None:
    watched = Watched()
    watched.one(job, load=1, step=1, decode=1)
    (larger,) = seeds(replace(job, width=832, height=1216), 1)
    watched.dog.begin()
    watched.dog.see(Started(job=larger, plan=A_PLAN))
    assert watched.wait(1700) == ""


def test_a_process_that_does_not_even_say_that_it_lives_is_given_ten_minutes(job: Job) -> None:
    watched = Watched()
    watched.dog.see(Started(job=job, plan=A_PLAN))
    watched.clock.now += 599
    assert watched.dog.hung() == ""
    watched.clock.now += 2
    assert watched.dog.hung() == "no sign of life for 10 min 01 s"

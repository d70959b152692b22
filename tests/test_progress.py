import io
import os
from collections.abc import Iterator

import pytest

from sdamd.progress import Progress, duration
from tests.fakes import Clock, Terminal


@pytest.fixture(autouse=True)
def _columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


def lines(terminal: Terminal) -> list[str]:
    """What is drawn, one entry a drawing, without what moves the cursor."""
    drawn = terminal.getvalue()
    assert drawn.startswith("\r")
    return [line.rstrip() for line in drawn[1:].split("\r")]


def test_a_line_has_bar_share_rate_and_remaining_time() -> None:
    terminal, clock = Terminal(), Clock()
    progress = Progress(20, terminal, clock)
    progress.update(0, "picture 1 of 2")
    clock.now += 2.0
    progress.update(5, "picture 1 of 2")
    assert lines(terminal) == [
        "░░░░░░░░░░░░░░░░░░░░   0% picture 1 of 2",
        "█████░░░░░░░░░░░░░░░  25% picture 1 of 2 · 2.50 steps/s · 6 s left",
    ]


def test_each_drawing_takes_the_place_of_the_one_before() -> None:
    terminal, clock = Terminal(), Clock()
    progress = Progress(10, terminal, clock)
    progress.update(1, "a long text")
    clock.now += 1.0
    progress.update(2, "x")
    _, first, second = terminal.getvalue().split("\r")
    assert first.startswith("█")
    assert second.startswith("█")
    assert len(second) >= len(first)


def test_what_is_drawn_are_letters_and_no_codes_for_a_terminal() -> None:
    """The console of Windows prints escape codes unless somebody has switched them on."""
    terminal = Terminal()
    progress = Progress(10, terminal, Clock())
    progress.update(1, "x")
    progress.clear()
    assert not {"\x1b", "\n"} & set(terminal.getvalue())


def test_blanks_do_not_wrap_in_a_window_that_became_narrower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal, clock = Terminal(), Clock()
    progress = Progress(10, terminal, clock)
    progress.update(1, "a long text that fills the window of a hundred columns")
    monkeypatch.setenv("COLUMNS", "40")
    clock.now += 1.0
    progress.update(2, "x")
    assert len(terminal.getvalue().split("\r")[2]) <= 39


def test_a_slow_rate_is_in_seconds_per_step() -> None:
    terminal, clock = Terminal(), Clock()
    progress = Progress(10, terminal, clock)
    progress.update(1, "x")
    clock.now += 8.0
    progress.update(3, "x")
    assert lines(terminal)[-1].endswith("x · 4.00 s/step · 28 s left")


def test_loading_before_the_first_step_does_not_count() -> None:
    terminal, clock = Terminal(), Clock()
    progress = Progress(10, terminal, clock)
    clock.now += 500.0
    progress.update(1, "x")
    clock.now += 1.0
    progress.update(2, "x")
    assert lines(terminal)[-1].endswith("1.00 steps/s · 8 s left")


def test_it_is_drawn_ten_times_a_second_at_most_and_always_at_the_end() -> None:
    terminal, clock = Terminal(), Clock()
    progress = Progress(1000, terminal, clock)
    for step in range(1, 1001):
        clock.now += 0.001
        progress.update(step, "x")
    drawn = lines(terminal)
    assert 10 <= len(drawn) <= 12
    assert " 100% x" in drawn[-1]


def test_nothing_is_written_where_nobody_looks() -> None:
    stream = io.StringIO()
    progress = Progress(10, stream, Clock())
    progress.update(5, "x")
    progress.clear()
    assert stream.getvalue() == ""


def test_clearing_leaves_an_empty_line_once() -> None:
    terminal = Terminal()
    progress = Progress(10, terminal, Clock())
    progress.clear()
    assert terminal.getvalue() == ""
    progress.update(1, "x")
    drawn = terminal.getvalue()
    progress.clear()
    progress.clear()
    assert terminal.getvalue() == f"{drawn}\r{' ' * len(drawn[1:])}\r"


def test_after_clearing_it_is_drawn_again_at_once() -> None:
    terminal, clock = Terminal(), Clock()
    progress = Progress(10, terminal, clock)
    progress.update(1, "a")
    progress.clear()
    progress.update(2, "b")
    assert "b" in lines(terminal)[-1]


def test_a_narrow_terminal_is_never_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    terminal = Terminal()
    Progress(10, terminal, Clock()).update(1, "a long text about the picture")
    assert len(lines(terminal)[0]) == 29


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "nonsense"])
def test_a_terminal_that_cannot_write_blocks_gets_letters(encoding: str) -> None:
    terminal, clock = Terminal(encoding), Clock()
    progress = Progress(2, terminal, clock)
    progress.update(0, "x")
    clock.now += 1.0
    progress.update(1, "x")
    assert lines(terminal)[-1] == "##########..........  50% x - 1.00 steps/s - 1 s left"


def test_more_steps_than_announced_do_no_harm() -> None:
    terminal, clock = Terminal(), Clock()
    progress = Progress(0, terminal, clock)
    progress.update(1, "x")
    clock.now += 1.0
    progress.update(3, "x")
    assert lines(terminal)[-1] == "█" * 20 + " 100% x · 2.00 steps/s · 0 s left"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0 s"),
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3599.6, "1 h 00 min"),
        (7800, "2 h 10 min"),
        (360_000, "100 h 00 min"),
    ],
)
def test_a_duration_is_told_in_two_units(seconds: float, said: str) -> None:
    assert duration(seconds) == said


@pytest.fixture
def pty() -> Iterator[tuple[int, int]]:
    ends = os.openpty()
    yield ends
    for end in ends:
        os.close(end)


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="Windows has no pseudo terminals")
def test_a_real_terminal_is_drawn_on(pty: tuple[int, int]) -> None:
    ours, theirs = pty
    with open(theirs, "w", encoding="utf-8", closefd=False) as stream:
        Progress(2, stream, Clock()).update(1, "x")
    assert os.read(ours, 1000).decode().startswith("\r██████████░")

"""`sdamd batch` as a person meets it; the engine alone is a fake."""

import json
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import TypeAlias

import pytest

from sdamd import cli, gallery, studio
from sdamd.commands.batch_run import limits_of
from sdamd.errors import BadRequest
from tests.fake_sdamd import open_fake

ROOT = Path(__file__).parents[2]
Sdamd: TypeAlias = Callable[..., tuple[int, list[str], list[str]]]


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith(("SDAMD_", "FAKE_"))]:
        monkeypatch.delenv(name)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def sdamd(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Sdamd:
    """Run a word of `batch` in this process: exit status, lines of stdout, lines of stderr."""
    monkeypatch.setattr(studio, "open_backend", open_fake)

    def run(word: str, *arguments: str) -> tuple[int, list[str], list[str]]:
        more = ["--device", "cpu", "--in-process"] if word in {"run", "resume", "retry"} else []
        status = cli.main(["batch", word, *arguments, "--home", str(home), *more])
        captured = capsys.readouterr()
        return status, captured.out.splitlines(), captured.err.splitlines()

    return run


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    path.write_text("prompt,seed\n" + "".join(f"a house,{n}\n" for n in range(1, 6)))
    return path


def start(home: Path, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    """A real process with a real child."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.fake_sdamd", "batch", *arguments, "--home", str(home),
         "--device", "cpu", "--batch-size", "1"],
        cwd=ROOT, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
    )  # fmt: skip


# -- a batch from its file to its pictures -------------------------------------------------------


def test_the_paths_are_printed_and_the_batch_is_listed_and_shown(
    sdamd: Sdamd, rows: Path, home: Path
) -> None:
    status, out, err = sdamd("run", str(rows))
    assert status == 0
    assert [Path(line).name for line in out] == [f"{n:05d}-{n}-a house.png" for n in range(1, 6)]
    assert all(Path(line).parent == home / "outputs" for line in out)
    assert err[0] == "sdamd: batch 1: 5 of 5 pictures to make"
    assert err[-1] == "sdamd: batch 1: 5 of 5 pictures are done"

    status, (line,), _ = sdamd("show", "1", "--json")
    shown = json.loads(line)
    assert {key: shown[key] for key in ("id", "total", "done", "failed", "pending", "running")} == {
        "id": 1, "total": 5, "done": 5, "failed": 0, "pending": 0, "running": 0,
    }  # fmt: skip
    assert [job["path"] for job in shown["jobs"]] == out
    assert shown["jobs"][0] == {
        "index": 0, "state": "done", "attempts": 1, "seed": "1", "path": out[0], "error": None,
        "joules": None,
    }  # fmt: skip
    (line,) = sdamd("list", "--json")[1]
    assert json.loads(line)["name"] == str(rows)
    assert sdamd("list")[1][0].startswith(f"1  5 of 5 done  {rows}  20")


def test_as_json_there_is_a_line_for_each_event(sdamd: Sdamd, rows: Path) -> None:
    _, out, _ = sdamd("run", str(rows), "--json", "--steps", "2")
    events = [json.loads(line) for line in out]
    assert {event["event"] for event in events} == {"started", "step", "saved"}
    saved = [event for event in events if event["event"] == "saved"]
    assert [(event["index"], event["seed"]) for event in saved] == [
        (n, str(n + 1)) for n in range(5)
    ]
    assert {event["batch"] for event in events} == {1}


def test_what_failed_is_told_in_a_table_and_made_again_by_retry(
    sdamd: Sdamd, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FAULTS", '{"3": "BAD_IMAGE"}')
    status, out, err = sdamd("run", str(rows), "--batch-size", "1")
    assert (status, len(out)) == (1, 4)
    table = [line.split(None, 4) for line in err[-3:-1]]
    assert table == [
        ["sdamd:", "picture", "seed", "tries", "why"],
        ["sdamd:", "3", "3", "1", "the picture is black throughout"],
    ]
    assert any("the picture is black throughout" in line for line in sdamd("show", "1")[1])
    assert sdamd("resume")[0] == 0  # there is nothing to do
    monkeypatch.setenv("FAKE_FAULTS", "{}")
    status, (path,), _ = sdamd("retry", "1")
    assert (status, Path(path).name) == (0, "00003-3-a house.png")


def test_varied_fields_make_a_contact_sheet(sdamd: Sdamd, rows: Path, home: Path) -> None:
    rows.write_text("prompt,seed\na house,1\n")
    status, out, _ = sdamd("run", str(rows), "--vary", "steps=1,2", "--vary", "guidance_scale=2,3")
    assert status == 0
    assert len(out) == 5
    assert Path(out[-1]).name.startswith("contact-sheet-1")
    assert Path(out[-1]).is_file()


# -- wrong rows ----------------------------------------------------------------------------------


@pytest.mark.report("E26")
def test_a_wrong_row_is_told_with_its_line_and_the_others_are_made(
    sdamd: Sdamd, rows: Path
) -> None:
    rows.write_text('prompt,steps,scheduler\nit\'s a dog,2,\nb,999,\n"c",1,Eular\nd,1,\n')
    status, out, err = sdamd("run", str(rows))
    assert (status, len(out)) == (1, 2)
    told = [line for line in err if "line" in line]
    assert "steps is 999; allowed 1 to 150" in told[0]
    assert "scheduler 'Eular' is not known; the nearest: Euler" in told[1]
    assert "line 3" in told[0]
    assert "line 4" in told[1]


@pytest.mark.parametrize(
    ("content", "more", "said"),
    [
        ("prompt,steps\na,2\nb,999\n", ["--strict"], "steps is 999"),
        ("prompt,steps\nb,999\n", [], "asks for no picture"),
        ("prompt,checkpoint\nb,nothing\n", ["--strict"], "checkpoint 'nothing' is not known"),
        ("", [], "rows.csv"),
        ("prmpt\na\n", [], "prmpt"),
        ("prompt\na\n", ["--max-temp", "9"], "max-temp is '9'; allowed 30 to 120"),
        ("prompt\na\n", ["--vary", "stps=1"], "the nearest: steps"),
        ("prompt\na\n", ["--devices", "gpu77"], "device"),
    ],
)
def test_a_refused_batch_leaves_nothing_in_the_queue(
    sdamd: Sdamd, rows: Path, content: str, more: list[str], said: str
) -> None:
    rows.write_text(content)
    status, out, err = sdamd("run", str(rows), *more)
    assert (status, out) == (2, [])
    assert said in "\n".join(err)
    assert sdamd("list")[1] == []


def test_a_limit_that_cannot_be_kept_here_is_refused(sdamd: Sdamd, rows: Path) -> None:
    status, _, err = sdamd("run", str(rows), "--max-temp", "90")
    assert status == 3
    assert "max_temp is 90, but the CPU does not tell how hot it is" in err[-1]
    assert sdamd("list")[1] == []


def test_a_dry_run_says_what_it_would_be_and_writes_nothing(
    sdamd: Sdamd, rows: Path, home: Path
) -> None:
    status, (line,), _ = sdamd("run", str(rows), "--dry-run", "--json", "--width", "128")
    shown = json.loads(line)
    assert status == 0
    assert (shown["total"], shown["kinds"][0]["count"], shown["kinds"][0]["width"]) == (5, 5, 128)
    assert shown["bytes_max"] > 0
    assert not home.exists() or not any(home.iterdir())
    assert sdamd("run", str(rows), "--dry-run")[1][-1].startswith("5 pictures; time: ")


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["show", "7"], 2, "batch 7 is not known; there are 1"),
        (["cancel", "7"], 2, "batch 7 is not known; there are 1"),
        (["pause", "7"], 2, "batch 7 is not known; there are 1"),
        (["resume", "7"], 2, "batch 7 is not known; there are 1"),
        (["retry", "7"], 2, "batch 7 is not known; there are 1"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_batch_that_is_not_there_is_told(
    sdamd: Sdamd, rows: Path, arguments: list[str], status: int, said: str
) -> None:
    sdamd("run", str(rows))
    got, out, err = sdamd(*arguments)
    assert (got, out, err[-1]) == (status, [], f"sdamd: {said}")


@pytest.mark.parametrize("spoil", ["garbage", "newer"])
def test_a_database_that_cannot_be_used_is_told_and_stays_with_the_pictures(
    sdamd: Sdamd, rows: Path, home: Path, spoil: str
) -> None:
    _, out, _ = sdamd("run", str(rows))
    database = home / "sdamd.db"
    if spoil == "garbage":
        database.write_bytes(b"garbage" * 5000)
    else:
        with closing(sqlite3.connect(database)) as connection:
            connection.execute("PRAGMA user_version = 99")
    before = database.read_bytes()
    for word in (["list"], ["show", "1"], ["resume"], ["run", str(rows)]):
        status, printed, err = sdamd(*word)
        assert (status, printed, len(err)) == (4, [], 1)
        assert str(database) in err[0]
    assert database.read_bytes() == before
    assert all(Path(path).is_file() for path in out)


# -- when to stop --------------------------------------------------------------------------------


NOW = datetime(2026, 3, 1, 22, 30).astimezone()


@pytest.mark.parametrize(
    ("hours", "at", "end", "text"),
    [
        (None, None, None, ""),
        ("1.5", None, datetime(2026, 3, 2, 0, 0), "1.5 hours are over"),
        (None, "07:00", datetime(2026, 3, 2, 7, 0), "it is 07:00"),
        (None, "23:15", datetime(2026, 3, 1, 23, 15), "it is 23:15"),
        (None, "22:30", datetime(2026, 3, 2, 22, 30), "it is 22:30"),
        ("1", "7:00", datetime(2026, 3, 1, 23, 30), "1 hours are over"),
    ],
)
def test_the_earlier_end_counts(
    hours: str | None, at: str | None, end: datetime | None, text: str
) -> None:
    asked = Namespace(max_hours=hours, stop_at=at, max_temp="95")
    limits = limits_of(asked, now=NOW.timestamp)
    assert limits.until == (None if end is None else end.timestamp())
    assert (limits.until_text, limits.celsius) == (text, 95.0)


def test_all_that_is_wrong_with_the_limits_is_told_at_once() -> None:
    asked = Namespace(max_hours="nan", stop_at="25:00", max_temp="hot")
    with pytest.raises(BadRequest) as raised:
        limits_of(asked)
    assert raised.value.problems == (
        "max-hours is 'nan'; allowed 0.01 to 8760",
        "max-temp is 'hot'; allowed 30 to 120",
        "stop-at is '25:00'; allowed 00:00 to 23:59",
    )


# -- real processes ------------------------------------------------------------------------------


def lines_of(process: "subprocess.Popen[str]", count: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().rstrip("\n") for _ in range(count)]


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals")
@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGINT] * 2, [signal.SIGTERM]])
def test_an_interrupted_batch_stops_and_resume_makes_exactly_the_rest(
    sdamd: Sdamd, rows: Path, home: Path, signals: list[signal.Signals]
) -> None:
    # Once: while the second picture is made. Twice: in the middle of a step that takes long.
    seconds, more = ("0.5", []) if len(signals) == 1 else ("60", ["--json"])
    with start(home, "run", str(rows), "--steps", "5", *more, FAKE_SECONDS=seconds) as process:
        lines_of(process, 1)
        for number in signals:
            process.send_signal(number)
            time.sleep(0.3)
        began = time.monotonic()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert time.monotonic() - began < 20
    assert "`sdamd batch resume 1` goes on" in err
    status, made, _ = sdamd("resume")
    assert status == 0
    assert sorted(p.name for p in (home / "outputs").glob("*.png")) == [
        f"{n:05d}-{n}-a house.png" for n in range(1, 6)
    ]
    assert len(made) == 5 if seconds == "60" else 1 <= len(made) < 5


def test_two_processes_and_two_devices_share_a_batch(sdamd: Sdamd, rows: Path, home: Path) -> None:
    rows.write_text("prompt,seed\n" + "".join(f"a house,{n}\n" for n in range(1, 25)))
    with start(home, "run", str(rows), "--devices", "cpu,cpu", FAKE_SECONDS="0.3") as first:
        made = lines_of(first, 1)
        with start(home, "resume", FAKE_SECONDS="0.3") as second:
            made += second.communicate(timeout=120)[0].splitlines()
        made += first.communicate(timeout=120)[0].splitlines()
    assert (first.returncode, second.returncode) == (0, 0)
    assert len(made) == len(set(made)) == 24
    assert len(list((home / "outputs").glob("*.png"))) == 24
    ids = [job_id for _, job_id in gallery.job_ids(home / "outputs")]
    assert len(set(ids)) == 24


FULL = """
mount -t tmpfs -o size=20m none "$1/outputs" && exec "$2" -c '
import subprocess, sys
home, rows = sys.argv[1:]
def run(*words):
    command = [sys.executable, "-m", "tests.fake_sdamd", "batch", *words, "--home", home,
               "--device", "cpu", "--batch-size", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.returncode, len(done.stdout.splitlines()), done.stderr.splitlines()[-1], sep="|")
run("run", rows)
from pathlib import Path
ballast = Path(home, "outputs", "ballast")
found = Path(home, "outputs")
print(sorted(p.name for p in found.glob("*.png")), list(found.glob("*.tmp")))
run("show", "1")
ballast.unlink()
import os
del os.environ["FAKE_FULL"]
run("resume")
' "$1" "$3"
"""


@pytest.mark.report("E23")
@pytest.mark.skipif(sys.platform != "linux", reason="needs a tmpfs")
def test_a_disk_that_fills_up_stops_the_batch_and_keeps_the_queue(home: Path, rows: Path) -> None:
    """On a real tmpfs, which something else fills while the third picture is rendered."""
    (home / "outputs").mkdir(parents=True)
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", FULL, "sh", str(home),
         sys.executable, str(rows)],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "FAKE_FULL": str(home / "outputs" / "ballast")},
    )  # fmt: skip
    if "unshare:" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mounts here: {done.stderr.strip()}")
    first, files, _, last = done.stdout.splitlines()
    status, printed, said = first.split("|")
    assert (status, printed) == ("4", "2")
    assert "the disk is full" in said or "MiB free" in said
    assert files == "['00001-1-a house.png', '00002-2-a house.png'] []"
    assert last == "0|3|sdamd: batch 1: 5 of 5 pictures are done"

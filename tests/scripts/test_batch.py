import subprocess
import sys
from pathlib import Path

import pytest

from scripts.batch import WORDS, arguments
from sdamd import cli

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        (["rows.csv"], ["batch", "run", "rows.csv"]),
        (["-", "--steps", "3"], ["batch", "run", "-", "--steps", "3"]),
        (["resume"], ["batch", "resume"]),
        (["retry", "3"], ["batch", "retry", "3"]),
        (["--device", "cpu", "rows.csv"], ["--device", "cpu", "batch", "run", "rows.csv"]),
        (["--device=cpu", "resume"], ["--device=cpu", "batch", "resume"]),
        (["--dry-run", "rows.csv", "--dry-run"], ["--dry-run", "batch", "run", "rows.csv",
                                                  "--dry-run"]),
        ([], ["batch", "--help"]),
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_is_given_goes_to_batch_run(given: list[str], passed: list[str]) -> None:
    assert arguments(given) == passed


def test_the_words_are_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["batch", "--help"])
    out = capsys.readouterr().out
    assert all(f"\n    {word} " in out for word in WORDS)


def test_bare_python_says_what_it_would_set_up_and_start() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(ROOT / "scripts/batch.py"), "--dry-run", "--root",
         str(ROOT / "tests/data/machines/rx7900xtx"), "rows.csv", "--stop-at", "07:00"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].endswith("sdamd batch run rows.csv --stop-at 07:00")

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sdamd.errors import StorageError
from sdamd.hardware.last_words import LastWords

ROOT = Path(__file__).parents[2]
CHILD = """
import os, sys
from pathlib import Path
from sdamd.hardware.last_words import LastWords
LastWords.speak_to(Path(sys.argv[1]))
print("to stdout", flush=True)
os.write(2, b"from a driver\\n\\n  ^^^^ \\nMemory access fault by GPU node-1\\n")
os.write(2, b"Reason: \\xff Page not present\\n")
os.abort()
"""


def test_what_a_child_says_is_passed_on_and_its_end_is_kept(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """C18: why a driver ended the process was lost with it."""
    words = LastWords()
    subprocess.run([sys.executable, "-c", CHILD, str(words.path)], cwd=ROOT, check=False)
    words.pass_on()
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("to stdout\nfrom a driver\n")
    assert words.last == (
        "from a driver | Memory access fault by GPU node-1 | Reason: \ufffd Page not present"
    )
    assert not words.path.exists()  # the child took the name away
    words.close()
    assert capfd.readouterr().err == ""  # nothing twice


def test_a_talkative_child_fills_no_disk(capfd: pytest.CaptureFixture[str]) -> None:
    words = LastWords()
    with words.path.open("ab", buffering=0) as child:
        for number in range(5):
            child.write(b"x" * 700_000 + b"\n%d\n" % number)
            words.pass_on()
        assert words.path.stat().st_size < 2**21
    assert len(capfd.readouterr().err) == 5 * 700_003
    assert words.last.endswith("| 4")
    words.close()
    assert not words.path.exists()


@pytest.mark.report("E23")
def test_where_no_temporary_file_can_be_made_that_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(StorageError, match="no temporary file can be made: No such file"):
        LastWords()

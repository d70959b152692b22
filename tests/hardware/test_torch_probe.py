import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdamd.hardware.child import Ended
from sdamd.hardware.torch_probe import ask_torch, read_probe, read_selftest, run_selftest

ANSWER = (
    '{"version": "2.9.1+rocm6.4", "hip": "6.4", "cuda": null, "device_count": 1, '
    '"archs": ["gfx1100"], "devices": [{"name": "Radeon", "gfx": "gfx90a:xnack-", '
    '"memory_bytes": 5}]}'
)


def fake_torch(folder: Path, body: str) -> dict[str, str]:
    """A torch that does this when it is imported; the variables under which a child finds it."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch/__init__.py").write_text(body, encoding="utf-8")
    return {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}


AMD = """
import os
__version__ = "2.9.1+rocm6.4"
class version:
    hip = "6.4"
    cuda = None
class cuda:
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    get_arch_list = staticmethod(lambda: ["gfx1030"])
    @staticmethod
    def get_device_properties(index):
        class properties:
            name = "AMD Radeon RX 6700 XT"
            gcnArchName = "gfx1031:sramecc-"
            total_memory = 2 ** 33
        return properties
"""


def test_torch_is_asked_in_a_child(tmp_path: Path) -> None:
    found = ask_torch(fake_torch(tmp_path, AMD), seconds=60)
    assert found.answered, found.ended
    assert (found.hip, found.device_count, found.archs) == ("6.4", 1, frozenset({"gfx1030"}))
    (device,) = found.devices
    assert (device.name, device.gfx, device.memory_bytes) == (
        "AMD Radeon RX 6700 XT", "gfx1031", 2**33,
    )  # fmt: skip


@pytest.mark.report("A32")
@pytest.mark.skipif(sys.platform == "win32", reason="ends by a signal")
def test_a_torch_that_aborts_ends_the_child_alone(tmp_path: Path) -> None:
    """A32, A09: is_available() itself died, before any except could run."""
    dies = AMD.replace("lambda: True", "lambda: os.abort()")
    found = ask_torch(fake_torch(tmp_path, dies), seconds=60)
    assert not found.answered
    assert found.ended.crashed
    assert found.ended.how == (
        "was ended by SIGABRT (exit -6); the last that it said: torch.cuda.is_available()"
    )


def test_a_torch_that_hangs_is_left(tmp_path: Path) -> None:
    found = ask_torch(fake_torch(tmp_path, "import time; time.sleep(60)"), seconds=1.5)
    assert (found.answered, found.ended.status, found.ended.crashed) == (False, None, False)
    assert found.ended.how.startswith("did not answer in 2 s")


def test_a_torch_that_cannot_be_imported_says_why(tmp_path: Path) -> None:
    found = ask_torch(fake_torch(tmp_path, "raise ImportError('libroctx64.so.4')"), seconds=60)
    assert (found.answered, found.ended.crashed) == (False, False)
    assert "libroctx64.so.4" in found.ended.how


@pytest.mark.report("C15")
def test_a_selftest_with_wrong_numbers_is_read(tmp_path: Path) -> None:
    (tmp_path / "wrong_device.py").write_text(
        "import json, sys\n"
        'assert sys.argv[1:] == ["--device", "cuda", "--json"]\n'
        'checks = [{"name": "conv", "ok": False, "error": 0.1, "limit": 0.001, "reading": ""},\n'
        '          {"name": "gemm", "ok": True, "error": 0.0, "limit": 0.001, "reading": "0"}]\n'
        'print(json.dumps({"device": "Radeon", "checks": checks}))\n'
        "sys.exit(3)\n",
        encoding="utf-8",
    )
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    found = run_selftest("cuda", environ, seconds=60, module="wrong_device")
    assert found.device == "Radeon"
    assert [(check.name, check.reading) for check in found.failed] == [
        ("conv", "error 0.1, allowed 0.001")
    ]


def test_an_answer_may_stand_among_what_libraries_print() -> None:
    found = read_probe(Ended(status=0, out=f"Warning: x\n{ANSWER}\n{{broken\n"))
    assert found.answered
    assert found.devices[0].gfx == "gfx90a:xnack-"


@pytest.mark.parametrize("out", ["", "null", "[]", "{", '{"version": 1', "[" * 9999])
def test_what_is_no_answer_counts_as_none(out: str) -> None:
    assert not read_probe(Ended(status=0, out=out)).answered
    assert read_selftest(Ended(status=0, out=out)).checks == ()


def test_an_answer_before_a_crash_does_not_count() -> None:
    assert not read_probe(Ended(status=-11, out=ANSWER)).answered


@given(
    st.dictionaries(
        st.sampled_from(["version", "hip", "device_count", "archs", "devices", "checks", "device"]),
        st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=9),
                     lambda inner: st.lists(inner, max_size=3)
                     | st.dictionaries(st.sampled_from(["name", "ok", "gfx"]), inner, max_size=3)),
    )
)  # fmt: skip
def test_any_json_is_survived(told: dict[str, object]) -> None:
    import json

    ended = Ended(status=0, out=json.dumps(told))
    assert read_probe(ended).device_count >= 0
    assert all(check.ok in {True, False} for check in read_selftest(ended).checks)

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdamd.errors import BadRequest, StorageError
from sdamd.hardware.child import Ended
from sdamd.hardware.doctor import diagnose
from sdamd.hardware.report import DEFAULT_NAME, Private, private_of, report, save_report, scrub
from sdamd.hardware.torch_probe import Probe
from tests.hardware.made import gpu, machine, surveyed

PLANTED = {
    "user": "wilhelmine",
    "home": "/home/wilhelmine",
    "host": "wohnzimmer-pc",
    "hub token": "hf_ThisIsNoRealTokenAtAll1234",
    "other token": "ghp_0123456789abcdefghij0123",
    "proxy password": "hunter2secret",
    "password": "correct-horse-battery",
    "mail": "wilhelmine.w@example.org",
    "uuid": "3f2504e0-4f89-11d3-9a0c-0305e82c3301",
    "mac": "de:ad:be:ef:00:42",
    "ip": "192.168.17.23",
    "ip6": "fe80::dead:beef:1",
    "gpu serial": "8f3c1d2e4b5a6978",
    "gpu serial as KFD writes it": str(0x8F3C1D2E4B5A6978),
    "board serial": "PCB4711-00815",
    "Windows folder": r"C:\Users\wilhelmine",
}  # fmt: skip

ENVIRON = {
    "HOME": PLANTED["home"],
    "USER": PLANTED["user"],
    "HOSTNAME": PLANTED["host"],
    "HF_TOKEN": PLANTED["hub token"],
    "HTTPS_PROXY": f"http://{PLANTED['user']}:{PLANTED['proxy password']}@{PLANTED['ip']}:3128",
    "SDAMD_AUTH": f"me:{PLANTED['password']}",
    "ROCR_VISIBLE_DEVICES": f"GPU-{PLANTED['gpu serial']}",
    "MIOPEN_USER_DB_PATH": f"{PLANTED['home']}/miopen",
    "HIP_TRACE_URL": f"https://x:{PLANTED['proxy password']}@{PLANTED['host']}.example.org/",
    "LD_LIBRARY_PATH": f"/data/{PLANTED['user']}/rocm/lib",
}

FILES = {
    "proc/self/environ": "\0".join(f"{name}={value}" for name, value in ENVIRON.items()),
    "proc/sys/kernel/hostname": PLANTED["host"],
    "proc/version": f"Linux version 6.17.9 ({PLANTED['mail']}) #1",
    "proc/cmdline": f"root=UUID={PLANTED['uuid']} amdgpu.gttsize=1 ip={PLANTED['ip']} quiet",
    "etc/passwd": f"{PLANTED['user']}:x:1000:1000::{PLANTED['home']}:/bin/sh\n",
    "etc/group": f"video:x:44:{PLANTED['user']}\nrender:x:105:{PLANTED['user']}\n",
    "var/log/dmesg": f"amdgpu 0000:03:00.0: serial: {PLANTED['board serial']}\n"
    f"eth0: {PLANTED['mac']}\n[drm] {PLANTED['mac']} {PLANTED['ip6']} of {PLANTED['user']}\n",
}  # fmt: skip

TEXT = "\n".join(
    (
        f'Traceback: File "{PLANTED["home"]}/ai/run.py", line 3',
        f"{PLANTED['Windows folder']}\\venv\\torch",
        f"hf download --token {PLANTED['hub token']} {PLANTED['other token']}",
        f"password={PLANTED['password']} from {PLANTED['mail']} at {PLANTED['ip6']}",
        "RuntimeError: No HIP GPUs are available",
    )
)


def planted(root: Path) -> str:
    seen = surveyed(root, machine(gpu(unique_id=0x8F3C1D2E4B5A6978), FILES))
    child = Probe(ended=Ended(status=1, out=PLANTED["home"], err=f"no {PLANTED['host']}"))
    diagnosis = diagnose(replace(seen, probe=child), TEXT)
    return report(diagnosis, "0.1", private_of(ENVIRON, root), root, TEXT)


@pytest.mark.report("F14")
@pytest.mark.parametrize("what", PLANTED)
def test_a_report_says_nothing_about_a_person(tmp_path: Path, what: str) -> None:
    """F14: keys and passwords were saved with the settings."""
    assert PLANTED[what].lower() not in planted(tmp_path).lower()


def test_a_report_holds_what_is_needed_to_help(tmp_path: Path) -> None:
    text = planted(tmp_path)
    for needed in (
        "sdamd 0.1", "gfx1100", "6.17.9", "0000:03:00.0", "torch: 2.9.1+rocm6.4", "renderD128",
        "gfx_target_version 110000", "amdgpu.gttsize=1", "ROCR_VISIBLE_DEVICES=GPU-<serial>",
        "MIOPEN_USER_DB_PATH=~/miopen", "No HIP GPUs are available", "amdgpu 0000:03:00.0: serial",
        '"verdict"',
    ):  # fmt: skip
        assert needed in text
    assert '"uuid"' not in text


def test_the_json_in_a_report_is_json(tmp_path: Path) -> None:
    seen = surveyed(tmp_path, machine())
    text = report(diagnose(seen), "0.1", Private(), tmp_path)
    found = json.loads(text.partition("== As JSON ==")[2])
    assert found["gpus"][0]["gfx"] == "gfx1100"


@pytest.mark.parametrize(
    "text",
    [
        "torch 2.9.1+rocm6.4 for 10.3.0",
        "driver 32.0.21013.1000",
        "0000:03:00.0 at 12:34:56",
        "std::bad_alloc in at::native",
        "2026-11-30 20:10:13",
        "libamdhip64.so.6",
    ],
)
def test_versions_times_and_addresses_of_cards_stay(text: str) -> None:
    assert scrub(text, Private()) == text


def test_a_short_name_does_not_eat_words() -> None:
    assert scrub("amd and amdgpu of Al", Private(names=("al",))) == "amd and amdgpu of <name>"


@given(st.text(max_size=300))
def test_scrubbing_twice_changes_nothing_more(text: str) -> None:
    private = Private(homes=("/home/x",), names=("wilhelmine",), secrets=("s3cret",))
    once = scrub(text, private)
    assert "wilhelmine" not in once
    assert scrub(once, private) == once


def test_no_file_is_ever_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert save_report("1", "") == Path(DEFAULT_NAME)
    assert save_report("2", "") == Path("sdamd-doctor-2.txt")
    assert save_report("3", "mine.txt") == Path("mine.txt")
    with pytest.raises(BadRequest, match=r"report is 'mine.txt'; allowed is a file that is not"):
        save_report("4", "mine.txt")
    assert [path.read_text("utf-8") for path in sorted(tmp_path.iterdir())] == ["3", "2", "1"]


def test_bytes_that_are_no_text_do_not_stop_a_report(tmp_path: Path) -> None:
    assert save_report("a \udcff", str(tmp_path / "x.txt")).read_bytes() == b"a \\udcff"


def test_a_folder_that_is_not_there_is_a_matter_of_storage(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be written"):
        save_report("1", str(tmp_path / "nowhere/x.txt"))

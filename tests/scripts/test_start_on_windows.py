"""What start.py does on Windows, as far as another system can show it: its choices, its commands,
and what it makes of errors as Windows words them."""

import dataclasses
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from scripts import build_venv, set_up, start
from scripts.machine import environment, look
from sdamd.errors import HardwareError, SdamdError, StorageError, UserError
from sdamd.hardware.runtime import AMD_INDEX, Engine
from tests.scripts.fakes import FRESH, RADEON, FakeRun, machine_with, prepare

ROOT = Path(__file__).parents[2]
MACHINES = ROOT / "tests/data/machines"
DIRECTML = machine_with(RADEON, platform="windows")
ROCM = machine_with(RADEON, platform="windows", engine=Engine.ROCM)
WITHOUT_GPU = machine_with(None, platform="windows")
ROCM_TORCH = (ROCM.build.torch, "7.14.60850")


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A place for an environment as Windows' user folders may be called."""
    folder = tmp_path / "Jörg 王 & Co"
    folder.mkdir()
    return folder / ".venv"


def windows_run(torch: str = "2.13.0+cpu", hip: str | None = None) -> FakeRun:
    return FakeRun(torch, hip, platform="windows")


# -- Pythons -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listing", "commands"),
    [
        pytest.param(
            "Installed Pythons found by py Launcher for Windows\n -3.12-64 *\n -3.9-64\n -2.7-32\n",
            ["py -3.12"],
            id="launcher of Python 3.8",
        ),
        pytest.param(
            " -V:3.14 *        Python 3.14 (64-bit)\n"
            " -V:3.13-32       Python 3.13 (32-bit)\n"
            " -V:3.11          Python 3.11 (64-bit)\n"
            " -V:3.10          Python 3.10 (Store)\n"
            " -V:ContinuumAnalytics/py312_x64 Anaconda\n",
            ["py -3.14", "py -3.11"],
            id="launcher of Python 3.11",
        ),
        pytest.param(
            "Tag           Name              Managed By    Version  Alias\n"
            "3.13[-64] *   Python 3.13.5     PythonCore    3.13.5   python3.13.exe\n"
            "3.12-arm64    Python 3.12.10    PythonCore    3.12.10\n"
            "3.15[-64]     Python 3.15.0     PythonCore    3.15.0\n",
            ["py -3.13"],
            id="install manager",
        ),
        pytest.param("No installed Pythons found!\n", [], id="none"),
    ],
)
def test_the_launcher_names_the_64_bit_pythons_that_fit(listing: str, commands: list[str]) -> None:
    assert start.launcher_pythons(listing) == commands


# -- which build ---------------------------------------------------------------------------------


def dry_run(capsys: pytest.CaptureFixture[str], machine: str, *options: str) -> list[str]:
    root = ["--root", str(MACHINES / machine), "--platform", "windows"]
    assert set_up.main(["--dry-run", *root, *options]) == 0
    return capsys.readouterr().out.splitlines()


NATIVE = {
    "rx7900xtx": "torch[device-gfx1100]==2.12.0+rocm7.14.1",
    "rx6600": "torch[device-gfx1032]==2.12.0+rocm7.14.1",
    "rx9070xt": "torch[device-gfx1201]==2.12.0+rocm7.14.1",
    "strix-halo": "torch[device-gfx1151]==2.12.0+rocm7.14.1",
}


@pytest.mark.parametrize("machine", NATIVE)
def test_rocm_can_be_chosen_on_windows(machine: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = dry_run(capsys, machine, "--device", "rocm")
    (torch,) = (line.split() for line in lines if "--index-url" in line)
    at = torch.index("--index-url")
    assert torch[at : at + 3] == ["--index-url", AMD_INDEX, NATIVE[machine]]
    # Else sdamd's own choice would be DirectML, under a torch that was installed for ROCm.
    assert "set SDAMD_DEVICE=rocm" in lines
    assert not any("HSA_OVERRIDE" in line for line in lines)


@pytest.mark.parametrize("options", [[], ["--device", "directml"], ["--device", "auto"]])
def test_directml_is_the_choice_that_needs_no_words(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = dry_run(capsys, "rx7900xtx", *options)
    assert "# build: directml" in lines
    assert not any("SDAMD_DEVICE" in line for line in lines)


def test_the_cpu_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    lines = dry_run(capsys, "rx7900xtx", "--device=cpu")
    assert "# build: cpu" in lines
    assert "set SDAMD_DEVICE=cpu" in lines


@pytest.mark.parametrize(
    ("machine", "platform", "device", "allowed"),
    [
        ("rx580", "windows", "rocm", "auto, directml, cpu"),
        ("rx7900xtx", "linux", "directml", "auto, rocm, cpu"),
        ("nvidia-only", "windows", "directml", "auto, cpu"),
    ],
)
def test_an_engine_that_has_no_build_here_is_refused_with_those_that_have(
    machine: str, platform: str, device: str, allowed: str
) -> None:
    with pytest.raises(UserError, match=f"--device is {device}; for this machine: {allowed}$"):
        look(MACHINES / machine, platform, engine=device)


def test_device_and_build_are_checked_before_anything_happens() -> None:
    with pytest.raises(UserError) as caught:
        set_up.parse(["--device", "cuda", "--build", "cpu"])
    assert "--device is cuda; allowed: auto, rocm, directml, cpu" in str(caught.value)
    assert "give one of them" in str(caught.value)


def test_a_device_that_the_person_set_stays_with_a_note() -> None:
    machine = dataclasses.replace(ROCM, device="rocm")
    environ, notes = environment(machine, {"SDAMD_DEVICE": "directml"})
    assert environ["SDAMD_DEVICE"] == "directml"
    assert any("SDAMD_DEVICE stays 'directml'" in note for note in notes)
    environ, notes = environment(machine, {"SDAMD_DEVICE": "rocm:1"})
    assert (environ["SDAMD_DEVICE"], notes) == ("rocm:1", [])


# -- a choice stays ------------------------------------------------------------------------------


def test_a_build_that_was_chosen_stays_chosen(venv: Path) -> None:
    prepare(venv, windows_run(*ROCM_TORCH), machine=ROCM)
    kept = build_venv.kept_build(venv)
    assert kept == ROCM.build.name
    again = look(MACHINES / "rx7900xtx", "windows", kept=kept)
    assert (again.build.name, again.device, again.by_hand) == (kept, "rocm", True)
    run = windows_run()
    prepare(venv, run, machine=again)
    assert run.commands == []


def test_auto_takes_the_choice_back() -> None:
    machine = look(MACHINES / "rx7900xtx", "windows", engine="auto", kept=ROCM.build.name)
    assert (machine.build.name, machine.device, machine.by_hand) == ("directml", "", False)


def test_a_choice_that_no_longer_fits_the_card_is_no_error() -> None:
    assert look(MACHINES / "rx580", "windows", kept=ROCM.build.name).build.name == "directml"


def test_what_the_table_chose_is_not_kept_by_hand(venv: Path) -> None:
    prepare(venv, windows_run(), machine=DIRECTML)
    assert build_venv.kept_build(venv) == ""


def test_an_interrupted_set_up_goes_on_with_what_was_chosen(venv: Path) -> None:
    def interrupt(kind: str) -> None:
        if kind == "install torch":
            raise KeyboardInterrupt

    run = windows_run()
    run.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        prepare(venv, run, machine=ROCM)
    assert build_venv.kept_build(venv) == ROCM.build.name


def test_a_radeon_that_dxgi_does_not_show_today_keeps_directml(venv: Path) -> None:
    """As in a session over the network that has no adapter of its own."""
    prepare(venv, windows_run(), machine=DIRECTML)
    run = windows_run()
    prepare(venv, run, machine=WITHOUT_GPU)
    assert run.commands == []


# -- setting up ----------------------------------------------------------------------------------


def test_the_interpreter_is_where_windows_has_it(venv: Path) -> None:
    run = windows_run()
    python = prepare(venv, run, machine=DIRECTML)
    assert python == venv / "Scripts" / "python.exe"
    assert run.kinds == FRESH
    assert all(command[0] == str(python) for command in run.commands[1:])
    assert run.commands[3][-1] == "onnxruntime-directml==1.24.4"


IN_USE = (
    "2026-11-30T17:00:01,3 ERROR: Could not install packages due to an OSError: [WinError 5] "
    "Zugriff verweigert: 'C:\\\\sdamd\\\\.venv\\\\Lib\\\\torch\\\\lib\\\\c10.dll'\n"
)
DISK_FULL = (
    "2026-11-30T17:00:01,3 ERROR: Could not install packages due to an OSError: [WinError 112] "
    "Es steht nicht genug Speicherplatz auf dem Datenträger zur Verfügung\n"
)
NO_NETWORK = (
    "2026-11-30T17:00:00,1 WARNING: Retrying after connection broken by 'OSError: [WinError 10060] "
    "Ein Verbindungsversuch ist fehlgeschlagen'\n"
    "2026-11-30T17:00:01,3 ERROR: No matching distribution found for torch==2.13.0\n"
)
LONG_PATH = (
    "2026-11-30T17:00:01,3 ERROR: Could not install packages due to an OSError: [Errno 2] No such "
    "file or directory: 'C:\\\\Users\\\\a very long name'\n"
    "HINT: This error might have occurred since this system does not have Windows Long Path "
    "support enabled.\n"
)
NO_RUNTIME = (
    "OSError: [WinError 126] Das angegebene Modul wurde nicht gefunden. Error loading "
    '"C:\\sdamd\\.venv\\Lib\\site-packages\\torch\\lib\\c10.dll" or one of its dependencies.'
)
BLOCKED = (
    "OSError: [WinError 4551] An Application Control policy has blocked this file. Error loading "
    '"C:\\sdamd\\.venv\\Lib\\site-packages\\torch\\lib\\amdhip64_7.dll"'
)


@pytest.mark.parametrize(
    ("kind", "log", "error", "words"),
    [
        ("install torch", IN_USE, StorageError, r"c10\.dll.*close it and start again"),
        ("install torch", DISK_FULL, StorageError, "the disk is full"),
        ("install torch", NO_NETWORK, HardwareError, "is there a network"),
        ("install sdamd", LONG_PATH, StorageError, "short path, or enable Windows' long paths"),
        ("check", NO_RUNTIME, HardwareError, r"c10\.dll.*Visual C\+\+ Redistributable"),
        ("check", BLOCKED, HardwareError, "Smart App Control off; `--device directml`"),
    ],
)
def test_what_windows_says_in_any_language_is_told_with_what_helps(
    venv: Path, kind: str, log: str, error: type[SdamdError], words: str
) -> None:
    run = windows_run()
    run.fail[kind] = (1, log)
    with pytest.raises(error, match=words) as caught:
        prepare(venv, run, machine=DIRECTML)
    assert "\n" not in str(caught.value)


def test_a_torch_that_dies_when_imported_is_told_by_windows_number(venv: Path) -> None:
    run = windows_run()
    run.fail["check"] = (0xC0000005, "")
    with pytest.raises(HardwareError, match="importing torch ended with 0xC0000005"):
        prepare(venv, run, machine=DIRECTML)


class InUse(PermissionError):
    """What removing an open file raises on Windows."""

    winerror = 32


def test_a_file_that_is_still_open_is_told_with_what_helps(venv: Path) -> None:
    def refuse(kind: str) -> None:
        raise InUse(13, "Der Prozess kann nicht zugreifen", str(venv / "python.exe"))

    run = windows_run()
    run.before = refuse
    with pytest.raises(StorageError, match=r"python\.exe.*if sdamd is still open, close it"):
        prepare(venv, run, machine=DIRECTML)


def remove_as_windows_does(path: str) -> None:
    if not Path(path).stat().st_mode & stat.S_IWRITE:
        raise PermissionError(13, "Access is denied", path)
    Path(path).unlink()


def test_a_read_only_file_of_an_old_environment_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "read only"
    path.touch(mode=0o444)
    with pytest.raises(PermissionError) as caught:
        remove_as_windows_does(str(path))
    build_venv.unlock_and_retry(remove_as_windows_does, str(path), caught.value)
    assert not path.exists()


def test_a_file_that_cannot_be_removed_for_another_reason_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "open"
    path.touch()
    error = InUse(13, "in use", str(path))
    with pytest.raises(InUse):
        build_venv.unlock_and_retry(remove_as_windows_does, str(path), error)
    assert path.exists()


# -- words on the console ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "quoted"),
    [
        (r"C:\sdamd\.venv\Scripts\python.exe", r"C:\sdamd\.venv\Scripts\python.exe"),
        (r"C:\My pictures\sdamd", r'"C:\My pictures\sdamd"'),
        (r"C:\R&D\sdamd", r'"C:\R&D\sdamd"'),
        (r"C:\sdamd(new)", r'"C:\sdamd(new)"'),
        ('say "hi"', r'"say \"hi\""'),
    ],
)
def test_a_shown_command_can_be_given_to_cmd(word: str, quoted: str) -> None:
    assert set_up.quoted_for_cmd(word) == quoted


@pytest.mark.parametrize("code_page", ["cp1252", "cp437", "cp936"])
def test_a_dry_run_into_a_file_survives_the_code_page(tmp_path: Path, code_page: str) -> None:
    """Windows writes to a console as UTF-8 and to files and pipes in the code page."""
    root = tmp_path / "照片 Ångström 🦊"
    for part in ("scripts", "sdamd/hardware"):
        shutil.copytree(ROOT / part, root / part, ignore=shutil.ignore_patterns("__pycache__"))
    for part in ("sdamd/__init__.py", "sdamd/errors.py", "pyproject.toml"):
        shutil.copy(ROOT / part, root / part)
    environ: Mapping[str, str] = {**os.environ, "PYTHONIOENCODING": code_page}
    done = subprocess.run(
        [sys.executable, str(root / "scripts/start.py"), "--dry-run"],
        capture_output=True,
        env=environ,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"-m sdamd" in done.stdout

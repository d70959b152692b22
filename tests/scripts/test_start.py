import ast
import dataclasses
import errno
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from scripts import build_venv, checks, set_up, start
from scripts.machine import environment, look
from sdamd.errors import HardwareError, SdamdError, StorageError, UserError
from tests.scripts.fakes import (
    FRESH,
    WITH_RADEON,
    WITHOUT_GPU,
    FakeRun,
    kind_of,
    make_environment,
    prepare,
)

ROOT = Path(__file__).parents[2]
MACHINES = ROOT / "tests/data/machines"


# -- the table, as a person tries it out ---------------------------------------------------------


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert set_up.main(["--dry-run", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def pip_installs(lines: Sequence[str]) -> list[list[str]]:
    """What follows `pip install`, for each line of a dry run that has it."""
    words = [shlex.split(line) for line in lines if not line.startswith("#")]
    return [line[line.index("install") + 1 :] for line in words if "install" in line]


ROCM64 = ["--index-url", "https://download.pytorch.org/whl/rocm6.4", "torch==2.9.1+rocm6.4"]
ROCM72 = ["--index-url", "https://download.pytorch.org/whl/rocm7.2", "torch==2.13.0+rocm7.2"]
ROCM63 = ["--index-url", "https://download.pytorch.org/whl/rocm6.3", "torch==2.9.1+rocm6.3"]
AMD = ["--index-url", "https://repo.amd.com/rocm/whl-multi-arch/"]
STRIX_HALO = [
    *AMD,
    "torch[device-gfx1151]==2.12.0+rocm7.14.1",
    "amd-torch-device-gfx11==2.12.0+rocm7.14.1",
]
CPU = ["torch==2.13.0"]

LINUX = {
    "rx7900xtx": ("rocm-gfx1100", ROCM64),
    "rx7900xtx-x2": ("rocm-gfx1100", ROCM64),
    "rx7800xt-raphael": ("rocm-gfx1101", ROCM64),
    "rx6600": ("rocm-gfx1032", [*AMD, "torch[device-gfx1032]==2.12.0+rocm7.14.1"]),
    "rx9070xt": ("rocm-gfx1201", ROCM72),
    "rx580": ("cpu", CPU),
    "vega10-oldkernel": ("rocm-gfx900", ROCM63),
    "strix-halo": ("rocm-gfx1151", STRIX_HALO),
    "strix-halo-ttm120": ("rocm-gfx1151", STRIX_HALO),
    "mi300x": ("rocm-gfx942", ROCM72),
    "wsl2": ("cpu", CPU),
    "nvidia-only": ("cpu", CPU),
    "kfd-cpu-only": ("cpu", CPU),
}


def test_every_recorded_machine_is_in_the_table() -> None:
    assert {path.name for path in MACHINES.iterdir() if (path / "sys").exists()} | {"wsl2"} == set(
        LINUX
    )


@pytest.mark.parametrize("machine", LINUX)
def test_linux_machine_gets_its_torch_first_and_then_sdamd(
    machine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, torch = LINUX[machine]
    lines = dry_run(capsys, "--root", str(MACHINES / machine), "--platform", "linux")
    constraint = str(ROOT / ".venv" / build_venv.CONSTRAINT)
    assert f"# build: {name}" in lines
    assert pip_installs(lines) == [torch, ["-c", constraint, "-e", str(ROOT)]]


@pytest.mark.parametrize("machine", LINUX)
def test_windows_machine_gets_directml_if_it_has_a_radeon(
    machine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = dry_run(capsys, "--root", str(MACHINES / machine), "--platform", "windows")
    first, second = (line.split() for line in lines if " pip install " in line)
    has_radeon = machine not in {"wsl2", "nvidia-only", "kfd-cpu-only"}
    assert f"# build: {'directml' if has_radeon else 'cpu'}" in lines
    assert first[-3:] == ["pip", "install", "torch==2.13.0"]
    assert ("onnxruntime-directml==1.24.4" in second) == has_radeon
    assert all(line.startswith(("#", "set ")) or ".venv" in line for line in lines)
    assert any("Scripts" in line and "python.exe" in line for line in lines)


@pytest.mark.parametrize("machine", LINUX)
def test_no_second_index_can_win(machine: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A20: with --extra-index-url another build of the same version may be taken."""
    lines = dry_run(capsys, "--root", str(MACHINES / machine))
    assert not any("--extra-index-url" in line for line in lines)
    # The index holds torch alone: what sdamd needs comes from where the person's pip takes it.
    assert "--index-url" not in pip_installs(lines)[1]


def test_dry_run_names_the_gpu_the_reason_and_the_environment(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = dry_run(capsys, "--root", str(MACHINES / "rx7800xt-raphael"), "generate", "a hill")
    assert "# gpu: Radeon RX 7800 XT (gfx1101, 16.0 GiB)" in lines
    assert any(line.startswith("# reason: Radeon RX 7800 XT is gfx1101: ") for line in lines)
    assert "export TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1" in lines
    # A01: the integrated GPU is hidden before torch can see it.
    assert "# the process that renders sees no other GPU: ROCR_VISIBLE_DEVICES=0" in lines
    assert lines[-1].endswith(" -P -m sdamd generate 'a hill'")


def test_dry_run_says_that_the_card_is_not_supported(capsys: pytest.CaptureFixture[str]) -> None:
    lines = dry_run(capsys, "--root", str(MACHINES / "rx580"))
    assert "# gpu: Radeon RX 580 (gfx803, 8.0 GiB)" in lines
    assert any(line.startswith("# reason: ") and "Polaris" in line for line in lines)


def test_dry_run_takes_extras_and_an_alternative_build(capsys: pytest.CaptureFixture[str]) -> None:
    lines = dry_run(
        capsys,
        "--root",
        str(MACHINES / "rx6600"),
        "--extras=dev",
        "--build",
        "rocm-gfx1032-2.9.1+rocm6.4",
    )
    assert pip_installs(lines)[0] == ROCM64
    assert pip_installs(lines)[1][-1] == f"{ROOT}[dev]"
    assert "export HSA_OVERRIDE_GFX_VERSION=10.3.0" in lines


def test_tools_of_another_vendor_do_not_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A24: an nvidia-smi that is left over on PATH is no proof of a GPU."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexit 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert "# build: rocm-gfx1032" in dry_run(capsys, "--root", str(MACHINES / "rx6600"))
    assert "# build: cpu" in dry_run(capsys, "--root", str(MACHINES / "nvidia-only"))


def test_a_container_without_devices_computes_on_the_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A17: no /dev/kfd and no KFD node is no reason to install gigabytes of ROCm."""
    (tmp_path / ".dockerenv").touch()
    (tmp_path / "dev").mkdir()
    lines = dry_run(capsys, "--root", str(tmp_path))
    assert "# build: cpu" in lines
    assert any(line.startswith("# reason: no AMD GPU was found") for line in lines)


# -- what stands before sdamd's own arguments ----------------------------------------------------


def test_only_options_before_the_command_are_read() -> None:
    options = set_up.parse(["--extras", "dev, docs", "doctor", "--root", "/x", "--dry-run"])
    assert options.extras == ("dev", "docs")
    assert options.rest == ("doctor", "--root", "/x", "--dry-run")
    assert (options.root, options.dry_run) == (None, False)


def test_help_goes_to_sdamd() -> None:
    assert set_up.parse(["--help"]).rest == ("--help",)


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(UserError) as caught:
        set_up.parse(["--platform", "plan9", "--root", "/nowhere/at/all", "--extras"])
    text = str(caught.value)
    assert "--platform is plan9; allowed: linux, windows" in text
    assert "--root is /nowhere/at/all, which is not a folder" in text
    assert "--extras needs a value" in text
    assert "need --dry-run" in text


def test_an_unknown_build_is_refused_with_the_ones_that_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = set_up.main(
        ["--dry-run", "--root", str(MACHINES / "rx580"), "--build", "rocm-gfx1100"]
    )
    assert status == 2
    assert "--build is rocm-gfx1100; for this machine: cpu" in capsys.readouterr().err


# -- old Pythons ---------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["start.py", "test.py"])
def test_the_doors_are_readable_for_old_pythons(script: str) -> None:
    source = (ROOT / "scripts" / script).read_text(encoding="utf-8")
    ast.parse(source, feature_version=(3, 7))
    assert "from __future__" not in source


@pytest.mark.parametrize(
    ("version", "bits", "fit"),
    [
        ((3, 6), 64, False),
        ((3, 10), 64, False),
        ((3, 11), 64, True),
        ((3, 14), 64, True),
        ((3, 15), 64, False),
        ((4, 0), 64, False),
        ((3, 12), 32, False),
    ],
)
def test_an_unfit_python_gets_one_sentence(version: tuple[int, int], bits: int, fit: bool) -> None:
    """A22: the Pythons that will do are named before anything else happens."""
    sentence = start.python_problem(*version, bits)
    assert (sentence == "") == fit
    if not fit:
        assert "3.11 to 3.14" in sentence
        assert f"{version[0]}.{version[1]}" in sentence
        assert f"{bits}-bit" in sentence
        assert "\n" not in sentence


def old_pythons() -> list[Path]:
    """Interpreters before 3.11 on PATH or under pyenv, as far as they can be started."""
    names = [f"python3.{number}" for number in range(6, 11)]
    found = [Path(path) for name in names if (path := shutil.which(name))]
    found += sorted(Path.home().glob(".pyenv/versions/3.[6-9].*/bin/python"))
    found += sorted(Path.home().glob(".pyenv/versions/3.10.*/bin/python"))
    return [
        python
        for python in found
        if subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0
    ]


@pytest.mark.parametrize("script", ["start.py", "test.py"])
def test_a_real_old_python_says_so_and_leaves_status_3(script: str) -> None:
    pythons = old_pythons()
    if not pythons:
        pytest.skip("there is no Python older than 3.11 here")
    for python in pythons:
        done = subprocess.run(
            [python, str(ROOT / "scripts" / script)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 3
        assert done.stderr.startswith("sdamd needs a 64-bit Python 3.11 to 3.14")
        assert done.stderr.count("\n") == 1


# -- setting up ----------------------------------------------------------------------------------


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A place for an environment, with a space in its path."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    return folder / ".venv"


def test_a_fresh_machine_is_set_up_in_this_order(venv: Path) -> None:
    run = FakeRun()
    python = prepare(venv, run)
    assert python == venv / "bin/python"
    assert run.kinds == FRESH
    assert run.commands[1] == [str(python), "-m", "pip", "install", "torch==2.13.0"]
    assert (venv / build_venv.CONSTRAINT).read_text() == "torch==2.13.0+cpu\n"


def test_a_second_run_does_nothing(venv: Path) -> None:
    prepare(venv, FakeRun())
    second = FakeRun()
    prepare(venv, second)
    assert second.commands == []


def test_the_persons_pip_settings_are_kept(venv: Path) -> None:
    run = FakeRun()
    prepare(venv, run, environ={"PIP_INDEX_URL": "https://mirror.example/simple"})
    assert "--isolated" not in [word for command in run.commands for word in command]
    environ = run.environs[run.kinds.index("install sdamd")]
    assert environ["PIP_INDEX_URL"] == "https://mirror.example/simple"


def test_a_changed_project_is_updated_in_place(venv: Path) -> None:
    prepare(venv, FakeRun())
    old = dataclasses.replace(build_venv.read_stamp(venv), pyproject="of yesterday")
    build_venv.write_stamp(venv, old)
    run = FakeRun()
    prepare(venv, run)
    assert "venv" not in run.kinds
    assert run.kinds[-4:] == ["install torch", "torch version", "install sdamd", "check"]


def test_extras_are_added_to_those_that_are_there(venv: Path) -> None:
    prepare(venv, FakeRun(), "dev")
    without = FakeRun()
    prepare(venv, without)
    assert without.commands == []
    run = FakeRun()
    prepare(venv, run, "docs")
    command = run.commands[run.kinds.index("install sdamd")]
    assert command[-1] == f"{ROOT}[dev,docs]"
    assert build_venv.read_stamp(venv).extras == ("dev", "docs")


@pytest.mark.parametrize(
    "changes", [{"python": "3.10"}, {"root": "/elsewhere"}, {"build": "rocm-gfx1030"}]
)
def test_another_python_place_or_build_starts_anew(venv: Path, changes: dict[str, str]) -> None:
    prepare(venv, FakeRun())
    old = dataclasses.replace(build_venv.read_stamp(venv), **changes)  # type: ignore[arg-type]
    build_venv.write_stamp(venv, old)
    (venv / "left over").touch()
    run = FakeRun()
    prepare(venv, run)
    assert run.kinds == FRESH
    assert not (venv / "left over").exists()


def test_a_gpu_that_is_gone_today_keeps_its_torch(
    venv: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A driver that does not load must not cost the download of another torch."""
    prepare(venv, FakeRun("2.9.1+rocm6.4", "6.4.43484"), machine=WITH_RADEON)
    run = FakeRun()
    prepare(venv, run)
    assert run.commands == []
    assert "stays as it was set up for rocm-gfx1100" in capsys.readouterr().err
    prepare(venv, run, machine=dataclasses.replace(WITHOUT_GPU, by_hand=True))
    assert run.kinds == FRESH


# -- what can go wrong ---------------------------------------------------------------------------

NETWORK_LOG = """\
2026-11-30T17:00:00,1 WARNING: Retrying (Retry(total=0)) after connection broken by \
'NewConnectionError(': Failed to establish a new connection: [Errno -3] Temporary failure in \
name resolution')': /simple/torch/
2026-11-30T17:00:01,2 ERROR: Could not find a version that satisfies the requirement torch
2026-11-30T17:00:01,3 ERROR: No matching distribution found for torch==2.13.0
"""
DISK_LOG = """\
2026-11-30T17:00:01,2 ERROR: Could not install packages due to an OSError: [Errno 28] No space \
left on device
"""
VERSION_LOG = """\
2026-11-30T17:00:01,3 ERROR: No matching distribution found for torch==2.9.1+rocm6.4
"""
CRASH_LOG = """\
2026-11-30T17:00:01,3 ERROR: Exception:
2026-11-30T17:00:01,3 Traceback (most recent call last):
2026-11-30T17:00:01,3 zlib.error: Error -3 while decompressing data
"""
NO_ENSUREPIP = """\
The virtual environment was not created successfully because ensurepip is not
available.  On Debian/Ubuntu systems, you need to install the python3-venv
"""


@pytest.mark.parametrize(
    ("kind", "log", "error", "words"),
    [
        ("venv", NO_ENSUREPIP, HardwareError, r"sudo apt install python3\.\d+-venv"),
        ("venv", "/usr/bin/python3: No module named venv", HardwareError, "-venv"),
        ("venv", "Error: [Errno 28] No space left on device", StorageError, "is full"),
        ("venv", "Error: something else", HardwareError, "something else"),
        ("install torch", NETWORK_LOG, HardwareError, r"network\? No matching .*torch==2\.13\.0"),
        ("install torch", VERSION_LOG, HardwareError, r"No matching .*rocm6\.4 .*setup\.log"),
        ("install torch", DISK_LOG, StorageError, "the disk is full.*Errno 28"),
        ("install sdamd", NETWORK_LOG, HardwareError, "setup.log"),
        ("install sdamd", CRASH_LOG, HardwareError, "Error -3 while decompressing"),
        ("install sdamd", "", HardwareError, "it says nothing"),
        ("check", "ImportError: libamdhip64.so.6", HardwareError, "libamdhip64"),
    ],
)
def test_a_failure_is_one_sentence_and_the_next_run_repairs(
    venv: Path, kind: str, log: str, error: type[SdamdError], words: str
) -> None:
    run = FakeRun()
    run.fail[kind] = (1, log)
    with pytest.raises(error, match=words) as caught:
        prepare(venv, run)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == (4 if error is StorageError else 3)
    again = FakeRun()
    prepare(venv, again)
    assert again.kinds == FRESH


@pytest.mark.parametrize("kind", FRESH)
def test_a_run_that_was_killed_is_redone(venv: Path, kind: str) -> None:
    def kill(now: str) -> None:
        if now == kind:
            make_environment(venv)
            raise KeyboardInterrupt

    run = FakeRun()
    run.before = kill
    with pytest.raises(KeyboardInterrupt):
        prepare(venv, run)
    again = FakeRun()
    prepare(venv, again)
    assert again.kinds == FRESH


@pytest.mark.parametrize(
    ("torch", "hip"),
    [
        pytest.param("2.9.1+cu128", None, id="A19 cuda"),
        pytest.param("2.13.0+cpu", None, id="A19 cpu"),
        pytest.param("2.9.1", None, id="A20 plain"),
        pytest.param("2.9.1+rocm6.4", None, id="A20 without hip"),
    ],
)
def test_a_wrong_torch_is_an_error_and_never_the_cpu_in_silence(
    venv: Path, torch: str, hip: str | None
) -> None:
    with pytest.raises(HardwareError, match=r"rocm-gfx1100 needs"):
        prepare(venv, FakeRun(torch, hip), machine=WITH_RADEON)
    assert not build_venv.read_stamp(venv).complete


def test_a_failed_update_keeps_what_worked(venv: Path) -> None:
    """Without a network today, yesterday's environment is still the one to come back to."""
    prepare(venv, FakeRun())
    old = dataclasses.replace(build_venv.read_stamp(venv), pyproject="of yesterday")
    build_venv.write_stamp(venv, old)
    run = FakeRun()
    run.fail["install sdamd"] = (1, NETWORK_LOG)
    with pytest.raises(HardwareError):
        prepare(venv, run)
    assert build_venv.read_stamp(venv) == old


def test_a_folder_that_is_no_environment_is_left_alone(venv: Path) -> None:
    venv.mkdir()
    (venv / "thesis.txt").write_text("years of work")
    with pytest.raises(StorageError, match="not a virtual environment"):
        prepare(venv, FakeRun())
    assert [path.name for path in venv.iterdir()] == ["thesis.txt"]


def test_a_file_in_the_place_of_the_environment_is_left_alone(venv: Path) -> None:
    venv.write_text("a file")
    with pytest.raises(StorageError, match="Not a directory"):
        prepare(venv, FakeRun())
    assert venv.read_text() == "a file"


def test_an_environment_made_by_hand_is_used_and_not_emptied(venv: Path) -> None:
    make_environment(venv)
    (venv / "mine").touch()
    run = FakeRun()
    run.fail["install sdamd"] = (1, NETWORK_LOG)
    with pytest.raises(HardwareError):
        prepare(venv, run)
    again = FakeRun()
    prepare(venv, again)
    assert "venv" not in run.kinds + again.kinds
    assert (venv / "mine").exists()
    assert build_venv.read_stamp(venv).complete


def test_an_environment_made_by_hand_for_another_python_is_refused(venv: Path) -> None:
    make_environment(venv)
    run = FakeRun()
    run.answer = lambda kind: "3.9" if kind == "python version" else ""  # type: ignore[method-assign]
    with pytest.raises(StorageError, match=r"by hand for Python 3\.9"):
        prepare(venv, run)
    assert (venv / "bin/python").exists()


def test_a_half_made_environment_is_made_anew(venv: Path) -> None:
    make_environment(venv)
    run = FakeRun()
    run.fail["python version"] = (127, "")
    prepare(venv, run)
    assert run.kinds == ["python version", *FRESH]


def test_an_environment_without_pip_gets_one(venv: Path) -> None:
    make_environment(venv)
    run = FakeRun()
    run.fail["pip version"] = (1, "")
    run.answer = lambda kind: "installed" if kind == "ensurepip" else FakeRun.answer(run, kind)  # type: ignore[method-assign]
    prepare(venv, run)
    assert "ensurepip" in run.kinds
    assert "venv" not in run.kinds


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "the disk that holds .* is full"),
        (errno.EDQUOT, "the disk that holds .* is full"),
        (errno.EACCES, "Permission denied"),
        (errno.EROFS, "Read-only file system"),
    ],
)
def test_a_folder_that_cannot_be_written_is_a_storage_error(
    venv: Path, number: int, words: str
) -> None:
    def refuse(kind: str) -> None:
        raise OSError(number, os.strerror(number), str(venv))

    run = FakeRun()
    run.before = refuse
    with pytest.raises(StorageError, match=words):
        prepare(venv, run)


def test_a_damaged_stamp_counts_as_none(venv: Path) -> None:
    for text in ("", "{", "[]", '{"complete": true}', '{"packages": 1, "extras": []}'):
        venv.mkdir(exist_ok=True)
        (venv / build_venv.STAMP).write_text(text)
        assert not build_venv.read_stamp(venv).complete


# -- torch in a child ----------------------------------------------------------------------------


def with_real_check(venv: Path, folder: Path, torch: str) -> FakeRun:
    """A fake set-up whose last check really imports the `torch` that is given as source."""
    (folder / "torch.py").write_text(torch, encoding="utf-8")

    class Checked(FakeRun):
        def __call__(
            self, argv: Sequence[str], *, environ: Mapping[str, str], capture: bool
        ) -> subprocess.CompletedProcess[str]:
            if kind_of(argv) != "check":
                return super().__call__(argv, environ=environ, capture=capture)
            environ = {**os.environ, "PYTHONPATH": str(folder)}
            return build_venv.run([sys.executable, *argv[1:]], environ=environ, capture=capture)

    return Checked()


def test_the_check_never_asks_torch_for_a_gpu(venv: Path, tmp_path: Path) -> None:
    """A32: on a broken driver `torch.cuda.is_available()` kills the process."""
    marker = tmp_path / "asked"
    run = with_real_check(
        venv,
        tmp_path,
        "import os, types\n"
        "__version__ = '2.13.0+cpu'\n"
        "version = types.SimpleNamespace(hip=None)\n"
        "class cuda:\n"
        "    @staticmethod\n"
        f"    def is_available(): open({str(marker)!r}, 'w').close(); os.abort()\n",
    )
    prepare(venv, run)
    assert build_venv.read_stamp(venv).complete
    assert not marker.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_torch_that_dies_when_imported_is_reported(venv: Path, tmp_path: Path) -> None:
    """A11, A32: rocBLAS or the driver abort; no exception can be caught."""
    run = with_real_check(venv, tmp_path, "import os\nos.abort()\n")
    with pytest.raises(HardwareError, match=f"signal {int(signal.SIGABRT)}"):
        prepare(venv, run)


# -- two starts at once --------------------------------------------------------------------------


def test_two_starts_at_once_set_up_once(venv: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [FakeRun(), FakeRun()]
    for run in runs:
        run.before = lambda kind: time.sleep(0.05)
    threads = [threading.Thread(target=prepare, args=(venv, run)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted([runs[0].kinds, runs[1].kinds]) == [[], FRESH]
    assert "waiting" in capsys.readouterr().err


HOLD = """\
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from scripts import build_venv
with build_venv.locked(Path(sys.argv[2])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_lock_of_a_killed_start_is_free(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(ROOT), str(lock)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    with holder:
        assert holder.stdout.readline() == "held\n"
        taken = threading.Event()

        def take() -> None:
            with build_venv.locked(lock):
                taken.set()

        thread = threading.Thread(target=take)
        thread.start()
        assert not taken.wait(0.3)
        holder.kill()
        thread.join(timeout=20)
    assert taken.is_set()


# -- the environment of sdamd --------------------------------------------------------------------


def test_variables_of_the_build_are_set() -> None:
    environ, notes = environment(WITH_RADEON, {"HOME": "/home/me"})
    assert environ["HOME"] == "/home/me"
    assert environ["MIOPEN_FIND_MODE"] == "2"
    assert notes == []


def test_a_variable_that_the_person_set_stays_with_a_note() -> None:
    environ, notes = environment(WITH_RADEON, {"MIOPEN_FIND_MODE": "1"})
    assert environ["MIOPEN_FIND_MODE"] == "1"
    assert len(notes) == 1
    assert "MIOPEN_FIND_MODE stays '1'" in notes[0]
    assert "'2'" in notes[0]


def test_a_needless_override_is_kept_and_named() -> None:
    """A10: an override on a GPU with native kernels is a known cause of crashes."""
    environ, notes = environment(WITH_RADEON, {"HSA_OVERRIDE_GFX_VERSION": "11.0.0"})
    assert environ["HSA_OVERRIDE_GFX_VERSION"] == "11.0.0"
    assert any("unset it" in note for note in notes)


def test_the_persons_own_mask_stays_so_that_device_can_choose_among_all() -> None:
    detection = dataclasses.replace(WITH_RADEON.detection, mask={"ROCR_VISIBLE_DEVICES": "1"})
    machine = dataclasses.replace(WITH_RADEON, detection=detection)
    environ, notes = environment(machine, {"ROCR_VISIBLE_DEVICES": "0,1"})
    assert environ["ROCR_VISIBLE_DEVICES"] == "0,1"
    assert notes == []


# -- the whole way, with real processes ----------------------------------------------------------


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What start.py needs of the repository, under a path with spaces, set up with a fake."""
    root = tmp_path / "my pictures" / "sdamd (new)"
    for part in ("scripts", "sdamd/hardware"):
        shutil.copytree(ROOT / part, root / part, ignore=shutil.ignore_patterns("__pycache__"))
    for part in ("sdamd/__init__.py", "sdamd/errors.py", "pyproject.toml"):
        shutil.copy(ROOT / part, root / part)
    return root


def fake_environment(root: Path) -> None:
    """An environment whose interpreter is a script that tells what it was given."""
    python = root / ".venv/bin/python"
    make_environment(root / ".venv")
    python.write_text(f'#!{shutil.which("sh")}\nprintf "[%s]" "$@"\npwd\nexit 7\n')
    python.chmod(0o755)
    stamp = build_venv.wanted_stamp(look().build, ())
    build_venv.write_stamp(root / ".venv", dataclasses.replace(stamp, root=str(root)))


def start_in(root: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(root / "scripts/start.py"), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands for the interpreter")
def test_arguments_folder_and_status_pass_through(clone: Path, tmp_path: Path) -> None:
    fake_environment(clone)
    done = start_in(clone, tmp_path, "generate", "a hill; rm -rf $HOME", "--seed", "1")
    assert done.stdout == (
        f"[-P][-m][sdamd][generate][a hill; rm -rf $HOME][--seed][1]{tmp_path.resolve()}\n"
    )
    assert done.returncode == 7
    assert done.stderr == ""


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands for the interpreter")
def test_a_second_run_neither_writes_nor_starts_anything_else(clone: Path) -> None:
    fake_environment(clone)
    before = {path: path.stat().st_mtime_ns for path in (clone / ".venv").rglob("*")}
    start_in(clone, clone)
    assert {path: path.stat().st_mtime_ns for path in (clone / ".venv").rglob("*")} == before


def test_setup_only_stops_before_sdamd(clone: Path) -> None:
    fake_environment(clone)
    done = start_in(clone, clone, "--setup-only", "generate", "x")
    assert (done.returncode, done.stdout) == (0, "")


def test_dry_run_of_a_path_with_spaces_can_be_given_to_a_shell(clone: Path) -> None:
    done = start_in(clone, clone.parent, "--dry-run", "--root", str(MACHINES / "rx9070xt"))
    commands = [shlex.split(line) for line in done.stdout.splitlines() if not line.startswith("#")]
    assert commands[0][-3:] == ["-m", "venv", str(clone / ".venv")]
    assert commands[2][-2:] == ["-e", str(clone)]
    assert not (clone / ".venv").exists()


def test_detection_and_set_up_import_nothing_that_is_installed(clone: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-S", str(clone / "scripts/start.py"), "--dry-run"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_dry_run_survives_a_reader_that_stops(clone: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, str(clone / "scripts/start.py"), "--dry-run"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert done.stderr == ""


def test_wait_for_returns_the_status_of_the_child() -> None:
    command = [sys.executable, "-c", "import sys; sys.exit(3)"]
    assert set_up.wait_for(command, os.environ) == 3


@pytest.fixture
def unreachable(tmp_path: Path) -> dict[str, str]:
    """An environment in which pip can reach nothing."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("PIP_")}
    return kept | {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_RETRIES": "0",
        "PIP_NO_CACHE_DIR": "1",
        "PIP_FIND_LINKS": str(tmp_path),
    }


def test_a_real_pip_without_a_network_says_so(
    venv: Path, unreachable: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(HardwareError, match="is there a network") as caught:
        prepare(venv, build_venv.run, environ=unreachable)
    assert "torch==2.13.0" in str(caught.value)
    log = re.search(r"\((.*setup\.log)\)", str(caught.value))
    assert log
    assert Path(log[1]).stat().st_size > 0
    assert capfd.readouterr().out == ""


# -- every check ---------------------------------------------------------------------------------


def test_pytest_is_the_last_check() -> None:
    commands = checks.checks(Path("/x/bin/python"), ["-m", "not slow"])
    assert list(commands) == ["ruff check", "ruff format", "mypy", "lint-imports", "pytest"]
    assert commands["pytest"][-2:] == ["-m", "not slow"]


def python_command(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_all_checks_run_although_one_fails(capfd: pytest.CaptureFixture[str]) -> None:
    commands = {
        "first": python_command("raise SystemExit(2)"),
        "second": ["/nowhere/tool"],
        "last": python_command("print('3 passed')"),
    }
    assert checks.run_all(commands, os.environ) == 1
    lines = capfd.readouterr().out.splitlines()
    assert "0 of 2 passed before last" in lines
    assert any(line.startswith("--- first FAILED with status 2 in ") for line in lines)
    assert lines[-1] == "failed: first, second"


@pytest.mark.parametrize("status", [0, 1])
def test_the_last_line_of_the_output_is_pytests(
    status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    commands = {
        "first": python_command(""),
        "last": python_command(f"print('=== summary ==='); raise SystemExit({status})"),
    }
    assert checks.run_all(commands, os.environ) == status
    assert capfd.readouterr().out.splitlines()[-1] == "=== summary ==="


def test_ci_runs_the_one_command_and_nothing_else() -> None:
    lines = (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert lines[-1] == "exec python3 scripts/test.py"
    assert os.access(ROOT / ".ci/run", os.X_OK)

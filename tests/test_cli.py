"""The command line as a person meets it: real processes wherever the process matters."""

import io
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from sdamd import cli, gallery, models
from sdamd.request import SEED_MAX

ROOT = Path(__file__).parents[1]
MACHINES = ROOT / "tests/data/machines"
HEAVY = ("torch", "diffusers", "transformers", "accelerate", "gradio", "onnxruntime", "numpy",
         "huggingface_hub", "safetensors")  # fmt: skip


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No settings of the person who runs the tests; and logging as it was before."""
    for name in [name for name in os.environ if name.startswith("SDAMD_")]:
        monkeypatch.delenv(name)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def environment(home: Path) -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith("SDAMD_")}
    return kept | {"SDAMD_HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def start(
    home: Path, *arguments: str, python: Sequence[str] = (), prefix: Sequence[str] = ()
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*prefix, sys.executable, *python, "-m", "sdamd", *arguments],
        cwd=ROOT,
        env=environment(home),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        start_new_session=True,
    )


def run(
    home: Path, *arguments: str, python: Sequence[str] = (), prefix: Sequence[str] = ()
) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a real process."""
    with start(home, *arguments, python=python, prefix=prefix) as process:
        out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def problems(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    """Exit status and what is said, of a command that must not print a result."""
    status = cli.main(arguments)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert all(line.startswith("sdamd: ") for line in lines)
    return status, [line.removeprefix("sdamd: ") for line in lines]


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# -- what answers at once ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        ["--help"],
        ["--version"],
        ["generate", "--help"],
        ["plan", "a castle", "--json"],
        ["plan", "--family", "sdxl", "--gpu", "RX 6600"],
        ["doctor", "--json"],
        ["models", "list"],
    ],
    ids=" ".join,
)
def test_what_needs_no_model_imports_nothing_heavy(command: list[str], home: Path) -> None:
    status, out, err = run(home, *command, python=["-X", "importtime"])
    imported = {line.rpartition("|")[2].strip() for line in err.splitlines() if "|" in line}
    assert "sdamd.cli" in imported
    assert {name for name in imported if name.partition(".")[0] in HEAVY} == set()
    assert status == 0
    assert out


# -- wrong requests ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--width", "0"], "width is 0; allowed 64 to 16384"),
        (["--width", "100000"], "width is 100000; allowed 64 to 16384"),
        (["--steps", "0"], "steps is 0; allowed 1 to 150"),
        (["--guidance-scale", "nan"], "guidance_scale is nan; allowed 1 to 50"),
        (["--seed=-1"], "seed is -1; allowed 0 to 2**64-1"),
        (["--seed", str(2**64)], f"seed is {2**64}; allowed 0 to 2**64-1"),
        (["--set", "prmpt=x"], "field 'prmpt' is not known; the nearest: prompt"),
        (["--set", "x"], "--set is 'x'; allowed is FIELD=VALUE"),
        (["--scheduler", "Eular"], "scheduler 'Eular' is not known; the nearest: Euler"),
        (["--scheduler", "LCM", "--steps", "51"], "steps is 51; LCM allows 1 to 50"),
        (["--dtype", "float16", "--device", "cpu"], "dtype is float16; allowed on the CPU are"),
        (["--dtype", "half"], "dtype is 'half'; allowed auto, float32, float16, bfloat16"),
        (["--device", "gpu"], "device is gpu; allowed auto, cpu"),
        (["--device", "99"], "device is 99; allowed auto, cpu"),
        (["--batch-size", "65"], "batch_size is 65; allowed 0 (automatic) to 64"),
        (["--filename", "[sead]"], None),
        (["--checkpoint", "nothing"], "checkpoint 'nothing' is not known: "),
        (["--from-image", "/nowhere.png"], None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_request_is_told_and_nothing_is_written(
    capsys: pytest.CaptureFixture[str], home: Path, flags: list[str], said: str | None
) -> None:
    status, (problem, *more) = problems(capsys, "generate", "x", "--home", str(home), *flags)
    assert status == (4 if "--from-image" in flags else 2)
    assert more == []
    if said is not None:
        assert problem.startswith(said)
    assert not home.exists() or tree(home) == ["outputs"]


def test_everything_wrong_is_told_in_one_message(
    capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    status, said = problems(
        capsys, "generate", "x" * 100_000, "--home", str(home), "--width", "0", "--height", "1001",
        "--steps", "many", "--seed=-1", "--scheduler", "Eular", "--dtype", "half", "--set", "a=b",
        "--set", "c", "--filename", "[sead]",
    )  # fmt: skip
    assert status == 2
    assert [line.partition(" ")[0] for line in said] == [
        "--set", "field", "prompt", "width", "height", "steps", "seed", "scheduler", "dtype",
    ]  # fmt: skip
    assert sum(map(len, said)) < 1500


def test_a_hub_id_is_not_fetched_where_that_is_forbidden(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    status, out, err = run(home, "generate", "x", "--checkpoint", "owner/name")
    assert (status, out) == (2, "")
    assert err.startswith("sdamd: owner/name is not in ")
    assert len(err.splitlines()) == 1


def test_an_unknown_flag_ends_with_2(home: Path) -> None:
    status, out, err = run(home, "generate", "x", "--stepps", "5")
    assert (status, out) == (2, "")
    assert "--stepps" in err
    assert "Traceback" not in err


def test_flags_are_not_guessed_from_their_beginning(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["generate", "x", "--step", "5", "--home", str(home)])
    assert "unrecognized arguments: --step" in capsys.readouterr().err


# -- refused checkpoints -------------------------------------------------------------------------

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 4265146304\n" % (b"a" * 64)


def truncated() -> bytes:
    header = {"a": {"dtype": "F32", "shape": [100], "data_offsets": [0, 400]}}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"\0" * 100


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.safetensors", LFS, "is a Git LFS pointer"),
        ("a.safetensors", b"<!DOCTYPE html><html>" + b" " * 500, "is an HTML page, not a model"),
        ("a.safetensors", truncated(), "is cut off: 100 of 400 bytes"),
        ("a.safetensors", b"", "is empty (0 bytes)"),
        ("a.ckpt", b"\x80\x02cos\nsystem\n(S'touch pwned'\ntR.", "is by its suffix a pickle"),
        ("a.safetensors", b"PK\x03\x04" + b"\0" * 100, "a pickle, which can run any code"),
    ],
)
def test_a_file_that_is_no_model_is_refused(
    home: Path, tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    model = tmp_path / name
    model.write_bytes(content)
    status, out, err = run(home, "generate", "x", "--checkpoint", str(model))
    assert (status, out) == (2, "")
    assert err.startswith(f"sdamd: {model} ")
    assert said in err
    assert len(err.splitlines()) == 1
    assert not home.exists()


# -- storage -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("/proc/version/pictures", "a part of the path is a file, not a folder"),
        ("/proc/pictures", "there is no such folder"),
        ("/nowhere/\0", "the path holds a letter that no path may hold"),
        ("/" + "x" * 300, "the name is too long for the file system"),
    ],
    ids=["below a file", "in /proc", "NUL", "too long"],
)
def test_an_output_folder_that_cannot_be_ends_with_4(
    capsys: pytest.CaptureFixture[str], home: Path, output: str, said: str
) -> None:
    status, (problem,) = problems(
        capsys, "generate", "x", "--home", str(home), "--output", output, "--device", "cpu"
    )
    assert status == 4
    assert problem.startswith("pictures cannot be saved in ")
    assert problem.endswith(said)
    assert not home.exists()


def can_mount() -> bool:
    unshare = shutil.which("unshare")
    if unshare is None:
        return False
    mount = [unshare, "-rm", "sh", "-c", "mount -t tmpfs none /tmp"]
    return subprocess.run(mount, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("ro", "the file system is read-only"),
        ("size=1m", "the disk has 1.0 MiB free; needed are at least 16.0 MiB"),
    ],
)
def test_a_read_only_or_full_disk_ends_with_4(
    home: Path, tmp_path: Path, options: str, said: str
) -> None:
    if not can_mount():
        pytest.skip("needs the right to mount in a namespace of its own")
    mount = f'mount -t tmpfs -o {options} none "$0" && exec "$@"'
    status, out, err = run(
        home, "generate", "x", "--output", str(tmp_path),
        prefix=["unshare", "-rm", "sh", "-c", mount, str(tmp_path)],
    )  # fmt: skip
    assert (status, out) == (4, "")
    assert err == f"sdamd: pictures cannot be saved in {tmp_path}: {said}\n"


# -- plan ----------------------------------------------------------------------------------------


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    status = cli.main([*arguments, "--json"])
    captured = capsys.readouterr()
    assert captured.err == ""
    return status, json.loads(captured.out)


def test_a_plan_has_the_keys_that_tools_rely_on(
    capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    status, plan = printed(
        capsys, "plan", "--family", "sdxl", "--gpu", "RX 6600", "--home", str(home)
    )
    assert status == 0
    assert plan["verdict"] == "slower"
    assert plan["peak_bytes"] == max(plan["stages"].values()) <= plan["budget_bytes"]
    assert plan["stages"].keys() >= {"text", "denoise", "decode"}
    assert plan["choices"].keys() >= {
        "dtype", "attention", "offload", "vae_tile", "denoise_tile", "batch"
    }  # fmt: skip
    assert all(isinstance(reason, str) for reason in plan["reasons"])
    assert plan["seconds"] == pytest.approx(sum(plan["stage_seconds"].values()), abs=0.01)
    assert plan["nearest"] is None
    assert (plan["gpu"]["gfx"], plan["gpu"]["name"]) == ("gfx1032", "Radeon RX 6600")
    assert plan["gpu"]["vram_bytes"] == 8 * 2**30
    assert not home.exists()


def test_what_does_not_fit_ends_with_3_and_the_nearest_that_does(
    capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    big = ["plan", "--family", "sd15", "--gpu", "gfx1100:8", "--home", str(home)]
    big += ["--budget", "0.75", "--denoise-tile", "0"]
    status, plan = printed(capsys, *big, "--width", "4096", "--height", "2048")
    assert (status, plan["verdict"]) == (3, "does not fit")
    assert plan["nearest_settings"] is None
    near = plan["nearest"]
    again, smaller = printed(
        capsys, *big, "--width", str(near["width"]), "--height", str(near["height"])
    )
    assert (again, smaller["verdict"]) == (0, "slower")


def test_a_budget_is_in_gib(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    common = ["plan", "--family", "sdxl", "--gpu", "RX 7900 XTX", "--home", str(home)]
    _, plan = printed(capsys, *common, "--budget", "6.5")
    assert plan["budget_bytes"] == 6.5 * 2**30
    status, said = problems(capsys, *common, "--budget", "lots")
    assert (status, said) == (2, ["budget is 'lots'; allowed 0.25 to 1024"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--family", "sdx"], "family 'sdx' is not known; the nearest: sdxl"),
        (["--family", "tiny"], "family 'tiny' is not known"),
        (["--gpu", "RX 580:12"], "Radeon RX 580 is asked for with 12 GiB; it was sold with 4 or 8"),
    ],
)
def test_a_plan_for_what_does_not_exist_is_refused(
    capsys: pytest.CaptureFixture[str], home: Path, flags: list[str], said: str
) -> None:
    status, (problem,) = problems(capsys, "plan", "--home", str(home), *flags)
    assert status == 2
    assert problem.startswith(said)


def test_a_plan_in_words(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    assert cli.main(["plan", "--family", "sd15", "--gpu", "gfx1030:4", "--home", str(home)]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "512 x 512, 1 at a time, on gfx1030: fits"
    assert [line.split()[0] for line in rest[:3]] == ["text", "denoise", "decode"]
    assert any("to fit" in line for line in rest)


def test_the_plan_of_the_embedded_model_is_for_this_machine(
    capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    status, plan = printed(capsys, "plan", "a castle", "--home", str(home), "--device", "cpu")
    assert status == 0
    assert plan["gpu"] == {"kind": "cpu", "name": "CPU"}
    assert 0 < plan["peak_bytes"] < plan["budget_bytes"]
    assert 0 < plan["seconds"] < 60


def test_a_card_with_a_known_speed_gets_a_time(
    capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    assert cli.main(["plan", "--family", "sdxl", "--gpu", "RX 6600", "--home", str(home)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert re.fullmatch(
        r"1024 x 1024, 1 at a time, on Radeon RX 6600: slower, about [0-9.]+ s a picture", first
    )


def test_the_grid_of_a_card_is_printed_or_given_as_json(
    capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    asked = ["plan", "--family", "sd15", "--gpu", "RX 6600", "--table", "--home", str(home)]
    assert cli.main(asked) == 0
    heading, columns, *rows = capsys.readouterr().out.splitlines()
    assert heading == "Stable Diffusion 1.x on Radeon RX 6600, 25 steps"
    assert columns.split()[:3] == ["pixels", "batch", "1"]
    assert rows[0].split()[:3] == ["512", "x", "512"]
    status, shown = printed(capsys, *asked)
    assert status == 0
    assert shown["gpu"]["name"] == "Radeon RX 6600"
    assert {cell["batch"] for cell in shown["table"]} == {1, 2, 4, 8, 16}


def test_memory_flags_reach_the_plan(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    common = ["plan", "--family", "sdxl", "--gpu", "RX 7900 XTX", "--home", str(home)]
    _, plan = printed(capsys, *common, "--vram-mode", "minimal", "--vae-tile", "512")
    assert (plan["choices"]["offload"], plan["choices"]["vae_tile"]) == ("stream", 512)
    _, plan = printed(capsys, *common, "--vram-budget-gb", "60", "--vram-reserve-gb", "1")
    assert plan["budget_bytes"] == 59 * 2**30
    assert any("60.0 GiB is above the 24.0 GiB" in reason for reason in plan["reasons"])


# -- doctor, models, meta ------------------------------------------------------------------------


def test_the_doctor_reads_a_recorded_machine(capsys: pytest.CaptureFixture[str]) -> None:
    root = MACHINES / "rx7900xtx"
    status, found = printed(capsys, "doctor", "--root", str(root), "--platform", "linux")
    assert status == (3 if any(f["severity"] == "fault" for f in found["findings"]) else 0)
    expected = json.loads((root / "expected.json").read_text("utf-8"))
    for gpu, wanted in zip(found["gpus"], expected["gpus"], strict=True):
        assert gpu.items() >= wanted.items()
    assert found["selected"] == 0
    assert isinstance(found["mask"], dict)
    assert [rung["name"] for rung in found["rungs"]] == [
        "pci", "driver", "kfd", "rights", "runtime", "torch", "kernels",
    ]  # fmt: skip


def doctored(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The doctor's status and words about a recorded machine on which all is well."""
    root = str(MACHINES / "rx7800xt-raphael")
    status = cli.main(["doctor", "--root", root, "--platform", "linux", *arguments])
    return status, capsys.readouterr().out


def test_the_doctor_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    status, out = doctored(capsys)
    assert status == 0
    assert out.startswith("No fault found: sdamd draws on Radeon RX 7800 XT (not known yet: ")
    assert "\n* 0: Radeon RX 7800 XT, gfx1101, 16.0 GiB\n" in out
    assert "  sdamd sets ROCR_VISIBLE_DEVICES=0 for itself" in out


@pytest.mark.report("B14")
def test_a_fault_ends_the_doctor_with_3(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_HIP_ALLOC_CONF", "max_split_size_mb:128,expandable_segments:True")
    status, out = doctored(capsys)
    assert status == 3
    assert out.startswith("Fault: PYTORCH_HIP_ALLOC_CONF=")
    assert "   fix:    unset PYTORCH_HIP_ALLOC_CONF\n" in out


def test_the_doctor_explains_a_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, out = doctored(capsys, "--explain", "HIP out of memory. Tried to allocate 9.00 GiB")
    assert status == 3
    assert "(rule 26)" in out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"my cat\xff sat on it\n")))
    status, out = doctored(capsys, "--explain", "-")
    assert status == 0
    assert out.startswith("No rule knows this text.\n")


def test_the_doctor_writes_a_report_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "report.txt"
    status, out = doctored(capsys, "--report", str(file))
    assert (status, out) == (0, f"{file}\n")
    before = file.read_text("utf-8")
    assert "Radeon RX 7800 XT" in before
    assert doctored(capsys, "--report", str(file))[0] == 2
    assert file.read_text("utf-8") == before


def test_a_root_that_is_not_there_is_a_wrong_request(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    root = str(tmp_path / "nothing")
    status, (problem,) = problems(capsys, "doctor", "--root", root)
    assert (status, problem) == (2, f"root is {root!r}; allowed is a folder that is there")


@pytest.mark.report("A32")
@pytest.mark.skipif(sys.platform == "win32", reason="ends by a signal")
def test_a_torch_that_aborts_is_a_finding_and_no_crash(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A32: a torch whose files tell no version is asked, and only the child dies."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(
        "import os\nclass cuda:\n    is_available = staticmethod(os.abort)\n", encoding="utf-8"
    )
    root = str(MACHINES / "rx7900xtx")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    status, out, err = run(home, "doctor", "--root", root, "--platform", "linux")
    assert (status, err) == (3, "")
    assert "SIGABRT (exit -6)" in out


def test_models_are_listed_with_the_embedded_one_first(
    capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    assert cli.main(["models", "list", "--home", str(home)]) == 0
    assert capsys.readouterr().out.startswith("embedded\tsmall Stable Diffusion model\t")


def test_a_record_that_is_not_there_ends_with_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "plain.png")
    status, (problem,) = problems(capsys, "meta", "show", str(tmp_path / "plain.png"))
    assert status == 2
    assert problem.endswith("there is no record of how the picture was made")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no broken pipes")
def test_a_reader_that_has_gone_is_no_traceback(home: Path) -> None:
    process = start(home, "plan", "--json")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 1


# -- pictures ------------------------------------------------------------------------------------


def pixels(path: str | Path) -> bytes:
    with Image.open(path) as image:
        return image.convert("RGB").tobytes()


@dataclass(frozen=True, kw_only=True)
class Finished:
    home: Path
    output: Path
    status: int
    out: str
    err: str

    @property
    def paths(self) -> list[Path]:
        return [Path(line) for line in self.out.splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Two pictures by a real process with a real worker, in a folder with an odd name."""
    home = tmp_path_factory.mktemp("data")
    output = home / "Bilder, größer 画 🏔 's"
    status, out, err = run(
        home, "generate", "a red house", "--seed", str(SEED_MAX), "--count", "2", "--steps", "2",
        "--output", str(output), "--device", "cpu",
    )  # fmt: skip
    return Finished(home=home, output=output, status=status, out=out, err=err)


def test_stdout_has_the_paths_alone_and_stderr_nothing(finished: Finished) -> None:
    assert finished.err == ""
    assert finished.status == 0
    assert len(finished.paths) == 2
    assert all(path.parent == finished.output and path.is_file() for path in finished.paths)
    left = {path for path in finished.output.iterdir() if path.name != ".sdamd-number"}
    assert left == set(finished.paths)


def test_the_largest_seed_goes_through_and_the_next_is_0(finished: Finished) -> None:
    """C16: seeds were rounded or clipped on their way."""
    records = [gallery.read_record(path) for path in finished.paths]
    assert [record.job.seed for record in records] == [SEED_MAX, 0]
    assert finished.paths[0].name.startswith(f"00001-{SEED_MAX}-a red house")
    assert gallery.read_texts(finished.paths[0])["parameters"].count(f"Seed: {SEED_MAX},") == 1


def test_the_picture_has_the_size_that_its_record_says(finished: Finished) -> None:
    job = gallery.read_record(finished.paths[0]).job
    with Image.open(finished.paths[0]) as image:
        assert image.size == (job.width * job.upscale, job.height * job.upscale) == (512, 512)


def test_meta_shows_the_record(finished: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    _, record = printed(capsys, "meta", "show", str(finished.paths[0]))
    assert record["job"]["seed"] == str(SEED_MAX)
    assert cli.main(["meta", "show", str(finished.paths[0])]) == 0
    assert capsys.readouterr().out.startswith("a red house\nSteps: 2, Sampler: ")


def test_from_image_makes_the_same_pixels_again_and_json_tells_every_event(
    finished: Finished,
) -> None:
    """Also one that was made together with others, which rounds differently from one alone."""
    assert gallery.read_record(finished.paths[0]).together == 2
    status, out, err = run(
        finished.home, "generate", "--from-image", str(finished.paths[0]), "--json",
        "--filename", "again-[seed]", "--device", "cpu",
    )  # fmt: skip
    assert (status, err) == (0, "")
    events = [json.loads(line) for line in out.splitlines()]
    assert [event["event"] for event in events] == ["started", "step", "step", "saved"]
    assert {(event["index"], event["seed"]) for event in events} == {(0, str(SEED_MAX))}
    assert events[0]["plan"]["verdict"] == "fits"
    assert [(event["step"], event["steps"]) for event in events[1:3]] == [(1, 2), (2, 2)]
    again = Path(events[3]["path"])
    assert again == finished.home / "outputs" / f"again-{SEED_MAX}.png"
    assert pixels(again) == pixels(finished.paths[0])


def test_a_flag_goes_before_the_record_of_the_picture(
    finished: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    status, plan = printed(
        capsys, "plan", "--from-image", str(finished.paths[0]), "--width", "256", "--device", "cpu"
    )
    assert status == 0
    assert plan["stages"]["decode"] > 0


@pytest.fixture(scope="module")
def broken_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with a decoder that gives NaN."""
    folder = tmp_path_factory.mktemp("models") / "broken"
    shutil.copytree(models.EMBEDDED, folder)
    weights = folder / "vae/diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    tensors["decoder.conv_out.bias"] = tensors["decoder.conv_out.bias"] * float("nan")
    save_file(tensors, weights)
    return folder


def test_pictures_of_nan_are_never_saved_and_end_with_1(
    broken_model: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """C01: a model that gives NaN left black pictures and exit status 0."""
    common = ["generate", "x", "--home", str(home), "--checkpoint", str(broken_model),
              "--steps", "1", "--seed", "5", "--count", "2", "--device", "cpu",
              "--in-process"]  # fmt: skip
    assert cli.main(common) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-2:] == [
        "sdamd: picture 1 (seed 5): the picture is NaN or infinite",
        "sdamd: picture 2 (seed 6): the picture is NaN or infinite",
    ]
    assert cli.main([*common, "--json"]) == 1
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in events] == [*["started"] * 2, "step", *["failed"] * 2]
    assert events[-1] == {
        "event": "failed", "index": 1, "seed": "6", "error": "the picture is NaN or infinite",
    }  # fmt: skip
    assert tree(home / "outputs") == []


# -- the end of the process ----------------------------------------------------------------------


def until_first_saved(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """Read events until a picture is saved and the next one is on its way."""
    assert process.stdout is not None
    events: list[dict[str, Any]] = []
    for line in process.stdout:
        events.append(json.loads(line))
        names = [event["event"] for event in events]
        if "saved" in names and names[-1] == "step":
            return events
    assert process.stderr is not None
    pytest.fail(process.stderr.read())


def children(pid: int) -> dict[int, str]:
    """The command lines of a process's children, by their ids."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split():
        found[int(child)] = Path(f"/proc/{child}/cmdline").read_bytes().decode().replace("\0", " ")
    return found


def ended(pids: Sequence[int]) -> bool:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the worker in /proc")
def test_a_worker_that_aborts_and_a_person_who_interrupts(tmp_path: Path) -> None:
    """C18 and Ctrl-C, at the same time since most of it is waiting for two models to load.

    Ctrl-C reaches every process of the terminal's group; the worker must leave it to its parent.
    """
    homes = [tmp_path / "abort", tmp_path / "interrupt"]
    processes = [
        start(home, "generate", "x", "--seed", "1", "--count", "50", "--batch-size", "1",
              "--steps", "12", "--upscale", "1", "--json", "--device", "cpu")
        for home in homes
    ]  # fmt: skip
    aborted, interrupted = processes
    try:
        for process in processes:
            until_first_saved(process)
        family = [children(process.pid) for process in processes]
        (worker,) = (pid for pid, line in family[0].items() if "spawn_main" in line)
        os.kill(worker, signal.SIGABRT)
        os.killpg(interrupted.pid, signal.SIGINT)
        (aborted_out, aborted_err), (interrupted_out, interrupted_err) = (
            process.communicate(timeout=120) for process in processes
        )
    finally:
        for process in processes:
            process.kill()

    assert aborted.returncode == 3
    (said,) = aborted_err.splitlines()
    assert said.startswith("sdamd: the process that renders has died (SIGABRT); pictures that are ")

    assert interrupted.returncode == 130
    assert "Traceback" not in interrupted_err
    assert re.search(
        r"^sdamd: stopped; [1-9]\d* of 50 pictures are saved$", interrupted_err, re.MULTILINE
    )

    for home, family_of in zip(homes, family, strict=True):
        names = tree(home / "outputs")
        assert [name for name in names if not name.endswith(".png")] == [".sdamd-number"]
        for name in names:
            if name.endswith(".png"):
                assert len(pixels(home / "outputs" / name)) == 128 * 128 * 3
        assert ended(list(family_of))
    for out in (aborted_out, interrupted_out):
        assert all(isinstance(json.loads(line), dict) for line in out.splitlines())


def test_progress_is_drawn_on_a_terminal_and_paths_go_to_stdout(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert cli.main(["generate", "x", "--home", str(home), "--steps", "2", "--upscale", "1",
                     "--device", "cpu", "--in-process"]) == 0  # fmt: skip
    (path,) = capsys.readouterr().out.splitlines()
    assert Path(path).is_file()
    drawn = terminal.getvalue()
    assert "picture 1 of 1" in drawn
    assert drawn.endswith(" \r")

"""The container, as far as that goes without an engine: read, linted, and its RUN lines run."""

import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from sdamd.hardware.runtime import CPU_TORCH, PYTORCH_INDEX

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
COMPOSE: Mapping[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: Mapping[str, Any] = COMPOSE["services"]
IMAGES = re.compile(r"(rocm/pytorch|python):(?!latest)[\w.-]*\d[\w.-]*")
NO_INDEX = re.compile(r"NewConnectionError|ConnectTimeout|NameResolutionError|ProxyError")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One instruction of a Dockerfile, its continued lines joined."""

    word: str
    rest: str


def parse(text: str) -> dict[str, list[Line]]:
    """The lines of each stage by its name; those before the first FROM are under an empty one."""
    text = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    stages: dict[str, list[Line]] = {"": []}
    stage = ""
    for joined in re.sub(r"\\\n\s*", "", text).splitlines():
        word, _, rest = joined.partition(" ")
        if word == "FROM":
            stage = rest.partition(" AS ")[2]
            stages[stage] = []
        if word:
            stages[stage].append(Line(word=word, rest=rest.strip()))
    return stages


STAGES = parse(DOCKERFILE)


def test_the_parser_joins_lines_and_leaves_out_comments() -> None:
    text = "ARG A=1\nFROM x:1 AS one\n# RUN no\nRUN a \\\n    && b\n\nFROM y:2 AS two\nUSER c\n"
    assert parse(text) == {
        "": [Line(word="ARG", rest="A=1")],
        "one": [Line(word="FROM", rest="x:1 AS one"), Line(word="RUN", rest="a && b")],
        "two": [Line(word="FROM", rest="y:2 AS two"), Line(word="USER", rest="c")],
    }


# -- what is written -----------------------------------------------------------------------------


def test_there_is_a_stage_for_each_engine_and_one_that_stands_on_either() -> None:
    assert list(STAGES) == ["", "base-rocm", "base-cpu", "sdamd"]
    assert STAGES["sdamd"][0].rest == "base-${ENGINE} AS sdamd"
    engines = {service["build"]["args"]["ENGINE"] for service in SERVICES.values()}
    assert {f"base-{engine}" for engine in engines} == {"base-rocm", "base-cpu"}


def test_images_have_a_version_and_are_never_the_latest() -> None:
    for stage in ("base-rocm", "base-cpu"):
        assert IMAGES.fullmatch(STAGES[stage][0].rest.partition(" AS ")[0])
    assert "latest" not in DOCKERFILE + (ROOT / "compose.yaml").read_text(encoding="utf-8")
    tags = {service["image"] for service in SERVICES.values()}
    assert tags == {"sdamd:rocm", "sdamd:cpu"}


def test_the_cpus_torch_is_that_of_the_table() -> None:
    (install,) = (line.rest for line in STAGES["base-cpu"] if "pip install" in line.rest)
    assert f"torch=={CPU_TORCH}" in install.split()
    assert Line(word="ARG", rest=f"TORCH_INDEX={PYTORCH_INDEX}/cpu") in STAGES["base-cpu"]


def test_it_runs_as_a_person_and_not_as_root() -> None:
    users = [line.rest for line in STAGES["sdamd"] if line.word == "USER"]
    assert users == ["${UID}:${GID}"]
    assert Line(word="ARG", rest="UID=1000") in STAGES["sdamd"]


def test_models_pictures_and_caches_outlive_the_container() -> None:
    (volumes,) = (line.rest for line in STAGES["sdamd"] if line.word == "VOLUME")
    kept = set(yaml.safe_load(volumes))
    assert kept == {"/data/models", "/data/outputs", "/data/cache"}
    assert Line(word="ENV", rest="SDAMD_HOME=/data") in STAGES["sdamd"]
    assert Line(word="ENV", rest="HF_HOME=${SDAMD_HOME}/cache/huggingface") in STAGES["sdamd"]
    for service in SERVICES.values():
        assert {volume["target"] for volume in service["volumes"]} == kept


def test_a_folder_that_is_missing_is_not_made_as_root() -> None:
    for service in SERVICES.values():
        binds = [volume for volume in service["volumes"] if volume["type"] == "bind"]
        assert [volume["bind"] for volume in binds] == [{"create_host_path": False}] * 2


def test_the_rocm_service_has_exactly_the_flags_that_rocm_needs() -> None:
    """Source: AMD's instructions for its images, with the groups as numbers."""
    service = SERVICES["rocm"]
    assert service["devices"] == ["/dev/kfd", "/dev/dri"]
    assert service["security_opt"] == ["seccomp=unconfined"]
    assert service["cap_add"] == ["SYS_PTRACE"]
    assert (service["ipc"], service["shm_size"]) == ("host", "8gb")
    groups = [re.fullmatch(r"\$\{(\w+):-(\d+)\}", group) for group in service["group_add"]]
    assert [group[1] for group in groups if group] == ["VIDEO_GID", "RENDER_GID"]
    assert "privileged" not in service


def test_the_cpu_service_asks_for_no_device_and_no_right() -> None:
    asked = {"devices", "security_opt", "cap_add", "ipc", "group_add", "privileged"}
    assert not asked & SERVICES["cpu"].keys()


@pytest.mark.parametrize("name", SERVICES)
def test_the_ui_is_reached_from_this_machine_alone(name: str) -> None:
    """In the host's network the UI's own rule holds: it listens on 127.0.0.1 and nowhere else."""
    service = SERVICES[name]
    assert service["network_mode"] == "host"
    assert "ports" not in service
    assert "--host" not in " ".join(line.rest for line in STAGES["sdamd"])
    assert STAGES["sdamd"][-1] == Line(word="CMD", rest='["ui", "--no-browser"]')


def test_each_service_is_started_by_its_name_alone() -> None:
    assert {name: service["profiles"] for name, service in SERVICES.items()} == {
        "rocm": ["rocm"],
        "cpu": ["cpu"],
    }


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("hadolint is not installed here; the extra dev has it for Linux")
    done = subprocess.run(
        [hadolint, "--no-color", "--failure-threshold", "style", str(ROOT / "Dockerfile")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


# -- what is copied ------------------------------------------------------------------------------


def context() -> set[str]:
    """The names at the root that .dockerignore lets through; its last matching rule decides."""
    rules = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [rule for rule in rules if rule and not rule.startswith("#")]
    names = set()
    for path in ROOT.iterdir():
        matching = [rule for rule in rules if fnmatch(path.name, rule.lstrip("!"))]
        if not matching or matching[-1].startswith("!"):
            names.add(path.name)
    return names


def copied() -> set[str]:
    """What the Dockerfile copies."""
    return {
        name for line in STAGES["sdamd"] if line.word == "COPY" for name in line.rest.split()[:-1]
    }


def test_what_is_copied_is_what_is_let_through() -> None:
    assert copied() == context()


# -- what is run ---------------------------------------------------------------------------------


def substituted(text: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\$\{(\w+)\}", lambda match: values[match[1]], text)


@dataclass(kw_only=True)
class Build:
    """Runs a stage's RUN lines with /bin/sh as a builder does, in `folder` instead of the root.

    `given` take the place of ARG and ENV lines of their names.
    """

    folder: Path
    given: Mapping[str, str]
    environ: dict[str, str]

    def stage(self, name: str) -> Iterator[tuple[str, subprocess.CompletedProcess[str]]]:
        workdir = self.folder
        for line in STAGES[name]:
            if line.word in {"ARG", "ENV"}:
                variable, _, value = line.rest.partition("=")
                value = substituted(value.strip('"'), self.environ)
                self.environ[variable] = self.given.get(variable, value)
            elif line.word == "WORKDIR":
                workdir = self.folder / line.rest.lstrip("/")
                workdir.mkdir(parents=True, exist_ok=True)
            elif line.word == "COPY":
                copy(line.rest.split(), workdir)
            elif line.word == "RUN":
                yield (
                    line.rest,
                    subprocess.run(
                        ["/bin/sh", "-c", line.rest],
                        cwd=workdir,
                        env=self.environ,
                        stdin=subprocess.DEVNULL,
                        capture_output=True,
                        text=True,
                        check=False,
                    ),
                )


def copy(words: Sequence[str], workdir: Path) -> None:
    *names, target = words
    for name in names:
        if (ROOT / name).is_dir():
            # Weights would only be packed and unpacked.
            ignored = shutil.ignore_patterns("__pycache__", "*.safetensors")
            shutil.copytree(ROOT / name, workdir / target, ignore=ignored, dirs_exist_ok=True)
        else:
            shutil.copy(ROOT / name, workdir / target / name)


def fake_tools(folder: Path) -> Path:
    """Programs that change the users of a system: here they only say what they were asked."""
    folder.mkdir()
    for name in ("groupadd", "useradd"):
        (folder / name).write_text(f'#!/bin/sh\necho {name} "$@"\n', encoding="utf-8")
        (folder / name).chmod(0o755)
    return folder


def fake_torch(folder: Path, version: str, hip: str | None) -> Path:
    """A torch that is installed as far as Python and pip can tell."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch/__init__.py").write_text(
        f"__version__ = {version!r}\nclass version:\n    hip = {hip!r}\n", encoding="utf-8"
    )
    about = folder / f"torch-{version}.dist-info"
    about.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
    (about / "METADATA").write_text(metadata, encoding="utf-8")
    return folder


def build(tmp_path: Path, **given: str) -> Build:
    """A builder in `tmp_path`, as the person who runs the tests."""
    environ = {name: text for name, text in os.environ.items() if name != "VIRTUAL_ENV"}
    environ["PATH"] = f"{fake_tools(tmp_path / 'tools')}{os.pathsep}{os.environ['PATH']}"
    environ |= {"PIP_RETRIES": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    adapted = {"VIRTUAL_ENV": str(tmp_path / "venv"), "SDAMD_HOME": str(tmp_path / "data")}
    adapted |= {"TORCH_INDEX": "", "UID": str(os.getuid()), "GID": str(os.getgid())}
    folder = tmp_path / "root"
    folder.mkdir()
    return Build(folder=folder, given={**adapted, **given}, environ=environ)


def show_packages(builder: Build, *first: Path) -> None:
    """Let the builder's Python find `first`, then what is installed for these tests.

    So pip need not fetch gigabytes again. It resolves all the same, and fetches what builds sdamd.
    """
    packages = [path for path in sys.path if path.endswith("site-packages")]
    builder.environ["PYTHONPATH"] = os.pathsep.join([*map(str, first), *packages])


POSIX = pytest.mark.skipif(sys.platform == "win32", reason="the lines are for /bin/sh")


def outputs(builder: Build, *stages: str) -> dict[str, str]:
    """What each RUN line of the stages says; none may fail."""
    said = {}
    for stage in stages:
        for line, done in builder.stage(stage):
            if NO_INDEX.search(done.stdout + done.stderr):
                pytest.skip("pip reaches no package index, so the lines cannot be run")
            assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
            said[line] = done.stdout
    assert list(said) == [line.rest for s in stages for line in STAGES[s] if line.word == "RUN"]
    return said


@POSIX
@pytest.mark.slow
def test_every_run_line_runs_the_torch_of_the_image_stays_and_sdamd_starts(tmp_path: Path) -> None:
    """In one environment, as making it takes longest; the last step is the container's command."""
    builder = build(tmp_path)
    show_packages(builder)
    (said,) = outputs(builder, "base-cpu").values()
    assert (tmp_path / "venv/pyvenv.cfg").is_file()
    assert f"torch=={CPU_TORCH}" in said

    version = "2.9.1+rocm7.2.4.git4f61e3b1"
    show_packages(builder, fake_torch(tmp_path / "image", version, "7.2.4"))
    install = next(t for n, t in outputs(builder, "base-rocm", "sdamd").items() if "pip" in n)
    (installed,) = re.findall(r"^Successfully installed (.*)$", install, re.MULTILINE)
    assert re.fullmatch(r"sdamd-\d+\.\d+\.\d+", installed)
    satisfied = [line for line in install.splitlines() if str(tmp_path / "image") in line]
    assert any(f"({version})" in line for line in satisfied)
    assert {path.name for path in (tmp_path / "data").iterdir()} == {"models", "outputs", "cache"}

    (entry,) = (line.rest for line in STAGES["sdamd"] if line.word == "ENTRYPOINT")
    started = subprocess.run(
        [*yaml.safe_load(entry), "--version"],
        cwd=tmp_path,
        env=builder.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"sdamd {installed.removeprefix('sdamd-')}\n" == started.stdout, started.stderr


@POSIX
def test_the_rocm_image_is_not_built_on_a_torch_without_rocm(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    builder = build(tmp_path)
    show_packages(builder, fake_torch(tmp_path / "image", "2.9.1+cpu", None))
    ((_, done),) = builder.stage("base-rocm")
    assert done.returncode != 0
    assert "AssertionError: 2.9.1+cpu" in done.stderr


@POSIX
def test_the_person_in_the_image_has_the_numbers_that_were_given(tmp_path: Path) -> None:
    line, done = next(iter(build(tmp_path, UID="1234", GID="2345").stage("sdamd")))
    assert line.startswith("groupadd")
    assert done.stdout.splitlines() == [
        "groupadd --non-unique --gid 2345 sdamd",
        "useradd --non-unique --uid 1234 --gid 2345 --create-home sdamd",
    ]

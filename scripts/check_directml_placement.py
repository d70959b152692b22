"""Asks the real DirectML provider, under Wine, where it places every node of the shipped graphs.

    python -m scripts.check_directml_placement [--cache DIR] [--size LATENTS] [TITLE...]

An optional check, for Linux. A node that DirectML has no kernel for runs on the CPU, and every
step of a picture waits for it. The table of kernels says what should not happen; here the
provider itself, from the package for Windows, divides each graph. It needs no Radeon: Wine
translates Direct3D 12 to Vulkan, and Mesa computes Vulkan on the CPU. That is good for the
division, and for nothing after it: what such a device computes is wrong, and float16 it refuses.
So the graphs in float32 are asked about, whose nodes are those of the float16 ones, and each
process is ended as soon as it has said where the nodes are. No weights are needed.

What is missing is installed: Wine, Xvfb and Mesa with apt-get (as root on Debian), the packages
for Windows into a folder of the user's cache. Statuses: 0 every node is on DirectML, 1 one is not,
3 this cannot be done here, and a sentence says why.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import onnx
from onnx import TensorProto, helper
from platformdirs import user_cache_path

from sdamd.backends.onnx_export import (
    GRAPHS,
    WEIGHTS,
    Template,
    free_dimensions,
    layout,
    templates,
)
from sdamd.errors import HardwareError

DML: Final = "DmlExecutionProvider"
DEBIAN: Final = ("wine", "wine64", "xvfb", "mesa-vulkan-drivers")
WHEELS: Final = (
    # The last one for Python 3.10; the graphs are the same for 1.24.
    "onnxruntime-directml==1.23.0",
    "numpy==1.26.4",  # numpy 2 calls functions of the C library that Wine 8 lacks
    # Holds the official Python 3.10.8 for Windows as its bin/python.exe.
    "lilypond==2.25.12",
)
SECONDS: Final = 900
"""How long one graph may take."""

# What runs under Windows' Python: argv is the graph and its free dimensions.
ASK: Final = """\
import json, os, sys
sys.path.insert(0, os.path.join(os.path.dirname(sys.executable), "site"))
import onnxruntime
options = onnxruntime.SessionOptions()
options.log_severity_level = 0
options.log_verbosity_level = 1
options.enable_mem_pattern = False
options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
# Else a graph of fixed shape is one fused node by the time that it is told.
options.add_session_config_entry("ep.dml.disable_graph_fusion", "1")
for name, size in json.loads(sys.argv[2]).items():
    options.add_free_dimension_override_by_name(name, size)
providers = [("DmlExecutionProvider", {"device_id": "0"}), "CPUExecutionProvider"]
try:
    onnxruntime.InferenceSession(sys.argv[1], options, providers=providers)
except Exception as error:
    print("REFUSED " + " ".join(str(error).split()), flush=True)
"""

_PLACED: Final = re.compile(r"placed on \[(\w+)\]\. Number of nodes: (\d+)")
_NODE: Final = re.compile(r"VerifyEachNodeIsAssignedToAnEp\] {3}(\S.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the nodes of a graph are: how many per provider, and which are not on DirectML.

    `refused` is what onnxruntime said where it did not come so far.
    """

    counts: Mapping[str, int]
    elsewhere: tuple[str, ...] = ()
    refused: str = ""

    @property
    def is_good(self) -> bool:
        """Whether there are nodes and all of them are on DirectML."""
        return set(self.counts) == {DML} and not self.refused


def main(argv: Sequence[str] | None = None) -> int:
    """Ask about every graph, say the answers, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("titles", nargs="*", metavar="TITLE", help="parts of templates' titles")
    parser.add_argument(
        "--cache", type=Path, default=user_cache_path("sdamd") / "wine", help="what is kept here"
    )
    parser.add_argument("--size", type=int, default=64, help="side of the latents (default 64)")
    asked = parser.parse_args(argv)
    try:
        with wine(asked.cache.absolute()) as machine:
            machine.prove_itself()
            answers = [machine.check(template, asked.size) for template in _named(asked.titles)]
    except HardwareError as error:
        print(f"skipped: {error}")
        return 3
    good = all(answers)
    print("every node is on DirectML" if good else "NOT every node is on DirectML")
    return 0 if good else 1


def _named(titles: Sequence[str]) -> list[Template]:
    """The templates whose title holds one of `titles`, small ones first.

    Raises:
        HardwareError: there are none.
    """
    found = [t for t in templates() if not titles or any(part in t.title for part in titles)]
    if not found:
        raise HardwareError("no shipped graph is called so")
    return sorted(found, key=lambda t: layout(t.weights, "float32")[1])


# -- what an answer says -------------------------------------------------------------------------


def read_placement(lines: Iterator[str]) -> Placement:
    """Read onnxruntime's log up to where it has said where each node is.

    With log level 0 it says so once, after the graph is divided and before any weight is read.
    """
    counts: dict[str, int] = {}
    elsewhere: list[str] = []
    provider = ""
    last = ""
    for line in lines:
        if placed := _PLACED.search(line):
            provider = placed[1]
            counts[provider] = int(placed[2])
        elif node := _NODE.search(line):
            if provider != DML:
                elsewhere.append(node[1].strip())
        elif counts:
            return Placement(counts=counts, elsewhere=tuple(elsewhere))
        elif line.startswith("REFUSED "):
            return Placement(counts={}, refused=line.removeprefix("REFUSED ").strip())
        last = line.strip() or last
    return Placement(counts=counts, elsewhere=tuple(elsewhere), refused="" if counts else last)


# -- the machine ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Wine:
    """A Windows with a Python and onnxruntime, below `folder`."""

    program: str
    folder: Path
    environ: Mapping[str, str]

    def prove_itself(self) -> None:
        """Make sure that DirectML is there, and that a node without a kernel would be noticed.

        Raises:
            HardwareError: an answer is not what it must be, so that no other would mean anything.
        """
        with_kernel = self.ask(_two_nodes(self.folder, "Sigmoid", opset=18), {})
        if not with_kernel.is_good:
            raise HardwareError(f"DirectML takes not even one Sigmoid under Wine: {with_kernel}")
        without = self.ask(_two_nodes(self.folder, "Gelu", opset=20), {})
        if without.elsewhere != ("Gelu (second)",):
            raise HardwareError(f"DirectML has no kernel for Gelu-20, but was: {without}")
        print("control: Sigmoid-13 is on DirectML, Gelu-20 is seen on the CPU", flush=True)

    def check(self, template: Template, size: int) -> bool:
        """Ask about the graphs of a template at fixed sizes, and print the answers."""
        folder = self.folder / "graphs" / template.key[:16]
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / WEIGHTS).open("wb") as file:
            file.truncate(layout(template.weights, "float32")[1])  # a hole: it takes no room
        good = True
        for name in GRAPHS[template.component]:
            path = folder / f"{name}.onnx"
            path.write_bytes(template.graph(name, "float32"))
            side = 8 * size if name == "vae-encoder" else size
            # One side is no multiple of what the network halves: shapes come from other nodes then.
            for height, width in ((side, side), (side, side + (16 if side > size else 2))):
                sizes = free_dimensions(batch=2, height=height, width=width)
                placement = self.ask(path, sizes)
                good = good and placement.is_good
                print(_line(f"{template.title}: {name} at {height} x {width}", placement))
                sys.stdout.flush()
        return good

    def ask(self, path: Path, sizes: Mapping[str, int]) -> Placement:
        """Open the graph with DirectML under Wine until the nodes are placed; then end it.

        Raises:
            HardwareError: no answer came in time.
        """
        script = self.folder / "ask.py"
        script.write_text(ASK, encoding="utf-8")
        command = [self.program, str(self.folder / "python" / "python.exe"), "-I"]
        command += [windows_path(script), windows_path(path), json.dumps(dict(sizes))]
        # Wine's Python takes no file for stdout, and no terminal for stdin.
        process = subprocess.Popen(
            ["timeout", "--signal=KILL", str(SECONDS), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            env=self.environ,
            start_new_session=True,
        )
        assert process.stdout is not None
        with process:
            try:
                placement = read_placement(line.replace("\0", "") for line in process.stdout)
            finally:
                _end(process)
        if not placement.counts and not placement.refused:
            raise HardwareError(f"Wine gave no answer about {path} within {SECONDS} s")
        return placement


def windows_path(path: Path) -> str:
    """Return a path as Wine shows it: the root of the disk is its drive Z."""
    return "Z:" + str(path.absolute()).replace("/", "\\")


def _line(what: str, placement: Placement) -> str:
    if placement.refused:
        return f"{what}: refused: {placement.refused}"
    counts = ", ".join(f"{count} nodes on {name}" for name, count in placement.counts.items())
    return f"{what}: {counts}" + "".join(f"\n    {node}" for node in placement.elsewhere)


def _two_nodes(folder: Path, kind: str, *, opset: int) -> Path:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4, 8, 8]) for name in "xy")
    first = helper.make_node("Cos", ["x"], ["between"], name="first")
    second = helper.make_node(kind, ["between"], ["y"], name="second")
    graph = helper.make_graph([first, second], kind, [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    path = folder / f"{kind}-{opset}.onnx"
    onnx.save(model, path)
    return path


@contextmanager
def wine(folder: Path) -> Iterator[Wine]:
    """Prepare a Windows below `folder` and a screen for it, which goes away at the end.

    Raises:
        HardwareError: something that is needed is not there and cannot be installed.
    """
    program, screen, driver = _programs()
    folder.mkdir(parents=True, exist_ok=True)
    _install_python(folder)
    with _display(screen) as display:
        machine = Wine(
            program=program,
            folder=folder,
            environ={
                **os.environ,
                "DISPLAY": display,
                "VK_ICD_FILENAMES": str(driver),
                "WINEPREFIX": str(folder / "prefix"),
                "WINEARCH": "win64",
                "WINEDEBUG": "-all",
                # No questions about Mono and Gecko, no entries in the person's menus.
                "WINEDLLOVERRIDES": "mscoree=;mshtml=;winemenubuilder.exe=",
            },
        )
        _boot(machine)
        yield machine


def _programs() -> tuple[str, str, Path]:
    found = _found()
    if found is None and _may_install():
        environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (
            ["apt-get", "update", "-q"],
            ["apt-get", "install", "-q", "-y", "--no-install-recommends", *DEBIAN],
        ):
            done = subprocess.run(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False
            )
            if done.returncode != 0:
                raise HardwareError(f"{' '.join(command)} failed")
        found = _found()
    if found is None:
        raise HardwareError(f"this needs Wine, Xvfb and Mesa's lavapipe: {', '.join(DEBIAN)}")
    return found


def _found() -> tuple[str, str, Path] | None:
    program = shutil.which("wine") or shutil.which("wine64")
    screen = shutil.which("Xvfb")
    driver = next(Path("/usr/share/vulkan/icd.d").glob("lvp_icd*.json"), None)
    return (program, screen, driver) if program and screen and driver else None


def _may_install() -> bool:
    debian = shutil.which("apt-get") is not None and Path("/etc/debian_version").exists()
    return debian and sys.platform != "win32" and os.geteuid() == 0


def _install_python(folder: Path) -> None:
    """Put Windows' Python and its packages into `folder/python`, once."""
    target = folder / "python"
    if target.is_dir():
        return
    wheels = folder / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--platform", "win_amd64", "--python-version", "3.10", "--dest", str(wheels)]
    done = subprocess.run([*command, *WHEELS], stdout=sys.stderr, check=False)
    if done.returncode != 0:
        raise HardwareError(f"pip cannot download {', '.join(WHEELS)} for Windows")
    partial = folder / "python.partial"
    shutil.rmtree(partial, ignore_errors=True)
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            if wheel.name.startswith("lilypond"):
                _unpack_python(archive, partial)
            else:
                archive.extractall(partial / "site")
    partial.rename(target)


def _unpack_python(archive: zipfile.ZipFile, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in archive.namelist():
        if re.search(r"/bin/python\w*\.(exe|dll|zip)$", name):
            (folder / Path(name).name).write_bytes(archive.read(name))


def _boot(machine: Wine) -> None:
    """Let Wine make its Windows folder, once."""
    if (Path(machine.environ["WINEPREFIX"]) / "system.reg").exists():
        return
    done = subprocess.run(
        ["timeout", str(SECONDS), machine.program, "wineboot", "--init"],
        env=machine.environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # its desktop would still write there when the screen is gone
        check=False,
    )
    if done.returncode != 0:
        raise HardwareError(f"wineboot failed with status {done.returncode}")


@contextmanager
def _display(program: str) -> Iterator[str]:
    """A screen in memory: without one, Wine makes no Direct3D device."""
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [program, "-displayfd", str(writer), "-screen", "0", "640x480x24", "-nolisten", "tcp"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(writer,),
        start_new_session=True,
    )
    os.close(writer)
    with process, os.fdopen(reader) as numbers:
        try:
            number = numbers.readline().strip()
            if not number:
                raise HardwareError("Xvfb does not start")
            yield f":{number}"
        finally:
            _end(process)


def _end(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """End a process of ours and those that it started, which are all in the session it leads."""
    if sys.platform != "win32":
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())

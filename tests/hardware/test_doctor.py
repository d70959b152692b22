import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdamd.errors import BadRequest
from sdamd.hardware.child import Ended
from sdamd.hardware.doctor import Diagnosis, ask, diagnose, lines
from sdamd.hardware.gpu import ARCHITECTURES
from sdamd.hardware.installed import Installed, Torch
from sdamd.hardware.rules import RULES
from sdamd.hardware.rules.rule import Rung, Severity
from sdamd.hardware.survey import survey
from sdamd.hardware.torch_probe import Probe
from tests.hardware.made import (
    CPU_TORCH,
    MACHINES,
    NODES,
    STRANGER,
    WSL,
    examined,
    faults,
    fired,
    gpu,
    machine,
    surveyed,
    write,
)

DATA = Path(__file__).parents[1] / "data" / "machines"
RECORDED = sorted(path.parent.name for path in DATA.glob("*/expected.json"))

# One text for each way in which a driver, pip or a picture goes wrong.
TEXTS = (
    "", "HIP error: invalid device function", "hipErrorNoBinaryForGpu on gfx1031",
    "invalid device function gfx1103", "no kernel image is available, gfx1201",
    "invalid device function gfx803", "ROCk module is NOT loaded, possibly no GPU devices",
    "Unable to open /dev/kfd read-write: Permission denied", "No HIP GPUs are available",
    "Unable to open /dev/kfd read-write: Cannot allocate memory",
    "Cannot read TensileLibrary.dat: Illegal seek for GPU arch : gfx1103 TensileLibrary_lazy_"
    "gfx1030.dat", "Torch not compiled with CUDA enabled", "HIP out of memory",
)  # fmt: skip

OVERRIDES: tuple[dict[str, str], ...] = (
    {},
    {"HSA_OVERRIDE_GFX_VERSION": "10.3.0"},
    {"HSA_OVERRIDE_GFX_VERSION": "11.0.0"},
)


Every = list[tuple[Diagnosis, str]]


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Every:
    """All machines, recorded and made, under each override and with each text."""
    root = tmp_path_factory.mktemp("machines")
    found: Every = []
    folders = {name: DATA / name for name in RECORDED}
    folders |= {name: write(root / name, files) for name, files in MACHINES.items()}
    for folder in folders.values():
        for environ in OVERRIDES:
            for platform in ("linux", "windows"):
                seen = survey(folder, platform, environ)
                found += [(diagnose(seen, text), text) for text in TEXTS]
    return found


def steps(diagnosis: Diagnosis) -> dict[str, bool | None]:
    return {str(step.rung): step.ok for step in diagnosis.steps}


# -- over everything ----------------------------------------------------------------------------


def test_no_advice_is_dangerous_on_any_machine(everything: Every) -> None:
    """Never wider rights, modules where there are none, or code of another generation."""
    seen = 0
    for diagnosis, text in everything:
        place = diagnosis.survey.place
        here = {gpu.arch for gpu in diagnosis.survey.detection.gpus}
        named = {arch for arch in ARCHITECTURES if re.search(rf"{arch}\b", text)}
        for finding in (*diagnosis.recognised, *diagnosis.findings):
            seen += 1
            archs = here if finding in diagnosis.findings or not named else named
            words = f"{finding.fix} {finding.cause}"
            assert "chmod" not in words
            assert "--extra-index-url" not in finding.fix
            assert not any(f"-aG {name}" in words for name in ("root", "docker", "lxd", "sudo"))
            if place.is_container or diagnosis.survey.platform != "linux":
                assert "modprobe" not in words
                assert "usermod" not in words
            for value, major in (("10.3.0", "gfx103"), ("11.0.0", "gfx11")):
                if f"HSA_OVERRIDE_GFX_VERSION={value}" in words:
                    assert any(arch.startswith(major) for arch in archs), (words, archs)
    assert seen > 1000


def test_an_override_is_never_advised_where_the_wheel_makes_it_needless(everything: Every) -> None:
    for diagnosis, text in everything:
        torch = diagnosis.survey.installed.torch
        native = torch.archs if torch is not None and torch.hip and torch.archs else frozenset()
        here = diagnosis.survey.gpu
        if here is None or here.arch not in native or "gfx" in text:
            continue
        for finding in (*diagnosis.recognised, *diagnosis.findings):
            assert "export HSA_OVERRIDE_GFX_VERSION" not in finding.fix


def test_the_ladder_is_red_once_and_only_for_a_reason(everything: Every) -> None:
    for diagnosis, _ in everything:
        red = [step for step in diagnosis.steps if step.ok is False]
        assert len(red) <= 1
        if red:
            place = diagnosis.steps.index(red[0])
            assert all(step.ok is None for step in diagnosis.steps[place + 1 :])
            (fault, *_) = [f for f in diagnosis.findings
                           if f.rung is red[0].rung and f.severity is Severity.FAULT]  # fmt: skip
            assert fault.reading == red[0].reading
            assert fault.fix
        assert all(step.reading for step in diagnosis.steps)


def test_what_is_printed_and_what_is_json_say_the_same(everything: Every) -> None:
    for diagnosis, _ in everything:
        shown = "\n".join(lines(diagnosis))
        told = json.loads(json.dumps(diagnosis.to_dict()))
        assert told["verdict"] in shown
        for finding in told["findings"]:
            if diagnosis.explaining and finding["severity"] == "info":
                continue  # of the machine only what is wrong is shown beside the text's
            assert set(finding) >= {"rule", "severity", "reading", "cause", "fix", "source"}
            assert finding["fix"] in shown
            assert finding["cause"] in shown
        assert {rung["ok"] for rung in told["rungs"]} <= {True, False, None}


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_machine_keeps_its_gpus(name: str) -> None:
    expected = json.loads((DATA / name / "expected.json").read_text("utf-8"))
    told = diagnose(survey(DATA / name, "linux", {})).to_dict()
    gpus = told["gpus"]
    assert isinstance(gpus, list)
    for found, wanted in zip(gpus, expected["gpus"], strict=True):
        assert found.items() >= wanted.items()


# -- the ladder ---------------------------------------------------------------------------------


def test_a_healthy_machine_has_no_fault_and_says_what_it_does_not_know(tmp_path: Path) -> None:
    diagnosis = examined(tmp_path, machine())
    assert not diagnosis.faulty
    assert diagnosis.findings == ()
    assert steps(diagnosis) == {
        "pci": True, "driver": True, "kfd": True, "rights": True, "runtime": True, "torch": True,
        "kernels": None,
    }  # fmt: skip
    assert diagnosis.verdict == (
        "No fault found: sdamd draws on Radeon (Navi 31) (not known yet: kernels)"
    )


@pytest.mark.parametrize(
    ("name", "red"),
    [
        ("driver-not-loaded", "driver"),
        ("vfio", "driver"),
        ("pitcairn", "kfd"),
        ("radeon", "kfd"),
        ("kernel-too-old", "kfd"),
        ("docker-without-devices", "kfd"),
        ("no-devices", "kfd"),
        ("no-rights", "rights"),
        ("old-session", "rights"),
        ("podman-other-number", "rights"),
        ("cpu-torch", "torch"),
        ("cuda-torch", "torch"),
        ("without-torch", "torch"),
        ("rx6700xt-with-gfx1030-kernels", "kernels"),
        ("780m-with-gfx1100-kernels", "kernels"),
        ("strix-halo-with-rocm64", "kernels"),
        ("rx580", "kernels"),
        ("wsl", "runtime"),
        ("healthy", None),
        ("hybrid-laptop", None),
        ("three-cards", None),
        ("card-and-igpu", None),
        ("docker", None),
        ("cpu-only", None),
        ("docker-without-gpu", None),
        ("docker-desktop", None),
        ("steam-deck", None),
        ("rx5700", None),
    ],
)
def test_the_ladder_breaks_at_the_lowest_fault(tmp_path: Path, name: str, red: str | None) -> None:
    diagnosis = examined(tmp_path, MACHINES[name])
    broken = [rung for rung, ok in steps(diagnosis).items() if ok is False]
    assert broken == ([] if red is None else [red])
    assert diagnosis.faulty is (red is not None)
    assert diagnosis.verdict.startswith("Fault: " if red else ("No fault", "Healthy"))


def test_without_an_amd_gpu_nothing_is_wrong(tmp_path: Path) -> None:
    diagnosis = examined(tmp_path, MACHINES["cpu-only"])
    assert diagnosis.verdict == "No fault: no AMD GPU was found, so sdamd draws on the CPU"
    assert steps(diagnosis)["pci"] is None
    assert steps(diagnosis)["torch"] is True


def test_what_was_not_recorded_is_unknown_and_not_well() -> None:
    found = {step.rung: step for step in diagnose(survey(DATA / "rx6600", "linux", {})).steps}
    assert found[Rung.RIGHTS].ok is None
    assert "not known" in found[Rung.RIGHTS].reading


@pytest.mark.report("A19")
def test_a_recording_without_torch_is_judged_with_this_pythons() -> None:
    """It says what would be wrong with it there, which is no fault of that machine."""
    diagnosis = diagnose(survey(DATA / "strix-halo", "linux", {}))
    torch = diagnosis.survey.installed.torch
    assert torch is not None
    finding = fired(diagnosis, 11)
    assert (finding is None) == bool(torch.hip or torch.cuda)
    assert not diagnosis.faulty
    assert steps(diagnosis)["torch"] is None
    if finding is not None:
        assert finding.severity is Severity.WARNING
        assert finding.reading.startswith(f"torch {torch.version} in {sys.executable} is built")
        python = shlex.quote(sys.executable)
        assert finding.fix.startswith(f"{python} -m pip install --force-reinstall")


def test_wsl_and_windows_have_no_rungs_for_kfd_and_rights(tmp_path: Path) -> None:
    without = {"pci", "driver", "runtime", "torch", "kernels"}
    assert set(steps(examined(tmp_path / "1", WSL))) == without
    assert set(steps(examined(tmp_path / "2", machine(), platform="windows"))) == without


def test_findings_stand_in_the_order_of_the_layers(tmp_path: Path) -> None:
    files = machine(gpu(), STRANGER, CPU_TORCH)
    options = "max_split_size_mb:1,expandable_segments:True"
    diagnosis = examined(
        tmp_path, files, HSA_OVERRIDE_GFX_VERSION="10.3.0", PYTORCH_ALLOC_CONF=options
    )
    assert faults(diagnosis) == [2, 11, 19, 27]
    stages = {rule.number: rule.stage for rule in RULES}
    assert [stages[n] for n in faults(diagnosis)] == sorted(stages[n] for n in faults(diagnosis))


# -- texts --------------------------------------------------------------------------------------


def test_a_text_that_no_rule_knows_is_said(tmp_path: Path) -> None:
    diagnosis = examined(tmp_path, machine(), "my printer is on fire")
    assert (diagnosis.recognised, diagnosis.faulty) == ((), False)
    said = "\n".join(lines(diagnosis))
    assert said.startswith("No rule knows this text.")
    assert "doctor --report" in said


def test_a_text_is_judged_with_the_readings_of_this_machine(tmp_path: Path) -> None:
    text = "RuntimeError: No HIP GPUs are available"
    diagnosis = examined(tmp_path, MACHINES["podman-other-number"], text)
    assert [finding.rule for finding in diagnosis.recognised] == [23]
    assert faults(diagnosis) == [4]
    said = "\n".join(lines(diagnosis))
    assert said.index("This text is known") < said.index("This machine: Fault: /dev/kfd belongs")


def test_harmless_texts_are_no_fault(tmp_path: Path) -> None:
    text = "Attempting to use hipBLASLt on an unsupported architecture! Overriding"
    diagnosis = examined(tmp_path, MACHINES["no-rights"], text)
    assert [finding.rule for finding in diagnosis.recognised] == [39]
    assert not diagnosis.faulty


def test_a_long_text_is_judged_by_its_end(tmp_path: Path) -> None:
    noise = "amd-smi shows \x1b[31m" * 200_000
    diagnosis = examined(tmp_path, machine(), f"{noise}\nHIP out of memory\x1b[0m\n")
    assert [(f.rule, f.reading) for f in diagnosis.recognised] == [(26, "HIP out of memory [0m")]


@given(st.text(max_size=300))
def test_any_text_is_survived(text: str) -> None:
    diagnosis = diagnose(survey(DATA / "rx6600", "linux", {}), text)
    assert list(lines(diagnosis))


# -- torch in a child ----------------------------------------------------------------------------


def torch_of(version: str) -> Installed:
    torch = Torch(folder=Path("/x/torch"), version=version, hip="6.4" if version else None)
    return Installed(executable=sys.executable, python=(3, 11), torch=torch)


def fake(folder: Path, body: str) -> dict[str, str]:
    (folder / "torch").mkdir(parents=True)
    (folder / "torch/__init__.py").write_text(body, encoding="utf-8")
    return {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.mark.parametrize(
    ("version", "probe", "asked"),
    [("2.9.1+rocm6.4", False, False), ("2.9.1+rocm6.4", True, True), ("", False, True)],
)
def test_torch_is_asked_only_where_its_files_do_not_tell(
    tmp_path: Path, version: str, probe: bool, asked: bool
) -> None:
    environ = fake(tmp_path / "fake", "raise ImportError('no')")
    seen = replace(surveyed(tmp_path / "root", machine()), installed=torch_of(version))
    found = ask(seen, lambda: environ, probe=probe)
    assert (found.probe is not None) is asked


@pytest.mark.report("A23")
def test_torch_that_counts_no_gpu_is_one_red_rung(tmp_path: Path) -> None:
    """A23: every layer said yes, and torch saw nothing."""
    environ = fake(tmp_path / "fake", (
        "__version__ = '2.3.0.dev20240218+rocm6.0'\n"
        "class version: hip = '6.0'; cuda = None\n"
        "class cuda:\n"
        "    is_available = staticmethod(lambda: False)\n"
        "    device_count = staticmethod(lambda: 0)\n"
        "    get_arch_list = staticmethod(lambda: [])\n"))  # fmt: skip
    seen = replace(surveyed(tmp_path / "root", machine()), installed=torch_of(""))
    diagnosis = diagnose(ask(seen, lambda: environ))
    assert [rung for rung, ok in steps(diagnosis).items() if ok is False] == ["runtime"]
    assert faults(diagnosis) == [23]


def test_the_selftest_is_not_run_where_torch_does_not_answer(tmp_path: Path) -> None:
    environ = fake(tmp_path / "fake", "raise ImportError('libamdhip64.so')")
    seen = replace(surveyed(tmp_path / "root", machine()), installed=torch_of("2.9.1+rocm6.4"))
    found = ask(seen, lambda: environ, selftest=True)
    assert found.selftest is None
    finding = fired(diagnose(found), 48)
    assert finding is not None
    assert "libamdhip64.so" in finding.reading


def test_without_torch_nobody_is_asked(tmp_path: Path) -> None:
    def never() -> dict[str, str]:
        raise AssertionError

    seen = surveyed(tmp_path, MACHINES["without-torch"])
    assert ask(seen, never, probe=True, selftest=True) is seen


# -- damaged readings ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe\x00\x01" * 64, b"gfx_target_ver", b"simd_count 9" + b"9" * 5000,
     b"vendor_id 4098\nsimd_count 64\ngfx_target_version 99999999999999999999\n",
     b"vendor_id 4098\nsimd_count 18446744073709551615\ndevice_id 18446744073709551615\n"],
)  # fmt: skip
def test_damaged_properties_are_survived(tmp_path: Path, content: bytes) -> None:
    root = write(tmp_path, machine())
    (root / NODES / "1/properties").write_bytes(content)
    diagnosis = diagnose(survey(root, "linux", {}))
    assert list(lines(diagnosis))
    json.dumps(diagnosis.to_dict())


def test_sixty_four_nodes_are_all_listed(tmp_path: Path) -> None:
    files: dict[str, str] = {}
    for node in range(1, 65):
        files |= gpu(node, unique_id=node)
    diagnosis = examined(tmp_path, machine(files))
    assert len(diagnosis.survey.detection.gpus) == 64
    assert diagnosis.selected is not None
    assert diagnosis.selected.index == 0


@pytest.mark.parametrize("root", ["nothing", "file"])
def test_a_root_that_is_not_there_is_a_bad_request(tmp_path: Path, root: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadRequest, match="allowed is a folder that is there"):
        survey(tmp_path / root, "linux", {})


def test_an_empty_root_is_a_machine_of_which_nothing_is_known(tmp_path: Path) -> None:
    diagnosis = diagnose(survey(tmp_path, "linux", {}))
    assert not diagnosis.survey.has_amd
    assert diagnosis.survey.driver_loaded is None


def test_a_crash_of_the_probe_leaves_the_rest_of_the_ladder(tmp_path: Path) -> None:
    seen = replace(surveyed(tmp_path, machine()), probe=Probe(ended=Ended(status=-6)))
    found = steps(diagnose(seen))
    assert found.pop("kernels") is False
    assert set(found.values()) == {True}


def test_sizes_of_an_apu_are_both_shown(tmp_path: Path) -> None:
    files = machine(gpu(1, 110501, 0x1586, bank_gib=30, vram_gib=0.5, gtt_gib=30, simds=80))
    said = "\n".join(lines(examined(tmp_path, files)))
    assert "0.5 GiB and 30.0 GiB of RAM" in said

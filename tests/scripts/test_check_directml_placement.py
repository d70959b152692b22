"""What the answers of the real provider mean. The texts are what onnxruntime-directml 1.23.0 wrote
under Wine; the check itself needs Wine and is run by hand."""

from pathlib import Path

import pytest

from scripts import check_directml_placement as check
from scripts.check_directml_placement import Placement, read_placement, windows_path

AT = "2026-11-30 20:38:07.6988 [V:onnxruntime:, session_state.cc:{} onnxruntime::"
PLACEMENTS = AT.format(1287) + "VerifyEachNodeIsAssignedToAnEp] Node placements\n"
PLACED = AT.format(1293) + "VerifyEachNodeIsAssignedToAnEp]  Node(s) placed on [{}]. "
NODE = AT.format(1295) + "VerifyEachNodeIsAssignedToAnEp]   {}\n"
ALL = AT.format(1290) + "VerifyEachNodeIsAssignedToAnEp]  All nodes placed on [{}]. "
AFTER = AT.format(175) + "SessionState::CreateGraphInfo] SaveMLValueNameIndexMapping\n"
NOISE = (
    "2026-11-30 20:19:36.9540 [I:onnxruntime:, graph_transformer.cc:15 onnxruntime::"
    "GraphTransformer::Apply] GraphTransformer MatMulScaleFusion modified: 0 with status: OK\n"
)
REFUSED = "REFUSED [ONNXRuntimeError] : 1 : FAIL : Exception during initialization: 80070057\n"

DML, CPU = "DmlExecutionProvider", "CPUExecutionProvider"
MIXED = [
    NOISE,
    PLACEMENTS,
    PLACED.format(DML) + "Number of nodes: 2\n",
    NODE.format("Add (add0)"),
    NODE.format("MemcpyToHost (Memcpy)"),
    PLACED.format(CPU) + "Number of nodes: 1\n",
    NODE.format("Gelu (gelu0)"),
    AFTER,
]


@pytest.mark.parametrize(
    ("lines", "placement", "good"),
    [
        pytest.param(
            [NOISE, PLACEMENTS, ALL.format(DML) + "Number of nodes: 1171\n", AFTER],
            Placement(counts={DML: 1171}),
            True,
            id="all on DirectML",
        ),
        pytest.param(
            MIXED,
            Placement(counts={DML: 2, CPU: 1}, elsewhere=("Gelu (gelu0)",)),
            False,
            id="one on the CPU",
        ),
        pytest.param(
            [PLACEMENTS, ALL.format(CPU) + "Number of nodes: 3\n", AFTER],
            Placement(counts={CPU: 3}),
            False,
            id="all on the CPU, as without a device",
        ),
        pytest.param(
            [NOISE, REFUSED],
            Placement(
                counts={},
                refused="[ONNXRuntimeError] : 1 : FAIL : Exception during initialization: 80070057",
            ),
            False,
            id="refused",
        ),
        pytest.param(
            ["Fatal Python error: init_sys_streams\n"],
            Placement(counts={}, refused="Fatal Python error: init_sys_streams"),
            False,
            id="died before",
        ),
        pytest.param([], Placement(counts={}), False, id="said nothing"),
    ],
)
def test_an_answer_is_good_only_if_every_node_is_on_directml(
    lines: list[str], placement: Placement, good: bool
) -> None:
    read = read_placement(iter(lines))
    assert (read, read.is_good) == (placement, good)


def test_reading_stops_where_the_placement_is_told() -> None:
    """After it, onnxruntime would upload gigabytes of weights that are not there."""
    lines = iter([*MIXED, "never read\n"])
    read_placement(lines)
    assert list(lines) == ["never read\n"]


def test_paths_are_those_of_wines_drive() -> None:
    assert windows_path(Path("/home/me/a b/x.onnx")) == r"Z:\home\me\a b\x.onnx"


def test_the_program_for_windows_is_python_310() -> None:
    """The newest Python for Windows that a package holds; 3.11's grammar would not be read."""
    compile(check.ASK, "ask.py", "exec")
    assert "match " not in check.ASK
    assert "except*" not in check.ASK


def test_without_wine_it_is_skipped_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check.main(["--cache", str(tmp_path / "cache")]) == 3
    assert capsys.readouterr().out == (
        "skipped: this needs Wine, Xvfb and Mesa's lavapipe: wine, wine64, xvfb, "
        "mesa-vulkan-drivers\n"
    )
    assert list(tmp_path.iterdir()) == []

"""Sessions of onnxruntime, on graphs made by hand; what needs a card is replaced at its door."""

import gc
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from sdamd.backends import onnx_session
from sdamd.backends.onnx_session import (
    Session,
    Sessions,
    Turn,
    provider_of,
    refuse_several,
    require,
    translated,
)
from sdamd.errors import HardwareError, OutOfVram

CPU = "directml-cpu"
WIDE = 2048


def graph(folder: Path, dtype: int = TensorProto.FLOAT, name: str = "model") -> Path:
    """`output` = `sample` @ `weight`, a diagonal of twos; the weight is a file of 16 or 8 MB."""
    kind = np.float16 if dtype == TensorProto.FLOAT16 else np.float32
    (folder / "weights.bin").write_bytes((np.eye(WIDE, dtype=kind) * 2).tobytes())
    weight = TensorProto(name="weight", data_type=dtype, dims=[WIDE, WIDE])
    weight.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "weights.bin"), ("offset", "0")):
        weight.external_data.add(key=key, value=value)
    sides: list[Any] = ["batch", WIDE]
    made = helper.make_model(
        helper.make_graph(
            [helper.make_node("MatMul", ["sample", "weight"], ["output"])],
            "test",
            [helper.make_tensor_value_info("sample", dtype, sides)],
            [helper.make_tensor_value_info("output", dtype, sides)],
            [weight],
        ),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=10,
    )
    path = folder / f"{name}.onnx"
    onnx.save(made, path)
    return path


def rows(count: int) -> dict[str, Any]:
    return {"sample": np.ones((count, WIDE), np.float32)}


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


# -- which provider ------------------------------------------------------------------------------


@pytest.mark.report("A27")
@pytest.mark.parametrize(
    ("device", "provider"),
    [
        ("directml:0", ("DmlExecutionProvider", {"device_id": 0})),
        ("directml:1", ("DmlExecutionProvider", {"device_id": 1})),
        ("directml:12", ("DmlExecutionProvider", {"device_id": 12})),
        ("directml-cpu", ("CPUExecutionProvider", {})),
    ],
)
def test_the_plans_device_decides_the_adapter(device: str, provider: object) -> None:
    assert provider_of(device) == provider


@pytest.mark.report("A27")
@pytest.mark.parametrize("device", ["directml", "directml:", "directml:-1", "directml:x", "cuda"])
def test_no_other_device_is_guessed(device: str) -> None:
    with pytest.raises(HardwareError, match="allowed are directml:N and directml-cpu"):
        provider_of(device)


@pytest.mark.report("A27")
def test_directml_is_never_replaced_by_the_cpu(tmp_path: Path) -> None:
    """The onnxruntime of Linux has no DirectML, and opens the CPU with a mere warning."""
    with pytest.raises(HardwareError, match=r"needs DmlExecutionProvider, .* has .*CPUExec"):
        require("directml:0")
    with (
        pytest.warns(UserWarning, match="DmlExecutionProvider"),
        pytest.raises(HardwareError, match="directml:0 was asked for and onnxruntime opened CPU"),
    ):
        Session(graph(tmp_path), "directml:0", {"batch": 1})


class Recorded:
    """In the place of onnxruntime's InferenceSession: what it is made with."""

    made: dict[str, Any]

    def __init__(self, model: Path, options: Any, **named: Any) -> None:
        Recorded.made = {"options": options, "fallback": True, **named}

    def disable_fallback(self) -> None:
        Recorded.made["fallback"] = False

    def get_providers(self) -> list[str]:
        return [Recorded.made["providers"][0][0], "CPUExecutionProvider"]

    def get_inputs(self) -> list[Any]:
        return [SimpleNamespace(name="sample", type="tensor(float16)")]


@pytest.mark.parametrize("frugal", [False, True])
def test_directml_gets_the_options_that_it_demands(
    monkeypatch: pytest.MonkeyPatch, frugal: bool
) -> None:
    monkeypatch.setattr(onnxruntime, "InferenceSession", Recorded)
    Session(Path("model.onnx"), "directml:1", {"batch": 2}, frugal=frugal)
    made = Recorded.made
    assert made["providers"] == [("DmlExecutionProvider", {"device_id": 1})]
    assert (made["fallback"], made["enable_fallback"]) == (False, 0)
    options = made["options"]
    assert options.enable_mem_pattern is False
    assert options.execution_mode == onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    entry = "ep.dml.disable_memory_arena"
    if frugal:
        assert options.get_session_config_entry(entry) == "1"
    else:
        with pytest.raises(RuntimeError, match="does not have configuration"):
            options.get_session_config_entry(entry)


def test_the_cpu_provider_leaves_weights_in_their_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "InferenceSession", Recorded)
    Session(Path("model.onnx"), CPU, {})
    options = Recorded.made["options"]
    level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    assert options.graph_optimization_level == level
    assert options.get_session_config_entry("session.disable_prepacking") == "1"
    assert options.enable_cpu_mem_arena is False


# -- what is installed ---------------------------------------------------------------------------


@pytest.mark.report("A22")
def test_without_onnxruntime_the_package_and_the_pythons_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(HardwareError, match=r"pip install onnxruntime-directml` in Python 3\.11"):
        require("directml:0")


def test_two_packages_of_onnxruntime_are_refused() -> None:
    """They overwrite each other's files, and DirectML is then there or not by chance."""
    refuse_several([])
    refuse_several(["onnxruntime-directml"])
    with pytest.raises(HardwareError, match=r"pip install onnxruntime-directml`$"):
        refuse_several(["onnxruntime", "onnxruntime-directml"])


def test_the_package_that_is_here_is_found() -> None:
    assert onnx_session._installed() == ["onnxruntime"]


# -- shapes --------------------------------------------------------------------------------------


def test_a_session_has_the_shape_it_was_opened_for(tmp_path: Path) -> None:
    """B15: a graph of fixed shape refuses others, so each shape gets its own session."""
    session = Session(graph(tmp_path), CPU, {"batch": 2})
    (made,) = session.run(rows(2))
    assert np.array_equal(made, np.full((2, WIDE), 2, np.float32))
    with pytest.raises(HardwareError, match="invalid dimensions"):
        session.run(rows(3))


@pytest.mark.report("B15")
def test_sessions_are_kept_by_shape_and_the_oldest_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    class Counting(Session):
        def __init__(self, model: Path, device: str, sizes: Any, *args: Any, **named: Any) -> None:
            opened.append(sizes["batch"])
            super().__init__(model, device, sizes, *args, **named)

    monkeypatch.setattr(onnx_session, "Session", Counting)
    sessions = Sessions(CPU, keep=2)
    model = graph(tmp_path)
    for batch in (4, 4, 2, 4, 1, 4, 2):
        (made,) = sessions.run(model, {"batch": batch}, rows(batch))
        assert made.shape == (batch, WIDE)
    assert opened == [4, 2, 1, 2]
    assert len(sessions) == 2


def test_inputs_are_cast_to_the_graphs_type(tmp_path: Path) -> None:
    session = Session(graph(tmp_path, TensorProto.FLOAT16), CPU, {"batch": 1})
    (made,) = session.run(rows(1))
    assert made.dtype == np.float16


@pytest.mark.parametrize("feeds", [{}, rows(1) | {"mask": np.ones(1)}, {"x": np.ones(1)}])
def test_inputs_that_the_graph_has_not_are_refused(tmp_path: Path, feeds: Any) -> None:
    session = Session(graph(tmp_path), CPU, {"batch": 1})
    with pytest.raises(ValueError, match="the graph has sample"):
        session.run(feeds)


def test_weights_can_be_overridden(tmp_path: Path) -> None:
    """Their values are read where they lie, so they must live as long as the session."""
    model = graph(tmp_path)
    sizes = {"batch": 1}
    session = Session(model, CPU, sizes, {"weight": np.eye(WIDE, dtype=np.float32) * 5})
    gc.collect()
    assert float(session.run(rows(1))[0][0, 7]) == 5
    assert float(Session(model, CPU, sizes).run(rows(1))[0][0, 7]) == 2


def test_one_thread_at_a_time_runs_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """DirectML's sessions do not bear two, and requests of a server come in threads."""
    inside, most = 0, 0

    class Slow(Recorded):
        def run(self, _: None, feeds: Any) -> list[Any]:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            time.sleep(0.02)
            inside -= 1
            return []

    monkeypatch.setattr(onnxruntime, "InferenceSession", Slow)
    session = Session(Path("model.onnx"), "directml:0", {})
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(session.run, [rows(1)] * 4)) == [[]] * 4
    assert most == 1


# -- memory --------------------------------------------------------------------------------------


@pytest.mark.report("B09")
def test_a_closed_session_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One NodeArg of get_inputs() that lives would keep it; types are therefore kept as text."""
    real = onnxruntime.InferenceSession
    alive: list[weakref.ref[Any]] = []
    nodes: list[weakref.ref[Any]] = []

    class Watched(real):  # type: ignore[misc, valid-type]  # onnxruntime ships no types
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            alive.append(weakref.ref(self))

        def get_inputs(self) -> Any:
            found = super().get_inputs()
            nodes.extend(weakref.ref(node) for node in found)
            return found

    monkeypatch.setattr(onnxruntime, "InferenceSession", Watched)
    sessions = Sessions(CPU, keep=1)
    model = graph(tmp_path)
    for batch in (1, 2):
        sessions.run(model, {"batch": batch}, rows(batch))
    assert [ref() is None for ref in alive] == [True, False]
    sessions.close()
    assert [ref() for ref in alive + nodes] == [None] * 4


@pytest.mark.report("B09")
def test_memory_comes_back_when_sessions_are_closed(tmp_path: Path) -> None:
    """Overridden weights are copied into the session (16 MB each time); a leak would add up."""
    model = graph(tmp_path)
    weight = {"weight": np.eye(WIDE, dtype=np.float32)}
    sessions = Sessions(CPU, keep=1, overrides=weight)
    after = []
    for _ in range(8):
        sessions.run(model, {"batch": 1}, rows(1))
        sessions.close()
        gc.collect()
        after.append(resident_bytes())
    # The allocator keeps one or two of the first for the next ones.
    assert after[-1] - after[3] < 2 * 16 * 2**20, after


def test_one_component_at_a_time_has_sessions(tmp_path: Path) -> None:
    turn = Turn()
    first, second = Sessions(CPU, keep=2, turn=turn), Sessions(CPU, keep=2, turn=turn)
    model = graph(tmp_path)
    for batch in (1, 2):
        first.run(model, {"batch": batch}, rows(batch))
    assert (len(first), len(second)) == (2, 0)
    second.run(model, {"batch": 1}, rows(1))
    assert (len(first), len(second)) == (0, 1)
    turn.end()
    assert (len(first), len(second)) == (0, 0)


# -- errors --------------------------------------------------------------------------------------

DRIVER = "D:\\a\\_work\\1\\DmlExecutionProvider\\src\\MLOperatorAuthorImpl.cpp(2817)\\ : (caller: "


@pytest.mark.parametrize(
    ("said", "expected", "sentence"),
    [
        (f"{DRIVER}) Exception(1) 8007000E Not enough memory", OutOfVram, "ran out of memory: D:"),
        ("Could not allocate tensor with 377487360 bytes", OutOfVram, "377487360 bytes"),
        ("DML allocator out of memory!", OutOfVram, "directml:1 ran out of memory"),
        ("Failed to allocate memory for requested buffer of size 9", OutOfVram, "of size 9"),
        (f"{DRIVER}) 887A0005 The GPU device instance has", HardwareError, r"driver \(887a0005\)"),
        (f"{DRIVER}) 887a0006 The GPU will not respond", HardwareError, r"driver \(887a0006\)"),
        (f"{DRIVER}) 887A0020 An internal issue", HardwareError, "Smaller pictures or tiles help"),
        ("The GPU device instance has been suspended.", HardwareError, "reset by its driver"),
        (f"{DRIVER}) 80070057\nThe parameter is incorrect.", HardwareError, "directml:1 failed"),
    ],
)
@pytest.mark.report("B09")
@pytest.mark.report("B15")
def test_errors_of_the_driver_are_sentences(
    said: str, expected: type[Exception], sentence: str
) -> None:
    from onnxruntime.capi.onnxruntime_pybind11_state import Fail, RuntimeException

    for raised in (Fail(said), RuntimeException(said), RuntimeError(said)):
        with pytest.raises(expected, match=sentence) as caught, translated("directml:1"):
            raise raised
        assert type(caught.value) is expected
        assert len(str(caught.value).splitlines()) == 1


def test_what_a_driver_says_in_another_code_page_is_read() -> None:
    """pybind11 decodes it as UTF-8 and fails; the bytes still hold the error's number."""
    said = "8007000E Недостаточно памяти".encode("cp1251")
    with pytest.raises(OutOfVram, match="8007000E"), translated("directml:0"):
        said.decode("utf-8")


def test_errors_that_are_not_onnxruntimes_stay_as_they_are() -> None:
    with pytest.raises(KeyError), translated("directml:0"):
        raise KeyError("x")


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda folder: (folder / "model.onnx").unlink(), id="no graph"),
        pytest.param(lambda folder: (folder / "model.onnx").write_bytes(b"x"), id="damaged"),
        pytest.param(lambda folder: (folder / "weights.bin").unlink(), id="no weights"),
        pytest.param(lambda folder: (folder / "weights.bin").write_bytes(b"x"), id="cut"),
    ],
)
def test_a_graph_that_cannot_be_opened_is_a_sentence(
    tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    model = graph(tmp_path)
    spoil(tmp_path)
    with pytest.raises(HardwareError, match="directml-cpu failed: "):
        Session(model, CPU, {"batch": 1})

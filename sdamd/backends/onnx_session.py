"""Opens onnxruntime's sessions: the one place that knows its providers, options and errors.

A session has one fixed shape. DirectML compiles the whole graph for it; with free dimensions some
nodes would run on the CPU and every step would wait for them.
Source: https://onnxruntime.ai/docs/execution-providers/DirectML-ExecutionProvider.html
"""

import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from sdamd.errors import HardwareError, OutOfVram
from sdamd.out_of_memory import is_out_of_memory

Array: TypeAlias = NDArray[Any]

DML: Final = "DmlExecutionProvider"
CPU: Final = "CPUExecutionProvider"

_DISTRIBUTIONS: Final = (
    "onnxruntime",
    "onnxruntime-directml",
    "onnxruntime-gpu",
    "onnxruntime-migraphx",
    "onnxruntime-openvino",
    "onnxruntime-qnn",
    "onnxruntime-rocm",
    "onnxruntime-windowsml",
)
"""They all install the folder `onnxruntime`, the last one over the others."""
_TYPES: Final[Mapping[str, type[np.generic]]] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
}
_LOST: Final = re.compile("887A0005|887A0006|887A0007|887A0020|DEVICE INSTANCE HAS BEEN SUSPENDED")
"""DXGI_ERROR_DEVICE_REMOVED, _HUNG, _RESET, DRIVER_INTERNAL_ERROR.
Source: https://learn.microsoft.com/windows/win32/direct3ddxgi/dxgi-error"""


def provider_of(device: str) -> tuple[str, dict[str, int]]:
    """The provider and its options for a plan's device, `directml:N` or `directml-cpu`.

    N is the adapter's place in DXGI's order, which is DirectML's `device_id`.

    Raises:
        HardwareError: it is none of these.
    """
    if device == "directml-cpu":
        return CPU, {}
    if match := re.fullmatch(r"directml:(\d+)", device):
        return DML, {"device_id": int(match[1])}
    raise HardwareError(f"device is {device!r}; allowed are directml:N and directml-cpu")


def require(device: str) -> None:
    """Make sure, before anything is loaded, that onnxruntime is there and has the provider.

    Raises:
        HardwareError: it is not installed, twice installed, or was built without the provider.
    """
    provider, _ = provider_of(device)
    refuse_several(_installed())
    available = _onnxruntime().get_available_providers()
    if provider not in available:
        raise HardwareError(
            f"{device} needs {provider}, and this onnxruntime has {', '.join(available)}; "
            "DirectML comes with the package onnxruntime-directml, for Windows only"
        )


def refuse_several(installed: Sequence[str]) -> None:
    """Refuse more than one package of onnxruntime: which files are whose is then chance.

    Raises:
        HardwareError: with the commands that put it right.
    """
    if len(installed) > 1:
        keep = "onnxruntime-directml" if "onnxruntime-directml" in installed else installed[0]
        raise HardwareError(
            f"{' and '.join(installed)} are installed together and overwrite each other's files; "
            f"run `pip uninstall {' '.join(installed)}`, then `pip install {keep}`"
        )


class Session:
    """One graph at one shape on one device.

    `overrides` take the place of weights by their initialisers' names.
    """

    def __init__(
        self,
        model: Path,
        device: str,
        sizes: Mapping[str, int],
        overrides: Mapping[str, Array] | None = None,
        *,
        frugal: bool = False,
    ) -> None:
        """Open it; `sizes` are the numbers of the graph's free dimensions.

        Raises:
            OutOfVram: the device has no room for the weights.
            HardwareError: the device cannot be used; never is another one taken instead.
        """
        ort = _onnxruntime()
        provider, about = provider_of(device)
        options = _options(ort, provider, frugal=frugal)
        for name, size in sizes.items():
            options.add_free_dimension_override_by_name(name, size)
        # onnxruntime reads these where they lie, for as long as the session is there.
        self._overrides = dict(overrides or {})
        if self._overrides:
            values = [ort.OrtValue.ortvalue_from_numpy(a) for a in self._overrides.values()]
            options.add_external_initializers(list(self._overrides), values)
        self._device = device
        self._lock = threading.Lock()
        with translated(device):
            session = ort.InferenceSession(
                model, options, providers=[(provider, about)], enable_fallback=0
            )
        # A provider that cannot be made may be left out without an exception, and one that fails
        # while it runs would be replaced.
        session.disable_fallback()
        if session.get_providers()[0] != provider:
            raise HardwareError(
                f"{device} was asked for and onnxruntime opened {session.get_providers()[0]}"
            )
        # As text: one living NodeArg would keep the whole session.
        self._types = {node.name: _TYPES[node.type] for node in session.get_inputs()}
        self._session = session

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """Compute all outputs. Inputs are cast to the graph's types; one thread at a time.

        Raises:
            ValueError: an input is missing, or the graph has none of that name.
            OutOfVram: the device ran out of memory.
            HardwareError: the device failed.
        """
        if feeds.keys() != self._types.keys():
            raise ValueError(
                f"inputs are {', '.join(sorted(feeds))}; the graph has "
                f"{', '.join(sorted(self._types))}"
            )
        typed = {k: np.ascontiguousarray(feeds[k], dtype) for k, dtype in self._types.items()}
        with self._lock, translated(self._device):
            made: list[Array] = self._session.run(None, typed)
        return made


class Sessions:
    """A component's sessions, open for the shapes that were asked for last."""

    def __init__(
        self,
        device: str,
        *,
        keep: int,
        overrides: Mapping[str, Array] | None = None,
        turn: "Turn | None" = None,
    ) -> None:
        """Keep at most `keep` sessions. With a `turn`, other components' are closed first."""
        self._device = device
        self._keep = keep
        self._overrides = overrides
        self._turn = turn
        self._open: OrderedDict[object, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def run(
        self, model: Path, sizes: Mapping[str, int], feeds: Mapping[str, Array]
    ) -> list[Array]:  # fmt: skip
        """Run the graph at `model` with its free dimensions set to `sizes`.

        Raises:
            OutOfVram: the device ran out of memory.
            HardwareError: the device failed.
        """
        key = (model, tuple(sorted(sizes.items())))
        if self._turn is not None:
            self._turn.take(self)
        if key not in self._open:
            while len(self._open) >= self._keep:
                self._open.popitem(last=False)
            self._open[key] = Session(
                model, self._device, sizes, self._overrides, frugal=self._turn is not None
            )
        self._open.move_to_end(key)
        return self._open[key].run(feeds)

    def take_turns(self, turn: "Turn | None") -> None:
        """Let others' sessions be closed first from now on, or no longer; all open anew."""
        if turn is not self._turn:
            self.close()
            self._turn = turn

    def close(self) -> None:
        """Give back their memory; the next run opens anew."""
        self._open.clear()


class Turn:
    """Lets one component at a time have sessions, where memory is short."""

    def __init__(self) -> None:
        self._holder: Sessions | None = None

    def take(self, sessions: Sessions) -> None:
        """Close those of the component that had the turn before."""
        if self._holder is not sessions:
            self.end()
            self._holder = sessions

    def end(self) -> None:
        """Close all."""
        if self._holder is not None:
            self._holder.close()
            self._holder = None


@contextmanager
def translated(device: str) -> Iterator[None]:
    """Give onnxruntime's errors sdamd's names.

    Raises:
        OutOfVram: the device ran out of memory.
        HardwareError: the device or its driver failed.
    """
    from onnxruntime.capi import onnxruntime_pybind11_state as state  # noqa: PLC0415

    kinds = (kind for kind in vars(state).values() if isinstance(kind, type))
    foreign: tuple[type[Exception], ...] = (
        *(kind for kind in kinds if issubclass(kind, Exception)),
        RuntimeError,
        UnicodeDecodeError,  # what a driver says in another language than English is not UTF-8
    )
    try:
        yield
    except foreign as error:
        raise _named(device, error) from error
    except MemoryError as error:
        raise OutOfVram(f"{device} ran out of memory") from error


def _named(device: str, error: Exception) -> HardwareError:
    said = str(error)
    if isinstance(error, UnicodeDecodeError):
        said = error.object.decode("utf-8", "replace")
    line = " ".join(said.split())
    if is_out_of_memory(line):
        return OutOfVram(f"{device} ran out of memory: {line}")
    if match := _LOST.search(line.upper()):
        return HardwareError(
            f"{device} was reset by its driver ({match[0].lower()}): Windows does so when one "
            "piece of work takes too long or the driver fails. Smaller pictures or tiles help, "
            "and so may another version of the driver"
        )
    return HardwareError(f"{device} failed: {line}")


def _installed() -> list[str]:
    """The installed packages of onnxruntime."""
    found = []
    for name in _DISTRIBUTIONS:
        try:
            metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        found.append(name)
    return found


def _onnxruntime() -> Any:
    try:
        import onnxruntime  # noqa: PLC0415  # seconds, and not everywhere installed
    except ImportError as error:
        raise HardwareError(
            f"onnxruntime cannot be imported ({error}); on Windows run `pip install "
            "onnxruntime-directml` in Python 3.11 to 3.14, elsewhere `pip install onnxruntime`"
        ) from error
    onnxruntime.disable_telemetry_events()
    return onnxruntime


def _options(ort: Any, provider: str, *, frugal: bool) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 3  # errors, which are raised as well
    # As many threads as torch takes: both obey OMP_NUM_THREADS then. Said explicitly, onnxruntime
    # also leaves the threads' affinity alone, which containers forbid.
    options.intra_op_num_threads = torch.get_num_threads()
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.enable_cpu_mem_arena = False
    if provider == DML:
        options.enable_mem_pattern = False
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
        if frugal:
            options.add_session_config_entry("ep.dml.disable_memory_arena", "1")
    else:
        # Weights stay a view of their file: ALL and prepacking would each copy them.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.add_session_config_entry("session.disable_prepacking", "1")
    return options

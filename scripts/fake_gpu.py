"""A GPU that is not there: real modules run on tensors without data, and each byte is counted.

`FakeGpu` is a context. Inside it `cuda:0` exists in any build of torch: tensors have a shape, a
dtype and a place but no data, so that SDXL at 4096 pixels takes seconds and no memory. Every
allocation of every operator is entered in a ledger when it happens and struck out when the last
tensor that sees it dies, as on a GPU, where one stream may use memory again at once. Host and
device are counted apart.

What no tensor shows is added by hand: what convolutions take beside their tensors (`Workspace`),
and the mask that torch's softmax makes within itself. Which kernel attends is the caller's to say.

Source of the rules: torch 2.13, which the tests' environment pins; `torch._subclasses` is private.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from math import prod
from types import TracebackType
from typing import Any, Final
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # everybody's name for it
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from scripts.allocator_replay import GRAIN, Allocate, EmptyCache, Event, Free

DEVICE: Final = torch.device("cuda:0")

aten = torch.ops.aten


# -- what convolutions take beside their tensors --------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """One call: channels into a kernel, the kernel's points, the pixels it makes, its dtype."""

    channels: int
    points: int
    pixels: int
    dtype: torch.dtype
    pointwise: bool

    @property
    def columns(self) -> int:
        """Bytes of the matrix that turns it into a product: im2col, of one image."""
        if self.pointwise:
            return 0
        return self.channels * self.points * self.pixels * self.dtype.itemsize


Workspace = Callable[[Convolution], int]
"""Bytes that a convolution takes while it runs and gives back at its end."""


def im2col(convolution: Convolution) -> int:
    """All columns of one image, however many those are.

    Source: torch's `slow_conv2d`, which a GPU takes with `torch.backends.cudnn.enabled = False`.
    """
    return convolution.columns


MIOPEN_LIMIT: Final = 7_287_183_769
"""Source: MIOpen, src/solver/conv/gemm_common.cpp, MAX_MEM_ALLOC_SZ."""


def miopen(card_bytes: int) -> Workspace:
    """What MIOpen's search asks for on a card: the columns, unless they exceed its limit.

    Source: MIOpen, src/solver/conv/gemm.cpp; torch allocates the most that any solver wants before
    it searches (aten/src/ATen/native/miopen/Conv_miopen.cpp).
    """

    def workspace(convolution: Convolution) -> int:
        limit = min(card_bytes * 85 // 100, MIOPEN_LIMIT)
        if convolution.dtype == torch.float32:
            limit *= 2
        return convolution.columns if convolution.columns <= limit else 0

    return workspace


def _convolution(args: Sequence[Any], out: torch.Tensor) -> Convolution:
    """The call of `aten.convolution(input, weight, bias, stride, padding, ..., groups)`."""
    weight = args[1]
    kernel = tuple(weight.shape[2:])
    plain = all(n == 1 for n in args[3]) and all(n == 0 for n in args[4])
    return Convolution(
        channels=weight.shape[1],
        points=prod(kernel),
        pixels=prod(out.shape[2:]),
        dtype=out.dtype,
        pointwise=prod(kernel) == 1 and plain,
    )


# -- the ledger -----------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Peak:
    """The most bytes on the device between two points, and where that was.

    `tensors` is without what kernels take within themselves, but with softmax's mask; `workspace`
    has the same with each convolution workspace of the ledger. `base` was there at the start.
    `at` is the operator that made `tensors`.
    """

    base: int
    tensors: int = 0
    host: int = 0
    workspace: dict[str, int] = field(default_factory=dict)
    at: str = ""

    @property
    def extra(self) -> int:
        """What came on top of what was there."""
        return self.tensors - self.base

    def extra_with(self, workspace: str) -> int:
        """The same with one kind of convolution workspace."""
        return max(self.tensors, self.workspace[workspace]) - self.base


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operators make, by device, until their last tensor dies."""

    def __init__(self, workspaces: Mapping[str, Workspace], traced: str | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = {"cuda": 0, "cpu": 0}
        self.trace: list[Event] = []
        self.marks: list[tuple[int, str]] = []
        self._workspaces = dict(workspaces)
        self._traced = traced
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._watching: list[Peak] = []
        self._names = 0

    def watch(self) -> Peak:
        """Start a peak at what is live now; `unwatch` ends it."""
        now = self.live["cuda"]
        peak = Peak(
            base=now,
            tensors=now,
            host=self.live["cpu"],
            workspace=dict.fromkeys(self._workspaces, now),
        )
        self._watching.append(peak)
        return peak

    def resume(self, peak: Peak) -> None:
        """Raise it again from here on."""
        self._watching.append(peak)
        self._raise("")

    def unwatch(self, peak: Peak) -> None:
        """No longer raise it."""
        self._watching = [other for other in self._watching if other is not peak]

    def mark(self, what: str) -> None:
        """Name what the trace does from here on."""
        self.marks.append((len(self.trace), what))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator and enter what it made."""
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and _is_composite(func):
            # Outside of inference mode autograd takes operators apart before they get here.
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        out = func(*args, **kwargs)
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.enter(leaf, str(func))
        if func is aten.convolution.default:
            self._convolved(_convolution(args, out))
        elif func is aten._safe_softmax.default:
            # It looks for rows without any key, with one byte for each score.
            self._within(args[0].numel(), str(func))
        return out

    def enter(self, tensor: torch.Tensor, what: str = "") -> None:
        """Count the storage of `tensor` unless it is known."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        place = tensor.device.type
        if place not in self.live:
            return
        size = _rounded(storage.nbytes())
        self._names += 1
        name = self._names

        def struck(_: object) -> None:
            del self._known[key]
            self.live[place] -= size
            if place == "cuda" and size:
                self.trace.append(Free(name))

        self._known[key] = weakref.ref(storage, struck)
        self.live[place] += size
        if place == "cuda" and size:
            self.trace.append(Allocate(name, size))
        self._raise(what)

    def empty_cache(self) -> None:
        """Enter that torch was told to give back what it caches."""
        self.trace.append(EmptyCache())

    def _raise(self, what: str) -> None:
        now, host = self.live["cuda"], self.live["cpu"]
        for peak in self._watching:
            peak.host = max(peak.host, host)
            if now > peak.tensors:
                peak.tensors, peak.at = now, what

    def _convolved(self, convolution: Convolution) -> None:
        now = self.live["cuda"]
        for name, workspace in self._workspaces.items():
            size = _rounded(workspace(convolution))
            for peak in self._watching:
                peak.workspace[name] = max(peak.workspace[name], now + size)
            if size and name == self._traced:
                self._passing(size)

    def _within(self, size: int, what: str) -> None:
        size = _rounded(size)
        self.live["cuda"] += size
        self._raise(what)
        self.live["cuda"] -= size
        self._passing(size)

    def _passing(self, size: int) -> None:
        self._names += 1
        self.trace += [Allocate(self._names, size), Free(self._names)]


_COMPOSITE: Final = torch._C.DispatchKey.CompositeImplicitAutograd


@cache
def _is_composite(func: Any) -> bool:
    """Whether an operator is made of others."""
    if func.namespace != "aten":
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE)


def _rounded(size: int) -> int:
    return -(-size // GRAIN) * GRAIN


# -- torch on a device that is not there ----------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Which scaled dot products have a fused kernel: heads of at most `widest`; 0 is none.

    `reduced` is torch's flag for scores in half precision where there is none.
    """

    widest: int = 1024
    reduced: bool = False

    def fuses(self, query: torch.Tensor) -> bool:
        """Whether this one has."""
        return query.shape[-1] <= self.widest


FUSED: Final = Attention()
MATH: Final = Attention(widest=0)
RDNA2: Final = MATH
"""Not among AOTriton's targets."""
RDNA3: Final = Attention(widest=256)
"""Source: AOTriton 0.11; the head in the middle of a VAE is 512 wide."""
RDNA4: Final = Attention(widest=512)


class _Redirect(TorchFunctionMode):
    """Sends to torch's operators what Python's bindings would first ask the absent device for.

    The bindings of these take a guard of the device before they dispatch, and this build of torch
    has none for `cuda`.
    """

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Replace the few calls that would fail, and attention by the kernel of the card."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attend(self.attention, *args, **kwargs)
        other = _REDIRECTED.get(func)
        return other(*args, **kwargs) if other else func(*args, **kwargs)


def _attend(
    attention: Attention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002  # torch's own signature
    scale: float | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    on_device = query.device.type == "cuda"
    if not on_device or not attention.fuses(query):
        made: torch.Tensor = F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **kwargs
        )
        return made
    if attn_mask is None and query.dtype != torch.float32:
        flash = aten._scaled_dot_product_flash_attention
        return _first(flash(query, key, value, dropout_p, is_causal, scale=scale))
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    efficient = aten._scaled_dot_product_efficient_attention
    for_training = False
    return _first(
        efficient(query, key, value, attn_mask, for_training, dropout_p, is_causal, scale=scale)
    )


def _first(results: Sequence[torch.Tensor]) -> torch.Tensor:
    return results[0]


def _view(
    tensor: torch.Tensor, index: Any
) -> tuple[torch.Tensor, list[torch.Tensor | None] | None]:
    """What of `tensor` basic indices see, and what tensors are left to index that with."""
    parts = list(index) if isinstance(index, tuple) else [index]
    parts = [torch.tensor(part) if isinstance(part, list) else part for part in parts]
    seen = sum(
        (part.ndim if isinstance(part, torch.Tensor) and part.dtype == torch.bool else 1)
        for part in parts
        if part is not None and part is not Ellipsis
    )
    if not any(part is Ellipsis for part in parts):
        parts.append(Ellipsis)
    where = next(number for number, part in enumerate(parts) if part is Ellipsis)
    parts[where : where + 1] = [slice(None)] * (tensor.ndim - seen)
    rest: list[torch.Tensor | None] = []
    for part in parts:
        at = len(rest)
        if part is None:
            tensor = aten.unsqueeze(tensor, at)
            rest.append(None)
        elif isinstance(part, slice):
            if part != slice(None):
                tensor = aten.slice(tensor, at, part.start, part.stop, part.step or 1)
            rest.append(None)
        elif isinstance(part, torch.Tensor):
            rest.extend([part, *[None] * 0])
        else:
            tensor = aten.select(tensor, at, int(part))
    return tensor, rest if any(part is not None for part in rest) else None


def _get(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    view, rest = _view(tensor, index)
    if rest is not None:
        indexed: torch.Tensor = aten.index(view, rest)
        return indexed
    return aten.alias(view) if view is tensor else view


def _set(tensor: torch.Tensor, index: Any, value: Any) -> None:
    view, rest = _view(tensor, index)
    if not isinstance(value, torch.Tensor):
        value = aten.full([], value, dtype=view.dtype, device=view.device)
    if rest is not None:
        aten.index_put_(view, rest, value)
    else:
        aten.copy_(view, value)


def _contiguous(
    tensor: torch.Tensor, memory_format: torch.memory_format = torch.contiguous_format
) -> torch.Tensor:
    if tensor.is_contiguous(memory_format=memory_format):
        return tensor
    return aten.clone(tensor, memory_format=memory_format)  # type: ignore[no-any-return]


def _copy(tensor: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:  # noqa: FBT001, FBT002
    return aten.copy_(tensor, source, non_blocking)  # type: ignore[no-any-return]


def _indexed(device: Any) -> Any:
    """`cuda` as the one that there is."""
    if isinstance(device, str) and device.startswith("cuda"):
        return DEVICE
    if isinstance(device, torch.device) and device.type == "cuda":
        return DEVICE
    return device


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    named = {name: _indexed(value) for name, value in kwargs.items()}
    return torch.Tensor.to(tensor, *(_indexed(value) for value in args), **named)


def _cuda(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.Tensor.to(tensor, DEVICE)


def _numbers(tensor: torch.Tensor) -> "np.ndarray[Any, Any]":
    """Noise, which looks sound to whoever checks a picture."""
    if not isinstance(tensor, FakeTensor):
        return torch.Tensor.numpy(tensor)
    shape = tuple(tensor.shape)
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def _yes(tensor: torch.Tensor) -> bool:
    """Whatever is asked of numbers that are not there: whether all are finite, mostly."""
    return isinstance(tensor, FakeTensor) or torch.Tensor.__bool__(tensor)


def _tensor(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
    made = torch.tensor(data, **options)
    return made if device is None else made.to(_indexed(device))


_REDIRECTED: Final[Mapping[Any, Callable[..., Any]]] = {
    torch.Tensor.__getitem__: _get,
    torch.Tensor.__setitem__: _set,
    torch.Tensor.contiguous: _contiguous,
    torch.Tensor.copy_: _copy,
    torch.Tensor.__invert__: aten.bitwise_not,
    torch.Tensor.to: _to,
    torch.Tensor.cuda: _cuda,
    torch.Tensor.pin_memory: lambda tensor, *_: tensor,
    torch.Tensor.is_pinned: lambda *_: False,
    torch.Tensor.record_stream: lambda *_: None,
    torch.Tensor.__bool__: _yes,
    torch.Tensor.numpy: _numbers,
    torch.tensor: _tensor,
}


class _Nothing:
    """A stream, an event, or what else a GPU has that only orders work."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., "_Nothing"]:
        return lambda *_, **__: self

    def __enter__(self) -> "_Nothing":
        return self

    def __exit__(self, *_: object) -> None: ...


def _apply(module: torch.nn.Module, change: Callable[..., Any], recurse: bool = True) -> Any:  # noqa: FBT001, FBT002
    """`Module._apply`, which refuses fake parameters: the same objects with other data."""
    if recurse:
        for child in module.children():
            child._apply(change)  # type: ignore[no-untyped-call]
    parameters: Mapping[str, torch.Tensor | None] = dict(module._parameters)
    for name, parameter in parameters.items():
        if isinstance(parameter, FakeTensor):
            parameter.data = change(parameter.data)
        elif parameter is not None:
            module._parameters[name] = torch.nn.Parameter(change(parameter), requires_grad=False)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = change(buffer)
    return module


def _set_data(tensor: FakeTensor, other: torch.Tensor) -> None:
    torch._C.TensorBase.data.__set__(tensor, other)  # type: ignore[attr-defined]
    tensor.fake_device = other.device


_DATA: Final = property(
    lambda tensor: tensor.detach(),
    _set_data,
)
"""`FakeTensor.data`, whose setter would leave the tensor on the device where it was."""


@contextmanager
def aside() -> Iterator[None]:
    """Let what happens inside a `FakeGpu` see none of it."""
    with _disable_current_modes():
        yield


class FakeGpu:
    """The context in which `cuda:0` exists, and its ledger.

    Args:
        attention: which scaled dot products are fused on the device.
        workspaces: what convolutions take, by name, each counted on its own.
        traced: the name of the one that also goes into the trace.
    """

    def __init__(
        self,
        attention: Attention = FUSED,
        workspaces: Mapping[str, Workspace] | None = None,
        *,
        traced: str | None = None,
    ) -> None:
        self.ledger = Ledger(workspaces or {}, traced)
        self._redirect = _Redirect(attention)
        self._stack = ExitStack()

    def __enter__(self) -> "FakeGpu":
        """Patch torch, for as long as this lasts."""
        enter = self._stack.enter_context
        enter(mock.patch.object(FakeTensor, "data", _DATA, create=True))
        enter(mock.patch.object(torch.nn.Module, "_apply", _apply))
        for name, value in self._of_cuda().items():
            enter(mock.patch.object(torch.cuda, name, value))
        enter(_reduced(self.attention.reduced))
        enter(FakeTensorMode(allow_non_fake_inputs=True))
        enter(self.ledger)
        enter(self._redirect)
        enter(torch.no_grad())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let torch be as it was."""
        self._stack.__exit__(kind, error, trace)

    @property
    def attention(self) -> Attention:
        """Which scaled dot products are fused from here on."""
        return self._redirect.attention

    @attention.setter
    def attention(self, attention: Attention) -> None:
        self._redirect.attention = attention

    @contextmanager
    def measured(self) -> Iterator[Peak]:
        """Find the peak of what happens inside."""
        peak = self.ledger.watch()
        try:
            yield peak
        finally:
            self.ledger.unwatch(peak)

    def _of_cuda(self) -> dict[str, Any]:
        return {
            "empty_cache": self.ledger.empty_cache,
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "set_device": lambda *_: None,
            "synchronize": lambda *_: None,
            "current_stream": _Nothing,
            "default_stream": _Nothing,
            "Stream": _Nothing,
            "Event": _Nothing,
            "stream": _Nothing,
            "device": _Nothing,
        }


@contextmanager
def _reduced(allowed: bool) -> Iterator[None]:  # noqa: FBT001
    allowed_before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed
    before = allowed_before()  # type: ignore[no-untyped-call]
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(allowed)
    try:
        yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


def placed(module: torch.nn.Module, dtype: torch.dtype, device: torch.device = DEVICE) -> Any:
    """Give a module built on `meta` empty weights on a device; floats get `dtype`.

    Only inside a `FakeGpu`.
    """

    def empty(old: torch.Tensor) -> torch.Tensor:
        kind = dtype if old.is_floating_point() else old.dtype
        return torch.empty(old.shape, dtype=kind, device=device)

    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                new = torch.nn.Parameter(empty(parameter), requires_grad=False)
                part._parameters[name] = new
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = empty(buffer)
    return module.eval()

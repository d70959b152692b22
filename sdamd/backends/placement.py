"""Where the weights of a pipeline's components are: on the device, or waiting for their turn.

A parameter whose weight is away is an empty tensor of the device and dtype in which it will be
there, so that a component always says where and in what it computes. Weights are never written
back: what left the device is read again from its file, or from RAM where there is no file.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from diffusers.models.attention import FeedForward
from torch.nn import functional

from sdamd.backends.forwards import replace
from sdamd.backends.lending import Direct, Lender, Piece, Ring, Weight
from sdamd.backends.weights import Sources

SMALL: Final = 64 * 2**10
"""Bytes of a layer that is not worth the way: norms and biases, a few MiB together."""
MANY_ROWS: Final = 4096
"""An embedding of more rows, a vocabulary, is looked up in RAM; of fewer it stays."""
NEVER_NARROW: Final = "norm"
"""Layers with this in their name keep their dtype. Source: diffusers' layerwise casting."""
CASTABLE: Final = (torch.nn.Conv2d, torch.nn.Linear)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How one component lies: `Plan.offload`, and what else of the plan is about its weights.

    `layout` is of weights with four dimensions, `storage` a dtype or None.
    """

    offload: str
    device: torch.device
    layout: torch.memory_format = torch.contiguous_format
    resident_bytes: int = 0
    storage: torch.dtype | None = None


class Placement:
    """The weights of one component."""

    def __init__(self, model: torch.nn.Module, sources: Sources | None = None) -> None:
        """`sources` are of the parameters by their names; what has none waits in RAM."""
        self.model = model
        known = sources or {}
        self._weights = {
            id(parameter): Weight(parameter, known.get(name))
            for name, parameter in model.named_parameters()
        }
        self._way: Way | None = None
        self._staying: list[Weight] = []
        self._lent: list[Piece] = []
        self._lender: Lender | None = None
        self._follows: dict[Piece, Piece] = {}

    @property
    def way(self) -> Way | None:
        """How it lies; None before it was first said."""
        return self._way

    def settle(self, way: Way) -> None:
        """Lie in another way from now on. With `none` everything is there afterwards.

        The forwards of layers are replaced, so this comes after all else that replaces them, and
        after `forwards.restore`.
        """
        if way != self._way:
            self._let_go(way)
            self._divide(way)
            self._way = way
        for piece in self._lent:
            self._interpose(piece)
        if way.offload == "none":
            self.enter()

    def enter(self) -> None:
        """Bring what is to be on the device while the component computes."""
        way = self._way
        assert way is not None
        with torch.inference_mode(mode=False):
            for module in self.model.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None and buffer.device != way.device:
                        module._buffers[name] = buffer.to(way.device)
            for weight in self._staying:
                weight.bring(way.device, way.layout)
            if self._lent and self._lender is None:
                self._lender = self._new_lender(way)

    def leave(self) -> None:
        """Let go of all that it has on the device."""
        way = self._way
        assert way is not None
        with torch.inference_mode(mode=False):
            self._close_lender()
            for weight in self._weights.values():
                weight.leave(way.device)

    def read(self) -> dict[str, torch.Tensor]:
        """All weights by the names of their parameters, wherever they are; not to be changed."""
        return {
            name: self._weights[id(parameter)].read()
            for name, parameter in self.model.named_parameters()
        }

    def _divide(self, way: Way) -> None:
        """Say which weights stay on the device during a turn, and which come one by one."""
        pieces = list(_pieces(self.model, self._weights))
        if way.offload == "stream":
            resident = _spread([p for p in pieces if not p.is_vocabulary], way.resident_bytes)
            self._lent = [
                piece
                for piece in pieces
                if piece.bytes > SMALL and piece not in resident and not _stays(piece)
            ]
        else:
            self._lent = [p for p in pieces if _is_castable(p)] if way.storage else []
        coming = {id(weight) for piece in self._lent for weight in piece.weights}
        self._staying = [w for key, w in self._weights.items() if id(w) not in coming]
        for piece in pieces:
            for weight in piece.weights:
                weight.storage = way.storage if _is_castable(piece) else None

    def _interpose(self, piece: Piece) -> None:
        module = piece.module
        if piece.is_vocabulary:
            replace(module, self._look_up, piece)
        else:
            replace(module, self._with_weights, piece, module.forward)

    def _look_up(self, piece: Piece, ids: torch.Tensor) -> torch.Tensor:
        """An embedding's rows, found in RAM: they are few, and the table is large."""
        (weight,) = piece.weights
        found = functional.embedding(ids.to("cpu"), weight.read(alone=True))
        return found.to(ids.device, weight.parameter.dtype)

    def _with_weights(
        self, piece: Piece, forward: Callable[..., Any], *given: Any, **options: Any
    ) -> Any:
        lender = self._lender
        assert lender is not None, "a layer was called while another component had its turn"
        with torch.inference_mode(mode=False):
            lender.lend(piece)
        try:
            return forward(*given, **options)
        finally:
            with torch.inference_mode(mode=False):
                lender.take_back(piece)

    def _new_lender(self, way: Way) -> Lender:
        lent = [piece for piece in self._lent if not piece.is_vocabulary]
        for piece in self._lent:
            for weight in piece.weights:
                weight.leave(way.device)
        if way.offload == "stream" and way.device.type == "cuda":
            return Ring(lent, way.device, way.layout, self._follows)
        return Direct(lent, way.device, way.layout, keep=way.offload != "stream")

    def _close_lender(self) -> None:
        if self._lender is not None:
            self._lender.close()
            self._lender = None

    def _let_go(self, way: Way) -> None:
        """End the way before: what it kept in RAM for itself goes, what is on a device too."""
        with torch.inference_mode(mode=False):
            self._close_lender()
            self._follows.clear()
            for weight in self._weights.values():
                weight.shelf = None
                if way.offload != "none" or weight.storage is not None:
                    weight.leave(way.device)


def _is_vocabulary(module: torch.nn.Module) -> bool:
    if not isinstance(module, torch.nn.Embedding):
        return False
    return module.max_norm is None and module.num_embeddings > MANY_ROWS


def _stays(piece: Piece) -> bool:
    return isinstance(piece.module, torch.nn.Embedding) and not piece.is_vocabulary


def _is_castable(piece: Piece) -> bool:
    if piece.bytes <= SMALL:
        return False
    if isinstance(piece.module, FeedForward):
        return True
    return isinstance(piece.module, CASTABLE) and NEVER_NARROW not in piece.name


def _pieces(
    model: torch.nn.Module, weights: Mapping[int, Weight], name: str = ""
) -> Iterator[Piece]:
    """The layers of a model, in their order: what has weights and nothing below it.

    A feed-forward layer is one piece, since it is called in chunks and needs all of its weights
    for each. Weights that lie between layers are in no piece.
    """
    children = dict(model.named_children())
    if not children or isinstance(model, FeedForward):
        own = [weights[id(parameter)] for parameter in model.parameters()]
        if own:
            table = _is_vocabulary(model)
            yield Piece(name=name, module=model, weights=own, is_vocabulary=table)
        return
    for below, child in children.items():
        yield from _pieces(child, weights, f"{name}.{below}" if name else below)


def _spread(pieces: Sequence[Piece], budget: int) -> set[Piece]:
    """Pieces of at most `budget` bytes together, spread evenly over the model's order.

    Between two that come there is then one that is there, during which the next can come.
    """
    total = sum(piece.bytes for piece in pieces)
    chosen: set[Piece] = set()
    taken = seen = 0
    for piece in pieces:
        seen += piece.bytes
        if taken + piece.bytes <= budget * min(1.0, seen / max(1, total)):
            chosen.add(piece)
            taken += piece.bytes
    return chosen


@dataclass(slots=True, eq=False)
class Turn:
    """Whose turn it is on the device. Groups of components that work together share one."""

    groups: Mapping[str, Sequence[Placement]]
    holder: str = ""

    def take(self, group: str) -> None:
        """Bring the weights of a group, after those of the one before have left.

        Raises:
            torch.OutOfMemoryError: there is no room; then nobody has the turn.
        """
        if self.holder == group:
            return
        self.give_back()
        mine = self.groups[group]
        with _undone(self.give_back_all):
            for placement in mine:
                placement.enter()
        self.holder = group

    def give_back(self) -> None:
        """Let go of the weights of whoever has the turn."""
        if self.holder:
            for placement in self.groups[self.holder]:
                placement.leave()
            self.holder = ""
            trim(device for p in self.groups.values() for device in _devices(p))

    def give_back_all(self) -> None:
        """Let go of everything, whoever has the turn."""
        for placements in self.groups.values():
            for placement in placements:
                placement.leave()
        self.holder = ""


def _devices(placements: Iterable[Placement]) -> Iterator[torch.device]:
    return (p.way.device for p in placements if p.way is not None)


@contextmanager
def _undone(undo: Callable[[], None]) -> Iterator[None]:
    done = False
    try:
        yield
        done = True
    finally:
        if not done:
            undo()


def trim(devices: Iterable[torch.device]) -> None:
    """Give freed memory back to the system: the C library keeps it otherwise, on the CPU."""
    if any(device.type == "cpu" for device in devices):
        give_back_heap()


def give_back_heap() -> None:
    """Return the heap's free pages, where the C library is glibc."""
    import ctypes  # noqa: PLC0415  # on Linux alone
    import sys  # noqa: PLC0415

    if sys.platform != "linux":
        return
    shrink = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if shrink is not None:
        shrink(0)


def placement_of(model: torch.nn.Module) -> Placement:
    """The placement of a component; it is made when it is first asked for."""
    found = vars(model).get(_KEY)
    if found is None:
        found = vars(model)[_KEY] = Placement(model)
    assert isinstance(found, Placement)
    return found


def attach(
    model: torch.nn.Module, sources: Sources, device: torch.device, dtype: torch.dtype
) -> None:
    """Say where the weights of a component without any are read, and where they will be used."""
    others = dict(sources)
    for name, _ in list(model.named_parameters()):
        above, _, own = name.rpartition(".")
        empty = torch.empty(0, dtype=dtype, device=device)
        model.get_submodule(above)._parameters[own] = torch.nn.Parameter(empty, requires_grad=False)
        others.pop(name, None)
    model.load_state_dict(
        {name: source.read() for name, source in others.items()}, strict=False, assign=True
    )
    vars(model)[_KEY] = Placement(model, sources)


_KEY: Final = "_sdamd_placement"
"""Of the attribute that a component carries: pipelines share components, and so this."""

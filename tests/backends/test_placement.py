from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from sdamd.backends import forwards, placement
from sdamd.backends.lending import Piece, Ring, Weight
from sdamd.backends.placement import Placement, Turn, Way, attach, placement_of
from sdamd.backends.weights import File, InFile, InRam, sources_of

CPU = torch.device("cpu")
NONE, MODEL, STREAM = (Way(offload=kind, device=CPU) for kind in ("none", "model", "stream"))


class Model(torch.nn.Module):
    """A layer of each kind: one that stays, large ones, a vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(5000, 64)
        self.places = torch.nn.Embedding(512, 64)
        self.norm = torch.nn.LayerNorm(64)
        self.first = torch.nn.Linear(64, 512)
        self.second = torch.nn.Linear(512, 64)
        self.register_buffer("numbers", torch.arange(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        made = self.norm(self.words(ids) + self.places(ids))
        last: torch.Tensor = self.second(self.first(made).relu())
        return last


IDS = torch.tensor([[1, 5, 500]])


def made_model() -> Any:
    torch.manual_seed(0)
    return Model().eval().requires_grad_(requires_grad=False)


def there(model: torch.nn.Module) -> set[str]:
    """The parameters that have their numbers."""
    return {name for name, parameter in model.named_parameters() if parameter.numel()}


def settle(placed: Placement, way: Way) -> None:
    forwards.restore(placed.model)
    placed.settle(way)


SMALL_ONES = {"norm.weight", "norm.bias", "places.weight"}


def test_a_streamed_model_has_its_layers_only_while_they_compute() -> None:
    model = made_model()
    every = there(model)
    expected = model(IDS)
    placed = Placement(model)
    settle(placed, STREAM)
    assert there(model) == set()
    placed.enter()
    assert there(model) == SMALL_ONES
    seen: dict[str, set[str]] = {}
    for name in ("words", "first", "second"):
        layer = getattr(model, name)
        inner = layer.forward.args[-1] if name != "words" else None
        if inner is not None:
            layer.forward = forwards.Replaced(
                layer.forward.func, layer.forward.args[0], noting(seen, name, model, inner)
            )
    assert torch.equal(model(IDS), expected)
    assert seen == {
        "first": SMALL_ONES | {"first.weight", "first.bias"},
        "second": SMALL_ONES | {"second.weight", "second.bias"},
    }
    assert there(model) == SMALL_ONES
    placed.leave()
    assert there(model) == set()
    settle(placed, NONE)
    assert there(model) == every
    assert torch.equal(model(IDS), expected)


def noting(seen: dict[str, set[str]], name: str, model: Model, inner: Any) -> Any:
    def forward(*given: Any) -> Any:
        seen[name] = there(model)
        return inner(*given)

    return forward


@pytest.mark.parametrize(("budget", "resident"), [(0, 0), (200_000, 2), (300_000, 4)])
def test_so_many_bytes_stay_on_the_device_during_the_turn(budget: int, resident: int) -> None:
    model = made_model()
    placed = Placement(model)
    settle(placed, Way(offload="stream", device=CPU, resident_bytes=budget))
    placed.enter()
    stays = there(model) - SMALL_ONES
    assert len(stays) == resident
    assert sum(dict(model.named_parameters())[name].nbytes for name in stays) <= budget


def test_what_stays_is_spread_over_the_model() -> None:
    linears = [torch.nn.Linear(128, 256) for _ in range(8)]
    layers = torch.nn.Sequential(*linears)
    placed = Placement(layers)
    each = sum(p.nbytes for p in linears[0].parameters())
    settle(placed, Way(offload="stream", device=CPU, resident_bytes=4 * each))
    placed.enter()
    assert [bool(layer.weight.numel()) for layer in linears] == [False, True] * 4


def test_a_component_tells_its_device_and_dtype_while_its_weights_are_away() -> None:
    model = made_model().to(torch.bfloat16)
    placed = Placement(model)
    settle(placed, MODEL)
    assert {(p.dtype, p.device, p.numel()) for p in model.parameters()} == {
        (torch.bfloat16, CPU, 0)
    }


def test_a_dtype_asked_for_while_weights_are_away_is_that_in_which_they_come() -> None:
    """The second decode in float32, after a picture came out black in float16."""
    model = made_model()
    expected = model(IDS)
    for way in (MODEL, STREAM):
        placed = Placement(model)
        settle(placed, way)
        model.double()
        placed.enter()
        assert torch.allclose(model(IDS), expected.double(), atol=1e-5)
        model.float()
        placed.leave()
        placed.enter()
        assert torch.equal(model(IDS), expected)
        settle(placed, NONE)


def test_a_layer_that_fails_leaves_nothing_behind() -> None:
    model = made_model()
    expected = model(IDS)
    placed = Placement(model)
    settle(placed, STREAM)
    placed.enter()
    with pytest.raises(RuntimeError):
        model.first(torch.zeros(1, 3))
    assert there(model) == SMALL_ONES
    assert torch.equal(model(IDS), expected)


def test_narrow_weights_round_alike_wherever_they_lie() -> None:
    model = made_model()
    exact = model(IDS)
    made = []
    for offload, resident in (("none", 0), ("model", 0), ("stream", 0), ("stream", 150_000)):
        placed = placement_of(model)
        settle(
            placed,
            Way(
                offload=offload, device=CPU, resident_bytes=resident, storage=torch.float8_e4m3fn
            ),
        )  # fmt: skip
        if offload != "none":
            placed.enter()
        made.append(model(IDS))
    assert all(torch.equal(one, made[0]) for one in made)
    assert 0 < float((made[0] - exact).abs().max()) < 0.2 * float(exact.abs().max())
    settle(placement_of(model), NONE)
    assert torch.equal(model(IDS), exact)


def test_narrow_weights_are_kept_narrow() -> None:
    model = made_model()
    placed = Placement(model)
    settle(placed, Way(offload="none", device=CPU, storage=torch.float8_e4m3fn))
    kept = {w.shelf.dtype for piece in placed._lent for w in piece.weights if w.shelf is not None}
    assert kept == {torch.float8_e4m3fn}
    assert there(model) == SMALL_ONES | {"words.weight"}


def test_narrow_layers_give_what_those_of_diffusers_give(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.hooks import apply_layerwise_casting  # of this test alone

    monkeypatch.setattr(placement, "SMALL", 0)
    layers = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.Unflatten(1, (2, 4, 4)), torch.nn.Conv2d(2, 3, 3)
    ).requires_grad_(requires_grad=False)
    entered = torch.randn(2, 16)
    placed = Placement(layers)
    settle(placed, Way(offload="none", device=CPU, storage=torch.float8_e4m3fn))
    made = layers(entered)
    settle(placed, NONE)
    apply_layerwise_casting(
        layers, storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32,
        skip_modules_pattern=(),
    )  # fmt: skip
    assert torch.equal(made, layers(entered))


# -- turns ---------------------------------------------------------------------------------------


def test_one_group_has_its_weights_at_a_time() -> None:
    one, two, three = (Placement(made_model()) for _ in range(3))
    for placed in (one, two, three):
        settle(placed, MODEL)
    turn = Turn({"a": [one], "b": [two, three]})
    for group, holders in (("a", [one]), ("b", [two, three]), ("b", [two, three]), ("a", [one])):
        turn.take(group)
        for placed in (one, two, three):
            assert bool(there(placed.model)) == (placed in holders)
    assert len(there(one.model)) == 8


def test_without_room_nobody_has_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = Placement(made_model()), Placement(made_model())
    for placed in (one, two):
        settle(placed, MODEL)
    turn = Turn({"a": [one], "b": [two]})
    turn.take("a")
    real = Weight.bring
    calls = 0

    def full(weight: Weight, *where: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise torch.OutOfMemoryError("HIP out of memory")
        real(weight, *where)

    monkeypatch.setattr(Weight, "bring", full)
    with pytest.raises(torch.OutOfMemoryError):
        turn.take("b")
    assert there(one.model) == there(two.model) == set()
    turn.take("b")
    assert there(two.model) != set()


# -- files ---------------------------------------------------------------------------------------


def saved(path: Path, model: Model) -> None:
    save_file({name: weight.data for name, weight in model.named_parameters()}, path)


def opened(path: Path) -> Placement:
    read = {}
    with safe_open(path, framework="pt") as file:
        for name in file.offset_keys():
            read[name] = file.get_tensor(name)
    empty = made_model()
    attach(empty, sources_of(read, path, read), CPU, torch.float32)
    return placement_of(empty)


@pytest.mark.parametrize("way", [NONE, MODEL, STREAM], ids=lambda way: way.offload)
def test_weights_come_from_their_file(tmp_path: Path, way: Way) -> None:
    path = tmp_path / "model.safetensors"
    model = made_model()
    saved(path, model)
    placed = opened(path)
    assert there(placed.model) == set()
    for _ in range(2):
        settle(placed, way)
        placed.enter()
        assert torch.equal(placed.model(IDS), model(IDS))
        placed.leave()
        assert there(placed.model) == set()


def test_what_was_opened_is_read_after_its_name_went_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    model = made_model()
    saved(path, model)
    placed = opened(path)
    path.unlink()
    other = made_model()
    other.first.weight.data.zero_()
    saved(path, other)
    settle(placed, NONE)
    assert torch.equal(placed.model(IDS), model(IDS))


def test_changing_a_weight_changes_nothing_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    model = made_model()
    saved(path, model)
    before = path.read_bytes()
    placed = opened(path)
    settle(placed, NONE)
    changed: Any = placed.model
    changed.first.weight.data.zero_()
    assert path.read_bytes() == before
    placed.leave()
    placed.enter()
    assert torch.equal(changed(IDS), model(IDS))


def test_views_are_found_in_the_file_and_what_was_made_of_it_is_not(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    stored = {"a": torch.arange(24.0).view(4, 6), "b": torch.ones(3, dtype=torch.float16)}
    save_file(stored, path)
    with safe_open(path, framework="pt") as file:
        read = {name: file.get_tensor(name) for name in file.offset_keys()}
    wanted = {
        "rows": read["a"][1:3], "columns": read["a"].T, "all": read["b"], "made": read["a"] + 1,
    }  # fmt: skip
    sources = sources_of(wanted, path, read)
    assert {name: type(source) for name, source in sources.items()} == {
        "rows": InFile, "columns": InFile, "all": InFile, "made": InRam,
    }  # fmt: skip
    for name, source in sources.items():
        for alone in (False, True):
            found = source.read(alone=alone)
            assert torch.equal(found, wanted[name])
            assert found.dtype == wanted[name].dtype


def test_all_views_of_a_file_share_its_pages(tmp_path: Path) -> None:
    """Each mapping takes a file descriptor, and a UNet has seven hundred weights."""
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 64)
    file = File(path)
    views = [file.view(n, 4, alone=False) for n in range(2000)]
    assert [int(view[0]) for view in views] == [n % 256 for n in range(2000)]
    assert len({view.data_ptr() - n for n, view in enumerate(views)}) == 1


# -- a device that runs behind Python ------------------------------------------------------------


class Streams:
    """torch.cuda's streams and events, as a list of what was asked of them in which order."""

    def __init__(self) -> None:
        self.log: list[tuple[str, ...]] = []
        self.now = "compute"
        self._events = 0

    def stream_of(self, name: str) -> Any:
        outer = self

        class Stream:
            def wait_event(self, event: str) -> None:
                outer.log.append((name, "waits for", event))

            def wait_stream(self, other: Any) -> None:
                outer.log.append((name, "waits for all"))

            def record_event(self) -> str:
                outer._events += 1
                event = f"event {outer._events}"
                outer.log.append((name, "records", event))
                return event

        stream = Stream()
        stream.name = name  # type: ignore[attr-defined]  # a class made by hand
        return stream

    @contextmanager
    def within(self, stream: Any) -> Iterator[None]:
        before, self.now = self.now, stream.name
        yield
        self.now = before


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    faked = Streams()
    compute = faked.stream_of("compute")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: faked.stream_of("copying"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: compute)
    monkeypatch.setattr(torch.cuda, "stream", faked.within)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    return faked


def pieces(count: int) -> list[Piece]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4 + n, 8) for n in range(count)]
    return [
        Piece(
            name=str(n), module=layer,
            weights=[
                Weight(p, InRam(p.data.clone()))
                for p in layer.requires_grad_(requires_grad=False).parameters()
            ],
        )
        for n, layer in enumerate(layers)
    ]  # fmt: skip


def test_the_next_layer_comes_while_one_computes(streams: Streams) -> None:
    """From the second time on, when it is known which one is next."""
    every = pieces(3)
    follows: dict[Piece, Piece] = {}
    ring = Ring(every, CPU, torch.contiguous_format, follows)
    fetched: list[tuple[str, str]] = []
    real = ring._fetch

    def fetch(piece: Piece) -> int:
        fetched.append((piece.name, current))
        return real(piece)

    ring._fetch = fetch  # type: ignore[method-assign]
    for piece in every * 3:
        current = piece.name
        ring.lend(piece)
        for weight in piece.weights:
            assert weight.source is not None
            assert torch.equal(weight.parameter.data, weight.source.read())
        ring.take_back(piece)
        assert not any(w.parameter.numel() for w in piece.weights)
    # The first round brings each when it is called; afterwards each comes under the one before.
    assert fetched[:3] == [("0", "0"), ("1", "1"), ("2", "2")]
    assert fetched[4:] == [("1", "0"), ("2", "1"), ("0", "2"), ("1", "0"), ("2", "1"), ("0", "2")]
    ring.close()


def test_no_place_is_written_before_the_device_has_used_what_was_there(streams: Streams) -> None:
    every = pieces(3)
    ring = Ring(every, CPU, torch.contiguous_format, {})
    for piece in every * 2:
        ring.lend(piece)
        ring.take_back(piece)
    used = [event for name, what, *event in streams.log if (name, what) == ("compute", "records")]
    came = [event for name, what, *event in streams.log if (name, what) == ("copying", "records")]
    waited = {
        name: [event for who, what, *event in streams.log if (who, what) == (name, "waits for")]
        for name in ("copying", "compute")
    }
    # Two places: a copy waits for the use before the last one, a use for its own copy.
    assert waited["copying"] == used[: len(waited["copying"])]
    assert len(waited["copying"]) == len(came) - 2
    assert waited["compute"] == came[: len(used)]
    ring.close()
    assert streams.log[-1] == ("compute", "waits for all")


def test_two_places_of_the_largest_layer_are_all_that_streaming_takes(streams: Streams) -> None:
    every = pieces(5)
    ring = Ring(every, CPU, torch.contiguous_format, {})
    assert [len(place) for place in ring._places] == [256 + 256] * 2

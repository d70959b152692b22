import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sdamd
from sdamd import learnt
from sdamd.errors import BadRequest, StorageError
from sdamd.hardware.gpu import Gpu
from sdamd.hardware.products import find_card
from sdamd.hardware.runtime import Engine
from sdamd.learnt import Learnt, Observation, for_device, keep, key, observation

NOTHING = Learnt(bytes={}, seconds={})
DECODE = "decode/float16/chunked"


@pytest.fixture
def card() -> Gpu:
    return find_card("RX 7900 XTX")


@cache  # what asks for the version of torch takes milliseconds
def usual(card: Gpu) -> Observation:
    return observation(card, Engine.ROCM, "sdxl", DECODE, bytes=1.2, seconds=0.5)


def seen(card: Gpu, **changed: Any) -> Observation:
    return replace(usual(card), **changed)


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        ("text", "text/float16"),
        ("denoise", "denoise/float16/fused"),
        ("hires", "hires/float16/fused"),
        ("decode", "decode/float32/chunked"),
        ("encode", "encode/float32/chunked"),
    ],
)
def test_a_factor_is_of_a_stage_and_of_what_chooses_its_kernels(stage: str, expected: str) -> None:
    made = key(
        stage, dtype="float16", vae_dtype="float32", attention="fused", vae_attention="chunked"
    )
    assert made == expected


def test_what_was_learnt_is_found_again(tmp_path: Path, card: Gpu) -> None:
    keep(tmp_path, [seen(card)])
    assert for_device(tmp_path, card, Engine.ROCM, "sdxl") == Learnt(
        bytes={DECODE: 1.2}, seconds={DECODE: 0.5}
    )


def test_the_highest_memory_counts_and_the_middle_of_the_last_times(
    tmp_path: Path, card: Gpu
) -> None:
    """The search for kernels makes a first run ten times slower, and one run says little."""
    for size, seconds in ((1.1, 10.0), (1.3, 1.0), (1.2, 1.2)):
        keep(tmp_path, [seen(card, bytes=size, seconds=seconds)])
    found = for_device(tmp_path, card, Engine.ROCM, "sdxl")
    assert (found.bytes[DECODE], found.seconds[DECODE]) == (1.3, 1.2)
    for _ in range(learnt.KEPT):
        keep(tmp_path, [seen(card, bytes=None, seconds=2.0)])
    found = for_device(tmp_path, card, Engine.ROCM, "sdxl")
    assert (found.bytes[DECODE], found.seconds[DECODE]) == (1.3, 2.0)


@pytest.mark.parametrize(
    "changed",
    [
        {"device": "gfx1201"},
        {"device": "directml-gfx1100"},
        {"torch": "2.9.0+rocm6.4"},
        {"sdamd": "0.0.1"},
        {"family": "sd15"},
    ],
    ids=str,
)
def test_nothing_is_believed_of_another_card_torch_or_version(
    tmp_path: Path, card: Gpu, changed: dict[str, str]
) -> None:
    keep(tmp_path, [seen(card, **changed)])
    assert for_device(tmp_path, card, Engine.ROCM, "sdxl") == NOTHING


def test_each_engine_has_its_own(tmp_path: Path, card: Gpu) -> None:
    names = {learnt.device_name(card, engine) for engine in Engine}
    assert names == {"cpu", "gfx1100", "directml-gfx1100", "directml-cpu"}
    assert learnt.device_name(None, Engine.CPU) == "cpu"
    assert learnt.device_name(replace(card, arch=""), Engine.DIRECTML) == "directml-unknown"


@pytest.mark.parametrize(
    ("measured", "expected"),
    [(0.2, 1.0), (1.0, 1.0), (1.5, 1.5), (99.0, 4.0), (None, None), (math.nan, None),
     (math.inf, None)],
)  # fmt: skip
def test_memory_is_never_taken_for_less_than_predicted_nor_beyond_all_reason(
    card: Gpu, measured: float | None, expected: float | None
) -> None:
    assert observation(card, Engine.ROCM, "sdxl", DECODE, bytes=measured).bytes == expected


def test_no_file_is_nothing_learnt_and_no_observation_is_no_file(tmp_path: Path, card: Gpu) -> None:
    assert for_device(tmp_path / "none", card, Engine.ROCM, "sdxl") == NOTHING
    keep(tmp_path / "none", [])
    assert not (tmp_path / "none").exists()


BAD: tuple[object, ...] = (
    "not JSON", "[]", "null", "3", '"x"', "{", "[" * 5000, "\x00\xff",
)  # fmt: skip


@pytest.mark.parametrize("line", BAD, ids=lambda line: repr(line)[:20])
def test_a_line_that_cannot_be_read_is_skipped(tmp_path: Path, card: Gpu, line: str) -> None:
    """A process may die while it writes; the others' lines stay."""
    path = tmp_path / learnt.FILE
    keep(tmp_path, [seen(card)])
    with path.open("ab") as file:
        file.write(line.encode("latin-1") + b"\n")
    keep(tmp_path, [seen(card, bytes=1.4)])
    assert for_device(tmp_path, card, Engine.ROCM, "sdxl").bytes == {DECODE: 1.4}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"bytes": 0.5}, "bytes is 0.5; allowed 1 to 4, or null"),
        ({"bytes": True}, "bytes is True; allowed"),
        ({"bytes": "1.2"}, "bytes is '1.2'; allowed"),
        ({"bytes": math.nan}, "bytes is nan; allowed"),
        ({"seconds": 0}, "seconds is 0; allowed 0.1 to 20, or null"),
        ({"key": "decode/../../x"}, "key is 'decode/../../x'"),
        ({"device": "gfx1100; rm"}, "device is 'gfx1100; rm'"),
        ({"family": 3}, "family is 3"),
        ({"more": 1}, "'more' is not known"),
    ],
)  # fmt: skip
def test_everything_wrong_with_a_line_is_said(
    card: Gpu, changed: dict[str, object], said: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        Observation.from_dict(asdict(seen(card)) | changed | {"torch": ""})
    assert any(said in problem for problem in caught.value.problems)
    assert any(problem.startswith("torch is ''") for problem in caught.value.problems)


def test_a_line_without_its_fields_is_none() -> None:
    with pytest.raises(BadRequest, match="seconds is missing"):
        Observation.from_dict({})


@given(st.dictionaries(st.text(max_size=9), st.none() | st.floats() | st.text(max_size=9)))
def test_whatever_a_line_holds_it_is_an_observation_or_a_sentence(values: dict[str, Any]) -> None:
    good = asdict(observation(None, Engine.CPU, "tiny", "text/float32", bytes=1.0))
    problems: tuple[str, ...] = ()
    made = None
    try:
        made = Observation.from_dict(good | values)
    except BadRequest as error:
        problems = error.problems
    assert bool(problems) == (made is None)
    assert all(problems)
    if made is not None:
        assert json.loads(json.dumps(asdict(made))) == asdict(made)


def test_the_file_stays_small_and_what_matters_stays_in_it(
    tmp_path: Path, card: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learnt, "BYTES_MAX", 8000)
    keep(tmp_path, [seen(card, bytes=3.9)])
    for number in range(300):
        keep(tmp_path, [seen(card, seconds=1 + number / 100)])
    path = tmp_path / learnt.FILE
    assert path.stat().st_size <= 8000
    found = for_device(tmp_path, card, Engine.ROCM, "sdxl")
    assert found.bytes == {DECODE: 3.9}
    assert found.seconds[DECODE] == pytest.approx(3.95, abs=0.05)
    assert [each.name for each in tmp_path.iterdir()] == [learnt.FILE]


def test_of_too_many_cards_the_oldest_are_forgotten(
    tmp_path: Path, card: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learnt, "BYTES_MAX", 4000)
    for number in range(100):
        keep(tmp_path, [seen(card, family=f"family-{number}")])
    assert (tmp_path / learnt.FILE).stat().st_size <= 4000
    assert for_device(tmp_path, card, Engine.ROCM, "family-0") == NOTHING
    assert for_device(tmp_path, card, Engine.ROCM, "family-99") != NOTHING


def test_several_write_at_once_and_nothing_is_lost(tmp_path: Path, card: Gpu) -> None:
    def write(number: int) -> None:
        for turn in range(20):
            keep(tmp_path, [seen(card, family=f"family-{number}-{turn}")])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, range(4)))
    lines = (tmp_path / learnt.FILE).read_text("utf-8").splitlines()
    assert len({Observation.from_dict(json.loads(line)).family for line in lines}) == 80


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path, card: Gpu) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="cannot be written"):
        keep(tmp_path / "file", [seen(card)])


def test_the_version_is_that_of_sdamd(card: Gpu) -> None:
    assert seen(card).sdamd == sdamd.__version__

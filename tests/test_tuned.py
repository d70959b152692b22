import json
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sdamd
from sdamd import tuned
from sdamd.errors import BadRequest, StorageError
from sdamd.hardware.products import find_card
from sdamd.hardware.runtime import Engine
from sdamd.tuned import BYTES_MAX, FILE, Tuned, find, for_device, keep, read, write

ENTRY = Tuned(
    gfx="gfx1100", torch=tuned.torch_version(), sdamd=sdamd.__version__, family="sdxl",
    date="2026-11-30", seconds=3.5, attention="chunked", batch=2, vae_dtype="bfloat16",
    vae_tile=512, miopen=False, channels_last=False,
)  # fmt: skip


def test_what_is_kept_is_found_for_the_same_card_torch_and_version(tmp_path: Path) -> None:
    keep(tmp_path, (ENTRY,))
    assert find(tmp_path, "gfx1100", "sdxl") == ENTRY
    assert find(tmp_path, "gfx1101", "sdxl") is None
    assert find(tmp_path, "gfx1100", "sd15") is None


@pytest.mark.parametrize("changed", [{"torch": "2.9.1+rocm6.3"}, {"sdamd": "0.0.9"}])
def test_after_an_update_nothing_old_is_believed(tmp_path: Path, changed: dict[str, str]) -> None:
    keep(tmp_path, (replace(ENTRY, **changed),))  # type: ignore[arg-type]
    assert find(tmp_path, "gfx1100", "sdxl") is None


def test_a_new_measurement_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    other = replace(ENTRY, family="sd15")
    keep(tmp_path, (ENTRY, other))
    newer = replace(ENTRY, batch=4, seconds=3.1)
    keep(tmp_path, (newer,))
    assert set(read(tmp_path / FILE)) == {newer, other}


def test_it_goes_to_another_machine_by_a_file(tmp_path: Path) -> None:
    keep(tmp_path / "here", (ENTRY,))
    write(tmp_path / "sent.json", read(tmp_path / "here" / FILE))
    keep(tmp_path / "there", read(tmp_path / "sent.json"))
    assert find(tmp_path / "there", "gfx1100", "sdxl") == ENTRY
    assert [path.name for path in (tmp_path / "there").iterdir()] == [FILE]


@pytest.mark.parametrize(
    ("engine", "card", "gfx"),
    [
        (Engine.ROCM, "gfx1100:24", "gfx1100"),
        (Engine.CPU, None, "cpu"),
        (Engine.DIRECTML, "gfx1100:24", None),
        (Engine.DIRECTML_CPU, None, None),
    ],
)
def test_only_what_torch_drives_was_measured(
    tmp_path: Path, engine: Engine, card: str | None, gfx: str | None
) -> None:
    keep(tmp_path, (ENTRY, replace(ENTRY, gfx="cpu")))
    found = for_device(tmp_path, find_card(card) if card else None, engine, "sdxl")
    assert (found and found.gfx) == gfx


# -- files that are none --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "format is None; allowed 1"),
        ("{}", "format is None; allowed 1"),
        ('{"format": 2, "tuned": []}', "format is 2; allowed 1"),
        ('{"format": 1}', "tuned is None; allowed is a list"),
        ('{"format": 1, "tuned": [7]}', "entry 1: an entry is 7; allowed is an object"),
        ('{"format": 1, "tuned": [{}]}', "entry 1: gfx is missing"),
        (" " * (BYTES_MAX + 1), "is larger than"),
    ],
)
def test_a_file_that_tune_did_not_write_is_refused_and_never_used(
    tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / FILE).write_text(text, encoding="utf-8")
    with pytest.raises(BadRequest, match=said):
        read(tmp_path / FILE)
    assert find(tmp_path, "gfx1100", "sdxl") is None
    keep(tmp_path, (ENTRY,))
    assert find(tmp_path, "gfx1100", "sdxl") == ENTRY


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"\xff\xfe\x00binary")
    with pytest.raises(BadRequest, match="is not JSON"):
        read(tmp_path / FILE)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("gfx", "gfx110", None),
        ("gfx", "gfx1100; rm", "gfx is 'gfx1100; rm'"),
        ("gfx", 1100, "gfx is 1100"),
        ("batch", 3, "batch is 3; allowed 1, 2, 4"),
        ("batch", True, "batch is True; allowed 1, 2, 4"),
        ("batch", "2", "batch is '2'"),
        ("vae_tile", 64, "vae_tile is 64; allowed 0, 256, 512"),
        ("miopen", 1, "miopen is 1; allowed True, False"),
        ("attention", "auto", "attention is 'auto'; allowed fused"),
        ("vae_dtype", "float8", "vae_dtype is 'float8'"),
        ("seconds", -1, "seconds is -1; allowed above 0"),
        ("seconds", float("nan"), "seconds is nan"),
        ("seconds", "fast", "seconds is 'fast'"),
        ("date", "yesterday", "date is 'yesterday'"),
        ("date", "2026-11-30\n", "date is"),
        ("torch", "x" * 1000, "torch is 'xxx"),
        ("family", None, "family is None"),
        ("more", 1, "'more' is not known"),
    ],
)
def test_an_entry_is_checked_field_by_field(
    tmp_path: Path, name: str, value: object, said: str | None
) -> None:
    path = tmp_path / "sent.json"
    path.write_text(json.dumps({"format": 1, "tuned": [asdict(ENTRY) | {name: value}]}))
    if said is None:
        assert len(read(path)) == 1
        return
    with pytest.raises(BadRequest) as raised:
        read(path)
    (problem,) = raised.value.problems
    assert f"{path}: entry 1: " in problem
    assert said in problem
    assert len(problem) < len(str(path)) + 200


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    bad = asdict(ENTRY) | {"batch": 3, "gfx": "rtx"}
    path = tmp_path / "sent.json"
    path.write_text(json.dumps({"format": 1, "tuned": [bad, {}, asdict(ENTRY)]}))
    with pytest.raises(BadRequest) as raised:
        read(path)
    assert len(raised.value.problems) == 2 + 12


def test_folders_and_files_that_are_not_there_are_said(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be read"):
        read(tmp_path)
    with pytest.raises(StorageError, match="cannot be read"):
        read(tmp_path / "none.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        write(tmp_path / "file" / FILE, (ENTRY,))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from([*asdict(ENTRY), "format", "tuned"]), inner, max_size=4
            )
        ),
        max_leaves=12,
    )
)
def test_whatever_an_entry_is_it_is_read_or_refused(value: object) -> None:
    tried = asdict(ENTRY) | value if isinstance(value, dict) else value
    made = None
    with suppress(BadRequest):
        made = Tuned.from_dict(tried)
    assert made is None or Tuned.from_dict(asdict(made)) == made

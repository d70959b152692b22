from pathlib import Path

import pytest

from sdamd.out_of_memory import asked_bytes, in_words, is_out_of_memory, needed_bytes, ran_out

SPELLINGS = tuple(
    line
    for line in (Path(__file__).parent / "data/reports/B01.txt").read_text("utf-8").splitlines()
    if line
)


@pytest.mark.report("B01", "B10", "B15")
@pytest.mark.parametrize("said", SPELLINGS)
def test_every_spelling_is_known(said: str) -> None:
    """Also "capacty", which torch wrote for years."""
    assert is_out_of_memory(said)
    assert is_out_of_memory(f"more before\n{said}\nand after")
    assert is_out_of_memory(said.lower())


@pytest.mark.parametrize(
    "said",
    [
        "",
        "HIP error: invalid device function",
        "HIP error: an illegal memory access was encountered",
        "Memory access fault by GPU node-1 on address 0x7f. Reason: Unknown.",
        "887A0005 The GPU device instance has been suspended",
        "Expected all tensors to be on the same device, but found at least two devices",
        "mat1 and mat2 shapes cannot be multiplied (154x768 and 1024x320)",
        "MIOpen Error: /MIOpen/src/sqlite_db.cpp:220: Internal error while accessing SQLite",
        "expected scalar type Half but found Float",
        "[Errno 28] No space left on device",
        "miopenStatusUnknownError",
        "the allocator was configured twice",
    ],
)
def test_other_failures_are_none(said: str) -> None:
    assert not is_out_of_memory(said)


@pytest.mark.parametrize(
    ("said", "asked", "needed"),
    [
        (SPELLINGS[0], 2.25, 2.25 + 6.06),
        (SPELLINGS[1], 1.12, 1.12 + 18.09),
        (SPELLINGS[2], 2 / 1024, (2 + 150.39) / 1024),
        (SPELLINGS[3], 35.31, 35.31 + 5.17),
        (SPELLINGS[5], 16, 16),
        ("Could not allocate tensor with 377487360 bytes", 377487360 / 2**30, None),
        ("Failed to allocate memory for requested buffer of size 1024", None, None),
        ("you tried to allocate 4294967296 bytes. Error code 12", 4, None),
        ("ROCm error: out of memory", None, None),
        ("Tried to allocate 99999999999999999999999 GiB", None, None),
    ],
)
def test_the_figures_are_read_where_there_are_some(
    said: str, asked: float | None, needed: float | None
) -> None:
    """What was held and what was asked for is the least that the computation needs."""
    for found, expected in ((asked_bytes(said), asked), (needed_bytes(said), needed)):
        assert found == (None if expected is None else pytest.approx(expected * 2**30, abs=1))


@pytest.mark.parametrize("said", SPELLINGS)
def test_a_person_is_told_without_the_drivers_words(said: str) -> None:
    words = in_words(said)
    assert words.startswith("ran out of memory")
    assert not any(name in words for name in ("HIP", "CUDA", "ROCm", "DML", "8007000E", "Alloc"))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (type("OutOfMemoryError", (RuntimeError,), {})(), True),
        (RuntimeError("HIP error: out of memory"), True),
        (RuntimeError("HIP error: invalid argument"), False),
        (RuntimeError(), False),
    ],
    ids=repr,
)
def test_an_error_is_known_by_its_kind_or_by_its_text(error: Exception, expected: bool) -> None:
    assert ran_out(error) is expected


def test_a_person_is_told_how_much_was_asked_for() -> None:
    assert in_words(SPELLINGS[0]) == "ran out of memory when 2.2 GiB more were asked for"
    assert in_words(SPELLINGS[2]) == "ran out of memory when 2.0 MiB more were asked for"
    assert in_words("ROCm error: out of memory") == "ran out of memory"

from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

from sdamd.contact_sheet import SHEET_SIDE, THUMBNAIL, Cell, write
from sdamd.errors import StorageError

RED, BLUE = (200, 0, 0), (0, 0, 200)
PAPER, MISSING = (255, 255, 255), (232, 232, 232)


def saved(folder: Path, name: str, colour: tuple[int, int, int], size: tuple[int, int]) -> Path:
    path = folder / f"{name}.png"
    Image.new("RGB", size, colour).save(path)
    return path


def colours(path: Path) -> dict[tuple[int, int, int], int]:
    """How many pixels of each colour that fills an area; letters' edges are left out."""
    with Image.open(path) as sheet:
        found = sheet.convert("RGB").getcolors(2**24) or []
    return {colour: count for count, colour in found if count > 3000}  # type: ignore[misc]


def matrix(across: Sequence[str], down: Sequence[str], path: Path | None) -> list[Cell]:
    return [Cell(labels=(x, y), path=path) for x in across for y in down]


def test_the_first_axis_runs_across_and_the_second_down(tmp_path: Path) -> None:
    red = saved(tmp_path, "red", RED, (100, 60))
    blue = saved(tmp_path, "blue", BLUE, (60, 100))
    cells = [
        Cell(labels=("steps 1", "seed 1"), path=red),
        Cell(labels=("steps 1", "seed 2"), path=None),
        Cell(labels=("steps 2", "seed 1"), path=blue),
        Cell(labels=("steps 2", "seed 2"), path=red),
    ]
    (path,) = write(cells, tmp_path)
    assert path == tmp_path / "contact-sheet-1.png"
    found = colours(path)
    assert found[RED] == 2 * 100 * 60  # small pictures are not enlarged, and none is cut
    assert found[BLUE] == 60 * 100
    assert 0.8 * 100 * 100 < found[MISSING] < 100 * 100  # with a word on it
    with Image.open(path) as sheet:
        width, height = sheet.size
        columns = [
            [sheet.getpixel((x, y)) for y in range(height)] for x in range(THUMBNAIL // 2, width)
        ]
    first_red = next(i for i, column in enumerate(columns) if RED in column)
    first_blue = next(i for i, column in enumerate(columns) if BLUE in column)
    assert first_red < 60
    assert first_blue > 100
    assert MISSING in columns[first_red]


def test_large_pictures_are_made_small(tmp_path: Path) -> None:
    path = saved(tmp_path, "large", RED, (4000, 1000))
    (sheet,) = write([Cell(labels=("a",), path=path)], tmp_path)
    assert colours(sheet)[RED] == THUMBNAIL * THUMBNAIL // 4


def test_a_picture_that_is_gone_or_damaged_leaves_its_place(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.png"
    damaged.write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    cells = [Cell(labels=(str(i),), path=p) for i, p in enumerate([damaged, tmp_path / "gone.png"])]
    (sheet,) = write(cells, tmp_path)
    assert colours(sheet)[MISSING] > THUMBNAIL**2


def test_what_does_not_fit_goes_on_on_further_sheets(tmp_path: Path) -> None:
    path = saved(tmp_path, "red", RED, (8, 8))
    across = [f"steps {i}" for i in range(1, 24)]
    sheets = list(write(matrix(across, [f"seed {i}" for i in range(12)], path), tmp_path, "x"))
    assert [sheet.name for sheet in sheets] == [f"x-{i}.png" for i in range(1, len(sheets) + 1)]
    assert len(sheets) > 1
    for sheet in sheets:
        with Image.open(sheet) as picture:
            assert max(picture.size) <= SHEET_SIDE
    with_red = 0
    for sheet in sheets:
        with Image.open(sheet) as picture:
            with_red += picture.convert("RGB").tobytes().count(bytes(RED) * 8) // 8
    assert with_red == 23 * 12
    assert not list(tmp_path.glob(".*"))


def test_no_sheet_is_larger_than_viewers_open(tmp_path: Path) -> None:
    path = saved(tmp_path, "red", RED, (THUMBNAIL, THUMBNAIL))
    one_axis = [Cell(labels=(f"seed {i}",), path=path) for i in range(82)]
    two_axes = matrix([str(i) for i in range(11)], [str(i) for i in range(10)], path)
    for sheet in [*write(one_axis, tmp_path, "one"), *write(two_axes, tmp_path, "two")]:
        with Image.open(sheet) as picture:
            assert max(picture.size) <= SHEET_SIDE


def test_each_value_of_a_third_axis_has_its_own_sheet(tmp_path: Path) -> None:
    path = saved(tmp_path, "red", RED, (64, 64))
    cells = [
        Cell(labels=(x, y, z), path=path) for x in ("1", "2") for y in ("3", "4") for z in "567"
    ]
    sheets = list(write(cells, tmp_path))
    assert len(sheets) == 3
    assert all(colours(sheet)[RED] == 4 * 64 * 64 for sheet in sheets)


def test_sheets_come_one_by_one_and_are_whole_when_they_do(tmp_path: Path) -> None:
    path = saved(tmp_path, "red", RED, (64, 64))
    sheets = write([Cell(labels=("x", "y", str(i)), path=path) for i in range(3)], tmp_path)
    first = next(sheets)
    assert first.exists()
    assert not (tmp_path / "contact-sheet-2.png").exists()
    sheets.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "label", ["", "x" * 70_000, "a long label " * 50, "红色的房子" * 40, "a\nb\tc", "\u202e🙂"]
)
def test_any_label_can_be_written(tmp_path: Path, label: str) -> None:
    path = saved(tmp_path, "red", RED, (64, 64))
    for cell in (Cell(labels=(label,), path=path), Cell(labels=(label, label, label), path=path)):
        (sheet,) = write([cell], tmp_path)
        assert colours(sheet)[RED] == 64 * 64


def test_no_cells_make_no_sheet_and_a_missing_folder_is_told(tmp_path: Path) -> None:
    assert not list(write([], tmp_path))
    with pytest.raises(StorageError, match=r"contact sheet .* cannot be written"):
        list(write([Cell(labels=("a",), path=None)], tmp_path / "missing"))

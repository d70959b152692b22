"""What the gallery does for a queue: the id of a job in its file, and numbers of its own."""

import io
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from sdamd import gallery
from sdamd.errors import StorageError
from sdamd.gallery import Number
from sdamd.metadata import Record
from sdamd.request import Job
from tests.fakes import picture


@pytest.fixture
def record(job: Job) -> Record:
    return Record(job=job, version="1", checkpoint_name="tiny")


@pytest.fixture
def png(record: Record) -> bytes:
    return gallery.encode(picture(record.job), record)


def test_the_id_of_a_job_is_in_its_file_and_all_else_is_as_before(
    png: bytes, tmp_path: Path, record: Record
) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(gallery.with_job_id(png, "0123abcd-7"))
    assert list(gallery.job_ids(tmp_path)) == [(path, "0123abcd-7")]
    assert gallery.read_record(path) == record
    assert gallery.read_texts(path)[gallery.JOB_KEY] == "0123abcd-7"
    with Image.open(path) as marked, Image.open(io.BytesIO(png)) as plain:
        marked.load()
        assert marked.tobytes() == plain.tobytes()
        assert marked.info[gallery.JOB_KEY] == "0123abcd-7"  # other readers find it too


def test_only_files_with_an_id_are_found_in_all_folders(png: bytes, tmp_path: Path) -> None:
    below = tmp_path / "2026-03-01" / "x"
    below.mkdir(parents=True)
    for name, content in {
        "plain.png": png,
        "empty.png": b"",
        "short.png": png[:40],
        "text.png": b"no picture at all, but as long as one that is",
        "other.txt": gallery.with_job_id(png, "a-1"),
    }.items():
        (tmp_path / name).write_bytes(content)
    (below / "mine.png").write_bytes(gallery.with_job_id(png, "a-2"))
    assert list(gallery.job_ids(tmp_path)) == [(below / "mine.png", "a-2")]


def test_what_killed_processes_left_goes_from_every_folder(
    png: bytes, tmp_path: Path, record: Record
) -> None:
    gallery.save(png, tmp_path, "[steps]/[seed]", record)
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    leftover = folder / ".sdamd-0123.tmp"
    leftover.write_bytes(gallery.with_job_id(png, "a-1"))
    assert list(gallery.job_ids(tmp_path)) == []
    assert not leftover.exists()


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="gone cannot be read: there is no such folder"):
        list(gallery.job_ids(tmp_path / "gone"))


def test_pictures_of_a_batch_have_their_own_numbers_in_any_order(
    png: bytes, tmp_path: Path, record: Record
) -> None:
    gallery.save(png, tmp_path, "[number]", record)
    asked = []

    def numbers(at: int, folder: Path, free: int) -> Number:
        asked.append((folder, free))
        return Number(number=2 + at, last=2 + 4)

    names = [
        gallery.save(png, tmp_path, "[number]", record, numbers=partial(numbers, at)).name
        for at in (3, 0, 4)
    ]
    assert names == ["00005.png", "00002.png", "00006.png"]
    assert asked == [(tmp_path, 2), (tmp_path, 7), (tmp_path, 7)]  # the batch's stay free
    assert gallery.save(png, tmp_path, "[number]", record).name == "00007.png"


@pytest.mark.report("E13")
@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("out", ["out.png", "out-00003.png", "out-2.png"]),
        ("[number]", ["00003.png", "00003-2.png", "00003-3.png"]),
    ],
)
def test_a_number_that_is_taken_already_replaces_nothing(
    png: bytes, tmp_path: Path, record: Record, pattern: str, names: list[str]
) -> None:
    other = replace(record, job=replace(record.job, seed=8))
    for name in names:
        given = Number(number=3, last=3)
        made = gallery.save(png, tmp_path, pattern, other, numbers=lambda *_, given=given: given)
        assert made.name == name

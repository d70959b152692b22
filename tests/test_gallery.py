"""The outputs folder: whole files or none, nothing replaced, records that read back."""

import errno
import io
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw
from PIL.PngImagePlugin import PngInfo

from sdamd.errors import BadMetadata, BadRequest, StorageError
from sdamd.gallery import (
    check_folder,
    check_image,
    encode,
    read_record,
    read_texts,
    rename_patiently,
    request_from_png,
    save,
    windows_room,
)
from sdamd.metadata import Record, to_json, to_parameters
from sdamd.request import PROMPT_MAX_BYTES, Job
from sdamd.settings import DEFAULT_FILENAME

JOB = Job(
    index=0,
    prompt="mountains by the sea",
    negative_prompt="fog",
    checkpoint="",
    width=128,
    height=128,
    steps=20,
    guidance_scale=7.5,
    scheduler="Euler a",
    seed=2**64 - 1,
    upscale=4,
)
RECORD = Record(job=JOB, version="0.1.0", checkpoint_name="embedded")
NAME = "18446744073709551615-mountains by the sea.png"
PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 100_000
NOON = datetime(2026, 1, 31, 12, 0, 0)

POSIX_ONLY = pytest.mark.skipif(os.name == "nt", reason="needs POSIX limits, signals or links")


def with_prompt(prompt: str) -> Record:
    return replace(RECORD, job=replace(JOB, prompt=prompt))


def with_seed(seed: int) -> Record:
    return replace(RECORD, job=replace(JOB, seed=seed))


def names(folder: Path) -> list[str]:
    """The pictures in a folder; anything unexpected beside them fails the test."""
    found = sorted(path.name for path in folder.iterdir())
    assert [name for name in found if not name.endswith(".png")] in ([], [".sdamd-number"])
    return [name for name in found if name.endswith(".png")]


def picture(size: int = 64) -> Image.Image:
    image = Image.linear_gradient("L").resize((size, size))
    return Image.merge("RGB", (image, image.rotate(90), image.rotate(180)))


# -- encoding and reading ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    [
        "mountains",
        "",
        "café",
        "山水 \N{FIRE}",
        "two\nlines\r\nand\ta tab",
        "\x01\x7f\x85",
        "a\nNegative prompt: b",
        "x" * PROMPT_MAX_BYTES,
        "\N{FIRE}" * (PROMPT_MAX_BYTES // 4),
        "\x01" * PROMPT_MAX_BYTES,
    ],
    ids=lambda prompt: ascii(prompt[:20]),
)
def test_a_picture_carries_both_texts_and_its_pixels(prompt: str, tmp_path: Path) -> None:
    """E01, E08: what is written can be read again, by sdamd and by Pillow."""
    record = replace(RECORD, job=replace(JOB, prompt=prompt, negative_prompt=prompt))
    path = tmp_path / "x.png"
    path.write_bytes(encode(picture(), record))
    assert read_record(path) == record
    assert request_from_png(path) == record.job.to_request()
    with Image.open(path) as image:
        assert image.tobytes() == picture().tobytes()
        assert image.text == {"parameters": to_parameters(record), "sdamd": to_json(record)}  # type: ignore[attr-defined]


def test_latin_text_is_in_the_chunk_that_every_tool_reads() -> None:
    assert b"tEXtparameters\0caf\xe9" in encode(picture(), with_prompt("café"))
    assert b"iTXtparameters\0" in encode(picture(), with_prompt("山水"))


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of(*chunks: bytes, side: int = 1) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    return b"".join((PNG[:8], header, *chunks, chunk(b"IEND", b"")))


JSON = to_json(RECORD).encode()


@pytest.mark.parametrize(
    "content",
    [
        png_of(chunk(b"tEXt", b"sdamd\0" + JSON)),
        png_of(chunk(b"zTXt", b"sdamd\0\0" + zlib.compress(JSON))),
        png_of(chunk(b"iTXt", b"sdamd\0\0\0en\0key\0" + JSON)),
        png_of(chunk(b"iTXt", b"sdamd\0\1\0\0\0" + zlib.compress(JSON))),
        png_of(chunk(b"IDAT", b"junk"), chunk(b"tEXt", b"sdamd\0" + JSON)),
        png_of(chunk(b"tEXt", b"sdamd\0" + JSON), side=2**31 - 1),
    ],
    ids=["tEXt", "zTXt", "iTXt", "iTXt compressed", "after the pixels", "claims to be huge"],
)
def test_every_kind_of_text_is_read_without_decoding_the_pixels(
    content: bytes, tmp_path: Path
) -> None:
    """E07, E08."""
    path = tmp_path / "x.png"
    path.write_bytes(content)
    assert read_record(path) == RECORD


BOMB = chunk(b"iTXt", b"sdamd\0\1\0\0\0" + zlib.compress(b"a" * 2 * 1024 * 1024))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "neither a picture nor a text of a record; read are PNG"),
        (b"GIF89a\x01\0\x01\0", "neither a picture nor a text of a record"),
        (b"\xff\xd8\xff\xe0\0\x10" + b"\0" * 8, "cut short or damaged: it ends before its"),
        (b"RIFF\0\0\0\0WEBP", "no record"),
        (PNG[:8], "cut short or damaged: it ends early, at 8 bytes"),
        (png_of(chunk(b"tEXt", b"sdamd\0" + JSON))[:-12], "ends early"),
        (png_of(chunk(b"tEXt", b"sdamd\0" + JSON))[:100], "ends early, at 100 bytes"),
        (png_of(chunk(b"tEXt", b"sdamd\0" + JSON)[:-1] + b"x"), "checksum"),
        (png_of(BOMB), "too large: over 1048576 bytes when unpacked"),
        (png_of(chunk(b"zTXt", b"sdamd\0\0junk")), "cannot be unpacked"),
        (png_of(chunk(b"tEXt", b"sdamd\0" + b"a" * 3_000_000)), "too large"),
        (png_of(*[chunk(b"tEXt", b"k%d\0" % i + b"a" * 2**20) for i in range(9)]), "too large"),
        (png_of(), "no record"),
        (png_of(chunk(b"tEXt", b"sdamd\0{")), "x.png: the record is not JSON"),
    ],
    ids=range(14),
)
def test_a_file_without_a_readable_record_says_why(
    content: bytes, sentence: str, tmp_path: Path
) -> None:
    """E08 and damaged files of every kind: one sentence that names the file."""
    path = tmp_path / "x.png"
    path.write_bytes(content)
    with pytest.raises(BadMetadata, match=sentence) as caught:
        request_from_png(path)
    assert str(path) in str(caught.value)
    with pytest.raises(BadMetadata, match=sentence):
        read_record(path)


def test_the_compressed_bomb_of_the_report_is_small(tmp_path: Path) -> None:
    """E08: the file that Pillow refuses to read takes two kilobytes."""
    assert len(BOMB) < 4096
    path = tmp_path / "x.png"
    texts = PngInfo()
    texts.add_itxt("sdamd", "a" * 2 * 1024 * 1024, zip=True)
    picture().save(path, pnginfo=texts)
    with pytest.raises(BadMetadata, match="too large"):
        read_texts(path)


def test_parameters_of_another_tool_give_a_request(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    text = b"a cat\nSteps: 20, Sampler: Euler a, CFG scale: 7, Seed: 5, Size: 512x768"
    path.write_bytes(png_of(chunk(b"tEXt", b"parameters\0" + text)))
    request = request_from_png(path)
    assert (request.prompt, request.seed, request.width, request.height) == ("a cat", 5, 512, 768)
    with pytest.raises(BadMetadata, match="holds no record by sdamd"):
        read_record(path)


@pytest.mark.parametrize("name", ["missing.png", "missing/x.png", "a\0b", "\ud800.png"])
def test_a_file_that_cannot_be_read_is_a_storage_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be read"):
        read_texts(tmp_path / name)


def test_a_folder_is_not_a_picture(tmp_path: Path) -> None:
    with pytest.raises(BadMetadata, match="is not a file"):
        read_texts(tmp_path)


# -- checking the picture ----------------------------------------------------------------------


def dotted(colour: tuple[int, int, int], dots: int) -> Image.Image:
    image = Image.new("RGB", (512, 512), colour)
    draw = ImageDraw.Draw(image)
    for i in range(dots):
        draw.point((7 * i % 512, 11 * i % 512), fill=(255, 255, 255))
    return image


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (Image.new("RGB", (512, 512)), "the picture is black throughout"),
        (Image.new("RGB", (8, 8), (255, 255, 255)), "one colour throughout: 255, 255, 255"),
        (Image.new("RGB", (1003, 997), (77, 78, 79)), "one colour throughout: 77, 78, 79 of 255"),
        (Image.new("L", (64, 64), 12), "one colour throughout: 12"),
        (dotted((0, 0, 0), 0), "black"),
        (dotted((3, 3, 3), 1), "one colour"),
        (dotted((0, 0, 0), 40), None),
        (picture(), None),
        (Image.effect_noise((64, 64), 2).convert("RGB"), None),
    ],
)
def test_a_picture_of_one_colour_is_found(image: Image.Image, reason: str | None) -> None:
    found = check_image(image)
    assert (found is None) if reason is None else (reason in str(found))


# -- names -------------------------------------------------------------------------------------


def test_the_default_name_has_number_seed_and_prompt(tmp_path: Path) -> None:
    path = save(PNG, tmp_path, DEFAULT_FILENAME, RECORD)
    assert path == tmp_path / f"00001-{NAME}"
    assert path.read_bytes() == PNG


def test_a_file_follows_the_umask(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    assert save(PNG, tmp_path, "x", RECORD).stat().st_mode == plain.stat().st_mode


@pytest.mark.parametrize("pattern", ["out", "[seed]", "[date]-[time]", "[steps]/[date]"])
def test_a_pattern_without_a_number_replaces_nothing(pattern: str, tmp_path: Path) -> None:
    """E13, E15: also with a clock that stands still."""
    paths = [save(PNG + bytes([i]), tmp_path, pattern, RECORD, now=lambda: NOON) for i in range(5)]
    assert len(set(paths)) == 5
    assert [path.read_bytes()[-1] for path in paths] == [0, 1, 2, 3, 4]
    assert [path.stem[-6:] for path in paths[1:]] == ["-00002", "-00003", "-00004", "-00005"]


@POSIX_ONLY
def test_files_that_were_there_are_kept(tmp_path: Path) -> None:
    """E13: a picture, a folder and a broken link of the same name."""
    (tmp_path / "out.png").write_text("mine")
    (tmp_path / "out-00001.png").mkdir()
    (tmp_path / "out-00002.png").symlink_to("nowhere")
    assert save(PNG, tmp_path, "out", RECORD).name == "out-00003.png"
    assert (tmp_path / "out.png").read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()


def test_the_time_is_of_the_saving(tmp_path: Path) -> None:
    """E15: each picture of a batch asks the clock anew."""
    clock = iter(NOON + timedelta(seconds=second) for second in range(100))
    paths = [
        save(PNG, tmp_path, "[date] [time]", RECORD, now=lambda: next(clock)) for _ in range(3)
    ]
    assert len({path.stem for path in paths}) == 3
    assert all(path.stem.startswith("2026-01-31 12-00-") for path in paths)


@pytest.mark.parametrize(
    ("pattern", "gone"),
    [("[number]-[seed]", [2]), ("[number]", [1, 3]), ("[seed]-[number]", [1, 2, 3])],
)
def test_a_number_does_not_come_again(pattern: str, gone: Sequence[int], tmp_path: Path) -> None:
    """E16: whichever pictures are deleted, the last too."""
    paths = [save(PNG, tmp_path, pattern, RECORD) for _ in range(3)]
    for i in gone:
        paths[i - 1].unlink()
    again = save(PNG, tmp_path, pattern, RECORD)
    assert "00004" in again.stem
    assert again not in paths


@pytest.mark.parametrize("content", [None, b"", b"junk", b"-5\n", b"9" * 30, b"2\n", b"7\n"])
def test_a_damaged_or_lost_counter_does_not_lower_the_number(
    content: bytes | None, tmp_path: Path
) -> None:
    """E16."""
    for _ in range(5):
        save(PNG, tmp_path, DEFAULT_FILENAME, RECORD)
    counter = tmp_path / ".sdamd-number"
    if content is None:
        counter.unlink()
    else:
        counter.write_bytes(content)
    expected = 8 if content == b"7\n" else 6
    for number in (expected, expected + 1):
        path = save(PNG, tmp_path, DEFAULT_FILENAME, with_seed(number))
        assert path.name.startswith(f"0000{number}-")


@POSIX_ONLY
def test_the_counter_may_be_a_link_or_folder_of_somebody_else(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("precious")
    (tmp_path / ".sdamd-number").symlink_to(target)
    for _ in range(2):
        save(PNG, tmp_path, DEFAULT_FILENAME, RECORD)
    assert target.read_text() == "precious"
    other = tmp_path / "other"
    (other / ".sdamd-number").mkdir(parents=True)
    assert save(PNG, other, DEFAULT_FILENAME, RECORD).name == f"00001-{NAME}"


@POSIX_ONLY
@pytest.mark.parametrize(
    "prompt", ["\N{FIRE}" * 300, "山" * 300, "a" * 251 + ".tmp", "e\u0301" * 300, "x" * 60_000]
)
def test_a_long_prompt_is_saved_under_a_shorter_name(prompt: str, tmp_path: Path) -> None:
    """E11: also in a folder whose path is long itself."""
    deep = tmp_path / ("d" * 200) / ("山" * 80)
    check_folder(deep)
    for folder in (tmp_path, deep):
        path = save(PNG, folder, DEFAULT_FILENAME, with_prompt(prompt))
        assert path.name.startswith("00001-18446744073709551615-")
        assert path.read_bytes() == PNG


@POSIX_ONLY
@pytest.mark.parametrize(("letters", "fits"), [(4000, True), (4040, True), (4070, False)])
def test_a_path_near_the_limit_is_saved_or_refused(
    letters: int, fits: bool, tmp_path: Path
) -> None:
    """E11: the whole path, not only the name."""
    folder = tmp_path
    while (room := letters - len(str(folder)) - 1) > 0:
        folder /= "d" * min(room, 200)
    if not fits:
        with pytest.raises(StorageError, match="path is so long"):
            check_folder(folder)
        return
    check_folder(folder)
    assert save(PNG, folder, "[prompt]", with_prompt("x" * 300)).read_bytes() == PNG


@pytest.mark.parametrize(
    "prompt", ["CON", "nul.txt", "a:b", "a/b", "..", ".", " x. ", "\u202e", "a" * 1000]
)
def test_odd_prompts_make_names_inside_the_folder(prompt: str, tmp_path: Path) -> None:
    """E12, F08."""
    paths = {save(PNG, tmp_path, "[prompt]", with_prompt(prompt)) for _ in range(2)}
    assert len(paths) == 2
    assert {path.parent for path in paths} == {tmp_path}
    assert len(names(tmp_path)) == 2


@pytest.mark.parametrize(
    "folder", ["žluťoučký kůň", "通义", "e\u0301", "é", "with blank", "100%'$"]
)
def test_any_folder_name_works(folder: str, tmp_path: Path) -> None:
    """E24: both spellings of é, too."""
    outputs = tmp_path / folder / "通义 outputs"
    check_folder(outputs)
    path = save(
        encode(picture(), with_prompt("山水")), outputs, DEFAULT_FILENAME, with_prompt("山水")
    )
    assert path.name == "00001-18446744073709551615-山水.png"
    assert read_record(path).job.prompt == "山水"


def run_python(script: str, *arguments: str, prefix: Sequence[str] = (), **options: Any) -> Any:
    """Run a script in a process of its own; `save`, `PNG`, `RECORD` and `FOLDER` are there."""
    head = (
        "import sys\n"
        "from dataclasses import replace\n"
        "from pathlib import Path\n"
        "from sdamd.errors import StorageError\n"
        "from sdamd.gallery import check_folder, save\n"
        "from sdamd.metadata import from_json\n"
        "from sdamd.request import Job\n"
        f"RECORD = from_json({to_json(RECORD)!r})\n"
        "PNG = b'\\x89PNG' + bytes(100_000)\n"
        "FOLDER = Path(sys.argv[1])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    environment |= options.pop("env", {})
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", head + script, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **options,
    )


def test_a_process_in_the_c_locale_saves_any_name(tmp_path: Path) -> None:
    """E24."""
    folder = tmp_path / "žluťoučký 通义"
    script = "check_folder(FOLDER)\nsave(PNG, FOLDER, '山水 [seed]', RECORD)"
    process = run_python(script, str(folder), env={"LC_ALL": "C", "LANG": "C"})
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert names(folder) == ["山水 18446744073709551615.png"]


@pytest.mark.parametrize("pattern", ["out", DEFAULT_FILENAME])
def test_processes_that_save_at_once_replace_nothing(pattern: str, tmp_path: Path) -> None:
    """E13: each picture is kept, and no number is given twice."""
    script = (
        "for i in range(20):\n"
        "    png = PNG + sys.argv[2].encode() + bytes([i])\n"
        "    record = replace(RECORD, job=replace(RECORD.job, seed=ord(sys.argv[2])))\n"
        f"    print(save(png, FOLDER, {pattern!r}, record).name)\n"
    )
    processes = [run_python(script, str(tmp_path), who) for who in "abc"]
    told: list[str] = []
    for process in processes:
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        told += output.split("\n")[:-1]
    assert len(told) == 60
    assert sorted(told) == names(tmp_path)
    assert len({path.read_bytes()[-2:] for path in tmp_path.glob("*.png")}) == 60
    if pattern == DEFAULT_FILENAME:
        assert [name[:5] for name in names(tmp_path)] == [f"{i:05d}" for i in range(1, 61)]


def test_threads_that_save_at_once_replace_nothing(tmp_path: Path) -> None:
    """E13."""
    threads = [
        threading.Thread(target=lambda: [save(PNG, tmp_path, "out", RECORD) for _ in range(5)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(names(tmp_path)) == 20


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_that_appears_meanwhile_is_not_replaced(
    has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E13: of a program that knows nothing of the lock."""
    if not has_links:
        monkeypatch.setattr(os, "link", no_links)
    theirs = tmp_path / "12-00-00.png"

    def now() -> datetime:
        # The second asking is for the name itself, when the folder has been looked through.
        if next(asked):
            theirs.write_text("theirs")
        return NOON

    asked = iter(range(10))
    path = save(PNG, tmp_path, "[time]", RECORD, now=now)
    assert path.read_bytes() == PNG
    assert theirs.read_text() == "theirs"
    assert len(names(tmp_path)) == 2


def no_links(*_: object, **__: object) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


@POSIX_ONLY
def test_nothing_is_replaced_where_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E13: as on exFAT."""
    monkeypatch.setattr(os, "link", no_links)
    (tmp_path / "out.png").write_text("mine")
    assert save(PNG, tmp_path, "out", RECORD).read_bytes() == PNG
    assert save(PNG, tmp_path, DEFAULT_FILENAME, RECORD).read_bytes() == PNG
    assert (tmp_path / "out.png").read_text() == "mine"
    assert len(names(tmp_path)) == 3


@POSIX_ONLY
def test_a_failed_replacement_leaves_no_empty_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E23."""

    def no_replace(*_: object) -> Path:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr(Path, "replace", no_replace)
    with pytest.raises(StorageError, match="Input/output error"):
        save(PNG, tmp_path, "out", RECORD)
    assert names(tmp_path) == []


@pytest.mark.parametrize("pattern", ["sub/../[seed]", "[date]/a/[seed]"])
def test_a_pattern_makes_its_folders(pattern: str, tmp_path: Path) -> None:
    path = save(PNG, tmp_path, pattern, RECORD)
    assert path.is_relative_to(tmp_path)
    assert path.read_bytes() == PNG


@POSIX_ONLY
def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    """F08."""
    outputs, outside, inside = (tmp_path / name for name in ("outputs", "outside", "outputs/in"))
    for folder in (outputs, outside, inside):
        folder.mkdir()
    (outputs / "sub").symlink_to(outside)
    (outputs / "alias").symlink_to(inside)
    with pytest.raises(StorageError, match="leads out of"):
        save(PNG, outputs, "sub/x", RECORD)
    with pytest.raises(StorageError, match="leads out of"):
        save(PNG, outputs, "sub/deeper/x", RECORD)
    assert list(outside.iterdir()) == []
    assert save(PNG, outputs, "alias/x", RECORD).resolve().parent == inside.resolve()


@POSIX_ONLY
def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    """F08: another disk is chosen in the settings, and a link is as good."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    save(PNG, tmp_path / "link", "[date]/x", RECORD)
    assert len(list((tmp_path / "real").glob("*/x.png"))) == 1


def test_a_wrong_pattern_saves_nothing(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="leaves the output folder"):
        save(PNG, tmp_path, "../x", RECORD)
    assert list(tmp_path.iterdir()) == []


# -- storage that fails ------------------------------------------------------------------------


def test_the_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    check_folder(folder)
    check_folder(folder)
    assert list(folder.iterdir()) == []


def test_too_little_free_space_is_told_before_the_run(tmp_path: Path) -> None:
    """E23."""
    with pytest.raises(StorageError, match=r"MiB free; needed are at least 1099511627776\.0 MiB"):
        check_folder(tmp_path, free_bytes=2**60)


@pytest.mark.parametrize("check", [True, False])
def test_a_folder_that_is_a_file_is_told(check: bool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "sub"):
        with pytest.raises(StorageError, match=r"a file, not a folder|no such folder"):
            check_folder(folder) if check else save(PNG, folder, "x", RECORD)


def test_saving_does_not_make_a_folder_that_went_away(tmp_path: Path) -> None:
    """An unplugged disk must not come again as a folder on another."""
    gone = tmp_path / "gone"
    with pytest.raises(StorageError, match=r"cannot be saved in .*gone: there is no such folder"):
        save(PNG, gone, DEFAULT_FILENAME, RECORD)
    assert not gone.exists()


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_a_path_that_no_system_takes_is_told(name: str, tmp_path: Path) -> None:
    for action in (check_folder, lambda folder: save(PNG, folder, "x", RECORD)):
        with pytest.raises(StorageError, match="no path may hold"):
            action(tmp_path / name)


@POSIX_ONLY
def test_a_folder_name_that_is_too_long_is_told(tmp_path: Path) -> None:
    """E11."""
    with pytest.raises(StorageError, match="name is too long"):
        check_folder(tmp_path / ("x" * 300))


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs Linux's /proc")
def test_a_folder_that_takes_no_files_is_told() -> None:
    """Root may write anywhere but here."""
    with pytest.raises(StorageError, match="pictures cannot be saved in /proc"):
        check_folder(Path("/proc"), free_bytes=0)
    with pytest.raises(StorageError, match="the picture cannot be saved in /proc"):
        save(PNG, Path("/proc"), "x", RECORD)


@POSIX_ONLY
def test_a_write_that_fails_midway_leaves_nothing(tmp_path: Path) -> None:
    """E23: the limit on a file's size stops the write after 50 000 of 100 000 bytes."""
    script = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))\n"
        "try:\n"
        "    save(PNG, FOLDER, 'x', RECORD)\n"
        "except StorageError as error:\n"
        "    sys.exit(f'{error.exit_status} {error}')\n"
    )
    process = run_python(script, str(tmp_path))
    _, errors = process.communicate(timeout=60)
    assert errors.startswith("4 the picture cannot be saved in"), errors
    assert "larger than the file system or a limit allows" in errors
    assert names(tmp_path) == []


def can_mount() -> bool:
    unshare = shutil.which("unshare")
    if unshare is None:
        return False
    mount = [unshare, "-rm", "sh", "-c", "mount -t tmpfs none /tmp"]
    return subprocess.run(mount, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("options", "script", "message"),
    [
        ("size=256k", "save(PNG, FOLDER, 'x', RECORD)", "the disk is full"),
        ("ro", "save(PNG, FOLDER, 'x', RECORD)", "the file system is read-only"),
        ("ro", "check_folder(FOLDER, free_bytes=0)", "the file system is read-only"),
        ("size=1m", "check_folder(FOLDER)", "the disk has 1.0 MiB free; needed are at least 16.0"),
    ],
)
def test_a_full_or_read_only_disk_is_told(
    options: str, script: str, message: str, tmp_path: Path
) -> None:
    """E23: on a real small disk; what was saved before stays whole."""
    if not can_mount():
        pytest.skip("needs the right to mount in a namespace of its own")
    code = (
        "saved = []\n"
        "try:\n"
        "    for _ in range(9):\n"
        f"        saved.append({script})\n"
        "except StorageError as error:\n"
        "    left = [p for p in FOLDER.iterdir() if p.name != '.sdamd-number']\n"
        "    assert sorted(left) == sorted(saved), left\n"
        "    assert all(p.read_bytes() == PNG for p in saved)\n"
        "    sys.exit(f'{error.exit_status} {len(saved)} {error}')\n"
    )
    mount = f'mount -t tmpfs -o {options} none "$0" && exec "$@"'
    prefix = ["unshare", "-rm", "sh", "-c", mount, str(tmp_path)]
    process = run_python(code, str(tmp_path), prefix=prefix)
    _, errors = process.communicate(timeout=60)
    assert message in errors
    assert errors.startswith(f"4 {2 if 'full' in message else 0} "), errors


@POSIX_ONLY
def test_what_a_killed_process_left_is_removed_by_the_next_run(tmp_path: Path) -> None:
    """E21, E23: killed between the write and the name; the lock goes with the process."""
    script = (
        "import os, time\n"
        "os.link = lambda *_: (print('written', flush=True), time.sleep(60))\n"
        "save(PNG, FOLDER, 'x', RECORD)\n"
    )
    process = run_python(script, str(tmp_path))
    assert process.stdout.readline() == "written\n"
    assert len(list(tmp_path.glob(".sdamd-*.tmp"))) == 1
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    check_folder(tmp_path)
    assert names(tmp_path) == []
    assert save(PNG, tmp_path, "x", RECORD).read_bytes() == PNG


def test_a_picture_is_encoded_about_as_small_as_by_default() -> None:
    """The faster level costs few bytes on a picture with soft forms."""
    bands = [
        Image.effect_noise((24, 24), 80).resize((256, 256), Image.Resampling.BICUBIC)
        for _ in range(3)
    ]
    image = Image.merge("RGB", bands)
    plain = io.BytesIO()
    image.save(plain, "PNG")
    assert len(encode(image, RECORD)) < 1.1 * len(plain.getvalue()) + 1000


# -- Windows, by what it answers -----------------------------------------------------------------


class Held(PermissionError):
    """What renaming a file raises there while a virus scanner reads it."""

    winerror = 32


class Renames:
    """A rename that fails with `error` the first `times`."""

    def __init__(self, error: OSError, times: int) -> None:
        self.error, self.left, self.slept = error, times, 0.0

    def __call__(self, temporary: Path, path: Path) -> None:
        if self.left > 0:
            self.left -= 1
            raise self.error
        temporary.rename(path)

    def sleep(self, seconds: float) -> None:
        self.slept += seconds


def test_a_new_file_that_a_scanner_reads_gets_its_name_a_moment_later(tmp_path: Path) -> None:
    temporary, path = tmp_path / "new", tmp_path / "picture.png"
    temporary.touch()
    renames = Renames(Held(13, "in use"), times=3)
    rename_patiently(temporary, path, rename=renames, sleep=renames.sleep)
    assert path.exists()
    assert renames.slept == pytest.approx(0.15)


def test_a_file_that_stays_in_use_is_an_error_after_a_second(tmp_path: Path) -> None:
    renames = Renames(Held(13, "in use"), times=1000)
    with pytest.raises(Held):
        rename_patiently(tmp_path / "a", tmp_path / "b", rename=renames, sleep=renames.sleep)
    assert renames.slept == pytest.approx(1.0)


@pytest.mark.parametrize(
    "error", [FileExistsError(17, "taken"), PermissionError(13, "denied"), OSError(28, "full")]
)
def test_what_waiting_does_not_help_is_told_at_once(tmp_path: Path, error: OSError) -> None:
    renames = Renames(error, times=1)
    with pytest.raises(type(error)):
        rename_patiently(tmp_path / "a", tmp_path / "b", rename=renames, sleep=renames.sleep)
    assert renames.slept == 0


@pytest.mark.parametrize(
    ("folder", "room"),
    [
        (r"C:\Pictures", 247),
        ("C:\\" + "写" * 100, 155),
        ("C:\\" + "🦊" * 100, 55),  # two units each
        ("C:\\" + "\ud800" * 10, 245),  # half a letter, which NTFS allows
    ],
    ids=["plain", "chinese", "emoji", "surrogates"],
)
def test_the_room_for_a_name_on_windows_counts_utf16_units(folder: str, room: int) -> None:
    assert windows_room(folder) == room

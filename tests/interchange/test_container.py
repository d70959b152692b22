"""Files to the texts in them: every container, every encoding, and whatever else comes."""

import gzip
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from sdamd import gallery
from sdamd.errors import BadMetadata
from sdamd.interchange import container, exif, hidden
from sdamd.metadata import TEXT_MAX_BYTES
from tests.interchange import build

TEXT = "a fox 🦊 山, مرحبا\nNegative prompt: x\nSteps: 20, Sampler: Euler, CFG scale: 7, Seed: 5"
LATIN = "a fox\nSteps: 20, Sampler: Euler, CFG scale: 7, Seed: 5"

# -- Exif ----------------------------------------------------------------------------------------


@pytest.mark.report("E06")
@pytest.mark.parametrize("kind", ["jpg", "webp", "avif", "png"])
@pytest.mark.parametrize("code", ["be", "le", "bom", "utf8", "ascii", "undefined", "bare"])
def test_a_comment_is_read_in_every_code(kind: str, code: str, tmp_path: Path) -> None:
    path = build.write(tmp_path, {"UserComment": TEXT}, f"{kind} {code}")
    assert gallery.read_texts(path)["UserComment"] == TEXT
    assert gallery.request_from_png(path).seed == 5


@pytest.mark.report("E06")
@pytest.mark.parametrize("code", ["be", "le", "ascii"])
def test_the_order_of_the_blocks_bytes_says_nothing_of_the_texts(code: str) -> None:
    block = build.exif_of({"UserComment": TEXT}, code)
    other = build.little_endian(block)
    assert exif.read_texts(block) == exif.read_texts(other) == {"UserComment": TEXT}


@pytest.mark.report("E06")
def test_the_bytes_of_a_real_jpeg_are_read() -> None:
    """The first bytes of the comment in a public test picture."""
    start = bytes.fromhex("55 4e 49 43 4f 44 45 00 00 70 00 68 00 6f 00 74 00 6f 00 20 00 6f 00 66")
    assert exif.decode_comment(start) == "photo of"


@pytest.mark.parametrize("text", ["山水画", "наш лес", "\N{FIRE}" * 5])
def test_letters_without_a_zero_byte_are_taken_as_a1111_writes_them(text: str) -> None:
    assert exif.decode_comment(build.comment(text, "be")) == text


def test_a_code_without_a_text_is_no_record(tmp_path: Path) -> None:
    """E06: the charset id alone."""
    path = build.write(tmp_path, {"UserComment": ""}, "jpg code only")
    with pytest.raises(BadMetadata, match="no record"):
        gallery.read(path)


@pytest.mark.parametrize("quality", [95, 30])
def test_a_jpegs_pixels_do_not_matter(quality: int, tmp_path: Path) -> None:
    path = tmp_path / "x.jpg"
    build.picture().save(path, quality=quality, exif=build.exif_of({"UserComment": TEXT}, "be"),
                         comment="made by hand", progressive=True)  # fmt: skip
    assert gallery.request_from_png(path).seed == 5


def test_a_comment_in_exif_goes_before_the_chunks(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    info = PngInfo()
    info.add_text("parameters", LATIN)
    block = build.exif_of({"UserComment": LATIN.replace("Seed: 5", "Seed: 6")}, "be")
    build.picture().save(path, pnginfo=info, exif=block)
    assert gallery.request_from_png(path).seed == 6


@given(st.binary(max_size=300))
@example(b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", 65535))
@example(b"II*\0" + struct.pack("<I", 2**32 - 1))
@example(b"MM\0*" + struct.pack(">I", 8) + struct.pack(">HHHII", 1, 0x8769, 4, 1, 8))
@example(b"MM\0*" + struct.pack(">IHHHII", 8, 1, 0x9286, 7, 2**32 - 1, 0))
def test_any_exif_block_gives_texts(data: bytes) -> None:
    assert all(isinstance(text, str) for text in exif.read_texts(data).values())
    assert isinstance(exif.decode_comment(data), str)


# -- hidden in the pixels ------------------------------------------------------------------------


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60),
    where=st.sampled_from(["alpha", "colours"]),
    packed=st.booleans(),
)
def test_what_is_hidden_is_found(text: str, where: str, packed: bool) -> None:
    image = build.hide(build.picture(), text, where=where, packed=packed)
    assert hidden.read(image) == text


def test_a_record_in_the_chunks_is_enough(tmp_path: Path) -> None:
    """The pixels are looked at only where there is no other record."""
    path = tmp_path / "x.png"
    info = PngInfo()
    info.add_text("parameters", LATIN)
    build.hide(build.picture(), TEXT, where="alpha", packed=True).save(path, pnginfo=info)
    assert container.HIDDEN_KEY not in gallery.read_texts(path)


def hidden_bytes(stream: bytes) -> Image.Image:
    """A picture with these bytes in its alpha channel."""
    image = build.picture("RGBA").resize((128, 128))
    bits = [byte >> shift & 1 for byte in stream for shift in range(7, -1, -1)]
    columns = bytes(254 | bit for bit in bits).ljust(128 * 128, b"\xff")
    alpha = Image.frombytes("L", (128, 128), columns).transpose(Image.Transpose.TRANSPOSE)
    image.putalpha(alpha)
    return image


BOMB = gzip.compress(bytes(3 * TEXT_MAX_BYTES), 9)[:1900]


@pytest.mark.parametrize(
    ("stream", "sentence"),
    [
        (b"stealth_pnginfo" + struct.pack(">I", 2**31), "2147483648 bits long in a picture with"),
        (b"stealth_pngcomp" + struct.pack(">I", 2**32 - 1), "damaged: 4294967295 bits"),
        (b"stealth_pnginfo" + struct.pack(">I", 7) + b"a", "damaged: 7 bits"),
        (b"stealth_pngcomp" + struct.pack(">I", 80) + b"not packed", "cannot be unpacked"),
        (b"stealth_pngcomp" + struct.pack(">I", len(BOMB) * 8) + BOMB, "too large: over 1048576"),
    ],
    ids=["2**31 bits", "2**32 - 1 bits", "no whole byte", "not gzip", "a bomb"],
)
def test_a_damaged_hidden_record_says_so(stream: bytes, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    hidden_bytes(stream).save(path)
    with pytest.raises(BadMetadata, match=sentence) as caught:
        gallery.read(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("stream", [b"", b"stealth_pngnone" + bytes(8), b"stealth_png"])
def test_other_bits_are_no_record(stream: bytes) -> None:
    assert hidden.read(hidden_bytes(stream)) is None


def test_a_picture_that_claims_to_be_huge_is_not_decoded(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    header = build.chunk(b"IHDR", struct.pack(">IIBBBBB", 30_000, 30_000, 8, 6, 0, 0, 0))
    pixels = build.chunk(b"IDAT", zlib.compress(bytes(1000)))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + header + pixels + build.chunk(b"IEND", b""))
    with pytest.raises(BadMetadata, match="no record"):
        gallery.read(path)


IINF = b"\0\0\0\x22iinf" + bytes(4) + b"\0\1" + b"\0\0\0\x14infe\2\0\0\0\0\1\0\0Exif"
AVIF_CUT = (
    struct.pack(">I", 12 + len(IINF) + 12)
    + b"meta"
    + bytes(4)
    + IINF
    + b"\0\0\0\x0ciloc"
    + bytes(4)
)

# -- files of other kinds ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "neither a picture nor a text"),
        (b"  \n", "neither a picture nor a text"),
        (b"\0\1\2\3" * 50, "neither a picture nor a text"),
        (b"GIF89a" + bytes(50), "neither a picture nor a text"),
        ("кот".encode("cp1251"), r"no UTF-8 text \(byte 0\)"),
        (b"a" * (TEXT_MAX_BYTES + 1), "more than 1048576 bytes"),
        (b"\xff\xd8\xff\xe1\xff\xff" + b"a" * 20, "no record|cut short"),
        (b"\xff\xd8\xff", "cut short"),
        (b"RIFF\0\0\0\0WEBPEXIF\xff\xff\xff\x7f" + bytes(20), "too large: 2147483647 bytes"),
        (b"\0\0\0\x20ftypavif" + bytes(24), "damaged: its AVIF container has no list"),
        (b"\0\0\0\x20ftypavif" + bytes(30), "no list|beyond its end"),
        (b"\0\0\0\x10ftypavif" + bytes(4) + b"\0\0\0\1meta" + b"\x7f" * 8, "beyond its end"),
        (b"\0\0\0\x10ftypavif" + bytes(4) + b"\0\0\0\x0cmeta" + bytes(4), "no record"),
        (b"\0\0\0\x10ftypavif" + bytes(4) + AVIF_CUT, "ends within a table"),
        (b'{"steps": 3}', "of another tool"),
        (b"[1, 2]", None),
        (b"\xef\xbb\xbf" + LATIN.encode(), None),
    ],
)  # fmt: skip
def test_what_is_no_record_says_why(content: bytes, sentence: str | None, tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_bytes(content)
    if sentence is None:
        assert gallery.read(path).tool
        return
    with pytest.raises(BadMetadata, match=sentence):
        gallery.read(path)


@pytest.mark.parametrize("name", ["x.png", "x.jpg", "x", "x.html"])
def test_a_text_in_the_place_of_a_picture_is_none(name: str, tmp_path: Path) -> None:
    """Half a download, or the page that a site sends in its place."""
    path = tmp_path / name
    path.write_text(f"<html>{LATIN}")
    with pytest.raises(BadMetadata, match="neither a picture nor a text"):
        gallery.read(path)


def test_a_caption_beside_a_picture_is_no_record(tmp_path: Path) -> None:
    path = build.write(tmp_path, {"": "a cat, a caption for training"}, "beside")
    with pytest.raises(BadMetadata, match="no record"):
        gallery.read(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe1", b"RIFF\0\0\0\0WEBP",
                     b"\0\0\0\x1cftypavif"]),
    st.binary(max_size=200),
)  # fmt: skip
def test_any_file_is_read_or_refused_with_a_sentence(
    tmp_path: Path, start: bytes, rest: bytes
) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(start + rest)
    try:
        gallery.read(path)
    except BadMetadata as error:
        assert str(path) in str(error)  # noqa: PT017  # both ways out are right


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    kind=st.sampled_from(["png tEXt", "jpg be", "webp le", "avif be", "png hidden alpha packed"]),
    place=st.floats(0, 1, exclude_max=True),
    change=st.integers(0, 255),
)
def test_a_file_that_was_cut_or_changed_is_read_or_refused(
    tmp_path: Path, kind: str, place: float, change: int
) -> None:
    """Cut at a place, or a byte changed there."""
    texts = {"parameters": LATIN} if kind == "png tEXt" else {"UserComment": LATIN}
    path = build.write(tmp_path, texts, kind)
    content = bytearray(path.read_bytes())
    at = int(place * len(content))
    if change:
        content[at] ^= change
    else:
        del content[at:]
    path.write_bytes(content)
    try:
        gallery.read(path)
    except BadMetadata as error:
        assert str(path) in str(error)  # noqa: PT017  # both ways out are right


@pytest.mark.report("E24")
@pytest.mark.parametrize("name", ["žluťoučký kůň", "通义", "e\u0301 é", "\u202eabc"])
def test_any_name_of_a_file_will_do(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    for kind in ("png hidden alpha packed", "avif be", "jpg be"):
        assert gallery.read(build.write(folder, {"UserComment": LATIN}, kind)).request().seed == 5

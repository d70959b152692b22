"""Pictures that are given: what is read, how, and what is refused in a sentence."""

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageCms

from sdamd import picture
from sdamd.errors import BadRequest
from sdamd.picture import Picture


def saved(image: Image.Image, kind: str = "PNG", **how: Any) -> bytes:
    written = io.BytesIO()
    image.save(written, kind, **how)
    return written.getvalue()


def given_as(data: bytes) -> Picture:
    return Picture(sha256="0" * 64, name="x.png", data=data)


def refusal(data: bytes) -> str:
    with pytest.raises(BadRequest) as caught:
        picture.decode(given_as(data), "init_image")
    (problem,) = caught.value.problems
    return problem


RAMP = Image.merge(
    "RGB",
    (
        Image.linear_gradient("L").resize((32, 24)),
        Image.linear_gradient("L").transpose(Image.Transpose.ROTATE_90).resize((32, 24)),
        Image.new("L", (32, 24), 90),
    ),
)


def exif(orientation: int) -> Image.Exif:
    made = Image.Exif()
    made[0x0112] = orientation
    return made


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photograph_that_lies_on_its_side_is_put_upright(orientation: int) -> None:
    upright = picture.decode(given_as(saved(RAMP, "PNG", exif=exif(orientation))))
    turned = {
        2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM, 5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }  # fmt: skip
    expected = RAMP.transpose(turned[orientation]) if orientation in turned else RAMP
    assert upright.tobytes() == expected.tobytes()


def test_palette_grey_and_one_bit_become_rgb() -> None:
    for mode in ("P", "L", "1"):
        made = picture.decode(given_as(saved(RAMP.convert(mode))))
        assert made.mode == "RGB"
        assert made.tobytes() == RAMP.convert(mode).convert("RGB").tobytes()


def test_sixteen_bits_of_grey_are_brought_to_eight_and_not_cut_off() -> None:
    levels = np.linspace(0, 65535, 32 * 24).reshape(24, 32).astype(np.uint16)
    made = np.asarray(picture.decode(given_as(saved(Image.fromarray(levels)))))
    assert np.abs(made[..., 0] - levels / 257).max() <= 1
    assert made[..., 0].max() == 255


def test_cmyk_becomes_rgb() -> None:
    made = picture.decode(given_as(saved(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "TIFF")))
    assert made.getpixel((8, 8)) == (255, 0, 0)


def test_colours_of_another_profile_become_srgb() -> None:
    lab = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB"))
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    assert picture.decode(given_as(saved(RAMP, icc_profile=srgb))).tobytes() == RAMP.tobytes()
    for useless in (b"no profile", lab.tobytes()):
        made = picture.decode(given_as(saved(RAMP, icc_profile=useless)))
        assert made.tobytes() == RAMP.tobytes()


def test_what_is_transparent_is_kept_apart_from_the_colours() -> None:
    clear = RAMP.copy()
    clear.putalpha(Image.linear_gradient("L").resize(RAMP.size))
    made = picture.decode(given_as(saved(clear)))
    assert made.mode == "RGBA"
    assert np.asarray(picture.on_colour(made, "white"))[0].min() > 245
    gone = np.asarray(picture.transparency(made))
    assert gone[0].min() > 245
    assert gone[-1].max() < 10


def test_a_picture_that_is_opaque_throughout_has_no_transparency() -> None:
    opaque = RAMP.convert("RGBA")
    assert picture.decode(given_as(saved(opaque))).mode == "RGB"
    assert picture.transparency(RAMP).getextrema() == (0, 0)


def test_strokes_on_a_transparent_ground_are_a_mask() -> None:
    strokes = Image.new("RGBA", (16, 16), (255, 255, 255, 0))
    strokes.paste((255, 255, 255, 255), (4, 4, 8, 8))
    mask = picture.mask_of(picture.decode(given_as(saved(strokes))))
    assert mask.getbbox() == (4, 4, 8, 8)


def bomb() -> bytes:
    """A PNG of a few hundred bytes that says it has 40 000 x 40 000 pixels."""
    head = struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data
            + struct.pack(">I", zlib.crc32(kind + data))
        )  # fmt: skip

    body = zlib.compress(bytes(100))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def animated(kind: str) -> bytes:
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue", "green")]
    return saved(frames[0], kind, save_all=True, append_images=frames[1:])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (lambda: saved(Image.new("RGB", (1, 1))), "is 1 x 1 pixels; allowed 8 to 16384 pixels"),
        (lambda: saved(Image.new("RGB", (20_000, 1))), "is 20000 x 1 pixels; allowed 8 to 16384"),
        (lambda: saved(RAMP)[:-60], "is damaged or cut off"),
        (lambda: saved(RAMP, "JPEG")[:-200], "is damaged or cut off"),
        (lambda: animated("GIF"), "is animated, with 3 frames"),
        (lambda: animated("PNG"), "is animated, with 3 frames"),
        (lambda: animated("WEBP"), "is animated, with 3 frames"),
        (bomb, "pixels; allowed at most 100 million"),
        (lambda: b'<svg xmlns="http://www.w3.org/2000/svg"/>', "is no picture; allowed are PNG"),
        (lambda: b"<!doctype html><title>404</title>", "is no picture; allowed are PNG"),
        (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is no picture"),
        (lambda: b"", "is here without its bytes"),
        (lambda: bytes(1000), "is no picture"),
        (
            lambda: saved(Image.new("F", (16, 16)), "TIFF"),
            "has colours of the kind F; allowed are RGB, grey, palette and CMYK",
        ),
        (lambda: saved(Image.new("LAB", (16, 16)), "TIFF"), "has colours of the kind LAB"),
    ],
)  # fmt: skip
def test_what_is_no_picture_to_start_from_gets_one_sentence(
    data: Callable[[], bytes], said: str
) -> None:
    problem = refusal(data())
    assert problem.startswith("init_image 'x.png' ")
    assert said in problem
    assert len(problem) < 300


@given(st.binary(max_size=60), st.integers(0, 400), st.sampled_from(["PNG", "JPEG", "WEBP", "BMP"]))
def test_a_damaged_file_is_a_picture_or_a_sentence(noise: bytes, at: int, kind: str) -> None:
    data = bytearray(saved(RAMP, kind))
    data[at : at + len(noise)] = noise
    try:
        made = picture.decode(given_as(bytes(data)))
    except BadRequest as error:
        assert len(error.problems) == 1  # noqa: PT017  # either way is right
    else:
        assert made.mode in ("RGB", "RGBA")


# -- files -----------------------------------------------------------------------------------


def test_a_file_is_read_once_and_known_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(saved(RAMP))
    found, image = picture.read(str(tmp_path / "a.png"), "init_image")
    assert found.name == "a.png"
    assert found.data == saved(RAMP)
    assert image.tobytes() == RAMP.tobytes()
    assert "a.png" in found.reference
    assert str(tmp_path) not in found.reference
    assert "data" not in repr(found)


def test_a_picture_of_a_record_is_found_beside_it_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "renamed.png").write_bytes(saved(RAMP))
    (tmp_path / "cat.png").write_bytes(saved(RAMP.rotate(180)))
    (tmp_path / "notes.txt").write_bytes(saved(RAMP))
    wanted, _ = picture.read(str(tmp_path / "renamed.png"), "init_image")
    reference = Picture(sha256=wanted.sha256, name="cat.png").reference
    found, _ = picture.read(reference, "init_image", [tmp_path / "nowhere", tmp_path])
    assert found.name == "renamed.png"
    with pytest.raises(
        BadRequest, match=r"'cat.png' with the sha256 .*; give its file with --init"
    ):
        picture.read(reference, "init_image", [])


@pytest.mark.parametrize(
    ("name", "said"),
    [("gone.png", "does not exist"), (".", "is no file"), ("a\0b", "cannot be read")],
)
def test_a_file_that_cannot_be_read_gets_one_sentence(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        picture.read(f"{tmp_path}/{name}", "mask_image")


def test_a_path_in_a_record_is_cut_down_to_a_name() -> None:
    sha = "a" * 64
    for name in ("/home/anna/cat.png", r"C:\Users\anna\cat.png", "../cat.png"):
        assert Picture.parse(f"sha256:{sha}:{name}", "init_image").name == "cat.png"


@pytest.mark.parametrize("text", ["", "cat.png", "sha256:abc:cat.png", 5, None])
def test_what_is_no_reference_is_refused(text: object) -> None:
    with pytest.raises(BadRequest, match="init_image is "):
        Picture.parse(text, "init_image")

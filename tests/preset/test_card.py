"""Preset cards through what chat programs do to pictures."""

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from sdamd.errors import BadRequest
from sdamd.preset import read
from sdamd.preset.card import CODE_MAX_BYTES, TEXT_KEY, make_card, read_card

DATA = (
    'schema = 1\r\nname = "Портрет 肖像"\ndescription = "one person, upright"\nauthor = "Ann"\n'
    '# kept as it is\n[request]\nprompt = "photo of {prompt}, soft light"\nwidth = 512\n'
).encode()


def picture() -> Image.Image:
    y, x = np.mgrid[0:256, 0:256]
    return Image.fromarray(np.stack([x, y, 255 - x], axis=-1).astype(np.uint8))


@pytest.fixture(name="card")
def card_() -> Image.Image:
    png, coded = make_card(read(DATA, "p.toml"), DATA, picture())
    assert coded
    return Image.open(io.BytesIO(png))


def saved(image: Image.Image, path: Path, **how: Any) -> Path:
    image.save(path, **how)
    return path


def test_the_file_comes_out_of_a_card_byte_for_byte(card: Image.Image, tmp_path: Path) -> None:
    path = tmp_path / "card.png"
    path.write_bytes(make_card(read(DATA, "p.toml"), DATA, picture())[0])
    assert read_card(path) == DATA
    assert TEXT_KEY in card.info


@pytest.mark.parametrize(
    ("suffix", "how"),
    [
        (".png", {}),
        (".jpg", {"quality": 60}),
        (".jpg", {"quality": 30, "subsampling": 2}),
        (".webp", {"quality": 50}),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 0.75, 1.6])
def test_a_card_survives_being_saved_anew_without_its_text(
    card: Image.Image, tmp_path: Path, suffix: str, how: dict[str, Any], scale: float
) -> None:
    size = (round(card.width * scale), round(card.height * scale))
    path = saved(card.convert("RGB").resize(size), tmp_path / f"x{suffix}", **how)
    assert read_card(path) == DATA


def test_a_card_survives_being_part_of_a_screenshot(card: Image.Image, tmp_path: Path) -> None:
    screen = Image.new("RGB", (1366, 1200), (40, 42, 54))
    screen.paste(card.convert("RGB"), (211, 37))
    assert read_card(saved(screen, tmp_path / "shot.png")) == DATA


def test_a_card_that_lost_its_preset_says_so(card: Image.Image, tmp_path: Path) -> None:
    small = card.convert("RGB").resize((96, round(card.height * 96 / card.width)))
    with pytest.raises(BadRequest, match=r"a JPEG of 96 x \d+ without the text .* ask for the"):
        read_card(saved(small, tmp_path / "x.jpg", quality=20))


def test_a_text_that_was_changed_on_the_way_is_not_believed(
    card: Image.Image, tmp_path: Path
) -> None:
    texts = PngInfo()
    texts.add_itxt(TEXT_KEY, card.info[TEXT_KEY].replace("512", "513"))
    path = saved(card, tmp_path / "x.png", pnginfo=texts)
    assert read_card(path) == DATA, "the code tells the truth"


def test_a_preset_too_long_for_a_code_is_in_the_text_alone(tmp_path: Path) -> None:
    noise = random.Random(1)
    words = " ".join(f"{noise.getrandbits(64):x}" for _ in range(CODE_MAX_BYTES // 10))
    data = f'schema = 1\nname = "x"\n[request]\nprompt = "{words}"\n'.encode()
    png, coded = make_card(read(data, "p.toml"), data, picture())
    assert not coded
    (tmp_path / "x.png").write_bytes(png)
    assert read_card(tmp_path / "x.png") == data


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "is not a picture"),
        (b"<svg/>", "is not a picture"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 40, "is not a picture|is damaged"),
    ],
)
def test_what_is_no_picture_is_a_sentence(tmp_path: Path, data: bytes, sentence: str) -> None:
    (tmp_path / "x.png").write_bytes(data)
    with pytest.raises(BadRequest, match=sentence):
        read_card(tmp_path / "x.png")


def test_a_code_of_somebody_else_is_no_preset(tmp_path: Path) -> None:
    import zxingcpp

    made = zxingcpp.create_barcode(b"https://example.org", zxingcpp.BarcodeFormat.QRCode)
    path = saved(Image.fromarray(np.array(made.to_image(scale=8))), tmp_path / "x.png")
    with pytest.raises(BadRequest, match="carries no preset"):
        read_card(path)

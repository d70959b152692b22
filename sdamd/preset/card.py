"""A preset card: a picture that shows what a preset makes, and carries the preset itself.

It is carried twice. A text inside the PNG holds the file byte for byte; programs that send
pictures on often save them anew and drop such texts. So the card also shows a QR code of it, which
survives JPEG, scaling and screenshots. Which of the two was read makes no difference: both hold
the same bytes, and a check over them.
"""

import hashlib
import io
import zlib
from pathlib import Path
from typing import Final

import numpy as np
import zxingcpp
from PIL import Image, ImageDraw, ImageFont, UnidentifiedImageError
from PIL.PngImagePlugin import PngInfo

from sdamd.errors import BadRequest, StorageError
from sdamd.preset.file import MAX_BYTES
from sdamd.preset.preset import Preset

TEXT_KEY: Final = "sdamd-preset"
MARK: Final = b"sdamd1"
CODE_MAX_BYTES: Final = 1800
"""A QR code of the largest version holds 2331 bytes with medium correction; smaller modules than
those of 1800 do not survive a chat program's scaling."""
WIDTH: Final = 768
"""Of the card in pixels: chat programs scale down what is wider than about 1280."""
MODULE: Final = 4
"""Pixels a side of the code's dots."""
_PIXELS_MAX: Final = 64_000_000
_MARGIN: Final = 24
_PAPER, _INK, _GREY = (250, 250, 248), (24, 24, 28), (110, 110, 118)


def make_card(preset: Preset, data: bytes, picture: Image.Image) -> tuple[bytes, bool]:
    """Make the PNG of a card; and whether it carries a code, which long presets do not get.

    `data` is the preset's file, `picture` any picture, shown `WIDTH` pixels wide.
    """
    shown = picture.convert("RGB")
    shown = shown.resize((WIDTH, max(1, round(shown.height * WIDTH / shown.width))))
    code = _code(data)
    high = max(160, 0 if code is None else code.height + 2 * _MARGIN)
    card = Image.new("RGB", (WIDTH, shown.height + high), _PAPER)
    card.paste(shown, (0, 0))
    room = WIDTH - 2 * _MARGIN
    if code is not None:
        card.paste(code, (WIDTH - _MARGIN - code.width, shown.height + _MARGIN))
        room -= code.width + _MARGIN
    _write_words(card, preset, top=shown.height + _MARGIN, width=room)
    texts = PngInfo()
    texts.add_itxt(TEXT_KEY, f"{_check(data)}\n{data.decode('utf-8-sig')}")
    out = io.BytesIO()
    card.save(out, "PNG", pnginfo=texts)
    return out.getvalue(), code is not None


def read_card(path: Path) -> bytes:
    """The preset inside a card, by its text or by its code.

    Raises:
        BadRequest: it is no picture, or carries no preset any more; with what was seen.
        StorageError: the file cannot be opened.
    """
    try:
        with Image.open(path) as opened:
            if opened.width * opened.height > _PIXELS_MAX:
                raise BadRequest(
                    f"{path.name} is {opened.width} x {opened.height}; allowed for a preset card "
                    f"are {_PIXELS_MAX // 1_000_000} megapixels"
                )
            text = opened.info.get(TEXT_KEY)
            if isinstance(text, str) and (data := _from_text(text)) is not None:
                return data
            kind, size = opened.format, opened.size
            grey = opened.convert("L")
    except UnidentifiedImageError as error:
        raise BadRequest(f"{path.name} is not a picture; allowed is a preset card") from error
    except Image.DecompressionBombError as error:
        raise BadRequest(f"{path.name} is too large for a preset card") from error
    except (OSError, SyntaxError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise StorageError(f"{path} cannot be read: {error.strerror}") from error
        raise BadRequest(f"{path.name} is damaged: {error}") from error
    if (data := _from_code(grey)) is not None:
        return data
    raise BadRequest(
        f"{path.name} carries no preset: a {kind} of {size[0]} x {size[1]} without the text that a "
        "card has, and without a code that can be read. Programs that send pictures on drop the "
        "text and may shrink the code away; ask for the .toml file"
    )


def _check(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _from_text(text: str) -> bytes | None:
    check, _, body = text.partition("\n")
    data = body.encode()
    return data if len(data) <= MAX_BYTES and check == _check(data) else None


def _code(data: bytes) -> Image.Image | None:
    """The QR code of a preset's bytes, or nothing when it would be too fine."""
    packed = MARK + zlib.compress(data, 9)
    if len(packed) > CODE_MAX_BYTES:
        return None
    made = zxingcpp.create_barcode(packed, zxingcpp.BarcodeFormat.QRCode, ec_level="M")
    return Image.fromarray(np.array(made.to_image(scale=MODULE))).convert("RGB")


def _from_code(grey: Image.Image) -> bytes | None:
    for found in zxingcpp.read_barcodes(grey, formats=zxingcpp.barcode_formats_from_str("QRCode")):
        if found.bytes.startswith(MARK):
            unpack = zlib.decompressobj()
            try:
                data = unpack.decompress(found.bytes[len(MARK) :], MAX_BYTES + 1)
            except zlib.error:
                continue
            if unpack.eof and len(data) <= MAX_BYTES:
                return data
    return None


def _write_words(card: Image.Image, preset: Preset, *, top: int, width: int) -> None:
    draw = ImageDraw.Draw(card)
    for words, size, colour in (
        (preset.name, 30, _INK),
        (preset.description, 18, _INK),
        (" · ".join(filter(None, (preset.author, preset.licence))), 15, _GREY),
        ("a preset for sdamd: sdamd presets import THIS FILE", 15, _GREY),
    ):
        font = ImageFont.load_default(size)
        for line in _lines(draw, words, font, width)[:4]:
            draw.text((_MARGIN, top), line, fill=colour, font=font)
            top += round(size * 1.3)
        top += 4


def _lines(
    draw: ImageDraw.ImageDraw, words: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
    width: int,
) -> list[str]:  # fmt: skip
    """Break words into lines; what the font of Pillow cannot draw is left to the preset itself."""
    if not words.isascii():
        words = "".join(letter if ord(letter) < 0x250 else "" for letter in words)
    lines: list[str] = []
    for word in words.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and draw.textlength(longer, font=font) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines

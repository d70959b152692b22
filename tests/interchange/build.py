"""Pictures with records as other tools write them, made anew for each test."""

import gzip
import io
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

SIZE = (96, 80)


def picture(mode: str = "RGB") -> Image.Image:
    """A small picture with something in it."""
    ramp = Image.linear_gradient("L").resize(SIZE)
    bands = [ramp, ramp.rotate(90).resize(SIZE), ramp.rotate(180)]
    image = Image.merge("RGB", bands)
    if mode == "RGBA":
        image.putalpha(255)
    return image


def exif_of(texts: Mapping[str, str], code: str) -> bytes:
    """An Exif block as Pillow writes it; `code` says how its UserComment is encoded."""
    exif = Image.Exif()
    for name, text in texts.items():
        if name == "MakerNote":
            exif.get_ifd(0x8769)[0x927C] = text
        elif name in {"Model", "Make"}:
            exif[{"Make": 0x010F, "Model": 0x0110}[name]] = text
        else:
            exif.get_ifd(0x8769)[0x9286] = comment(text, code)
    return exif.tobytes()


def comment(text: str, code: str) -> bytes:
    """A UserComment in one of the ways that programs write it."""
    ways: dict[str, Callable[[], bytes]] = {
        "be": lambda: b"UNICODE\0" + text.encode("utf-16-be"),
        "le": lambda: b"UNICODE\0" + text.encode("utf-16-le"),
        "bom": lambda: b"UNICODE\0" + text.encode("utf-16"),
        "utf8": lambda: b"UNICODE\0" + text.encode("utf-8"),
        "ascii": lambda: b"ASCII\0\0\0" + text.encode("utf-8"),
        "undefined": lambda: b"\0" * 8 + text.encode("utf-8"),
        "bare": lambda: text.encode("utf-8"),
        "code only": lambda: b"UNICODE\0",
    }
    return ways[code]()


def little_endian(block: bytes) -> bytes:
    """The same Exif comment in a block of the other byte order; Pillow writes big endian."""
    assert block[6:8] == b"MM"
    exif = Image.Exif()
    exif.load(block)
    value = bytes(exif.get_ifd(0x8769)[0x9286])
    head = b"Exif\0\0II*\0" + struct.pack("<I", 8)
    first = struct.pack("<HHHII", 1, 0x8769, 4, 1, 26) + struct.pack("<I", 0)
    second = struct.pack("<HHHII", 1, 0x9286, 7, len(value), 44) + struct.pack("<I", 0)
    return head + first + second + value


def hide(image: Image.Image, text: str, *, where: str, packed: bool) -> Image.Image:
    """Hide a text in the lowest bits, column by column."""
    word = {"alpha": "stealth_png", "colours": "stealth_rgb"}[where]
    word += "comp" if packed else "info"
    data = gzip.compress(text.encode()) if packed else text.encode()
    stream = word.encode() + struct.pack(">I", len(data) * 8) + data
    bits = [byte >> shift & 1 for byte in stream for shift in range(7, -1, -1)]
    mode = "RGBA" if where == "alpha" else "RGB"
    image = image.convert(mode)
    pixels = image.load()
    assert pixels is not None
    width, height = image.size
    per_pixel = 1 if where == "alpha" else 3
    assert len(bits) <= width * height * per_pixel, "the picture is too small for the text"
    for number, bit in enumerate(bits):
        place, channel = divmod(number, per_pixel)
        x, y = divmod(place, height)
        value = list(pixels[x, y])  # type: ignore[arg-type]
        channel = 3 if where == "alpha" else channel
        value[channel] = value[channel] & 0xFE | bit
        pixels[x, y] = tuple(value)
    return image


def png(texts: Mapping[str, str], kind: str = "tEXt") -> bytes:
    """A PNG with texts in chunks of one kind."""
    info = PngInfo()
    for key, text in texts.items():
        if kind == "iTXt":
            info.add_itxt(key, text)
        else:
            info.add_text(key, text, zip=kind == "zTXt")
    file = io.BytesIO()
    picture().save(file, "PNG", pnginfo=info)
    return file.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    """One chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def write(folder: Path, texts: Mapping[str, str], container: str) -> Path:
    """Write a file with a record; `container` is the kind of file, and how the text is in it."""
    kind, _, how = container.partition(" ")
    path = folder / f"x.{kind}"
    if kind in {"txt", "json"}:
        path.write_text(next(iter(texts.values())), encoding="utf-8")
        return path
    if kind == "beside":
        path = folder / "x.png"
        picture().save(path)
        path.with_suffix(".txt").write_text(next(iter(texts.values())), encoding="utf-8")
        return path
    if kind == "png" and how in {"tEXt", "iTXt", "zTXt"}:
        path.write_bytes(png(texts, how))
    elif kind == "png" and how.startswith("hidden"):
        _, where, form = how.split()
        text = next(iter(texts.values()))
        large = picture().resize((256, 256))
        hide(large, text, where=where, packed=form == "packed").save(path)
    else:
        block = exif_of(texts, "be" if how in {"", "exif"} else how)
        picture().save(path, exif=block)
    return path

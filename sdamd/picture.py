"""A picture that is given: its bytes, their sha256, and how such a file is read.

Whoever decodes it gets RGB or, for a mask, one channel; everything that cannot become that is
refused in a sentence, from the file's header where it can be, so that a hostile file costs nothing.
"""

import hashlib
import re
import struct
import warnings
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from sdamd.errors import BadRequest

if TYPE_CHECKING:
    from PIL.Image import Image

SIDE_MIN: Final = 8
"""In pixels; what is smaller is not a picture but a mistake: a latent alone stands for 8."""
SIDE_MAX: Final = 16384
PIXELS_MAX: Final = 100_000_000
"""About 300 MB when decoded; more is taken for a decompression bomb."""
FILE_MAX_BYTES: Final = 256 * 2**20

_REFERENCE: Final = re.compile(r"sha256:([0-9a-f]{64}):(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture file by its content. Two are equal if their sha256 and names are.

    `name` is the file's, without its folder, which would tell who somebody is. `data` are the
    bytes of the file; they are empty in what was read from a record.
    """

    sha256: str
    name: str
    data: bytes = field(default=b"", compare=False, repr=False)

    @property
    def reference(self) -> str:
        """The text that stands for it in a record; `Request` takes it in the place of a path."""
        return f"sha256:{self.sha256}:{self.name}"

    @classmethod
    def parse(cls, text: object, field_name: str) -> Self:
        """Read a `reference`; the picture is without its bytes.

        Raises:
            BadRequest: it is none.
        """
        match = _REFERENCE.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            shown = repr(text) if len(repr(text)) <= 60 else f"{repr(text)[:57]}..."
            raise BadRequest(f"{field_name} is {shown}; allowed is sha256:<64 digits>:<name>")
        return cls(sha256=match[1], name=_base_name(match[2]))


def is_reference(text: str) -> bool:
    """Whether `text` names a picture by its content and not by its path."""
    return _REFERENCE.fullmatch(text) is not None


def _base_name(name: str) -> str:
    """Only the last part, as a record from anywhere may hold a path."""
    return re.split(r"[/\\]", name)[-1]


def read(text: str, field_name: str, folders: Iterable[Path] = ()) -> tuple[Picture, "Image"]:
    """Read a picture's file; `text` is a path or a `reference`. With it come its pixels.

    Args:
        text: what stands in the request.
        field_name: for the sentence about what is wrong.
        folders: where a file that is named by its content is looked for.

    Raises:
        BadRequest: there is no such file, or it is no picture that can be used.
    """
    path = Path(text).expanduser()
    if is_reference(text):
        wanted = Picture.parse(text, field_name)
        found = find(wanted, folders)
        if found is None:
            raise BadRequest(
                f"{field_name} is the picture {wanted.name!r} with the sha256 "
                f"{wanted.sha256[:12]}..., which is not beside the record; give its file with "
                f"--{field_name.replace('_', '-')}"
            )
        path = found
    data = _read_file(path, field_name)
    picture = Picture(sha256=_sha256(data), name=_text(path.name), data=data)
    return picture, decode(picture, field_name)


def find(picture: Picture, folders: Iterable[Path]) -> Path | None:
    """The file with these bytes in one of the folders: by its name first, then any picture."""
    for folder in folders:
        try:
            inside = sorted(folder.iterdir(), key=lambda path: (path.name != picture.name, path))
        except OSError:
            continue
        candidates = [p for p in inside if p.suffix.lower() in _SUFFIXES][:_SEARCH_MAX]
        for path in candidates:
            try:
                if path.stat().st_size > FILE_MAX_BYTES:
                    continue
                if _sha256(path.read_bytes()) == picture.sha256:
                    return path
            except OSError:
                continue
    return None


def beside(text: object, folder: Path) -> Path | None:
    """The file that a `reference` means, in the folder of the record or where we are."""
    if not (isinstance(text, str) and is_reference(text)):
        return None
    return find(Picture.parse(text, "picture"), (folder, Path()))


def decode(picture: Picture, field_name: str = "the picture") -> "Image":
    """The pixels, upright, as RGB, or RGBA where some are transparent; colours are sRGB.

    Raises:
        BadRequest: it is no picture that can be used.
    """
    from PIL import ImageOps  # noqa: PLC0415  # Pillow takes as long as all of `plan`

    with _opened(picture, field_name) as image, _translated(picture, field_name):
        image.load()
        upright = ImageOps.exif_transpose(image)
        return _in_rgb(upright)


def on_colour(image: "Image", colour: str) -> "Image":
    """The picture as RGB, on one colour where it is transparent."""
    if image.mode != "RGBA":
        return image
    from PIL import Image  # noqa: PLC0415  # see `decode`

    ground = Image.new("RGBA", image.size, colour)
    ground.alpha_composite(image)
    return ground.convert("RGB")


def transparency(image: "Image") -> "Image":
    """One channel: 255 where the picture is wholly transparent."""
    from PIL import Image, ImageOps  # noqa: PLC0415  # see `decode`

    if image.mode != "RGBA":
        return Image.new("L", image.size, 0)
    return ImageOps.invert(image.getchannel("A"))


def mask_of(image: "Image") -> "Image":
    """A mask in one channel; strokes on a transparent ground are white on black."""
    return on_colour(image, "black").convert("L")


_FORMATS: Final = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF", "AVIF")
"""What is decoded at all: raster formats in wide use, so that no other code sees a file."""
_SUFFIXES: Final = frozenset(
    (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".avif")
)
_SEARCH_MAX: Final = 200
_PLAIN: Final = frozenset(("1", "L", "P", "RGB", "YCbCr", "HSV", "CMYK", "RGBX"))
_WITH_ALPHA: Final = frozenset(("LA", "La", "PA", "RGBA", "RGBa"))


def _read_file(path: Path, field_name: str) -> bytes:
    shown = _text(str(path))
    try:
        if path.stat().st_size > FILE_MAX_BYTES:
            raise BadRequest(
                f"{field_name} {shown} is {path.stat().st_size} bytes; "
                f"allowed at most {FILE_MAX_BYTES}"
            )
        if not path.is_file():
            raise BadRequest(f"{field_name} {shown} is no file; allowed is a picture file")
        return path.read_bytes()
    except FileNotFoundError as error:
        raise BadRequest(f"{field_name} {shown} does not exist") from error
    except (OSError, ValueError) as error:
        raise BadRequest(f"{field_name} {shown} cannot be read: {error}") from error


@contextmanager
def _opened(picture: Picture, field_name: str) -> "Iterator[Image]":
    """The picture with its header read and found good, its pixels not yet decoded."""
    from PIL import Image  # noqa: PLC0415  # see `decode`

    if not picture.data:
        raise BadRequest(f"{field_name} {picture.name!r} is here without its bytes; give its file")
    with warnings.catch_warnings(), _translated(picture, field_name):
        # Our own limit is lower than the one that Pillow warns of.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        image = Image.open(BytesIO(picture.data), formats=_FORMATS)
    with image:
        if problem := _problem(image):
            raise BadRequest(f"{field_name} {picture.name!r} {problem}")
        yield image


def _problem(image: "Image") -> str | None:
    """What is wrong with a picture by its header."""
    wide, high = image.size
    if wide * high > PIXELS_MAX:
        return f"is {wide} x {high} pixels; allowed at most {PIXELS_MAX // 10**6} million pixels"
    if min(wide, high) < SIDE_MIN or max(wide, high) > SIDE_MAX:
        return f"is {wide} x {high} pixels; allowed {SIDE_MIN} to {SIDE_MAX} pixels a side"
    # A phone's JPEG may hold more than one picture (MPO); the first one is the photograph.
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format != "MPO":
        return f"is animated, with {frames} frames; allowed is a single picture"
    if image.mode not in _PLAIN | _WITH_ALPHA and not image.mode.startswith("I"):
        return f"has colours of the kind {image.mode}; allowed are RGB, grey, palette and CMYK"
    return None


@contextmanager
def _translated(picture: Picture, field_name: str) -> Iterator[None]:
    """Turn what Pillow raises for a damaged file into a sentence.

    Raises:
        BadRequest: always, in the place of any of them.
    """
    from PIL import Image, UnidentifiedImageError  # noqa: PLC0415  # see `decode`

    who = f"{field_name} {picture.name!r}"
    try:
        yield
    except UnidentifiedImageError as error:
        raise BadRequest(f"{who} is no picture; allowed are {', '.join(_FORMATS)}") from error
    except Image.DecompressionBombError as error:
        raise BadRequest(
            f"{who} has too many pixels; allowed at most {PIXELS_MAX // 10**6} million"
        ) from error
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error) as error:
        raise BadRequest(f"{who} is damaged or cut off: {error}") from error


def _in_rgb(image: "Image") -> "Image":
    """RGB or RGBA in eight bits and sRGB."""
    from PIL import Image  # noqa: PLC0415  # see `decode`

    if image.mode.startswith("I"):  # 16 bits of grey, in one of several orders of bytes
        deep = image.convert("I")
        return deep.point(lambda level: level / 257).convert("L").convert("RGB")
    has_alpha = image.mode in _WITH_ALPHA or "transparency" in image.info
    profile = image.info.get("icc_profile")
    if not has_alpha:
        return _in_srgb(image if image.mode in ("CMYK", "L") else image.convert("RGB"), profile)
    clear = image.convert("RGBA")
    alpha = clear.getchannel("A")
    colours = _in_srgb(clear.convert("RGB"), profile)
    if alpha.getextrema() == (255, 255):
        return colours
    return Image.merge("RGBA", (*colours.split(), alpha))


def _in_srgb(image: "Image", profile: bytes | None) -> "Image":
    """From the colours of the file's own profile, where it has one that is of use."""
    if not profile:
        return image.convert("RGB")
    from PIL import ImageCms  # noqa: PLC0415  # see `decode`

    try:
        own = ImageCms.ImageCmsProfile(BytesIO(profile))
        standard = ImageCms.createProfile("sRGB")
        made = ImageCms.profileToProfile(image, own, standard, outputMode="RGB")
    except (ImageCms.PyCMSError, OSError):
        # A profile that is damaged, or of another kind of colours, says nothing of these.
        return image.convert("RGB")
    assert made is not None
    return made


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _text(name: str) -> str:
    """A file's name may hold bytes that are no text."""
    return name.encode("utf-8", "replace").decode()

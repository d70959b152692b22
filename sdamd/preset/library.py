"""The presets that can be named: those that ship with sdamd, and the folder of the person."""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Final

from sdamd.errors import BadRequest, StorageError, UserError, unknown
from sdamd.preset.file import MAX_BYTES, read
from sdamd.preset.preset import Preset

_PACKAGE: Final = Path(str(files("sdamd")))
SUFFIX: Final = ".toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One preset file: `preset`, or `problems` where it cannot be read. `own` is the person's."""

    path: Path
    own: bool
    preset: Preset | None
    problems: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What it is called: by itself, or by its file."""
        return self.path.stem if self.preset is None else self.preset.name


def shipped_folder() -> Path:
    """Where the shipped presets are: inside an installed package, or beside it in a checkout."""
    inside = _PACKAGE / "assets" / "presets"
    return inside if inside.is_dir() else _PACKAGE.parent / "presets"


def entries(folder: Path) -> Iterator[Entry]:
    """Every preset: those in the person's `folder`, then the shipped ones, by file name.

    A file that cannot be read is among them with its problems; one of the person's hides a
    shipped one of the same name.
    """
    seen: set[str] = set()
    for own, place in ((True, folder), (False, shipped_folder())):
        for path in sorted(place.glob(f"*{SUFFIX}")) if place.is_dir() else ():
            entry = _entry(path, own)
            if _plain(entry.name) not in seen or entry.preset is None:
                yield entry
            seen.add(_plain(entry.name))


def find(name: str, folder: Path) -> tuple[Preset, Path]:
    """The preset of a name or of a file's path.

    Raises:
        UserError: there is none; the nearest names are given.
        BadRequest: it cannot be read, with every problem.
        StorageError: the file cannot be opened.
    """
    if name.lower().endswith((SUFFIX, ".png", ".jpg", ".jpeg", ".webp")):
        return load(Path(name).expanduser()), Path(name).expanduser()
    there = list(entries(folder))
    for entry in there:
        if _plain(name) in {_plain(entry.name), _plain(entry.path.stem)}:
            if entry.preset is None:
                raise BadRequest(*entry.problems)
            return entry.preset, entry.path
    raise UserError(unknown(name, [entry.name for entry in there], "preset"))


def load(path: Path) -> Preset:
    """Read one file, a preset or a card.

    Raises:
        BadRequest: it cannot be read, with every problem.
        StorageError: the file cannot be opened.
    """
    if path.suffix.lower() != SUFFIX:
        from sdamd.preset.card import read_card  # noqa: PLC0415  # Pillow is for cards alone

        return read(read_card(path), path.name)
    return read(file_bytes(path), path.name)


def file_bytes(path: Path) -> bytes:
    """The bytes of a preset file, no more of them than a preset can have.

    Raises:
        BadRequest: it is larger than any preset.
        StorageError: it cannot be opened.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
            size = path.stat().st_size
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise BadRequest(f"{path.name} is {size} bytes; allowed at most {MAX_BYTES}")
    return data


def add(data: bytes, name: str, folder: Path, *, replace: bool = False) -> Path:
    """Keep a preset's bytes, as they are, under a file name made of its name.

    Raises:
        BadRequest: there is one of this name already, and `replace` is not set.
        StorageError: the folder cannot be written.
    """
    path = folder / f"{slug(name)}{SUFFIX}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if replace:
            temporary = path.with_suffix(".part")
            temporary.write_bytes(data)
            temporary.replace(path)
        else:
            with path.open("xb") as file:
                file.write(data)
    except FileExistsError as error:
        raise BadRequest(
            f"{path} is there already; allowed is another name, or --replace"
        ) from error
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error
    return path


def slug(name: str) -> str:
    """A file name for a preset's name, the same on every system: letters, digits, `-` and `_`."""
    text = unicodedata.normalize("NFC", name).casefold()
    text = re.sub(r"[^\w]+", "-", text).strip("-_")
    # No name is longer than what a file system takes, in bytes, and none is a device of Windows.
    while len(text.encode()) > 120:
        text = text[:-1]
    text = text.strip("-_")
    reserved = re.fullmatch(r"con|prn|aux|nul|com\d|lpt\d", text)
    return f"preset-{text}" if reserved else text or "preset"


def _entry(path: Path, own: bool) -> Entry:  # noqa: FBT001  # a private row of facts
    try:
        return Entry(path=path, own=own, preset=load(path))
    except BadRequest as error:
        return Entry(path=path, own=own, preset=None, problems=error.problems)
    except StorageError as error:
        return Entry(path=path, own=own, preset=None, problems=(str(error),))


def _plain(name: str) -> str:
    return slug(name)

"""File names made from a pattern such as `[number]-[seed]-[prompt]`: pure text, no disk.

Every name is legal on every system, so that a folder can be copied or shared between them, and
fits a budget in bytes of UTF-8. That also keeps it within Windows' 255 UTF-16 units, since no
character takes more units than bytes.
"""

import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Self

from sdamd.errors import BadRequest, unknown
from sdamd.request import Job
from sdamd.settings import DEFAULT_FILENAME

NAME_BYTES = 255
"""The longest name of a file on ext4, XFS, Btrfs and APFS; NTFS allows 255 UTF-16 units."""

TOKENS: Mapping[str, str] = {
    "number": "counts the pictures of the folder, five digits or more; never used twice",
    "seed": "the seed",
    "prompt": "the beginning of the prompt",
    "date": "the day of saving: 2026-01-31",
    "time": "the time of saving: 14-03-22",
    "checkpoint": "the model's name",
    "width": "of the finished picture, in pixels",
    "height": "of the finished picture, in pixels",
    "steps": "the denoising steps",
    "guidance_scale": "the guidance scale",
    "scheduler": "the scheduler's name",
    "index": "the picture's place in its batch, from 0",
}
"""The tokens that a pattern may hold, each with one line of help."""

_TEXT_TOKENS = frozenset({"prompt", "checkpoint", "scheduler"})

# Longer names are legal, and a nuisance in every listing and on every copy to a deeper folder.
_TEXT_BYTES = 120
_FOLDER_BYTES = 80

_TOKEN = re.compile(r"\[([^\[\]]*)\]")
_ILLEGAL = '<>:"/\\|?*'

# Source: Naming Files, Paths, and Namespaces (learn.microsoft.com); an extension does not help:
# `NUL.tar.gz` opens the null device. The superscript digits count as digits.
_RESERVED = frozenset(
    {"con", "prn", "aux", "nul", "conin$", "conout$"}
    | {f"{port}{digit}" for port in ("com", "lpt") for digit in "0123456789\u00b9\u00b2\u00b3"}
)

_ZERO_WIDTH_JOINER = "\u200d"
_ZERO_WIDTH_NON_JOINER = "\u200c"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a pattern: a token's name, or literal text."""

    text: str
    is_token: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A pattern taken apart: the folders to make below the output folder, and the file's name."""

    folders: tuple[tuple[Piece, ...], ...]
    name: tuple[Piece, ...]

    @classmethod
    def parse(cls, pattern: str) -> Self:
        """Read a pattern; `/` and a backslash both part folders.

        Raises:
            BadRequest: with every unknown token and its nearest known, or a way out of the folder.
        """
        problems = _problems(pattern)
        if problems:
            raise BadRequest(*problems)
        *folders, name = (_pieces(part) for part in _parts(pattern))
        return cls(folders=tuple(folders), name=name)

    @property
    def is_numbered(self) -> bool:
        """Whether the pattern itself makes every name another one."""
        return Piece(text="number", is_token=True) in self.name

    def folder_names(self, values: Mapping[str, str]) -> tuple[str, ...]:
        """The names of the folders between the output folder and the file."""
        return tuple(_legal_name(_fitted(f, values, _FOLDER_BYTES)) for f in self.folders)

    def stem(self, values: Mapping[str, str], *, suffix: str = "", budget: int = NAME_BYTES) -> str:
        """The file's name without its extension, at most `budget` bytes with `suffix` at its end.

        Text tokens are shortened to fit, the longest first; numbers and seeds stay whole as long
        as they fit.
        """
        room = budget - len(suffix.encode()) - 1  # for the mark before a reserved name
        return _legal_name(_fitted(self.name, values, room), suffix)

    def highest_number(self, stems: Iterable[str]) -> int:
        """The highest number that files' stems carry by this pattern; 0 where none does.

        Where a text in a name looks just like its number, both count.
        """
        finder = _number_finder(self)
        return max((int(n) for stem in stems for n in finder.findall(stem)), default=0)


def token_values(job: Job, *, checkpoint: str, number: int, now: datetime) -> dict[str, str]:
    """What each token stands for in the name of one picture."""
    return {
        "number": f"{number:05d}",
        "seed": str(job.seed),
        "prompt": job.prompt,
        "date": f"{now:%Y-%m-%d}",
        "time": f"{now:%H-%M-%S}",
        "checkpoint": checkpoint,
        "width": str(job.width * job.upscale),
        "height": str(job.height * job.upscale),
        "steps": str(job.steps),
        "guidance_scale": f"{job.guidance_scale:g}",
        "scheduler": job.scheduler,
        "index": str(job.index),
    }


def _problems(pattern: str) -> list[str]:
    if not pattern.strip():
        return [f"the file-name pattern is empty; allowed is such as {DEFAULT_FILENAME}"]
    problems = [
        unknown(name, list(TOKENS), "token of the file-name pattern")
        for name in _TOKEN.findall(pattern)
        if name not in TOKENS
    ]
    shown = f"the file-name pattern {pattern!r}"
    if len(pattern) > NAME_BYTES:
        problems.append(f"the file-name pattern is {len(pattern)} letters; allowed {NAME_BYTES}")
    elif _leaves(pattern):
        problems.append(f"{shown} leaves the output folder; allowed are names and folders in it")
    elif re.split(r"[/\\]", pattern)[-1].strip() in ("", ".", ".."):
        problems.append(f"{shown} ends in a folder; allowed is a file's name at its end")
    elif any("[number]" in part for part in _parts(pattern)[:-1]):
        problems.append(f"{shown} has [number] in a folder; allowed only in the file's name")
    return problems


def _leaves(pattern: str) -> bool:
    """Whether a pattern names a place outside the output folder, on any system."""
    if pattern[0] in "/\\" or re.match(r"[A-Za-z]:", pattern):
        return True
    depth = 0
    for part in re.split(r"[/\\]", pattern):
        depth += {"..": -1, ".": 0, "": 0}.get(part.strip(), 1)
        if depth < 0:
            return True
    return False


def _parts(pattern: str) -> list[str]:
    """The folders and the name of a pattern that stays in its folder, `..` resolved."""
    parts: list[str] = []
    for part in re.split(r"[/\\]", pattern):
        if part.strip() == "..":
            parts.pop()
        elif part.strip() not in ("", "."):
            parts.append(part)
    return parts


def _pieces(part: str) -> tuple[Piece, ...]:
    # re.split with a group puts the tokens at the odd places.
    cut = _TOKEN.split(part)
    return tuple(Piece(text=text, is_token=i % 2 == 1) for i, text in enumerate(cut) if text)


def _fitted(pieces: tuple[Piece, ...], values: Mapping[str, str], budget: int) -> str:
    """Fill in the tokens and shorten their texts until the whole fits."""
    texts: list[str] = []
    may_shrink: list[bool] = []
    skip_literal = False
    for piece in pieces:
        is_text = piece.is_token and piece.text in _TEXT_TOKENS
        text = _clean(values[piece.text]) if piece.is_token else _legal(piece.text)
        if piece.is_token and not text:
            # What joined it to its neighbour goes with it: no `00001-42-` for an empty prompt.
            if texts and not may_shrink[-1]:
                texts.pop()
                may_shrink.pop()
            else:
                skip_literal = True
            continue
        if not piece.is_token and skip_literal:
            skip_literal = False
            continue
        texts.append(_cut(text, _TEXT_BYTES) if is_text else text)
        may_shrink.append(is_text)
    while (over := sum(len(t.encode()) for t in texts) - budget) > 0:
        sizes = [len(t.encode()) * may for t, may in zip(texts, may_shrink, strict=True)]
        longest = max(sizes)
        if longest == 0:
            return _cut("".join(texts), budget)
        at = sizes.index(longest)
        texts[at] = _cut(texts[at], longest - over) if longest > over else ""
    return "".join(texts)


def _legal_name(name: str, suffix: str = "") -> str:
    """Put right what is wrong with a name as a whole rather than with a letter of it."""
    # Windows drops dots and blanks at the end, and a dot in front hides the file elsewhere.
    name = name.strip(" .") + suffix
    if name == suffix:
        name = f"untitled{suffix}"
    if name.split(".")[0].rstrip().casefold() in _RESERVED:
        name = f"_{name}"
    return name


def _legal(text: str) -> str:
    """Turn what a file name may not hold on some system into blanks or nothing."""
    return "".join(map(_legal_letter, unicodedata.normalize("NFC", text)))


@lru_cache(maxsize=1024)
def _legal_letter(letter: str) -> str:
    if letter in _ILLEGAL or letter.isspace():
        return " "
    if letter in (_ZERO_WIDTH_JOINER, _ZERO_WIDTH_NON_JOINER):
        return letter
    # Controls, marks of writing direction (they can make `gnp.exe` look like `exe.png`),
    # surrogates, private and unassigned letters: some systems refuse each of them.
    return "" if unicodedata.category(letter)[0] == "C" else letter


def _clean(value: str) -> str:
    """A token's value as a part of a name: legal, on one line, without ragged ends."""
    return " ".join(_legal(value[: 4 * _TEXT_BYTES]).split()).strip(" .")


def _cut(text: str, budget: int) -> str:
    """The beginning of `text` in at most `budget` bytes, not within what is seen as one letter."""
    if len(text.encode()) <= budget:
        return text
    kept = text.encode()[: max(0, budget)].decode("utf-8", "ignore")
    end = len(kept)
    while end > 0 and _is_joined(text, end):
        end -= 1
    # A heap of marks longer than the budget is cut all the same.
    return (text[:end] or kept).rstrip(" .")


def _is_joined(text: str, at: int) -> bool:
    """Whether the letter at `at` belongs to the one before it, as an accent does.

    Source: the parts of Unicode Standard Annex 29 that prompts meet: marks, joined emoji, skin
    tones, flags.
    """
    before, after = text[at - 1], text[at]
    if unicodedata.category(after)[0] == "M" or after == _ZERO_WIDTH_JOINER:
        return True
    if before == _ZERO_WIDTH_JOINER or 0x1F3FB <= ord(after) <= 0x1F3FF:
        return True
    if not (_is_flag_half(before) and _is_flag_half(after)):
        return False
    halves = 0
    while halves < at and _is_flag_half(text[at - 1 - halves]):
        halves += 1
    return halves % 2 == 1


def _is_flag_half(letter: str) -> bool:
    return 0x1F1E6 <= ord(letter) <= 0x1F1FF


def _number_finder(pattern: Pattern) -> re.Pattern[str]:
    """What finds the number in a stem made by `pattern`, by the letters on its two sides."""
    number = Piece(text="number", is_token=True)
    pieces = pattern.name
    if not pattern.is_numbered:
        # It then stands at the end, and only where the plain name was taken.
        pieces += (Piece(text="-", is_token=False), number)
    at = pieces.index(number)
    # Up to seven digits, so that a day such as 20260131 in a foreign name is not taken for one.
    expression = r"(?<!\d)(\d{5,7})(?!\d)"
    before, after = pieces[:at][::-1], pieces[at + 1 :]
    if not before:
        expression = f"^{expression}"
    elif not before[0].is_token:
        start = "^|" if _may_be_missing(before) else ""
        expression = f"(?:{start}(?<={re.escape(_legal(before[0].text)[-1:])})){expression}"
    if not after:
        expression += r"\Z"
    elif not after[0].is_token:
        end = r"|\Z" if _may_be_missing(after) else ""
        expression += f"(?={re.escape(_legal(after[0].text)[:1])}{end})"
    return re.compile(expression)


def _may_be_missing(beside: tuple[Piece, ...]) -> bool:
    """Whether the literal next to a token may be missing from a name that is whole.

    It goes with an empty text on its other side, and its blanks and dots at a name's end.
    """
    return len(beside) == 1 or beside[1].text in _TEXT_TOKENS

"""What a template is made of, and how it is read."""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from sdamd.errors import BadRequest

NESTING_MAX = 32
"""How deep choices may stand in each other, and wildcards in the lines of wildcards."""

WEIGHT_MAX = 1_000_000

_AMOUNT_DIGITS = 6


class Sampler(StrEnum):
    """How a choice is drawn, as it is written."""

    RANDOM = "~"
    EVERY = "!"
    IN_TURN = "@"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Parts one after the other."""

    parts: tuple["Node", ...]
    depth: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """From `low` to `high` of the options; `high` None means all. No weights are equal ones.

    `repeats`: in the combinatorial mode an option of weight 3 comes three times. `depth` here
    and elsewhere is how many nodes stand in each other, this one with them; texts are none.
    """

    options: Sequence["Node"]
    weights: Sequence[float] | None = None
    low: int = 1
    high: int | None = 1
    separator: str = ","
    sampler: Sampler | None = None
    repeats: bool = False
    depth: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Once:
    """What is drawn at its first use and stays."""

    node: "Node"
    depth: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrap:
    """The inner text in the place of the wrapper's dots."""

    wrapper: "Node"
    inner: "Node"
    depth: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Wildcard:
    """A name or pattern, which may hold variables, before its lines are read."""

    pattern: tuple["Node", ...]
    arguments: tuple[tuple[str, "Node"], ...]
    sampler: Sampler | None
    column: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """The use of a variable, before its value is known."""

    name: str
    default: "Node | None"
    column: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Set:
    """A variable gets a value, until the end of the option or text that this stands in."""

    name: str
    value: "Node"
    once: bool
    only_unset: bool


Node: TypeAlias = str | Chain | Choice | Once | Wrap | Wildcard | Variable | Set


# -- reading -------------------------------------------------------------------------------------

_SIGN = re.compile(r"\\.|%\{|[{}|$_]", re.DOTALL)
_BRACKET = re.compile(r"\\.|[\[\]{}|]", re.DOTALL)
_LETTERS = re.compile(r"[^\\{}|$%_]+")
_ESCAPED = frozenset("{}|$%_@!~:")
_NAME = r"[A-Za-z_-][\w-]*"
_VARIABLE = re.compile(rf"\$\{{\s*({_NAME})\s*((?:\?=|=!|=)\s*|:|(?=\}}))")
_WILDCARD = re.compile(
    rf"__(?P<sampler>[~!@])?(?P<path>(?![_ ])(?:[\w\-./*?'&+ ]|\$\{{{_NAME}(?::[^{{}}|$]*)?\}})+?)"
    r"(?:\s*\((?P<arguments>[^()]*)\))?__"
)
_PATH_PIECE = re.compile(rf"\$\{{({_NAME})(?::([^{{}}|$]*))?\}}|[^$]+")
_AMOUNT = re.compile(
    r"\s*(?P<sampler>[~!@])?\s*(?:(?P<low>[0-9]+)(?P<to>-)?(?P<high>[0-9]+)?|-(?P<most>[0-9]+))"
    r"\$\$(?:(?P<separator>[^${}]*)\$\$)?"
)
_SAMPLER = re.compile(r"\s*([~!@])")
_WEIGHT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*::")
_TAG = re.compile(r"<[A-Za-z]\w*:[^<>]*>")
DOTS = re.compile(r"\.{3,}|[\u2026\u22ee\u22ef\u22f0\ufe19\u1801]+")


class Reader:
    """Reads one text of the language into nodes; positions are indices into the text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._tags = _tag_spans(text)
        self._brackets = _closed_brackets(text)

    def whole(self) -> Node:
        """The node of the whole text.

        Raises:
            BadRequest: a brace is not closed, or a number is out of its range.
        """
        return self._chain(frozenset(), 0)

    def _chain(self, ends: frozenset[str], depth: int) -> Node:
        """Read up to one of `ends` (`|`, `}`, `$$`), which is not taken, or the end of the text."""
        text = self._text
        parts: list[Node] = []
        letters: list[str] = []
        while self._at < len(text) and not self._ends_here(ends):
            found = self._special(depth)
            if found is None:
                letters.append(self._letters())
            else:
                if letters:
                    parts.append("".join(letters))
                    letters = []
                parts.append(found)
        if letters or not parts:
            parts.append("".join(letters))
        return parts[0] if len(parts) == 1 else Chain(parts=tuple(parts))

    def _ends_here(self, ends: frozenset[str]) -> bool:
        letter = self._text[self._at]
        if letter == "|":
            return "|" in ends and self._at not in self._brackets
        if letter == "$":
            return "$$" in ends and self._text.startswith("$$", self._at)
        return letter in ends

    def _letters(self) -> str:
        """Take letters that mean nothing, or an escape: the prompt's own escapes stay whole."""
        at = self._at
        if found := _LETTERS.match(self._text, at):
            self._at = found.end()
            return found[0]
        if self._text[at] == "\\" and at + 1 < len(self._text):
            self._at += 2
            following = self._text[at + 1]
            return following if following in _ESCAPED else self._text[at : at + 2]
        self._at += 1
        return self._text[at]

    def _special(self, depth: int) -> Node | None:
        """The choice, wildcard, variable or wrapping that begins here, if one does."""
        text, at = self._text, self._at
        letter = text[at]
        if letter not in "{_$%" or (letter == "%" and not text.startswith("%{", at)):
            return None
        if letter == "_":
            found = _wildcard_at(text, at, self._tags)
            return self._wildcard(found) if found else None
        if letter == "$":
            found = _VARIABLE.match(text, at)
            return self._variable(found, depth) if found else None
        if depth >= NESTING_MAX:
            raise error_at(text, at, f"choices are nested deeper than {NESTING_MAX}")
        if letter == "%":
            return self._wrap(depth)
        return self._choice(depth)

    def _choice(self, depth: int) -> Choice:
        start = self._at
        self._at += 1
        sampler, separator = None, ","
        low: int = 1
        high: int | None = 1
        if amount := _AMOUNT.match(self._text, self._at):
            sampler = amount["sampler"]
            low, high = self._amount(amount)
            separator = "," if amount["separator"] is None else amount["separator"]
            self._at = amount.end()
        elif found := _SAMPLER.match(self._text, self._at):
            sampler = found[1]
            self._at = found.end()
        options: list[Node] = []
        weights: list[float] = []
        while True:
            weights.append(self._weight())
            options.append(self._chain(frozenset("|}"), depth + 1))
            if self._at >= len(self._text):
                raise error_at(self._text, start, r"'{' is not closed; \{ is the character itself")
            self._at += 1
            if self._text[self._at - 1] == "}":
                break
        if not any(weights):
            raise error_at(self._text, start, "all weights are 0; allowed is at least one above 0")
        return Choice(
            options=tuple(options),
            weights=None if len(set(weights)) == 1 else tuple(weights),
            low=low,
            high=high,
            separator=separator,
            sampler=None if sampler is None else Sampler(sampler),
        )

    def _amount(self, found: re.Match[str]) -> tuple[int, int | None]:
        numbers = [found[name] for name in ("low", "high", "most")]
        if any(number and len(number) > _AMOUNT_DIGITS for number in numbers):
            raise error_at(
                self._text, self._at, f"a number before $$ has over {_AMOUNT_DIGITS} digits"
            )
        low, high, most = (None if number is None else int(number) for number in numbers)
        if most is not None:
            return min(1, most), most
        assert low is not None
        if not found["to"]:
            return low, low
        if high is not None and high < low:
            raise error_at(
                self._text, self._at, f"{low}-{high}$$ is no range; allowed is as in {high}-{low}$$"
            )
        return low, high

    def _weight(self) -> float:
        found = _WEIGHT.match(self._text, self._at)
        if not found:
            return 1.0
        weight = float(found[1])
        if weight > WEIGHT_MAX:
            raise error_at(
                self._text, self._at, f"a weight is {found[1][:20]}; allowed 0 to {WEIGHT_MAX}"
            )
        self._at = found.end()
        return weight

    def _wrap(self, depth: int) -> Wrap:
        start = self._at
        self._at += 2
        wrapper = self._chain(frozenset({"$$", "}"}), depth + 1)
        if not self._text.startswith("$$", self._at):
            raise error_at(
                self._text, start, r"'%{' needs $$ and '}' after it; \% is the character"
            )
        self._at += 2
        inner = self._chain(frozenset("}"), depth + 1)
        self._close(start, "%{")
        return Wrap(wrapper=wrapper, inner=inner)

    def _variable(self, found: re.Match[str], depth: int) -> Node:
        start = self._at
        if depth >= NESTING_MAX:
            raise error_at(self._text, start, f"choices are nested deeper than {NESTING_MAX}")
        self._at = found.end()
        name, sign = found[1], found[2].strip()
        value = self._chain(frozenset("}"), depth + 1) if sign else None
        self._close(start, "${")
        if sign in {"", ":"}:
            return Variable(name=name, default=value, column=start)
        assert value is not None
        return Set(name=name, value=value, once=sign == "=!", only_unset=sign == "?=")

    def _close(self, start: int, opening: str) -> None:
        if self._at >= len(self._text):
            raise error_at(
                self._text, start, f"'{opening}' is not closed; \\{opening[0]} is the character"
            )
        self._at += 1

    def _wildcard(self, found: re.Match[str]) -> Wildcard:
        start = self._at
        self._at = found.end()
        pattern: list[Node] = []
        for piece in _PATH_PIECE.finditer(found["path"]):
            name, default = piece[1], piece[2]
            pattern.append(
                piece[0] if name is None else Variable(name=name, default=default, column=start)
            )
        return Wildcard(
            pattern=tuple(pattern),
            arguments=self._arguments(found["arguments"], start),
            sampler=Sampler(found["sampler"]) if found["sampler"] else None,
            column=start,
        )

    def _arguments(self, text: str | None, start: int) -> tuple[tuple[str, Node], ...]:
        """The variables for a wildcard's lines: `(season=winter, coat={red|blue})`."""
        if not text:
            return ()
        arguments: list[tuple[str, Node]] = []
        for pair in text.split(","):
            name, equals, value = (part.strip() for part in pair.partition("="))
            if not equals or not re.fullmatch(_NAME, name):
                raise error_at(
                    self._text,
                    start,
                    f"{pair.strip()!r} is no argument; allowed is as in season=winter",
                )
            arguments.append((name, Reader(value).whole()))
        return tuple(arguments)


def _tag_spans(text: str) -> list[tuple[int, int]]:
    return [found.span() for found in _TAG.finditer(text)] if "<" in text else []


def _wildcard_at(text: str, at: int, tags: Sequence[tuple[int, int]]) -> re.Match[str] | None:
    """The wildcard that begins here; in a tag it must fill an argument or an option."""
    found = _WILDCARD.match(text, at)
    if found is None or found["path"].endswith(" "):
        return None
    number = bisect_right(tags, (at, len(text))) - 1
    if number >= 0 and at < tags[number][1]:
        fills = text[at - 1] in ":={|$" and text[found.end() : found.end() + 1] in set(":>|}")
        return found if fills else None
    return found


def _closed_brackets(text: str) -> frozenset[int]:
    """Where the bars are that stand in square brackets closed at the same depth of braces."""
    bars: set[int] = set()
    opened: list[tuple[str, list[int]]] = []
    for found in _BRACKET.finditer(text) if "[" in text else ():
        sign = found[0]
        if sign in {"{", "["}:
            opened.append((sign, []))
        elif sign == "}":
            while opened and opened.pop()[0] == "[":
                pass
        elif opened and opened[-1][0] == "[":
            if sign == "|":
                opened[-1][1].append(found.start())
            elif sign == "]":
                bars.update(opened.pop()[1])
    return frozenset(bars)


def error_at(text: str, at: int, what: str) -> BadRequest:
    """The error at a place of a text, with the place and what stands there."""
    line = text.count("\n", 0, at)
    column = at - (text.rfind("\n", 0, at) + 1) + 1
    place = f"line {line + 1}, column {column}" if line else f"column {column}"
    shown = text[at : at + 30].split("\n", 1)[0]
    return BadRequest(f"template, {place} ({shown!r}): {what}")


def is_template(text: str) -> bool:
    """Whether a text holds a choice, a wildcard, a variable or a wrapping."""
    if "{" not in text and "__" not in text:
        return False
    brackets, tags = _closed_brackets(text), _tag_spans(text)
    opened = 0
    for found in _SIGN.finditer(text):
        at, sign = found.start(), found[0]
        if sign == "{":
            if _AMOUNT.match(text, at + 1):
                return True
            opened += 1
        elif sign == "}":
            opened = max(0, opened - 1)
        elif sign == "|":
            if opened and at not in brackets:
                return True
        elif (
            sign == "%{"
            or (sign == "$" and _VARIABLE.match(text, at))
            or (sign == "_" and _wildcard_at(text, at, tags))
        ):
            return True
    return False

r"""The prompt language: what brackets, bars and capitals in a prompt mean.

    (word) [word] (word:1.3)     more weight, less weight, this weight; they nest
    \( \) \[ \] \\               the character itself
    BREAK                        what follows begins a new chunk of tokens
    one AND two:0.5              two prompts for one picture, each with a weight
    [from:to:0.5] [to:5]         changes after half of the steps; appears after 5 steps
    [one|two]                    the two take turns, step by step
    <lora:name:0.8>              a network to add to the checkpoint

They are read in the order `extra_networks`, `subprompts`, `schedule`, `parse_weights`. They mean
what they mean in AUTOMATIC1111, whose records and habits people bring along. No text is an error:
what is malformed stands for itself. Time grows with the length of the text and no faster,
whatever is in it; a schedule's also with the number of its different texts.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from sdamd.errors import BadRequest

MORE = 1.1
"""What a pair of round brackets multiplies a weight by; square ones divide by it."""

WEIGHT_MAX = 1000.0
"""Weights stay within plus and minus this, so that no nesting of brackets makes infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """Words, and how much they weigh: 1 is usual, 0 nothing, below 0 the opposite."""

    text: str
    weight: float = 1.0


BREAK = Fragment(text="BREAK", weight=-1.0)
"""Among the fragments of `parse_weights`: here a new chunk begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """The text that holds up to and with step `until`; steps count from 1."""

    until: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """`<kind:argument:argument>`, of which the first argument is a name."""

    kind: str
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        """Which network; it may be empty."""
        return self.arguments[0]

    def weights(self) -> tuple[float, float]:
        """How strongly it changes the text encoder, and the UNet.

        They stand in this order, or as `te=0.5` and `unet=1`; the text encoder's is 1 unless
        given, and the UNet's as the text encoder's.

        Raises:
            BadRequest: one is not a number.
        """
        named = dict(a.split("=", 1) for a in self.arguments[1:] if "=" in a)
        placed = [a for a in self.arguments[1:] if "=" not in a]
        encoder = named.get("te", placed[0] if placed else "1")
        unet = named.get("unet", placed[1] if len(placed) > 1 else encoder)
        return self._weight(encoder), self._weight(unet)

    def _weight(self, text: str) -> float:
        if _NUMBER.fullmatch(text.strip()):
            return _bounded(float(text))
        raise BadRequest(
            f"the weight of {self.kind} {self.name!r} is {text!r}; allowed is a number such as 0.8"
        )


# -- networks ------------------------------------------------------------------------------------

_TAG = re.compile(r"<([A-Za-z]\w*+):([^<>]++)>")


def extra_networks(text: str) -> tuple[str, tuple[Tag, ...]]:
    """Take the tags out of a prompt; gives what is left, and the tags in their order."""
    tags = tuple(
        Tag(kind=found[1], arguments=tuple(found[2].split(":"))) for found in _TAG.finditer(text)
    )
    return _TAG.sub("", text), tags


# -- AND -----------------------------------------------------------------------------------------

_AND = re.compile(r"\bAND\b")
_NUMBER = re.compile(r"[+-]?+(?:[0-9]++(?:\.[0-9]*+)?+|\.[0-9]++)")


def subprompts(text: str) -> tuple[Fragment, ...]:
    """Cut at every AND; a number after the last colon of a part is its weight.

    That is so for a prompt without AND too: `sea:0.5` asks for half a `sea`. A part of several
    lines has no weight.
    """
    return tuple(_subprompt(part) for part in _AND.split(text))


def _subprompt(part: str) -> Fragment:
    head, colon, number = part.rpartition(":")
    if colon and _NUMBER.fullmatch(number.strip()) and "\n" not in head.strip():
        return Fragment(text=head.rstrip(), weight=_bounded(float(number)))
    return Fragment(text=part.rstrip())


# -- editing and alternation ---------------------------------------------------------------------

_SCHEDULE_PIECE = re.compile(r"\\.|[\[\]():|]|[^\\\[\]():|]++|\\", re.DOTALL)
_WHEN = re.compile(r"\s*+([+-]?+(?:[0-9]++(?:\.[0-9]*+)?+|\.[0-9]++)(?:[eE][+-]?[0-9]++)?+)\s*+")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """A square bracket of which one part is taken.

    `parts` are the numbers of their first pieces, `end` that of the closing bracket. `when` is
    the number of an edit, and None makes it an alternation.
    """

    parts: tuple[int, ...]
    end: int
    when: str | None = None

    def start_at(self, step: int, switch: int) -> int:
        """The piece to go on with at a step, which counts from 1."""
        if self.when is None:
            return self.parts[(step - 1) % len(self.parts)]
        if step > switch:
            return self.parts[-1]
        return self.parts[0] if len(self.parts) == 2 else self.end


@dataclass(frozen=True, slots=True, kw_only=True)
class _Script:
    """A prompt in pieces, and the choices among them by the number of their opening bracket.

    `leave` says for the piece that ends a part where its choice ends.
    """

    pieces: Sequence[str]
    choices: Mapping[int, _Choice]
    leave: Mapping[int, int]

    def text_at(self, step: int, switches: Mapping[int, int]) -> str:
        """The text of a step; jumps over what is not taken, so that no nesting is too deep."""
        taken: list[str] = []
        at = 0
        while at < len(self.pieces):
            if at in self.choices:
                at = self.choices[at].start_at(step, switches.get(at, 0))
            elif at in self.leave:
                at = self.leave[at] + 1
            else:
                taken.append(self.pieces[at])
                at += 1
        return "".join(taken)


def schedule(
    text: str, steps: int, *, first_steps: int | None = None, old_timelines: bool = False
) -> tuple[Phase, ...]:
    """The texts that a prompt becomes; neighbours differ, and the last one holds to the end.

    A number with a point is a share of the steps, one without counts them; 0 or less means from
    the start, and beyond the last step never. Escapes and weights stay in the texts.

    Args:
        text: a prompt without AND.
        steps: of this pass.
        first_steps: set for a second pass (hires), to the steps of the first: shares from 1 to 2
            are then of the second, and counted steps go on counting.
        old_timelines: read numbers as AUTOMATIC1111 did before 1.6: a share if below 1.
    """
    script = _script(text)
    switches = {
        number: _switch(choice.when, steps, first_steps, old_timelines=old_timelines)
        for number, choice in script.choices.items()
        if choice.when is not None
    }
    ends = {steps, *(step for step in switches.values() if 1 <= step <= steps)}
    if len(switches) < len(script.choices):
        ends.update(range(1, steps + 1))
    phases: list[Phase] = []
    for end in sorted(ends):
        now = script.text_at(end, switches)
        if phases and phases[-1].text == now:
            phases.pop()
        phases.append(Phase(until=end, text=now))
    return tuple(phases)


def _switch(when: str, steps: int, first_steps: int | None, *, old_timelines: bool) -> int:
    """The last step of what comes before."""
    number = float(when)
    if old_timelines:
        is_share = number < 1
    else:
        is_share = "." in when
        if first_steps is not None:
            number -= 1 if is_share else first_steps
    return int(max(-1.0, min(number * steps if is_share else number, steps)))


def _script(text: str) -> _Script:
    pieces = _SCHEDULE_PIECE.findall(text)
    choices: dict[int, _Choice] = {}
    leave: dict[int, int] = {}
    opened: list[tuple[int, list[int]]] = []
    for number, piece in enumerate(pieces):
        if piece in {"(", "["}:
            opened.append((number, []))
        elif piece in {":", "|"} and opened:
            opened[-1][1].append(number)
        elif piece in {")", "]"} and opened:
            start, marks = opened.pop()
            if pieces[start] + piece not in {"()", "[]"}:
                opened.clear()  # what is open here cannot be closed any more
            elif piece == "]" and (choice := _choice(pieces, start, marks, number)):
                choices[start] = choice
                leave.update(dict.fromkeys([*marks, number], number))
    return _Script(pieces=pieces, choices=choices, leave=leave)


def _choice(pieces: Sequence[str], start: int, marks: Sequence[int], end: int) -> _Choice | None:
    """What a square bracket with marks between its parts is; None where it is only a bracket."""
    kinds = {pieces[mark] for mark in marks}
    if kinds == {"|"}:
        return _Choice(parts=(start + 1, *(mark + 1 for mark in marks)), end=end)
    if kinds != {":"} or len(marks) > 2 or end - marks[-1] != 2:
        return None
    when = _WHEN.fullmatch(pieces[end - 1])
    if when is None:
        return None
    return _Choice(parts=(start + 1, *(m + 1 for m in marks[:-1])), end=end, when=when[1])


# -- weights -------------------------------------------------------------------------------------

_WEIGHT_PIECE = re.compile(
    r"\\[()\[\]\\]|\\|:\s*+([+-]?+(?:[0-9]++(?:\.[0-9]*+)?+|\.[0-9]++))\s*+\)"
    r"|[()\[\]]|[^\\()\[\]:]++|:"
)
_BREAK = re.compile(r"\bBREAK\b")


def parse_weights(text: str) -> tuple[Fragment, ...]:
    """Cut a prompt into words of equal weight, with `BREAK` between chunks; never empty.

    A bracket that is not closed holds to the end, and one that was not opened is a letter. Within
    brackets that change the weight, BREAK is a word like others, as AUTOMATIC1111 has it.
    """
    found = [(piece[0], piece[1]) for piece in _WEIGHT_PIECE.finditer(text)]
    factors, closes = _brackets(found)
    rounds, squares = [1.0], [1.0]
    words: list[tuple[str, float]] = []
    for number, (piece, _) in enumerate(found):
        stack = squares if piece in {"[", "]"} else rounds
        if number in factors:
            stack.append(_bounded(stack[-1] * factors[number]))
        elif number in closes:
            stack.pop()
        else:
            words += _words(piece, rounds[-1] * squares[-1])
    runs = groupby(words, key=itemgetter(1))
    merged = [("".join(text for text, _ in run), weight) for weight, run in runs]
    return tuple(Fragment(text=text, weight=weight) for text, weight in merged or [("", 1.0)])


def _brackets(found: Iterable[tuple[str, str | None]]) -> tuple[dict[int, float], set[int]]:
    """The factor of each opening bracket, and which pieces close one."""
    factors: dict[int, float] = {}
    closes: set[int] = set()
    rounds: list[int] = []
    squares: list[int] = []
    for number, (piece, weight) in enumerate(found):
        if piece == "(":
            rounds.append(number)
            factors[number] = MORE
        elif piece == "[":
            squares.append(number)
            factors[number] = 1 / MORE
        elif piece == "]" and squares:
            squares.pop()
            closes.add(number)
        elif (weight or piece == ")") and rounds:
            factors[rounds.pop()] = _bounded(float(weight)) if weight else MORE
            closes.add(number)
    return factors, closes


def _words(piece: str, weight: float) -> Iterator[tuple[str, float]]:
    """One piece with its weight, cut at its BREAKs, which swallow the blanks around them."""
    if piece[0] == "\\":
        yield piece[1:], weight
        return
    first, *others = _BREAK.split(piece)
    yield first.rstrip() if others else first, weight
    for left, part in enumerate(others, start=1 - len(others)):
        yield BREAK.text, BREAK.weight * weight
        yield part.strip() if left else part.lstrip(), weight


def _bounded(weight: float) -> float:
    return max(-WEIGHT_MAX, min(WEIGHT_MAX, weight))

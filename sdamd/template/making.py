"""Counts the texts of a template, and makes each from its number and seed."""

import math
import random
from bisect import bisect_right
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from enum import StrEnum
from hashlib import sha256
from itertools import accumulate

from sdamd.errors import BadRequest
from sdamd.template.binding import Binder, Source
from sdamd.template.syntax import DOTS, Chain, Choice, Node, Once, Sampler, Wrap, error_at

LETTERS_MAX = 64 * 1024
"""The longest text that a template may become, in characters."""

COUNTED = 10**18
"""Combinations are counted up to this number, which stands for all that are more."""

_VISITS_MAX = 200_000
_ARRANGED_MAX = 1_000_000


class Mode(StrEnum):
    """What becomes of templates: nothing, one text per picture, or every text."""

    OFF = "off"
    RANDOM = "random"
    COMBINATORIAL = "combinatorial"


class Template:
    """A text in the template language, read and checked, with its wildcards.

    Args:
        text: with or without choices.
        wildcards: where its wildcards are found; they are read here and not again.
        shared: where wildcards are kept that other templates use too.

    Raises:
        BadRequest: the text is malformed, or a wildcard is missing, unreadable or includes
            itself; the message says where.
    """

    def __init__(
        self, text: str, wildcards: Source, shared: MutableMapping[str, Choice] | None = None
    ) -> None:
        self.text = text
        self._root = Binder(wildcards, {} if shared is None else shared).whole(text)
        self._counts = _Counts()

    def count(self, mode: Mode = Mode.COMBINATORIAL) -> int | None:
        """How many texts there are before they repeat, without making one.

        `COUNTED` means that many or more. None means without end: something is drawn at random
        or in turn, and nothing sets an end.

        Raises:
            BadRequest: there are too many options for counting their arrangements.
        """
        default = _default(mode)
        if _holds_choice(self._root, default, Sampler.EVERY):
            return self._counts.of(self._root, default)
        return None if _holds_choice(self._root, default) else 1

    def make(self, number: int, seed: int, *, mode: Mode = Mode.RANDOM, stream: str = "") -> str:
        """The text of a picture.

        Args:
            number: of the text, from 0; what is combinatorial or in turn is chosen by it.
            seed: what is at random is decided by it, on every machine alike.
            mode: how the choices are drawn that do not say it.
            stream: another one makes other draws from the same seed, so that two prompts of a
                picture are not drawn in step.

        Raises:
            BadRequest: the text grows longer than `LETTERS_MAX`.
        """
        default = _default(mode)
        making = _Making(self.text, self._counts, seed, stream)
        index = number % self._counts.of(self._root, default)
        return making.text(self._root, index, number, default)

    def combinations(self, seed: int = 0) -> Iterator[str]:
        """Every text in order, one at a time; without end where `count` is None.

        The seed goes up by one with each, as it does from picture to picture.
        """
        total = self.count()
        number = 0
        while total is None or number < total:
            yield self.make(number, seed + number, mode=Mode.COMBINATORIAL)
            number += 1


def _default(mode: Mode) -> Sampler:
    return Sampler.EVERY if mode is Mode.COMBINATORIAL else Sampler.RANDOM


def _within(node: Node) -> Sequence[Node]:
    """The nodes that stand directly in one."""
    match node:
        case Chain():
            return node.parts
        case Choice():
            return node.options
        case Wrap():
            return (node.wrapper, node.inner)
        case _:
            return ()


def _holds_choice(node: Node, default: Sampler, sampler: Sampler | None = None) -> bool:
    """Whether there is a choice, of this kind; what stands within choices is not asked.

    What is drawn otherwise than in all its combinations does not multiply the texts, and no more
    does what is within it, or what is drawn once.
    """
    seen: set[int] = set()  # a variable's value is one node, used often
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, str) or id(node) in seen:
            continue
        seen.add(id(node))
        if not isinstance(node, Choice):
            waiting += _within(node)
        elif sampler is None:
            if node.depth > 1 or len(node.options) > 1 or len(sizes(node)) > 1:
                return True  # a single text is no choice, whatever the sign before it
        elif (node.sampler or default) is sampler:
            return True
    return False


class _Counts:
    """The numbers of combinations of nodes, each reckoned once; the nodes must be kept."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, Sampler], int] = {}
        self._times: dict[int, Sequence[int]] = {}
        self._sums: dict[int, Sequence[int]] = {}

    def of(self, node: Node, default: Sampler) -> int:
        """How many texts a node has in all, at most `COUNTED`; 1 where it is drawn otherwise."""
        if isinstance(node, str | Once):
            return 1
        key = (id(node), default)
        if key not in self._counts:
            self._counts[key] = self._count(node, default)
        return self._counts[key]

    def _count(self, node: Node, default: Sampler) -> int:
        if not isinstance(node, Choice):
            total = 1
            for child in _within(node):
                # Bounded at each step: the product of thousands is a number of thousands.
                total = min(COUNTED, total * self.of(child, default))
            return total
        if (node.sampler or default) is not Sampler.EVERY:
            return 1
        total = 0
        for size in sizes(node):
            total = min(COUNTED, total + self.arranged(node, size))
            if total == COUNTED:
                break
        return total

    def arranged(self, node: Choice, size: int) -> int:
        """In how many ways `size` of the options can stand in a row, at most `COUNTED`."""
        if self.plain(node):
            return _falling(len(node.options), size)
        if size == 1:
            return min(COUNTED, self.sums(node)[-1])
        times = self.times(node)
        return min(COUNTED, _symmetric(times, size)[size] * math.factorial(size))

    @staticmethod
    def plain(node: Choice) -> bool:
        """Whether every option is one text that comes once."""
        return node.depth == 1 and not (node.repeats and node.weights)

    def times(self, node: Choice) -> Sequence[int]:
        """How many combinations each option brings along."""
        if id(node) not in self._times:
            times = [self.of(option, Sampler.EVERY) for option in node.options]
            if node.repeats and node.weights:
                times = [n * _repeats(w) for n, w in zip(times, node.weights, strict=True)]
            self._times[id(node)] = times
        return self._times[id(node)]

    def sums(self, node: Choice) -> Sequence[int]:
        """The running sums of `times`."""
        if id(node) not in self._sums:
            self._sums[id(node)] = list(accumulate(self.times(node)))
        return self._sums[id(node)]


def _repeats(weight: float) -> int:
    """As dynamicprompts: a weight of 3 is three lines; but a line below 1 still comes once."""
    return int(weight) if weight >= 1 else math.ceil(weight)


def sizes(node: Choice) -> range:
    """How many options may be taken together."""
    high = len(node.options) if node.high is None else min(node.high, len(node.options))
    return range(min(node.low, high), high + 1)


def _falling(options: int, size: int) -> int:
    """Arrangements of `size` out of `options`, at most `COUNTED`."""
    total = 1
    for left in range(options, options - size, -1):
        total *= left
        if total >= COUNTED:
            return COUNTED
    return total


def _symmetric(times: Sequence[int], size: int) -> list[int]:
    """The elementary symmetric polynomials of `times`, up to the one of degree `size`.

    The last is the sum, over all sets of `size` options, of the product of their times.

    Raises:
        BadRequest: there are too many for it.
    """
    if len(times) * size > _ARRANGED_MAX:
        raise BadRequest(
            f"template: {size} of {len(times)} options that are choices themselves are too many "
            f"for the combinatorial mode; allowed are {_ARRANGED_MAX // len(times)} of so many"
        )
    sums = [1] + [0] * size
    for number, count in enumerate(times, start=1):
        for degree in range(min(number, size), 0, -1):
            sums[degree] += count * sums[degree - 1]
    return sums


class _Making:
    """One text in the making: what was drawn once, and how much was spent."""

    def __init__(self, template: str, counts: _Counts, seed: int, stream: str) -> None:
        self._template = template
        self._counts = counts
        # Only random() is used: its sequence is promised to stay, that of the others is not.
        digest = sha256(f"{seed} {stream}".encode()).digest()
        self._random = random.Random(int.from_bytes(digest)).random  # noqa: S311  # no secret
        self._once: dict[int, str] = {}
        self._letters = 0
        self._visits = 0

    def text(self, node: Node, index: int, number: int, default: Sampler) -> str:
        """The text of a node.

        `index` is of its combination, below its count; `number` is that of the picture, for
        what is taken in turn.
        """
        match node:
            case str():
                self._spend(letters=len(node))
                return node
            case Once():
                if id(node) not in self._once:
                    self._once[id(node)] = self.text(node.node, 0, number, default)
                self._spend(letters=len(self._once[id(node)]))
                return self._once[id(node)]
            case Chain(parts=parts):
                return "".join(self._each(parts, index, number, default))
            case Wrap(wrapper=wrapper, inner=inner):
                return _wrapped(*self._each((wrapper, inner), index, number, default))
            case Choice():
                return self._choice(node, index, number, default)
        raise AssertionError(node)

    def _choice(self, node: Choice, index: int, number: int, default: Sampler) -> str:
        sampler = node.sampler or default
        if sampler is Sampler.EVERY:
            taken, index = self._arrangement(node, index)
        elif sampler is Sampler.RANDOM:
            taken = self._drawn(node)
        else:
            taken, number = _in_turn(node, number)
        texts = self._each([node.options[option] for option in taken], index, number, sampler)
        self._spend(letters=len(node.separator) * max(0, len(taken) - 1))
        return node.separator.join(texts)

    def _each(self, nodes: Sequence[Node], index: int, number: int, default: Sampler) -> list[str]:
        """The texts of several nodes, of which the last one changes fastest."""
        self._spend(visits=len(nodes))
        indices: list[int] = []
        for node in reversed(nodes):
            index, own = divmod(index, self._counts.of(node, default))
            indices.append(own)
        return [
            self.text(node, own, number, default)
            for node, own in zip(nodes, reversed(indices), strict=True)
        ]

    def _spend(self, *, letters: int = 0, visits: int = 1) -> None:
        self._letters += letters
        self._visits += visits
        if self._letters > LETTERS_MAX or self._visits > _VISITS_MAX:
            what = f"it grows longer than {LETTERS_MAX} characters or {_VISITS_MAX} parts"
            raise error_at(self._template, 0, what)

    def _arrangement(self, node: Choice, index: int) -> tuple[list[int], int]:
        """Which options, in which order, and the index among the combinations within them."""
        for size in sizes(node):
            count = self._counts.arranged(node, size)
            if index < count:
                break
            index -= count
        else:
            raise AssertionError(index)
        if self._counts.plain(node):
            return _permutation(len(node.options), size, index), 0
        if size != 1:
            return _weighed_permutation(self._counts.times(node), size, index)
        sums, times = self._counts.sums(node), self._counts.times(node)
        taken = bisect_right(sums, index)
        # What a line's weight repeats are whole rounds of its own combinations.
        own = self._counts.of(node.options[taken], Sampler.EVERY)
        return [taken], (index - (sums[taken] - times[taken])) % own

    def _drawn(self, node: Choice) -> list[int]:
        """The options that the seed decides on."""
        drawable = len(node.options)
        if node.weights:
            drawable = sum(weight > 0 for weight in node.weights)
        between = [min(size, drawable) for size in (sizes(node).start, sizes(node).stop - 1)]
        size = between[0] + int(self._random() * (between[1] - between[0] + 1))
        if not node.weights:
            return self._shuffled(drawable, size)
        left = dict(enumerate(node.weights))
        taken = []
        for _ in range(size):
            self._spend(visits=1 + len(left) // 64)
            taken.append(_at_share(left, self._random()))
            del left[taken[-1]]
        return taken

    def _shuffled(self, count: int, size: int) -> list[int]:
        """`size` different numbers below `count`, in an order that is drawn too."""
        self._spend(visits=size)
        moved: dict[int, int] = {}
        taken = []
        for last in range(count - 1, count - 1 - size, -1):
            at = int(self._random() * (last + 1))
            taken.append(moved.get(at, at))
            moved[at] = moved.get(last, last)
        return taken


def _at_share(weights: Mapping[int, float], share: float) -> int:
    """The key at this share of all the weights, from 0 to below 1."""
    rest = share * math.fsum(weights.values())
    last = -1
    for key, weight in weights.items():
        if weight:
            last = key
            rest -= weight
            if rest < 0:
                break
    return last


def _in_turn(node: Choice, number: int) -> tuple[list[int], int]:
    """The options whose turn it is, and the number for what stands within them."""
    counts = [_falling(len(node.options), size) for size in sizes(node)]
    number, turn = divmod(number, sum(counts))
    for size, count in zip(sizes(node), counts, strict=True):
        if turn < count:
            return _permutation(len(node.options), size, turn), number
        turn -= count
    raise AssertionError(turn)


def _permutation(count: int, size: int, index: int) -> list[int]:
    """The arrangement of this index, in the order of `itertools.permutations`."""
    if size == 1:
        return [index]
    left = list(range(count))
    taken = []
    for place in range(size):
        # A block larger than `COUNTED` is entered at its beginning only, since no index is larger.
        at, index = divmod(index, _falling(count - place - 1, size - place - 1))
        taken.append(left.pop(at))
    return taken


def _weighed_permutation(times: Sequence[int], size: int, index: int) -> tuple[list[int], int]:
    """The same where options bring several combinations; they vary within the arrangement.

    Gives the options and the index among their combinations.
    """
    left = dict(enumerate(times))
    sums = _symmetric(times, size)
    product = 1
    taken = []
    for place in range(size, 0, -1):
        for option, count in left.items():  # noqa: B007  # it is used after the loop
            without = [1]  # the polynomials of the others
            for degree in range(1, place):
                without.append(sums[degree] - count * without[-1])
            block = product * count * without[-1] * math.factorial(place - 1)
            if index < block:
                break
            index -= block
        else:
            raise AssertionError(index)
        taken.append(option)
        product *= count
        del left[option]
        sums = without
    return taken, index


def _wrapped(wrapper: str, inner: str) -> str:
    """Put `inner` in the place of the first dots, or at the end where there are none."""
    found = DOTS.search(wrapper)
    if found is None:
        return wrapper + inner
    return f"{wrapper[: found.start()]}{inner}{wrapper[found.end() :]}"

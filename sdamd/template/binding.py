"""Puts lines in the place of wildcards and values in the place of variables."""

import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from sdamd.errors import BadRequest
from sdamd.template.syntax import (
    NESTING_MAX,
    Chain,
    Choice,
    Node,
    Once,
    Reader,
    Set,
    Variable,
    Wildcard,
    Wrap,
    error_at,
)

DEPTH_MAX = 3 * NESTING_MAX
"""How many nodes may stand in each other: a choice in an option of a choice is up to three."""

_SPECIAL = re.compile(r"[{$%\\]|__")
_WITHIN = "in a line of the wildcard "


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """An option of a wildcard: a text in the template language, and how often it is drawn."""

    text: str
    weight: float = 1.0


class Source(Protocol):
    """Where wildcards come from."""

    def find(self, pattern: str) -> Mapping[str, Sequence[Line]]:
        """The lines of each wildcard that a name or pattern means, by the wildcard's own name.

        Raises:
            BadRequest: there is none, or its file cannot be read.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scope:
    """Where a node stands: its text, the variables known there, and in lines of which wildcards."""

    text: str
    known: Mapping[str, Node] = field(default_factory=dict)
    path: tuple[str, ...] = ()

    def error(self, column: int, what: str) -> BadRequest:
        return error_at(self.text, column, what)


class Binder:
    """Binds the nodes of one template.

    Args:
        source: of the wildcards.
        shared: those already bound, by name or pattern; with no variable in sight a wildcard is
            the same in every template.
    """

    def __init__(self, source: Source, shared: MutableMapping[str, Choice]) -> None:
        self._source = source
        self._shared = shared
        # The variables are kept beside, since ids are compared and must not be used again.
        self._bound: dict[tuple[object, ...], tuple[Choice, Mapping[str, Node]]] = {}
        self._level = 0

    def whole(self, text: str) -> Node:
        """Read a text and bind it.

        Raises:
            BadRequest: it is malformed, a wildcard is missing or includes itself, a variable is
                not set, or the whole is nested too deep.
        """
        return self._bind(Reader(text).whole(), _Scope(text=text))

    def _bind(self, node: Node, scope: _Scope) -> Node:
        if isinstance(node, str):
            return node
        self._level += 1
        try:
            if self._level > DEPTH_MAX:
                raise scope.error(0, f"it is nested deeper than {NESTING_MAX}")
            made = self._made(node, scope)
        finally:
            self._level -= 1
        if depth_of(made) > DEPTH_MAX:
            raise scope.error(0, f"its variables are nested deeper than {NESTING_MAX}")
        return made

    def _made(self, node: Node, scope: _Scope) -> Node:
        match node:
            case Wildcard():
                lines = self._wildcard(node, scope)
                return replace(lines, sampler=node.sampler) if node.sampler else lines
            case Variable():
                return self._variable(node, scope)
            case Choice(options=(Wildcard() as only,)):
                # Several of one wildcard are drawn from its lines, so that none comes twice.
                lines = self._wildcard(only, scope)
                return replace(
                    node,
                    options=lines.options,
                    weights=lines.weights,
                    sampler=node.sampler or only.sampler,
                    repeats=node.high == 1,
                    depth=lines.depth,
                )
            case Choice():
                options = tuple(self._bind(option, scope) for option in node.options)
                return replace(node, options=options, depth=_depth(options))
            case Wrap():
                wrapper, inner = self._bind(node.wrapper, scope), self._bind(node.inner, scope)
                return Wrap(wrapper=wrapper, inner=inner, depth=_depth((wrapper, inner)))
            case Chain():
                return self._chain(node.parts, scope)
            case Set():
                return self._chain((node,), scope)
            case _:
                return node

    def _chain(self, parts: Sequence[Node], scope: _Scope) -> Node:
        bound: list[Node] = []
        for part in parts:
            if not isinstance(part, Set):
                bound.append(self._bind(part, scope))
            elif not (part.only_unset and part.name in scope.known):
                value = self._bind(part.value, scope)
                if part.once:
                    value = Once(node=value, depth=_depth((value,)))
                scope = replace(scope, known={**scope.known, part.name: value})
        return Chain(parts=tuple(bound), depth=_depth(bound))

    def _variable(self, node: Variable, scope: _Scope) -> Node:
        if node.name in scope.known:
            return scope.known[node.name]
        if node.default is None:
            names = ", ".join(sorted(scope.known)[:12]) or "none"
            raise scope.error(
                node.column,
                f"the variable {node.name!r} is not set; set are: {names}; "
                f"${{{node.name}:text}} gives it a default",
            )
        return self._bind(node.default, scope)

    def _wildcard(self, node: Wildcard, scope: _Scope) -> Choice:
        pattern = self._pattern(node, scope)
        given = {name: self._bind(value, scope) for name, value in node.arguments}
        known = {**scope.known, **given}
        if not known:
            if pattern not in self._shared:
                self._shared[pattern] = self._found(pattern, node, scope, known)
            return self._shared[pattern]
        key = (pattern, *sorted((name, _identity(value)) for name, value in known.items()))
        if key not in self._bound:
            self._bound[key] = (self._found(pattern, node, scope, known), known)
        return self._bound[key][0]

    def _pattern(self, node: Wildcard, scope: _Scope) -> str:
        pieces = [self._bind(piece, scope) for piece in node.pattern]
        texts = [piece for piece in pieces if isinstance(piece, str)]
        if len(texts) < len(pieces):
            what = "a variable in a wildcard's name holds a choice; allowed is text"
            raise scope.error(node.column, what)
        return "".join(texts)

    def _found(
        self, pattern: str, node: Wildcard, scope: _Scope, known: Mapping[str, Node]
    ) -> Choice:
        """Find a wildcard and bind its lines."""
        try:
            found = self._source.find(pattern)
        except BadRequest as error:
            told = (str(scope.error(node.column, problem)) for problem in error.problems)
            raise BadRequest(*told) from error
        options: list[Node] = []
        weights: list[float] = []
        for name, lines in found.items():
            if name in scope.path:
                circle = " -> ".join((*scope.path[scope.path.index(name) :], name))
                raise scope.error(node.column, f"the wildcard {name!r} includes itself: {circle}")
            within = (*scope.path, name)
            weights += [line.weight for line in lines]
            options += [self._line(line.text, known, within) for line in lines]
        if not any(weights):
            raise scope.error(node.column, f"the wildcard {pattern!r} has no line to draw")
        return Choice(
            options=options,
            weights=None if set(weights) == {1} else weights,
            repeats=True,
            depth=_depth(options),
        )

    def _line(self, text: str, known: Mapping[str, Node], path: tuple[str, ...]) -> Node:
        if not _SPECIAL.search(text):
            return text
        try:
            return self._bind(Reader(text).whole(), _Scope(text=text, known=known, path=path))
        except BadRequest as error:
            if str(error).startswith(_WITHIN):
                raise
            told = (f"{_WITHIN}{path[-1]!r}: {problem}" for problem in error.problems)
            raise BadRequest(*told) from error


def depth_of(node: Node) -> int:
    """How many nodes stand in each other; a text is none."""
    return node.depth if isinstance(node, Chain | Choice | Once | Wrap) else 0


def _depth(nodes: Sequence[Node]) -> int:
    return 1 + max((depth_of(node) for node in nodes if not isinstance(node, str)), default=0)


def _identity(value: Node) -> tuple[int, str]:
    """What tells two bound values apart within one binder: texts by their letters."""
    return (0, value) if isinstance(value, str) else (id(value), "")

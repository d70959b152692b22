"""The wildcards folder: which lines a name means.

`clothes/hats.txt` is the wildcard `clothes/hats`, one line an option; blank lines and lines that
begin with `#` are left out. `.yaml`, `.yml` and `.json` hold many: the keys are names, nested
ones with `/` between them, after the folder that the file is in; a list is the options, and one
text is a list of one. There an option may be `3::hat`, or `{text: hat, weight: 3}`.

Names are looked up among those that the folder holds, so none leads out of it; links to files
elsewhere are not followed. Upper and lower case are the same, as are the ways to write an é.
"""

import json
import os
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn

from sdamd.errors import BadRequest, unknown
from sdamd.template.binding import Line
from sdamd.template.syntax import NESTING_MAX, WEIGHT_MAX

FILE_MAX_BYTES = 16 * 1024 * 1024
FOLDER_MAX_FILES = 20_000

_STRUCTURED = (".yaml", ".yml", ".json")
_WEIGHT = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)::(.*)", re.DOTALL)


class Wildcards:
    """The wildcards of a folder, which need not be there; files are read when they are needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Each name, compared as `_key` has it, with the files that hold it.
        self._names: dict[str, tuple[str, list[Path]]] | None = None
        self._structured: dict[Path, dict[str, list[Line]]] = {}
        self._damaged: dict[Path, str] = {}

    def names(self) -> list[str]:
        """All that are there, in order."""
        return sorted(name for name, _ in self._index().values())

    def find(self, pattern: str) -> Mapping[str, Sequence[Line]]:
        """The lines of the wildcard of this name, or of all that match: `*` also across `/`.

        Raises:
            BadRequest: there is none, it is in two files, or its file cannot be read.
        """
        index = self._index()
        key = _key(pattern)
        if not {"*", "?"} & set(key):
            if key not in index:
                raise BadRequest(self._missing(pattern))
            return self._read([index[key]])
        found = [index[name] for name in sorted(index) if fnmatchcase(name, key)]
        if not found:
            raise BadRequest(self._missing(pattern))
        return self._read(found)

    def _read(self, found: Sequence[tuple[str, list[Path]]]) -> dict[str, Sequence[Line]]:
        lines: dict[str, Sequence[Line]] = {}
        for name, paths in found:
            if len(paths) > 1:
                files = " and ".join(str(path) for path in paths)
                raise BadRequest(f"the wildcard {name!r} is in two files: {files}")
            path = paths[0]
            lines[name] = self._structured[path][name] if path in self._structured else _txt(path)
        return lines

    def _missing(self, pattern: str) -> str:
        if self._damaged:
            return "; ".join((f"there is no wildcard {pattern!r}", *self._damaged.values()))
        names = self.names()
        hint = r"; \_ is the character itself"
        if not names:
            return f"there is no wildcard {pattern!r}: {self._folder} holds none{hint}"
        return unknown(pattern, names, "the wildcard") + hint

    def _index(self) -> dict[str, tuple[str, list[Path]]]:
        if self._names is None:
            self._names = {}
            for path in self._files():
                if path.suffix.lower() == ".txt":
                    self._add(path.relative_to(self._folder).with_suffix("").as_posix(), path)
                    continue
                try:
                    lists = _lists(path, path.parent.relative_to(self._folder).as_posix())
                except BadRequest as error:
                    self._damaged[path] = str(error)  # it is told to whoever asks for its names
                    continue
                self._structured[path] = lists
                for name in lists:
                    self._add(name, path)
        return self._names

    def _add(self, name: str, path: Path) -> None:
        assert self._names is not None
        self._names.setdefault(_key(name), (name, []))[1].append(path)

    def _files(self) -> Iterator[Path]:
        """The wildcard files in the folder and below it, in the order of their names."""
        root = self._folder.resolve()
        count = 0
        for folder, folders, names in os.walk(self._folder):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(names):
                path = Path(folder, name)
                if path.suffix.lower() not in {".txt", *_STRUCTURED} or name.startswith("."):
                    continue
                if not path.resolve().is_relative_to(root) or not path.is_file():
                    continue
                count += 1
                if count > FOLDER_MAX_FILES:
                    raise BadRequest(
                        f"{self._folder} holds more than {FOLDER_MAX_FILES} wildcard files"
                    )
                yield path


def _key(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


def _text(path: Path) -> str:
    """The text of a file: UTF-8, or UTF-16 with its mark.

    Raises:
        BadRequest: it is too large, is no such text, or cannot be read.
    """
    try:
        with path.open("rb") as file:
            content = file.read(FILE_MAX_BYTES + 1)
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > FILE_MAX_BYTES:
        raise BadRequest(f"{path} is larger than {FILE_MAX_BYTES} bytes, which a wildcard may be")
    encoding = "utf-16" if content[:2] in {b"\xff\xfe", b"\xfe\xff"} else "utf-8-sig"
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise BadRequest(
            f"{path} line {line} is not {encoding.removesuffix('-sig').upper()} text; "
            "allowed is UTF-8, as editors save it by that name"
        ) from error
    if "\0" in text:
        raise BadRequest(f"{path} holds a NUL character, so it is no text")
    return text


def _txt(path: Path) -> list[Line]:
    stripped = (line.strip() for line in _text(path).splitlines())
    return [Line(text=text) for text in stripped if text and not text.startswith("#")]


def _lists(path: Path, folder: str) -> dict[str, list[Line]]:
    """The wildcards of a YAML or JSON file by their names.

    Raises:
        BadRequest: it is malformed or too large, or a weight is out of its range.
    """
    text = _text(path)
    read = _json if path.suffix.lower() == ".json" else _yaml
    try:
        tree = read(text)
    except BadRequest as error:
        raise BadRequest(*(f"{path}: {problem}" for problem in error.problems)) from error
    prefix = "" if folder == "." else f"{folder}/"
    if isinstance(tree, list):
        tree = {path.stem: tree}
    found: dict[str, list[Line]] = {}
    waiting = [(prefix, tree)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(f"{name.rstrip('/')}/{k}".lstrip("/"), v) for k, v in value.items()]
        elif isinstance(value, list):
            found[name] = [line for item in value if (line := _option(item, path, name))]
        elif isinstance(value, str) and not isinstance(value, _Number) and value.strip():
            found[name] = [Line(text=value.strip())]
    return found


def _option(item: object, path: Path, name: str) -> Line | None:
    """One option of a list; what is neither text nor a mapping with one is none."""
    if isinstance(item, dict):
        text = item.get("text") or item.get("content")
        if not isinstance(text, str):
            return None
        return Line(text=text, weight=_weight(str(item.get("weight", 1)), path, name))
    if not isinstance(item, str) or not item.strip():
        return None
    found = _WEIGHT.fullmatch(item.strip())
    if found is None:
        return Line(text=item.strip())
    return Line(text=found[2].strip(), weight=_weight(found[1], path, name))


def _weight(text: str, path: Path, name: str) -> float:
    if re.fullmatch(r"[0-9]{1,7}(?:\.[0-9]*)?|\.[0-9]+", text) and float(text) <= WEIGHT_MAX:
        return float(text)
    raise BadRequest(
        f"{path}: a weight of {name!r} is {text[:20]!r}; allowed is a number from 0 to {WEIGHT_MAX}"
    )


# -- the two formats, with scalars as the text that they are written in ---------------------------


class _Number(str):
    """A number or constant, as it is written; in a list it is an option, alone it is none."""

    __slots__ = ()


def _json(text: str) -> Any:
    try:
        return json.loads(
            text,
            object_pairs_hook=_without_duplicates,
            parse_int=_Number,
            parse_float=_Number,
            parse_constant=_refuse_constant,
        )
    except RecursionError as error:
        raise BadRequest(f"nested deeper than {NESTING_MAX}") from error
    except ValueError as error:
        raise BadRequest(f"not valid JSON: {error}") from error


def _refuse_constant(text: str) -> NoReturn:
    raise BadRequest(f"{text} is no JSON")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        twice = next(key for number, key in enumerate(keys) if key in keys[:number])
        raise BadRequest(f"the key {twice!r} is there twice")
    return dict(pairs)


_YAML_CONSTANT = re.compile(r"[-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?|true|false|null|~|", re.IGNORECASE)


def _yaml(text: str) -> Any:
    """Read YAML by its events, so that every scalar stays the text that it is.

    YAML would make False of `no` and 1.0 of `1.00`. Without recursion no depth is too deep, and
    without aliases no few lines can stand for billions.
    """
    import yaml  # noqa: PLC0415  # takes 20 ms, and only who has YAML wildcards needs it

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    tree = _Tree()
    try:
        for event in yaml.parse(text, Loader=loader):
            line = event.start_mark.line + 1 if event.start_mark else 0
            match event:
                case yaml.AliasEvent():
                    raise BadRequest(f"line {line} has an alias ('*'); allowed is to write it out")
                case yaml.SequenceStartEvent():
                    tree.add([], line)
                case yaml.MappingStartEvent():
                    tree.add({}, line)
                case yaml.ScalarEvent():
                    constant = event.implicit[0] and _YAML_CONSTANT.fullmatch(event.value)
                    tree.add(_Number(event.value) if constant else event.value, line)
                case yaml.SequenceEndEvent() | yaml.MappingEndEvent():
                    tree.end()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        raise BadRequest(f"not valid YAML: {where}{getattr(error, 'problem', error)}") from error
    return tree.root


class _Tree:
    """Lists and mappings as they grow, event by event."""

    def __init__(self) -> None:
        self.root: Any = None
        self._open: list[Any] = []
        self._keys: list[str | None] = []

    def add(self, value: Any, line: int) -> None:
        if not self._open:
            if self.root is not None:
                raise BadRequest(f"line {line} begins a second document; allowed is one")
            self.root = value
        elif isinstance(self._open[-1], list):
            self._open[-1].append(value)
        elif self._keys[-1] is None:
            self._key(value, line)
            return
        else:
            self._open[-1][self._keys[-1]] = value
            self._keys[-1] = None
        if isinstance(value, list | dict):
            if len(self._open) >= NESTING_MAX:
                raise BadRequest(f"line {line} is nested deeper than {NESTING_MAX}")
            self._open.append(value)
            self._keys.append(None)

    def end(self) -> None:
        self._open.pop()
        self._keys.pop()

    def _key(self, key: Any, line: int) -> None:
        if not isinstance(key, str):
            raise BadRequest(f"line {line} has a key that is no text")
        if key in self._open[-1]:
            raise BadRequest(f"line {line}: the key {key!r} is there twice")
        self._keys[-1] = key

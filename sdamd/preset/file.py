"""The file of a preset: TOML read strictly, every problem with its line and column."""

import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, Final

from sdamd.checkpoint import FAMILIES
from sdamd.errors import BadRequest, unknown
from sdamd.preset.preset import NEVER_SHARED, TIERS, Need, Preset
from sdamd.request import Request
from sdamd.toml_source import Source, parse

SCHEMA: Final = 1
MAX_BYTES: Final = 256 * 1024
"""Two prompts of 64 KiB with room; a preset that somebody wrote takes 1 KiB."""

_KINDS: Final = ("checkpoint", "vae", "upscaler")
_LISTS: Final = ("loras", "controlnets", "embeddings")
_TEXTS: Final = {"name": 80, "description": 400, "author": 80, "licence": 80}
_NOT_IN_A_LINE: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_SHA256: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)
_URL: Final = re.compile(r"https://[^\s\x00-\x1f\"'<>]{1,300}", re.ASCII)


def read(data: bytes, name: str) -> Preset:
    """Read the bytes of a preset file; `name` is what messages call it.

    Raises:
        BadRequest: with everything that is wrong, each with line and column.
    """
    source = parse(data, name, MAX_BYTES)
    values = source.values
    schema = values.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise BadRequest(
            f"{source.at('schema')}: schema is {schema}; this version of sdamd reads up to "
            f"{SCHEMA}, so a newer one is needed"
        )
    problems = list(_problems(source))
    needs = _needs(source, problems)
    request = _fields(source, ("request",), problems)
    tiers = _tiers(source, problems)
    if problems:
        raise BadRequest(*problems)
    return Preset(
        name=values["name"].strip(),
        description=values.get("description", "").strip(),
        author=values.get("author", "").strip(),
        licence=values.get("licence", "").strip(),
        tags=tuple(values.get("tags", ())),
        families=tuple(values.get("families", ())),
        values=request,
        needs=needs,
        tiers=tiers,
    )


def write(preset: Preset) -> bytes:
    """The file of a preset, in the order that people read it.

    Raises:
        BadRequest: the preset could not be read again.
    """
    import tomli_w  # noqa: PLC0415  # only for writing, which is rare

    values: dict[str, Any] = {"schema": SCHEMA, "name": preset.name}
    values |= {n: v for n in ("description", "author", "licence") if (v := getattr(preset, n))}
    values |= {n: list(v) for n in ("tags", "families") if (v := getattr(preset, n))}
    values["request"] = dict(preset.values)
    needs: dict[str, Any] = {}
    for need in preset.needs:
        row = {n: v for n in ("name", "sha256", "url") if (v := getattr(need, n))}
        if need.kind in _LISTS:
            needs.setdefault(need.kind, []).append(row)
        else:
            needs[need.kind] = row
    if needs:
        values["needs"] = needs
    if preset.tiers:
        values["tiers"] = {str(size): dict(preset.tiers[size]) for size in sorted(preset.tiers)}
    data = tomli_w.dumps(values).encode()
    read(data, preset.name)
    return data


def _problems(source: Source) -> Iterator[str]:
    """What is wrong outside the tables."""
    values = source.values
    known = ("schema", *_TEXTS, "tags", "families", "request", "needs", "tiers")
    for name in values:
        if name not in known:
            yield f"{source.at(name)}: {unknown(name, known, 'key')}"
    schema = values.get("schema")
    if "schema" not in values:
        yield f"{source.at()}: schema is missing; allowed is schema = {SCHEMA}"
    elif schema != SCHEMA or isinstance(schema, bool):
        yield f"{source.at('schema')}: schema is {_shown(schema)}; allowed is {SCHEMA}"
    if "name" not in values:
        yield f"{source.at()}: name is missing; allowed is a text of 1 to {_TEXTS['name']} letters"
    for name, longest in _TEXTS.items():
        if name in values and (problem := _text_problem(name, values[name], longest)):
            yield f"{source.at(name)}: {problem}"
    yield from (f"{source.at('tags')}: {p}" for p in _tag_problems(values.get("tags", [])))
    yield from (f"{source.at('families')}: {p}" for p in _family_problems(values))


def _tag_problems(tags: object) -> Iterator[str]:
    if not isinstance(tags, list) or len(tags) > 20:
        yield f"tags is {_shown(tags)}; allowed is a list of up to 20 texts"
        return
    yield from (p for tag in tags if (p := _text_problem("tag", tag, 40)))


def _family_problems(values: Mapping[str, object]) -> Iterator[str]:
    families = values.get("families", [])
    if not isinstance(families, list):
        yield f"families is {_shown(families)}; allowed is a list of {', '.join(FAMILIES)}"
        return
    yield from (
        unknown(str(name), list(FAMILIES), "family") for name in families if name not in FAMILIES
    )


def _text_problem(name: str, value: object, longest: int) -> str | None:
    if not isinstance(value, str):
        return f"{name} is {_shown(value)}; allowed is text"
    empty = not value.strip() and name in {"name", "tag"}
    if empty or len(value) > longest:
        return f"{name} is {len(value)} letters; allowed 1 to {longest}"
    if any(unicodedata.category(letter) in _NOT_IN_A_LINE for letter in value):
        return f"{name} is {_shown(value)}; allowed is text in one line, without control characters"
    return None


def _table(source: Source, path: tuple[str, ...], problems: list[str]) -> dict[str, Any]:
    value: Any = source.values
    for part in path:
        value = value.get(part, {})
        if not isinstance(value, dict):
            problems.append(
                f"{source.at(*path)}: {'.'.join(path)} is {_shown(value)}; allowed is a table"
            )
            return {}
    return dict(value)


def _fields(source: Source, path: tuple[str, ...], problems: list[str]) -> dict[str, object]:
    """The request fields of one table, checked one by one and then together."""
    table = _table(source, path, problems)
    known = [f.name for f in fields(Request) if f.name not in NEVER_SHARED]
    made: dict[str, object] = {}
    for name, value in table.items():
        where = source.at(*path, name)
        if name in NEVER_SHARED:
            problems.append(f"{where}: {_not_shared(name)}")
            continue
        if name not in known:
            problems.append(f"{where}: {unknown(name, known, 'field')}")
            continue
        try:
            checked = Request.from_dict({name: value})
        except BadRequest as error:
            problems += [f"{where}: {problem}" for problem in error.problems]
            continue
        made[name] = getattr(checked, name)
    if "scheduler" in made:
        from sdamd.scheduler import resolve  # noqa: PLC0415  # a table; most callers need no check

        try:
            resolve(str(made["scheduler"]))
        except BadRequest as error:
            problems += [f"{source.at(*path, 'scheduler')}: {p}" for p in error.problems]
    return made


def _not_shared(name: str) -> str:
    if name == "checkpoint":
        return "checkpoint is a name on one machine; allowed is [needs.checkpoint], name and sha256"
    return f"{name} is a file on one machine; presets hold no paths"


def _tiers(source: Source, problems: list[str]) -> dict[int, dict[str, object]]:
    tiers: dict[int, dict[str, object]] = {}
    for name in _table(source, ("tiers",), problems):
        if name not in {str(size) for size in TIERS}:
            problems.append(
                f"{source.at('tiers', name)}: tier is {_shown(name)}; allowed are "
                f"{', '.join(map(str, TIERS))} GiB of memory"
            )
            continue
        tiers[int(name)] = _fields(source, ("tiers", name), problems)
    return tiers


def _needs(source: Source, problems: list[str]) -> tuple[Need, ...]:
    made: list[Need] = []
    for kind, value in _table(source, ("needs",), problems).items():
        if kind not in _KINDS + _LISTS:
            problems.append(f"{source.at('needs', kind)}: {unknown(kind, _KINDS + _LISTS, 'need')}")
            continue
        rows = value if kind in _LISTS else [value]
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            what = "[[needs." + kind + "]]" if kind in _LISTS else "[needs." + kind + "]"
            problems.append(f"{source.at('needs', kind)}: allowed is a table {what}")
            continue
        for number, row in enumerate(rows):
            path = ("needs", kind, str(number)) if kind in _LISTS else ("needs", kind)
            wrong = [f"{source.at(*path, key)}: {p}" for key, p in _need_problems(row)]
            problems += wrong
            if not wrong:
                made.append(Need(kind=kind, **row))
    return tuple(made)


def _need_problems(row: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    known = ("name", "sha256", "url")
    for key in row:
        if key not in known:
            yield key, unknown(key, known, "key")
    if "name" not in row:
        yield "", "name is missing; a need is found by name and sha256"
    name, sha256, url = (row.get(key, "") for key in known)
    if "name" in row:
        if problem := _text_problem("name", name, 200):
            yield "name", problem
        elif not is_plain_name(str(name)):
            yield "name", f"name is {_shown(name)}; allowed is a file's name, without folders"
    if sha256 != "" and not (isinstance(sha256, str) and _SHA256.fullmatch(sha256)):
        yield "sha256", f"sha256 is {_shown(sha256)}; allowed are 64 digits of 0-9 and a-f"
    if url != "" and not (isinstance(url, str) and _URL.fullmatch(url)):
        yield "url", f"url is {_shown(url)}; allowed is an https:// address, which people open"


def is_plain_name(name: str) -> bool:
    """Whether it names no folder, on any system."""
    return not (
        name.startswith((".", "~"))
        or any(letter in name for letter in '/\\:*?"<>|')
        or name != name.strip()
    )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

"""`sdamd presets`: list, show, check, save, import and export them."""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sdamd.checkpoint import FAMILIES
from sdamd.commands.arguments import fields_asked, settings_of
from sdamd.errors import BadRequest, SdamdError, StorageError
from sdamd.preset import Change, Preset, from_request, read, write
from sdamd.preset.library import SUFFIX, add, entries, file_bytes, find, load
from sdamd.request import Request


def run(asked: argparse.Namespace) -> int:
    """Do what the word after `presets` says; status 2 where `check` finds something."""
    does = {
        "list": _list, "show": _show, "check": _check, "save": _save, "import": _import,
        "export": _export,
    }  # fmt: skip
    return does[asked.what](asked)


def _list(asked: argparse.Namespace) -> int:
    for entry in entries(settings_of(asked).presets):
        about = entry.preset
        if asked.json:
            shown = {"name": entry.name, "path": str(entry.path), "own": entry.own}
            shown |= {"problems": entry.problems} if about is None else _facts(about)
            print(json.dumps(shown, default=list))
        elif about is None:
            print(f"{entry.path.name}: cannot be read: {entry.problems[0]}")
        else:
            whose = " (yours)" if entry.own else ""
            print(f"{about.name}{whose}: {about.description}")
    return 0


def _show(asked: argparse.Namespace) -> int:
    settings = settings_of(asked)
    preset, path = find(asked.name, settings.presets)
    values: Mapping[str, object] = preset.values_for(asked.vram)
    before: Mapping[str, object] = {}
    if asked.against:
        before = _against(asked.against, settings.presets, asked.vram)
    changes = tuple(_differences(before, values, preset.name))
    if asked.json:
        shown = {"path": str(path), **_facts(preset), "changes": [asdict(c) for c in changes]}
        print(json.dumps(shown, default=list))
        return 0
    for line in _about(preset):
        print(line)
    for change in changes:
        was = f"{_word(change.before)} -> " if asked.against else ""
        print(f"  {change.field}: {was}{_word(change.after)}")
    for size, values in preset.tiers.items():
        shown_values = ", ".join(f"{name} {_word(value)}" for name, value in values.items())
        print(f"  from {size} GiB: {shown_values}")
    return 0


def _check(asked: argparse.Namespace) -> int:
    """Every problem of every file, and one line for each that is right."""
    problems: list[str] = []
    for file in asked.files:
        try:
            preset = load(file)
        except BadRequest as error:
            problems += error.problems
        else:
            print(f"{file}: {preset.name}, right")
    if problems:
        raise BadRequest(*problems)
    return 0


def _save(asked: argparse.Namespace) -> int:
    settings = settings_of(asked)
    values: dict[str, object] = {}
    for name in asked.preset:
        values |= find(name, settings.presets)[0].values
    problems: list[str] = []
    values |= fields_asked(asked, problems)
    if problems:
        raise BadRequest(*problems)
    request = Request.from_dict(values)
    about: dict[str, Any] = {"name": asked.name, "tags": tuple(asked.tag)}
    about |= {n: getattr(asked, n) or "" for n in ("description", "author", "licence")}
    data = write(from_request(request, **about))
    print(add(data, read(data, asked.name).name, settings.presets, replace=asked.replace))
    return 0


def _import(asked: argparse.Namespace) -> int:
    """Check all files before the first is kept."""
    folder = settings_of(asked).presets
    checked: list[tuple[bytes, str]] = []
    problems: list[str] = []
    for file in asked.files:
        try:
            checked.append(_bytes_of(file))
        except BadRequest as error:
            problems += error.problems
    if problems:
        raise BadRequest(*problems)
    for data, name in checked:
        print(add(data, name, folder, replace=asked.replace))
    return 0


def _export(asked: argparse.Namespace) -> int:
    """Write the file as it is, or a card when the name ends in .png."""
    settings = settings_of(asked)
    preset, path = find(asked.name, settings.presets)
    target: Path = asked.file
    data = _bytes_of(path)[0]
    if target.suffix.lower() == ".png":
        data = _card(preset, data, asked.picture)
    elif target.suffix.lower() != SUFFIX:
        raise BadRequest(f"{target.name} ends in {target.suffix!r}; allowed are .toml and .png")
    try:
        with target.open("xb") as file:
            file.write(data)
    except FileExistsError as error:
        raise BadRequest(f"{target} is there already; allowed is a new name") from error
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {error.strerror}") from error
    print(target)
    return 0


def _card(preset: Preset, data: bytes, picture: Path | None) -> bytes:
    import logging  # noqa: PLC0415  # as what follows: for cards alone

    from PIL import Image  # noqa: PLC0415

    from sdamd.preset.card import make_card  # noqa: PLC0415

    if picture is None:
        raise BadRequest("a card shows what the preset makes; --picture FILE is missing")
    try:
        with Image.open(picture) as opened:
            card, coded = make_card(preset, data, opened)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BadRequest(f"{picture} is not a picture that can be read: {error}") from error
    if not coded:
        logging.getLogger(__name__).warning(
            "the preset is too long for the code on its card; the card loses it where a program "
            "saves the picture anew, so send it as a file"
        )
    return card


def _bytes_of(path: Path) -> tuple[bytes, str]:
    """A preset's bytes, checked, and its name."""
    if path.suffix.lower() == SUFFIX:
        data = file_bytes(path)
    else:
        from sdamd.preset.card import read_card  # noqa: PLC0415  # Pillow is for cards alone

        data = read_card(path)
    return data, read(data, path.name).name


def _against(name: str, folder: Path, vram: float | None) -> Mapping[str, object]:
    """The fields of another preset, or of the picture of this name."""
    path = Path(name).expanduser()
    try:
        return find(name, folder)[0].values_for(vram)
    except SdamdError:
        if not path.is_file():
            raise
    from sdamd import gallery  # noqa: PLC0415  # Pillow

    return gallery.request_from_png(path).to_dict()


def _differences(
    before: Mapping[str, object], after: Mapping[str, object], preset: str
) -> Iterator[Change]:
    for name in dict.fromkeys((*before, *after)):
        if before.get(name) != after.get(name):
            yield Change(field=name, before=before.get(name), after=after.get(name), preset=preset)


def _about(preset: Preset) -> Iterator[str]:
    yield f"{preset.name}: {preset.description}" if preset.description else preset.name
    if preset.author or preset.licence:
        yield "  by " + ", ".join(filter(None, (preset.author, preset.licence)))
    if preset.families:
        yield f"  made for {', '.join(FAMILIES[name].title for name in preset.families)}"
    for need in preset.needs:
        where = f", from {need.url}" if need.url else ""
        digest = f" (sha256 {need.sha256[:10]})" if need.sha256 else ""
        yield f"  needs the {need.kind.removesuffix('s')} {need.name}{digest}{where}"


def _facts(preset: Preset) -> dict[str, object]:
    facts = asdict(preset)
    facts["fields"] = facts.pop("values")
    return facts


def _word(value: object) -> str:
    return "default" if value is None else str(value)

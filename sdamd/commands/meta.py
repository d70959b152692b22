"""`sdamd meta`: show or convert the record inside a picture, whichever tool made it."""

import argparse
import json
import sys
from pathlib import Path

import sdamd
from sdamd import gallery
from sdamd.errors import SdamdError
from sdamd.interchange.convert import to_record
from sdamd.interchange.reading import Reading, visible
from sdamd.metadata import to_json, to_parameters


def run(asked: argparse.Namespace) -> int:
    """Show or convert the records inside pictures; a file that cannot be read stops no other."""
    status = 0
    for path in asked.files:
        try:
            text = _text(asked, path, gallery.read(path))
        except SdamdError as error:
            if len(asked.files) == 1:
                raise
            print(f"sdamd: {error}", file=sys.stderr)
            status = error.exit_status
        else:
            print(text)
    return status


def _text(asked: argparse.Namespace, path: Path, reading: Reading) -> str:
    if asked.what == "convert":
        return _converted(asked.to, path, reading)
    if asked.json:
        return _shown_as_json(path, reading)
    head = f"{path}:\n" if len(asked.files) > 1 else ""
    return head + visible(_shown(reading))


def _shown_as_json(path: Path, reading: Reading) -> str:
    if reading.record is not None:
        return to_json(reading.record)
    return json.dumps({
        "file": str(path),
        "tool": reading.tool,
        "fields": {name: value for name, value in reading.values.items() if value is not None},
        "unused": [{"name": u.name, "value": u.value, "reason": u.reason} for u in reading.unused],
        "notes": dict(reading.notes),
    })  # fmt: skip


def _shown(reading: Reading) -> str:
    if reading.record is not None:
        return to_parameters(reading.record)
    lines = [f"made by {reading.tool}"]
    lines += [f"{name}: {value}" for name, value in reading.values.items() if value is not None]
    if reading.unused:
        lines += ["not used:", *(f"  {unused}" for unused in reading.unused)]
    if reading.notes:
        lines += ["also told:", *(f"  {name}: {value}" for name, value in reading.notes.items())]
    return "\n".join(lines)


def _converted(to: str, path: Path, reading: Reading) -> str:
    for unused in reading.unused:
        print(f"sdamd: {path}: not used: {unused}", file=sys.stderr)
    if to == "request":
        return json.dumps(reading.request().to_dict())
    record = to_record(reading, version=sdamd.__version__)
    return to_json(record) if to == "json" else to_parameters(record)

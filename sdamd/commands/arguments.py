"""What every command makes of its flags: a request, settings, and a way to stop."""

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from sdamd import picture, scheduler
from sdamd.errors import BadRequest, UserError
from sdamd.filename import Pattern
from sdamd.request import Request
from sdamd.settings import Settings

if TYPE_CHECKING:
    from sdamd.preset import Preset

log = logging.getLogger(__name__)

_T = TypeVar("_T")


def asked_for(asked: argparse.Namespace) -> tuple[Request, Settings]:
    """What the flags ask of the picture and of this machine.

    Raises:
        BadRequest: with everything that is wrong with either.
    """
    problems: list[str] = []
    values = fields_asked(asked, problems)
    of_machine: list[str] = []
    settings = _noting(of_machine, lambda: settings_of(asked))
    presets: tuple[Preset, ...] = ()
    if asked.preset and settings is not None:
        values, presets = _with_presets(asked, values, settings, problems)
    request = _noting(problems, lambda: Request.from_dict(values))
    if "scheduler" in values:
        _noting(problems, lambda: scheduler.resolve(values["scheduler"]))
    problems += of_machine
    if settings is not None:
        filename = settings.filename
        _noting(problems, lambda: Pattern.parse(filename))
    if problems or request is None or settings is None:
        raise BadRequest(*problems)
    for preset in presets:
        _warn_of_family(preset, getattr(asked, "family", None), request, settings)
    return request, settings


def fields_asked(asked: argparse.Namespace, problems: list[str]) -> dict[str, Any]:
    """The request fields that a picture's record, `--set` and flags give, the later ones first.

    What is malformed is added to `problems`.

    Raises:
        BadMetadata: the picture has no record that can be read.
    """
    values: dict[str, Any] = {}
    if asked.from_image:
        from sdamd import gallery  # noqa: PLC0415  # Pillow takes as long as all of `plan`

        reading = gallery.read(asked.from_image)
        for unused in reading.unused:
            log.warning("%s: %s", asked.from_image, unused)
        values |= reading.values
        for field_name in ("init_image", "mask_image"):
            found = picture.beside(values.get(field_name), asked.from_image.parent)
            values |= {field_name: str(found)} if found else {}
    for pair in asked.set:
        name, equals, value = pair.partition("=")
        if equals:
            values[name.strip().replace("-", "_")] = value
        else:
            problems.append(f"--set is {pair!r}; allowed is FIELD=VALUE")
    flags = {f.name: getattr(asked, f.name) for f in fields(Request)}
    return values | {name: v for name, v in flags.items() if v is not None}


def _with_presets(
    asked: argparse.Namespace, values: dict[str, Any], settings: Settings, problems: list[str]
) -> tuple[dict[str, Any], tuple["Preset", ...]]:
    """The values with what the presets say below them, and the presets."""
    from sdamd.preset import applied  # noqa: PLC0415  # most runs have none
    from sdamd.preset.library import find  # noqa: PLC0415

    presets: list[Preset] = []
    for name in asked.preset:
        try:
            presets.append(find(name, settings.presets)[0])
        except BadRequest as error:
            problems += error.problems
        except UserError as error:
            problems.append(str(error))
    vram = _vram_gib(asked, settings) if any(preset.tiers for preset in presets) else None
    made, changes = applied(presets, values, vram)
    for change in changes:
        log.debug("preset %s: %s is %s", change.preset, change.field, change.after)
    needs = [need for preset in presets for need in preset.needs]
    for need in needs:
        if need.kind != "checkpoint":
            what = need.kind.removesuffix("s")
            problems.append(
                f"the preset needs the {what} {need.name!r}; this version cannot use one yet"
            )
        elif "checkpoint" not in values and getattr(asked, "family", None) is None:
            from sdamd.models import find_needed  # noqa: PLC0415

            try:
                made["checkpoint"] = find_needed(
                    need.name, need.sha256, need.url, settings.models, settings.cache
                )
            except UserError as error:
                problems.append(str(error))
    return made, tuple(presets)


def _vram_gib(asked: argparse.Namespace, settings: Settings) -> float | None:
    """The memory of the card that the run is for, which decides the tier of a preset."""
    if getattr(asked, "gpu", None):
        from sdamd.hardware.products import find_card  # noqa: PLC0415

        gpu = find_card(asked.gpu)
    else:
        from sdamd.hardware.detect import detect  # noqa: PLC0415
        from sdamd.hardware.device import choose_device  # noqa: PLC0415

        chosen = choose_device(detect(), settings.device).gpu
        if chosen is None:
            return None
        gpu = chosen
    return gpu.usable_bytes / 2**30 if gpu.usable_bytes else None


def _warn_of_family(
    preset: "Preset", named: str | None, request: Request, settings: Settings
) -> None:
    from sdamd.checkpoint import FAMILIES  # noqa: PLC0415  # most runs have no preset
    from sdamd.models import find  # noqa: PLC0415

    if not preset.families:
        return
    try:
        family = FAMILIES.get(named or "") or find(request.checkpoint, settings.models).family
    except UserError:  # the run itself says it, or downloads the model first
        return
    if family.name not in preset.families:
        made_for = ", ".join(FAMILIES[name].title for name in preset.families)
        log.warning(
            "the preset %s is made for %s; the model is %s", preset.name, made_for, family.title
        )


def _noting(problems: list[str], read: Callable[[], _T]) -> _T | None:
    """What `read` gives, or nothing and its problems among the others."""
    try:
        return read()
    except BadRequest as error:
        problems += error.problems
        return None


def settings_of(asked: argparse.Namespace) -> Settings:
    """What the flags ask of this machine.

    Raises:
        BadRequest: with everything that is wrong.
    """
    names = ("home", *(f.name for f in fields(Settings)))
    return Settings.load({name: getattr(asked, name, None) for name in names})


@contextmanager
def stop_on_interrupt() -> Iterator[threading.Event]:
    """The first Ctrl-C asks to stop after the current step; the second one interrupts."""
    stopping = threading.Event()

    def interrupted(*_: object) -> None:
        if stopping.is_set():
            raise KeyboardInterrupt
        stopping.set()
        print("\nsdamd: stopping after this step; Ctrl-C again to stop now", file=sys.stderr)

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield stopping
    finally:
        signal.signal(signal.SIGINT, before)

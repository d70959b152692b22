"""What every command makes of its flags: a request, settings, and a way to stop."""

import argparse
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, TypeVar

from sdamd import scheduler
from sdamd.errors import BadRequest
from sdamd.filename import Pattern
from sdamd.request import Request
from sdamd.settings import Settings

_T = TypeVar("_T")


def asked_for(asked: argparse.Namespace) -> tuple[Request, Settings]:
    """What the flags ask of the picture and of this machine.

    Raises:
        BadRequest: with everything that is wrong with either.
    """
    values: dict[str, Any] = {}
    if asked.from_image:
        from sdamd import gallery  # noqa: PLC0415  # Pillow takes as long as all of `plan`

        values |= gallery.request_from_png(asked.from_image).to_dict()
    problems: list[str] = []
    for pair in asked.set:
        name, equals, value = pair.partition("=")
        if equals:
            values[name.strip().replace("-", "_")] = value
        else:
            problems.append(f"--set is {pair!r}; allowed is FIELD=VALUE")
    flags = {f.name: getattr(asked, f.name) for f in fields(Request)}
    values |= {name: v for name, v in flags.items() if v is not None}
    request = _noting(problems, lambda: Request.from_dict(values))
    if "scheduler" in values:
        _noting(problems, lambda: scheduler.resolve(values["scheduler"]))
    settings = _noting(problems, lambda: settings_of(asked))
    if settings is not None:
        filename = settings.filename
        _noting(problems, lambda: Pattern.parse(filename))
    if problems or request is None or settings is None:
        raise BadRequest(*problems)
    return request, settings


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

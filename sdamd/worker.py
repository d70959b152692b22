"""Rendering in a child process, which a fault of the GPU can kill without taking the rest along."""

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from sdamd.backends.backend import Backend, open_backend
from sdamd.errors import HardwareError, SdamdError, WorkerDied
from sdamd.hardware.device import Device
from sdamd.render import Event, LocalRender, Watch
from sdamd.request import Job
from sdamd.settings import Settings

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 5.0


class WorkerRender:
    """`LocalRender` in a child process, started when first needed and kept for the next jobs.

    `environment` is set in the child before it loads torch: the visibility mask and the variables
    that this card needs. `open_backend` is called in the child, which imports it by its name.
    """

    def __init__(
        self,
        settings: Settings,
        device: Device,
        environment: Mapping[str, str],
        open_backend: Callable[[], Backend] = open_backend,
    ) -> None:
        self._settings = settings
        self._device = device
        self._environment = dict(environment)
        self._open_backend = open_backend
        self._process: BaseProcess | None = None
        self._connection: Connection[Any, Any] | None = None

    def start(self) -> None:
        """Start the child now, so that it is there when the first jobs come."""
        if self._process is not None and self._process.is_alive():
            return
        self.close()
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=serve,
            args=(
                theirs,
                self._settings,
                self._device,
                self._environment,
                self._open_backend,
                log.getEffectiveLevel(),
            ),
            name="sdamd-worker",
            daemon=True,
        )
        with _interrupts_ignored():
            process.start()
        theirs.close()  # else the end of the child would not close the pipe
        self._process, self._connection = process, ours

    def __call__(self, jobs: Sequence[Job], watch: Watch) -> Iterator[Event]:
        """Yield the child's events.

        Raises:
            WorkerDied: the child ended before the jobs did.
            SdamdError: what the child could not go on from.
        """
        self.start()
        connection = self._connection
        assert connection is not None
        finished = False
        try:
            self._send(connection, ("render", tuple(jobs)))
            stopping = False
            while True:
                if not stopping and watch():
                    stopping = True
                    self._send(connection, ("stop",))
                kind, value = self._receive(connection)
                if kind == "nothing yet":
                    continue
                if kind == "event":
                    yield value
                elif kind == "failed":
                    # After a fault of the device the child may not be of use any more.
                    finished = not isinstance(value, HardwareError)
                    raise value
                else:
                    finished = True
                    return
        finally:
            if not finished:  # the caller left in the middle, or the child died
                self.close()

    def close(self) -> None:
        """End the child, by force if it does not end by itself."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if connection is not None:
            connection.close()  # the child ends when it sees that
        if process is not None:
            process.join(_GRACE_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()

    def _send(self, connection: "Connection[Any, Any]", message: tuple[Any, ...]) -> None:
        try:
            connection.send(message)
        except OSError as error:
            raise self._died() from error

    def _receive(self, connection: "Connection[Any, Any]") -> tuple[str, Any]:
        try:
            if not connection.poll(_POLL_SECONDS):
                return "nothing yet", None
            message: tuple[str, Any] = connection.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error
        return message

    def _died(self) -> WorkerDied:
        process = self._process
        if process is None:  # by `close`, from another thread
            return WorkerDied("the process that renders was ended while it was at work")
        process.join(_GRACE_SECONDS)
        return WorkerDied(
            f"the process that renders has died ({how(process.exitcode)}); pictures that "
            "are saved are safe. Its last words are above; --in-process shows more"
        )


def how(exitcode: int | None) -> str:
    """Say in words how a process ended: `SIGABRT`, `access violation`, `exit status 1`."""
    if exitcode is None:
        return "it does not answer"
    if exitcode < 0:
        try:
            return signal.Signals(-exitcode).name
        except ValueError:
            return f"signal {-exitcode}"
    if exitcode > 255:
        return _WINDOWS_ENDS.get(exitcode, f"exit status 0x{exitcode:08X}")
    return f"exit status {exitcode}"


# Source: ntstatus.h. abort() of Microsoft's C library ends as 0xC0000409 as well.
_WINDOWS_ENDS = {
    0xC0000005: "access violation",
    0xC000001D: "illegal instruction",
    0xC00000FD: "stack overflow",
    0xC0000135: "a DLL was not found",
    0xC0000142: "a DLL could not be initialised",
    0xC000013A: "Ctrl-C",
    0xC0000374: "heap corruption",
    0xC0000409: "abort or stack overrun",
}


def serve(
    connection: "Connection[Any, Any]",
    settings: Settings,
    device: Device,
    environment: Mapping[str, str],
    open_backend: Callable[[], Backend],
    level: int,
) -> None:
    """The child: render what comes through `connection` until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which tells us
    os.dup2(2, 1)  # stdout is for results alone, and drivers print where they like
    os.environ.update(environment)
    logging.basicConfig(level=level, format="%(levelname)s: %(message)s")
    stop = threading.Event()
    jobs_come = threading.Condition()
    waiting: list[tuple[Job, ...]] = []

    def listen() -> None:
        while True:
            try:
                message = connection.recv()
            except (EOFError, OSError):
                os._exit(0)  # the parent is gone, and nobody waits for what is being rendered
            if message[0] == "stop":
                stop.set()
                continue
            with jobs_come:
                stop.clear()
                waiting.append(message[1])
                jobs_come.notify()

    threading.Thread(target=listen, name="listen", daemon=True).start()
    render = LocalRender(settings, device, open_backend)
    with suppress(SdamdError):  # the first jobs meet it again, and somebody is there to be told
        render.start()

    def tell(kind: str, value: object) -> None:
        try:
            connection.send((kind, value))
        except OSError:
            os._exit(0)  # as above; which of the two threads finds out first is chance

    while True:
        with jobs_come:
            jobs_come.wait_for(lambda: waiting)
            jobs = waiting.pop()
        try:
            render.run(jobs, lambda event: tell("event", event), stop.is_set)
        except SdamdError as error:
            tell("failed", error)
        else:
            tell("done", None)


class _interrupts_ignored:  # noqa: N801  # used like a function
    """While a child starts, so that it inherits deafness to Ctrl-C; in the main thread only."""

    def __enter__(self) -> None:
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._before = signal.signal(signal.SIGINT, signal.SIG_IGN)

    def __exit__(self, *_: object) -> None:
        if self._main:
            signal.signal(signal.SIGINT, self._before)

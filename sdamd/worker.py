"""Rendering in a child process, which a fault of the GPU can kill without taking the rest along."""

import logging
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from sdamd.backends.backend import Backend, open_backend
from sdamd.errors import HardwareError, SdamdError, WorkerDied
from sdamd.hardware.device import Device
from sdamd.hardware.last_words import LastWords
from sdamd.render import Ended, Event, LocalRender, Rendered, Watch
from sdamd.request import Job
from sdamd.settings import Settings
from sdamd.watchdog import Patience, Watchdog

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
_BEAT_SECONDS = 1.0
_GRACE_SECONDS = 5.0


class WorkerRender:
    """`LocalRender` in a child process, started when first needed and kept for the next jobs.

    `environment` is set in the child before it loads torch: the visibility mask and the variables
    that this card needs. `open_backend` is called in the child, which imports it by its name.
    After `recycle_after` pictures the next jobs get a new child, since drivers and allocators
    lose memory on the way; 0 is never.
    """

    def __init__(
        self,
        settings: Settings,
        device: Device,
        environment: Mapping[str, str],
        open_backend: Callable[[], Backend] = open_backend,
        *,
        patience: Patience | None = None,
        recycle_after: int = 0,
    ) -> None:
        self._settings = settings
        self._device = device
        self._environment = dict(environment)
        self._open_backend = open_backend
        self._recycle_after = recycle_after
        self._process: BaseProcess | None = None
        self._connection: Connection[Any, Any] | None = None
        self._words: LastWords | None = None
        # It outlives the children: what takes long does so in each of them.
        self._progress = Watchdog(patience or Patience())
        self._made = 0

    def start(self) -> None:
        """Start the child now, so that it is there when the first jobs come."""
        if self._process is not None and self._process.is_alive():
            return
        self.close()
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._words = LastWords()
        process = context.Process(
            target=serve,
            args=(
                theirs,
                self._settings,
                self._device,
                self._environment,
                self._open_backend,
                log.getEffectiveLevel(),
                self._words.path,
            ),
            name="sdamd-worker",
            daemon=True,
        )
        with _interrupts_ignored():
            process.start()
        theirs.close()  # else the end of the child would not close the pipe
        self._process, self._connection = process, ours
        self._made = 0

    def __call__(self, jobs: Sequence[Job], watch: Watch) -> Iterator[Event]:
        """Yield the child's events.

        Raises:
            WorkerDied: the child ended before the jobs did, or showed no progress for too long.
            SdamdError: what the child could not go on from.
        """
        if self._recycle_after and self._made >= self._recycle_after:
            log.info("a new process renders from here on, after %d pictures", self._made)
            self.close()
        waiting = tuple(jobs)
        while waiting:
            ended = yield from self._render(waiting, watch)
            if ended.worn or ended.left:
                log.info("a new process renders from here on, since memory does not come back")
                self.close()
            waiting = ended.left

    def _render(
        self, jobs: tuple[Job, ...], watch: Watch
    ) -> Generator[Event, None, Ended]:  # fmt: skip
        """Let the child render these; a new one if there is none."""
        self.start()
        connection = self._connection
        assert connection is not None
        finished = False
        try:
            self._progress.begin()
            self._send(connection, ("render", jobs))
            stopping = False
            while True:
                if not stopping and watch():
                    stopping = True
                    self._send(connection, ("stop",))
                kind, value = self._receive(connection)
                if kind == "event":
                    self._progress.see(value)
                    self._made += isinstance(value, Rendered)
                    yield value
                elif kind == "failed":
                    # After a fault of the device the child may not be of use any more.
                    finished = not isinstance(value, HardwareError)
                    raise value
                elif kind == "done":
                    finished = True
                    ended: Ended = value
                    return Ended(worn=ended.worn) if stopping else ended
        finally:
            if not finished:  # the caller left in the middle, or the child died
                self.close()

    def close(self) -> None:
        """End the child, by force if it does not end by itself."""
        process, connection, words = self._process, self._connection, self._words
        self._process = self._connection = self._words = None
        if connection is not None:
            connection.close()  # the child ends when it sees that
        if process is not None:
            process.join(_GRACE_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
        if words is not None:
            words.close()

    def _send(self, connection: "Connection[Any, Any]", message: tuple[Any, ...]) -> None:
        try:
            connection.send(message)
        except OSError as error:
            raise self._died() from error

    def _receive(self, connection: "Connection[Any, Any]") -> tuple[str, Any]:
        """The next message; `nothing yet` after a moment without one."""
        words, message = self._words, ("nothing yet", None)
        try:
            if connection.poll(_POLL_SECONDS):
                message = connection.recv()
                self._progress.hear()
        except (EOFError, OSError) as error:
            raise self._died() from error
        if words is not None:
            words.pass_on()  # before what it told afterwards
        if message[0] == "nothing yet" and (hung := self._progress.hung()):
            if self._process is not None:
                self._process.kill()
            raise self._died(hung)
        return message

    def _died(self, hung: str = "") -> WorkerDied:
        process, words = self._process, self._words
        if process is None:  # by `close`, from another thread
            return WorkerDied("the process that renders was ended while it was at work")
        process.join(_GRACE_SECONDS)
        said = ""
        if words is not None:
            words.pass_on()
            said = words.last
        what = f"hung ({hung}) and was ended" if hung else f"has died ({how(process.exitcode)})"
        return WorkerDied(
            f"the process that renders {what}; pictures that are saved are safe. "
            + (f"Its last words: {said}" if said else "It said nothing; --in-process shows more")
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
    words: Path,
) -> None:
    """The child: render what comes through `connection` until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which tells us
    LastWords.speak_to(words)
    os.environ.update(environment)
    logging.basicConfig(level=level, format="%(levelname)s: %(message)s")
    ear = _Ear(connection)
    render = LocalRender(settings, device, open_backend)
    with suppress(SdamdError):  # the first jobs meet it again, and somebody is there to be told
        render.start()
    while True:
        with ear.jobs() as jobs:
            try:
                ended = render.run(jobs, lambda event: ear.tell("event", event), ear.stop.is_set)
            except SdamdError as error:
                ear.tell("failed", error)
            else:
                ear.tell("done", ended)


class _Ear:
    """The child's end of the pipe; when the parent is gone, so is the child."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self.stop = threading.Event()
        self._connection = connection
        self._waiting: queue.SimpleQueue[tuple[Job, ...]] = queue.SimpleQueue()
        self._one_at_a_time = threading.Lock()
        self._at_work = threading.Event()
        for work in (self._listen, self._beat):
            threading.Thread(target=work, name=work.__name__, daemon=True).start()

    def tell(self, kind: str, value: object) -> None:
        """Send something to the parent."""
        try:
            with self._one_at_a_time:
                self._connection.send((kind, value))
        except OSError:
            os._exit(0)  # nobody waits for what is being rendered

    @contextmanager
    def jobs(self) -> Iterator[tuple[Job, ...]]:
        """Wait for jobs, and say within that this process lives."""
        jobs = self._waiting.get()
        self._at_work.set()
        try:
            yield jobs
        finally:
            self._at_work.clear()

    def _listen(self) -> None:
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                os._exit(0)  # as above; which of the threads finds out first is chance
            if message[0] == "stop":
                self.stop.set()
            else:
                self.stop.clear()
                self._waiting.put(message[1])

    def _beat(self) -> None:
        while True:
            self._at_work.wait()  # else nobody reads it, and the pipe would fill
            self.tell("beat", None)
            time.sleep(_BEAT_SECONDS)


class _interrupts_ignored:  # noqa: N801  # used like a function
    """While a child starts, so that it inherits deafness to Ctrl-C; in the main thread only."""

    def __enter__(self) -> None:
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._before = signal.signal(signal.SIGINT, signal.SIG_IGN)

    def __exit__(self, *_: object) -> None:
        if self._main:
            signal.signal(signal.SIGINT, self._before)

"""Starts the UI: a server on this machine alone, one studio behind it, and the browser."""

import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import webbrowser
from contextlib import closing, suppress

import uvicorn

from sdamd.errors import BadRequest, StorageError, UserError
from sdamd.settings import Settings
from sdamd.studio import Studio
from ui.runs import Runs

LOOPBACK = ("127.0.0.1", "localhost")
GRACE_SECONDS = 3.0
"""How long a step may take to end when the server does; then the worker is ended by force."""
LEFTOVER_SECONDS = 7 * 24 * 3600
"""How old the folder of a server that was killed may become."""


def run(
    settings: Settings, *, host: str = LOOPBACK[0], port: int = 7860, browser: bool = True
) -> int:
    """Serve the UI until Ctrl-C or SIGTERM; prints its address. Port 0 takes a free one.

    Raises:
        BadRequest: the host is not this machine alone, or the port is none.
        UserError: the port is in use.
        StorageError: the cache folder cannot be written.
    """
    with closing(_listen(host, port)) as listener, _cache(settings) as cache:
        # Gradio's own is one folder in /tmp for all users of a machine. It is chosen and made when
        # Gradio is imported, so that must come after.
        os.environ["GRADIO_TEMP_DIR"] = cache
        from ui.page import make_app  # noqa: PLC0415

        with closing(Studio(settings)) as studio:
            studio.start()  # else the first click would wait for torch
            runs = Runs(studio)
            config = uvicorn.Config(
                make_app(runs, LOOPBACK),
                log_config=None,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=1,  # open pages hold connections while they are open
            )
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            address = f"http://{host}:{listener.getsockname()[1]}/"
            sys.stdout.write(f"{address}\n")
            sys.stdout.flush()
            if browser:
                webbrowser.open(address)
            try:
                with suppress(KeyboardInterrupt):
                    Server(config).run(sockets=[listener])
            finally:
                runs.close(GRACE_SECONDS)
    return 0


class Server(uvicorn.Server):
    """Cuts off the connections of open pages when it ends, without a traceback for each."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As the base class, which would log each connection's end as an error."""
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        await super().shutdown(sockets)


def _listen(host: str, port: int) -> socket.socket:
    problems = []
    if host not in LOOPBACK:
        problems.append(
            f"host is {host!r}; allowed {' and '.join(LOOPBACK)}, since the UI asks for no "
            "password yet; from elsewhere: ssh -L 7860:127.0.0.1:7860 and this machine's name"
        )
    if not 0 <= port <= 65535:
        problems.append(f"port is {port}; allowed 0 (a free one) to 65535")
    if problems:
        raise BadRequest(*problems)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    if sys.platform != "win32":  # there it would let two servers share a port
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK[0], port))
    except OSError as error:
        listener.close()
        raise UserError(
            f"port {port} cannot be used ({error.strerror}); perhaps sdamd is open already at "
            f"http://{host}:{port}/; --port 0 takes a free one"
        ) from error
    listener.listen()
    return listener


def _cache(settings: Settings) -> tempfile.TemporaryDirectory[str]:
    """A folder that only this user can read, gone when the server ends."""
    try:
        settings.cache.mkdir(parents=True, exist_ok=True)
        for left in settings.cache.glob("ui-*"):
            if left.stat().st_mtime < time.time() - LEFTOVER_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
        return tempfile.TemporaryDirectory(
            dir=settings.cache, prefix="ui-", ignore_cleanup_errors=True
        )
    except OSError as error:
        raise StorageError(f"{settings.cache} cannot be written: {error.strerror}") from error

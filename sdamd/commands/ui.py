"""`sdamd ui`: open the UI in the browser."""

import argparse
import importlib

from sdamd.commands.arguments import settings_of


def run(asked: argparse.Namespace) -> int:
    """Open the UI in the browser."""
    # It stands above the command line, so it is started by name and not imported.
    app = importlib.import_module("ui.app")
    status: int = app.run(
        settings_of(asked), host=asked.host, port=asked.port, browser=not asked.no_browser
    )
    return status

"""`sdamd meta`: show the record inside a picture."""

import argparse

from sdamd import gallery
from sdamd.metadata import to_json, to_parameters


def run(asked: argparse.Namespace) -> int:
    """Show the record inside a picture."""
    record = gallery.read_record(asked.file)
    if asked.json:
        print(to_json(record))
    else:
        print(to_parameters(record))
    return 0

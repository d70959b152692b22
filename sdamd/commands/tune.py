"""`sdamd tune`: measure what is fastest on this device, and keep it."""

import argparse
import json
import os
from contextlib import closing

from sdamd import tune, tuned
from sdamd.commands.arguments import settings_of, stop_on_interrupt
from sdamd.errors import INTERRUPTED
from sdamd.studio import Studio


def run(asked: argparse.Namespace) -> int:
    """Measure what is fastest on this device and keep it for every plan; or move it by a file."""
    settings = settings_of(asked)
    if asked.import_file is not None:
        entries = tuned.read(asked.import_file)
        tuned.keep(settings.cache, entries)
        print(f"{len(entries)} entries of {asked.import_file} are kept")
        return 0
    if asked.export_file is not None:
        tuned.write(asked.export_file, tuned.read(settings.cache / tuned.FILE))
        print(asked.export_file)
        return 0
    studio = Studio(settings)
    with closing(studio), stop_on_interrupt() as stopping:
        # Before torch is loaded, which happens in this process.
        os.environ.update(studio.worker_environment())
        for line in tune.tune(settings, studio.device, asked.checkpoint, stopping.is_set):
            print(json.dumps(line.to_dict()) if asked.json else line, flush=True)
    return INTERRUPTED if stopping.is_set() else 0

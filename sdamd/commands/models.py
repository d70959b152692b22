"""`sdamd models`: list the checkpoints that can be named, or download one from the hub."""

import argparse
import json

from sdamd import models
from sdamd.commands.arguments import settings_of
from sdamd.errors import BadRequest
from sdamd.plan import GIB


def run(asked: argparse.Namespace) -> int:
    """List the checkpoints that can be named, or download one from the hub."""
    settings = settings_of(asked)
    if asked.what == "download":
        if not asked.hub_id:
            raise BadRequest("models download needs a hub id, as owner/name or owner/name@revision")
        print(models.download(asked.hub_id, settings.models))
        return 0
    for found in [models.find("", settings.models), *models.list_checkpoints(settings.models)]:
        if asked.json:
            shown = {"name": found.name, "family": found.family.name, "bytes": found.bytes}
            print(json.dumps({**shown, "path": str(found.path)}))
        else:
            size = f"{found.bytes / GIB:.2f} GiB"
            print(found.name, found.family.title, size, found.path, sep="\t")
    return 0

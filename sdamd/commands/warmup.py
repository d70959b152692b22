"""`sdamd warmup`: let the GPU find its kernels for the usual sizes, before it matters."""

import argparse
import json
import sys
import time
from contextlib import closing

from sdamd.commands.arguments import settings_of, stop_on_interrupt
from sdamd.errors import INTERRUPTED, BadImage
from sdamd.render import Failed, Rendered
from sdamd.request import Request, buckets
from sdamd.studio import Studio


def run(asked: argparse.Namespace) -> int:
    """Render a step at each size that is offered, so that the GPU finds its kernels now."""
    settings = settings_of(asked)
    studio = Studio(settings)
    family = studio.find(asked.checkpoint).family
    sizes = buckets(family.width, family.height)
    requests = [
        Request(
            checkpoint=asked.checkpoint, width=width, height=height, steps=1, seed=0, upscale=1,
            scheduler="Euler", count=settings.batch_size or 1,
        )
        for width, height in sizes
    ]  # fmt: skip
    failed = 0
    with closing(studio), stop_on_interrupt() as stopping:
        began = time.monotonic()
        for event in studio.warm_up(requests, stopping.is_set):
            match event:
                case Failed(job=job, error=error) if not isinstance(error, BadImage):
                    failed += 1
                    print(f"sdamd: {job.width} x {job.height}: {error}", file=sys.stderr)
                case Rendered(job=job) | Failed(job=job):
                    # After one step a picture may be bad, but the kernels are found.
                    seconds = round(time.monotonic() - began, 1)
                    shown = {"width": job.width, "height": job.height, "seconds": seconds}
                    line = f"{job.width} x {job.height}: {seconds} s"
                    print(json.dumps(shown) if asked.json else line, flush=True)
                    began = time.monotonic()
    return INTERRUPTED if stopping.is_set() else int(failed > 0)

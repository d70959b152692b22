"""Another tool's reading as a record of sdamd, as far as it decides a picture."""

from dataclasses import fields, replace

from sdamd.errors import BadMetadata
from sdamd.interchange.reading import Reading
from sdamd.metadata import EMBEDDED, Record
from sdamd.request import Job, Request


def to_record(reading: Reading, *, version: str) -> Record:
    """The record that a picture by sdamd would have which was made from this reading.

    Args:
        reading: of any tool; sdamd's own record is given back as it is.
        version: of sdamd.

    Raises:
        BadMetadata: the reading leaves something open that a record must tell, or a value in it
            is out of its range.
    """
    if reading.record is not None:
        return reading.record
    request = reading.request()
    return Record(
        job=_job(request), version=version, checkpoint_name=request.checkpoint or EMBEDDED
    )


def _job(request: Request) -> Job:
    if request.hires_scale > 1:
        request = replace(
            request,
            hires_steps=request.hires_steps or request.steps,
            hires_scheduler=request.hires_scheduler or request.scheduler,
            hires_guidance_scale=request.hires_guidance_scale or request.guidance_scale,
        )
    # Of these None means that the checkpoint decides; of the others it means that they are off.
    needed = ("width", "height", "steps", "guidance_scale", "scheduler", "seed", "upscale")
    missing = [name for name in needed if getattr(request, name) is None]
    if missing:
        raise BadMetadata(
            f"the record does not tell {', '.join(missing)}, so it is no whole record; as a "
            "request it can be had (--to request)"
        )
    names = [f.name for f in fields(Job) if f.name not in {"index", "init_image", "mask_image"}]
    return Job(index=0, **{name: getattr(request, name) for name in names})

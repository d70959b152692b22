"""From requests to jobs: every seed drawn, every default filled in."""

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sdamd import picture
from sdamd.checkpoint import Family
from sdamd.errors import BadRequest
from sdamd.picture import SIDE_MAX, Picture
from sdamd.prompt import extra_networks
from sdamd.request import ALPHA, SEED_MAX, Job, MaskMode, Request, ResizeMode
from sdamd.scheduler import resolve

if TYPE_CHECKING:
    from PIL.Image import Image

DRAWN_SEED_MAX = 2**32 - 1  # four bytes
"""Drawn seeds stay below it, so that tools with 32-bit seeds can use them too."""


STRENGTH: Final = 0.75
"""Of an init image, where nothing is said. Source: the default of AUTOMATIC1111."""

LARGEST: Final = 4
"""An init image keeps its size up to so many times the pixels that the model was made for."""

SIDE_LEAST: Final = 64
"""The shortest side that a model works at, in pixels."""

SHAPE_TOLERANCE: Final = 0.02
"""By how much a mask may be wider or narrower than the init image's shape, as a share."""


def expand(request: Request, family: Family, folders: Iterable[Path] = ()) -> Iterator[Job]:
    """Yield one job per picture; picture i has seed + i, around from the largest to 0.

    Pictures that the request starts from are read here, so that what is wrong with them is said
    before a model is loaded. `folders` are where those are looked for that a record names.

    Raises:
        BadRequest: with everything that is wrong with the request as a whole.
    """
    problems = _networks("prompt", request.prompt)
    problems += _networks("negative_prompt", request.negative_prompt)
    schedulers = [
        _resolved(name, problems)
        for name in (request.scheduler or family.defaults.scheduler, request.hires_scheduler)
    ]
    modes = _init_image(request, family, folders, problems) if _has_init(request) else None
    problems += _without_init(request) if modes is None else []
    first = int.from_bytes(os.urandom(4)) if request.seed is None else request.seed
    default = family.defaults
    width, height = (
        (request.width or family.width, request.height or family.height)
        if modes is None
        else modes.size
    )
    one = modes is not None or request.hires_scale > 1
    job = Job(
        index=0,
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        checkpoint=request.checkpoint,
        width=width,
        height=height,
        steps=request.steps or default.steps,
        guidance_scale=request.guidance_scale or default.guidance_scale,
        scheduler=schedulers[0],
        seed=first,
        upscale=request.upscale or (1 if one else default.upscale),
        denoise_tile=request.denoise_tile,
        **({} if modes is None else modes.fields),
    )
    if request.hires_scale > 1:
        job = _with_hires(job, request, schedulers[1])
        problems += _problems_of_hires(job)
    if problems:
        raise BadRequest(*problems)
    yield job
    for index in range(1, request.count):
        yield replace(job, index=index, seed=(first + index) % (SEED_MAX + 1))


def _resolved(name: str | None, problems: list[str]) -> str:
    if name is None:
        return ""
    try:
        return resolve(name)
    except BadRequest as error:
        problems += error.problems
        return name


def _with_hires(job: Job, request: Request, scheduler: str) -> Job:
    return replace(
        job,
        hires_scale=request.hires_scale,
        hires_upscaler=request.hires_upscaler,
        hires_steps=request.hires_steps or job.steps,
        hires_strength=request.hires_strength,
        hires_scheduler=scheduler or job.scheduler,
        hires_guidance_scale=request.hires_guidance_scale or job.guidance_scale,
        hires_tile=request.hires_tile,
    )


def _problems_of_hires(job: Job) -> list[str]:
    problems = []
    width, height = job.hires_size
    if max(width, height) > SIDE_MAX:
        problems.append(
            f"hires_scale is {job.hires_scale:g}, which makes {width} x {height} pixels; "
            f"allowed at most {SIDE_MAX} pixels a side"
        )
    if job.mask_padding is not None:
        problems.append(
            f"hires_scale is {job.hires_scale:g} with mask_padding, where the picture keeps its "
            "size; allowed is 1"
        )
    return problems


_OUTPAINT: Final = ("outpaint_left", "outpaint_right", "outpaint_top", "outpaint_bottom")


def _has_init(request: Request) -> bool:
    return bool(request.init_image)


def _without_init(request: Request) -> list[str]:
    """What is asked for that only an init image can give."""
    asked = [name for name in ("mask_image", "mask_padding", *_OUTPAINT) if getattr(request, name)]
    if request.strength is not None:
        asked.insert(0, "strength")
    return [f"{name} is given without init_image; allowed only with one" for name in asked]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """What an init image decides: the size of the first pass, and fields of the job."""

    size: tuple[int, int]
    fields: dict[str, Any]


def _init_image(
    request: Request, family: Family, folders: Iterable[Path], problems: list[str]
) -> _Start | None:
    """Read the pictures and see that all goes together; None if something is wrong."""
    assert request.init_image
    found: list[str] = []
    folders = tuple(folders)
    try:
        init, image = picture.read(request.init_image, "init_image", folders)
    except BadRequest as error:
        problems += error.problems
        return _Start(size=(family.width, family.height), fields={})
    mask = _mask(request, init, image, folders, found)
    if request.mask_padding is not None and not request.mask_image:
        found.append("mask_padding is given without mask_image; allowed only with one")
    added = [getattr(request, name) for name in _OUTPAINT]
    if request.resize_mode == ResizeMode.LATENT and (request.mask_image or any(added)):
        found.append(
            "resize_mode is latent; allowed without mask_image and outpainting are all, "
            "with them crop, stretch, pad"
        )
    if request.mask_padding is not None and any(added):
        found.append("mask_padding is given with outpainting, which draws beyond the picture")
    size = _size(request, family, image.size)
    left, right, top, bottom = added
    inner = (size[0] - left - right, size[1] - top - bottom)
    if min(inner) < SIDE_LEAST:
        found.append(
            f"outpainting leaves {inner[0]} x {inner[1]} of {size[0]} x {size[1]} pixels to the "
            f"init image; allowed at least {SIDE_LEAST} a side"
        )
    if max(size) > SIDE_MAX:
        found.append(
            f"the picture becomes {size[0]} x {size[1]} pixels; "
            f"allowed at most {SIDE_MAX} pixels a side"
        )
    problems += found
    return _Start(
        size=size,
        fields={
            "init_image": init,
            "strength": STRENGTH if request.strength is None else request.strength,
            "resize_mode": request.resize_mode,
            "mask_image": mask,
            **_of_mask(request, any(added)),
            **dict(zip(_OUTPAINT, added, strict=True)),
            "outpaint_steps": request.outpaint_steps if any(added) else 1,
        },
    )


def _of_mask(request: Request, outpaints: bool) -> dict[str, Any]:  # noqa: FBT001  # one caller
    """What is about the mask, where there is one; without it the fields stay as they are."""
    if not (request.mask_image or outpaints):
        return {}
    made: dict[str, Any] = {"mask_blur": request.mask_blur, "mask_fill": request.mask_fill}
    if request.mask_image:
        made |= {"mask_mode": request.mask_mode, "mask_padding": request.mask_padding}
    return made


def _mask(
    request: Request, init: Picture, image: "Image", folders: Iterable[Path], problems: list[str]
) -> Picture | None:
    """The picture that the mask is of; for the init image's own transparency that image."""
    if not request.mask_image:
        return None
    if request.mask_image == ALPHA:
        found, mask = init, picture.transparency(image)
        shown = "mask_image is alpha, and the init image"
    else:
        try:
            found, read = picture.read(request.mask_image, "mask_image", folders)
        except BadRequest as error:
            problems += error.problems
            return None
        if found == init:
            mask = picture.transparency(read)
            shown = "mask_image is the init image itself, which"
        else:
            mask = picture.mask_of(read)
            shown = f"mask_image {found.name!r}"
    shape, wanted = mask.width / mask.height, image.width / image.height
    if abs(shape / wanted - 1) > SHAPE_TOLERANCE:
        problems.append(
            f"{shown} is {mask.width} x {mask.height} pixels; allowed is the shape of the init "
            f"image, {image.width} x {image.height}"
        )
    levels = mask.histogram()
    drawn = any(levels[128:] if request.mask_mode == MaskMode.WHITE else levels[:128])
    if not drawn:
        what = "transparent" if found == init else request.mask_mode
        problems.append(f"{shown} has nothing {what}, so nothing would be drawn anew")
    return found


def _size(request: Request, family: Family, image: tuple[int, int]) -> tuple[int, int]:
    """The size of the first pass: what is asked for, or the init image's own with what is added.

    With `mask_padding` it is the model's own, since it is that of the region.
    """
    if request.mask_padding is not None:
        return request.width or family.width, request.height or family.height
    width, height = image
    native = family.width * family.height
    shrink = min(1.0, math.sqrt(LARGEST * native / (width * height)))
    if request.width and request.height:
        return request.width, request.height
    added_width = request.outpaint_left + request.outpaint_right
    added_height = request.outpaint_top + request.outpaint_bottom
    if request.width:
        shrink = (request.width - added_width) / width
    elif request.height:
        shrink = (request.height - added_height) / height
    grow = max(1.0, SIDE_LEAST / max(1e-9, min(width, height) * shrink))
    scale = shrink * grow
    return (
        request.width or round(width * scale / 8) * 8 + added_width,
        request.height or round(height * scale / 8) * 8 + added_height,
    )


def _networks(name: str, text: str) -> list[str]:
    """Say which networks a prompt asks for; read as words they would only spoil the picture."""
    problems = []
    for tag in dict.fromkeys(extra_networks(text)[1]):
        kind = "LoRA" if tag.kind == "lora" else tag.kind
        shown = tag.name if len(tag.name) <= 60 else f"{tag.name[:57]}..."
        problems.append(
            f"{name} asks for the {kind} {shown!r}; this version cannot use {kind}s yet"
        )
    return problems

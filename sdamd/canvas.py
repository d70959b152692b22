"""What a model draws on when it starts from a picture, and how its drawing gets back into it.

    init image -> resize_mode -> outpainting ->  Canvas.picture   what is encoded
    mask       -> the same    -> + what is new -> Canvas.mask      what is drawn anew
    drawing    -> Canvas.finished: pasted softly; where the soft mask is 0, every byte stays

With `mask_padding` only the region around the mask is on the canvas, as large as is asked for, and
is reduced again when it is pasted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter, ImageOps

from sdamd import picture
from sdamd.errors import BadRequest
from sdamd.request import Job, MaskFill, MaskMode, ResizeMode

MASKED: Final = 128
"""From this level on a pixel of a mask is drawn anew."""

REACH: Final = 3
"""How many deviations of the blur new ground reaches into the picture, so that at its edge nothing
is left of what was put there before."""

Levels: TypeAlias = NDArray[np.floating[Any]]

Box: TypeAlias = tuple[int, int, int, int]
"""Left, top, right, bottom in pixels; the last two are outside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Canvas:
    """What is worked on: RGB, with a mask of the same size or None for all of it.

    `mask` is one channel, 255 where it is drawn anew and 0 elsewhere. `under` is the whole picture
    that the drawing is pasted into at `box`, softly by `soft`, which is as large as `box`.
    `enlarged` is the size that the latents get, where they are to be enlarged and not the picture.
    """

    picture: Image.Image
    mask: Image.Image | None = None
    soft: Image.Image | None = None
    under: Image.Image | None = None
    box: Box | None = None
    enlarged: tuple[int, int] | None = None

    def finished(self, drawn: Image.Image) -> Image.Image:
        """The whole picture with the drawing in it."""
        if self.soft is None or self.under is None or self.box is None:
            return drawn
        left, top, right, bottom = self.box
        if drawn.size != (right - left, bottom - top):
            drawn = drawn.resize((right - left, bottom - top), Image.Resampling.LANCZOS)
        whole = self.under.copy()
        whole.paste(drawn, (left, top), self.soft)
        return whole

    @property
    def untouched(self) -> Image.Image:
        """The picture at its final size with nothing drawn."""
        if self.under is not None:
            return self.under
        if self.enlarged is not None:
            return self.picture.resize(self.enlarged, Image.Resampling.LANCZOS)
        return self.picture


def first(job: Job) -> Canvas:
    """The canvas of the first round.

    Raises:
        BadRequest: a picture of the job lacks its bytes, or they are none of a picture.
    """
    if job.init_image is None:
        raise BadRequest("there is no init_image to start from")
    decoded = picture.decode(job.init_image, "init_image")
    init = picture.on_colour(decoded, "white")
    mask = _mask(job, decoded)
    if job.mask_padding is not None and mask is not None:
        return _region(job, init, mask)
    if job.resize_mode == ResizeMode.LATENT:
        whole = tuple(max(8, side // 8 * 8) for side in init.size)
        return Canvas(
            picture=_fitted(init, (whole[0], whole[1]), ResizeMode.CROP),
            enlarged=(job.width, job.height),
        )
    inner = (
        job.width - job.outpaint_left - job.outpaint_right,
        job.height - job.outpaint_top - job.outpaint_bottom,
    )
    fitted = _fitted(init, inner, job.resize_mode)
    hard = None if mask is None else _hard(_fitted(mask, inner, job.resize_mode))
    margins = next(rounds(job))
    if any(margins):
        return extended(job, fitted, margins, hard)
    return _canvas(job, fitted, hard)


def rounds(job: Job) -> Iterator[Box]:
    """What each round of outpainting adds on the left, above, on the right and below."""
    ends = (job.outpaint_left, job.outpaint_top, job.outpaint_right, job.outpaint_bottom)
    count = job.outpaint_steps
    before = (0, 0, 0, 0)
    for number in range(1, count + 1):
        # A multiple of 8 every time, as latents are.
        now = tuple(end // 8 * number // count * 8 for end in ends)
        left, top, right, bottom = (n - b for n, b in zip(now, before, strict=True))
        before = (now[0], now[1], now[2], now[3])
        yield left, top, right, bottom


def extended(job: Job, image: Image.Image, margins: Box, mask: Image.Image | None = None) -> Canvas:
    """A canvas with new ground around a picture; what is new is drawn, with a seam's width of old.

    The seam is wide enough for the blur to end in it: on one side all is drawn, on the other all
    stays.
    """
    left, top, right, bottom = margins
    size = (image.width + left + right, image.height + top + bottom)
    known = Image.new("L", size, 0)
    known.paste(255, (left, top, left + image.width, top + image.height))
    ground = Image.new("RGB", size)
    ground.paste(image, (left, top))
    seam = REACH * job.mask_blur
    stays = (
        left + (seam if left else 0),
        top + (seam if top else 0),
        size[0] - right - (seam if right else 0),
        size[1] - bottom - (seam if bottom else 0),
    )
    hard = Image.new("L", size, 255)
    if stays[0] < stays[2] and stays[1] < stays[3]:
        hard.paste(0, stays)
    if mask is not None:
        hard.paste(255, (left, top), mask)
    # New ground has no original: the colours around it are the least that it can start from.
    return _canvas(job, filled(ground, known), hard)


def _canvas(job: Job, image: Image.Image, hard: Image.Image | None) -> Canvas:
    """A canvas of the whole picture."""
    if hard is None:
        return Canvas(picture=image)
    return Canvas(
        picture=_prepared(job, image, hard),
        mask=hard,
        soft=_soft(hard, job.mask_blur),
        under=image,
        box=(0, 0, *image.size),
    )


def _region(job: Job, init: Image.Image, mask: Image.Image) -> Canvas:
    """A canvas of the masked part alone, at the size that is asked for."""
    if mask.size != init.size:
        mask = mask.resize(init.size, Image.Resampling.BILINEAR)
    hard = _hard(mask)
    masked = hard.getbbox()
    assert masked is not None  # a mask of nothing is refused before
    assert job.mask_padding is not None
    box = _widened(masked, job.mask_padding, (job.width, job.height), init.size)
    size = (job.width, job.height)
    part = init.resize(size, Image.Resampling.LANCZOS, box=box)
    hard_part = _hard(hard.crop(box).resize(size, Image.Resampling.BILINEAR))
    return Canvas(
        picture=_prepared(job, part, hard_part),
        mask=hard_part,
        soft=_soft(hard, job.mask_blur).crop(box),
        under=init,
        box=box,
    )


def _widened(masked: Box, padding: int, shape: tuple[int, int], within: tuple[int, int]) -> Box:
    """The masked box with its padding, made as wide or as high as the shape asks, if there is room.

    A mask blurs beyond its edge; what lies outside of the box stays as it is all the same.
    """
    left, top = max(0, masked[0] - padding), max(0, masked[1] - padding)
    right, bottom = min(within[0], masked[2] + padding), min(within[1], masked[3] + padding)
    width, height = right - left, bottom - top
    wanted_width = min(within[0], max(width, round(height * shape[0] / shape[1])))
    wanted_height = min(within[1], max(height, round(width * shape[1] / shape[0])))
    left = min(max(0, left - (wanted_width - width) // 2), within[0] - wanted_width)
    top = min(max(0, top - (wanted_height - height) // 2), within[1] - wanted_height)
    return left, top, left + wanted_width, top + wanted_height


def _mask(job: Job, decoded: Image.Image) -> Image.Image | None:
    """The mask as it was given: one channel, light where it is drawn anew."""
    if job.mask_image is None:
        return None
    if job.mask_image == job.init_image:
        mask = picture.transparency(decoded)
    else:
        mask = picture.mask_of(picture.decode(job.mask_image, "mask_image"))
    if mask.size != decoded.size:
        mask = mask.resize(decoded.size, Image.Resampling.BILINEAR)
    return ImageOps.invert(mask) if job.mask_mode == MaskMode.BLACK else mask


def _hard(mask: Image.Image) -> Image.Image:
    return mask.point(lambda level: 255 if level >= MASKED else 0)


def _soft(hard: Image.Image, blur: int) -> Image.Image:
    return hard.filter(ImageFilter.GaussianBlur(blur)) if blur else hard


def _prepared(job: Job, image: Image.Image, hard: Image.Image) -> Image.Image:
    """The picture that is encoded: what is masked may hold what surrounds it instead."""
    if job.mask_fill != MaskFill.FILL:
        return image
    return filled(image, ImageOps.invert(hard))


def _fitted(image: Image.Image, size: tuple[int, int], mode: str) -> Image.Image:
    """The picture at another size; a mask is treated as the picture is."""
    if image.size == size:
        return image
    if mode == ResizeMode.STRETCH:
        return image.resize(size, Image.Resampling.LANCZOS)
    spare = (image.width - size[0], image.height - size[1])
    if mode == ResizeMode.CROP:
        if min(spare) >= 0 and max(spare) < 8:
            # To a multiple of 8: a few columns less are better than all of them resampled.
            left, top = spare[0] // 2, spare[1] // 2
            return image.crop((left, top, left + size[0], top + size[1]))
        return ImageOps.fit(image, size, Image.Resampling.LANCZOS)
    inside = ImageOps.contain(image, size, Image.Resampling.LANCZOS)
    left, top = (size[0] - inside.width) // 2, (size[1] - inside.height) // 2
    ground = Image.new(image.mode, size)
    ground.paste(inside, (left, top))
    if image.mode == "L":
        return ground  # around the picture nothing is masked
    known = Image.new("L", size, 0)
    known.paste(255, (left, top, left + inside.width, top + inside.height))
    return filled(ground, known)


def filled(image: Image.Image, known: Image.Image) -> Image.Image:
    """The picture with what is not known made of the known around it, smoothly.

    From coarse to fine: a pixel that nothing is known of takes the mean of the smallest
    surroundings in which something is.

    Args:
        image: RGB.
        known: one channel; 255 where the picture holds, 0 where it is to be filled.

    Source: Gortler et al. 1996, "The Lumigraph", section 3.4 (pull-push).
    """
    weights = np.asarray(known, np.float32)[..., None] / 255
    if weights.all() or not weights.any():
        return image
    colours = np.asarray(image, np.float32)
    made = _push_pull(colours * weights, weights)
    mixed = colours * weights + made * (1 - weights)
    return Image.fromarray(mixed.round().clip(0, 255).astype(np.uint8))


def _push_pull(colours: Levels, weights: Levels) -> Levels:
    """Colours (height, width, 3) for every pixel, from sums of known ones and their weights."""
    height, width = weights.shape[:2]
    if weights.min() > 0 or max(height, width) == 1:
        return colours / np.maximum(weights, 1e-6)
    coarse = _push_pull(_halved(colours), _halved(weights))
    # Enlarged smoothly, or the squares of each level would show.
    large = np.stack(
        [
            np.asarray(
                Image.fromarray(coarse[..., channel]).resize(
                    (width, height), Image.Resampling.BILINEAR
                )
            )
            for channel in range(coarse.shape[2])
        ],
        axis=-1,
    )
    share = np.minimum(weights, 1)
    own = colours / np.maximum(weights, 1e-6)
    made: Levels = own * share + large * (1 - share)
    return made


def _halved(values: Levels) -> Levels:
    """Sums of two by two; at the edges of one."""
    height, width, channels = values.shape
    even = np.zeros((height + height % 2, width + width % 2, channels), np.float32)
    even[:height, :width] = values
    summed: Levels = even.reshape(even.shape[0] // 2, 2, even.shape[1] // 2, 2, channels).sum(
        (1, 3)
    )
    return summed

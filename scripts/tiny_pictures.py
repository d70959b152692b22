"""Draws the pictures that the embedded model learns from: captioned, endless, made by code alone.

A picture is decided by its seed, so the training set never has to be stored or licensed. Half are
landscapes at some time of day, the rest are big simple objects and coloured shapes.
"""

import colorsys
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

Colour = tuple[int, int, int]
Point = tuple[float, float]

OVERSAMPLE = 3
"""Drawn this many times larger and reduced, which smooths the edges."""

COLOURS: dict[str, Colour] = {
    "red": (214, 40, 40),
    "orange": (243, 130, 28),
    "yellow": (250, 214, 40),
    "green": (52, 158, 66),
    "cyan": (64, 204, 212),
    "blue": (44, 84, 206),
    "purple": (128, 58, 178),
    "pink": (246, 134, 184),
    "brown": (124, 76, 38),
    "black": (26, 26, 30),
    "white": (246, 246, 246),
    "gray": (134, 136, 140),
}
SHAPES = (
    "circle", "square", "triangle", "star", "heart",
    "diamond", "ring", "hexagon", "cross", "crescent",
)  # fmt: skip
TIMES = ("day", "sunset", "night", "dawn")
LANDSCAPES = (
    "sea", "beach", "lake", "meadow", "desert", "snow", "mountains", "hills", "forest", "city",
)  # fmt: skip
NUMBERS = ("zero", "one", "two", "three", "four")


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """An RGB image, what it shows in words, and the facts by which a copy can be judged."""

    image: Image.Image
    caption: str
    facts: dict[str, str]


# -- parts that every drawing uses ----------------------------------------------------------------


def _mix(a: Sequence[float], b: Sequence[float], t: float) -> Colour:
    r, g, b_ = (max(0, min(255, round(x + (y - x) * t))) for x, y in zip(a, b, strict=True))
    return r, g, b_


def _times(colour: Sequence[float], factor: Sequence[float]) -> Colour:
    r, g, b = (max(0, min(255, round(c * f))) for c, f in zip(colour, factor, strict=True))
    return r, g, b


def _vary(rng: random.Random, colour: Colour, amount: float = 0.04) -> Colour:
    """The same colour name with a slightly other hue and brightness."""
    h, s, v = colorsys.rgb_to_hsv(*(c / 255 for c in colour))
    h = (h + rng.uniform(-amount, amount) * 0.5) % 1
    s = max(0.0, min(1.0, s * rng.uniform(1 - amount, 1 + amount)))
    v = max(0.0, min(1.0, v * rng.uniform(1 - 2 * amount, 1 + amount)))
    r, g, b = (round(c * 255) for c in colorsys.hsv_to_rgb(h, s, v))
    return r, g, b


def _gradient(size: tuple[int, int], stops: Sequence[tuple[float, Colour]]) -> Image.Image:
    """A vertical gradient through (height 0..1, colour) stops."""
    width, height = size
    at = np.linspace(0, 1, height)
    columns = [np.interp(at, [s for s, _ in stops], [c[i] for _, c in stops]) for i in range(3)]
    rows = np.stack(columns, axis=-1)[:, None, :]
    return Image.fromarray(np.broadcast_to(rows, (height, width, 3)).astype(np.uint8).copy())


def _glow(
    image: Image.Image, centre: Point, radius: float, colour: Colour, strength: float
) -> None:
    """Lighten `image` around a point, as a light source in air does."""
    width, height = image.size
    y, x = np.ogrid[0:height, 0:width]
    distance = np.sqrt((x - centre[0]) ** 2 + (y - centre[1]) ** 2)
    mask = np.clip(1 - distance / radius, 0, 1) ** 2 * 255 * strength
    image.paste(colour, (0, 0, width, height), Image.fromarray(mask.astype(np.uint8)))


def _regular(n: int, turn: float = -math.pi / 2, radius: float = 1.0) -> list[Point]:
    return [
        (
            radius * math.cos(turn + 2 * math.pi * i / n),
            radius * math.sin(turn + 2 * math.pi * i / n),
        )
        for i in range(n)
    ]


def _star(inner: float = 0.42) -> list[Point]:
    outside, inside = _regular(5), _regular(5, -math.pi / 2 + math.pi / 5, inner)
    return [p for pair in zip(outside, inside, strict=True) for p in pair]


def _heart() -> list[Point]:
    turns = [2 * math.pi * i / 48 for i in range(48)]
    return [
        (
            math.sin(t) ** 3 * 1.02,
            -(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t))
            / 15.5,
        )
        for t in turns
    ]


class Pen:
    """Draws on a transparent layer in units of an object: x and y from -1 to 1, y down."""

    def __init__(self, size: tuple[int, int], centre: Point, scale: float) -> None:
        self.layer = Image.new("RGBA", size, (0, 0, 0, 0))
        self.draw = ImageDraw.Draw(self.layer)
        self.centre = centre
        self.scale = scale

    def at(self, x: float, y: float) -> Point:
        """Object units to pixels."""
        return self.centre[0] + x * self.scale, self.centre[1] + y * self.scale

    def polygon(self, points: Sequence[Point], colour: Colour | tuple[int, int, int, int]) -> None:
        """A filled polygon."""
        self.draw.polygon([self.at(*p) for p in points], fill=colour)

    def ellipse(
        self, x: float, y: float, rx: float, ry: float, colour: Colour | tuple[int, int, int, int]
    ) -> None:
        """A filled ellipse around (x, y)."""
        self.draw.ellipse([*self.at(x - rx, y - ry), *self.at(x + rx, y + ry)], fill=colour)

    def box(self, x0: float, y0: float, x1: float, y1: float, colour: Colour) -> None:
        """A filled rectangle."""
        self.draw.rectangle([*self.at(x0, y0), *self.at(x1, y1)], fill=colour)

    def round_box(
        self, x0: float, y0: float, x1: float, y1: float, radius: float, colour: Colour
    ) -> None:
        """A filled rectangle with round corners."""
        self.draw.rounded_rectangle(
            [*self.at(x0, y0), *self.at(x1, y1)], radius * self.scale, fill=colour
        )

    def line(self, points: Sequence[Point], width: float, colour: Colour) -> None:
        """A polyline `width` units thick."""
        self.draw.line(
            [self.at(*p) for p in points],
            fill=colour,
            width=max(1, round(width * self.scale)),
            joint="curve",
        )

    def pie(self, x: float, y: float, r: float, start: float, end: float, colour: Colour) -> None:
        """A filled sector; angles in degrees, clockwise from the right."""
        self.draw.pieslice(
            [*self.at(x - r, y - r), *self.at(x + r, y + r)], start, end, fill=colour
        )

    def paste_on(
        self, image: Image.Image, tint: Sequence[float] = (1, 1, 1), *, shadow: bool = False
    ) -> None:
        """Put the layer on `image`, lit from the upper left."""
        pixels = np.asarray(self.layer).astype(np.float32)
        height, width = pixels.shape[:2]
        y, x = np.ogrid[0:height, 0:width]
        light = 1.0 - 0.16 * ((x - self.centre[0]) + (y - self.centre[1])) / (2 * self.scale)
        light = np.clip(light, 0.72, 1.22)[..., None]
        colour = np.clip(pixels[..., :3] * light * np.asarray(tint, dtype=np.float32), 0, 255)
        alpha = self.layer.getchannel("A")
        if shadow:
            shape = alpha.transform(
                alpha.size, Image.Transform.AFFINE,
                (1, 0, -0.06 * self.scale, 0, 1, -0.08 * self.scale),
            )  # fmt: skip
            soft = shape.filter(ImageFilter.BoxBlur(0.05 * self.scale)).point(
                lambda a: int(a * 0.3)
            )
            image.paste((0, 0, 0), (0, 0), soft)
        image.paste(Image.fromarray(colour.astype(np.uint8)), (0, 0), alpha)


# -- shapes ---------------------------------------------------------------------------------------


def shape(pen: Pen, name: str, colour: Colour, turn: float = 0.0) -> None:
    """One of SHAPES in one colour, filling the pen's unit square."""

    def turned(points: Sequence[Point]) -> list[Point]:
        c, s = math.cos(turn), math.sin(turn)
        return [(x * c - y * s, x * s + y * c) for x, y in points]

    outlines: dict[str, list[Point]] = {
        "square": [(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)],
        "triangle": [(0, -0.95), (0.95, 0.75), (-0.95, 0.75)],
        "star": _star(),
        "heart": _heart(),
        "diamond": [(0, -1), (0.68, 0), (0, 1), (-0.68, 0)],
        "hexagon": _regular(6, 0.0),
        "cross": [
            (-0.3, -0.95), (0.3, -0.95), (0.3, -0.3), (0.95, -0.3), (0.95, 0.3), (0.3, 0.3),
            (0.3, 0.95), (-0.3, 0.95), (-0.3, 0.3), (-0.95, 0.3), (-0.95, -0.3), (-0.3, -0.3),
        ],
    }  # fmt: skip
    if name in outlines:
        pen.polygon(turned(outlines[name]), colour)
        return
    pen.ellipse(0, 0, 0.92, 0.92, colour)
    if name == "ring":
        pen.ellipse(0, 0, 0.52, 0.52, (0, 0, 0, 0))
    elif name == "crescent":
        pen.ellipse(0.42, -0.16, 0.74, 0.74, (0, 0, 0, 0))


# -- objects: each fills the pen's unit square ----------------------------------------------------

BLACK, WHITE, DARK = (30, 28, 34), (246, 246, 244), (62, 58, 66)


def _house(pen: Pen, colour: Colour) -> None:
    pen.box(0.4, -0.85, 0.62, -0.2, _mix(colour, BLACK, 0.4))
    pen.box(-0.72, -0.15, 0.72, 0.92, _mix(colour, WHITE, 0.72))
    pen.polygon([(-0.98, -0.1), (0, -0.95), (0.98, -0.1)], colour)
    pen.box(-0.16, 0.34, 0.2, 0.92, (110, 68, 40))
    for x in (-0.56, 0.34):
        pen.box(x, 0.1, x + 0.26, 0.38, (120, 178, 220))


def _tree(pen: Pen, colour: Colour) -> None:
    pen.polygon([(-0.13, 0.95), (-0.09, 0.0), (0.09, 0.0), (0.13, 0.95)], (112, 72, 40))
    dark, light = _mix(colour, BLACK, 0.2), _mix(colour, WHITE, 0.14)
    for x, y, r, c in ((-0.38, -0.05, 0.42, dark), (0.38, -0.05, 0.42, dark),
                       (0.0, -0.1, 0.5, colour), (-0.2, -0.45, 0.45, colour),
                       (0.22, -0.42, 0.42, light)):  # fmt: skip
        pen.ellipse(x, y, r, r, c)


def _boat(pen: Pen, colour: Colour) -> None:
    pen.line([(0.0, 0.45), (0.0, -0.95)], 0.06, (100, 70, 44))
    pen.polygon([(0.06, -0.9), (0.78, 0.32), (0.06, 0.32)], WHITE)
    pen.polygon([(-0.06, -0.7), (-0.62, 0.32), (-0.06, 0.32)], (232, 226, 214))
    pen.polygon([(-0.95, 0.42), (0.95, 0.42), (0.62, 0.88), (-0.62, 0.88)], colour)


def _balloon(pen: Pen, colour: Colour) -> None:
    pen.line([(-0.4, 0.2), (-0.15, 0.68)], 0.03, DARK)
    pen.line([(0.4, 0.2), (0.15, 0.68)], 0.03, DARK)
    pen.ellipse(0, -0.3, 0.68, 0.68, colour)
    pen.polygon([(-0.6, 0.0), (0.6, 0.0), (0.18, 0.52), (-0.18, 0.52)], colour)
    stripe = _mix(colour, WHITE, 0.62)
    pen.ellipse(0, -0.3, 0.26, 0.68, stripe)
    pen.polygon([(-0.24, 0.0), (0.24, 0.0), (0.09, 0.52), (-0.09, 0.52)], stripe)
    pen.box(-0.17, 0.66, 0.17, 0.95, (134, 88, 46))


def _flower(pen: Pen, colour: Colour) -> None:
    pen.line([(0, 0.0), (0.03, 0.95)], 0.1, (58, 142, 58))
    pen.polygon([(0.03, 0.72), (0.5, 0.42), (0.36, 0.76)], (66, 156, 66))
    pen.polygon([(0.03, 0.85), (-0.46, 0.55), (-0.32, 0.88)], (66, 156, 66))
    for x, y in _regular(6, 0.5, 0.4):
        pen.ellipse(x, y - 0.28, 0.31, 0.31, colour)
    pen.ellipse(0, -0.28, 0.26, 0.26, (250, 206, 50) if colour[2] > 60 or colour[1] < 150 else
                (150, 84, 30))  # fmt: skip


def _apple(pen: Pen, colour: Colour) -> None:
    pen.ellipse(-0.27, 0.12, 0.58, 0.7, colour)
    pen.ellipse(0.27, 0.12, 0.58, 0.7, colour)
    pen.line([(0.0, -0.45), (0.08, -0.9)], 0.1, (98, 62, 34))
    pen.polygon([(0.08, -0.55), (0.4, -0.92), (0.72, -0.72), (0.42, -0.5)], (70, 160, 62))
    pen.ellipse(-0.4, -0.14, 0.13, 0.2, _mix(colour, WHITE, 0.6))


def _fish(pen: Pen, colour: Colour) -> None:
    fin = _mix(colour, BLACK, 0.22)
    pen.polygon([(0.42, 0.0), (0.98, -0.5), (0.86, 0.0), (0.98, 0.5)], fin)
    pen.polygon([(-0.2, -0.4), (0.12, -0.78), (0.3, -0.32)], fin)
    pen.ellipse(-0.16, 0.0, 0.74, 0.5, colour)
    pen.ellipse(-0.1, 0.18, 0.5, 0.26, _mix(colour, WHITE, 0.35))
    pen.ellipse(-0.56, -0.1, 0.14, 0.14, WHITE)
    pen.ellipse(-0.59, -0.1, 0.07, 0.07, BLACK)


def _car(pen: Pen, colour: Colour) -> None:
    pen.polygon([(-0.58, 0.08), (-0.36, -0.45), (0.34, -0.45), (0.64, 0.08)], colour)
    pen.polygon([(-0.42, 0.02), (-0.27, -0.33), (-0.04, -0.33), (-0.04, 0.02)], (178, 214, 236))
    pen.polygon([(0.06, 0.02), (0.06, -0.33), (0.26, -0.33), (0.46, 0.02)], (178, 214, 236))
    pen.round_box(-0.98, 0.0, 0.98, 0.46, 0.14, colour)
    for x in (-0.55, 0.55):
        pen.ellipse(x, 0.46, 0.25, 0.25, BLACK)
        pen.ellipse(x, 0.46, 0.11, 0.11, (190, 190, 194))
    pen.ellipse(0.9, 0.16, 0.08, 0.08, (255, 236, 150))


def _snowman(pen: Pen, colour: Colour) -> None:
    snow = (238, 244, 252)
    pen.ellipse(0, 0.5, 0.48, 0.46, snow)
    pen.ellipse(0, -0.1, 0.36, 0.35, snow)
    pen.ellipse(0, -0.52, 0.27, 0.27, snow)
    pen.box(-0.36, -0.74, 0.36, -0.66, BLACK)
    pen.box(-0.22, -0.98, 0.22, -0.68, BLACK)
    pen.box(-0.32, -0.34, 0.32, -0.22, colour)
    pen.box(0.1, -0.3, 0.22, 0.1, colour)
    for x in (-0.1, 0.1):
        pen.ellipse(x, -0.57, 0.04, 0.04, BLACK)
    pen.polygon([(-0.02, -0.5), (-0.02, -0.42), (0.26, -0.45)], (240, 130, 40))


def _mushroom(pen: Pen, colour: Colour) -> None:
    pen.polygon([(-0.26, 0.0), (0.26, 0.0), (0.36, 0.92), (-0.36, 0.92)], (240, 228, 206))
    pen.pie(0, 0.12, 0.95, 180, 360, colour)
    pen.ellipse(0, 0.12, 0.95, 0.16, _mix(colour, BLACK, 0.2))
    for x, y, r in (
        (-0.45, -0.18, 0.14),
        (0.08, -0.5, 0.17),
        (0.52, -0.14, 0.13),
        (0.1, -0.1, 0.1),
    ):
        pen.ellipse(x, y, r, r * 0.85, WHITE)


def _rocket(pen: Pen, colour: Colour) -> None:
    pen.polygon([(-0.2, 0.55), (0.2, 0.55), (0.0, 0.99)], (250, 150, 40))
    pen.polygon([(-0.1, 0.55), (0.1, 0.55), (0.0, 0.82)], (255, 230, 110))
    pen.polygon([(-0.28, 0.1), (-0.62, 0.62), (-0.24, 0.52)], colour)
    pen.polygon([(0.28, 0.1), (0.62, 0.62), (0.24, 0.52)], colour)
    pen.polygon([(-0.3, -0.3), (0.3, -0.3), (0.26, 0.58), (-0.26, 0.58)], (232, 234, 240))
    pen.polygon([(-0.3, -0.3), (-0.18, -0.7), (0, -0.98), (0.18, -0.7), (0.3, -0.3)], colour)
    pen.ellipse(0, -0.02, 0.16, 0.16, (86, 160, 216))


def _umbrella(pen: Pen, colour: Colour) -> None:
    pen.line([(0, -0.3), (0, 0.76), (0.08, 0.88), (0.22, 0.86), (0.26, 0.72)], 0.07, (96, 66, 44))
    pen.pie(0, 0.05, 0.95, 180, 360, colour)
    light = _mix(colour, WHITE, 0.5)
    pen.polygon([(0, -0.9), (-0.36, 0.05), (0.36, 0.05)], light)
    for x in (-0.66, 0.0, 0.66):
        pen.ellipse(x, 0.06, 0.3, 0.13, (0, 0, 0, 0))
    pen.line([(0, 0.0), (0, 0.4)], 0.07, (96, 66, 44))


def _cup(pen: Pen, colour: Colour) -> None:
    pen.ellipse(0.56, 0.1, 0.38, 0.38, colour)
    pen.ellipse(0.56, 0.1, 0.22, 0.22, (0, 0, 0, 0))
    pen.polygon([(-0.66, -0.46), (0.58, -0.46), (0.46, 0.78), (-0.54, 0.78)], colour)
    pen.ellipse(-0.04, -0.46, 0.62, 0.17, _mix(colour, WHITE, 0.5))
    pen.ellipse(-0.04, -0.43, 0.5, 0.11, (92, 56, 34))


def _butterfly(pen: Pen, colour: Colour) -> None:
    light = _mix(colour, WHITE, 0.45)
    for side in (-1, 1):
        pen.ellipse(side * 0.5, -0.34, 0.46, 0.46, colour)
        pen.ellipse(side * 0.42, 0.42, 0.36, 0.38, colour)
        pen.ellipse(side * 0.54, -0.36, 0.2, 0.2, light)
        pen.ellipse(side * 0.44, 0.44, 0.15, 0.15, light)
        pen.line([(side * 0.03, -0.5), (side * 0.24, -0.92)], 0.05, BLACK)
    pen.ellipse(0, 0.05, 0.1, 0.62, BLACK)


def _cat(pen: Pen, colour: Colour) -> None:
    for side in (-1, 1):
        pen.polygon([(side * 0.82, -0.95), (side * 0.86, -0.05), (side * 0.2, -0.5)], colour)
        pen.polygon(
            [(side * 0.7, -0.7), (side * 0.72, -0.25), (side * 0.4, -0.48)], (240, 166, 170)
        )
    pen.ellipse(0, 0.12, 0.88, 0.76, colour)
    for side in (-1, 1):
        pen.ellipse(side * 0.36, 0.0, 0.17, 0.2, (236, 240, 190))
        pen.ellipse(side * 0.36, 0.0, 0.07, 0.17, BLACK)
    pen.ellipse(0, 0.48, 0.34, 0.24, _mix(colour, WHITE, 0.62))
    pen.polygon([(-0.11, 0.34), (0.11, 0.34), (0, 0.47)], (226, 116, 130))


def _lighthouse(pen: Pen, colour: Colour) -> None:
    pen.polygon([(-0.24, -0.5), (0.24, -0.5), (0.42, 0.95), (-0.42, 0.95)], WHITE)
    for y0, y1 in ((-0.24, 0.06), (0.38, 0.68)):
        a, b = 0.24 + (y0 + 0.5) * 0.124, 0.24 + (y1 + 0.5) * 0.124
        pen.polygon([(-a, y0), (a, y0), (b, y1), (-b, y1)], colour)
    pen.box(-0.32, -0.54, 0.32, -0.46, DARK)
    pen.box(-0.18, -0.78, 0.18, -0.54, (255, 232, 130))
    pen.polygon([(-0.26, -0.76), (0.26, -0.76), (0, -0.99)], colour)


def _cactus(pen: Pen, colour: Colour) -> None:
    dark = _mix(colour, BLACK, 0.25)
    pen.round_box(-0.2, -0.92, 0.2, 0.95, 0.2, colour)
    pen.round_box(-0.72, -0.3, -0.46, 0.32, 0.13, colour)
    pen.round_box(-0.72, 0.12, -0.1, 0.36, 0.12, colour)
    pen.round_box(0.46, -0.52, 0.72, 0.12, 0.13, colour)
    pen.round_box(0.1, -0.1, 0.72, 0.14, 0.12, colour)
    for x in (-0.08, 0.08):
        pen.line([(x, -0.75), (x, 0.9)], 0.04, dark)


def _ice_cream(pen: Pen, colour: Colour) -> None:
    pen.polygon([(-0.42, -0.08), (0.42, -0.08), (0, 0.98)], (218, 160, 90))
    pen.line([(-0.2, 0.02), (0.16, 0.5)], 0.04, (176, 118, 58))
    pen.line([(0.2, 0.02), (-0.16, 0.5)], 0.04, (176, 118, 58))
    pen.ellipse(0, -0.38, 0.52, 0.5, colour)
    pen.ellipse(0, -0.06, 0.52, 0.13, _mix(colour, WHITE, 0.25))
    pen.ellipse(0.06, -0.88, 0.12, 0.12, (206, 34, 52))


def _castle(pen: Pen, colour: Colour) -> None:
    wall = (178, 176, 184)
    pen.box(-0.55, -0.05, 0.55, 0.92, wall)
    for x in (-0.5, -0.18, 0.14):
        pen.box(x + 0.04, -0.2, x + 0.24, 0.0, wall)
    for side in (-1, 1):
        low, high = sorted((side * 0.92, side * 0.5))
        pen.box(low, -0.38, high, 0.92, _mix(wall, BLACK, 0.12))
        pen.polygon([(low - 0.08, -0.36), (high + 0.08, -0.36), (side * 0.71, -0.95)], colour)
        pen.box(side * 0.71 - 0.07, 0.0, side * 0.71 + 0.07, 0.24, DARK)
    pen.pie(0, 0.56, 0.2, 180, 360, (92, 60, 40))
    pen.box(-0.2, 0.55, 0.2, 0.92, (92, 60, 40))


def _duck(pen: Pen, colour: Colour) -> None:
    pen.polygon([(0.5, 0.1), (0.98, -0.2), (0.8, 0.5)], colour)
    pen.ellipse(0.12, 0.4, 0.74, 0.46, colour)
    pen.ellipse(-0.42, -0.36, 0.4, 0.4, colour)
    pen.polygon([(-0.74, -0.42), (-0.99, -0.26), (-0.72, -0.14)], (242, 132, 34))
    pen.ellipse(-0.52, -0.46, 0.07, 0.07, BLACK)
    pen.ellipse(0.24, 0.36, 0.4, 0.24, _mix(colour, BLACK, 0.16))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How to draw one kind of object, and what it is called. The first name is the usual one."""

    draw: Callable[[Pen, Colour], None]
    names: tuple[str, ...]
    usual: tuple[str, ...]
    """Its colours when the caption names none."""
    grounds: tuple[str, ...] = ()
    """The landscapes in which it may stand."""


OBJECTS: dict[str, Kind] = {
    "house": Kind(draw=_house, names=("house", "cottage"), usual=("red", "brown", "blue"),
                  grounds=("meadow", "snow", "hills", "beach")),
    "tree": Kind(draw=_tree, names=("tree",), usual=("green",),
                 grounds=("meadow", "hills", "snow")),
    "boat": Kind(draw=_boat, names=("boat", "sailboat", "sailing boat"),
                 usual=("red", "brown", "blue"),
                 grounds=("sea", "lake")),
    "balloon": Kind(draw=_balloon, names=("hot air balloon", "balloon"),
                    usual=("red", "orange", "purple", "blue"), grounds=("sky",)),
    "flower": Kind(draw=_flower, names=("flower",), usual=("pink", "red", "purple", "yellow")),
    "apple": Kind(draw=_apple, names=("apple",), usual=("red", "green")),
    "fish": Kind(draw=_fish, names=("fish",), usual=("orange", "blue")),
    "car": Kind(draw=_car, names=("car",), usual=("red", "blue", "yellow"), grounds=("desert",)),
    "snowman": Kind(draw=_snowman, names=("snowman",), usual=("red", "blue", "green"),
                    grounds=("snow",)),
    "mushroom": Kind(draw=_mushroom, names=("mushroom",), usual=("red", "brown"),
                     grounds=("meadow",)),
    "rocket": Kind(draw=_rocket, names=("rocket", "spaceship"), usual=("red", "blue")),
    "umbrella": Kind(draw=_umbrella, names=("umbrella",), usual=("red", "blue", "purple"),
                     grounds=("beach",)),
    "cup": Kind(draw=_cup, names=("cup", "cup of coffee"), usual=("white", "blue", "red")),
    "butterfly": Kind(draw=_butterfly, names=("butterfly",), usual=("orange", "blue", "purple")),
    "cat": Kind(draw=_cat, names=("cat",), usual=("orange", "gray", "brown")),
    "lighthouse": Kind(draw=_lighthouse, names=("lighthouse",), usual=("red",),
                       grounds=("beach", "sea")),
    "cactus": Kind(draw=_cactus, names=("cactus",), usual=("green",), grounds=("desert",)),
    "ice cream": Kind(draw=_ice_cream, names=("ice cream",), usual=("pink", "white", "brown")),
    "castle": Kind(draw=_castle, names=("castle",), usual=("blue", "red", "purple"),
                   grounds=("hills", "meadow", "snow")),
    "duck": Kind(draw=_duck, names=("duck",), usual=("yellow",)),
}  # fmt: skip


# -- landscapes -----------------------------------------------------------------------------------

SKIES: dict[str, tuple[Colour, Colour, Colour]] = {
    "day": ((66, 138, 222), (126, 184, 238), (206, 230, 246)),
    "sunset": ((74, 58, 128), (226, 98, 84), (255, 196, 104)),
    "night": ((10, 14, 48), (24, 34, 84), (60, 78, 138)),
    "dawn": ((134, 160, 220), (236, 186, 206), (255, 226, 196)),
}
TINTS: dict[str, tuple[float, float, float]] = {
    "day": (1, 1, 1),
    "sunset": (0.92, 0.62, 0.56),
    "night": (0.36, 0.43, 0.68),
    "dawn": (0.94, 0.84, 0.88),
}
SUN_HEIGHTS = {
    "day": (0.12, 0.4),
    "night": (0.12, 0.42),
    "sunset": (0.62, 0.92),
    "dawn": (0.55, 0.85),
}
"""Of sun or moon, from the top of the sky (0) to the horizon (1)."""
HAZE: dict[str, Colour] = {
    "day": (190, 214, 236),
    "sunset": (236, 140, 100),
    "night": (50, 66, 122),
    "dawn": (240, 204, 210),
}


@dataclass(slots=True, kw_only=True)
class Scene:
    """A landscape being drawn: its canvas and what decides its light."""

    rng: random.Random
    image: Image.Image
    time: str
    overcast: bool
    horizon: int
    sun_x: float
    sun_y: float
    tint: tuple[float, float, float]
    haze: Colour
    scale: float
    notes: list[str] = field(default_factory=list)

    def lit(self, colour: Colour, haze: float = 0.0) -> Colour:
        """A colour in this scene's light, `haze` (0..1) towards the colour of the distant air."""
        return _mix(_times(colour, self.tint), self.haze, haze)


def _ridge(rng: random.Random, width: int, roughness: float, points: int) -> NDArray[np.float64]:
    """A random line from left to right, 0..1 high, by halving the step and the height."""
    heights = np.zeros(width)
    amplitude, count = 1.0, points
    for _ in range(5):
        at = np.linspace(0, width - 1, count + 1)
        knots = [rng.uniform(-1, 1) for _ in range(count + 1)]
        heights += amplitude * np.interp(np.arange(width), at, knots)
        amplitude *= roughness
        count *= 2
    low, high = heights.min(), heights.max()
    scaled: NDArray[np.float64] = (heights - low) / max(high - low, 1e-6)
    return scaled


def _fill_below(image: Image.Image, line: NDArray[np.float64], colour: Colour, floor: int) -> None:
    width = image.size[0]
    points = [(float(x), float(y)) for x, y in enumerate(line)]
    ImageDraw.Draw(image).polygon([*points, (width, floor), (0, floor)], fill=colour)


def _sky(scene: Scene) -> None:
    rng, image = scene.rng, scene.image
    width, _ = image.size
    top, middle, low = SKIES[scene.time]
    if scene.overcast:
        gray = {"day": (168, 176, 186), "night": (30, 34, 46)}.get(scene.time, (170, 150, 156))
        top, middle, low = (_mix(c, gray, 0.78) for c in (top, middle, low))
    sky = _gradient((width, scene.horizon + 1), [(0, top), (0.55, middle), (1, low)])
    image.paste(sky, (0, 0))
    if scene.time == "night" and not scene.overcast:
        draw = ImageDraw.Draw(image)
        for _ in range(rng.randint(10, 24)):
            x, y = rng.uniform(0, width), rng.uniform(0, scene.horizon * 0.85)
            r = rng.choice((1.2, 1.5, 2.0)) * scene.scale
            draw.ellipse(
                [x - r, y - r, x + r, y + r], fill=_mix((255, 255, 240), top, rng.random() * 0.5)
            )


def _sun_or_moon(scene: Scene) -> None:
    rng, image, x, y = scene.rng, scene.image, scene.sun_x, scene.sun_y
    r = rng.uniform(8, 12) * scene.scale
    draw = ImageDraw.Draw(image)
    if scene.overcast:
        return
    if scene.time == "night":
        r *= 0.85
        _glow(image, (x, y), r * 4.5, (150, 170, 220), 0.5)
        pale = (244, 242, 220)
        if rng.random() < 0.5:
            draw.ellipse([x - r, y - r, x + r, y + r], fill=pale)
            scene.notes.append("full moon")
        else:
            pen = Pen(image.size, (x, y), r)
            pen.ellipse(0, 0, 1, 1, pale)
            pen.ellipse(0.45, -0.2, 0.82, 0.82, (0, 0, 0, 0))
            image.paste(pen.layer, (0, 0), pen.layer)
            scene.notes.append("crescent moon")
        return
    glow, disc = {
        "day": ((255, 250, 220), (255, 244, 170)),
        "sunset": ((255, 190, 110), (255, 226, 140)),
        "dawn": ((255, 226, 190), (255, 240, 200)),
    }[scene.time]
    _glow(image, (x, y), r * (6 if scene.time != "day" else 4), glow, 0.85)
    draw.ellipse([x - r, y - r, x + r, y + r], fill=disc)


def _clouds(scene: Scene, count: int) -> None:
    rng, image = scene.rng, scene.image
    width, _ = image.size
    base = {"day": (250, 252, 255), "sunset": (250, 150, 120), "night": (58, 68, 108),
            "dawn": (255, 226, 226)}[scene.time]  # fmt: skip
    if scene.overcast:
        base = {"night": (52, 58, 74)}.get(scene.time, (140, 147, 158))
    for _ in range(count):
        x, y = rng.uniform(0, width), rng.uniform(0.08, 0.62) * scene.horizon
        s = rng.uniform(13, 24) * scene.scale
        pen = Pen(image.size, (x, y), s)
        for k in range(5):
            cx = -1 + 0.5 * k + rng.uniform(-0.1, 0.1)
            r = rng.uniform(0.3, 0.52) * (1 - 0.35 * abs(cx))
            pen.ellipse(cx, -r * 0.5, r, r * 0.8, base)
        pen.round_box(-1.3, -0.22, 1.3, 0.14, 0.18, _mix(base, scene.haze, 0.18))
        soft = pen.layer.getchannel("A").point(lambda a: int(a * 0.88))
        image.paste(pen.layer, (0, 0), soft)


def _rainbow(scene: Scene) -> None:
    image = scene.image
    width, _ = image.size
    layer = Image.new("RGBA", image.size, (0, 0, 0, 0))
    draw = ImageDraw.Draw(layer)
    radius, band = width * scene.rng.uniform(0.36, 0.46), 3.4 * scene.scale
    cx = width * scene.rng.uniform(0.4, 0.6)
    hues = (
        (230, 60, 60),
        (250, 150, 40),
        (250, 230, 70),
        (80, 190, 90),
        (70, 130, 230),
        (150, 80, 200),
    )
    for k, colour in enumerate(hues):
        r = radius - k * band
        box = [cx - r, scene.horizon - r, cx + r, scene.horizon + r]
        draw.arc(box, 180, 360, fill=(*colour, 190), width=math.ceil(band) + 1)
    layer.paste((0, 0, 0, 0), (0, scene.horizon, width, image.size[1]))
    image.paste(layer, (0, 0), layer)


def _mountains(scene: Scene) -> None:
    rng, image = scene.rng, scene.image
    width, _ = image.size
    for depth in (0.55, 0.2):
        draw = ImageDraw.Draw(image)
        rock = scene.lit(_vary(rng, (104, 104, 122)), depth)
        shade = scene.lit((66, 68, 90), depth)
        snow = scene.lit((246, 248, 255), depth * 0.7)
        snow_shade = scene.lit((186, 196, 224), depth * 0.7)
        x = rng.uniform(-0.15, 0.1) * width
        peaks = []
        while x < width * 1.1:
            high = rng.uniform(0.5, 0.86) if depth < 0.4 else rng.uniform(0.62, 0.98)
            half = rng.uniform(0.2, 0.32) * width
            peaks.append((x, scene.horizon * high, half))
            x += half * rng.uniform(0.85, 1.3)
        rng.shuffle(peaks)
        for px, high, half in peaks:
            top, foot = scene.horizon - high * 0.8, scene.horizon + 2
            bend = rng.uniform(-0.08, 0.08) * half
            draw.polygon([(px, top), (px + half, foot), (px - half, foot)], fill=rock)
            draw.polygon([(px, top), (px + half, foot), (px + bend, foot)], fill=shade)
            if high > 0.5 * scene.horizon:
                line = 0.3
                lx, rx, y = px - half * line, px + half * line, top + (foot - top) * line
                zig = [
                    (lx, y),
                    (px - half * 0.12, y - 0.06 * high),
                    (px - half * 0.04, y + 0.05 * high),
                ]
                draw.polygon([(px, top), *zig, (px + bend * line, y)], fill=snow)
                zag = [
                    (px + half * 0.06, y + 0.04 * high),
                    (px + half * 0.15, y - 0.05 * high),
                    (rx, y),
                ]
                draw.polygon([(px, top), (px + bend * line, y), *zag], fill=snow_shade)


def _hills(scene: Scene, base: Colour = (92, 158, 74)) -> None:
    rng, image = scene.rng, scene.image
    width, height = image.size
    for k, depth in enumerate((0.5, 0.28, 0.06)):
        line = _ridge(rng, width, 0.22, 2)
        top = scene.horizon - (0.3 - 0.17 * k) * scene.horizon
        colour = scene.lit(_vary(rng, base, 0.06), depth)
        _fill_below(image, top + line * 0.2 * scene.horizon, colour, height)


def _pine(
    draw: ImageDraw.ImageDraw, x: float, foot: float, tall: float, colour: Colour, trunk: Colour
) -> None:
    draw.rectangle([x - tall * 0.045, foot - tall * 0.16, x + tall * 0.045, foot], fill=trunk)
    for k in range(3):
        y0, y1 = foot - tall * (1 - 0.27 * k), foot - tall * (0.52 - 0.19 * k)
        half = tall * (0.17 + 0.075 * k)
        draw.polygon([(x, y0), (x + half, y1), (x - half, y1)], fill=colour)


def _forest(scene: Scene, *, snowy: bool = False) -> None:
    rng, image = scene.rng, scene.image
    width, _ = image.size
    draw = ImageDraw.Draw(image)
    for depth, foot, tall, count in ((0.5, 2, 0.5, 12), (0.22, 10, 0.62, 9), (0.0, 22, 0.78, 6)):
        trunk = scene.lit((84, 58, 40), depth)
        ground = scene.lit((232, 238, 248) if snowy else (70, 104, 56), depth * 0.7)
        y = scene.horizon + foot * scene.scale
        draw.rectangle([0, y - 3 * scene.scale, width, image.size[1]], fill=ground)
        for k in range(count):
            x = (k + rng.uniform(0.05, 0.95)) * width / count
            green = (190, 210, 214) if snowy and rng.random() < 0.4 else (36, 96, 58)
            colour = scene.lit(_vary(rng, green, 0.06), depth)
            _pine(draw, x, y, tall * scene.horizon * rng.uniform(0.8, 1.1), colour, trunk)


def _city(scene: Scene) -> None:
    rng, image = scene.rng, scene.image
    width, _ = image.size
    draw = ImageDraw.Draw(image)
    unit = scene.scale
    walls = ((96, 104, 124), (120, 112, 116), (84, 92, 112), (138, 126, 118))
    for depth, low, high in ((0.5, 0.38, 0.72), (0.1, 0.2, 0.52)):
        x = -rng.uniform(0, 8) * unit
        while x < width:
            w = rng.uniform(12, 20) * unit
            top = scene.horizon * (1 - rng.uniform(low, high))
            colour = scene.lit(_vary(rng, rng.choice(walls), 0.05), depth)
            draw.rectangle([x, top, x + w, scene.horizon + 2], fill=colour)
            if depth < 0.3:
                pane = 3.2 * unit
                dark = scene.time in ("night", "sunset")
                for wy in np.arange(top + 3 * unit, scene.horizon - 4 * unit, 7 * unit):
                    for wx in np.arange(x + 2.6 * unit, x + w - pane, 5.6 * unit):
                        lit = rng.random() < (0.7 if scene.time == "night" else 0.45)
                        glass = (255, 216, 110) if dark and lit else scene.lit((176, 206, 230), 0.1)
                        draw.rectangle([wx, wy, wx + pane, wy + pane * 1.25], fill=glass)
            x += w + rng.uniform(0, 2.5) * unit


def _water(scene: Scene, bottom: int | None = None) -> None:
    rng, image = scene.rng, scene.image
    width, height = image.size
    bottom = height if bottom is None else bottom
    if scene.overcast:
        deep, far = scene.lit((84, 108, 124)), scene.lit((128, 148, 160))
    else:
        deep = {"day": (24, 92, 156), "sunset": (92, 52, 96), "night": (8, 18, 52),
                "dawn": (112, 132, 178)}[scene.time]  # fmt: skip
        far = {"day": (92, 168, 214), "sunset": (232, 128, 96), "night": (34, 50, 102),
               "dawn": (220, 186, 204)}[scene.time]  # fmt: skip
    tall = bottom - scene.horizon
    image.paste(
        _gradient((width, tall), [(0, far), (0.35, _mix(far, deep, 0.6)), (1, deep)]),
        (0, scene.horizon),
    )
    draw = ImageDraw.Draw(image)
    for _ in range(26):
        t = rng.random() ** 1.3
        y = scene.horizon + t * tall
        w = (5 + 22 * t) * scene.scale
        x = rng.uniform(-0.1, 1) * width
        shade = _mix(
            _mix(far, deep, t),
            (255, 255, 255),
            rng.uniform(0.06, 0.2) * (0.5 if scene.time == "night" else 1),
        )
        draw.rounded_rectangle(
            [x, y, x + w, y + (1 + 1.6 * t) * scene.scale], scene.scale, fill=shade
        )
    if scene.overcast:
        return
    gleam = {"day": (236, 246, 250), "sunset": (255, 216, 130), "night": (206, 214, 236),
             "dawn": (255, 236, 210)}[scene.time]  # fmt: skip
    for k in range(14):
        t = (k + rng.random()) / 14
        y, w = scene.horizon + t * tall, (5 + 15 * t) * scene.scale * rng.uniform(0.6, 1.2)
        x = scene.sun_x + rng.uniform(-4, 4) * scene.scale
        colour = _mix(
            gleam, _mix(far, deep, t), 0.15 + 0.5 * t + (0.25 if scene.time == "day" else 0)
        )
        draw.rounded_rectangle(
            [x - w / 2, y, x + w / 2, y + 2.4 * scene.scale], scene.scale, fill=colour
        )


def _sand(scene: Scene) -> None:
    rng, image = scene.rng, scene.image
    width, height = image.size
    shore = scene.horizon + (height - scene.horizon) * rng.uniform(0.34, 0.5)
    _water(scene)
    line = _ridge(rng, width, 0.3, 2) * 7 * scene.scale
    _fill_below(image, shore + line - 3 * scene.scale, scene.lit((250, 252, 252)), height)
    _fill_below(image, shore + line, scene.lit((206, 172, 116)), height)
    _fill_below(
        image, shore + line + 4 * scene.scale, scene.lit(_vary(rng, (236, 208, 150), 0.03)), height
    )


def _meadow(scene: Scene) -> None:
    rng, image = scene.rng, scene.image
    width, height = image.size
    tall = height - scene.horizon
    far, near = scene.lit((136, 190, 96), 0.15), scene.lit(_vary(rng, (72, 148, 60), 0.06))
    image.paste(_gradient((width, tall), [(0, far), (1, near)]), (0, scene.horizon))
    draw = ImageDraw.Draw(image)
    petals = rng.choice((((238, 84, 96), (250, 214, 70)), ((250, 250, 250), (250, 214, 70)),
                         ((190, 110, 220), (250, 160, 200))))  # fmt: skip
    for _ in range(rng.randint(10, 26)):
        t = rng.random()
        x, y, r = rng.uniform(0, width), scene.horizon + t * tall, (1.2 + 2.2 * t) * scene.scale
        draw.ellipse([x - r, y - r, x + r, y + r], fill=scene.lit(rng.choice(petals)))


def _desert(scene: Scene) -> None:
    rng, image = scene.rng, scene.image
    width, height = image.size
    tall = height - scene.horizon
    flat = scene.lit((226, 184, 112), 0.35)
    ImageDraw.Draw(image).rectangle([0, scene.horizon, width, height], fill=flat)
    for k, depth in enumerate((0.3, 0.12, 0.0)):
        line = _ridge(rng, width, 0.12, 2)
        top = scene.horizon + (0.0 + 0.3 * k) * tall - 5 * scene.scale
        colour = scene.lit(_vary(rng, _mix((240, 196, 116), (206, 142, 74), 0.4 * k), 0.03), depth)
        _fill_below(image, top + line * 0.28 * tall, colour, height)


def _snowfield(scene: Scene) -> None:
    rng, image = scene.rng, scene.image
    width, height = image.size
    tall = height - scene.horizon
    flat = scene.lit((206, 220, 240), 0.25)
    ImageDraw.Draw(image).rectangle([0, scene.horizon, width, height], fill=flat)
    for k, depth in enumerate((0.2, 0.08, 0.0)):
        line = _ridge(rng, width, 0.15, 2)
        colour = scene.lit(_mix((214, 226, 244), (250, 252, 255), k / 2), depth)
        _fill_below(
            image,
            scene.horizon + 0.25 * k * tall + line * 0.18 * tall - 3 * scene.scale,
            colour,
            height,
        )


GROUNDS: dict[str, Callable[[Scene], None]] = {
    "sea": _water, "lake": _water, "beach": _sand, "meadow": _meadow, "desert": _desert,
    "snow": _snowfield,
}  # fmt: skip
BACKDROPS: dict[str, Callable[[Scene], None]] = {
    "mountains": _mountains, "hills": _hills, "forest": _forest, "city": _city,
}  # fmt: skip
COMBINED = (
    ("mountains", "sea"), ("mountains", "sea"), ("mountains", "lake"), ("mountains", "meadow"),
    ("mountains", "snow"), ("mountains", "beach"), ("mountains", "desert"), ("hills", "sea"),
    ("hills", "lake"), ("forest", "lake"), ("forest", "snow"), ("city", "sea"), ("city", "lake"),
    ("city", "beach"), ("city", "snow"),
)  # fmt: skip
_BY = {
    "sea": ("by the sea", "by the ocean", "at the sea"),
    "lake": ("by a lake", "by the lake"),
    "meadow": ("behind a meadow", "and a meadow"),
    "snow": ("in the snow", "in winter"),
    "beach": ("behind a beach", "by the beach", "and a beach"),
    "desert": ("in the desert",),
}
_ALONE = {
    "sea": ("the sea", "the ocean", "the sea", "sea"),
    "beach": ("a beach", "a sandy beach", "the beach"),
    "lake": ("a lake", "a calm lake"),
    "meadow": ("a meadow", "a green meadow", "a meadow with flowers", "a field of flowers"),
    "desert": ("a desert", "the desert", "sand dunes"),
    "snow": ("a snowy field", "a field of snow", "snow", "a winter landscape"),
    "mountains": ("mountains", "the mountains", "a mountain landscape"),
    "hills": ("green hills", "hills", "rolling hills"),
    "forest": ("a forest", "a pine forest", "the forest"),
    "city": ("a city", "a city skyline", "the city", "a town"),
}
_WHEN = {
    "day": ("by day", "during the day", "on a sunny day", "at noon", "in daylight"),
    "sunset": ("at sunset", "at sunset", "in the evening", "at dusk"),
    "night": ("at night", "at night", "by night", "at midnight"),
    "dawn": ("at dawn", "at sunrise", "in the morning", "at dawn"),
}

_CLOUDY = {
    "day": ("on a cloudy day", "on a gray day", "under a cloudy sky"),
    "night": ("on a cloudy night", "at night under a cloudy sky"),
}


def landscape(
    rng: random.Random, size: tuple[int, int], name: str | None = None, time: str | None = None
) -> Picture:
    """A landscape at some time of day, sometimes with something in it."""
    time = time or rng.choices(TIMES, (4, 4, 4, 3))[0]
    backdrop: str | None
    ground: str | None
    combined = name is None and rng.random() < 0.45
    if combined:
        backdrop, ground = rng.choice(COMBINED)
        name = backdrop
    else:
        name = name or rng.choice(LANDSCAPES)
        backdrop = name if name in BACKDROPS else None
        ground = name if name in GROUNDS else None
    scene = _scene(rng, size, time)
    extras = _air(scene)
    _land(scene, backdrop, ground)
    words = rng.choice(_ALONE[name][: 3 if combined else None])
    if combined:
        words += f" {rng.choice(_BY[str(ground)])}"
    thing, subject = _something(scene, ground or name)
    if subject:
        words = _placed(rng, subject, ground or name, words, combined=combined)
    caption = f"{words} {_when(scene)}".strip()
    if extras:
        rng.shuffle(extras)
        caption += f"{rng.choice((' with', ', with', ' with'))} {' and '.join(extras[:2])}"
    weather = "overcast" if scene.overcast else "clear"
    facts = {"kind": "landscape", "landscape": name, "time": time, "weather": weather}
    if thing:
        facts["inside"] = thing
    image = scene.image.resize(size, Image.Resampling.BOX)
    return Picture(image=image, caption=_phrase(rng, caption), facts=facts)


def _scene(rng: random.Random, size: tuple[int, int], time: str) -> Scene:
    """An empty scene with its light decided."""
    width, height = (n * OVERSAMPLE for n in size)
    horizon = round(height * rng.uniform(0.5, 0.64))
    overcast = rng.random() < (0.1 if time in ("day", "night") else 0.0)
    high, low = SUN_HEIGHTS[time]
    tint, haze = TINTS[time], HAZE[time]
    if overcast:
        tint = (tint[0] * 0.8, tint[1] * 0.83, tint[2] * 0.87)
        haze = _mix(haze, (150, 154, 160) if time == "day" else (34, 38, 50), 0.7)
    return Scene(
        rng=rng, image=Image.new("RGB", (width, height)), time=time, overcast=overcast,
        horizon=horizon, sun_x=rng.uniform(0.15, 0.85) * width,
        sun_y=rng.uniform(high, low) * horizon, tint=tint, haze=haze,
        scale=min(width, height) / 128,
    )  # fmt: skip


def _air(scene: Scene) -> list[str]:
    """Draw sky, sun or moon, clouds and rainbow; returns what of it a caption mentions."""
    rng, extras = scene.rng, []
    _sky(scene)
    _sun_or_moon(scene)
    clear = not scene.overcast
    if scene.overcast:
        _clouds(scene, rng.randint(5, 7))
    elif rng.random() < 0.4:
        _clouds(scene, rng.randint(2, 4))
        if rng.random() < 0.6:
            white = "white clouds" if scene.time == "day" else "clouds"
            extras.append(rng.choice(("clouds", "some clouds", white)))
    if scene.time == "day" and clear and rng.random() < 0.1:
        _rainbow(scene)
        extras.append("a rainbow")
    if scene.notes and rng.random() < 0.6:
        note = scene.notes[0]
        extras.append(rng.choice((f"a {note}", "the moon", f"a {note} and stars")))
    elif scene.time == "night" and clear and rng.random() < 0.3:
        extras.append("stars")
    return extras


def _when(scene: Scene) -> str:
    """The time of day in words; often none by day."""
    rng = scene.rng
    if scene.overcast:
        return rng.choice(_CLOUDY[scene.time])
    if scene.time == "day" and rng.random() < 0.35:
        return ""
    return rng.choice(_WHEN[scene.time])


def _land(scene: Scene, backdrop: str | None, ground: str | None) -> None:
    rng, image = scene.rng, scene.image
    width, height = image.size
    if backdrop == "forest":
        _forest(scene, snowy=ground == "snow")
    elif backdrop:
        BACKDROPS[backdrop](scene)
    if ground == "lake":
        shore = scene.horizon + round(rng.uniform(1, 4) * scene.scale)
        ImageDraw.Draw(image).rectangle([0, scene.horizon - 4 * scene.scale, width, shore],
                                        fill=scene.lit((84, 134, 70), 0.2))  # fmt: skip
        if backdrop is None:
            line = scene.horizon - _ridge(rng, width, 0.25, 3) * 12 * scene.scale
            _fill_below(image, line, scene.lit((76, 124, 78), 0.3), shore)
        scene.horizon = shore
        floor = height - round((height - shore) * 0.16)
        _water(scene)
        line = _ridge(rng, width, 0.25, 2) * 7 * scene.scale
        _fill_below(image, floor + line, scene.lit((92, 148, 70)), height)
    elif ground:
        GROUNDS[ground](scene)
    elif backdrop == "mountains":
        line = _ridge(rng, width, 0.25, 2) * 9 * scene.scale
        _fill_below(image, scene.horizon - line, scene.lit((88, 136, 78), 0.15), height)
        lower = scene.horizon + 0.45 * (height - scene.horizon)
        _fill_below(image, lower + line, scene.lit((70, 118, 62)), height)
    elif backdrop == "city":
        fill = scene.lit((96, 98, 106))
        ImageDraw.Draw(image).rectangle([0, scene.horizon, width, height], fill=fill)
        middle = scene.horizon + (height - scene.horizon) * 0.5
        for k in range(5):
            x = (k + 0.2) * width / 5
            mark = [x, middle, x + width * 0.1, middle + 2.6 * scene.scale]
            ImageDraw.Draw(image).rectangle(mark, fill=scene.lit((226, 220, 196)))


def _something(scene: Scene, ground: str) -> tuple[str, str]:
    """Put an object into the scene in a third of them; its kind and its words, or two blanks."""
    rng, image = scene.rng, scene.image
    width, height = image.size
    if rng.random() > 0.34:
        return "", ""
    fits = [k for k, v in OBJECTS.items() if ground in v.grounds or "sky" in v.grounds]
    name = rng.choice(fits)
    kind = OBJECTS[name]
    named = rng.random() < 0.45 and name not in ("cactus", "tree")
    colour_name = rng.choice(list(COLOURS)) if named else rng.choice(kind.usual)
    big = rng.uniform(17, 25) * scene.scale
    x = rng.uniform(0.25, 0.75) * width
    y = scene.horizon * rng.uniform(0.3, 0.55) if "sky" in kind.grounds else (
        scene.horizon + (height - scene.horizon) * rng.uniform(0.22, 0.5) - big * 0.55)  # fmt: skip
    pen = Pen(image.size, (x, y), big)
    kind.draw(pen, _vary(rng, COLOURS[colour_name]))
    tint = tuple(0.35 + 0.65 * t for t in scene.tint)
    pen.paste_on(image, tint)
    words = rng.choice(kind.names)
    return name, _article(f"{colour_name} {words}" if named else words)


def _placed(rng: random.Random, subject: str, ground: str, words: str, *, combined: bool) -> str:
    if "balloon" in subject:
        return f"{subject} {rng.choice(('over', 'above'))} {words}"
    if combined:
        return f"{subject} and {words}"
    where = {"sea": "on the sea", "lake": "on a lake", "beach": "on a beach", "snow": "in the snow",
             "meadow": "in a meadow", "desert": "in the desert",
             "hills": "on green hills"}  # fmt: skip
    return f"{subject} {where.get(ground, 'in ' + words)}"


def _article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


_STYLED = (
    *("{}",) * 6, "a picture of {}", "a painting of {}", "a photo of {}", "an illustration of {}",
    "{}, beautiful", "a beautiful view of {}", "{}, high quality",
)  # fmt: skip


def _phrase(rng: random.Random, caption: str) -> str:
    return rng.choice(_STYLED).format(caption)


# -- objects and shapes alone ---------------------------------------------------------------------


def _background(rng: random.Random, size: tuple[int, int], colour: str) -> Image.Image:
    base = _vary(rng, COLOURS[colour], 0.03)
    if rng.random() < 0.5:
        return Image.new("RGB", size, base)
    amount = rng.uniform(0.05, 0.12)
    return _gradient(size, [(0, _mix(base, WHITE, amount)), (1, _mix(base, BLACK, amount))])


def _other_colour(rng: random.Random, *taken: str) -> str:
    clash = {"white": "gray", "gray": "white", "red": "pink", "pink": "red", "orange": "yellow",
             "yellow": "orange", "blue": "purple", "purple": "blue", "brown": "black",
             "black": "brown", "cyan": "blue"}  # fmt: skip
    barred = {*taken, *(clash.get(t, "") for t in taken)}
    return rng.choice([c for c in COLOURS if c not in barred])


_PLACES = {"": (0.5, 0.5), "on the left": (0.3, 0.5), "on the right": (0.7, 0.5)}
_LAYOUTS = {2: ((0.28, 0.5), (0.72, 0.5)), 3: ((0.5, 0.28), (0.27, 0.7), (0.73, 0.7)),
            4: ((0.28, 0.28), (0.72, 0.28), (0.28, 0.72), (0.72, 0.72))}  # fmt: skip


def alone(
    rng: random.Random, size: tuple[int, int], name: str | None = None, colour: str | None = None,
    background: str | None = None, count: int | None = None,
) -> Picture:  # fmt: skip
    """Shapes or objects on a plain ground: `name` is one of SHAPES or OBJECTS."""
    width, height = (n * OVERSAMPLE for n in size)
    name = name or rng.choice(SHAPES if rng.random() < 0.5 else tuple(OBJECTS))
    is_shape = name in SHAPES
    count = count or (rng.choices((1, 2, 3, 4), (80, 9, 6, 5))[0])
    named = colour is not None or is_shape or rng.random() < 0.5
    colour = colour or (rng.choice(list(COLOURS)) if named else rng.choice(OBJECTS[name].usual))
    said = background is not None or rng.random() < 0.8
    background = background or _other_colour(rng, colour)
    image = _background(rng, (width, height), background)
    place = rng.choices(list(_PLACES), (84, 8, 8))[0] if count == 1 else ""
    side = min(width, height)
    spots = [_PLACES[place]] if count == 1 else _LAYOUTS[count]
    big = side * (rng.uniform(0.28, 0.42) if count == 1 else rng.uniform(0.15, 0.2))
    big = min(big, side * 0.27) if place else big
    paint = _vary(rng, COLOURS[colour])
    turn = rng.uniform(-0.12, 0.12)
    shadow = rng.random() < 0.5
    for x, y in spots:
        jitter = 0.06 if count == 1 else 0.025
        centre = (
            x * width + rng.uniform(-jitter, jitter) * side,
            y * height + rng.uniform(-jitter, jitter) * side,
        )
        pen = Pen((width, height), centre, big)
        if is_shape:
            shape(pen, name, paint, turn)
        else:
            OBJECTS[name].draw(pen, paint)
        pen.paste_on(image, shadow=shadow)
    words = name if is_shape else rng.choice(OBJECTS[name].names)
    words = f"{colour} {words}" if named else words
    words = _article(words) if count == 1 else f"{NUMBERS[count]} {_plural(words)}"
    caption = f"{words} {place}".strip()
    if said:
        where = rng.choice(("on {}", "on {}", "in front of {}"))
        ground = background if rng.random() < 0.2 else f"{_article(background)} background"
        caption += f" {where.format(ground)}"
    facts = {"kind": "shape" if is_shape else "object", "name": name, "colour": colour,
             "background": background, "count": str(count)}  # fmt: skip
    return Picture(
        image=image.resize(size, Image.Resampling.BOX), caption=_phrase(rng, caption), facts=facts
    )


def _plural(words: str) -> str:
    special = {"fish": "fish", "cactus": "cacti", "butterfly": "butterflies", "cross": "crosses",
               "snowman": "snowmen", "cup of coffee": "cups of coffee",
               "ice cream": "ice creams"}  # fmt: skip
    for one, many in special.items():
        if words.endswith(one):
            return words[: -len(one)] + many
    return words + "s"


def _styled(rng: random.Random, picture: Picture) -> Picture:
    """Now and then in another style, so that style words and negative prompts do something."""
    image, caption = picture.image, picture.caption
    roll = rng.random()
    if roll < 0.03:
        image = image.convert("L").convert("RGB")
        caption = rng.choice(("{}, black and white", "a black and white picture of {}")).format(
            caption
        )
    elif roll < 0.06:
        small = (image.width // 4, image.height // 4)
        image = image.resize(small, Image.Resampling.BOX).resize(
            image.size, Image.Resampling.NEAREST
        )
        caption = rng.choice(("{}, pixel art", "pixel art of {}")).format(caption)
    elif roll < 0.1:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(2.0, 3.5)))
        caption = rng.choice(("{}, blurry", "{}, low quality", "{}, blurry, low quality")).format(
            caption
        )
    else:
        return picture
    return Picture(image=image, caption=caption, facts=picture.facts | {"style": "other"})


def draw(seed: int, size: tuple[int, int] = (128, 128)) -> Picture:
    """The picture with this number, of `size` (width, height) pixels."""
    rng = random.Random(seed)  # noqa: S311  # pictures, not secrets
    picture = landscape(rng, size) if rng.random() < 0.5 else alone(rng, size)
    return _styled(rng, picture)

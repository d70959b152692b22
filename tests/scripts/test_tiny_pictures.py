import random
import re

import numpy as np
import pytest

from scripts import tiny_pictures as drawn


def test_a_seed_decides_picture_and_caption() -> None:
    first, again, other = drawn.draw(7), drawn.draw(7), drawn.draw(8)
    assert (first.caption, first.facts) == (again.caption, again.facts)
    assert first.image.tobytes() == again.image.tobytes()
    assert first.image.tobytes() != other.image.tobytes()


@pytest.mark.parametrize("size", [(128, 128), (160, 96), (96, 160)])
def test_pictures_have_the_size_that_was_asked_for(size: tuple[int, int]) -> None:
    assert {drawn.draw(seed, size).image.size for seed in range(12)} == {size}


def test_captions_are_clean_english() -> None:
    for seed in range(400):
        caption = drawn.draw(seed).caption
        assert not re.search(r"\ba [aeio]|\ban [^aeiou]|  |[A-Z]|\ba a\b| ,", caption), caption
        assert caption == caption.strip()


@pytest.mark.parametrize("name", drawn.LANDSCAPES)
@pytest.mark.parametrize("time", drawn.TIMES)
def test_every_landscape_has_every_time_of_day(name: str, time: str) -> None:
    picture = drawn.landscape(random.Random(1), (128, 128), name, time)
    assert (picture.facts["landscape"], picture.facts["time"]) == (name, time)
    pixels = np.asarray(picture.image).astype(int)
    assert (pixels.sum(axis=2) > 0).mean() > 0.99, "a part was left unpainted"


def test_night_is_darker_than_day() -> None:
    def brightness(time: str) -> float:
        pictures = [
            drawn.landscape(random.Random(n), (128, 128), name, time)
            for n, name in enumerate(drawn.LANDSCAPES)
        ]
        return float(np.mean([np.asarray(p.image) for p in pictures]))

    assert brightness("night") < 0.5 * brightness("day")


@pytest.mark.parametrize("name", [*drawn.SHAPES, *drawn.OBJECTS])
def test_every_shape_and_object_is_drawn_in_its_colour_on_its_ground(name: str) -> None:
    picture = drawn.alone(random.Random(3), (128, 128), name, "red", "blue", 1)
    pixels = np.asarray(picture.image).astype(int)
    red = (pixels[..., 0] > 120) & (pixels[..., 1] < 110) & (pixels[..., 2] < 110)
    blue = (pixels[..., 2] > 130) & (pixels[..., 0] < 110)
    assert red.mean() > 0.005
    assert blue.mean() > 0.3


@pytest.mark.parametrize(
    ("words", "plural"),
    [
        ("red star", "red stars"), ("fish", "fish"), ("cactus", "cacti"), ("cross", "crosses"),
        ("blue butterfly", "blue butterflies"), ("snowman", "snowmen"),
    ],
)  # fmt: skip
def test_plurals(words: str, plural: str) -> None:
    assert drawn._plural(words) == plural

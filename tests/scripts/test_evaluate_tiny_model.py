import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from scripts import evaluate_tiny_model as evaluation  # noqa: E402
from scripts import tiny_pictures as drawn  # noqa: E402


def test_colours_are_read_off_drawn_pictures() -> None:
    right = asked = 0
    rng = random.Random(5)
    for _ in range(150):
        colour, background = evaluation._two_colours(rng)
        shape = rng.choice(drawn.SHAPES)
        picture = drawn.alone(rng, (128, 128), shape, colour, background, 1)
        found = evaluation.colours(picture.image)
        right += (found[0] == colour) + (found[1] == background)
        asked += 2
    assert right / asked >= 0.97


@pytest.mark.parametrize("name", drawn.COLOURS)
def test_a_named_colour_is_nearest_to_itself(name: str) -> None:
    assert evaluation._nearest(np.array(drawn.COLOURS[name], float)) == name


def test_every_class_is_asked_for_equally_often() -> None:
    asked = evaluation.prompts(random.Random(0), 40)
    for question, kinds in evaluation.CLASSES.items():
        answers = [a.facts[question] for a in asked if question in a.facts]
        if question != "count":
            assert {answers.count(kind) for kind in kinds} == {40 // len(kinds)}


def test_the_judge_learns_and_names_its_own_accuracy() -> None:
    _, accuracy = evaluation.train_judge(640, 64)
    assert set(accuracy) == set(evaluation.CLASSES)
    assert accuracy["time of day"] > 0.6, "it is far better than chance even when hardly trained"


def test_the_table_marks_chance_and_goal() -> None:
    figures = {
        "shape": {"pictures": 10, "right": 0.95, "shuffled": 0.1, "chance": 0.1, "judge": 0.99,
                  "goal": 0.9},
        "VAE PSNR": {"dB": 30.5, "goal": 29.0},
    }  # fmt: skip
    table = evaluation.table(figures)
    assert "| shape | 95.0% | 90% | 10.0% | 10.0% | 99.0% |" in table
    assert "| VAE PSNR | 30.5 dB | 29.0 dB |" in table

"""Measures how prompts steer the embedded model, and prints a table and its figures as JSON.

    python -m scripts.evaluate_tiny_model [--model FOLDER] [--pictures 120] [--json FILE]

Colours are measured on the pixels: the frame of the picture is the background, what differs from
it is the subject, and the nearest named colour counts. Shapes, objects, landscapes, times of day
and counts are judged by a small network that this script first trains on freshly drawn pictures;
its own errors on drawn pictures that it has not seen stand beside each figure. As a control every
picture is also held against another picture's prompt, which must come out at chance.
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from scripts import tiny_pictures as drawn
from sdamd import plan as planning
from sdamd.backends.backend import open_backend
from sdamd.batch import expand
from sdamd.checkpoint import identify
from sdamd.errors import SdamdError
from sdamd.request import Job, Request
from sdamd.settings import Settings

ASSETS = Path(__file__).resolve().parent.parent / "sdamd" / "assets" / "tiny"
SIDE = 64
"""Pixels per side at which the judge looks."""

CLASSES: dict[str, tuple[str, ...]] = {
    "shape": drawn.SHAPES,
    "object": tuple(drawn.OBJECTS),
    "landscape": drawn.LANDSCAPES,
    "time of day": drawn.TIMES,
    "count": ("1", "2", "3", "4"),
}
GOALS = {
    "subject colour": 0.95,
    "background colour": 0.95,
    "shape": 0.90,
    "landscape": 0.95,
    "time of day": 0.95,
    "object": 0.70,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A prompt, and what its picture is to show."""

    prompt: str
    facts: dict[str, str]


# -- what is asked --------------------------------------------------------------------------------


def prompts(rng: random.Random, pictures: int) -> list[Asked]:
    """`pictures` prompts of each kind: coloured shapes, objects, landscapes, and half of counts."""
    asked = []
    for number in range(pictures):
        shape = drawn.SHAPES[number % len(drawn.SHAPES)]
        colour, background = _two_colours(rng)
        asked.append(Asked(
            prompt=f"{_a(colour)} {shape} on {_a(background)} background",
            facts={"shape": shape, "subject colour": colour, "background colour": background},
        ))  # fmt: skip
        name = list(drawn.OBJECTS)[number % len(drawn.OBJECTS)]
        background = rng.choice(("white", "blue", "yellow", "green", "gray"))
        asked.append(Asked(
            prompt=f"{_a(drawn.OBJECTS[name].names[0])} on {_a(background)} background",
            facts={"object": name},
        ))  # fmt: skip
        place = drawn.LANDSCAPES[number % len(drawn.LANDSCAPES)]
        time = drawn.TIMES[number // len(drawn.LANDSCAPES) % len(drawn.TIMES)]
        asked.append(Asked(
            prompt=f"{PLACES[place]} {WHEN[time]}", facts={"landscape": place, "time of day": time}
        ))  # fmt: skip
        if number % 2 == 0:
            count = 2 + number // 2 % 3
            shape = rng.choice(("circle", "square", "triangle", "star", "heart"))
            colour, background = _two_colours(rng)
            words = f"{drawn.NUMBERS[count]} {colour} {shape}s on {_a(background)} background"
            asked.append(Asked(prompt=words, facts={"count": str(count)}))
    return asked


PLACES = {
    "sea": "the sea", "beach": "a beach", "lake": "a lake", "meadow": "a meadow",
    "desert": "a desert", "snow": "a snowy field", "mountains": "mountains",
    "hills": "green hills", "forest": "a forest", "city": "a city",
}  # fmt: skip
WHEN = {"day": "by day", "sunset": "at sunset", "night": "at night", "dawn": "at dawn"}


def _two_colours(rng: random.Random) -> tuple[str, str]:
    """A subject and a background that differ clearly."""
    colour = rng.choice(list(drawn.COLOURS))
    first = np.array(drawn.COLOURS[colour], float)
    far = [c for c, rgb in drawn.COLOURS.items() if np.linalg.norm(first - rgb) > 110]
    return colour, rng.choice(far)


def _a(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


# -- making the pictures --------------------------------------------------------------------------


def render(folder: Path, asked: Sequence[Asked], batch: int = 24) -> list[Image.Image]:
    """The model's pictures at its native size, by the same code as `sdamd generate`.

    Raises:
        BadImage: a picture is NaN, constant or black.
    """
    checkpoint = identify(folder)
    settings = Settings(home=Path())
    jobs: list[Job] = []
    for number, one in enumerate(asked):
        request = Request(prompt=one.prompt, seed=1000 + number, upscale=1)
        jobs += (replace(job, index=number) for job in expand(request, checkpoint.family))
    plan = planning.make_plan(jobs[0], None, checkpoint, settings, count=batch)
    pipeline = open_backend().load(checkpoint, plan)
    images: list[Image.Image] = []
    for at in range(0, len(jobs), batch):
        for image in pipeline.sample(jobs[at : at + batch], plan, lambda *_: False):
            if isinstance(image, SdamdError):
                raise image
            images.append(image)
        print(f"\r{len(images)} of {len(jobs)} pictures", end="", file=sys.stderr)
    print(file=sys.stderr)
    return images


# -- the judge ------------------------------------------------------------------------------------


class Judge(nn.Module):
    """A small network with one answer per question."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 24, 48, 96, 128)
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(),
                       nn.Conv2d(after, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(),
                       nn.MaxPool2d(2)]  # fmt: skip
        self.body = nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.2))
        inputs = widths[-1] * (SIDE // 16) ** 2
        self.heads = nn.ModuleList(nn.Linear(inputs, len(c)) for c in CLASSES.values())

    def forward(self, images: Tensor) -> list[Tensor]:
        """One tensor of scores per question, for images (n, 3, SIDE, SIDE) in 0..1."""
        seen = self.body(images)
        return [head(seen) for head in self.heads]


def _looked_at(image: Image.Image) -> NDArray[np.uint8]:
    small = image.resize((SIDE, SIDE), Image.Resampling.BOX)
    pixels: NDArray[np.uint8] = np.asarray(small).transpose(2, 0, 1)
    return pixels


def _drawn(seed: int) -> tuple[NDArray[np.uint8], list[int]]:
    """A drawn picture and its answers; -1 where the question does not arise."""
    picture = drawn.draw(seed)
    facts = picture.facts
    named = {
        "shape": facts["name"] if facts["kind"] == "shape" and facts["count"] == "1" else "",
        "object": facts["name"] if facts["kind"] == "object" and facts["count"] == "1" else "",
        "landscape": facts.get("landscape", ""),
        "time of day": facts.get("time", ""),
        "count": facts.get("count", ""),
    }
    answers = [
        CLASSES[question].index(answer) if answer else -1 for question, answer in named.items()
    ]
    return _looked_at(picture.image), answers


def train_judge(pictures: int, held_out: int) -> tuple[Judge, dict[str, float]]:
    """Train on drawn pictures; returns the judge and its accuracy on `held_out` others."""
    torch.manual_seed(0)
    made = [_drawn(500_000_000 + n) for n in range(pictures + held_out)]
    images = torch.from_numpy(np.stack([m[0] for m in made])).float() / 255
    answers = torch.tensor([m[1] for m in made])
    judge, batch, epochs = Judge(), 64, 8
    steps = epochs * (pictures // batch)
    optimiser = torch.optim.AdamW(judge.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=4e-3, total_steps=steps)
    for step in range(steps):
        rows = torch.randint(0, pictures, (batch,))
        scores = judge(_disturbed(images[rows]))
        right = zip(scores, answers[rows].T, strict=True)
        loss = torch.stack(
            [F.cross_entropy(s, a, ignore_index=-1) for s, a in right if (a >= 0).any()]
        )
        optimiser.zero_grad()
        loss.sum().backward()  # type: ignore[no-untyped-call]  # torch types its engine, not this
        optimiser.step()
        schedule.step()
        if step % 50 == 0:
            print(f"\rjudge: step {step} of {steps}", end="", file=sys.stderr)
    print(file=sys.stderr)
    judge.eval()
    seen = answers[pictures:]
    given = answer(judge, images[pictures:])
    accuracy = {}
    for number, question in enumerate(CLASSES):
        asked = seen[:, number] >= 0
        accuracy[question] = float((given[asked, number] == seen[asked, number]).float().mean())
    return judge, accuracy


def _disturbed(images: Tensor) -> Tensor:
    """Softer, noisier and shifted, since an autoencoder's edges are not those of a drawing."""
    if random.random() < 0.5:  # noqa: S311  # no secret
        soft = F.avg_pool2d(images, 3, stride=1, padding=1, count_include_pad=False)
        images = images.lerp(soft, random.random())  # noqa: S311
    shift = (random.randint(-4, 4), random.randint(-4, 4))  # noqa: S311
    return images.roll(shift, dims=(2, 3)) + 0.03 * torch.randn_like(images)


@torch.inference_mode()
def answer(judge: Judge, images: Tensor) -> Tensor:
    """The likeliest answers, (n, questions)."""
    return torch.stack([s.argmax(1) for s in judge(images)], dim=1)


# -- colours --------------------------------------------------------------------------------------


def colours(image: Image.Image) -> tuple[str, str]:
    """The named colours of subject and background."""
    pixels = np.asarray(image).astype(float)
    edge = 6
    frame = np.concatenate([
        pixels[:edge].reshape(-1, 3), pixels[-edge:].reshape(-1, 3),
        pixels[:, :edge].reshape(-1, 3), pixels[:, -edge:].reshape(-1, 3),
    ])  # fmt: skip
    background = np.median(frame, axis=0)
    distance = np.linalg.norm(pixels - background, axis=-1)
    subject = pixels[distance > max(40.0, 0.6 * distance.max())]
    return _nearest(np.median(subject, axis=0) if len(subject) else background), _nearest(
        background
    )


def _nearest(rgb: NDArray[np.float64]) -> str:
    """The named colour that is nearest in CIE Lab, where distances are about as people see them."""
    return min(
        drawn.COLOURS,
        key=lambda c: float(np.linalg.norm(_lab(rgb) - _lab(np.array(drawn.COLOURS[c], float)))),
    )


def _lab(rgb: NDArray[np.float64]) -> NDArray[np.float64]:
    """SRGB 0..255 to CIE Lab under D65. Source: IEC 61966-2-1 and CIE 15."""
    c = rgb / 255
    linear = np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
    matrix = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    xyz = matrix @ linear / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


# -- results --------------------------------------------------------------------------------------


@torch.inference_mode()
def vae_psnr(folder: Path, pictures: int = 48) -> float:
    """Mean PSNR in dB of drawn pictures that were put through the autoencoder."""
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL  # noqa: PLC0415  # slow

    vae = AutoencoderKL.from_config(AutoencoderKL.load_config(folder, subfolder="vae"))
    vae.load_state_dict(load_file(folder / "vae" / "diffusion_pytorch_model.safetensors"))
    vae.float().eval()
    found = []
    for seed in range(600_000_000, 600_000_000 + pictures):
        pixels = torch.from_numpy(np.array(drawn.draw(seed).image)).permute(2, 0, 1)[None]
        image = pixels.float().div(127.5).sub(1)
        made = vae.decode(vae.encode(image).latent_dist.mean).sample.clamp(-1, 1)
        found.append(float(-10 * ((made - image) / 2).square().mean().log10()))
    return sum(found) / len(found)


def evaluate(folder: Path, pictures: int, sheet: Path | None) -> dict[str, Any]:
    """All figures: share right, share right under another prompt, chance, the judge's own."""
    rng = random.Random(2)  # noqa: S311  # no secret
    asked = prompts(rng, pictures)
    judge, own = train_judge(9_000, 1_000)
    images = render(folder, asked)
    if sheet:
        _sheet(images[:70]).save(sheet)
    given = answer(judge, torch.from_numpy(np.stack([_looked_at(i) for i in images])).float() / 255)
    found: list[dict[str, str]] = []
    for image, row in zip(images, given.tolist(), strict=True):
        answers = {q: CLASSES[q][n] for q, n in zip(CLASSES, row, strict=True)}
        subject, background = colours(image)
        found.append(answers | {"subject colour": subject, "background colour": background})
    figures: dict[str, Any] = {}
    for question in ("subject colour", "background colour", *CLASSES):
        rows = [i for i, a in enumerate(asked) if question in a.facts]
        wanted = [asked[i].facts[question] for i in rows]
        shuffled = rng.sample(wanted, len(wanted))
        kinds = len(set(wanted))
        figures[question] = {
            "pictures": len(rows),
            "right": _share([found[i][question] for i in rows], wanted),
            "shuffled": _share([found[i][question] for i in rows], shuffled),
            "chance": round(1 / kinds, 3),
            "judge": round(own[question], 3) if question in own else None,
            "goal": GOALS.get(question),
        }
    figures["VAE PSNR"] = {"dB": round(vae_psnr(folder), 2), "goal": 29.0}
    return figures


def _share(given: Sequence[str], wanted: Sequence[str]) -> float:
    return round(sum(g == w for g, w in zip(given, wanted, strict=True)) / len(wanted), 3)


def _sheet(images: Sequence[Image.Image], columns: int = 14) -> Image.Image:
    side = images[0].width
    sheet = Image.new("RGB", (columns * side, -(-len(images) // columns) * side))
    for number, image in enumerate(images):
        sheet.paste(image, (number % columns * side, number // columns * side))
    return sheet


def table(figures: dict[str, Any]) -> str:
    """The figures as Markdown."""
    lines = ["| asked for | right | goal | another prompt | chance | the judge on drawn pictures |",
             "| --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for name, f in figures.items():
        if "dB" in f:
            lines.append(f"| {name} | {f['dB']} dB | {f['goal']} dB | | | |")
            continue
        goal = "" if f["goal"] is None else f"{f['goal']:.0%}"
        judge = "pixels" if f["judge"] is None else f"{f['judge']:.1%}"
        cells = (
            name,
            f"{f['right']:.1%}",
            goal,
            f"{f['shuffled']:.1%}",
            f"{f['chance']:.1%}",
            judge,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Print the table; status 1 if a goal is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=ASSETS)
    parser.add_argument("--pictures", type=int, default=120, help="of each kind")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--sheet", type=Path, help="write a contact sheet here")
    asked = parser.parse_args()
    figures = evaluate(asked.model, asked.pictures, asked.sheet)
    print(table(figures))
    if asked.json:
        asked.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    missed = [
        name for name, f in figures.items()
        if f["goal"] is not None and f.get("right", f.get("dB")) < f["goal"]
    ]  # fmt: skip
    if missed:
        print(f"below the goal: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Measures sdamd against plain diffusers, as ratios of whole processes in the same run.

    python -m scripts.bench batch      16 pictures of the embedded model, saved as PNG
    python -m scripts.bench startup    what a person waits for before anything happens
    python -m scripts.bench attention  one layer of SD 1.5: fused, in blocks, in slices
    python -m scripts.bench memory     SD 1.5 at its real size: what is resident, and how long

Figures are only for comparing within one run: machines are noisy, so the two sides take turns.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median

from scripts.bench_memory import memory

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "sdamd" / "assets" / "tiny"
PROMPT = "mountains by the sea at sunset"

PLAIN = """
import sys
import torch
from diffusers import DPMSolverMultistepScheduler, StableDiffusionPipeline

model, folder, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
pipe = StableDiffusionPipeline.from_pretrained(model, safety_checker=None, dtype=torch.float32)
pipe.scheduler = DPMSolverMultistepScheduler.from_config(pipe.scheduler.config)
pipe.set_progress_bar_config(disable=True)
for seed in range(count):
    image = pipe(
        sys.argv[4], num_inference_steps=20, guidance_scale=4.0, width=128, height=128,
        generator=torch.Generator().manual_seed(seed),
    ).images[0]
    image.save(f"{folder}/{seed}.png")
"""
"""What a person writes who follows the documentation of diffusers."""

PLAIN_TOGETHER = PLAIN.replace("for seed in range(count):", "for _ in range(1):").replace(
    "sys.argv[4], num", "[sys.argv[4]] * count, num"
).replace(
    "generator=torch.Generator().manual_seed(seed),",
    "generator=[torch.Generator().manual_seed(seed) for seed in range(count)],",
).replace(
    ".images[0]\n    image.save(f\"{folder}/{seed}.png\")",
    ".images\n    for seed, one in enumerate(image):\n        one.save(f\"{folder}/{seed}.png\")",
)  # fmt: skip
"""The same with all pictures in one pass."""


def timed(command: Sequence[str], *, expect: int) -> tuple[float, float]:
    """Wall and CPU seconds of a process tree that makes `expect` pictures in its last argument.

    Raises:
        SystemExit: it failed, or made another number of pictures.
    """
    before, began = os.times(), time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    wall, after = time.perf_counter() - began, os.times()
    if done.returncode:
        sys.exit(f"{' '.join(command[:4])} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    if expect:
        made = len(list(Path(command[-1]).rglob("*.png")))
        if made != expect:
            sys.exit(f"{made} pictures instead of {expect} from {' '.join(command[:4])}")
    used = after.children_user + after.children_system
    return wall, used - before.children_user - before.children_system


def batch(count: int, rounds: int) -> dict[str, object]:
    """`count` pictures of the embedded model at its native size, 20 steps, each saved as PNG."""
    sides: dict[str, list[tuple[float, float]]] = {}
    for number in range(rounds):
        commands = {
            "sdamd": [
                sys.executable, "-m", "sdamd", "generate", PROMPT, "--upscale", "1", "--seed", "0",
                "--count", str(count), "--output",
            ],
            "plain diffusers": [sys.executable, "-c", PLAIN],
            "plain diffusers, one pass": [sys.executable, "-c", PLAIN_TOGETHER],
        }  # fmt: skip
        names = list(commands)
        for name in names[number % 3 :] + names[: number % 3]:
            with tempfile.TemporaryDirectory() as folder:
                if name == "sdamd":
                    command = [*commands[name], folder]
                else:
                    Path(folder, "out").mkdir()
                    out = str(Path(folder, "out"))
                    command = [*commands[name], str(MODEL), out, str(count), PROMPT]
                    command = [*command, out]
                sides.setdefault(name, []).append(timed(command, expect=count))
    return {"what": f"{count} pictures, 128 px, 20 steps", **_ratios(sides, "sdamd")}


def startup(rounds: int) -> dict[str, object]:
    """Commands that must answer at once, against Python's own start."""
    sdamd = [sys.executable, "-m", "sdamd"]
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "sdamd --help": [*sdamd, "--help"],
        "sdamd plan": [*sdamd, "plan", "--family", "sdxl", "--gpu", "RX 7800 XT"],
        "sdamd doctor": [*sdamd, "doctor", "--root", "tests/data/machines/rx7900xtx"],
    }  # fmt: skip
    sides: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for name, command in commands.items():
            sides.setdefault(name, []).append(timed(command, expect=0))
    return {"what": "start-up", **_ratios(sides, "python -c pass")}


def attention(rounds: int) -> dict[str, object]:
    """One self-attention of SD 1.5 at 512 pixels with guidance, as modules of diffusers.

    `peak_bytes` is what torch's allocator held at once, beyond what there was before. Slices are
    those of `enable_attention_slicing("max")`; the first blocks may take as much memory, of which
    they use what a CPU's caches hold.
    """
    # Here, so that the other measurements start without it.
    import torch  # noqa: PLC0415
    from diffusers.models.attention_processor import (  # noqa: PLC0415
        Attention,
        AttnProcessor2_0,
        SlicedAttnProcessor,
    )

    from sdamd.backends.attention import Processor, chunked  # noqa: PLC0415

    def blocks(block_bytes: int) -> Processor:
        return Processor(partial(chunked, block_bytes=block_bytes))

    torch.manual_seed(0)
    layer = Attention(query_dim=320, heads=8, dim_head=40).eval()
    tokens = torch.randn(2, 64 * 64, 320)
    scores = 64**4 * 4  # of one head
    ways = {
        "fused": AttnProcessor2_0(),
        "slices (max)": SlicedAttnProcessor(1),
        "blocks, as much as slices": blocks(2 * scores),
        "blocks of 4 MiB": blocks(2**22),
        "blocks of 1 MiB": blocks(2**20),
    }

    def run(processor: object) -> object:
        layer.set_processor(processor)
        with torch.inference_mode():
            return layer(tokens)

    sides: dict[str, list[tuple[float, float]]] = {}
    for number in range(rounds):
        names = list(ways)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            wall, used = time.perf_counter(), time.process_time()
            run(ways[name])
            sides.setdefault(name, []).append(
                (time.perf_counter() - wall, time.process_time() - used)
            )
    figures = _ratios(sides, "slices (max)")
    for name, processor in ways.items():
        figure = figures[name]
        assert isinstance(figure, dict)
        figure["peak_bytes"] = peak_bytes(partial(run, processor))
    return {"what": "2 x 4096 tokens, 8 heads of 40, float32", **figures}


def both_memories(rounds: int, steps: int, model: Path | None) -> dict[str, object]:
    """What is resident in RAM on this machine, and what cards hold as the accountant counts it."""
    from scripts.measure_vram import figures  # noqa: PLC0415  # torch, on a fake GPU

    on_cards = [
        {
            key: round(value / 2**30, 2) if isinstance(value, int) and key != "side" else value
            for key, value in asdict(figure).items()
        }
        for figure in figures()
    ]
    return {**memory(rounds, steps, model), "on cards, GiB in float16": on_cards}


def peak_bytes(run: Callable[[], object]) -> int:
    """The most that torch's CPU allocator held while `run` ran, beyond what it held before.

    Counts the allocator's own events, so what a kernel takes for itself is in it.
    """
    from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        kept = run()
    assert kept is not None
    held = peak = 0
    events = recorded.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def _ratios(sides: dict[str, list[tuple[float, float]]], of: str) -> dict[str, object]:
    """Median seconds of each side, and how many times its wall time `of` took in the same round."""
    shown: dict[str, object] = {}
    for name, runs in sides.items():
        ratios = [base[0] / run[0] for run, base in zip(runs, sides[of], strict=True)]
        shown[name] = {
            "wall_seconds": round(median(r[0] for r in runs), 3),
            "cpu_seconds": round(median(r[1] for r in runs), 3),
            f"{of}_takes": round(median(ratios), 3),
            "spread": [round(min(ratios), 3), round(max(ratios), 3)],
        }
    return shown


def main() -> None:
    """Run one measurement and print it as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("batch", "startup", "attention", "memory"))
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="of memory")
    parser.add_argument("--model", type=Path, help="of memory: where its weights are kept")
    asked = parser.parse_args()
    measure: Mapping[str, Callable[[], dict[str, object]]] = {
        "batch": partial(batch, asked.count, asked.rounds),
        "startup": partial(startup, asked.rounds),
        "attention": partial(attention, asked.rounds),
        "memory": partial(both_memories, asked.rounds, asked.steps, asked.model),
    }
    figures = measure[asked.what]()
    machine = {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "system": platform.system(),
    }
    print(json.dumps(figures | {"machine": machine}, indent=2))


if __name__ == "__main__":
    main()

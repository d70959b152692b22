"""Measures how long reading the records of many pictures takes.

    python -m scripts.bench_metadata            10 000 PNGs, of all tools in turn
    python -m scripts.bench_metadata --count N

The pictures are small ones with the records of the tests' corpus and of sdamd itself. What is
timed is `gallery.read`: the file, its texts, and the fields of a request.
"""

import argparse
import json
import platform
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from sdamd import gallery
from sdamd.metadata import Record, to_json, to_parameters
from sdamd.request import Job

CORPUS = Path(__file__).resolve().parent.parent / "tests" / "data" / "interchange"
SIDE = 64


def records() -> Iterator[dict[str, str]]:
    """The texts of sdamd's own record, and of each record of the corpus that PNGs have."""
    job = Job(
        index=0, prompt="a red house", negative_prompt="fog", checkpoint="", width=SIDE,
        height=SIDE, steps=20, guidance_scale=4.0, scheduler="Euler", seed=7, upscale=1,
    )  # fmt: skip
    record = Record(job=job, version="0", checkpoint_name="embedded")
    yield {"parameters": to_parameters(record), "sdamd": to_json(record)}
    for path in sorted(CORPUS.glob("*.toml")):
        for found in tomllib.loads(path.read_text("utf-8"))["record"]:
            if found["container"] in {"png tEXt", "png iTXt", "png zTXt"}:
                yield found["texts"]


def measure(count: int) -> dict[str, object]:
    """Write `count` pictures, read each once, and say how long the reading took."""
    image = Image.linear_gradient("L").resize((SIDE, SIDE)).convert("RGB")
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for number, texts in enumerate(islice(cycle(records()), count)):
            info = PngInfo()
            for key, text in texts.items():
                info.add_text(key, text)
            path = Path(folder) / f"{number:05d}.png"
            image.save(path, pnginfo=info)
            paths.append(path)
        start, cpu = time.perf_counter(), time.process_time()
        tools = [gallery.read(path).tool for path in paths]
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    return {
        "pictures": len(tools),
        "tools": len(set(tools)),
        "seconds": round(wall, 2),
        "cpu_seconds": round(cpu, 2),
        "python": platform.python_version(),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=10_000)
    print(json.dumps(measure(parser.parse_args(argv).count)))


if __name__ == "__main__":
    main()

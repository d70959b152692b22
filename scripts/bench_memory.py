"""SD 1.5 at its real size on the CPU: what sdamd holds in RAM and how long it takes.

Both sides are processes of their own, which take turns, on the same random weights, in the same
dtype, at 512 x 512 with guidance. What counts is the most memory that a process ever had resident
(VmHWM, which Linux alone tells), whatever libraries and files it is made of.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Final

ROOT = Path(__file__).resolve().parent.parent
PROMPT: Final = "a house by the sea"

WAYS: Final[Mapping[str, Mapping[str, object]]] = {
    "as planned": {},
    "streamed": {"offload": "stream", "vae_bands": 32},
    "minimal": {"vram_mode": "minimal"},
}
"""Settings of sdamd's side: all of it in RAM; layers read as they are called and the VAE in bands,
which is exact; and as little as there is, with tiles that take more computing."""

END: Final = """
import re
status = open("/proc/self/status").read()
print(json.dumps({"peak_bytes": int(re.search(r"VmHWM:\\s*(\\d+) kB", status)[1]) * 1024,
                  "seconds": seconds, "cpu_seconds": time.process_time()}))
"""

PLAIN: Final = (
    """
import json, sys, time
began = time.perf_counter()
import torch
from diffusers import DPMSolverMultistepScheduler, StableDiffusionPipeline

pipe = StableDiffusionPipeline.from_pretrained(
    sys.argv[1], safety_checker=None, dtype=torch.float32, use_safetensors=True,
)
pipe.scheduler = DPMSolverMultistepScheduler.from_config(pipe.scheduler.config)
pipe.set_progress_bar_config(disable=True)
pipe(
    sys.argv[2], num_inference_steps=int(sys.argv[3]), guidance_scale=7.5, width=512, height=512,
    generator=torch.Generator().manual_seed(0),
)
seconds = time.perf_counter() - began
"""
    + END
)
"""What a person writes who follows the documentation of diffusers."""

SDAMD: Final = (
    """
import json, sys, time
began = time.perf_counter()
from pathlib import Path
from sdamd import batch
from sdamd.backends.backend import open_backend
from sdamd.checkpoint import identify
from sdamd.plan import make_plan
from sdamd.request import Request
from scripts.bench_memory import WAYS
from sdamd.settings import Settings

checkpoint = identify(Path(sys.argv[1]))
request = Request(
    checkpoint=sys.argv[1], prompt=sys.argv[2], steps=int(sys.argv[3]), guidance_scale=7.5,
    width=512, height=512, seed=0, upscale=1,
)
(job,) = batch.expand(request, checkpoint.family)
home = Path(sys.argv[1])
settings = Settings(home=home, output=home, dtype="float32", **WAYS[sys.argv[4]])
plan = make_plan(job, None, checkpoint, settings)
pipeline = open_backend().load(checkpoint, plan)
pipeline.sample([job], plan, lambda *_: False)
seconds = time.perf_counter() - began
"""
    + END
)


def make_model(folder: Path) -> None:
    """Write SD 1.5 with random weights in float32 as a folder of diffusers: 4.3 GB."""
    import torch  # noqa: PLC0415  # seconds
    from accelerate import init_empty_weights  # noqa: PLC0415
    from diffusers import (  # noqa: PLC0415
        AutoencoderKL,
        EulerDiscreteScheduler,
        StableDiffusionPipeline,
        UNet2DConditionModel,
    )
    from transformers import CLIPTextConfig, CLIPTextModel  # noqa: PLC0415

    from sdamd.backends.loading import clip_tokenizer  # noqa: PLC0415

    configs = ROOT / "sdamd" / "assets" / "configs" / "sd15"

    def config(name: str) -> dict[str, object]:
        read: dict[str, object] = json.loads((configs / name / "config.json").read_text("utf-8"))
        return read

    drawn = torch.Generator().manual_seed(0)
    with init_empty_weights(include_buffers=False):
        parts = {
            "unet": UNet2DConditionModel.from_config(config("unet")),
            "vae": AutoencoderKL.from_config(config("vae")),
            "text_encoder": CLIPTextModel(CLIPTextConfig(**config("text_encoder"))),
        }
    for part in parts.values():
        weights = {
            # As wide as keeps numbers about one through the layers; norms leave them as they are.
            name: torch.randn(weight.shape, generator=drawn) * weight[0].numel() ** -0.5
            if weight.ndim > 1
            else torch.full(weight.shape, float("norm" in name and name.endswith("weight")))
            for name, weight in part.named_parameters()
        }
        part.load_state_dict(weights, strict=False, assign=True)
    schedule = json.loads((configs / "scheduler" / "scheduler_config.json").read_text("utf-8"))
    pipe = StableDiffusionPipeline(
        **parts,
        tokenizer=clip_tokenizer("<|endoftext|>"),
        scheduler=EulerDiscreteScheduler.from_config(schedule),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.save_pretrained(folder)


def memory(
    rounds: int, steps: int, model: Path | None = None, ways: Sequence[str] = ("streamed",)
) -> dict[str, object]:
    """Peaks and times of both sides, which take turns, and sdamd's share of plain diffusers'."""
    with tempfile.TemporaryDirectory() as made:
        folder = model or Path(made) / "sd15"
        if not (folder / "model_index.json").exists():
            make_model(folder)
        scripts = {"plain diffusers": PLAIN} | {f"sdamd, {way}": SDAMD for way in ways}
        sides: dict[str, list[dict[str, float]]] = {name: [] for name in scripts}
        for number in range(rounds):
            names = list(scripts)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                given = [str(folder), PROMPT, str(steps), name.removeprefix("sdamd, ")]
                sides[name].append(_run([sys.executable, "-c", scripts[name], *given]))
    return {"what": f"SD 1.5, 512 px, {steps} steps, float32, CPU", **_shares(sides)}


def _run(command: Sequence[str]) -> dict[str, float]:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"it ended with {done.returncode}:\n{done.stderr[-2000:]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _shares(sides: dict[str, list[dict[str, float]]]) -> dict[str, object]:
    """Of each side the medians, and of its rounds the median ratio to plain diffusers' in them."""
    plain = sides["plain diffusers"]
    shown: dict[str, object] = {}
    for name, runs in sides.items():
        pairs = list(zip(runs, plain, strict=True))
        shown[name] = {
            "peak_gib": round(median(run["peak_bytes"] for run in runs) / 2**30, 3),
            "seconds": round(median(run["seconds"] for run in runs), 1),
            "peak_of_plain": round(median(a["peak_bytes"] / b["peak_bytes"] for a, b in pairs), 3),
            "time_of_plain": round(median(a["seconds"] / b["seconds"] for a, b in pairs), 3),
            "cpu_time_of_plain": round(
                median(a["cpu_seconds"] / b["cpu_seconds"] for a, b in pairs), 3
            ),
        }
    return shown

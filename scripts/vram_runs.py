"""A whole run on a GPU that is not there: every allocation, from the weights to the picture.

The pipeline is diffusers' own, sampled and decoded by sdamd's own code under a real plan; only the
scheduler is a stand-in, since it looks at numbers and there are none. `run_of` gives the trace, of
which `scripts.allocator_replay` says on which cards it fits, and the peak of each stage.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Final

import torch

from scripts import architectures
from scripts.allocator_replay import Event
from scripts.fake_gpu import (
    DEVICE,
    RDNA2,
    RDNA3,
    Attention,
    Convolution,
    FakeGpu,
    Peak,
    Workspace,
    aside,
    im2col,
    miopen,
)
from sdamd.checkpoint.family import FAMILIES
from sdamd.plan import Plan
from sdamd.request import Job

GIB: Final = 2**30
STEPS: Final = 2
"""The second step takes what the first one took, with what the first one left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What a run allocates: `events` for the allocator, and the peak of each stage.

    `stages` are `load`, `text`, `denoise` and `decode`.
    """

    events: tuple[Event, ...]
    stages: dict[str, Peak] = field(hash=False)

    @property
    def tensors(self) -> int:
        """The highest of all stages, in bytes."""
        return max(peak.tensors for peak in self.stages.values())

    @property
    def bytes(self) -> int:
        """The same with the workspace of convolutions."""
        return max(self.of(stage) for stage in self.stages)

    def of(self, stage: str) -> int:
        """The peak of one stage, workspace included."""
        peak = self.stages[stage]
        return max(peak.tensors, peak.workspace[ROCM])


ROCM: Final = "rocm"


def rocm(card_bytes: int) -> Workspace:
    """MIOpen's workspace where it is on, and torch's own columns where it was switched off."""
    search = miopen(card_bytes)

    def workspace(convolution: Convolution) -> int:
        return (search if torch.backends.cudnn.enabled else im2col)(convolution)

    return workspace


class Watcher:
    """Divides a run into stages."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self.stages: dict[str, Peak] = {}
        self._now = ""

    def begin(self, stage: str) -> None:
        """End the stage before; a stage that comes again goes on."""
        if stage == self._now:
            return
        self.end()
        self._now = stage
        self._gpu.ledger.mark(stage)
        if stage in self.stages:
            self._gpu.ledger.resume(self.stages[stage])
        else:
            self.stages[stage] = self._gpu.ledger.watch()

    def end(self) -> None:
        """End the last one."""
        if self._now:
            self._gpu.ledger.unwatch(self.stages[self._now])
        self._now = ""

    def trace(self) -> Trace:
        """End the last one, and give all of it."""
        self.end()
        return Trace(events=tuple(self._gpu.ledger.trace), stages=self.stages)

    def on_calls(self, pipe: Any) -> None:
        """Begin the stages of a pipeline when its networks are called, as a guard would."""
        for name, stage, method in _CALLS:
            if getattr(pipe, name, None) is not None:
                self._on_call(getattr(pipe, name), stage, method)

    def _on_call(self, model: Any, stage: str, method: str) -> None:
        inner = getattr(model, method)

        def watched(*given: Any, **options: Any) -> Any:
            self.begin(stage)
            return inner(*given, **options)

        vars(model)[method] = watched


_CALLS: Final = (
    ("text_encoder", "text", "forward"),
    ("text_encoder_2", "text", "forward"),
    ("unet", "denoise", "forward"),
    ("vae", "decode", "decode"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDisk:
    """The source of a weight that is read whenever it is wanted."""

    shape: torch.Size
    dtype: torch.dtype

    def read(self, *, alone: bool = False) -> torch.Tensor:  # noqa: ARG002  # both are the same here
        """The weight, in RAM."""
        return torch.empty(self.shape, dtype=self.dtype)


class StandInScheduler:
    """Costs what a scheduler costs, and asks nothing of the latents."""

    init_noise_sigma = 1.0
    order = 1
    config = SimpleNamespace(get=lambda *_: None)

    def __init__(self) -> None:
        self.timesteps: Sequence[torch.Tensor] = ()

    def set_timesteps(self, count: int, device: Any = None) -> None:  # noqa: ARG002  # theirs
        """As many as there are steps."""
        self.timesteps = [torch.empty((), dtype=torch.int64, device=DEVICE) for _ in range(count)]

    def scale_model_input(self, sample: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        """The sample, divided as Euler does."""
        return sample / 2.0

    def step(
        self, said: torch.Tensor, _: torch.Tensor, sample: torch.Tensor, **__: Any
    ) -> tuple[torch.Tensor]:
        """One step of a solver in float32, as sdamd's are."""
        wide = sample.float()
        return ((wide + (wide - said.float()) * 0.5).to(said.dtype),)


def _component(family: str, name: str, dtype: torch.dtype) -> Any:
    """A network whose weights are away, and whose equal layers are computed once."""
    from diffusers.models.transformers.transformer_2d import Transformer2DModel  # noqa: PLC0415

    from sdamd.backends.placement import attach  # noqa: PLC0415  # seconds

    with aside():
        model = architectures.build(family, name)
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                kind = dtype if buffer.is_floating_point() else buffer.dtype
                module._buffers[key] = torch.empty(buffer.shape, dtype=kind)
        if isinstance(module, Transformer2DModel):
            for block in module.transformer_blocks[1:]:
                block.forward = _unchanged
    sources = {key: OnDisk(shape=p.shape, dtype=dtype) for key, p in model.named_parameters()}
    attach(model, sources, DEVICE, dtype)
    return model


def _unchanged(hidden: torch.Tensor, **_: Any) -> torch.Tensor:
    """In the place of a layer like the one before it."""
    return hidden


def pipeline(family: str, dtype: str, vae_dtype: str) -> Any:
    """The pipeline of diffusers on the fake GPU, with all weights away; only inside a `FakeGpu`."""
    from diffusers import (  # noqa: PLC0415  # seconds
        EulerDiscreteScheduler,
        StableDiffusionPipeline,
        StableDiffusionXLPipeline,
    )

    from sdamd.backends.loading import clip_tokenizer  # noqa: PLC0415

    known = FAMILIES[family]
    parts: dict[str, Any] = {}
    for name in architectures.components_of(known.config):
        if name != "controlnet":
            kind = vae_dtype if name == "vae" else dtype
            parts[name] = _component(known.config, name, getattr(torch, kind))
    with aside():
        for name, pad in zip(("tokenizer", "tokenizer_2"), known.pad_tokens, strict=False):
            parts[name] = clip_tokenizer(pad)
        parts["scheduler"] = EulerDiscreteScheduler(steps_offset=1)
    if known.pipeline == "StableDiffusionXLPipeline":
        made = StableDiffusionXLPipeline(**parts, add_watermarker=False)
    else:
        made = StableDiffusionPipeline(
            **parts, safety_checker=None, feature_extractor=None, requires_safety_checker=False
        )
    made.set_progress_bar_config(disable=True)
    return made


def run_of(
    plan: Plan, job: Job, family: str,
    *, card_bytes: int = 16 * GIB, attention: Attention | None = None,
) -> Trace:  # fmt: skip
    """Run jobs like `job`, as many at once as the plan says, under the plan.

    Args:
        plan: its `budget_bytes` is not heeded: the trace says what the run takes.
        job: two steps of it are run.
        family: of `sdamd.checkpoint.family`.
        card_bytes: for MIOpen's limit.
        attention: which kernels the card has; None is what the plan takes for granted.
    """
    from sdamd.backends import means  # noqa: PLC0415  # seconds

    if attention is None:
        attention = RDNA3 if plan.attention == "fused" else RDNA2
    with FakeGpu(attention, {ROCM: rocm(card_bytes)}, traced=ROCM) as gpu:
        watcher = Watcher(gpu)
        watcher.begin("load")
        pipe = pipeline(family, plan.dtype, plan.vae_dtype)
        _spare(pipe.vae.decoder, _decoded)
        means.apply(pipe, plan, DEVICE)
        _spare(pipe.unet, lambda sample: (torch.empty_like(sample),))
        watcher.on_calls(pipe)
        _sample(pipe, plan, job)
        return watcher.trace()


def plain_run_of(
    job: Job, family: str, attention: Attention, *, card_bytes: int = 16 * GIB,
    dtype: str = "float16",
) -> Trace:  # fmt: skip
    """Run a job as diffusers alone does: all weights on the device, nothing spared.

    The VAE of SDXL is made wider for the decoding, as diffusers does where its config says so.
    """
    from sdamd.backends.placement import Way, placement_of  # noqa: PLC0415  # seconds

    with FakeGpu(attention, {ROCM: rocm(card_bytes)}, traced=ROCM) as gpu:
        watcher = Watcher(gpu)
        watcher.begin("load")
        pipe = pipeline(family, dtype, dtype)
        for model in (m for m in pipe.components.values() if isinstance(m, torch.nn.Module)):
            placement_of(model).settle(Way(offload="none", device=DEVICE))
        watcher.on_calls(pipe)
        pipe.scheduler = StandInScheduler()
        shape = (1, 4, job.height // 8, job.width // 8)
        pipe(
            prompt=job.prompt, negative_prompt=job.negative_prompt, width=job.width,
            height=job.height, num_inference_steps=STEPS, guidance_scale=job.guidance_scale,
            latents=torch.empty(shape, dtype=getattr(torch, dtype)), output_type="pt",
        )  # fmt: skip
        return watcher.trace()


COMPUTED: Final = 3
"""How often a network is computed at one size; what comes after takes what these took."""


def _spare(model: Any, made: Callable[[torch.Tensor], Any]) -> None:
    """Let the calls of one shape after the first few give `made` at once: tiles are many."""
    inner = model.forward
    calls: Counter[tuple[int, ...]] = Counter()

    def forward(sample: torch.Tensor, *given: Any, **options: Any) -> Any:
        calls[tuple(sample.shape)] += 1
        if calls[tuple(sample.shape)] > COMPUTED:
            return made(sample)
        return inner(sample, *given, **options)

    vars(model)["forward"] = forward


def _decoded(latents: torch.Tensor) -> torch.Tensor:
    """Pixels as large as those of some latents."""
    rows, _, height, width = latents.shape
    return latents.new_empty((rows, 3, height * 8, width * 8))


def _sample(pipe: Any, plan: Plan, job: Job) -> None:
    """What `sdamd.sampling.sample` does with a job from text."""
    from sdamd.sampling import noise, sample  # noqa: PLC0415  # seconds
    from sdamd.sampling.denoise import Run  # noqa: PLC0415

    few = replace(job, steps=STEPS)
    jobs = [replace(few, index=number, seed=job.seed + number) for number in range(plan.batch)]
    tile = plan.denoise_tile if job.denoise_tile is None else job.denoise_tile
    run = Run(
        pipe=pipe, jobs=jobs, scheduler=StandInScheduler(),
        generators=noise.generators([each.seed for each in jobs]), told=lambda: False,
        tile=tile // 8,
    )  # fmt: skip
    with torch.inference_mode():
        latents = run(torch.empty(plan.batch, 4, job.height // 8, job.width // 8))
        sample.decode(pipe.vae, latents, plan)

"""The engine on ONNX Runtime: DirectML on Windows, and the same graphs on its CPU provider.

UNet and VAE are onnxruntime's; text encoders, schedulers, tiles and upscaling stay in torch on
the CPU, in float32.
"""

import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel

from sdamd import vram
from sdamd.backends import onnx_export, onnx_lora
from sdamd.backends.backend import Made, Watch
from sdamd.backends.device_memory import HostMemory
from sdamd.backends.loading import load_components, load_weights, read_config, weight_files
from sdamd.backends.onnx_lora import Lora
from sdamd.backends.onnx_modules import OrtUNet, full_config, ort_vae
from sdamd.backends.onnx_session import Sessions, Turn, require
from sdamd.backends.torch_backend import TorchPipeline, silence
from sdamd.checkpoint import Checkpoint
from sdamd.errors import HardwareError
from sdamd.plan import Plan
from sdamd.request import Job

_CPU = torch.device("cpu")
CPU_DEVICE: Final = "directml-cpu"


class DirectMLBackend:
    """onnxruntime on the device that the plan names: `directml:N` or `directml-cpu`."""

    def __init__(self, cache: Path | None = None) -> None:
        """Take or put the checkpoints' weights in `cache`, or for this process alone."""
        if cache is None:
            cache = Path(tempfile.mkdtemp(prefix="sdamd-"))
            weakref.finalize(self, shutil.rmtree, cache, ignore_errors=True)
        self._cache = cache

    def load(
        self, checkpoint: Checkpoint, plan: Plan, loras: Sequence[Lora] = ()
    ) -> "DirectMLPipeline":
        """Load the text encoders, and write UNet and VAE for onnxruntime if they are not there.

        The sessions are opened as shapes are asked for.

        Raises:
            BadCheckpoint: a component is incomplete, or of an architecture without graphs.
            HardwareError: this onnxruntime has no such provider.
            StorageError: the disk has no room for the weights.
        """
        silence()
        require(plan.device)
        exported = partial(self._exported, checkpoint)
        unet = exported("unet", plan.dtype)
        exported("vae", plan.vae_dtype)  # now, and not after the steps, where it may fail
        unet_config = full_config(UNet2DConditionModel, read_config(checkpoint, "unet"))
        changes = [change for lora in loras for change in onnx_lora.read(lora, unet_config)]
        overrides = {}
        if changes:
            state = load_weights(checkpoint, "unet", plan.dtype)
            overrides = onnx_lora.overrides(unet.template.weights, state, changes, plan.dtype)
        keep = 2 if _has_room_for_another(plan, checkpoint) else 1
        denoising = Sessions(plan.device, keep=keep, overrides=overrides)
        decoding = Sessions(plan.device, keep=2)  # and encoding, where that is asked
        vae_config = read_config(checkpoint, "vae")
        vae_weights = load_weights(checkpoint, "vae", plan.vae_dtype)

        def vae_on(sessions: Sessions) -> AutoencoderKL:
            return ort_vae(vae_config, cache(partial(exported, "vae")), sessions, vae_weights)

        given = {
            "unet": OrtUNet(unet_config, unet, denoising, rows=1 if keep == 1 else None),
            "vae": vae_on(decoding).to(getattr(torch, plan.vae_dtype)),
        }
        pipe = load_components(checkpoint, replace(plan, dtype="float32"), _CPU, given)
        for name in ("text_encoder", "text_encoder_2"):
            if changes and hasattr(pipe, name):
                onnx_lora.fuse(getattr(pipe, name), name, changes)
        last = None
        if plan.device != CPU_DEVICE:
            last = partial(_decode_on_cpu, lambda: vae_on(Sessions(CPU_DEVICE, keep=1)))
        return DirectMLPipeline(pipe, (denoising, decoding), last)

    def _exported(self, checkpoint: Checkpoint, component: str, dtype: str) -> onnx_export.Export:
        return onnx_export.export(
            onnx_export.find_template(component, read_config(checkpoint, component)),
            dtype,
            weight_files(checkpoint, component, dtype),
            self._cache,
            lambda: load_weights(checkpoint, component, dtype),
        )


def _has_room_for_another(plan: Plan, checkpoint: Checkpoint) -> bool:
    """Whether the UNet may be open for two shapes: all of a pass and a smaller one.

    Prompts with AND, and a last pass of fewer pictures, ask for a second one. Without room for it
    rows go one at a time, so that all are of one shape, at half of guidance's memory.
    """
    unet = checkpoint.parameters.unet * vram.BYTES_OF[plan.dtype]
    if plan.offload != "none":
        return False
    return plan.budget_bytes is None or plan.stages.peak + unet <= plan.budget_bytes


def _decode_on_cpu(
    make: Callable[[], AutoencoderKL], latents: torch.Tensor
) -> torch.Tensor:  # fmt: skip
    """Decode one picture after another with graphs of float32 on onnxruntime's own provider."""
    vae = make().float()
    return torch.cat([vae.decode(each).sample for each in torch.split(latents.float(), 1)])


class SessionMemory(HostMemory):
    """A device's memory under onnxruntime, which gives back a session's when it is closed."""

    def __init__(self, sessions: Sequence[Sessions]) -> None:
        self._sessions = sessions

    def give_back(self) -> None:
        """Close all sessions; the next run opens new ones."""
        _close(self._sessions)
        super().give_back()


class DirectMLPipeline(TorchPipeline):
    """An unchanged diffusers pipeline on the CPU, whose UNet and VAE run in onnxruntime."""

    def __init__(
        self,
        pipe: Any,
        sessions: Sequence[Sessions],
        last: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """`last` decodes at the end of the ladder, where the device is none of the CPU."""
        super().__init__(pipe, _CPU)
        self._sessions = sessions
        self._memory = SessionMemory(sessions)
        self._last = last
        self._frugal = False
        # At once, and not when Python looks for cycles: its components are in some.
        weakref.finalize(self, _close, self._sessions)

    def sample(self, jobs: Sequence[Job], plan: Plan, watch: Watch) -> list[Made]:
        """Make one RGB picture per job, or say why it is none.

        Raises:
            OutOfVram: the device ran out of memory, in the most frugal way too.
            HardwareError: the device failed; the next run opens new sessions on it.
            Stopped: `watch` returned True.
        """
        try:
            return super().sample(jobs, plan, watch)
        except HardwareError:
            # After a reset by the driver, no session of before works again.
            self.close()
            raise
        finally:
            if self._frugal:
                self.close()

    def _follow(self, plan: Plan) -> None:
        """Divide passes and tiles, and take turns; graphs compute as they were exported."""
        self._frugal = plan.offload != "none"
        turn = Turn() if self._frugal else None
        for sessions in self._sessions:
            sessions.take_turns(turn)
        own = replace(
            plan, offload="none", vae_bands=0, feed_forward_chunks=1, storage="",
            channels_last=False,
        )  # fmt: skip
        super()._follow(own)

    def _on_cpu(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        return self._last

    def close(self) -> None:
        """Give back the device's memory."""
        _close(self._sessions)


def _close(all_sessions: Sequence[Sessions]) -> None:
    for sessions in all_sessions:
        sessions.close()

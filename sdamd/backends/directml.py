"""The engine on ONNX Runtime: DirectML on Windows, and the same graphs on its CPU provider.

UNet and VAE are onnxruntime's; text encoders, schedulers, tiles and upscaling stay in torch on
the CPU, in float32.
"""

import shutil
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from PIL.Image import Image

from sdamd import vram
from sdamd.backends import onnx_export, onnx_lora
from sdamd.backends.backend import Watch
from sdamd.backends.loading import load_components, load_weights, read_config, weight_files
from sdamd.backends.onnx_lora import Lora
from sdamd.backends.onnx_modules import OrtUNet, full_config, ort_vae
from sdamd.backends.onnx_session import Sessions, Turn, require
from sdamd.backends.torch_backend import TorchPipeline, silence
from sdamd.checkpoint import Checkpoint
from sdamd.errors import BadImage, HardwareError
from sdamd.plan import Plan
from sdamd.request import Job

_CPU = torch.device("cpu")


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
        frugal = plan.offload != "none"
        turn = Turn() if frugal else None
        keep = 2 if _has_room_for_another(plan, checkpoint) else 1
        denoising = Sessions(plan.device, keep=keep, overrides=overrides, turn=turn)
        decoding = Sessions(plan.device, keep=2, turn=turn)  # and encoding, where that is asked
        vae = ort_vae(
            read_config(checkpoint, "vae"),
            cache(partial(exported, "vae")),
            decoding,
            load_weights(checkpoint, "vae", plan.vae_dtype),
        )
        given = {
            "unet": OrtUNet(unet_config, unet, denoising, rows=1 if keep == 1 else None),
            "vae": vae.to(getattr(torch, plan.vae_dtype)),
        }
        pipe = load_components(checkpoint, replace(plan, dtype="float32"), _CPU, given)
        for name in ("text_encoder", "text_encoder_2"):
            if changes and hasattr(pipe, name):
                onnx_lora.fuse(getattr(pipe, name), name, changes)
        return DirectMLPipeline(pipe, (denoising, decoding), frugal=frugal)

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


class DirectMLPipeline(TorchPipeline):
    """An unchanged diffusers pipeline on the CPU, whose UNet and VAE run in onnxruntime."""

    def __init__(self, pipe: Any, sessions: Sequence[Sessions], *, frugal: bool) -> None:
        super().__init__(pipe, _CPU)
        self._sessions = sessions
        self._frugal = frugal

    def sample(self, jobs: Sequence[Job], plan: Plan, watch: Watch) -> list[Image | BadImage]:
        """Make one RGB picture per job, or say why it is none.

        Raises:
            OutOfVram: the device ran out of memory.
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
        """Do nothing: graphs attend, and lie in memory, as they were exported."""

    def close(self) -> None:
        """Give back the device's memory."""
        for sessions in self._sessions:
            sessions.close()

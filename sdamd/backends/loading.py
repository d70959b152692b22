"""Turns a checkpoint on disk into the unchanged pipeline of diffusers, offline.

Whatever the network says, nothing is fetched: configs of single files and the CLIP vocabulary
ship with sdamd, and folders are read where they lie. Components are of the classes that the
family names, never of one that a folder names. Weights stay in their files until they are needed.
"""

import gzip
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import torch
from accelerate import init_empty_weights
from diffusers import (
    AutoencoderKL,
    EulerDiscreteScheduler,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from safetensors import SafetensorError
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    PreTrainedModel,
)

from sdamd.backends import single_file
from sdamd.backends.placement import Way, attach, placement_of
from sdamd.backends.single_file import Parts, Tensors
from sdamd.backends.weights import Source, sources_of
from sdamd.checkpoint import Checkpoint, Layout
from sdamd.checkpoint.folder import weight_variant
from sdamd.errors import BadCheckpoint, OutOfVram
from sdamd.plan import Plan


def load_components(
    checkpoint: Checkpoint,
    plan: Plan,
    device: torch.device,
    given: Mapping[str, Any] | None = None,
    *,
    waiting: bool = False,
) -> StableDiffusionPipeline | StableDiffusionXLPipeline:
    """Make the pipeline for `device` in the plan's dtypes, but for the components that are `given`.

    The pipeline's scheduler only carries the training schedule (betas, `prediction_type`, zero
    terminal SNR); the one that a job asks for is made from its config. There is no safety
    checker. On the CPU, weights that keep their stored dtype may be a view of the file.

    With `waiting` no weight is read: `means.apply` brings them, whenever the plan wants that.

    Raises:
        BadCheckpoint: a component is incomplete, or the file changed since it was identified.
        OutOfVram: the device has no room for the weights.
    """
    parts: Parts = dict(given or {})
    with _translated(checkpoint):
        for name in _classes(checkpoint):
            if name in parts:
                continue
            dtype = getattr(torch, plan.vae_dtype if name == "vae" else plan.dtype)
            model, sources = _open_model(checkpoint, name, dtype)
            attach(model, sources, device, dtype)
            if not waiting:
                placement_of(model).settle(Way(offload="none", device=device))
            parts[name] = model.eval().requires_grad_(requires_grad=False)
        for name, pad_token in zip(
            ("tokenizer", "tokenizer_2"), checkpoint.family.pad_tokens, strict=False
        ):
            parts[name] = (
                _folder_tokenizer(checkpoint.path, name)
                if checkpoint.layout is Layout.FOLDER
                else clip_tokenizer(pad_token)
            )
        schedule = read_config(checkpoint, "scheduler")
    parts["scheduler"] = _training_schedule(checkpoint, schedule)
    if checkpoint.family.pipeline == "StableDiffusionXLPipeline":
        return StableDiffusionXLPipeline(**parts, add_watermarker=False)
    return StableDiffusionPipeline(
        **parts, safety_checker=None, feature_extractor=None, requires_safety_checker=False
    )


def read_config(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """The config of a component, or of the training schedule (`scheduler`).

    Raises:
        BadCheckpoint: the file changed since it was identified.
    """
    if checkpoint.layout is Layout.FILE:
        return single_file.read_config(checkpoint, name)
    file = {"scheduler": "scheduler_config.json"}.get(name, "config.json")
    with _translated(checkpoint):
        text = (checkpoint.path / name / file).read_text("utf-8-sig")
        config: dict[str, Any] = json.loads(text)
    return config


def load_weights(checkpoint: Checkpoint, name: str, dtype: str) -> Tensors:
    """The weights of UNet or VAE under diffusers' names, as stored: views of the files.

    `dtype` is what they will be used in; it chooses between files of half and full size.

    Raises:
        BadCheckpoint: weights are missing or of another shape, or a file changed since it was
            identified.
    """
    with _translated(checkpoint):
        if checkpoint.layout is Layout.FILE:
            return single_file.load_weights(checkpoint, name)
        state: Tensors = {}
        for file in weight_files(checkpoint, name, dtype):
            state |= single_file.read_tensors(file)
        model = _empty(checkpoint, name)
        _rename(model, state)
        single_file.refuse_others(checkpoint, name, model, state)
        return state


def _open_model(
    checkpoint: Checkpoint, name: str, dtype: torch.dtype
) -> tuple[Any, dict[str, Source]]:
    """A component without weights, and where each of them lies."""
    if checkpoint.layout is Layout.FILE:
        return single_file.open_model(checkpoint, name)
    files = weight_files(checkpoint, name, str(dtype).removeprefix("torch."))
    if not files:
        raise FileNotFoundError(f"{checkpoint.path / name} has no weights any more")
    model = _empty(checkpoint, name)
    wanted = model.state_dict().keys()
    state: Tensors = {}
    sources: dict[str, Source] = {}
    for file in files:
        read = single_file.read_tensors(file)
        some = dict(read)
        _rename(model, some)
        some = {key: tensor for key, tensor in some.items() if key in wanted}
        state |= some
        sources |= sources_of(some, file, read)
    single_file.refuse_others(checkpoint, name, model, state)
    return model, sources


def _empty(checkpoint: Checkpoint, name: str) -> Any:
    """A component without weights."""
    kind, config = _classes(checkpoint)[name], read_config(checkpoint, name)
    # Buffers stay real: the text encoders compute theirs, no file holds them.
    with init_empty_weights(include_buffers=False):
        if issubclass(kind, PreTrainedModel):
            return kind(CLIPTextConfig.from_dict(config))
        return kind.from_config(config)


def _rename(model: Any, state: Tensors) -> None:
    """Give tensors the names that the model has for them today."""
    if not isinstance(model, PreTrainedModel):
        # Folders from before diffusers 0.18 call the VAE's attention by other names.
        model._fix_state_dict_keys_on_load(state)
        return
    # Text encoders have been saved with the name of their wrapper and without it.
    wanted = model.state_dict().keys()
    for name in list(state):
        bare = name.removeprefix(_WRAPPER)
        found = next((n for n in (bare, _WRAPPER + bare) if n in wanted), None)
        if found is not None and found != name:
            state[found] = state.pop(name)


_WRAPPER: Final = "text_model."


def weight_files(checkpoint: Checkpoint, name: str, dtype: str) -> list[Path]:
    """The files that `load_weights` reads."""
    if checkpoint.layout is Layout.FILE:
        return [checkpoint.path]
    variant = _variant(checkpoint, dtype) or ""
    files = sorted((checkpoint.path / name).iterdir())
    return [file for file in files if weight_variant(file.name) == variant]


def clip_tokenizer(pad_token: str) -> CLIPTokenizer:
    """Make the tokenizer that every CLIP text encoder was trained with.

    The ids follow from the merges alone: the 256 bytes as letters, the same as ends of words,
    one token per merge, the start and the end of a text.
    Source: https://github.com/openai/CLIP/blob/main/clip/simple_tokenizer.py
    """
    packed = (files("sdamd") / "assets" / "clip" / "merges.txt.gz").read_bytes()
    merges = gzip.decompress(packed).decode("utf-8").splitlines()
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(n) for n in printable] + [chr(256 + n) for n in range(256 - len(printable))]
    tokens = [
        *letters,
        *(f"{letter}</w>" for letter in letters),
        *(merge.replace(" ", "") for merge in merges),
        "<|startoftext|>",
        "<|endoftext|>",
    ]
    tokenizer = CLIPTokenizer(
        vocab={token: number for number, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ")) for merge in merges],
        model_max_length=77,
    )
    return _padded_with(tokenizer, pad_token)


def _padded_with(tokenizer: CLIPTokenizer, pad_token: str) -> CLIPTokenizer:
    """Set the pad token after construction, so that it stays an ordinary word in prompts.

    OpenCLIP pads with `!`. Given at construction it would be a special token, cut out of
    prompts: "wow!" would become other ids than those the encoder was trained on.
    """
    tokenizer.pad_token = pad_token
    return tokenizer


_SCHEDULE: Final = (
    "beta_start",
    "beta_end",
    "beta_schedule",
    "trained_betas",
    "num_train_timesteps",
    "timestep_spacing",
)


def _training_schedule(checkpoint: Checkpoint, config: Mapping[str, Any]) -> EulerDiscreteScheduler:
    """Carry what the model was trained with; the rest of a folder's config is about one sampler."""
    return EulerDiscreteScheduler.from_config(
        {
            **{key: config[key] for key in _SCHEDULE if key in config},
            # All of Stable Diffusion; configs that say 0 are from before the field was heeded.
            "steps_offset": 1,
            "prediction_type": checkpoint.prediction_type,
            "rescale_betas_zero_snr": checkpoint.zero_terminal_snr,
        }
    )


def _classes(checkpoint: Checkpoint) -> dict[str, Any]:
    classes: dict[str, Any] = {
        "unet": UNet2DConditionModel,
        "vae": AutoencoderKL,
        "text_encoder": CLIPTextModel,
    }
    if checkpoint.family.pipeline == "StableDiffusionXLPipeline":
        classes["text_encoder_2"] = CLIPTextModelWithProjection
    return classes


def _variant(checkpoint: Checkpoint, dtype: str) -> str | None:
    """Choose the files of half the size where they lose nothing, or where there are no others."""
    if "" not in checkpoint.variants:
        return "fp16"
    return "fp16" if "fp16" in checkpoint.variants and dtype == "float16" else None


def _folder_tokenizer(path: Path, subfolder: str) -> CLIPTokenizer:
    load = CLIPTokenizer.from_pretrained
    tokenizer = load(path, subfolder=subfolder, local_files_only=True)
    pad_token = tokenizer.pad_token
    if pad_token == tokenizer.eos_token:
        return tokenizer
    tokenizer = load(
        path, subfolder=subfolder, local_files_only=True, pad_token=tokenizer.eos_token
    )
    return _padded_with(tokenizer, pad_token)


@contextmanager
def _translated(checkpoint: Checkpoint) -> Iterator[None]:
    """Turn the libraries' errors into sentences about the checkpoint."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfVram(
            f"the device has no room for the {checkpoint.parameters.total} weights of "
            f"{checkpoint.name}"
        ) from error
    except (SafetensorError, OSError, ValueError) as error:
        raise BadCheckpoint(f"{checkpoint.path} cannot be loaded: {error}") from error

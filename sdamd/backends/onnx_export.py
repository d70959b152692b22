"""Turns a component's weights into what onnxruntime opens: a shipped graph beside one weights file.

Nothing is exported on the user's machine. `scripts/export_onnx_templates.py` traced every
architecture once, without weights, and each graph already says at which offset of `weights.bin`
each of its weights lies. So here a graph is only unpacked, and the weights are written in that
order, in the graph's dtype, some of them transposed. Neither onnx nor torch.onnx is needed.

One folder under the cache holds one component in one dtype. All graphs of a component read the
same `weights.bin`: a UNet with and without ControlNet costs its weights once.

    unet   unet.onnx          sample, timestep, encoder_hidden_states -> output
                              (and text_embeds, time_ids where the architecture has them)
           unet-controlnet.onnx     the same and residual_0 to residual_N, the last one of which
                              is the middle block's
    vae    vae-encoder.onnx   sample (pixels) -> output (moments, before quant_conv)
           vae-decoder.onnx   sample (latents, after post_quant_conv) -> output (pixels)
    controlnet  controlnet.onnx     the inputs of unet.onnx and controlnet_cond (pixels of 0 to 1)
                              -> residual_0 to residual_N as unet-controlnet.onnx takes them

`timestep` and `time_ids` are float32 and have one row per picture; all else has the graph's
dtype. Free dimensions have the names that `free_dimensions` sets.
"""

import gzip
import hashlib
import inspect
import json
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from diffusers import AutoencoderKL, ControlNetModel, UNet2DConditionModel

from sdamd.errors import BadCheckpoint, StorageError

log = logging.getLogger(__name__)

FORMAT: Final = 1
"""Of a folder in the cache. A folder of another number is written anew."""
WEIGHTS: Final = "weights.bin"
MANIFEST: Final = "manifest.json"
ALIGNMENT: Final = 4096
"""Where a weight may start: on a page, so that onnxruntime can map the file instead of reading."""
GRAPHS: Final[Mapping[str, tuple[str, ...]]] = {
    "unet": ("unet", "unet-controlnet"),
    "vae": ("vae-encoder", "vae-decoder"),
    "controlnet": ("controlnet",),
}
DTYPES: Final[Mapping[str, int]] = {"float32": 4, "float16": 2}
"""Of graphs, with their bytes per number. No kernel of DirectML takes bfloat16."""

_CLASSES: Final[Mapping[str, Any]] = {
    "unet": UNet2DConditionModel,
    "vae": AutoencoderKL,
    "controlnet": ControlNetModel,
}
_CONFIG_ONLY: Final[Mapping[str, frozenset[str]]] = {
    # `upcast_attention` changes no weight and no shape; the graphs of all models that ever had it
    # upcast, which is exact for those that do without.
    "unet": frozenset({"sample_size", "dropout", "upcast_attention"}),
    # The rest of the VAE stays in torch: scaling, and the convolutions around the latents.
    "vae": frozenset(
        {
            "sample_size", "scaling_factor", "shift_factor", "latents_mean", "latents_std",
            "force_upcast", "use_quant_conv", "use_post_quant_conv",
        }
    ),
    # What is done to its picture before, and to its residuals after, stays in torch.
    "controlnet": frozenset(
        {
            "upcast_attention", "global_pool_conditions", "controlnet_conditioning_channel_order",
        }
    ),
}  # fmt: skip
"""Fields of a config that leave the graph as it is."""
_PER_BLOCK: Final = (
    "attention_head_dim",
    "num_attention_heads",
    "cross_attention_dim",
    "layers_per_block",
    "transformer_layers_per_block",
    "only_cross_attention",
)
_PART: Final = ".part"
_STALE_SECONDS: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One external initialiser of a graph.

    `name` is the initialiser's, `key` the tensor's in the component's state dict. `shape` is the
    initialiser's; where `transposed`, the tensor's shape is the reverse of it.
    """

    name: str
    key: str
    shape: tuple[int, ...]
    transposed: bool

    @property
    def size(self) -> int:
        """How many numbers it has."""
        size = 1
        for side in self.shape:
            size *= side
        return size

    def of(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Make the initialiser's value from the component's tensor: contiguous, on the CPU."""
        turned = tensor.T if self.transposed else tensor
        return turned.detach().to(device="cpu", dtype=dtype).contiguous()


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """The graphs of one architecture of one component, without weights.

    `architecture` is what the function of that name gives, `key` its digest.
    """

    key: str
    title: str
    component: str
    architecture: Mapping[str, Any]
    weights: tuple[Weight, ...]
    folder: Traversable

    def graph(self, name: str, dtype: str) -> bytes:
        """Unpack one of `GRAPHS[component]`, an ONNX model whose weights are in `weights.bin`."""
        return gzip.decompress((self.folder / f"{name}.{dtype}.onnx.gz").read_bytes())

    def sha256(self, dtype: str) -> str:
        """Identify everything that decides the bytes of an export but the weights."""
        digest = hashlib.sha256()
        for name in GRAPHS[self.component]:
            digest.update(self.graph(name, dtype))
        digest.update(repr(self.weights).encode())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A complete folder: what onnxruntime opens is `graph(name)`."""

    folder: Path
    template: Template
    dtype: str

    def graph(self, name: str) -> Path:
        """The path of one of `GRAPHS[component]`."""
        return self.folder / f"{name}.onnx"


def architecture(component: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Keep what decides the graph: fields that differ from the class's defaults, in one spelling.

    `component` is one of `GRAPHS`, `config` that of diffusers' class.
    """
    parameters = inspect.signature(_CLASSES[component].__init__).parameters
    defaults = {
        name: parameter.default
        for name, parameter in parameters.items()
        if name != "self" and name not in _CONFIG_ONLY[component]
    }
    full = {name: config.get(name, default) for name, default in defaults.items()}
    blocks = len(full["block_out_channels"])
    kept = {}
    for name, value in full.items():
        spelled = _spelled(name, value, blocks)
        if spelled != _spelled(name, defaults[name], blocks):
            kept[name] = spelled
    return kept


def _spelled(name: str, value: Any, blocks: int) -> Any:
    if isinstance(value, list | tuple):
        return [_spelled("", each, blocks) for each in value]
    # One number stands for the same in every block.
    return [value] * blocks if name in _PER_BLOCK and value is not None else value


def key_of(component: str, config: Mapping[str, Any]) -> str:
    """SHA-256 over the architecture, in hexadecimal: the key of its template."""
    text = json.dumps([component, architecture(component, config)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def template_folder(key: str) -> str:
    """The name of a template's folder under `sdamd/assets/onnx`."""
    return key[:16]


def find_template(component: str, config: Mapping[str, Any]) -> Template:
    """Find the graphs for a component of a checkpoint.

    Raises:
        BadCheckpoint: no graphs of this architecture ship with sdamd.
    """
    key = key_of(component, config)
    for template in templates():
        if template.key == key:
            return template
    known = [template for template in templates() if template.component == component]
    raise BadCheckpoint(
        f"sdamd has no ONNX graph for the {component} of this model: "
        f"{_unlike(architecture(component, config), known)}; known are: "
        f"{'; '.join(sorted(template.title for template in known))}. "
        "The engines rocm and cpu run it"
    )


def _unlike(fields: Mapping[str, Any], known: Sequence[Template]) -> str:
    """Name what sets an architecture apart from the most similar one."""

    def differing(template: Template) -> list[str]:
        other = template.architecture
        names = fields.keys() | other.keys()
        return sorted(name for name in names if fields.get(name) != other.get(name))

    nearest = min(known, key=lambda template: len(differing(template)))
    named = [f"{name} {fields.get(name, 'by default')}" for name in differing(nearest)]
    return (
        f"unlike {nearest.title}, it has {', '.join(named[:4])}{' ...' if len(named) > 4 else ''}"
    )


@cache
def templates() -> tuple[Template, ...]:
    """All templates that ship with sdamd."""
    root = files("sdamd") / "assets" / "onnx"
    return tuple(
        read_template(folder)
        for folder in sorted(root.iterdir(), key=lambda entry: entry.name)
        if folder.is_dir()
    )


def read_template(folder: Traversable) -> Template:
    """Read one folder that `scripts/export_onnx_templates.py` wrote."""
    about = json.loads((folder / "template.json").read_text("utf-8"))
    rows = json.loads(gzip.decompress((folder / "weights.json.gz").read_bytes()))
    weights = tuple(
        Weight(name=name, key=key, shape=tuple(shape), transposed=transposed)
        for name, key, shape, transposed in rows
    )
    return Template(
        key=about["key"],
        title=about["title"],
        component=about["component"],
        architecture=about["architecture"],
        weights=weights,
        folder=folder,
    )


def layout(weights: Iterable[Weight], dtype: str) -> tuple[dict[str, int], int]:
    """Where each initialiser lies in `weights.bin`, and the bytes of the file.

    The graphs hold the same offsets, so a change here needs all templates written anew.
    """
    offsets = {}
    end = 0
    for weight in weights:
        offsets[weight.name] = -(-end // ALIGNMENT) * ALIGNMENT
        end = offsets[weight.name] + weight.size * DTYPES[dtype]
    return offsets, end


def free_dimensions(
    *, batch: int, height: int, width: int, sequence: int = 77
) -> dict[str, int]:  # fmt: skip
    """Values for `SessionOptions.add_free_dimension_override_by_name`: all shapes become fixed.

    `height` and `width` are those of the graph's `sample`: pixels for the VAE's encoder, latents
    otherwise. `height_2` to `height_8` are those of ControlNet's residuals, `pixel_height` and
    `pixel_width` those of its picture.
    """
    sizes = {"batch": batch, "height": height, "width": width, "sequence": sequence}
    sizes |= {"pixel_height": 8 * height, "pixel_width": 8 * width}
    for factor in (2, 4, 8):
        height, width = (height + 1) // 2, (width + 1) // 2
        sizes |= {f"height_{factor}": height, f"width_{factor}": width}
    return sizes


def source_of(paths: Iterable[Path]) -> list[list[str | int]]:
    """Identify the files that weights come from: path, bytes and time of the last change.

    Raises:
        BadCheckpoint: one of them is gone.
    """
    rows: list[list[str | int]] = []
    for path in sorted(paths):
        try:
            stat = path.stat()
        except OSError as error:
            raise BadCheckpoint(f"{path} cannot be read: {error.strerror or error}") from error
        rows.append([str(path.resolve()), stat.st_size, stat.st_mtime_ns])
    return rows


def export(
    template: Template,
    dtype: str,
    paths: Sequence[Path],
    cache_folder: Path,
    state: Callable[[], Mapping[str, torch.Tensor]],
) -> Export:
    """Take the component from the cache, or write it there first.

    `paths` are the files that the weights come from. `state` is called only where there is
    something to write, and gives tensors by diffusers' names, of any dtype; tensors that no graph
    asks for are ignored.

    Raises:
        BadCheckpoint: a tensor is missing or has another shape.
        StorageError: there is too little room, or the cache cannot be written.
    """
    identity = _identity(template, dtype, paths)
    folder = cache_folder / "onnx" / _folder_name(template, dtype, paths)
    made = Export(folder=folder, template=template, dtype=dtype)
    why = _why_unusable(folder, identity)
    if why is None:
        return made
    log.info("writing %s for onnxruntime: %s", template.title, why)
    needed = layout(template.weights, dtype)[1]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        _refuse_small_disk(folder.parent, needed, template.title)
        with _part_of(folder) as part:
            _write(part, template, dtype, state(), identity)
            _put(part, folder, identity)
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be written: {error.strerror or error}; it takes {needed} bytes"
        ) from error
    return made


def _identity(template: Template, dtype: str, paths: Sequence[Path]) -> dict[str, Any]:
    sizes = {
        f"{name}.onnx": len(template.graph(name, dtype)) for name in GRAPHS[template.component]
    }
    return {
        "format": FORMAT,
        "template": template.sha256(dtype),
        "dtype": dtype,
        "source": source_of(paths),
        "files": {**sizes, WEIGHTS: layout(template.weights, dtype)[1]},
    }


def _folder_name(template: Template, dtype: str, paths: Sequence[Path]) -> str:
    """One name per file on disk, whatever its content: a changed checkpoint replaces its export."""
    text = "\n".join([template.key, *sorted(str(path.resolve()) for path in paths)])
    readable = re.sub(r"[^a-z0-9]+", "-", template.title.casefold()).strip("-")
    return f"{readable[:32]}-{dtype}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _why_unusable(folder: Path, identity: Mapping[str, Any]) -> str | None:
    """None if the folder holds exactly this export; else what is wrong, for the log."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
    except FileNotFoundError:
        return "it is not in the cache yet"
    except (OSError, ValueError) as error:
        return f"its manifest cannot be read ({error})"
    if not isinstance(manifest, dict):
        return "its manifest is no JSON object"
    other = [name for name, value in identity.items() if manifest.get(name) != value]
    if other:
        return f"the one in the cache is of another {', '.join(other)}"
    for name, size in identity["files"].items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else 0
        if found != size:
            return f"{name} in the cache has {found} of {size} bytes"
    return None


def _refuse_small_disk(folder: Path, needed: int, title: str) -> None:
    """Ask for twice the bytes: an old export of the same model may still lie beside it."""
    free = shutil.disk_usage(folder).free
    if free < 2 * needed:
        raise StorageError(
            f"{folder} has {free / 1e9:.1f} GB free; to write {title} for onnxruntime takes "
            f"{2 * needed / 1e9:.1f} GB, twice its weights"
        )


@contextmanager
def _part_of(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder`, gone at the end unless it was renamed."""
    part = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}{_PART}")
    part.mkdir()
    try:
        yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove what a killed export of the same folder left, which may be gigabytes."""
    for part in folder.parent.glob(f"{folder.name}.*{_PART}"):
        if time.time() - part.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(part, ignore_errors=True)


def _write(
    part: Path,
    template: Template,
    dtype: str,
    state: Mapping[str, torch.Tensor],
    identity: Mapping[str, Any],
) -> None:
    _refuse_other_weights(template, state)
    offsets, _ = layout(template.weights, dtype)
    with (part / WEIGHTS).open("wb") as file:
        for weight in template.weights:
            file.seek(offsets[weight.name])
            value = weight.of(state[weight.key], getattr(torch, dtype))
            file.write(value.numpy().data)
        _on_to_disk(file)
    for name in GRAPHS[template.component]:
        with (part / f"{name}.onnx").open("wb") as file:
            file.write(template.graph(name, dtype))
            _on_to_disk(file)
    with (part / MANIFEST).open("wb") as file:
        file.write(json.dumps(identity, indent=2).encode())
        _on_to_disk(file)


def _refuse_other_weights(template: Template, state: Mapping[str, torch.Tensor]) -> None:
    problems = []
    for weight in template.weights:
        wanted = weight.shape[::-1] if weight.transposed else weight.shape
        if weight.key not in state:
            problems.append(f"lacks {weight.key}")
        elif tuple(state[weight.key].shape) != wanted:
            found = list(state[weight.key].shape)
            problems.append(f"has {weight.key} of shape {found} instead of {list(wanted)}")
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise BadCheckpoint(
            f"the weights do not fit {template.title}: {'; '.join(problems[:3])}{more}"
        )


def _on_to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _put(part: Path, folder: Path, identity: Mapping[str, Any]) -> None:
    """Give the finished folder its name, in the place of one that is of no use.

    The old one is moved aside first, since a folder cannot be replaced in one step. Another
    process may have been faster with the same export; then that one stays.
    """
    aside = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}{_PART}")
    with suppress(FileNotFoundError):
        folder.rename(aside)
    try:
        part.rename(folder)
    except OSError:
        if _why_unusable(folder, identity) is not None:
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)

"""Writes the ONNX graphs that ship with sdamd: `python -m scripts.export_onnx_templates [NAME...]`.

Run it after a change of diffusers, torch or of this file; it needs the extra `dev`. NAME is one
of `TARGETS`, nothing means all. Each takes minutes and less than 1 GB, since no weight exists:
models are built from shapes alone.

What makes the graphs fit DirectML, whose last provider is onnxruntime 1.24:

- Opset 18. A kernel is registered for one version of an operator; from opset 20 on some have none.
- Attention is one `com.microsoft::MultiHeadAttention`, with kernels on DirectML and on the CPU.
- No `Reshape` has `allowzero`, which DirectML refuses together with a -1. Nothing here is empty.
- Sizes need not be multiples of the UNet's factor: up-sampling takes its size from what it meets.
- Matrices are stored transposed where the graph would transpose them at run time.

Each UNet is traced once, in float32, with ControlNet's residuals. The plain graph is that one
without their additions; float16 is the same graph with other types, in which the sinusoids of the
timesteps stay float32; nine channels differ in one weight's shape.
A ControlNet gives its residuals before they are scaled.
"""

import argparse
import gzip
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import onnx_ir as ir
import torch
from diffusers import AutoencoderKL, ControlNetModel, UNet2DConditionModel
from onnx_ir.passes import common
from onnxscript import optimizer
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim

from sdamd.backends.onnx_export import (
    DTYPES,
    GRAPHS,
    WEIGHTS,
    Weight,
    architecture,
    key_of,
    layout,
    template_folder,
)

ASSETS: Final = Path(__file__).parents[1] / "sdamd" / "assets"
OPSET: Final = 18
IR_VERSION: Final = 10
"""The newest that onnxruntime 1.24 reads."""
CONTRIB: Final = "com.microsoft"
WIDE: Final = ("timestep", "time_ids")
"""Inputs that are float32 in every graph: timesteps of Karras' schedules are fractions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One architecture; `config` is a folder under `sdamd/assets`. A ControlNet copies its UNet."""

    title: str
    config: str
    component: str
    in_channels: tuple[int, ...] = ()


TARGETS: Final[Mapping[str, Target]] = {
    "tiny-unet": Target(title="embedded model, UNet", config="tiny", component="unet"),
    "tiny-vae": Target(title="embedded model, VAE", config="tiny", component="vae"),
    "sd-vae": Target(
        title="Stable Diffusion 1.x, 2.x and XL, VAE", config="configs/sd15", component="vae"
    ),
    "sd15-unet": Target(
        title="Stable Diffusion 1.x, UNet", config="configs/sd15", component="unet",
        in_channels=(4, 9),
    ),
    "sd21-unet": Target(
        title="Stable Diffusion 2.x, UNet", config="configs/sd21", component="unet",
        in_channels=(4, 9),
    ),
    "sdxl-unet": Target(
        title="Stable Diffusion XL, UNet", config="configs/sdxl", component="unet",
        in_channels=(4, 9),
    ),
    "tiny-controlnet": Target(
        title="embedded model, ControlNet", config="tiny", component="controlnet"
    ),
    "sd15-controlnet": Target(
        title="Stable Diffusion 1.x, ControlNet", config="configs/sd15", component="controlnet"
    ),
    "sd21-controlnet": Target(
        title="Stable Diffusion 2.x, ControlNet", config="configs/sd21", component="controlnet"
    ),
    "sdxl-controlnet": Target(
        title="Stable Diffusion XL, ControlNet", config="configs/sdxl", component="controlnet"
    ),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Write the templates of the named targets."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(TARGETS))
    parser.add_argument("--output", type=Path, default=ASSETS / "onnx", metavar="FOLDER")
    arguments = parser.parse_args(argv)
    unknown = set(arguments.names) - TARGETS.keys()
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))} is not known; allowed: {', '.join(TARGETS)}")
    for name in arguments.names or TARGETS:
        start = time.process_time()
        for folder in write(TARGETS[name], arguments.output):
            size = sum(file.stat().st_size for file in folder.iterdir())
            print(f"{name}: {folder.name}, {size} bytes")
        print(f"{name}: {time.process_time() - start:.0f} s of processor time")
    return 0


def write(target: Target, output: Path) -> Iterator[Path]:
    """Trace one target and write its templates, one folder for each number of channels."""
    config = _config(target)
    trace = {"unet": _unet, "vae": _vae, "controlnet": _controlnet}[target.component]
    graphs, keys = trace(config)
    if target.in_channels:
        for channels in target.in_channels:
            yield _write_template(
                f"{target.title} with {channels} channels",
                target.component,
                {**config, "in_channels": channels},
                {name: _with_channels(model, channels) for name, model in graphs.items()},
                keys,
                output,
            )
    else:
        yield _write_template(target.title, target.component, config, graphs, keys, output)


def _config(target: Target) -> dict[str, Any]:
    copies_unet = target.component == "controlnet"
    folder = ASSETS / target.config / ("unet" if copies_unet else target.component)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    if copies_unet:
        with _no_weights():
            unet = UNet2DConditionModel.from_config(config)
            config = dict(ControlNetModel.from_unet(unet, load_weights_from_unet=False).config)
    return config


def _write_template(
    title: str,
    component: str,
    config: Mapping[str, Any],
    graphs: Mapping[str, ir.Model],
    keys: Sequence[str],
    output: Path,
) -> Path:
    weights = _weights(graphs.values(), keys)
    key = key_of(component, config)
    folder = output / template_folder(key)
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "title": title,
        "component": component,
        "key": key,
        "architecture": architecture(component, config),
    }
    (folder / "template.json").write_text(json.dumps(about, indent=2) + "\n", "utf-8")
    rows = [[weight.name, weight.key, weight.shape, weight.transposed] for weight in weights]
    _write_packed(folder / "weights.json.gz", json.dumps(rows).encode())
    upcast = bool(config.get("upcast_attention"))
    for name in GRAPHS[component]:
        for dtype in DTYPES:
            model = _copied(graphs[name])
            if dtype == "float16":
                _to_float16(model, upcast_attention=upcast)
            _bind(model, weights, dtype)
            _tidy(model)
            packed = ir.to_proto(model).SerializeToString(deterministic=True)
            _write_packed(folder / f"{name}.{dtype}.onnx.gz", packed)
    return folder


def _write_packed(path: Path, content: bytes) -> None:
    path.write_bytes(gzip.compress(content, mtime=0))


# -- the models, without weights ---------------------------------------------------------------


class _Attention:
    """What diffusers' attention computes, as one node; in the place of its processor."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        temb: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Take [batch, tokens, channels], or a picture, and give the same shape."""
        assert attention_mask is None
        assert temb is None
        assert attn.spatial_norm is None
        assert attn.norm_cross is None
        assert attn.norm_q is None
        x = hidden_states
        if hidden_states.ndim == 4:
            x = hidden_states.flatten(2).transpose(1, 2)
        if attn.group_norm is not None:
            x = attn.group_norm(x.transpose(1, 2)).transpose(1, 2)
        context = x if encoder_hidden_states is None else encoder_hidden_states
        query = attn.to_q(x)
        x = torch.onnx.ops.symbolic(
            f"{CONTRIB}::MultiHeadAttention",
            (query, attn.to_k(context), attn.to_v(context)),
            {"num_heads": attn.heads},
            dtype=query.dtype,
            shape=query.shape,
            version=1,
        )
        x = attn.to_out[0](x)
        if hidden_states.ndim == 4:
            x = x.transpose(1, 2).reshape(hidden_states.shape)
        if attn.residual_connection:
            x = x + hidden_states
        attended: torch.Tensor = x / attn.rescale_output_factor
        return x if attn.rescale_output_factor == 1 else attended


class _Upsample(torch.nn.Module):
    """diffusers' `Upsample2D` as these models use it, without its branches on sizes."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        assert original.use_conv
        assert original.interpolate
        assert original.norm is None
        self.conv = original.conv

    def forward(self, hidden_states: torch.Tensor, output_size: Any = None) -> torch.Tensor:
        """Enlarge to `output_size`, or to twice the size."""
        scale = 2.0 if output_size is None else None
        larger = torch.nn.functional.interpolate(hidden_states, output_size, scale, "nearest")
        convolved: torch.Tensor = self.conv(larger)
        return convolved


class _Residual:
    """Is added to a tensor by a node that does not compare the two shapes.

    Else tracing would tie the sizes of all residuals, and of ControlNet's picture, to the size of
    the sample by rounding divisions, which a graph's input cannot state.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __radd__(self, other: torch.Tensor) -> torch.Tensor:
        """Let `other + residual` be an `Add` of the shape of `other`."""
        return torch.onnx.ops.symbolic(
            "Add", (other, self.tensor), dtype=other.dtype, shape=other.shape
        )


class _UNet(torch.nn.Module):
    def __init__(self, unet: Any) -> None:
        super().__init__()
        self.unet = unet

    def forward(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        added: dict[str, torch.Tensor],
        residuals: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        """Predict from a noisy sample; the last residual is the middle block's."""
        *down, middle = (_Residual(residual) for residual in residuals)
        predicted: torch.Tensor = self.unet(
            sample,
            timestep,
            encoder_hidden_states,
            added_cond_kwargs=added,
            down_block_additional_residuals=tuple(down),
            mid_block_additional_residual=middle,
            return_dict=False,
        )[0]
        return predicted


class _One:
    """A scale of 1 that leaves no node."""

    def __rmul__(self, other: torch.Tensor) -> torch.Tensor:
        """Let `other * one` be `other`."""
        return other


class _ControlNet(torch.nn.Module):
    def __init__(self, controlnet: Any) -> None:
        super().__init__()
        self.controlnet = controlnet
        controlnet.controlnet_cond_embedding.register_forward_hook(
            lambda _module, _inputs, embedded: _Residual(embedded)
        )

    def forward(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        added: dict[str, torch.Tensor],
        controlnet_cond: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Give the residuals unscaled, the middle block's last."""
        down, middle = self.controlnet(
            sample,
            timestep,
            encoder_hidden_states,
            controlnet_cond,
            _One(),
            added_cond_kwargs=added,
            return_dict=False,
        )
        return (*down, middle)


class _Vae(torch.nn.Module):
    """One half of a VAE, under the name that it has there, so that weights keep their names."""

    def __init__(self, name: str, half: torch.nn.Module) -> None:
        super().__init__()
        self.part = name
        self.add_module(name, half)

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        """Encode or decode."""
        coded: torch.Tensor = self.get_submodule(self.part)(sample)
        return coded


@contextmanager
def _no_weights() -> Iterator[None]:
    """Tensors that are made inside have a shape, a dtype and nothing else."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def _prepared(model: Any) -> Any:
    model.eval().requires_grad_(requires_grad=False)
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "Attention":
            module.set_processor(_Attention())
        if type(module).__name__ == "Upsample2D":
            model.set_submodule(name, _Upsample(module))
    return model


def _unet(config: Mapping[str, Any]) -> tuple[dict[str, ir.Model], list[str]]:
    """Graphs with weights as inputs, and the names of all weights."""
    with _no_weights():
        unet = _prepared(UNet2DConditionModel.from_config(dict(config)))
        # Above any size, so that up-sampling always takes its size from the skip connection.
        unet.num_upsamplers = 40
        inputs, dimensions, sizes = _conditions(unet.config)
        levels = _residual_levels(unet.config)
        residuals = tuple(
            torch.zeros(2, channels, _halved(17, level), _halved(19, level))
            for channels, level in levels
        )
        dimensions["residuals"] = tuple(
            {
                axis: Dim(f"residual_{side}_{level}", min=1, max=4096)
                for axis, side in {0: "batch", 2: "height", 3: "width"}.items()
            }
            for _, level in levels
        )
        keys = list(unet.state_dict())
        model = _traced(_UNet(unet), (*inputs, residuals), dimensions, "unet.")
    _name_inputs(model, sizes | _residual_sizes(levels))
    _name_outputs(model, {"output": ["batch", None, "height", "width"]})
    plain = _copied(model)
    _drop_residuals(plain)
    return {"unet": plain, "unet-controlnet": model}, keys


def _controlnet(config: Mapping[str, Any]) -> tuple[dict[str, ir.Model], list[str]]:
    with _no_weights():
        controlnet = _prepared(ControlNetModel.from_config(dict(config)))
        inputs, dimensions, sizes = _conditions(controlnet.config)
        picture = torch.zeros(2, controlnet.config.conditioning_channels, 8 * 17, 8 * 19)
        dimensions["controlnet_cond"] = {
            axis: Dim(f"picture_{side}", min=1, max=32768)
            for axis, side in {0: "batch", 2: "height", 3: "width"}.items()
        }
        keys = list(controlnet.state_dict())
        model = _traced(_ControlNet(controlnet), (*inputs, picture), dimensions, "controlnet.")
    sizes["controlnet_cond"] = ["batch", None, "pixel_height", "pixel_width"]
    _name_inputs(model, sizes)
    _name_outputs(model, _residual_sizes(_residual_levels(controlnet.config)))
    return {"controlnet": model}, keys


_Sizes: TypeAlias = dict[str, list[str | None]]


def _conditions(config: Any) -> tuple[tuple[Any, ...], dict[str, Any], _Sizes]:
    """What UNet and ControlNet both take: examples, which sizes are free, and their names."""
    batch, sequence = Dim("batch", min=1, max=64), Dim("sequence", min=2, max=4096)
    height, width = Dim("height", min=8, max=4096), Dim("width", min=8, max=4096)
    added, added_dims = _added(config, batch)
    context = config.cross_attention_dim
    inputs = (
        torch.zeros(2, config.in_channels, 17, 19),
        torch.zeros(2),
        torch.zeros(2, 11, context if isinstance(context, int) else context[0]),
        added,
    )
    dimensions = {
        "sample": {0: batch, 2: height, 3: width},
        "timestep": {0: batch},
        "encoder_hidden_states": {0: batch, 1: sequence},
        "added": added_dims,
    }
    sizes: _Sizes = {
        "sample": ["batch", None, "height", "width"],
        "timestep": ["batch"],
        "encoder_hidden_states": ["batch", "sequence", None],
        **{name: ["batch", None] for name in added},
    }
    return inputs, dimensions, sizes


def _added(
    config: Any, batch: Any
) -> tuple[dict[str, torch.Tensor], dict[str, dict[int, Any]]]:  # fmt: skip
    if config.addition_embed_type is None:
        return {}, {}
    assert config.addition_embed_type == "text_time"
    ids = 6
    pooled = config.projection_class_embeddings_input_dim - ids * config.addition_time_embed_dim
    added = {"text_embeds": torch.zeros(2, pooled), "time_ids": torch.zeros(2, ids)}
    return added, {name: {0: batch} for name in added}


def _residual_levels(config: Any) -> list[tuple[int, int]]:
    """Channels, and how often the sample was halved, of each of ControlNet's residuals."""
    channels = config.block_out_channels
    levels = [(channels[0], 0)]
    for level, out in enumerate(channels):
        layers = config.layers_per_block
        levels += [(out, level)] * (layers if isinstance(layers, int) else layers[level])
        if level < len(channels) - 1:
            levels.append((out, level + 1))
    return [*levels, (channels[-1], len(channels) - 1)]


def _residual_sizes(levels: Sequence[tuple[int, int]]) -> _Sizes:
    sizes: _Sizes = {}
    for number, (_, level) in enumerate(levels):
        names = [side if level == 0 else f"{side}_{2**level}" for side in ("height", "width")]
        sizes[f"residual_{number}"] = ["batch", None, *names]
    return sizes


def _halved(size: int, level: int) -> int:
    for _ in range(level):
        size = (size + 1) // 2
    return size


def _vae(config: Mapping[str, Any]) -> tuple[dict[str, ir.Model], list[str]]:
    batch = Dim("batch", min=1, max=64)
    height, width = Dim("height", min=8, max=16384), Dim("width", min=8, max=16384)
    graphs, keys = {}, []
    with _no_weights():
        vae = _prepared(AutoencoderKL.from_config(dict(config)))
        for half, channels, out in (
            ("encoder", config["in_channels"], "latent"),
            ("decoder", config["latent_channels"], "image"),
        ):
            module = _Vae(half, getattr(vae, half))
            keys += list(module.state_dict())
            model = _traced(
                module,
                (torch.zeros(2, channels, 64, 72),),
                {"sample": {0: batch, 2: height, 3: width}},
                "",
            )
            _name_inputs(model, {"sample": ["batch", None, "height", "width"]})
            _name_outputs(model, {"output": ["batch", None, f"{out}_height", f"{out}_width"]})
            graphs[f"vae-{half}"] = model
    return graphs, keys


# -- tracing -----------------------------------------------------------------------------------


def _traced(
    module: torch.nn.Module, inputs: tuple[Any, ...], dimensions: dict[str, Any], prefix: str
) -> ir.Model:
    """Trace and simplify; weights become the last inputs, by their names without `prefix`."""
    program = torch.onnx.export(
        module.eval(),
        inputs,
        dynamo=True,
        opset_version=OPSET,
        optimize=False,
        dynamic_shapes=dimensions,
        verbose=False,
    )
    assert program is not None
    model = program.model
    known = set(module.state_dict())
    for name in [name for name in model.graph.initializers if name in known]:
        # Folding would look for their numbers.
        value = model.graph.initializers.pop(name)
        value.const_value = None
        value.name = name.removeprefix(prefix)
        model.graph.inputs.append(value)
    optimizer.optimize(model)
    assert not model.functions
    common.ClearMetadataAndDocStringPass()(model)
    return model


def _name_inputs(model: ir.Model, sizes: Mapping[str, Sequence[str | None]]) -> None:
    """Name the inputs that are no weights, which come first, and their free sizes."""
    for value, (name, free) in zip(model.graph.inputs, sizes.items(), strict=False):
        value.name = name
        _name_sizes(value, free)


def _name_sizes(value: ir.Value, free: Sequence[str | None]) -> None:
    """Name free sizes; None leaves the size as it is."""
    assert value.shape is not None
    pairs = zip(value.shape, free, strict=True)
    value.shape = ir.Shape([old if new is None else new for old, new in pairs])


def _name_outputs(model: ir.Model, sizes: Mapping[str, Sequence[str | None]]) -> None:
    for output, (name, free) in zip(model.graph.outputs, sizes.items(), strict=True):
        output.name = name
        _name_sizes(output, free)


# -- variants of a graph -----------------------------------------------------------------------


def _copied(model: ir.Model) -> ir.Model:
    """Copy for good: what `Model.clone` gives shares the types of its values."""
    return ir.from_proto(ir.to_proto(model))


def _drop_residuals(model: ir.Model) -> None:
    graph = model.graph
    residuals = [value for value in graph.inputs if (value.name or "").startswith("residual_")]
    for residual in residuals:
        ((node, _),) = residual.uses()
        assert node.op_type == "Add"
        other = node.inputs[0]
        assert other is not None
        node.outputs[0].replace_all_uses_with(other)
        graph.remove(node, safe=True)
        graph.inputs.remove(residual)


def _with_channels(model: ir.Model, channels: int) -> ir.Model:
    """The same UNet for a sample of other channels, which only the first convolution meets."""
    model = _copied(model)
    for value in model.graph.inputs:
        if value.name in {"sample", "conv_in.weight"}:
            assert value.shape is not None
            sizes = list(value.shape)
            value.shape = ir.Shape([sizes[0], channels, *sizes[2:]])
    return model


def _is_float(value: ir.Value | None) -> bool:
    return value is not None and value.dtype == ir.DataType.FLOAT


def _to_float16(model: ir.Model, *, upcast_attention: bool) -> None:
    """Give all floats 16 bits, but for what is computed from `WIDE` inputs alone."""
    graph = model.graph
    wide = {value for value in graph.inputs if value.name in WIDE}
    narrow: dict[ir.Value, ir.Value] = {}
    for node in list(graph):
        floats = [value for value in node.inputs if value is not None and _is_float(value)]
        numbers = [value for value in floats if value.const_value is not None]
        if wide.intersection(floats) and wide.issuperset(set(floats).difference(numbers)):
            wide.update(output for output in node.outputs if _is_float(output))
            continue
        assert node.op_type != "Cast" or not any(map(_is_float, node.outputs)), node
        for index, value in enumerate(node.inputs):
            # The sizes of a Resize are float32 in every graph.
            if not _is_float(value) or (node.op_type == "Resize" and index > 0):
                continue
            assert value is not None
            if value in wide:
                node.replace_input_with(index, _cast_before(node, value, ir.DataType.FLOAT16))
            elif value.const_value is not None:
                node.replace_input_with(index, _narrowed(graph, value, narrow))
    for value in [*graph.inputs, *(output for node in graph for output in node.outputs)]:
        if _is_float(value) and value not in wide:
            value.dtype = ir.DataType.FLOAT16
    if upcast_attention:
        _upcast_attention(model)


def _cast_before(node: ir.Node, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    cast = ir.node("Cast", [value], {"to": int(dtype)})
    cast.outputs[0].dtype = dtype
    cast.outputs[0].shape = value.shape
    assert node.graph is not None
    node.graph.insert_before(node, cast)
    return cast.outputs[0]


def _narrowed(graph: ir.Graph, value: ir.Value, narrow: dict[ir.Value, ir.Value]) -> ir.Value:
    """The same constant in 16 bits; the wide one stays for those that share it."""
    if value not in narrow:
        assert value.const_value is not None
        numbers = value.const_value.numpy().astype(np.float16)
        assert np.isfinite(numbers).all()
        twin = ir.val(
            f"{value.name}_float16",
            dtype=ir.DataType.FLOAT16,
            shape=value.shape,
            const_value=ir.tensor(numbers, name=f"{value.name}_float16"),
        )
        graph.register_initializer(twin)
        narrow[value] = twin
    return narrow[value]


def _upcast_attention(model: ir.Model) -> None:
    """Attend in float32: in 16 bits the scores of some models of this kind overflow."""
    for node in [node for node in model.graph if node.op_type == "MultiHeadAttention"]:
        for index, value in enumerate(node.inputs):
            assert value is not None
            node.replace_input_with(index, _cast_before(node, value, ir.DataType.FLOAT))
        (output,) = node.outputs
        output.dtype = ir.DataType.FLOAT
        back = ir.node("Cast", [output], {"to": int(ir.DataType.FLOAT16)})
        back.outputs[0].dtype = ir.DataType.FLOAT16
        for user, index in list(output.uses()):
            user.replace_input_with(index, back.outputs[0])
        back.replace_input_with(0, output)
        model.graph.insert_after(node, back)


# -- weights -----------------------------------------------------------------------------------


def _transposed(node: ir.Node, weights: set[str]) -> bool:
    """Whether a node only transposes a matrix of weights."""
    source = node.inputs[0] if node.inputs else None
    return (
        node.op_type == "Transpose"
        and source is not None
        and source.name in weights
        and node.attributes.get_ints("perm", (1, 0)) == (1, 0)
    )


def _weights(models: Iterable[ir.Model], keys: Sequence[str]) -> tuple[Weight, ...]:
    """All initialisers that the graphs ask for, in the order of the state dict."""
    known = set(keys)
    found: dict[tuple[str, bool], tuple[int, ...]] = {}
    for model in models:
        for value in model.graph.inputs:
            for node, _ in value.uses() if value.name in known else ():
                assert value.shape is not None
                assert value.name is not None
                transposed = _transposed(node, known)
                sizes = tuple(size for size in value.shape if isinstance(size, int))
                assert len(sizes) == len(value.shape), value
                found[value.name, transposed] = sizes[::-1] if transposed else sizes
    order = {key: number for number, key in enumerate(keys)}
    return tuple(
        Weight(
            name=f"{key}::T" if transposed else key,
            key=key,
            shape=found[key, transposed],
            transposed=transposed,
        )
        for key, transposed in sorted(found, key=lambda pair: (order[pair[0]], pair[1]))
    )


def _bind(model: ir.Model, weights: Sequence[Weight], dtype: str) -> None:
    """Make external initialisers of the inputs that are weights."""
    graph = model.graph
    keys = {weight.key for weight in weights}
    for node in [node for node in graph if _transposed(node, keys)]:
        (output,) = node.outputs
        source = node.inputs[0]
        assert source is not None
        turned = ir.val(f"{source.name}::T", dtype=source.dtype)
        graph.inputs.append(turned)
        output.replace_all_uses_with(turned)
        graph.remove(node, safe=True)
    offsets, _ = layout(weights, dtype)
    by_name = {weight.name: weight for weight in weights}
    for value in list(graph.inputs):
        if value.name not in by_name and value.name not in keys:
            continue
        graph.inputs.remove(value)
        if not value.uses():
            continue
        weight = by_name[value.name or ""]
        value.shape = ir.Shape(weight.shape)
        assert value.dtype is not None
        value.const_value = ir.ExternalTensor(
            WEIGHTS,
            offsets[weight.name],
            weight.size * DTYPES[dtype],
            value.dtype,
            shape=value.shape,
            name=weight.name,
        )
        graph.register_initializer(value)


def _tidy(model: ir.Model) -> None:
    """Drop what nobody reads, and hold the promises of this module's first lines."""
    graph = model.graph
    common.RemoveUnusedNodesPass()(model)
    common.TopologicalSortPass()(model)
    model.ir_version = IR_VERSION
    model.producer_name, model.producer_version = "sdamd", ""
    model.opset_imports.clear()
    model.opset_imports.update({"": OPSET, CONTRIB: 1})
    graph.name = "sdamd"
    for number, node in enumerate(graph):
        node.name = f"{node.op_type}_{number}"
        node.attributes.pop("allowzero", None)
        assert node.domain in {"", CONTRIB}, node
        for index, output in enumerate(node.outputs):
            if not output.is_graph_output():
                output.name = f"v{number}" if index == 0 else f"v{number}_{index}"
                output.type = None
                output.shape = None
    common.ClearMetadataAndDocStringPass()(model)


if __name__ == "__main__":
    sys.exit(main())

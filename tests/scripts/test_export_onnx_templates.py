"""The graphs that ship: DirectML has a kernel for every node, and they are what is traced today."""

import csv
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import AttributeProto, TensorProto, defs

from scripts import export_onnx_templates
from sdamd.backends.onnx_export import (
    DTYPES,
    GRAPHS,
    WEIGHTS,
    Template,
    export,
    free_dimensions,
    layout,
    read_template,
    templates,
)

KERNELS = Path(__file__).parents[1] / "data" / "onnx" / "dml-kernels.csv"
SHIPPED = [
    pytest.param(template, name, dtype, id=f"{template.title}: {name}, {dtype}")
    for template in templates()
    for name in GRAPHS[template.component]
    for dtype in DTYPES
]
ELEMENT = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}
TYPE_NAMES: dict[int, str] = {
    TensorProto.FLOAT: "float",
    TensorProto.FLOAT16: "float16",
    TensorProto.INT64: "int64",
}


def graph_of(template: Template, name: str, dtype: str) -> onnx.ModelProto:
    return onnx.load_from_string(template.graph(name, dtype))


def kernels() -> dict[tuple[str, str], dict[int, set[str]]]:
    """(domain, operator) -> version of the schema -> types."""
    table: dict[tuple[str, str], dict[int, set[str]]] = defaultdict(dict)
    with KERNELS.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            types = set(row["types"].split())
            table[row["domain"], row["operator"]][int(row["since"])] = types
    return table


def attribute(node: onnx.NodeProto, name: str) -> AttributeProto | None:
    return next((each for each in node.attribute if each.name == name), None)


def typed(graph: onnx.GraphProto) -> Iterator[tuple[onnx.NodeProto, list[int]]]:
    """Each node with the element types of its inputs, 0 for one that is left out.

    All operators of these graphs give the type of their first input, but for two.
    """
    types = {value.name: value.type.tensor_type.elem_type for value in graph.input}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in graph.node:
        yield node, [types[name] if name else 0 for name in node.input]
        out = types[node.input[0]]
        if node.op_type == "Shape":
            out = TensorProto.INT64
        if to := attribute(node, "to"):
            out = to.i
        types |= dict.fromkeys(node.output, out)
    for value in graph.output:
        assert types[value.name] == value.type.tensor_type.elem_type


@pytest.mark.parametrize(("template", "name", "dtype"), SHIPPED)
def test_directml_has_a_kernel_for_every_node(template: Template, name: str, dtype: str) -> None:
    """One of exactly the version of the node's schema, for the types that it meets."""
    table = kernels()
    model = graph_of(template, name, dtype)
    (opset,) = [each.version for each in model.opset_import if not each.domain]
    lacking = set()
    for node, types in typed(model.graph):
        domain = node.domain or "ai.onnx"
        since = 1 if node.domain else defs.get_schema(node.op_type, opset).since_version
        known = table[domain, node.op_type].get(since, set())
        # Sizes of a Resize and shapes are their own parameters, of one type each.
        met = {types[0]} if node.op_type in {"Resize", "Reshape"} else set(types) - {0}
        lacking |= {(node.op_type, since, TYPE_NAMES[t]) for t in met if TYPE_NAMES[t] not in known}
    assert not lacking


@pytest.mark.parametrize(
    ("operator", "opset"), [("Gelu", 20), ("Conv", 22), ("Attention", 23), ("Reshape", 23)]
)
def test_the_table_tells_newer_opsets_from_those_that_directml_runs(
    operator: str, opset: int
) -> None:
    """Seen with the provider itself: nodes of these versions fell to the CPU."""
    since = defs.get_schema(operator, opset).since_version
    assert since not in kernels()["ai.onnx", operator]


@pytest.mark.parametrize(("template", "name", "dtype"), SHIPPED)
def test_a_graph_keeps_its_promises(template: Template, name: str, dtype: str) -> None:
    model = graph_of(template, name, dtype)
    assert model.ir_version == 10
    assert {each.domain: each.version for each in model.opset_import} == {
        "": 18,
        "com.microsoft": 1,
    }
    assert {value.name for value in model.graph.value_info} <= {
        tensor.name for tensor in model.graph.initializer
    }
    assert not model.metadata_props
    for node in model.graph.node:
        assert not node.metadata_props
        assert not node.doc_string
        assert (zero := attribute(node, "allowzero")) is None or zero.i == 0
    for value in [*model.graph.input, *model.graph.output]:
        for size in value.type.tensor_type.shape.dim:
            assert size.dim_value > 0 or size.dim_param.isidentifier()
        wide = value.name in {"timestep", "time_ids"}
        element = value.type.tensor_type.elem_type
        assert element == (TensorProto.FLOAT if wide else ELEMENT[dtype])


@pytest.mark.parametrize(("template", "name", "dtype"), SHIPPED)
def test_all_free_sizes_of_inputs_can_be_fixed(template: Template, name: str, dtype: str) -> None:
    known = free_dimensions(batch=2, height=64, width=96)
    for value in graph_of(template, name, dtype).graph.input:
        for size in value.type.tensor_type.shape.dim:
            assert size.dim_value > 0 or size.dim_param in known


@pytest.mark.parametrize(("template", "name", "dtype"), SHIPPED)
def test_weights_are_where_the_layout_says(template: Template, name: str, dtype: str) -> None:
    offsets, _ = layout(template.weights, dtype)
    weights = {weight.name: weight for weight in template.weights}
    outside = 0
    for tensor in graph_of(template, name, dtype).graph.initializer:
        if tensor.data_location != TensorProto.EXTERNAL:
            assert math.prod(tensor.dims) <= 320, tensor.name
            continue
        outside += 1
        where = {entry.key: entry.value for entry in tensor.external_data}
        assert where == {
            "location": WEIGHTS,
            "offset": str(offsets[tensor.name]),
            "length": str(weights[tensor.name].size * DTYPES[dtype]),
        }
        assert tensor.data_type == ELEMENT[dtype]
        assert tuple(tensor.dims) == weights[tensor.name].shape
    assert outside > 60


@pytest.mark.parametrize("template", templates(), ids=lambda template: str(template.title))
def test_no_weight_is_written_that_no_graph_reads(template: Template) -> None:
    read = {
        tensor.name
        for name in GRAPHS[template.component]
        for tensor in graph_of(template, name, "float32").graph.initializer
    }
    assert {weight.name for weight in template.weights} <= read


@pytest.mark.parametrize(("template", "name", "dtype"), SHIPPED)
def test_float16_is_the_same_graph_with_other_types(
    template: Template, name: str, dtype: str
) -> None:
    """Besides one cast after each sinusoid, and four around each attention that upcasts."""
    counts = Counter(node.op_type for node in graph_of(template, name, dtype).graph.node)
    wide = Counter(node.op_type for node in graph_of(template, name, "float32").graph.node)
    assert wide["Cast"] == 0
    casts = counts.pop("Cast", 0)
    assert counts == wide
    upcast = 4 * counts["MultiHeadAttention"] if "Diffusion 2" in template.title else 0
    assert casts == (dtype == "float16") * (counts["Sin"] + upcast)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nine_channels_differ_in_the_first_convolution_alone(dtype: str) -> None:
    pairs = defaultdict(list)
    for template in templates():
        if template.title.endswith(" channels"):
            pairs[template.title.rsplit(" ", 2)[0]].append(template)
    assert sorted(map(len, pairs.values())) == [2, 2, 2]
    for four, nine in pairs.values():
        for name in GRAPHS["unet"]:
            a, b = (graph_of(template, name, dtype).graph for template in (four, nine))
            assert [*a.node] == [*b.node]
            shapes = [{tensor.name: [*tensor.dims] for tensor in g.initializer} for g in (a, b)]
            differ = {name for name, shape in shapes[0].items() if shapes[1][name] != shape}
            assert differ == {"conv_in.weight"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("component", GRAPHS)
def test_no_arithmetic_on_shapes_is_left_once_sizes_are_fixed(
    component: str, dtype: str, tmp_path: Path
) -> None:
    """What would run on the CPU between kernels of the GPU: it is folded at session creation."""
    (template,) = [
        t for t in templates() if t.component == component and t.title.startswith("embedded")
    ]
    file = tmp_path / "model.safetensors"
    file.touch()
    made = export(
        template,
        dtype,
        [file],
        tmp_path,
        lambda: {
            weight.key: torch.zeros(weight.shape[:: -1 if weight.transposed else 1])
            for weight in template.weights
        },
    )
    for name in GRAPHS[component]:
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
        for size in free_dimensions(batch=2, height=17, width=16).items():
            options.add_free_dimension_override_by_name(*size)
        ort.InferenceSession(str(made.graph(name)), options, providers=["CPUExecutionProvider"])
        graph = onnx.load(tmp_path / "optimized.onnx", load_external_data=False).graph
        operators = {node.op_type for node in graph.node}
        assert "Conv" in operators
        assert not operators & {"Shape", "Gather", "Squeeze", "Expand", "Range", "ConstantOfShape"}


def spelled(values: Iterable[onnx.ValueInfoProto]) -> list[tuple[str, list[str | int]]]:
    """Names and sizes."""
    return [
        (each.name, [size.dim_param or size.dim_value for size in each.type.tensor_type.shape.dim])
        for each in values
    ]


@pytest.mark.parametrize(
    "family",
    ["embedded model", "Stable Diffusion 1.x", "Stable Diffusion 2.x", "Stable Diffusion XL"],
)
def test_a_controlnet_gives_what_its_unet_takes(family: str) -> None:
    """In the same order and of the same sizes; and it is asked with what the UNet is asked."""
    of_family = [template for template in templates() if template.title.startswith(family)]
    (controlnet,) = (t for t in of_family if t.component == "controlnet")
    unet = next(t for t in of_family if t.component == "unet" and "9" not in t.title)
    steering = graph_of(controlnet, "controlnet", "float32").graph
    steered = graph_of(unet, "unet-controlnet", "float32").graph
    *conditions, picture = spelled(steering.input)
    assert picture == ("controlnet_cond", ["batch", 3, "pixel_height", "pixel_width"])
    assert [*conditions, *spelled(steering.output)] == spelled(steered.input)


# -- drift -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of torch's exporter, about itself
@pytest.mark.parametrize("name", ["tiny-unet", "tiny-controlnet"])
def test_the_shipped_graphs_are_those_that_are_traced_today(name: str, tmp_path: Path) -> None:
    """Of the embedded model, which takes 20 to 40 s each; all others take the same way."""
    target = export_onnx_templates.TARGETS[name]
    (folder,) = export_onnx_templates.write(target, tmp_path)
    made = read_template(folder)
    (shipped,) = [template for template in templates() if template.key == made.key]
    assert (made.title, made.weights) == (shipped.title, shipped.weights)
    for graph in GRAPHS[made.component]:
        for dtype in DTYPES:
            new, old = (graph_of(template, graph, dtype).graph for template in (made, shipped))
            assert [*new.node] == [*old.node]
            assert [*new.initializer] == [*old.initializer]
            assert [*new.input, *new.output] == [*old.input, *old.output]


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        export_onnx_templates.main(["sd3-unet"])
    assert "sd3-unet is not known; allowed: tiny-unet" in capsys.readouterr().err

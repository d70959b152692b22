"""A graph of ComfyUI as values: nodes, what goes into each, and ways through it.

The API form is read as it is; the form of the editor (`nodes`, `links`, `widgets_values`) is
brought into it, for the nodes whose widgets are known. Every walk is a loop over nodes that
were not seen yet, so that a circle ends and a long chain needs no stack.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sdamd.errors import BadMetadata

_Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Link:
    """The output of another node: which node, and which of its outputs."""

    node: str
    output: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node: its number, its class, and its inputs, each a value or a `Link`."""

    number: str
    kind: str
    inputs: Mapping[str, Any]

    def link(self, *names: str) -> Link | None:
        """The first of these inputs that comes from another node."""
        return next((v for n in names if isinstance(v := self.inputs.get(n), Link)), None)

    def links(self) -> Iterator[tuple[str, Link]]:
        """All inputs that come from other nodes."""
        return ((name, v) for name, v in self.inputs.items() if isinstance(v, Link))


@dataclass(frozen=True, slots=True)
class Graph:
    """All nodes by their number."""

    nodes: Mapping[str, Node]

    def at(self, link: Link | None) -> Node | None:
        """The node that a link comes from; None where it is missing."""
        return self.nodes.get(link.node) if link else None

    def upstream(self, start: Node) -> Iterator[Node]:
        """A node and all that it depends on, the nearest first, each once."""
        seen, queue = {start.number}, [start]
        for node in queue:
            yield node
            for _, link in node.links():
                if link.node not in seen and (source := self.nodes.get(link.node)):
                    seen.add(link.node)
                    queue.append(source)


def from_api(values: _Raw) -> Graph:
    """Read the API form: `{"3": {"class_type": "KSampler", "inputs": {"model": ["4", 0]}}}`.

    Raises:
        BadMetadata: no node in it has a class.
    """
    nodes: dict[str, Node] = {}
    for number, raw in values.items():
        if isinstance(raw, dict) and isinstance(raw.get("class_type"), str):
            inputs = raw.get("inputs")
            given = inputs.items() if isinstance(inputs, dict) else ()
            linked = {str(name): _linked(value) for name, value in given}
            nodes[number] = Node(number=number, kind=raw["class_type"], inputs=linked)
    if not nodes:
        raise BadMetadata("the graph of ComfyUI has no nodes")
    return Graph(nodes)


def _linked(value: Any) -> Any:
    """An input; a pair of a node's number and an output's is a link."""
    if (
        isinstance(value, list)
        and len(value) == 2
        and isinstance(value[0], str | int)
        and type(value[1]) is int
    ):
        return Link(str(value[0]), value[1])
    return value


# -- the editor's form ---------------------------------------------------------------------------

_SKIP: Final = ""
"""In the place of a widget that the API form does not have (`control after generate`)."""

# The widgets of each class in the order of `widgets_values`.
# Source: ComfyUI, the order of INPUT_TYPES in nodes.py and comfy_extras.
WIDGETS: Final[Mapping[str, tuple[str, ...]]] = {
    "KSampler": ("seed", _SKIP, "steps", "cfg", "sampler_name", "scheduler", "denoise"),
    "KSamplerAdvanced": ("add_noise", "noise_seed", _SKIP, "steps", "cfg", "sampler_name",
                         "scheduler", "start_at_step", "end_at_step",
                         "return_with_leftover_noise"),
    "SamplerCustom": ("add_noise", "noise_seed", _SKIP, "cfg"),
    "KSamplerSelect": ("sampler_name",),
    "BasicScheduler": ("scheduler", "steps", "denoise"),
    "KarrasScheduler": ("steps", "sigma_max", "sigma_min", "rho"),
    "ExponentialScheduler": ("steps", "sigma_max", "sigma_min"),
    "RandomNoise": ("noise_seed", _SKIP),
    "CFGGuider": ("cfg",),
    "CheckpointLoaderSimple": ("ckpt_name",),
    "CheckpointLoader": ("config_name", "ckpt_name"),
    "unCLIPCheckpointLoader": ("ckpt_name",),
    "UNETLoader": ("unet_name", "weight_dtype"),
    "VAELoader": ("vae_name",),
    "LoraLoader": ("lora_name", "strength_model", "strength_clip"),
    "LoraLoaderModelOnly": ("lora_name", "strength_model"),
    "CLIPTextEncode": ("text",),
    "CLIPTextEncodeSDXL": ("width", "height", "crop_w", "crop_h", "target_width",
                           "target_height", "text_g", "text_l"),
    "CLIPSetLastLayer": ("stop_at_clip_layer",),
    "ConditioningSetArea": ("width", "height", "x", "y", "strength"),
    "ConditioningAverage": ("conditioning_to_strength",),
    "ControlNetLoader": ("control_net_name",),
    "ControlNetApply": ("strength",),
    "ControlNetApplyAdvanced": ("strength", "start_percent", "end_percent"),
    "EmptyLatentImage": ("width", "height", "batch_size"),
    "EmptySD3LatentImage": ("width", "height", "batch_size"),
    "LatentUpscale": ("upscale_method", "width", "height", "crop"),
    "LatentUpscaleBy": ("upscale_method", "scale_by"),
    "ImageScale": ("upscale_method", "width", "height", "crop"),
    "ImageScaleBy": ("upscale_method", "scale_by"),
    "UpscaleModelLoader": ("model_name",),
    "LoadImage": ("image", _SKIP),
    "SaveImage": ("filename_prefix",),
    "PrimitiveNode": ("value", _SKIP),
    "PrimitiveInt": ("value", _SKIP),
    "PrimitiveFloat": ("value",),
    "PrimitiveString": ("value",),
    "PrimitiveStringMultiline": ("value",),
}  # fmt: skip

_MUTED, _BYPASSED = 2, 4


def from_workflow(values: _Raw) -> tuple[Graph, list[str]]:
    """Read the editor's form; gives the graph, and what of it is not understood.

    Muted nodes are left out; a bypassed one gives on what it gets of the same type.

    Raises:
        BadMetadata: it has no nodes.
    """
    raw_nodes = [n for n in _list(values.get("nodes")) if isinstance(n, dict) and "id" in n]
    if not raw_nodes:
        raise BadMetadata("the workflow of ComfyUI has no nodes")
    sources = {
        link[0]: Link(str(link[1]), link[2])
        for link in _list(values.get("links"))
        if isinstance(link, list) and len(link) >= 5 and type(link[2]) is int
    }
    bypassed = {
        str(raw["id"]): raw for raw in raw_nodes if raw.get("mode") == _BYPASSED
    }  # fmt: skip
    problems: list[str] = []
    definitions = values.get("definitions")
    if isinstance(definitions, dict) and definitions.get("subgraphs"):
        problems.append("subgraphs are not looked into")
    nodes: dict[str, Node] = {}
    for raw in raw_nodes:
        number = str(raw["id"])
        if raw.get("mode") != _MUTED and number not in bypassed:
            inputs = _widgets(raw) | _inputs(raw, sources, bypassed)
            nodes[number] = Node(number=number, kind=str(raw.get("type")), inputs=inputs)
    return Graph(nodes), problems


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _widgets(raw: _Raw) -> dict[str, Any]:
    values = raw.get("widgets_values")
    if isinstance(values, dict):
        return {str(name): value for name, value in values.items()}
    names = WIDGETS.get(str(raw.get("type")), ())
    return {n: v for n, v in zip(names, _list(values), strict=False) if n != _SKIP}


def _inputs(
    raw: _Raw, sources: Mapping[Any, Link], bypassed: Mapping[str, _Raw]
) -> dict[str, Link]:
    found: dict[str, Link] = {}
    for given in _list(raw.get("inputs")):
        if not isinstance(given, dict) or not isinstance(given.get("link"), int | str):
            continue
        link = sources.get(given["link"])
        seen: set[str] = set()
        while link and link.node in bypassed and link.node not in seen:
            seen.add(link.node)
            link = _through(bypassed[link.node], given.get("type"), sources)
        if link:
            found[str(given.get("name"))] = link
    return found


def _through(raw: _Raw, kind: Any, sources: Mapping[Any, Link]) -> Link | None:
    """What a bypassed node gives on: its first input of the type."""
    for given in _list(raw.get("inputs")):
        if isinstance(given, dict) and given.get("type") == kind:
            number = given.get("link")
            return sources.get(number) if isinstance(number, int | str) else None
    return None

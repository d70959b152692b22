"""ComfyUI: the graph that made a picture, followed from the saved image back to its sampler.

A graph can be anything; what is read is the way that most of them have: a checkpoint (with
LoRAs) and two texts into a sampler, an empty latent or a picture before it, and perhaps a second
sampler after an enlargement. All else on that way is named in the reading's `unused`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from sdamd.interchange import json_text, samplers, weights
from sdamd.interchange.comfyui_graph import Graph, Link, Node, from_api, from_workflow
from sdamd.interchange.parameters import OWN_NETWORK
from sdamd.interchange.reading import Draft, Reading, model_name
from sdamd.request import HiresUpscaler

TOOL: Final = "ComfyUI"

_SAVING: Final = ("SaveImage", "PreviewImage", "Save Image", "Image Save", "ImageSave")
_MAX_NODES: Final = 20_000
"""Graphs with more are refused: hand-made ones have tens of nodes, the largest a few thousand."""

_MAX_SAVES: Final = 64

_SEEDS: Final = ("seed", "noise_seed")
_VALUES: Final = (
    "value", "int", "float", "number", "seed", "Value", "string", "text", "String", "Text",
    "STRING", "prompt", "text_0", "wildcard_text", "populated_text",
)  # fmt: skip
_PASSES_ON: Final = ("conditioning", "conditioning_to", "positive", "cond", "base_positive")

# Source: ComfyUI nodes.py and comfy_extras; LatentUpscale's and ImageScale's methods.
_METHODS: Final[Mapping[str, HiresUpscaler]] = {
    "nearest-exact": HiresUpscaler.LATENT_NEAREST,
    "bilinear": HiresUpscaler.LATENT,
    "bicubic": HiresUpscaler.LATENT_BICUBIC,
}


def read(texts: Mapping[str, str]) -> Reading:
    """Read the texts `prompt` (the API form) and `workflow` (the editor's) of a picture.

    Raises:
        BadMetadata: not JSON, no graph, or larger than graphs are.
    """
    graph = json_text.load_object(texts.get("prompt", "{}"), "ComfyUI's graph")
    if graph or "workflow" not in texts:
        return read_api(graph)
    return read_workflow(json_text.load_object(texts["workflow"], "ComfyUI's workflow"))


def read_api(values: Mapping[str, Any]) -> Reading:
    """Read a graph in the form of ComfyUI's server.

    Raises:
        BadMetadata: it has no nodes.
    """
    return read_graph(from_api(values)) if len(values) <= _MAX_NODES else _too_large(len(values))


def read_workflow(values: Mapping[str, Any]) -> Reading:
    """Read a graph in the form of ComfyUI's editor.

    Raises:
        BadMetadata: it has no nodes.
    """
    nodes = values.get("nodes")
    if isinstance(nodes, list) and len(nodes) > _MAX_NODES:
        return _too_large(len(nodes))
    return read_graph(*from_workflow(values))


def _too_large(nodes: int) -> Reading:
    draft = Draft(tool=TOOL)
    draft.miss("graph", f"{nodes} nodes", f"allowed are at most {_MAX_NODES}")
    return draft.done()


def read_graph(graph: Graph, problems: list[str] | None = None) -> Reading:
    """Read a graph.

    Args:
        graph: all of its nodes.
        problems: what was not understood on the way to it.
    """
    draft = Draft(tool=TOOL)
    for problem in problems or []:
        draft.miss("workflow", "", problem)
    passes = _passes(graph, draft)
    if not passes:
        draft.miss("graph", ", ".join(sorted({n.kind for n in graph.nodes.values()})),
                   "no sampler was found in it")  # fmt: skip
        return draft.done()
    _read_sampler(graph, draft, passes[0])
    _read_model(graph, draft, passes[0].node)
    _read_prompts(graph, draft, passes[0].node)
    _read_size(graph, draft, passes[0])
    _read_decoder(graph, draft, passes[-1])
    if len(passes) > 1:
        _read_second(graph, draft, passes[0], passes[1])
    for later in passes[2:]:
        draft.miss(f"sampler {later.node.number}", later.node.kind,
                   "two passes are read, this is a further one")  # fmt: skip
    draft.cpu_noise()
    return draft.done()


# -- the passes ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """A sampler, what lies between it and what comes after, and the latent that goes in."""

    node: Node
    after: tuple[Node, ...] = field(default=())


def _is_sampler(node: Node) -> bool:
    names = node.inputs
    has_latent = any(name in names for name in ("latent_image", "latent", "samples"))
    return (
        node.kind in {"SamplerCustom", "SamplerCustomAdvanced"}
        or ("sampler_name" in names and "steps" in names and "cfg" in names)
        or ("KSampler" in node.kind and has_latent)
    )


def _passes(graph: Graph, draft: Draft) -> list[_Pass]:
    """The samplers on the way to the saved picture, the first one first."""
    best: list[_Pass] = []
    saves = [n for n in graph.nodes.values() if n.kind.startswith(_SAVING)]
    if len(saves) > _MAX_SAVES:
        draft.miss("graph", f"{len(saves)} pictures", f"the first {_MAX_SAVES} are looked at")
        saves = saves[:_MAX_SAVES]
    ways = [way for save in saves if (way := _way(graph, save))]
    if not ways:
        last = _last_samplers(graph)[:_MAX_SAVES]
        ways = [way for node in last if (way := _way(graph, node))]
    for way in ways:
        best = way if len(way) > len(best) else best
    ends = {way[-1].node.number for way in ways}
    if len(ends) > 1:
        draft.miss("graph", f"{len(ends)} pictures",
                   f"several are made in it; read is that of sampler {best[-1].node.number}",
                   )  # fmt: skip
    return best


def _last_samplers(graph: Graph) -> list[Node]:
    """The samplers that no other node needs, or all of them."""
    found = [n for n in graph.nodes.values() if _is_sampler(n)]
    needed = {link.node for node in graph.nodes.values() for _, link in node.links()}
    return [n for n in found if n.number not in needed] or found


def _way(graph: Graph, end: Node) -> list[_Pass]:
    """The samplers before `end`, followed along images and latents; the first one first."""
    passes: list[_Pass] = []
    seen: set[str] = set()
    between: list[Node] = []
    node: Node | None = end
    while node and node.number not in seen:
        seen.add(node.number)
        if _is_sampler(node):
            passes.append(_Pass(node=node, after=tuple(between)))
            between = []
        else:
            between.append(node)
        node = graph.at(_before(graph, node))
    return passes[::-1]


def _before(graph: Graph, node: Node) -> Link | None:
    """Where the image or latent comes from that a node works on."""
    link = node.link(
        "latent_image", "samples", "latent", "images", "image", "pixels", "samples_to",
        "input", "any", "", "IMAGE", "LATENT", "image1", "optional_latent", "latents",
    )  # fmt: skip
    if link or _is_sampler(node):
        return link
    # A node of somebody's own: the input that leads to a sampler.
    for name, other in node.links():
        source = graph.at(other)
        if source and name not in {"model", "clip", "vae", "positive", "negative", "mask"}:
            return other
    return None


# -- one sampler ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """What a sampler was told; None where it could not be followed."""

    seed: Any = None
    steps: Any = None
    cfg: Any = None
    sampler: Any = None
    schedule: Any = None
    denoise: Any = None


def _settings(graph: Graph, node: Node) -> _Settings:
    if node.kind == "SamplerCustomAdvanced":
        noise, guider = graph.at(node.link("noise")), graph.at(node.link("guider"))
        seed = _value(graph, noise, *_SEEDS)
        cfg = _value(graph, guider, "cfg")
        if cfg is None and guider and guider.kind == "BasicGuider":
            cfg = 1.0
        return _custom(graph, node, seed, cfg)
    if node.kind == "SamplerCustom":
        return _custom(graph, node, _value(graph, node, *_SEEDS), _value(graph, node, "cfg"))
    return _Settings(
        seed=_value(graph, node, *_SEEDS),
        steps=_value(graph, node, "steps"),
        cfg=_value(graph, node, "cfg"),
        sampler=_value(graph, node, "sampler_name"),
        schedule=_value(graph, node, "scheduler"),
        denoise=_value(graph, node, "denoise"),
    )


_NAMED_SCHEDULES: Final[Mapping[str, str]] = {
    "KarrasScheduler": "karras",
    "ExponentialScheduler": "exponential",
    "PolyexponentialScheduler": "polyexponential",
    "BetaSamplingScheduler": "beta",
}


def _custom(graph: Graph, node: Node, seed: Any, cfg: Any) -> _Settings:
    """The settings of a sampler that is put together of several nodes."""
    sampler, sigmas = graph.at(node.link("sampler")), graph.at(node.link("sigmas"))
    schedule = _value(graph, sigmas, "scheduler")
    if schedule is None and sigmas:
        schedule = _NAMED_SCHEDULES.get(sigmas.kind, sigmas.kind)
    name = _value(graph, sampler, "sampler_name")
    if name is None and sampler:
        name = sampler.kind
    return _Settings(
        seed=seed,
        steps=_value(graph, sigmas, "steps"),
        cfg=cfg,
        sampler=name,
        schedule=schedule,
        denoise=_value(graph, sigmas, "denoise"),
    )


def _value(graph: Graph, node: Node | None, *names: str) -> Any:
    """The value of the first of these inputs, also where another node holds it."""
    if node is None:
        return None
    given = next((node.inputs[name] for name in names if name in node.inputs), None)
    seen: set[str] = set()
    while isinstance(given, Link) and given.node not in seen:
        seen.add(given.node)
        source = graph.at(given)
        if source is None:
            return None
        given = _held(source)
    return None if isinstance(given, Link | list | dict) else given


def _held(node: Node) -> Any:
    """What a node that holds one value gives on, or the link that it passes on."""
    for name in _VALUES:
        if name in node.inputs:
            return node.inputs[name]
    values = list(node.inputs.values())
    return values[0] if len(values) == 1 else None


def _read_sampler(graph: Graph, draft: Draft, first: _Pass) -> None:
    node, told = first.node, _settings(graph, first.node)
    for name, value, said in (
        ("seed", told.seed, "seed"),
        ("steps", told.steps, "steps"),
        ("guidance_scale", told.cfg, "cfg"),
    ):
        if value is not None:
            draft.put(name, value, said=said)
        elif any(n in node.inputs for n in (said, *_SEEDS)):
            draft.miss(name, "", f"node {node.number} has it from a node that is not understood")
    if told.sampler is not None:
        samplers.put(draft, samplers.COMFYUI, told.sampler, told.schedule or "")
    _read_part_of_steps(graph, draft, node)


def _read_part_of_steps(graph: Graph, draft: Draft, node: Node) -> None:
    """KSamplerAdvanced can begin late and end early."""
    start, end = _value(graph, node, "start_at_step"), _value(graph, node, "end_at_step")
    steps = draft.values.get("steps")
    if isinstance(start, int) and start > 0:
        draft.miss("start_at_step", start, "sdamd runs all steps")
    if isinstance(end, int) and isinstance(steps, int) and end < steps:
        draft.miss("end_at_step", end, "sdamd runs all steps")
    if _value(graph, node, "add_noise") == "disable":
        draft.miss("add_noise", "disable", "sdamd always begins with noise")


# -- model and texts -----------------------------------------------------------------------------


def _read_model(graph: Graph, draft: Draft, sampler: Node) -> None:
    """Follow the model through what changes it to where it is loaded."""
    guider = graph.at(sampler.link("guider")) or sampler
    node, seen = graph.at(guider.link("model")), set[str]()
    while node and node.number not in seen:
        seen.add(node.number)
        loaded = _value(graph, node, "ckpt_name", "unet_name", "base_ckpt_name", "checkpoint")
        if isinstance(loaded, str):
            draft.values["checkpoint"] = model_name(loaded)
            lora = _value(graph, node, "lora_name")
            if isinstance(lora, str) and lora != "None":
                _read_model_change(graph, draft, node)
            return
        _read_model_change(graph, draft, node)
        node = graph.at(node.link("model", "MODEL", "", "any", "input"))
    draft.miss("checkpoint", "", "the node that loads the model was not found")


def _read_model_change(graph: Graph, draft: Draft, node: Node) -> None:
    lora = _value(graph, node, "lora_name")
    if isinstance(lora, str):
        strengths = [_value(graph, node, "strength_clip", "lora_clip_strength"),
                     _value(graph, node, "strength_model", "lora_model_strength")]  # fmt: skip
        draft.lora(lora, *(s for s in strengths if s is not None))
        return
    stacked = [v for name, v in node.inputs.items() if name.startswith("lora_")]
    for entry in stacked:
        if isinstance(entry, dict) and entry.get("lora") and entry.get("on", True):
            draft.lora(str(entry["lora"]), entry.get("strength", ""))
        elif isinstance(entry, str) and entry not in {"", "None"}:
            draft.lora(entry)
    if not stacked and node.kind not in {"Reroute", "PrimitiveNode"}:
        draft.miss(node.kind, _literals(node), "changes the model in a way that sdamd has not")


def _literals(node: Node) -> str:
    return ", ".join(f"{n}={v}" for n, v in node.inputs.items() if not isinstance(v, Link))


def _read_prompts(graph: Graph, draft: Draft, sampler: Node) -> None:
    guider = graph.at(sampler.link("guider")) or sampler
    positive = _texts(graph, draft, guider.link("positive", "conditioning"), "prompt")
    negative = _texts(graph, draft, guider.link("negative"), "negative_prompt")
    if len(positive) > 1:
        # What ComfyUI predicts for each is averaged, which is AND with equal weights.
        weight = f"{1 / len(positive):.6g}"
        draft.values["prompt"] = " AND ".join(f"{text}:{weight}" for text in positive)
    else:
        draft.values["prompt"] = "".join(positive)
    draft.values["negative_prompt"] = ", ".join(negative)
    if len(negative) > 1:
        draft.miss("negative", f"{len(negative)} texts", "joined by commas; they were averaged")


def _texts(graph: Graph, draft: Draft, link: Link | None, field: str) -> list[str]:
    """The texts of a conditioning in sdamd's language; several are averaged."""
    found: list[str] = []
    if link is None and field == "negative_prompt":
        return found  # guiders without guidance have none
    waiting, seen = [link], set[str]()
    while waiting:
        link = waiting.pop(0)
        node = graph.at(link)
        if node is None or node.number in seen:
            if node is None:
                draft.miss(field, "", "the text's node is missing in the graph")
            continue
        seen.add(node.number)
        kind = node.kind
        if kind == "ConditioningCombine":
            waiting[:0] = [node.link("conditioning_1"), node.link("conditioning_2")]
        elif kind == "ConditioningConcat":
            parts = [
                text
                for name in ("conditioning_to", "conditioning_from")
                for text in _texts_below(graph, draft, node.link(name), field, seen)
            ]
            found.append(" BREAK ".join(parts))
        elif kind == "ConditioningZeroOut":
            found.append("")
            draft.miss(kind, "", f"read as an empty {field}, which comes near")
        elif (text := _encoded(graph, draft, node)) is not None or (
            text := _typed(graph, node, field)
        ) is not None:
            found.append(text)
        else:
            waiting.insert(0, _through(draft, graph, node, field))
    return found


def _texts_below(
    graph: Graph, draft: Draft, link: Link | None, field: str, seen: set[str]
) -> Iterator[str]:
    """The texts of one side of a concatenation, followed through what has one text alone."""
    node = graph.at(link)
    while node and node.number not in seen:
        seen.add(node.number)
        if node.kind == "ConditioningConcat":
            yield from _chain(graph, draft, node, field, seen)
            return
        text = _encoded(graph, draft, node)
        if text is not None:
            yield text
            return
        node = graph.at(_through(draft, graph, node, field))
    draft.miss(field, "", "a part of a concatenated text was not found")


def _chain(graph: Graph, draft: Draft, node: Node, field: str, seen: set[str]) -> Iterator[str]:
    """A concatenation of concatenations, which are chained on their first side."""
    tails: list[str] = []
    current: Node | None = node
    while current and current.kind == "ConditioningConcat":
        last = graph.at(current.link("conditioning_from"))
        text = _encoded(graph, draft, last) if last else None
        if text is None:
            draft.miss(field, "", "a part of a concatenated text was not found")
        else:
            tails.append(text)
        current = graph.at(current.link("conditioning_to"))
        if current and current.number in seen:
            break
        if current:
            seen.add(current.number)
    first = _encoded(graph, draft, current) if current else None
    yield from [text for text in (first, *reversed(tails)) if text is not None]


def _encoded(graph: Graph, draft: Draft, node: Node) -> str | None:
    """The text of a node that encodes one; None if it does something else."""
    names = [n for n in ("text", "text_g", "prompt", "text_l", "clip_l", "t5xxl")
             if n in node.inputs]  # fmt: skip
    if not names or ("clip" not in node.inputs and "CLIP" not in node.kind):
        return None
    text = _value(graph, node, names[0])
    if text is None:
        text = _joined_text(graph, node.link(names[0]))
    if not isinstance(text, str):
        draft.miss(f"{node.kind} {node.number}", "", "its text comes from a node not understood")
        return ""
    other = _value(graph, node, "text_l") if names[0] == "text_g" else text
    if other != text:
        draft.miss("text_l", other, "sdamd gives one text to both of SDXL's encoders")
    for name in weights.embeddings(text):
        draft.miss(f"embedding {name}", "", "textual inversions cannot be used yet")
    clip = graph.at(node.link("clip"))
    if clip and clip.kind == "CLIPSetLastLayer":
        draft.miss("Clip skip", str(_value(graph, clip, "stop_at_clip_layer")),
                   "sdamd has no such setting")  # fmt: skip
    return weights.from_comfyui(text.strip())


def _typed(graph: Graph, node: Node, field: str) -> str | None:
    """The text that was typed into a loader of somebody's own, which encodes it itself."""
    side = "positive" if field == "prompt" else "negative"
    text = _value(graph, node, side, f"{side}_prompt")
    return weights.from_comfyui(text.strip()) if isinstance(text, str) else None


_PARTS: Final = ("string_a", "string_b", "text1", "text2", "text_a", "text_b", "text_c", "text_d",
                 "a", "b", "string1", "string2")  # fmt: skip


def _joined_text(graph: Graph, link: Link | None) -> str | None:
    """The text of a node that joins several."""
    node = graph.at(link)
    if node is None:
        return None
    parts = [_value(graph, node, name) for name in _PARTS if name in node.inputs]
    if not parts or not all(isinstance(part, str) for part in parts):
        return None
    delimiter = _value(graph, node, "delimiter", "separator")
    return (delimiter if isinstance(delimiter, str) else "").join(parts)


def _through(draft: Draft, graph: Graph, node: Node, field: str) -> Link | None:
    """The conditioning that a node changes, which is said."""
    if "ControlNet" in node.kind or "control_net" in node.inputs:
        loader = graph.at(node.link("control_net"))
        name = _value(graph, loader, "control_net_name") or node.kind
        draft.miss(f"ControlNet {model_name(str(name))}", str(_value(graph, node, "strength")),
                   "ControlNets cannot be used yet")  # fmt: skip
    elif node.kind != "Reroute":
        draft.miss(node.kind, _literals(node), f"changes the {field} in a way that sdamd has not")
    names = ("negative",) if field == "negative_prompt" and "negative" in node.inputs else ()
    return node.link(*names, *_PASSES_ON, "") or next((ln for _, ln in node.links()), None)


# -- sizes ---------------------------------------------------------------------------------------


def _read_size(graph: Graph, draft: Draft, first: _Pass) -> None:
    """What the first sampler begins with: an empty latent of some size, or a picture."""
    node = graph.at(first.node.link("latent_image", "latent", "samples"))
    seen: set[str] = set()
    denoise = _settings(graph, first.node).denoise
    while node and node.number not in seen:
        seen.add(node.number)
        width = _value(graph, node, "width", "empty_latent_width")
        height = _value(graph, node, "height", "empty_latent_height")
        is_empty = not any(name in node.inputs for name in ("pixels", "samples", "image"))
        if width is not None and height is not None and is_empty:
            draft.values |= {"width": width, "height": height}
            count = _value(graph, node, "batch_size")
            if isinstance(count, int) and count > 1:
                draft.miss("batch_size", count, "each picture of a batch has noise of its own "
                                                "place; only the first can come again")  # fmt: skip
            if isinstance(denoise, int | float) and denoise < 1:
                draft.miss("denoise", denoise, "an empty latent is drawn anew as a whole")
            return
        if "VAEEncode" in node.kind or "pixels" in node.inputs or node.kind == "LoadImage":
            draft.began_with(_image_name(graph, node), denoise)
            return
        node = graph.at(_before(graph, node))


def _image_name(graph: Graph, node: Node) -> str:
    """The file that a picture was loaded from."""
    for source in graph.upstream(node):
        if source.kind.startswith("LoadImage"):
            return str(source.inputs.get("image", ""))
    return ""


def _read_second(graph: Graph, draft: Draft, first: _Pass, second: _Pass) -> None:
    """A second pass; it is ours if the picture was enlarged before it."""
    scale = _scale(graph, draft, first, second)
    told, base = _settings(graph, second.node), _settings(graph, first.node)
    if scale is None:
        draft.miss(f"sampler {second.node.number}", str(told.sampler),
                   "a second pass that does not enlarge the picture cannot be made")  # fmt: skip
        return
    draft.put("hires_scale", scale, said="second pass")
    for name, value, same in (
        ("hires_steps", told.steps, base.steps),
        ("hires_guidance_scale", told.cfg, base.cfg),
    ):
        if value is not None and value != same:
            draft.put(name, value, said=f"second pass, {name}")
    _read_second_strength(draft, told)
    if (told.sampler, told.schedule) != (base.sampler, base.schedule):
        other = Draft(tool=TOOL)
        samplers.put(other, samplers.COMFYUI, told.sampler, told.schedule or "")
        draft.put("hires_scheduler", other.values["scheduler"], said="second pass, sampler")
        draft.unused |= other.unused
    if told.seed not in (base.seed, None):
        draft.miss("second pass, seed", told.seed, "sdamd takes that of the first")
    if (text := _texts(graph, Draft(tool=TOOL), second.node.link("positive"), "prompt")) and (
        text != _texts(graph, Draft(tool=TOOL), first.node.link("positive"), "prompt")
    ):
        draft.miss("second pass, positive", " AND ".join(text), "sdamd takes that of the first")


def _read_second_strength(draft: Draft, told: _Settings) -> None:
    if not isinstance(told.denoise, int | float) or not isinstance(told.steps, int):
        return
    draft.put("hires_strength", told.denoise, said="second pass, denoise")


def _scale(graph: Graph, draft: Draft, first: _Pass, second: _Pass) -> float | None:
    """How much what lies between two passes enlarges, as far as it can be told."""
    width, height = draft.values.get("width"), draft.values.get("height")
    factor, enlarged = 1.0, False
    for node in reversed(first.after):
        by = _value(graph, node, "scale_by", "upscale_by", "factor", "rescale_factor")
        size = [_value(graph, node, n) for n in ("width", "height")]
        method = _value(graph, node, "upscale_method")
        if node.kind == "ImageUpscaleWithModel" or "upscale_model" in node.inputs:
            loader = graph.at(node.link("upscale_model"))
            name = str(_value(graph, loader, "model_name") or "")
            draft.miss("upscale model", name, OWN_NETWORK)
            draft.put("hires_upscaler", HiresUpscaler.NETWORK, said="upscale model")
            factor, enlarged = factor * _network_factor(name), True
        elif isinstance(by, int | float):
            factor, enlarged = factor * by, True
        elif all(isinstance(s, int) and s > 0 for s in size) and isinstance(width, int):
            factor, enlarged = _to_size(draft, size, width, height), True
        elif node.kind not in {"VAEDecode", "VAEEncode", "Reroute"} and not _is_tiled(node):
            draft.miss(node.kind, _literals(node), "between two passes; not understood")
        if isinstance(method, str) and "Latent" in node.kind:
            ours = _METHODS.get(method)
            draft.put("hires_upscaler", ours or HiresUpscaler.LATENT, said="upscale_method")
            if ours is None:
                draft.miss("upscale_method", method, "read as bilinear, which comes near")
    del second
    return float(f"{factor:.6g}") if enlarged and math.isfinite(factor) else None


def _is_tiled(node: Node) -> bool:
    return node.kind in {"VAEDecodeTiled", "VAEEncodeTiled"}


def _network_factor(name: str) -> float:
    """Networks are called after their factor: `4x-UltraSharp`, `RealESRGAN_x2`."""
    for digit in "248":
        if f"{digit}x" in name.casefold() or f"x{digit}" in name.casefold():
            return float(digit)
    return 4.0


def _to_size(draft: Draft, size: list[Any], width: Any, height: Any) -> float:
    across, down = size[0] / width, size[1] / height if isinstance(height, int) else 0.0
    if not math.isclose(across, down, rel_tol=0.02):
        draft.miss("second pass, size", f"{size[0]}x{size[1]}",
                   "a second pass has the shape of the first one")  # fmt: skip
    return float(across)


def _read_decoder(graph: Graph, draft: Draft, last: _Pass) -> None:
    """What happens to the picture after the last sampler."""
    for node in last.after:
        vae = graph.at(node.link("vae"))
        name = _value(graph, vae, "vae_name")
        if isinstance(name, str):
            draft.miss("VAE", model_name(name), "sdamd decodes with the checkpoint's own")
        if node.kind.startswith((*_SAVING, "VAEDecode", "Reroute")):
            continue
        model = _value(graph, graph.at(node.link("upscale_model")), "model_name")
        if isinstance(model, str):
            draft.miss("upscale model", model, "enlarge with --upscale, by sdamd's own network")
        else:
            draft.miss(node.kind, _literals(node), "after the last sampler; not understood")

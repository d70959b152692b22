"""Which tool wrote a record, and its reading. This is the door of the package."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from sdamd.errors import BadMetadata
from sdamd.interchange import (
    comfyui,
    fooocus,
    invokeai,
    json_text,
    novelai,
    parameters,
    sdcpp,
    sdnext,
)
from sdamd.interchange.container import BESIDE_KEY, HIDDEN_KEY
from sdamd.interchange.exif import COMMENT_KEY
from sdamd.interchange.reading import Reading
from sdamd.metadata import JSON_KEY, PARAMETERS_KEY, from_json

_DIALECTS: Final[Mapping[str, parameters.Dialect]] = {
    "SD.Next": sdnext.adapt,
    "stable-diffusion.cpp": sdcpp.adapt,
    "Fooocus": fooocus.adapt,
}

_OTHER: Final = "the record is of another tool, in a form that sdamd cannot read"

_Reader = Callable[[Mapping[str, str]], Reading]

_BY_KEY: Final[Mapping[str, _Reader]] = {
    JSON_KEY: lambda texts: _read_ours(texts[JSON_KEY]),
    "invokeai_metadata": lambda texts: invokeai.read(texts["invokeai_metadata"]),
    "sd-metadata": lambda texts: invokeai.read_sd_metadata(texts["sd-metadata"]),
    "Dream": lambda texts: invokeai.read_dream(texts["Dream"]),
    "Comment": novelai.read,
    COMMENT_KEY: lambda texts: read_text(texts[COMMENT_KEY]),
    PARAMETERS_KEY: lambda texts: read_text(texts[PARAMETERS_KEY]),
    "prompt": comfyui.read,
    "workflow": comfyui.read,
    HIDDEN_KEY: lambda texts: read_text(texts[HIDDEN_KEY]),
    BESIDE_KEY: lambda texts: read_text(texts[BESIDE_KEY]),
}
"""The keys that tools write under, the most telling first."""


def read(texts: Mapping[str, str]) -> Reading:
    """Read the record in the texts of a picture.

    Our own JSON goes before all else; a damaged one is an error, since what stands beside it may
    say less.

    Raises:
        BadMetadata: there is none, or it cannot be read.
    """
    texts = {key: text for key, text in texts.items() if text.strip() or key == JSON_KEY}
    if "Comment" in texts and not _is_novelai(texts):
        texts = {key: text for key, text in texts.items() if key != "Comment"}
    for key, reader in _BY_KEY.items():
        if key in texts:
            if key == "prompt" and not texts[key].lstrip().startswith("{"):
                # Easy Diffusion and others write each setting as a text of its own.
                raise BadMetadata(f"{_OTHER} (its texts: {', '.join(sorted(texts))[:200]})")
            return reader(texts)
    raise BadMetadata("there is no record of how the picture was made")


def _is_novelai(texts: Mapping[str, str]) -> bool:
    """Other programs write a key `Comment` as well."""
    return texts.get("Software") == novelai.TOOL or novelai.is_comment(texts["Comment"])


# Keys that only one tool's JSON has, the most telling first, and what reads it.
_BY_CONTENT: Final[tuple[tuple[frozenset[str], Callable[[str], Reading]], ...]] = (
    (frozenset({"base_model", "metadata_scheme", "adm_guidance"}), fooocus.read),
    (frozenset({"Comment", "Description"}), novelai.read_hidden),
    (frozenset({"uc", "v4_prompt"}), lambda text: novelai.read({"Comment": text})),
    (frozenset({"generation_mode", "positive_prompt", "invokeai_metadata"}), invokeai.read),
    (frozenset({"nodes", "links"}), lambda text: comfyui.read({"workflow": text})),
)


def read_text(text: str) -> Reading:
    """Read one text that may be any tool's, by what is in it.

    Raises:
        BadMetadata: it is JSON of a form that is not known, or damaged.
    """
    if not text.lstrip("\ufeff \t\r\n").startswith("{"):
        return parameters.read(text, _DIALECTS)
    text = text.lstrip("\ufeff")
    values = json_text.load_object(text, "the record")
    if {"job", "schema"} <= values.keys():
        return _read_ours(text)
    for keys, reader in _BY_CONTENT:
        if keys & values.keys():
            return reader(text)
    if any(isinstance(v, dict) and "class_type" in v for v in values.values()):
        return comfyui.read({"prompt": text})
    if isinstance(values.get("prompt"), dict) or isinstance(values.get("workflow"), dict):
        return _read_both_graphs(values)
    if "sui_image_params" in values:
        raise BadMetadata("the record is of SwarmUI, in a form that sdamd cannot read")
    raise BadMetadata(_OTHER)


def _read_both_graphs(values: Mapping[str, object]) -> Reading:
    """Both graphs of ComfyUI in one JSON, as Civitai and some nodes write them."""
    if isinstance(graph := values.get("prompt"), dict):
        return comfyui.read_api(graph)
    workflow = values["workflow"]
    assert isinstance(workflow, dict)
    return comfyui.read_workflow(workflow)


def _read_ours(text: str) -> Reading:
    record = from_json(text)
    return Reading(
        tool="sdamd",
        values=MappingProxyType(record.job.to_request().to_dict()),
        record=record,
    )

"""Against sd-parsers, a library by others that reads such records: both ways."""

import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from sd_parsers import ParserManager
from sd_parsers.data import PromptInfo
from sd_parsers.extractors import Eagerness

from sdamd import gallery
from sdamd.interchange.reading import model_name
from sdamd.metadata import Record
from sdamd.request import Job
from sdamd.scheduler import names
from tests.interchange import build
from tests.interchange.test_corpus import CASES, Case

PARSER = ParserManager(eagerness=Eagerness.EAGER)

# Where it is told apart on purpose, and what it has there.
BETTER = {
    "a1111: a ControlNet, a refiner, an X/Y/Z plot": "the ControlNet's model for the picture's",
    "a1111: a prompt that looks like settings": "nothing: it ends with a ValueError",
    "a1111: Civitai's generator: raw JSON in the settings, in a JPEG": "emoji as escapes",
    "a1111: sdamd's own text, where a site has taken the JSON away": "the embedded model's name",
    "comfyui: two texts combined, one text chained, a ControlNet on the way": "a list of texts",
    "comfyui: brackets that mean something else here, and words that are commands here":
        "the text in ComfyUI's language",
    "comfyui: a sampler put together of nodes, values from other nodes, no guidance": "nothing",
    "invokeai: since 4.0: a model with a key and a hash, a LoRA, adapters":
        "the text in compel's language",
    "invokeai: 3.x: a model with model_name, img2img": "the text in compel's language",
    "invokeai: 1.x: a command line": "the prompt up to the first quotation mark in it",
    "fooocus: its JSON: styles and expansion are in the prompt": "what was typed alone",
    "fooocus: the a1111 scheme": "the texts as lines, which were encoded one by one",
    "novelai: the first models: no size, a strength that was not used":
        "the text in NovelAI's language",
    "novelai: version 4: captions, characters, numbers for weights":
        "the text in NovelAI's language",
}  # fmt: skip


def theirs(path: Path) -> PromptInfo | None:
    try:
        return PARSER.parse(path)
    except ValueError:
        return None


def texts_of(case: Case) -> dict[str, str]:
    """The texts of a case; it reads a graph only with the links of the editor's form."""
    if case.tool != "ComfyUI" or "prompt" not in case.texts:
        return case.texts
    links = [
        [0, value[0], value[1], number, 0, "CLIP" if name == "clip" else "ANY"]
        for number, node in json.loads(case.texts["prompt"]).items()
        for name, value in node["inputs"].items()
        if isinstance(value, list)
    ]
    return case.texts | {"workflow": json.dumps({"links": links})}


def number(value: object) -> float:
    return float(str(value))


def compared(case: Case, path: Path) -> list[str]:
    """What sd-parsers found in a picture and sdamd did not find alike."""
    found = theirs(path)
    if found is None or not found.samplers:
        return []
    reading = gallery.read(path)
    # Of several samplers sdamd names the first as the picture's and tells of the others.
    samplers = {sampler.sampler_id: sampler for sampler in found.samplers}
    seeds = {
        str(s.parameters.get("seed", s.parameters.get("noise_seed"))): s for s in samplers.values()
    }
    sampler = seeds.get(str(reading.values.get("seed")))
    if sampler is None:
        return [f"seed {sorted(seeds)}"]
    worse = []
    for theirs_, ours in (("steps", "steps"), ("cfg_scale", "guidance_scale")):
        value = sampler.parameters.get(theirs_)
        if isinstance(value, str | int | float) and number(value) != number(reading.values[ours]):
            worse.append(f"{theirs_} {value}")
    worse += texts_apart(sampler.prompts, reading.values.get("prompt"), "prompt")
    worse += texts_apart(
        sampler.negative_prompts, reading.values.get("negative_prompt"), "negative"
    )
    name = sampler.model.name if sampler.model else None
    # NovelAI's names end in a hash, which it takes off.
    if isinstance(name, str) and not str(reading.values.get("checkpoint")).startswith(
        model_name(name)
    ):
        worse.append(f"model {name}")
    return worse


def texts_apart(prompts: Iterable[Any], ours: object, what: str) -> list[str]:
    joined = ", ".join(prompt.value for prompt in prompts)
    return [] if joined == ours or not joined else [f"{what} {joined!r}"]


PICTURES = [case for case in CASES if case.container.split()[0] in {"png", "jpg", "webp"}]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Pillow's getdata, which it uses
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in PICTURES])
def test_what_it_reads_is_read_here_as_well(case: Case, tmp_path: Path) -> None:
    path = build.write(tmp_path, texts_of(case), case.container)
    worse = compared(case, path)
    if case.name in BETTER:
        assert worse or theirs(path) is None, "this is no exception any more"
    else:
        assert worse == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_it_reads_enough_of_the_corpus_to_say_something(tmp_path: Path) -> None:
    read = []
    for place, case in enumerate(PICTURES):
        folder = tmp_path / str(place)
        folder.mkdir()
        if theirs(build.write(folder, texts_of(case), case.container)):
            read.append(case.tool)
    assert len(read) >= 25
    assert set(read) >= {"AUTOMATIC1111", "ComfyUI", "InvokeAI", "Fooocus", "NovelAI"}


@pytest.mark.parametrize("scheduler", names()[::7])
@pytest.mark.parametrize("prompt", ["a red house", "山 (x:1.2), <lora:y:0.5>", "two\nlines: here"])
def test_it_reads_what_is_written_here(prompt: str, scheduler: str) -> None:
    job = Job(
        index=0, prompt=prompt, negative_prompt="fog", checkpoint="", width=512, height=768,
        steps=20, guidance_scale=6.5, scheduler=scheduler, seed=2**63, upscale=2,
    )  # fmt: skip
    record = Record(job=job, version="1.0", checkpoint_name="dream", checkpoint_sha256="ab" * 32)
    found = PARSER.parse(io.BytesIO(gallery.encode(build.picture(), record)))
    assert found is not None
    (sampler,) = found.samplers
    assert [p.value for p in sampler.prompts] == [prompt]
    assert [p.value for p in sampler.negative_prompts] == ["fog"]
    assert sampler.parameters["seed"] == str(2**63)
    assert sampler.parameters["steps"] == "20"
    assert sampler.parameters["cfg_scale"] == "6.5"
    assert sampler.model is not None
    assert (sampler.model.name, sampler.model.hash) == ("dream", "abababab" + "ab")
    assert found.metadata["Size"] == "512x768"

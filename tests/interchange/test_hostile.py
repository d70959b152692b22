"""Records that mean harm: refused or read with a word, in bounded time and memory, never run."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL.PngImagePlugin import PngInfo

from sdamd import gallery
from sdamd.errors import BadMetadata, BadRequest
from sdamd.interchange import comfyui, fooocus, json_text, records
from sdamd.interchange.reading import Reading, Unused, model_name
from sdamd.metadata import TEXT_MAX_BYTES
from sdamd.request import PROMPT_MAX_BYTES
from tests.interchange import build

SETTINGS = "\nSteps: 20, Sampler: Euler, CFG scale: 7, Seed: 5, Size: 512x512"


def nodes(graph: dict[str, Any]) -> Reading:
    return records.read({"prompt": json.dumps(graph)})


def sampler(**inputs: Any) -> dict[str, Any]:
    known = {"seed": 1, "steps": 20, "cfg": 7, "sampler_name": "euler", "scheduler": "normal"}
    return {"class_type": "KSampler", "inputs": known | inputs}


# -- JSON ----------------------------------------------------------------------------------------


@pytest.mark.report("E07")
@pytest.mark.parametrize(
    "text",
    [
        "[" * 10_000 + "]" * 10_000,
        '{"a":' * 10_000 + "1" + "}" * 10_000,
        '{"prompt": ' + "[" * 500_000,
        '{"a": ' + "9" * 100_000 + "}",
        '{"a": 1' + " " * 100_000,
        '{"a": "\\ud800"}',
        "{" + '"a": 1, ' * 100_000 + '"a": 2}',
        '{"steps": 20, "steps": 30}',
        '{"a": NaN, "a": 1}',
        "{}",
        '{"a": ' + '"' * 1000,
    ],
    ids=lambda text: f"{text[:20]}...{len(text)}",
)
@pytest.mark.parametrize(
    "key", ["prompt", "workflow", "invokeai_metadata", "Comment", "parameters"]
)
def test_json_that_is_no_record_is_refused_with_a_sentence(key: str, text: str) -> None:
    texts = {key: text, "Software": "NovelAI"} if key == "Comment" else {key: text}
    try:
        reading = records.read(texts)
    except BadMetadata as error:
        assert len(str(error)) < 400  # noqa: PT017  # both ways out are right
    else:
        assert reading.unused  # at least what it does not tell


def test_a_key_that_stands_twice_names_itself() -> None:
    with pytest.raises(BadMetadata, match="the key 'steps' twice, with two values"):
        json_text.load('{"steps": 20, "steps": 30}', "it")
    assert json_text.load('{"steps": 20, "steps": 20}', "it") == {"steps": 20}


def test_five_megabytes_of_nested_json_are_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(build.png({"prompt": '{"a":' * 1_000_000 + "1" + "}" * 1_000_000}))
    with pytest.raises(BadMetadata, match="too large"):
        gallery.read(path)


@pytest.mark.report("E08")
@pytest.mark.parametrize("kind", ["iTXt", "zTXt"])
def test_a_small_text_that_grows_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    if kind == "zTXt":
        content = build.png({"parameters": "a" * 30 * 2**20}, "zTXt")
    else:
        info = PngInfo()
        info.add_itxt("parameters", "a" * 30 * 2**20, zip=True)
        build.picture().save(path, pnginfo=info)
        content = path.read_bytes()
    assert len(content) < 80_000
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(BadMetadata, match="over 1048576 bytes when unpacked"):
        gallery.read(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * 2**20


# -- graphs --------------------------------------------------------------------------------------


def chain(kind: str, name: str, length: int) -> dict[str, Any]:
    """A chain of nodes, each on the one before; the last one is its own beginning."""
    return {
        f"{name}{i}": {"class_type": kind, "inputs": {"": [f"{name}{(i + 1) % length}", 0]}}
        for i in range(length)
    }


@pytest.mark.parametrize(
    "graph",
    [
        {"1": sampler(model=["1", 0], positive=["1", 0], negative=["1", 0], latent_image=["1", 0])},
        {"1": sampler(seed=["2", 0]), "2": {"class_type": "A", "inputs": {"value": ["2", 0]}}},
        {"1": sampler(model=["m0", 0]), **chain("Reroute", "m", 5000)},
        {"1": sampler(latent_image=["m0", 0]), **chain("LatentBlend", "m", 5000)},
        {"1": sampler(positive=["m0", 0]), **chain("ConditioningSetArea", "m", 5000)},
        {"1": sampler(seed=["m0", 0], positive=["m0", 0]), **chain("ConditioningCombine", "m", 99)},
        {"1": sampler(positive=["c", 0]),
         "c": {"class_type": "ConditioningConcat",
               "inputs": {"conditioning_to": ["c", 0], "conditioning_from": ["c", 0]}}},
        {str(i): sampler(latent_image=[str(i + 1), 0]) for i in range(5000)},
        {str(i): {"class_type": "SaveImage", "inputs": {"images": ["s", 0]}} for i in range(5000)}
        | {"s": sampler()},
        {"1": {"class_type": "KSampler"}, "2": {"class_type": "SaveImage", "inputs": []}},
        {"1": {"class_type": "SaveImage", "inputs": {"images": ["1", 10**30]}}},
        {"1": sampler(model=[], positive=[["a"], 0], negative=["1", "0"], latent_image=[None, 0])},
    ],
    ids=["itself", "value of itself", "models", "latents", "texts", "combined", "chained",
         "samplers", "saves", "no inputs", "large number", "odd links"],
)  # fmt: skip
def test_a_graph_without_an_end_is_followed_once(graph: dict[str, Any]) -> None:
    reading = nodes(graph)
    assert reading.tool == "ComfyUI"
    assert reading.unused


def test_a_graph_of_100_000_nodes_is_not_followed() -> None:
    graph = {
        str(i): {"class_type": "Reroute", "inputs": {"": [str(i + 1), 0]}} for i in range(10**5)
    }
    reading = comfyui.read_api(graph | {"s": sampler(model=["0", 0])})
    told = {str(unused) for unused in reading.unused}
    assert "graph: 100001 nodes (allowed are at most 20000)" in told
    assert "prompt" not in reading.values


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=10,
)  # fmt: skip
NAMES = st.sampled_from([
    "class_type", "inputs", "model", "positive", "negative", "latent_image", "seed", "steps", "cfg",
    "sampler_name", "text", "clip", "width", "height", "samples", "images", "nodes", "links", "id",
    "type", "widgets_values", "mode", "link", "name", "image", "prompt", "loras", "weight",
    "v4_prompt", "caption", "char_captions", "uc", "base_model", "resolution", "styles",
    "scheduler", "strength", "generation_mode", "sampler", "full_prompt", "refiner_model",
    "definitions",
])  # fmt: skip
SHAPED = st.recursive(
    JSON
    | st.sampled_from(["KSampler", "SaveImage", "CLIPTextEncode", "LoraLoader", "1", ["1", 0]]),
    lambda inner: (
        st.dictionaries(NAMES | st.sampled_from("123"), inner, max_size=6)
        | st.lists(inner, max_size=4)
    ),
    max_leaves=30,
)
KEYS = ("prompt", "workflow", "invokeai_metadata", "sd-metadata", "Comment", "parameters", "hidden")


@given(SHAPED, st.sampled_from(KEYS))
@example({"image": {"prompt": [1, {"prompt": 2}], "seed": [1], "sampler": {}}}, "sd-metadata")
@example({"loras": [1, {"model": 3}], "model": 3, "scheduler": 7, "vae": []}, "invokeai_metadata")
@example({"base_model": 3, "loras": {"a": 1}, "sampler": 1, "scheduler": []}, "parameters")
@example({"uc": 3, "prompt": [], "sampler": None, "v4_prompt": {"caption": 3}}, "Comment")
@example({"nodes": [{"id": 1, "inputs": 3, "mode": "x"}], "links": [[1, 2, 3, 4, 5]]}, "workflow")
@example(
    {"nodes": [{"id": 1, "inputs": [{"link": 1}], "widgets_values": {}}], "links": 3}, "workflow"
)
def test_json_of_any_shape_is_read_or_refused_with_a_sentence(value: Any, key: str) -> None:
    try:
        reading = records.read({key: json.dumps(value), "Software": "NovelAI"})
    except BadMetadata as error:
        assert str(error)  # noqa: PT017  # both ways out are right
    else:
        assert all(isinstance(unused, Unused) for unused in reading.unused)
        assert all(isinstance(note, str) for note in reading.notes.values())


# -- texts ---------------------------------------------------------------------------------------


@pytest.mark.report("E01")
@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ("a\0b", "prompt holds a NUL character"),
        ("x" * 100_000, f"prompt is 100000 bytes; allowed at most {PROMPT_MAX_BYTES}"),
        ("x" * TEXT_MAX_BYTES, f"allowed at most {TEXT_MAX_BYTES}"),
    ],
    ids=["NUL", "100 kB", "1 MiB"],
)
def test_a_prompt_beyond_the_limits_is_refused_and_not_cut(prompt: str, sentence: str) -> None:
    with pytest.raises(BadMetadata, match=sentence):
        records.read({"parameters": prompt + SETTINGS}).request()


@pytest.mark.report("E01")
@pytest.mark.parametrize(
    "prompt", ["\u202eabc\u2066", "a\x1b[31mred", "Steps: 3", "Steps: 3, Seed: 9"]
)
def test_odd_prompts_are_what_they_are(prompt: str) -> None:
    request = records.read({"parameters": prompt + SETTINGS}).request()
    assert (request.prompt, request.steps) == (prompt, 20)


NUMBERS = ["NaN", "inf", "1e999", "-1", "2**3", "1_0", "0x10", "9" * 50]


@pytest.mark.parametrize(
    ("key", "number"),
    [(key, number) for key in ("Steps", "CFG scale", "Seed") for number in NUMBERS]
    + [("Steps", "٣"), ("Seed", "٣")],  # float() reads digits of any script
)
def test_a_number_that_is_none_is_refused_and_no_default_takes_its_place(
    key: str, number: str
) -> None:
    text = "a" + SETTINGS
    known = {"Steps": "20", "CFG scale": "7", "Seed": "5"}[key]
    field = {"Steps": "steps", "CFG scale": "guidance_scale", "Seed": "seed"}[key]
    with pytest.raises(BadMetadata, match=f"{field} is "):
        records.read({"parameters": text.replace(f"{key}: {known}", f"{key}: {number}")}).request()


@pytest.mark.parametrize(
    ("name", "bare"),
    [
        ("../../etc/passwd", "passwd"),
        ("/etc/passwd", "passwd"),
        ("C:\\Users\\x\\m.safetensors", "m"),
        ("\\\\server\\share\\m.ckpt", "m"),
        ("sub/m.SAFETENSORS", "m"),
        ("..", ".."),
        ("a/", "a"),
        ("~/x", "x"),
        ("https://evil.example/x.safetensors", "x"),
        ("v1.5", "v1.5"),
    ],
)
@pytest.mark.report("E28")
def test_a_model_is_a_name_and_never_a_path(name: str, bare: str) -> None:
    assert model_name(name) == bare
    text = f"a{SETTINGS}, Model: {json.dumps(name)}"
    assert records.read({"parameters": text}).values["checkpoint"] == bare


EVIL = "__import__('pathlib').Path({path!r}).touch()"


@pytest.mark.parametrize(
    "record",
    [
        lambda evil: {"base_model": "m", "resolution": evil, "adm_guidance": evil, "styles": evil,
                      "loras": evil, "sampler": evil, "seed": evil, "steps": evil},
        lambda evil: {"base_model": evil, "full_prompt": evil, "lora_combined_1": evil},
    ],
)  # fmt: skip
def test_nothing_in_a_record_is_run(
    record: Callable[[str], dict[str, str]], tmp_path: Path
) -> None:
    """Fooocus reads these fields by `eval`."""
    mark = tmp_path / "run"
    text = json.dumps(record(EVIL.format(path=str(mark))))
    reading = records.read({"parameters": text})
    assert reading.tool == "Fooocus"
    with pytest.raises(BadMetadata):
        fooocus.read_preset(f"[{text}]")
    assert not mark.exists()


def test_what_is_told_has_no_letter_that_a_terminal_obeys() -> None:
    unused = Unused(name="a\x1b[2J", value="b\u202ec\r\nd\x07", reason="e\x9b")
    assert str(unused) == "a\\u001b[2J: b\\u202ec d\\u0007 (e\\u009b)"


def test_values_of_a_reading_are_checked_all_together() -> None:
    reading = Reading(tool="x", values={"steps": "many", "width": 3, "nothing": 1})
    with pytest.raises(
        BadMetadata, match=r"(?s)steps is 'many'.*width is 3.*'nothing' is not known"
    ):
        reading.request()
    with pytest.raises(BadRequest, match="steps"):
        type(Reading(tool="x", values={}).request()).from_dict({"steps": "many"})

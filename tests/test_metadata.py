"""The records of pictures: our JSON is exact, and others read our `parameters` text."""

import json
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sdamd.errors import BadMetadata
from sdamd.interchange import parameters, records
from sdamd.metadata import (
    SCHEMA,
    TEXT_MAX_BYTES,
    Record,
    from_json,
    split_parameters,
    to_json,
    to_parameters,
)
from sdamd.request import PROMPT_MAX_BYTES, SEED_MAX, Job, Request
from sdamd.scheduler import names

# A busy machine is no fault of the code.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

DATA = Path(__file__).parent / "data" / "infotext"
VECTORS: dict[str, list[dict[str, Any]]] = json.loads((DATA / "vectors.json").read_text("utf-8"))
CORPUS = [
    block.partition("\n")[2].strip("\n")
    for block in (DATA / "corpus.txt").read_text("utf-8").split("\n====")
]

JOB = Job(
    index=3,
    prompt="mountains by the sea",
    negative_prompt="fog",
    checkpoint="",
    width=128,
    height=192,
    steps=20,
    guidance_scale=7.5,
    scheduler="DPM++ 2M Karras",
    seed=1234567890,
    upscale=4,
)
RECORD = Record(
    job=JOB,
    version="0.1.0",
    checkpoint_name="embedded",
    checkpoint_sha256="6CE0161689B3853ACAA03779EC93EAFE75A02F4CED659BEE03F50797806FA2FA",
    device="AMD Radeon RX 7900 XTX (gfx1100)",
    dtype="float16",
    vae_dtype="float32",
    created="2026-01-31T14:03:22+01:00",
)
PARAMETERS = (
    "mountains by the sea\n"
    "Negative prompt: fog\n"
    "Steps: 20, Sampler: DPM++ 2M, Schedule type: Karras, CFG scale: 7.5, Seed: 1234567890, "
    "Size: 128x192, Model hash: 6ce0161689, Model: embedded, RNG: CPU, Upscale: 4, "
    "Version: sdamd 0.1.0"
)

AWKWARD = (
    "",
    "a\nb",
    "a\r\nb",
    "tab\tand \\ backslash",
    'a "quoted" word, a comma: and a colon',
    "Steps: 3",
    "Steps: 3, Sampler: Euler, Seed: 9, Size: 10x10",
    "x\nSteps: 3, Sampler: Euler, Seed: 9, Size: 10x10\ny",
    "Negative prompt: x",
    "a\nNegative prompt: b",
    "\N{DROMEDARY CAMEL}\N{ZERO WIDTH JOINER}\N{FIRE} 山水 ž \N{HEBREW LETTER ALEF}\u202e",
    '{"a": [1, 2',
    "x" * PROMPT_MAX_BYTES,
    "\N{FIRE}" * (PROMPT_MAX_BYTES // 4),
    "\x01" * PROMPT_MAX_BYTES,
)
PROMPTS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=200
) | st.sampled_from(AWKWARD)


def with_job(**changes: Any) -> Record:
    return replace(RECORD, job=replace(JOB, **changes))


def from_parameters(text: str) -> dict[str, object]:
    return dict(parameters.read(text).values)


def prompts_of(text: str) -> tuple[str, str]:
    parts = split_parameters(text)
    return parts.prompt, parts.negative_prompt


def others_read(text: str) -> tuple[str, str, dict[str, str]]:
    """Read as other tools do: the last line is the settings if it has three of them."""
    *lines, last = text.strip().split("\n")
    pair = re.compile(r'\s*(\w[\w \-/]+):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)')
    found = pair.findall(last)
    if len(found) < 3:
        lines, found = [*lines, last], []
    parts = {"prompt": "", "negative": ""}
    side = "prompt"
    for line in (line.strip() for line in lines):
        words = line
        if line.startswith("Negative prompt:"):
            side = "negative"
            words = line[16:].strip()
        parts[side] += words if parts[side] == "" else f"\n{words}"
    settings: dict[str, str] = {}
    for key, raw in found:
        value = raw
        if value.startswith('"') and value.endswith('"'):
            with suppress(ValueError):
                value = json.loads(value)
        if size := re.fullmatch(r"(\d+)x(\d+)", value):
            settings |= {f"{key}-1": size[1], f"{key}-2": size[2]}
        elif value:
            settings[key] = value
    return parts["prompt"], parts["negative"], settings


# -- our JSON ----------------------------------------------------------------------------------


def test_json_holds_the_schema_and_the_seed_as_text() -> None:
    values = json.loads(to_json(RECORD))
    assert values["schema"] == SCHEMA
    assert values["job"]["seed"] == "1234567890"
    assert values["version"] == "0.1.0"


@unhurried
@given(prompt=PROMPTS, negative_prompt=PROMPTS, name=PROMPTS, seed=st.integers(0, SEED_MAX))
@example(prompt=AWKWARD[-1], negative_prompt=AWKWARD[-1], name="\udc80", seed=SEED_MAX)
def test_json_is_exact_for_any_words(
    prompt: str, negative_prompt: str, name: str, seed: int
) -> None:
    """E01, C16: nothing in a prompt or a seed is lost, and the text is plain ASCII."""
    record = replace(
        with_job(prompt=prompt, negative_prompt=negative_prompt, seed=seed),
        checkpoint_name=name[:1000],
    )
    text = to_json(record)
    assert text.isascii()
    assert len(text) <= TEXT_MAX_BYTES
    assert from_json(text) == record


@unhurried
@given(st.floats(1, 50), st.integers(0, 10**6))
def test_json_is_exact_for_any_number(guidance_scale: float, index: int) -> None:
    record = with_job(guidance_scale=guidance_scale, index=index)
    assert from_json(to_json(record)) == record


@pytest.mark.parametrize(
    "seed", [0, 2**31, 2**32 - 1, 2**32, 2**53 + 1, 6687881544318117707, 2**63, 2**64 - 1]
)
def test_big_seeds_come_back_from_either_text(seed: int) -> None:
    """C16."""
    record = with_job(seed=seed)
    assert from_json(to_json(record)).job.seed == seed
    assert Request.from_dict(from_parameters(to_parameters(record))).seed == seed


@pytest.mark.parametrize("seed", [str(2**64), "-1", "", "1e5", "12a", 1.5, True, [1]])
def test_a_bad_seed_is_refused_with_what_is_allowed(seed: object) -> None:
    """C16: never clipped."""
    values = json.loads(to_json(RECORD))
    values["job"]["seed"] = seed
    with pytest.raises(BadMetadata, match=r"seed is .*0 to 2\*\*64-1"):
        from_json(json.dumps(values))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[" * 10_000 + "]" * 10_000, "nested too deep|schema|JSON list"),
        ('{"schema": NaN}', "NaN is not a JSON number"),
        ('{"schema": ' + "1" * 5000 + "}", "is not JSON"),
        ("[]", "JSON list"),
        ("null", "JSON NoneType"),
        ("{}", "schema is None; allowed is 1 to 1"),
        ('{"schema": true}', "schema is True"),
        ('{"schema": 0}', "schema is 0"),
        ('{"schema": 1}', "has no job"),
        ('{"schema": 1, "job": []}', "has no job"),
        ('{"schema": 1, "job": {}}', "lacks width, height, steps"),
        ('{"schema": 1, "version": 3, "dtype": null, "job": {}}', "version is 3.*\ndtype is None"),
        ("x" * (TEXT_MAX_BYTES + 1), f"allowed at most {TEXT_MAX_BYTES}"),
    ],
)
def test_what_is_no_record_gets_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(BadMetadata, match=sentence):
        from_json(text)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"width": 0}, "width is 0; allowed 64 to 16384"),
        ({"width": 100}, "allowed multiples of 8, the nearest 96 and 104"),
        ({"height": "tall"}, "height is 'tall'; allowed is a whole number"),
        ({"width": -64, "height": 10**9}, "width is -64.*\nheight is 1000000000"),
        ({"steps": 20.5}, "steps is 20.5"),
        ({"lora": "x"}, "'lora' is not known"),
        ({"index": -1}, "index is -1"),
        ({"scheduler": None}, "lacks scheduler"),
        ({"prompt": "a\0b"}, "NUL"),
    ],
)
def test_a_job_from_outside_is_checked_like_a_request(
    change: dict[str, object], sentence: str
) -> None:
    """E29 and its kind: sizes and steps out of range are refused before any work."""
    values = json.loads(to_json(RECORD))
    values["job"] |= change
    with pytest.raises(BadMetadata, match=sentence):
        from_json(json.dumps(values))


def test_a_newer_schema_says_who_wrote_it_and_what_to_do() -> None:
    values = {**json.loads(to_json(RECORD)), "schema": 2, "version": "7.0"}
    with pytest.raises(BadMetadata, match=r"schema 2, written by sdamd 7\.0.*update sdamd"):
        from_json(json.dumps(values))


def test_a_further_note_does_not_make_a_record_unreadable() -> None:
    values = {**json.loads(to_json(RECORD)), "rating": 5}
    assert from_json(json.dumps(values)) == RECORD


# -- the parameters text -----------------------------------------------------------------------


def test_parameters_have_the_order_that_others_write() -> None:
    assert to_parameters(RECORD) == PARAMETERS


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"negative_prompt": ""}, "sea\nSteps: 20"),
        ({"guidance_scale": 7}, "CFG scale: 7, "),
        ({"guidance_scale": 7.1}, "CFG scale: 7.1, "),
        ({"upscale": 1}, "RNG: CPU, Version: sdamd"),
        ({"scheduler": "Euler a"}, "Sampler: Euler a, Schedule type: Uniform, "),
        ({"scheduler": "Euler SGM Uniform"}, "Sampler: Euler, Schedule type: SGM Uniform, "),
        ({"scheduler": "DPM2 a Exponential"}, "Sampler: DPM2 a, Schedule type: Exponential, "),
        ({"scheduler": "DDIM"}, "Sampler: DDIM, Schedule type: Automatic, "),
        ({"scheduler": "PNDM"}, "Sampler: PLMS, Schedule type: Automatic, "),
        ({"scheduler": "LCM"}, "Sampler: LCM, Schedule type: Uniform, "),
        ({"scheduler": "From Later"}, "Sampler: From Later, CFG scale: "),
    ],
)
def test_parameters_write_each_setting_as_others_do(change: dict[str, Any], part: str) -> None:
    assert part in to_parameters(with_job(**change))


def test_parameters_without_a_known_hash_have_none() -> None:
    assert "Model hash" not in to_parameters(replace(RECORD, checkpoint_sha256=""))


@pytest.mark.parametrize("case", VECTORS["quote"], ids=lambda case: repr(case["in"]))
def test_values_are_quoted_as_others_quote_them(case: dict[str, str]) -> None:
    written = to_parameters(replace(RECORD, checkpoint_name=case["in"]))
    assert f"Model: {case['out']}, RNG" in written


@pytest.mark.parametrize("name", ['"a"', '"', "[a", "{b", " a", "a, b: c", "\udc80", "x\ny", "é"])
def test_any_model_name_reads_back_in_other_tools(name: str) -> None:
    text = to_parameters(replace(RECORD, checkpoint_name=name))
    shown = name.replace("\udc80", "?")
    assert others_read(text)[2]["Model"] == shown
    assert from_parameters(text)["checkpoint"] == shown


@pytest.mark.parametrize("scheduler", names())
def test_every_scheduler_reads_back_as_itself(scheduler: str) -> None:
    text = to_parameters(with_job(scheduler=scheduler))
    assert from_parameters(text)["scheduler"] == scheduler


@pytest.mark.parametrize(
    ("settings", "scheduler"),
    [
        ("Sampler: DPM++ 2M Karras", "DPM++ 2M Karras"),
        ("Sampler: DPM++ 2M", "DPM++ 2M"),
        ("Sampler: DPM++ 2M, Schedule type: Automatic", "DPM++ 2M Karras"),
        ("Sampler: DPM++ 2M SDE, Schedule type: Automatic", "DPM++ 2M SDE Exponential"),
        ("Sampler: Euler a, Schedule type: Automatic", "Euler a"),
        ("Sampler: Euler, Schedule type: Karras", "Euler Karras"),
        ("Sampler: DPM++ 2M SDE Karras, Schedule type: Automatic", "DPM++ 2M SDE Karras"),
        ("Sampler: PLMS, Schedule type: Automatic", "PNDM"),
        ("Sampler: PLMS, Schedule type: Uniform", "PNDM"),
        ("Sampler: Restart, Schedule type: Automatic", "Restart"),
        ("Sampler: Restart, Schedule type: Karras", "Restart Karras"),
        ("Sampler: UniPC, Schedule type: Karras", "UniPC Karras"),
    ],
)
def test_the_schedule_type_is_read_as_a1111_means_it(settings: str, scheduler: str) -> None:
    assert from_parameters(f"a\nSteps: 20, {settings}, Seed: 1")["scheduler"] == scheduler


@unhurried
@given(prompt=PROMPTS, negative_prompt=PROMPTS)
def test_others_find_all_settings_whatever_the_prompt_says(
    prompt: str, negative_prompt: str
) -> None:
    record = with_job(prompt=prompt, negative_prompt=negative_prompt)
    settings = others_read(to_parameters(record))[2]
    assert settings["Seed"] == "1234567890"
    assert (settings["Size-1"], settings["Size-2"]) == ("128", "192")
    assert settings["Schedule type"] == "Karras"


WORDS = st.text(st.characters(categories=["L", "N", "P", "S"]) | st.sampled_from(" ,:()"))
PLAIN = st.lists(WORDS.map(str.strip).filter(lambda line: line != ""), max_size=4).map("\n".join)


@unhurried
@given(
    prompt=PLAIN.filter(lambda text: "Negative prompt:" not in text),
    negative_prompt=PLAIN.filter(lambda text: "Negative prompt:" not in text),
)
@example(prompt="Steps: 3, Sampler: Euler, Seed: 9", negative_prompt="Steps: 3, Seed: 9, Size: 1x1")
@example(prompt='a poster, "Steps: 20, Seed: 9"', negative_prompt="")
@example(prompt="", negative_prompt="fog")
def test_plain_prompts_read_back_in_other_tools_and_here(prompt: str, negative_prompt: str) -> None:
    record = with_job(prompt=prompt, negative_prompt=negative_prompt)
    text = to_parameters(record)
    assert others_read(text)[:2] == (prompt, negative_prompt)
    assert prompts_of(text) == (prompt, negative_prompt)


@unhurried
@given(
    prompt=PROMPTS,
    seed=st.integers(0, SEED_MAX),
    guidance_scale=st.floats(1, 50),
    upscale=st.integers(1, 4),
)
def test_our_own_text_gives_the_settings_back(
    prompt: str, seed: int, guidance_scale: float, upscale: int
) -> None:
    job = replace(JOB, prompt=prompt, seed=seed, guidance_scale=guidance_scale, upscale=upscale)
    request = Request.from_dict(from_parameters(to_parameters(replace(RECORD, job=job))))
    expected = replace(
        job.to_request(), prompt=request.prompt, negative_prompt=request.negative_prompt
    )
    assert request == expected


@pytest.mark.parametrize("case", VECTORS["reader"], ids=lambda case: case["in"][-40:])
def test_our_reader_finds_what_the_first_reader_found(case: dict[str, Any]) -> None:
    """What that reader cuts at a comma (raw JSON) is whole here."""
    text, out = case["in"], case["out"]
    assert others_read(text) == (out["prompt"], out["negative"], out["params"])
    if not out["params"]:
        with pytest.raises(BadMetadata, match="not understood"):
            split_parameters(text)
        return
    parts = split_parameters(text)
    assert prompts_of(text) == (out["prompt"], out["negative"])
    expected = dict(out["params"])
    if "Size-1" in expected:
        expected["Size"] = f"{expected.pop('Size-1')}x{expected.pop('Size-2')}"
    if "Civitai resources" in expected:
        expected["Civitai resources"] = '[{"type":"checkpoint","modelVersionId":1}]'
    assert dict(parts.settings) == expected


CORPUS_PROMPTS = [
    ("photo of a duck", "monochrome"),
    ("photo of a duck", "monochrome"),
    ("a red fox", "blurry"),
    (
        "[artwork|painting] of girl, (standing), game console:1.19, <lora:style_v4:0.15>, "
        "<lora:soft:-0.2>",
        "(low quality, worst quality), text, signature",
    ),
    ("epic portrait", "blurry"),
    (
        'a poster that reads "Steps: 3, Seed: 9"\nsecond line of the prompt, size: 10x10',
        "text, Negative prompt: watermark",
    ),
    ("apple", ""),
    ("", ""),
]


@pytest.mark.parametrize(
    ("block", "prompts"), list(zip(CORPUS, CORPUS_PROMPTS, strict=True)), ids=range(1, 9)
)
def test_odd_texts_of_other_tools_are_read(block: str, prompts: tuple[str, str]) -> None:
    """E01, E02, E03: line breaks in values, all on one line, lines after the settings."""
    asked = from_parameters(block)
    assert (asked["prompt"], asked["negative_prompt"]) == prompts
    assert Request.from_dict(asked).steps in {15, 20, 25, 30}


@pytest.mark.parametrize(
    ("block", "key", "value"),
    [
        (1, "Hashes", '{"vae": "c6a580b13a", "model": "c0d1994c73"}'),
        (2, "Wildcard prompt", "a __color__ fox,\nin the __place__"),
        (2, "Version", "v1.5.1"),
        (3, "Sampler", "DPM++ 2M Karras"),
        (5, "Model", "a"),
        (6, "Seed", "6687881544318117707"),
    ],
)
def test_values_of_odd_texts_are_whole(block: int, key: str, value: str) -> None:
    """E01, C16."""
    assert dict(split_parameters(CORPUS[block]).settings)[key] == value


def test_the_negative_prompt_may_stand_on_the_line_of_the_settings() -> None:
    """E02."""
    text = "a cat\nNegative prompt: dog Steps: 20, Sampler: Euler, CFG scale: 7, Seed: 1"
    assert prompts_of(text) == ("a cat", "dog")


def test_windows_line_ends_do_not_hide_the_settings() -> None:
    """E01."""
    text = PARAMETERS.replace("\n", "\r\n")
    assert from_parameters(text) == from_parameters(PARAMETERS)


@unhurried
@given(st.text(st.characters(exclude_categories=["Cs"])))
@example("Steps: 1, ab: [[[[")
@example('Steps: 1, ab: "')
@example("Steps: 1, a b: 2, c d: " + "[" * 5000)
def test_any_text_is_read_or_refused_with_a_sentence(text: str) -> None:
    """E02: never a crash."""
    try:
        split_parameters(text)
    except BadMetadata as error:
        assert "not understood" in str(error)  # noqa: PT017  # both ways out are right


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    "unit", ["Steps: 1, ", "Steps: 1,\n", 'ab:",', "ab:[1,", 'ab:"\\",', "ab ", "Steps: 1, ab: [\n"]
)
def test_a_hostile_text_does_not_take_for_ever(unit: str) -> None:
    text = unit * (TEXT_MAX_BYTES // len(unit))
    try:
        split_parameters(text)
    except BadMetadata as error:
        assert "not understood" in str(error)  # noqa: PT017  # both ways out are right


# -- a picture's texts -------------------------------------------------------------------------


def test_our_json_is_preferred_to_the_parameters() -> None:
    texts = {"sdamd": to_json(RECORD), "parameters": to_parameters(with_job(seed=1))}
    assert records.read(texts).request() == JOB.to_request()


def test_a_damaged_json_is_an_error_even_beside_parameters() -> None:
    with pytest.raises(BadMetadata, match="not JSON"):
        records.read({"sdamd": "{", "parameters": PARAMETERS})


def test_parameters_alone_give_a_request() -> None:
    assert records.read({"parameters": PARAMETERS}).request() == JOB.to_request()


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [
        ({}, "no record"),
        ({"Software": "GIMP"}, "no record"),
        ({"prompt": "{}", "workflow": "{}"}, "workflow of ComfyUI has no nodes"),
        ({"prompt": "a cat", "seed": "3"}, r"of another tool.*its texts: prompt, seed"),
        ({"parameters": '{"steps": 3}'}, "of another tool, in a form that sdamd cannot read"),
        ({"parameters": '{"sui_image_params": {}}'}, "of SwarmUI"),
        ({"invokeai_metadata": "[]"}, "JSON list; expected an object"),
        ({"sd-metadata": "{"}, "is not JSON"),
        ({"parameters": "a\nSteps: 999, Seed: 1, Size: 511x512"}, "width is 511.*\n.*steps is 999"),
        ({"parameters": "x" * (TEXT_MAX_BYTES + 1)}, "allowed at most"),
    ],
)
def test_pictures_that_cannot_be_made_again_say_why(texts: dict[str, str], sentence: str) -> None:
    """E07, E08."""
    with pytest.raises(BadMetadata, match=sentence):
        records.read(texts).request()


@pytest.mark.parametrize("together", [0, 65, "2", True, 1.5, None])
def test_the_size_of_a_pass_is_checked(together: object) -> None:
    values = json.loads(to_json(RECORD)) | {"together": together}
    with pytest.raises(BadMetadata, match=r"together is .*; allowed 1 to 64"):
        from_json(json.dumps(values))


def test_an_older_record_was_made_alone() -> None:
    values = json.loads(to_json(RECORD))
    del values["together"]
    assert from_json(json.dumps(values)).together == 1

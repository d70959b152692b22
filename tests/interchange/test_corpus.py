"""Records as the tools write them, each with the request that sdamd makes of it.

A record names its kind of file, and the picture is made for the test. What is expected is whole:
all fields, and all that is told as not used, by name and value.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sdamd import gallery
from sdamd.errors import BadMetadata
from sdamd.metadata import split_parameters
from sdamd.request import Request
from tests.interchange import build

DATA = Path(__file__).parent.parent / "data" / "interchange"


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    container: str
    tool: str
    texts: dict[str, str]
    values: dict[str, Any]
    unused: list[str]
    report: str = ""
    refused: str = ""


def load() -> list[Case]:
    cases = []
    for path in sorted(DATA.glob("*.toml")):
        for record in tomllib.loads(path.read_text("utf-8"))["record"]:
            texts = {key: text.strip("\n") for key, text in record.pop("texts").items()}
            record["name"] = f"{path.stem}: {record['name']}"
            cases.append(Case(texts=texts, **record))
    return cases


CASES = load()


def marked(case: Case) -> Any:
    marks = [pytest.mark.report(report) for report in case.report.split()]
    return pytest.param(case, id=case.name, marks=marks)


def test_the_corpus_is_as_large_as_it_should_be() -> None:
    assert len(CASES) >= 40
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.tool for case in CASES} >= {
        "AUTOMATIC1111", "Forge", "Civitai", "SD.Next", "stable-diffusion.cpp", "ComfyUI",
        "InvokeAI", "Fooocus", "NovelAI", "sdamd",
    }  # fmt: skip


@pytest.mark.parametrize("case", [marked(case) for case in CASES])
def test_a_record_is_read_whole(case: Case, tmp_path: Path) -> None:
    reading = gallery.read(build.write(tmp_path, case.texts, case.container))
    assert reading.tool == case.tool
    told = [f"{unused.name}: {unused.value}".rstrip() for unused in reading.unused]
    assert sorted(told) == sorted(case.unused)
    if not case.refused:
        asked = {"upscale": 1} | case.values if reading.record is None else case.values
        assert reading.request() == Request.from_dict(asked)
        return
    read = {name: str(value) for name, value in reading.values.items() if name in case.values}
    assert read == {name: str(value) for name, value in case.values.items()}
    with pytest.raises(BadMetadata, match=case.refused):
        reading.request()


@pytest.mark.parametrize(
    "case", [marked(case) for case in CASES if "Steps:" in "".join(case.texts.values())]
)
def test_no_setting_is_dropped_without_a_word(case: Case, tmp_path: Path) -> None:
    """Every value of a text is a field, a note, or named as not used."""
    reading = gallery.read(build.write(tmp_path, case.texts, case.container))
    if reading.tool == "an unknown tool":
        return  # there are no settings in it
    text = next(t for t in case.texts.values() if "Steps:" in t)
    said = " ".join([
        *map(str, reading.values.values()),
        *(f"{name} {value}" for name, value in reading.notes.items()),
        *(f"{unused.name} {unused.value} {unused.reason}" for unused in reading.unused),
    ]).casefold()  # fmt: skip
    understood = {"sampler", "schedule type", "sampler sigma", "scheduler", "size", "rng",
                  "hires upscaler", "model", "hires resize", "civitai resources",
                  "lora networks", "lora weights", "ti hashes"}  # fmt: skip
    for key, value in split_parameters(text).settings:
        if key.casefold() not in understood:
            shown = value.rstrip("0").rstrip(".") if "." in value else value
            assert shown[:40].casefold() in said or key.casefold() in said, key

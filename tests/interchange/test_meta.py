"""`sdamd meta`, and `--from-image` with the pictures of other tools."""

import argparse
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sdamd import cli, gallery
from sdamd.commands.arguments import fields_asked
from sdamd.errors import BadMetadata
from sdamd.interchange.convert import to_record
from sdamd.interchange.reading import Reading
from sdamd.metadata import Record, from_json, to_json, to_parameters
from sdamd.request import Job, Request
from tests.interchange import build
from tests.interchange.test_corpus import CASES

TEXT = (
    "a fox \u202e\nNegative prompt: fog\nSteps: 20, Sampler: DPM++ 2M, Schedule type: Karras, "
    "CFG scale: 7, Seed: 18446744073709551615, Size: 512x768, Model: dream, Clip skip: 2, "
    "RNG: CPU, Denoising strength: 0.4, Hires upscale: 2, Hires upscaler: Latent, Version: v1.10.1"
)


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    return build.write(tmp_path, {"parameters": TEXT}, "png iTXt")


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = cli.main(["meta", *argv])
    out, err = capsys.readouterr()
    return status, out, err


def test_show_tells_the_tool_the_fields_and_what_is_not_used(
    foreign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, "show", str(foreign))
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "made by AUTOMATIC1111"
    assert "prompt: a fox \\u202e" in lines
    assert "scheduler: DPM++ 2M Karras" in lines
    assert "hires_upscaler: latent" in lines
    assert "  Clip skip: 2 (sdamd has no such setting)" in lines
    assert "  Version: v1.10.1" in lines
    assert lines.index("not used:") < lines.index("also told:")


def test_show_as_json_holds_it_all(foreign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--json", "show", str(foreign))
    shown = json.loads(out)
    assert shown["tool"] == "AUTOMATIC1111"
    assert shown["file"] == str(foreign)
    assert shown["fields"]["seed"] == "18446744073709551615"
    assert {u["name"] for u in shown["unused"]} == {"Clip skip", "seed"}
    assert shown["notes"] == {"RNG": "CPU", "Version": "v1.10.1"}


def test_one_bad_file_stops_no_other(
    foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.png"
    bad.write_bytes(build.png({}))
    status, out, err = run(capsys, "show", str(bad), str(foreign), str(tmp_path / "none.png"))
    assert status == 4
    assert out.startswith(f"{foreign}:\nmade by")
    assert f"sdamd: {bad}: there is no record" in err
    assert "there is no such file" in err


def test_a_conversion_is_a_record_that_reads_back(
    foreign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, "convert", str(foreign), "--to", "json")
    assert status == 0
    record = from_json(out)
    assert record.job.seed == 2**64 - 1
    assert record.job.hires_scheduler == "DPM++ 2M Karras"
    assert record.checkpoint_name == "dream"
    assert f"{foreign}: not used: Clip skip: 2" in err


def test_a_conversion_to_a_request_is_what_batch_files_hold(
    foreign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = run(capsys, "convert", str(foreign), str(foreign), "--to", "request")
    one, other = out.splitlines()
    assert one == other
    assert Request.from_dict(json.loads(one)) == gallery.request_from_png(foreign)


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in CASES if not c.refused])
def test_what_is_converted_asks_for_the_same_picture(case: Any, tmp_path: Path) -> None:
    """Into sdamd's JSON, and into the text that others read."""
    reading = gallery.read(build.write(tmp_path, case.texts, case.container))
    request = reading.request()
    try:
        record = to_record(reading, version="1.0")
    except BadMetadata as error:
        assert "does not tell" in str(error)  # noqa: PT017  # some records are no whole ones
        return
    for texts in ({"sdamd": to_json(record)}, {"parameters": to_parameters(record)}):
        again = gallery.read(build.write(tmp_path, texts, "png iTXt")).request()
        for name in (
            "prompt",
            "negative_prompt",
            "width",
            "height",
            "steps",
            "guidance_scale",
            "scheduler",
            "seed",
            "hires_scale",
            "hires_strength",
            "hires_upscaler",
        ):
            assert getattr(again, name) == getattr(request, name), name


def test_sdamds_own_record_is_converted_as_it_is() -> None:
    job = Job(
        index=3, prompt="x", negative_prompt="", checkpoint="", width=128, height=128, steps=2,
        guidance_scale=4.0, scheduler="Euler", seed=1, upscale=1,
    )  # fmt: skip
    record = Record(job=job, version="0.1", checkpoint_name="embedded", means="passes 2")
    reading = Reading(tool="sdamd", values={}, record=record)
    assert to_record(reading, version="9") is record
    assert from_json(to_json(record)) == record


def test_a_record_that_leaves_much_open_says_how_else_to_have_it() -> None:
    with pytest.raises(BadMetadata, match=r"does not tell width, .*, seed, upscale.*--to request"):
        to_record(Reading(tool="x", values={"prompt": "a"}), version="1")


# -- --from-image --------------------------------------------------------------------------------


def asked(path: Path, **flags: str) -> argparse.Namespace:
    names = dict.fromkeys(Request.__dataclass_fields__)
    return argparse.Namespace(from_image=path, set=[], **{**names, **flags})


def test_from_image_takes_any_picture_and_warns_of_what_it_cannot_do(
    foreign: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        values = fields_asked(asked(foreign, steps="30"), [])
    request = Request.from_dict(values)
    assert (request.prompt, request.steps, request.hires_scale) == ("a fox \u202e", 30, 2)
    assert f"{foreign}: Clip skip: 2 (sdamd has no such setting)" in caplog.messages


def test_a_flag_puts_a_bad_value_of_a_record_right(tmp_path: Path) -> None:
    """The record's values and the flags are checked together."""
    text = TEXT.replace("Steps: 20", "Steps: 999")
    path = build.write(tmp_path, {"parameters": text}, "png iTXt")
    with pytest.raises(BadMetadata, match="steps is 999; allowed 1 to 150"):
        gallery.request_from_png(path)
    assert Request.from_dict(fields_asked(asked(path, steps="30"), [])).steps == 30


@pytest.mark.parametrize("argv", ["--help", "plan"])
def test_what_must_be_quick_loads_nothing_of_it(argv: str, tmp_path: Path) -> None:
    script = (
        "import sys\nfrom sdamd import cli\n"
        "try:\n    cli.main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print([m for m in sys.modules if 'interchange' in m or m == 'PIL'], file=sys.stderr)\n"
    )
    home = ["--home", str(tmp_path), "--device", "cpu"] if argv == "plan" else []
    done = subprocess.run(
        [sys.executable, "-c", script, argv, *home], capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines()[-1] == "[]"

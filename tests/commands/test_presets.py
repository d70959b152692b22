"""`sdamd presets`, and `--preset` of the commands that make pictures."""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from sdamd.cli import main
from sdamd.errors import BadRequest
from sdamd.preset import read

TIERED = b"""schema = 1
name = "Tiered"
description = "sizes by memory"
families = ["sd15"]
[request]
prompt = "photo of {prompt}"
width = 512
steps = 7
[tiers.16]
width = 768
"""


@pytest.fixture(name="home", autouse=True)
def home_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in [name for name in os.environ if name.startswith("SDAMD_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SDAMD_HOME", str(tmp_path / "home"))
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield tmp_path / "home"
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(name="tiered")
def tiered_(tmp_path: Path) -> Path:
    path = tmp_path / "tiered.toml"
    path.write_bytes(TIERED)
    return path


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def test_a_preset_goes_from_flags_to_a_card_and_back(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save = ["presets", "save", "Evening", "{prompt} at dusk", "--steps", "9", "--tag", "light"]
    assert main([*save, "--description", "low sun", "--preset", "crisp"]) == 0
    path = Path(shown(capsys).strip())
    assert path == home / "presets" / "evening.toml"
    kept = path.read_bytes()
    assert read(kept, "x").values["guidance_scale"] == 5.0, "what --preset says is taken along"
    Image.effect_noise((64, 64), 50).save(tmp_path / "p.png")
    card = tmp_path / "card.png"
    assert (
        main(["presets", "export", "Evening", str(card), "--picture", str(tmp_path / "p.png")]) == 0
    )
    path.unlink()
    assert main(["presets", "import", str(card)]) == 0
    assert path.read_bytes() == kept
    assert main(["presets", "import", str(card)]) == 2
    assert main(["presets", "import", str(card), "--replace"]) == 0
    assert main(["presets", "export", "evening", str(card)]) == 2, "no picture was given"


def test_list_names_every_preset_and_its_purpose(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "presets").mkdir(parents=True)
    (home / "presets" / "broken.toml").write_bytes(b"schema = 1\n")
    assert main(["presets", "list"]) == 0
    lines = shown(capsys).splitlines()
    assert any(line.startswith("broken.toml: cannot be read: ") for line in lines)
    assert any(line.startswith("Portrait (SDXL): One person") for line in lines)
    assert main(["presets", "list", "--json"]) == 0
    rows = [json.loads(line) for line in shown(capsys).splitlines()]
    assert len(rows) == len(lines)


def test_check_tells_everything_and_ends_with_2(
    tmp_path: Path, tiered: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["presets", "check", str(tiered)]) == 0
    assert "Tiered, right" in shown(capsys)
    bad = tmp_path / "bad.toml"
    bad.write_bytes(b"schema = 1\nname = 3\n[request]\nsteps = 0\n")
    assert main(["presets", "check", str(bad), str(tiered)]) == 2
    told = capsys.readouterr().err
    assert "bad.toml, line 2, column 1" in told
    assert "bad.toml, line 4, column 1" in told


def test_show_against_another_tells_what_changes(
    tiered: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["presets", "show", str(tiered), "--against", "Draft (SD 1.5)"]) == 0
    lines = shown(capsys).splitlines()
    assert "  steps: 12 -> 7" in lines
    assert "  guidance_scale: 6.0 -> default" in lines
    assert main(["presets", "show", str(tiered), "--vram", "16"]) == 0
    assert "  width: 768" in shown(capsys).splitlines()


@pytest.mark.parametrize(("gpu", "wide"), [("gfx1030:8", 512), ("gfx1100:16", 768)])
def test_the_card_decides_the_tier(
    tiered: Path, capsys: pytest.CaptureFixture[str], gpu: str, wide: int
) -> None:
    command = ["plan", "a cat", "--family", "sd15", "--gpu", gpu, "--height", "512"]
    assert main([*command, "--preset", str(tiered)]) == 0
    assert shown(capsys).startswith(f"{wide} x 512")
    assert main([*command, "--preset", str(tiered), "--width", "256"]) == 0
    assert shown(capsys).startswith("256 x 512"), "a flag goes before a preset"


@pytest.mark.report("E28")
def test_a_model_that_a_preset_needs_and_is_not_here_is_told_and_never_fetched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.toml"
    path.write_bytes(
        b'schema = 1\nname = "p"\n[needs.checkpoint]\nname = "dream"\n'
        b'url = "https://example.org/dream"\n[[needs.loras]]\nname = "detail"\n'
    )
    assert main(["plan", "x", "--preset", str(path)]) == 2
    told = capsys.readouterr().err
    assert "needs the checkpoint 'dream'" in told
    assert "people get it from https://example.org/dream" in told
    assert "detail" in told


def test_a_preset_that_is_not_there_is_told_beside_the_other_problems(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "x", "--preset", "potrait sdxl", "--steps", "0"]) == 2
    told = capsys.readouterr().err
    assert "the nearest: Portrait (SDXL)" in told
    assert "steps is 0" in told


def test_a_preset_for_another_family_is_warned_of(
    tiered: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["plan", "x", "--preset", str(tiered)])
    assert "made for Stable Diffusion 1.x; the model is small" in capsys.readouterr().err


def test_what_is_saved_can_be_read_again_or_is_refused(home: Path) -> None:
    assert main(["presets", "save", "x" * 81]) == 2
    assert not list(home.rglob("*.toml"))
    with pytest.raises(BadRequest):
        read(b"schema = 1\nname = ''\n", "p")

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdamd.errors import BadRequest, StorageError
from sdamd.settings import (
    DEFAULT_FILENAME,
    Attention,
    Dtype,
    Offload,
    Settings,
    Storage,
    VaeTiling,
    VramMode,
)


def load(
    home: Path,
    file: str | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Settings:
    if file is not None:
        home.mkdir(exist_ok=True)
        (home / "settings.toml").write_text(file, encoding="utf-8")
    return Settings.load({"home": str(home), **(flags or {})}, environ or {})


# -- precedence ----------------------------------------------------------------------------------


def test_without_anything_the_defaults_hold(home: Path) -> None:
    assert load(home) == Settings(home=home)
    assert Settings(home=home).filename == DEFAULT_FILENAME


@pytest.mark.parametrize(
    ("file", "environ", "flags", "batch_size"),
    [
        (None, {}, {}, 0),
        ("batch_size = 1", {}, {}, 1),
        ("batch_size = 1", {"SDAMD_BATCH_SIZE": "2"}, {}, 2),
        ("batch_size = 1", {"SDAMD_BATCH_SIZE": "2"}, {"batch_size": "3"}, 3),
        ("batch_size = 1", {}, {"batch_size": 3}, 3),
        ("batch_size = 1", {}, {"batch_size": None}, 1),
    ],
)
def test_flags_win_over_the_environment_over_the_file_over_the_defaults(
    home: Path,
    file: str | None,
    environ: dict[str, str],
    flags: dict[str, object],
    batch_size: int,
) -> None:
    assert load(home, file, environ, flags).batch_size == batch_size


def test_a_file_that_a_windows_editor_marked_as_utf8_is_read(home: Path) -> None:
    assert load(home, "\ufeffbatch_size = 4").batch_size == 4


def test_each_setting_is_overridden_by_itself(home: Path) -> None:
    settings = load(
        home,
        'device = "cpu"\ndtype = "float32"\nin_process = true',
        {"SDAMD_DTYPE": "bfloat16", "SDAMD_OUTPUT": "/pictures"},
        {"filename": "[seed]"},
    )
    assert settings == Settings(
        home=home,
        device="cpu",
        dtype=Dtype.BFLOAT16,
        in_process=True,
        output="/pictures",
        filename="[seed]",
    )


def test_the_data_folder_comes_from_the_flag_before_the_environment(tmp_path: Path) -> None:
    environ = {"SDAMD_HOME": str(tmp_path / "b")}
    assert Settings.load({}, environ).home == tmp_path / "b"
    assert Settings.load({"home": str(tmp_path / "a")}, environ).home == tmp_path / "a"


def test_the_data_folder_is_the_platforms_without_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/nowhere/data")
    assert Settings.load({}, {}).home.name == "sdamd"


def test_a_relative_data_folder_is_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Settings.load({"home": "data"}, {}).home == tmp_path / "data"


def test_the_folders_are_below_the_data_folder(home: Path) -> None:
    settings = load(home)
    assert (settings.models, settings.cache) == (home / "models", home / "cache")
    assert settings.outputs == home / "outputs"
    assert load(home, flags={"output": "/elsewhere"}).outputs == Path("/elsewhere")


def test_the_index_of_a_gpu_may_be_a_number_in_the_file(home: Path) -> None:
    assert load(home, "device = 1").device == "1"


# -- what is wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (
            "device",
            " ",
            "device is ' '; allowed auto, cpu, rocm, directml, directml-cpu, the index",
        ),
        ("dtype", "half", "dtype is 'half'; allowed auto, float32, float16, bfloat16"),
        ("attention", "slow", "attention is 'slow'; allowed auto, fused, chunked, sliced, xf"),
        ("attention", "", "attention is ''; allowed auto, fused, chunked"),
        ("batch_size", "65", "batch_size is 65; allowed 0 (automatic) to 64"),
        ("batch_size", "-1", "batch_size is '-1'; allowed 0 (automatic) to 64"),
        ("batch_size", "1.5", "batch_size is '1.5'; allowed 0 (automatic) to 64"),
        ("batch_size", "9" * 5000, "batch_size is "),
        ("in_process", "maybe", "in_process is 'maybe'; allowed true or false"),
        ("vram_mode", "low", "vram_mode is 'low'; allowed auto, fast, balanced, minimal"),
        ("offload", "disk", "offload is 'disk'; allowed auto, none, model, stream"),
        ("vae_tiling", "on", "vae_tiling is 'on'; allowed auto, always, never"),
        ("storage", "int4", "storage is 'int4'; allowed auto, float8"),
        ("vram_budget_gb", "0", "vram_budget_gb is 0.0; allowed 0.25 to 1024"),
        ("vram_budget_gb", "-1", "vram_budget_gb is '-1'; allowed 0.25 to 1024"),
        ("vram_budget_gb", "abc", "vram_budget_gb is 'abc'; allowed 0.25 to 1024"),
        ("vram_budget_gb", "1000000000", "vram_budget_gb is '1000000000'; allowed 0.25 to 1024"),
        ("vram_reserve_gb", "-0.5", "vram_reserve_gb is '-0.5'; allowed 0 to 1024"),
        ("vae_tile", "100", "vae_tile is 100; allowed 0 (automatic) or 128 to 4096, multiples of"),
        ("vae_tile", "200", "vae_tile is 200; allowed 0 (automatic) or 128 to 4096, multiples of"),
        ("passes", "0.5", "passes is '0.5'; allowed 0 (automatic) to 128"),
        ("feed_forward_chunks", "65", "feed_forward_chunks is 65; allowed 0 (automatic) to 64"),
        ("vae_bands", "x", "vae_bands is 'x'; allowed 0 (automatic) to 4096"),
        ("round_sizes", "7", "round_sizes is 7; allowed 0 (as asked) to 512, multiples of 8"),
    ],
)
def test_a_wrong_value_is_told_with_its_source(
    home: Path, name: str, value: str, said: str
) -> None:
    with pytest.raises(BadRequest) as from_flag:
        load(home, flags={name: value})
    with pytest.raises(BadRequest) as from_environment:
        load(home, environ={f"SDAMD_{name.upper()}": value})
    with pytest.raises(BadRequest) as from_file:
        load(home, f'{name} = "{value}"')
    assert str(from_flag.value).startswith(said)
    assert str(from_flag.value).endswith(" (in the command line)")
    assert str(from_environment.value).endswith(" (in the environment)")
    assert str(from_file.value).endswith(f" (in {home / 'settings.toml'})")


@pytest.mark.parametrize("line", ["output = 5", "filename = ['a']", "device = true", "output = {}"])
def test_what_is_text_must_be_text_in_the_file(home: Path, line: str) -> None:
    with pytest.raises(BadRequest, match="allowed is text"):
        load(home, line)


def test_everything_wrong_in_all_sources_is_told_at_once(home: Path) -> None:
    with pytest.raises(BadRequest) as raised:
        load(home, "dtyp = 1", {"SDAMD_DEVISE": "cpu"}, {"batch_size": "x"})
    said = raised.value.problems
    assert len(said) == 3
    assert said[0].startswith("setting 'dtyp' is not known; the nearest: dtype")
    assert said[1].startswith("setting 'devise' is not known; the nearest: device")
    assert said[2].startswith("batch_size is 'x'")


def test_the_data_folder_cannot_be_moved_by_the_file_inside_it(home: Path) -> None:
    with pytest.raises(BadRequest, match="setting 'home' is not known"):
        load(home, 'home = "/elsewhere"')


@pytest.mark.parametrize("text", ["device =", "a = 1\na = 2", "\ud800"])
def test_a_file_that_is_no_toml_is_refused(home: Path, text: str) -> None:
    home.mkdir()
    (home / "settings.toml").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(BadRequest, match=r"settings\.toml is not valid TOML"):
        load(home)


def test_a_file_that_cannot_be_read_is_a_fault_of_the_storage(home: Path) -> None:
    (home / "settings.toml").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"settings\.toml cannot be read"):
        load(home)


def test_a_data_folder_that_is_a_file_is_a_fault_of_the_storage(home: Path) -> None:
    home.write_text("")
    with pytest.raises(StorageError, match="cannot be read"):
        load(home)


@given(st.text(max_size=30))
def test_whatever_the_environment_says_of_the_device_is_taken_or_refused(text: str) -> None:
    try:
        settings = Settings.load({"home": "/nowhere"}, {"SDAMD_DEVICE": text})
    except BadRequest as error:
        assert "device is " in str(error)  # noqa: PT017  # either way is right
    else:
        assert settings.device == text
        assert text.strip()


@pytest.mark.parametrize("kind", Attention)
def test_attention_is_chosen_by_name(tmp_path: Path, kind: Attention) -> None:
    for flags, environ in (({"attention": str(kind)}, {}), ({}, {"SDAMD_ATTENTION": str(kind)})):
        settings = Settings.load({"home": str(tmp_path), **flags}, environ)
        assert settings.attention is kind


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("vram_mode", "minimal", VramMode.MINIMAL),
        ("vram_budget_gb", "60", 60.0),
        ("vram_budget_gb", " 7.5 ", 7.5),
        ("vram_reserve_gb", "0", 0.0),
        ("offload", "stream", Offload.STREAM),
        ("vae_tiling", "always", VaeTiling.ALWAYS),
        ("vae_tile", "320", 320),
        ("vae_bands", "24", 24),
        ("passes", "2", 2),
        ("feed_forward_chunks", "8", 8),
        ("storage", "float8", Storage.FLOAT8),
        ("round_sizes", "64", 64),
        ("batch_size", "0", 0),
    ],
)
def test_what_the_plan_would_choose_can_be_set_for_good(
    home: Path, name: str, text: str, value: object
) -> None:
    for settings in (
        load(home, f'{name} = "{text}"'),
        load(home, environ={f"SDAMD_{name.upper()}": text}),
        load(home, flags={name: text}),
    ):
        assert getattr(settings, name) == value
    home.joinpath("settings.toml").write_text(
        f"{name} = {text if text[0].isdigit() else repr(text)}"
    )
    assert getattr(Settings.load({"home": str(home)}, {}), name) == value


def test_a_tile_without_tiling_is_refused(home: Path) -> None:
    with pytest.raises(BadRequest, match="vae_tile is 256 and vae_tiling never"):
        load(home, flags={"vae_tiling": "never", "vae_tile": "256"})

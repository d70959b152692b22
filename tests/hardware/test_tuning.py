from itertools import pairwise
from pathlib import Path

import pytest

from sdamd.hardware import tuning
from sdamd.hardware.gpu import ARCHITECTURES, FusedAttention, Gpu, Kind
from sdamd.hardware.products import find_card
from sdamd.hardware.runtime import Engine, candidates
from sdamd.hardware.tuning import (
    ALLOCATOR,
    CAREFUL,
    TUNINGS,
    attention_of,
    kernel_cache,
    libraries_of,
    to_set,
    tuning_of,
    variables_of,
)


def names_of(gfx: str) -> dict[str, str]:
    return {variable.name: variable.value for variable in variables_of(gfx)}


def test_every_architecture_has_exactly_one_row() -> None:
    assert set(TUNINGS) == set(ARCHITECTURES)
    source = Path(tuning.__file__).read_text(encoding="utf-8")
    # A second row of the same name would replace the first in silence.
    assert all(source.count(f'    "{gfx}": _') == 1 for gfx in TUNINGS)


@pytest.mark.report("D03")
@pytest.mark.parametrize(
    ("gfx", "known"),
    [
        ("gfx1201", True),
        ("gfx1030", True),
        ("gfx1100", True),
        ("gfx110", False),
        ("gfx11000", False),
        ("gfx1", False),
        ("GFX1100", False),
        ("", False),
    ],
)
def test_an_architecture_is_found_by_its_exact_name(gfx: str, known: bool) -> None:
    """D03: a list searched by substring made gfx1201 an RDNA 2, and its VAE five times slower."""
    assert (gfx in TUNINGS) == known
    assert (tuning_of(gfx) is CAREFUL) == (not known or TUNINGS[gfx] is CAREFUL)
    gpu = Gpu(index=0, name="Radeon", arch=gfx, vram_bytes=1, kind=Kind.DISCRETE)
    said = any(reason.startswith("nothing is known about") for reason in attention_of(gpu))
    assert said != known


@pytest.mark.report("D03")
def test_rdna4_is_not_treated_as_rdna2() -> None:
    new, old = tuning_of("gfx1201"), tuning_of("gfx1030")
    assert (new.attention, new.vae_dtype) == ("fused", "bfloat16")
    assert (old.attention, old.vae_dtype) == ("chunked", "float16")
    assert new.miopen
    assert old.miopen


@pytest.mark.parametrize("gfx", ARCHITECTURES)
def test_a_row_asks_for_nothing_that_the_architecture_lacks(gfx: str) -> None:
    row, known = tuning_of(gfx), ARCHITECTURES[gfx]
    assert (row.attention == "fused") == (known.fused_attention is not FusedAttention.NO)
    if gfx.startswith("gfx11"):
        assert row.vae_attention == "chunked"
    if row.attention == "chunked":
        assert row.vae_attention == "chunked"
    if "bfloat16" in {row.dtype, row.vae_dtype}:
        assert known.bf16
    assert (row.dtype == "float32") == (known.generation == "RDNA1")
    assert bool(row.because) == (row.dtype == "float32")
    assert not row.channels_last
    assert row.find_mode == "2"


@pytest.mark.parametrize(
    ("gfx", "said"),
    [
        ("gfx1100", "MIOpen in find mode 2; channels first; with hipBLASLt"),
        ("gfx1030", "MIOpen in find mode 2; channels first; without hipBLASLt"),
    ],
)
def test_what_is_decided_about_amds_libraries_is_said(gfx: str, said: str) -> None:
    assert libraries_of(find_card(f"{gfx}:16")) == said


@pytest.mark.report("D06")
@pytest.mark.parametrize("gfx", ARCHITECTURES)
def test_hipblaslt_is_turned_off_where_it_is_not_built(gfx: str) -> None:
    """D06: torch warned of it at every start, and people took that for the fault."""
    built = ARCHITECTURES[gfx].matrix and gfx != "gfx908"
    assert (names_of(gfx).get("TORCH_BLAS_PREFER_HIPBLASLT") == "0") == (not built)


# -- environment ---------------------------------------------------------------------------------

EVERYWHERE = [
    pytest.param(build.environment, id=f"{platform} {build.name}")
    for platform in ("linux", "wsl", "windows")
    for gfx in ARCHITECTURES
    for build in candidates(find_card(f"{gfx}:8"), platform, (3, 12))
    if build.engine is Engine.ROCM
]


@pytest.mark.report("B14")
@pytest.mark.parametrize("environment", EVERYWHERE)
def test_the_allocator_never_gets_options_that_corrupt_tensors(
    environment: tuple[tuning.Variable, ...],
) -> None:
    """B14: with expandable_segments a live tensor read back as zeros."""
    values = [variable.value for variable in environment if variable.name in ALLOCATOR]
    assert len(values) == 2
    assert len(set(values)) == 1
    assert "expandable_segments" not in " ".join(v.value for v in environment)
    assert "max_split_size_mb:512" in values[0]


@pytest.mark.parametrize("environment", EVERYWHERE)
def test_an_override_is_of_the_same_generation(environment: tuple[tuning.Variable, ...]) -> None:
    """No row lets a card pose as one of another generation."""
    for variable in environment:
        if variable.name == "HSA_OVERRIDE_GFX_VERSION":
            major = variable.value.partition(".")[0]
            gfx = next(word for word in variable.reason.split() if word.startswith("gfx"))
            assert gfx.rstrip(",").startswith(f"gfx{major}")


@pytest.mark.report("B14")
@pytest.mark.parametrize("name", ALLOCATOR)
@pytest.mark.parametrize(
    "value", ["expandable_segments:True", "max_split_size_mb:128", "backend:native", ""]
)
def test_nothing_is_added_to_allocator_options_of_the_user(name: str, value: str) -> None:
    """B14: half of it from us and half from the user is the same fault."""
    made, said = to_set(variables_of("gfx1100"), {name: value})
    assert not set(made) & set(ALLOCATOR)
    assert f"{name} is {value!r}, as you set it, and nothing is added to it" in said


def test_allocator_options_as_we_would_set_them_are_not_remarkable() -> None:
    own = {name: names_of("gfx1100")[name] for name in ALLOCATOR[:2]}
    made, said = to_set(variables_of("gfx1100"), own)
    assert not set(made) & set(ALLOCATOR)
    assert said == ()


@pytest.mark.parametrize("name", sorted(set(names_of("gfx1030")) - set(ALLOCATOR)))
def test_a_variable_of_the_user_wins_and_is_said(name: str) -> None:
    wanted = variables_of("gfx1030")
    made, said = to_set(wanted, {name: "7"})
    assert name not in made
    assert set(made) | {name} == {variable.name for variable in wanted}
    (sentence,) = said
    assert sentence.startswith(f"{name} is '7', as you set it; sdamd would set ")
    same = {variable.name: variable.value for variable in wanted}
    assert to_set(wanted, same) == ({}, ())


def test_without_anything_set_everything_is_set() -> None:
    wanted = variables_of("gfx1030", "10.3.0")
    assert to_set(wanted, {}) == ({v.name: v.value for v in wanted}, ())
    assert dict(to_set(wanted, {})[0])["HSA_OVERRIDE_GFX_VERSION"] == "10.3.0"


def test_kernels_are_kept_apart_by_torch_and_architecture(tmp_path: Path) -> None:
    folders = [
        kernel_cache(tmp_path, torch, gfx)
        for torch in ("2.9.1+rocm6.4", "2.13.0+rocm7.2")
        for gfx in ("gfx1100", "gfx1030")
    ]
    assert all(one != other for one, other in pairwise(sorted(folders)))
    assert folders[0] == tmp_path / "miopen" / "2.9.1+rocm6.4-gfx1100"

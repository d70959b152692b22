from collections.abc import Iterator
from dataclasses import replace

import pytest

from sdamd.plan import GIB, Plan, Stage, Stages, in_figures, more_frugal
from tests.fakes import A_PLAN

ON_GPU = replace(A_PLAN, device="cuda", dtype="float16")


def ladder(plan: Plan, stage: str) -> Iterator[Plan]:
    step: Plan | None = plan
    while step is not None:
        yield step
        step = more_frugal(step, stage)


def means(plan: Plan) -> tuple[object, ...]:
    return (
        plan.batch, plan.attention, plan.passes, plan.feed_forward_chunks, plan.vae_bands,
        plan.vae_tile, plan.offload, plan.resident_bytes,
    )  # fmt: skip


@pytest.mark.parametrize("stage", Stage)
@pytest.mark.parametrize("device", ["cpu", "cuda", "directml:0", "directml-cpu"])
@pytest.mark.parametrize("batch", [1, 3, 64])
def test_every_ladder_ends_and_never_repeats_a_way(stage: str, device: str, batch: int) -> None:
    plan = replace(A_PLAN, device=device, batch=batch, resident_bytes=0)
    ways = [means(step) for step in ladder(plan, stage)]
    assert len(ways) == len(set(ways)) <= 20


@pytest.mark.parametrize("stage", ["decode", "encode"])
def test_the_vae_goes_from_what_is_exact_to_ever_smaller_tiles(stage: str) -> None:
    steps = [(p.vae_bands, p.offload, p.vae_tile) for p in ladder(ON_GPU, stage)]
    assert steps == [
        (0, "none", 0),
        (16, "none", 0),
        (16, "model", 0),
        (0, "model", 512),
        (0, "model", 256),
        (0, "model", 128),
    ]


@pytest.mark.parametrize("stage", ["denoise", "hires"])
def test_the_unet_does_less_at_once_before_its_weights_leave(stage: str) -> None:
    plan = replace(ON_GPU, attention="math", batch=2)
    steps = [(p.attention, p.feed_forward_chunks, p.passes, p.offload) for p in ladder(plan, stage)]
    assert steps == [
        ("math", 1, 1, "none"),
        ("chunked", 1, 1, "none"),
        ("chunked", 8, 1, "none"),
        ("chunked", 8, 2, "none"),
        ("chunked", 8, 4, "none"),
        ("chunked", 8, 4, "model"),
        ("chunked", 8, 4, "stream"),
    ]


def test_a_streamed_unet_gives_up_what_stays_resident() -> None:
    plan = replace(ON_GPU, offload="stream", resident_bytes=GIB, passes=2, feed_forward_chunks=8)
    assert [p.resident_bytes for p in ladder(plan, "denoise")] == [GIB, 0]


def test_weights_leave_when_loading_runs_out_of_memory() -> None:
    assert [p.offload for p in ladder(ON_GPU, "load")] == ["none", "model", "stream"]
    assert [p.offload for p in ladder(replace(ON_GPU, device="cpu"), "load")] == ["none"]


def test_a_stage_changes_nothing_of_the_others() -> None:
    last = list(ladder(ON_GPU, "decode"))[-1]
    assert (last.passes, last.feed_forward_chunks) == (1, 1)
    last = list(ladder(ON_GPU, "denoise"))[-1]
    assert (last.vae_bands, last.vae_tile, last.batch) == (0, 0, 1)


def test_graphs_of_directml_are_fed_less_but_never_cut() -> None:
    plan = replace(A_PLAN, device="directml:0", batch=2)
    denoise = list(ladder(plan, "denoise"))
    assert [(p.passes, p.offload) for p in denoise] == [
        (1, "none"), (2, "none"), (4, "none"), (4, "model")
    ]  # fmt: skip
    decode = list(ladder(plan, "decode"))
    assert [p.vae_tile for p in decode] == [0, 0, 512, 256, 128, 64]
    for step in (*denoise, *decode):
        assert (step.vae_bands, step.feed_forward_chunks) == (0, 1)
        assert step.offload != "stream"


def test_an_engine_that_begins_again_halves_its_batch_first() -> None:
    plan = replace(A_PLAN, device="directml:0", batch=4)
    assert [p.batch for p in ladder(plan, "run")][:4] == [4, 2, 1, 1]


def test_each_step_says_why() -> None:
    step = more_frugal(ON_GPU, "decode")
    assert step is not None
    assert step.reasons[-1].startswith("decode: the device ran out of memory")
    assert step.stages == ON_GPU.stages


def test_a_stage_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ValueError, match="dekode"):
        more_frugal(ON_GPU, "dekode")


def test_the_figures_of_a_stage_in_words() -> None:
    stages = Stages(text=0, denoise=3 * GIB, decode=6 * GIB)
    plan = replace(ON_GPU, stages=stages, budget_bytes=4 * GIB)
    assert in_figures(plan, "decode") == "decode needs 6.0 GiB, and a run may take 4.0 GiB"
    unknown = replace(plan, budget_bytes=None)
    assert in_figures(unknown, "denoise").endswith("and nobody knows how much there is")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, ""),
        ({"passes": 2}, "passes 2"),
        ({"vae_bands": 16, "offload": "model"}, "VAE in bands of 16, offload model"),
        (
            {"offload": "stream", "resident_bytes": GIB, "storage": "float8_e4m3fn"},
            "offload stream with 1.0 GiB on the device, weights in float8_e4m3fn",
        ),
        ({"vae_tile": 512, "denoise_tile": 1024},
         "VAE in tiles of 512, denoised in tiles of 1024"),
    ],
)  # fmt: skip
def test_what_is_on_in_words(fields: dict[str, object], said: str) -> None:
    assert replace(A_PLAN, **fields).means == said  # type: ignore[arg-type]

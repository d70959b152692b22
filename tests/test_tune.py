import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from sdamd import cli, tuned
from sdamd.backends.backend import Made, Watch
from sdamd.checkpoint import Checkpoint
from sdamd.errors import BadImage, BadRequest, HardwareError, OutOfVram
from sdamd.hardware.device import CPU, Device
from sdamd.hardware.products import find_card
from sdamd.hardware.runtime import Engine
from sdamd.plan import Plan, make_plan
from sdamd.request import BUCKETS, Job, buckets
from sdamd.settings import Attention, Settings
from sdamd.tune import BATCHES, STEPS, Trial, choices, tune
from tests.fakes import Clock, picture

ROCM = Device(gpu=find_card("RX 7900 XTX"), engine=Engine.ROCM)


@dataclass
class Bench:
    """A backend whose clock runs as fast as `cost` says for a plan; no time passes for real."""

    cost: Callable[[Plan], float]
    clock: Clock = field(default_factory=Clock)
    loads: list[Plan] = field(default_factory=list)
    sampled: list[Plan] = field(default_factory=list)

    def load(self, checkpoint: Checkpoint, plan: Plan) -> "Bench":
        self.loads.append(plan)
        return self

    @property
    def outcome(self) -> None:
        return None

    def sample(self, jobs: Sequence[Job], plan: Plan, watch: Watch) -> list[Made]:
        assert len(jobs) == plan.batch
        assert {job.steps for job in jobs} == {STEPS}
        self.sampled.append(plan)
        # The first pass of every plan finds kernels.
        first = self.sampled.count(plan) == 1
        self.clock.now += self.cost(plan) * len(jobs) + (600 if first else 0)
        return [picture(job) for job in jobs]


def run(machine: Settings, bench: Bench, device: Device = CPU) -> list[Trial]:
    return list(tune(machine, device, "", lambda: False, lambda: bench, bench.clock))


def test_the_fastest_way_is_kept_and_used_by_the_plan(
    machine: Settings, job: Job, published: dict[str, Checkpoint]
) -> None:
    bench = Bench(
        lambda plan: (
            10.0
            * (0.5 if plan.attention == "chunked" else 1)
            * {1: 1, 2: 0.8, 4: 1.2}[plan.batch]
            * (0.9 if plan.channels_last else 1)
            * (0.7 if not plan.miopen else 1)
            * (0.8 if plan.vae_dtype == "float32" else 1)
        )
    )
    trials = run(machine, bench, ROCM)
    found = tuned.find(machine.cache, "gfx1100", "tiny")
    assert found is not None
    assert (found.attention, found.batch, found.vae_dtype) == ("chunked", 2, "float32")
    assert (found.miopen, found.channels_last) == (False, True)
    assert found.seconds == pytest.approx(10 * 0.5 * 0.8 * 0.9 * 0.7 * 0.8)
    assert [t.choice for t in trials if t.kept] == [
        "plan", "attention", "batch", "batch", "vae_dtype", "miopen", "channels_last",
    ]  # fmt: skip
    plan = make_plan(job, ROCM.gpu, published["tiny"], machine, tuned=found)
    assert (plan.attention, plan.vae_dtype, plan.miopen) == ("chunked", "float32", False)
    assert any(r.startswith("measured on this card on 20") for r in plan.reasons)


def test_noise_changes_nothing(machine: Settings) -> None:
    noise = iter([1.0, *[0.98, 1.02, 0.99, 1.0] * 20])
    bench = Bench(lambda _: next(noise))
    first = make_plan(
        run_job(machine), None, embedded(machine), machine, count=max(BATCHES)
    )  # fmt: skip
    run(machine, bench)
    found = tuned.find(machine.cache, "cpu", "tiny")
    assert found is not None
    assert (found.attention, found.batch) == (first.attention, first.batch)


def embedded(machine: Settings) -> Checkpoint:
    from sdamd import models

    return models.find("", machine.models)


def run_job(machine: Settings) -> Job:
    from sdamd.batch import expand
    from sdamd.request import Request

    return next(expand(Request(seed=0, upscale=1), embedded(machine).family))


def test_settings_do_not_fix_what_is_measured(home: Path) -> None:
    machine = Settings(home=home, attention=Attention.SLICED, batch_size=3)
    bench = Bench(lambda plan: 1.0 if plan.attention == "sliced" else 0.5)
    run(machine, bench)
    found = tuned.find(machine.cache, "cpu", "tiny")
    assert found is not None
    assert found.attention != "sliced"
    assert found.batch in BATCHES


@pytest.mark.parametrize("error", [OutOfVram("no room"), HardwareError("a fault"), BadImage("NaN")])
def test_a_way_that_fails_is_out_and_the_others_go_on(machine: Settings, error: Exception) -> None:
    def cost(plan: Plan) -> float:
        if plan.attention == "chunked":
            raise error
        return 0.5 if plan.channels_last else 1.0

    trials = run(machine, Bench(cost))
    (failed,) = [t for t in trials if t.seconds is None]
    assert (failed.choice, failed.value, failed.problem) == ("attention", "chunked", str(error))
    assert str(failed) == f"attention chunked: {error}"
    found = tuned.find(machine.cache, "cpu", "tiny")
    assert found is not None
    assert found.channels_last


def test_a_bad_picture_is_no_way(machine: Settings) -> None:
    class Black(Bench):
        def sample(self, jobs: Sequence[Job], plan: Plan, watch: Watch) -> list[Made]:
            made = super().sample(jobs, plan, watch)
            return [BadImage("black")] * len(made) if plan.channels_last else made

    trials = run(machine, Black(lambda plan: 0.1 if plan.channels_last else 1.0))
    assert [t.problem for t in trials if t.choice == "channels_last"] == ["black"]
    found = tuned.find(machine.cache, "cpu", "tiny")
    assert found is not None
    assert not found.channels_last


def test_a_first_plan_without_room_gives_way_to_smaller_ones(machine: Settings) -> None:
    def cost(plan: Plan) -> float:
        if plan.batch > 1:
            raise OutOfVram("no room")
        return 1.0

    trials = run(machine, Bench(cost))
    assert trials[0].kept
    assert [t.problem for t in trials if t.choice == "batch"] == ["no room", "no room"]


def test_when_nothing_runs_that_is_the_error(machine: Settings) -> None:
    def cost(plan: Plan) -> float:
        raise OutOfVram("no room at all")

    with pytest.raises(OutOfVram, match="no room at all"):
        run(machine, Bench(cost))
    assert not machine.cache.exists()


def test_stopping_keeps_nothing(machine: Settings) -> None:
    bench = Bench(lambda _: 1.0)
    stops: Iterator[bool] = iter([False, False, True])
    made = list(tune(machine, CPU, "", lambda: next(stops), lambda: bench, bench.clock))
    assert len(made) == 3
    assert tuned.find(machine.cache, "cpu", "tiny") is None


def test_a_model_is_loaded_again_for_another_dtype_alone(machine: Settings) -> None:
    bench = Bench(lambda _: 1.0)
    run(machine, bench, ROCM)
    dtypes = [plan.vae_dtype for plan in bench.loads]
    assert dtypes == ["bfloat16", "float32", "float16", "bfloat16"]


@pytest.mark.parametrize("engine", [Engine.DIRECTML, Engine.DIRECTML_CPU])
def test_an_engine_with_nothing_to_choose_is_refused(machine: Settings, engine: Engine) -> None:
    device = Device(gpu=None, engine=engine)
    with pytest.raises(BadRequest, match=f"device is {engine}; allowed for tune are rocm and cpu"):
        list(tune(machine, device, "", lambda: False))


@pytest.mark.parametrize(
    ("card", "family", "choice", "values"),
    [
        ("gfx1100", "sdxl", "vae_dtype", {"float32"}),
        ("gfx1100", "sd15", "vae_dtype", {"float32", "float16"}),
        ("gfx1030", "sdxl", "vae_dtype", set()),
        ("gfx1030", "sd15", "attention", {"sliced"}),
        ("gfx1201", "sd15", "attention", {"chunked", "sliced"}),
        ("gfx1100", "sdxl", "vae_tile", {512, 256}),
        ("gfx1100", "sd15", "vae_tile", {512, 256}),
        ("gfx1100", "tiny", "vae_tile", set()),
        ("gfx1100", "sd15", "miopen", {False}),
        ("gfx1100", "sd15", "channels_last", {True}),
        (None, "sd15", "miopen", set()),
        (None, "sd15", "vae_dtype", set()),
        (None, "sd15", "attention", {"chunked", "sliced"}),
    ],
)
def test_what_is_tried_is_what_the_device_can_do(
    machine: Settings, published: dict[str, Checkpoint], card: str | None, family: str,
    choice: str, values: set[object],
) -> None:  # fmt: skip
    gpu = find_card(f"{card}:64") if card else None
    device = Device(gpu=gpu, engine=Engine.ROCM if gpu else Engine.CPU)
    checkpoint = published[family]
    plan = make_plan(run_job(machine), gpu, checkpoint, machine)
    assert set(dict(choices(plan, device, checkpoint))[choice]) == values


# -- commands -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_embedded_model_is_tuned_for_real(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = ["--home", str(home), "--device", "cpu"]
    assert cli.main(["tune", *here, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0]["choice"] == "plan"
    assert {line["choice"] for line in lines} == {"plan", "attention", "batch", "channels_last"}
    assert all(line["seconds"] > 0 for line in lines)
    sent = home / "sent.json"
    assert cli.main(["tune", *here, "--export", str(sent)]) == 0
    there = ["--home", str(home / "other"), "--device", "cpu"]
    assert cli.main(["tune", *there, "--import", str(sent)]) == 0
    assert cli.main(["plan", *there, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert any(r.startswith("measured on this CPU on 20") for r in shown["reasons"])


def test_export_and_import_say_what_is_wrong(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = ["--home", str(home), "--device", "cpu"]
    assert cli.main(["tune", *here, "--export", str(home / "x.json")]) == 4
    assert "tuned.json cannot be read" in capsys.readouterr().err
    bad = home / "bad.json"
    home.mkdir(exist_ok=True)
    bad.write_text("{}")
    assert cli.main(["tune", *here, "--import", str(bad)]) == 2
    assert "format is None; allowed 1" in capsys.readouterr().err


@pytest.mark.report("D01", "D04")
def test_warmup_renders_each_size_that_is_offered_and_saves_nothing(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = ["--home", str(home), "--device", "cpu", "--in-process"]
    assert cli.main(["warmup", *here, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["width"], line["height"]) for line in lines] == list(buckets(128, 128))
    assert not (home / "outputs").exists()


@pytest.mark.report("D04")
@pytest.mark.parametrize(
    ("native", "first", "count"),
    [(1024, (1024, 1024), 7), (768, (768, 768), 7), (512, (512, 512), 5)],
)
def test_few_sizes_are_offered_and_all_suit_the_convolutions(
    native: int, first: tuple[int, int], count: int
) -> None:
    sizes = buckets(native, native)
    assert sizes[0] == first
    assert len(set(sizes)) == len(sizes) <= count <= len(BUCKETS)
    for width, height in sizes:
        assert width % 64 == height % 64 == 0
        assert 0.7 * native**2 <= width * height <= 1.1 * native**2
        assert (height, width) in sizes


def test_large_models_get_the_sizes_that_they_were_trained_on() -> None:
    assert buckets(1024, 1024) == (
        (1024, 1024), (1152, 896), (896, 1152), (1216, 832), (832, 1216), (1344, 768), (768, 1344),
    )  # fmt: skip


def test_a_winner_of_another_family_is_not_taken(machine: Settings) -> None:
    run(machine, Bench(lambda _: 1.0))
    entry = tuned.find(machine.cache, "cpu", "tiny")
    assert entry is not None
    tuned.keep(machine.cache, (replace(entry, family="sdxl"),))
    assert tuned.find(machine.cache, "cpu", "sd15") is None

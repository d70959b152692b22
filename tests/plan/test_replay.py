"""No plan that is called fitting fails: its whole run, allocation by allocation, at that size."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scripts.allocator_replay import fits
from scripts.vram_runs import run_of
from sdamd.checkpoint import Checkpoint
from sdamd.hardware.products import find_card
from sdamd.plan import GIB, Verdict, make_plan
from sdamd.settings import Settings, VramMode
from tests.plan.made import a_job

Published = dict[str, Checkpoint]
PLAIN = Settings(home=Path("/nowhere"))

pytestmark = [
    pytest.mark.slow,
    # Of libraries that the stand-ins for a GPU and a scheduler do not suit.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]


@pytest.mark.parametrize("mode", ["fast", "minimal"])
def test_what_a_plan_says_it_needs_is_enough_and_not_much_more(
    published: Published, mode: str
) -> None:
    card, job = find_card("RX 6600"), a_job("sd15", width=512, height=512)
    under = replace(PLAIN, vram_mode=VramMode(mode))
    plan = make_plan(job, card, published["sd15"], under)
    trace = run_of(plan, job, "sd15", card_bytes=card.vram_bytes)
    assert fits(trace.events, plan.stages.peak)
    assert not fits(trace.events, round(0.85 * plan.stages.peak))


@settings(
    max_examples=2, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    budget=st.floats(0.5, 3.0), side=st.sampled_from([256, 384, 512]), count=st.integers(1, 3),
    card=st.sampled_from(["RX 6600", "RX 7900 XTX"]),
)  # fmt: skip
def test_whatever_the_budget_a_plan_that_fits_goes_through(
    published: Published, budget: float, side: int, count: int, card: str
) -> None:
    gpu, job = find_card(card), a_job("sd15", width=side, height=side)
    room = round(budget * GIB)
    plan = make_plan(job, gpu, published["sd15"], PLAIN, count=count, budget_bytes=room)
    if plan.verdict is Verdict.DOES_NOT_FIT:
        return
    trace = run_of(plan, job, "sd15", card_bytes=gpu.vram_bytes)
    assert fits(trace.events, room)

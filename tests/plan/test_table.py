from pathlib import Path

import pytest

from sdamd.checkpoint import Checkpoint
from sdamd.hardware.products import _products, find_card
from sdamd.plan import Verdict, about_shapes, make_plan, rounded, shapes_of
from sdamd.plan.table import BATCHES, SIDES, in_words, table
from sdamd.settings import Settings
from tests.plan.made import a_job

Published = dict[str, Checkpoint]
PLAIN = Settings(home=Path("/nowhere"))


def test_the_grid_of_a_card_has_every_size_and_batch(published: Published) -> None:
    cells = list(table(a_job("sdxl"), find_card("RX 6600"), published["sdxl"], PLAIN))
    assert [(cell.side, cell.batch) for cell in cells] == [(s, b) for s in SIDES for b in BATCHES]
    for cell in cells:
        shown = cell.to_dict()
        assert (shown["verdict"] == "does not fit") is (not cell.fits)
        assert (shown["seconds"] is not None) is cell.fits
        assert cell.plan.batch == cell.batch
    lines = list(in_words({(cell.side, cell.batch): cell for cell in cells}))
    assert lines[0].split() == ["pixels", *(w for b in BATCHES for w in ("batch", str(b)))]
    assert len({len(line) for line in lines[:-1]}) == 1
    assert len(lines) == len(SIDES) + 2


@pytest.mark.parametrize("name", _products())
def test_every_card_that_was_sold_can_be_planned_for(published: Published, name: str) -> None:
    card = find_card(name)
    plan = make_plan(a_job("sd15"), card, published["sd15"], PLAIN)
    assert plan.reasons
    known = _products()[name].speed is not None
    assert (plan.seconds is not None) is known
    if known:
        assert 0.2 < (plan.seconds or 0) < 600
    smallest = card.vram_bytes < 2 * 2**30
    assert plan.verdict is not Verdict.DOES_NOT_FIT or smallest


@pytest.mark.report("D04")
def test_sizes_of_a_batch_are_counted_and_rounded_only_where_that_is_allowed() -> None:
    """D04: every new size is a search for kernels, nine times slower."""
    jobs = [a_job("sd15", width=width, height=512) for width in range(1000, 1160, 8)]
    assert len(jobs) == len(shapes_of(jobs)) == 20
    assert rounded(jobs, 0) == tuple(jobs)
    said = about_shapes(jobs)
    assert said is not None
    assert said.startswith("20 different sizes: ")
    fewer = rounded(jobs, 64)
    assert shapes_of(fewer) == ((1024, 512), (1088, 512), (1152, 512))
    assert about_shapes(fewer) is None
    assert [job.seed for job in fewer] == [job.seed for job in jobs]
    assert shapes_of(rounded([a_job("tiny", width=64, height=64)], 512)) == ((512, 512),)

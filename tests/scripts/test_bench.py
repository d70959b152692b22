import sys

import pytest
import torch

from scripts import bench, bench_memory
from sdamd.backends.attention import chunked


def test_ratios_are_taken_within_a_round_and_the_median_is_kept() -> None:
    sides = {
        "sdamd": [(1.0, 2.0), (2.0, 2.0), (9.0, 2.0)],
        "plain": [(2.0, 1.0), (2.0, 3.0), (9.0, 3.0)],
    }
    figures = bench._ratios(sides, "sdamd")
    assert figures["plain"] == {
        "wall_seconds": 2.0, "cpu_seconds": 3.0, "sdamd_takes": 1.0, "spread": [0.5, 1.0],
    }  # fmt: skip


def test_both_scripts_of_plain_diffusers_are_valid_and_differ_in_the_pass_alone() -> None:
    for script in (bench.PLAIN, bench.PLAIN_TOGETHER):
        compile(script, "plain", "exec")
    assert "for seed in range(count):\n    image" in bench.PLAIN
    assert "[sys.argv[4]] * count" in bench.PLAIN_TOGETHER
    assert bench.PLAIN_TOGETHER.count(".save(") == 1


def test_the_peak_is_what_was_alive_at_once_and_not_the_sum() -> None:
    def run() -> torch.Tensor:
        kept = torch.zeros(250_000)
        for _ in range(5):
            torch.zeros(500_000).sum()
        return kept

    assert 3_000_000 <= bench.peak_bytes(run) <= 3_001_000


def test_blocks_take_less_memory_than_slices_of_one_head() -> None:
    """The claim of `bench attention` about memory, at a quarter of its size."""
    parts = [torch.randn(2, 8, 1024, 40) for _ in range(3)]
    blocks = bench.peak_bytes(lambda: chunked(*parts, block_bytes=2**21))
    scores_of_a_head = 1024 * 1024 * 4
    assert blocks <= 2**21 + parts[0].nbytes + 2**17 < 2 * scores_of_a_head


def test_the_scripts_about_memory_are_valid_and_of_one_job() -> None:
    for script in (bench_memory.PLAIN, bench_memory.SDAMD):
        compile(script, "side", "exec")
        for said in ("sys.argv[2]", "int(sys.argv[3])", "width=512", "guidance_scale=7.5"):
            assert said in script
    assert "torch.float32" in bench_memory.PLAIN
    assert 'dtype="float32"' in bench_memory.SDAMD


def test_shares_of_memory_and_time_are_taken_within_a_round() -> None:
    def run(peak: int, seconds: float) -> dict[str, float]:
        return {"peak_bytes": peak * 2**30, "seconds": seconds, "cpu_seconds": 2 * seconds}

    sides = {
        "plain diffusers": [run(4, 10), run(5, 20), run(4, 40)],
        "sdamd, streamed": [run(1, 11), run(1, 20), run(2, 20)],
    }
    figures = bench_memory._shares(sides)
    assert figures["sdamd, streamed"] == {
        "peak_gib": 1.0, "seconds": 20.0, "peak_of_plain": 0.25, "time_of_plain": 1.0,
        "cpu_time_of_plain": 1.0,
    }  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how much was resident")
def test_the_end_of_a_script_tells_what_was_resident() -> None:
    body = "import json, time\nheld = b'x' * (200 * 2**20)\nseconds = 1.0\ndel held\n"
    figures = bench_memory._run([sys.executable, "-c", body + bench_memory.END])
    assert 200 * 2**20 < figures["peak_bytes"] < 300 * 2**20
    assert figures["seconds"] == 1.0

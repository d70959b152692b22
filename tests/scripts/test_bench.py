import torch

from scripts import bench
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

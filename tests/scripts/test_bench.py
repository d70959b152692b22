from scripts import bench


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

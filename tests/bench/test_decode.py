"""The decoding benchmark times what it says, and its ratios follow from its times."""

import statistics

from lol.bench.decode import BenchDecode, bench


def test_ratios_are_those_of_the_medians():
    options = BenchDecode(
        hidden_size=32,
        num_attention_heads=2,
        num_fixed_layers=1,
        num_experts=3,
        num_routed_depths=2,
        window_size=8,
        window_stride=4,
        contexts=(4, 20),
        prefix=12,
        batch_size=3,
        repeats=2,
    )
    result = bench(options)
    median = {name: statistics.median(times) for name, times in result["seconds"].items()}
    assert len(median) == 2 * 3 + 4
    ratios = result["ratios"]
    assert ratios["cache over running the prefix again"] == (
        median["LoL, 12 tokens run again"] / median["LoL, 12 tokens in the cache"]
    )
    assert ratios["tokens/s over Llama's, 20 tokens cached"] == (
        median["Llama, 20 tokens cached"] / median["LoL, 20 tokens cached"]
    )
    assert ratios["tokens/s of 3 rows over one"] == (
        3 * median["LoL, 1 row, 4 tokens cached"] / median["LoL, 3 rows, 4 tokens cached"]
    )

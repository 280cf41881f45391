"""The buffer that the tests of calls use."""

import expertwire as ew


def make(rank, **options):
    options = {
        "num_experts": 8,
        "hidden": 64,
        "num_topk": 2,
        "num_max_tokens_per_rank": 8,
        "timeout_s": 30.0,
        **options,
    }
    return ew.Buffer(rank, **options)

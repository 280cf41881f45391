"""Dispatch and combine in one process: four ranks as threads of an `ew.World`.

python examples/01_one_process.py
"""

import torch

import expertwire as ew

NUM_EXPERTS, HIDDEN, TOPK = 8, 256, 2


def rank_main(rank):
    """Every expert multiplies by its id; so combine must return x times the weighted mean of the chosen ids."""
    generator = torch.Generator().manual_seed(rank.rank)
    num_tokens = 5 + rank.rank  # every rank may have another number of tokens
    x = torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16()
    topk_weights, topk_idx = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).softmax(-1).topk(TOPK)

    with ew.Buffer(rank, num_experts=NUM_EXPERTS, hidden=HIDDEN, num_topk=TOPK, num_max_tokens_per_rank=16) as buf:
        sent = buf.dispatch(x, topk_idx, topk_weights, layout=ew.Layout.EXPERT_MAJOR)

        # Rank r holds experts 2r and 2r + 1. Received rows are grouped by local expert.
        y = torch.empty_like(sent.x)
        first = 0
        for local, count in enumerate(sent.num_tokens_per_expert_list):
            y[first : first + count] = sent.x[first : first + count] * (2 * rank.rank + local)
            first += count

        back = buf.combine(y, sent.handle)

    expected = x.float() * (topk_weights * topk_idx).sum(-1, keepdim=True)
    torch.testing.assert_close(back.x.float(), expected, rtol=0.02, atol=0.02)
    return sent.num_tokens_per_expert_list


for number, counts in enumerate(ew.World(4).run(rank_main)):
    print(f"rank {number}: its two experts got {counts} rows")
print("ok")

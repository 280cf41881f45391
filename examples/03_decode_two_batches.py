"""Decode with two micro-batches: while one computes, the rows of the other are on their way.

python examples/03_decode_two_batches.py

EXPERT_SLOTS has fixed shapes and keeps the counts in a tensor, so nothing waits for a number to reach the host.
`defer_receive` splits a call: it sends, and the hook that it returns receives.
"""

import torch

import expertwire as ew

NUM_EXPERTS, HIDDEN, TOPK, TOKENS, STEPS = 4, 128, 2, 3, 4


def experts(rows, counts):
    """Doubles the valid rows; a grouped GEMM with masks would take the same two tensors."""
    valid = torch.arange(rows.shape[1]) < counts[:, None]
    return torch.where(valid[..., None], rows * 2, rows)


def rank_main(rank):
    with ew.Buffer(
        rank, num_experts=NUM_EXPERTS, hidden=HIDDEN, num_topk=TOPK, num_max_tokens_per_rank=TOKENS, max_in_flight=2
    ) as buf:
        generator = torch.Generator().manual_seed(rank.rank)

        def send(x):
            weights, idx = torch.rand(TOKENS, NUM_EXPERTS, generator=generator).softmax(-1).topk(TOPK)
            return buf.dispatch(
                x, idx, weights / weights.sum(-1, keepdim=True),
                layout=ew.Layout.EXPERT_SLOTS, counts="device", defer_receive=True,
            )  # fmt: skip

        a, b = (torch.ones(TOKENS, HIDDEN).bfloat16() * (rank.rank + 1 + batch) for batch in range(2))
        for _ in range(STEPS):
            sent_a, sent_b = send(a), send(b)  # two handles in flight
            got_a = sent_a.hook()  # b's rows still travel
            back_a = buf.combine(experts(got_a.x, got_a.num_tokens_per_expert), got_a.handle, defer_receive=True)
            got_b = sent_b.hook()  # a's sums still travel
            back_b = buf.combine(experts(got_b.x, got_b.num_tokens_per_expert), got_b.handle, defer_receive=True)
            a, b = back_a.hook().x, back_b.hook().x
        return a[0, 0].item(), b[0, 0].item()


for number, (a, b) in enumerate(ew.World(2).run(rank_main)):
    assert (a, b) == ((number + 1) * 2**STEPS, (number + 2) * 2**STEPS)
    print(f"rank {number}: after {STEPS} steps the batches hold {a} and {b}")
print("ok")

"""A differentiable Mixture-of-Experts layer: the two calls are ordinary autograd functions.

python examples/04_moe_layer.py
"""

import torch
from torch import nn

import expertwire as ew

NUM_EXPERTS, HIDDEN, TOPK, TOKENS = 8, 64, 2, 64


class MoELayer(nn.Module):
    """A router, and this rank's share of the experts."""

    def __init__(self, buf, num_local_experts):
        super().__init__()
        self.buf = buf
        self.router = nn.Linear(HIDDEN, NUM_EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(num_local_experts))

    def forward(self, x):
        topk_weights, topk_idx = self.router(x).softmax(-1).topk(TOPK)
        sent = self.buf.dispatch(x.bfloat16(), topk_idx, topk_weights, layout=ew.Layout.EXPERT_MAJOR)
        groups = torch.split(sent.x.float(), sent.num_tokens_per_expert_list)
        rows = torch.cat([expert(group) for expert, group in zip(self.experts, groups, strict=True)])
        return self.buf.combine(rows.bfloat16(), sent.handle).x.float()


def rank_main(rank):
    torch.manual_seed(rank.rank)
    with ew.Buffer(rank, num_experts=NUM_EXPERTS, hidden=HIDDEN, num_topk=TOPK, num_max_tokens_per_rank=TOKENS) as buf:
        layer = MoELayer(buf, num_local_experts=NUM_EXPERTS // rank.num_ranks)
        optimizer = torch.optim.SGD(layer.parameters(), lr=4.0)
        x = torch.randn(TOKENS, HIDDEN)
        losses = []
        for _ in range(30):  # every rank must run forward and backward equally often: both are collective
            loss = ((layer(x) + x) ** 2).mean()  # learn to say -x
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses


for number, losses in enumerate(ew.World(2).run(rank_main)):
    assert losses[-1] < 0.7 * losses[0], losses
    print(f"rank {number}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
print("ok")

"""The same calls between processes, started by torchrun.

torchrun --nproc-per-node 4 examples/02_torchrun.py
"""

import os
import sys

import torch
import torch.distributed as dist

import expertwire as ew

NUM_EXPERTS, HIDDEN, TOPK, TOKENS = 8, 256, 2, 32

if "LOCAL_RANK" not in os.environ:
    sys.exit("Start this with: torchrun --nproc-per-node 4 examples/02_torchrun.py")

dist.init_process_group("gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
placement = ew.Placement.contiguous(NUM_EXPERTS, num_ranks)  # experts need not divide by ranks

torch.manual_seed(rank)
x = torch.randn(TOKENS, HIDDEN).bfloat16()
topk_weights, topk_idx = torch.rand(TOKENS, NUM_EXPERTS).softmax(-1).topk(TOPK)

with ew.Buffer(
    dist.group.WORLD,
    num_experts=NUM_EXPERTS,
    hidden=HIDDEN,
    num_topk=TOPK,
    num_max_tokens_per_rank=TOKENS,
    placement=placement,
) as buf:
    # COMPACT: one row per (token, rank), whatever number of this rank's experts the token chose.
    sent = buf.dispatch(x, topk_idx, topk_weights, layout=ew.Layout.COMPACT)
    mine = torch.tensor([*placement.local_experts(rank), 0])  # local id -> expert id
    share = torch.where(sent.topk_idx >= 0, sent.topk_weights * mine[sent.topk_idx], 0.0).sum(-1, keepdim=True)
    back = buf.combine((sent.x.float() * share).bfloat16(), sent.handle)  # sums over ranks, unweighted

expected = x.float() * (topk_weights * topk_idx).sum(-1, keepdim=True)
torch.testing.assert_close(back.x.float(), expected, rtol=0.02, atol=0.05)
print(f"rank {rank} of {num_ranks}: got {len(sent.x)} rows, {sent.num_tokens_per_rank_list} from each rank: ok")
dist.destroy_process_group()

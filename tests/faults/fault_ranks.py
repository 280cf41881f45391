"""What the fault tests share: case C25's tokens, for any number of ranks, and a look at what a process holds."""

import os

import torch
import torch.distributed as dist

import expertwire as ew
from expertwire.testing import payload

NUM_TOKENS, HIDDEN = 16, 64


def make(group, **options):
    num_ranks = group.num_ranks if hasattr(group, "crew") else dist.get_world_size(group)
    options = {"timeout_s": 30.0, "debug_poison": True, **options}
    return ew.Buffer(
        group, num_experts=8 * num_ranks, hidden=HIDDEN, num_topk=2, num_max_tokens_per_rank=NUM_TOKENS, **options
    )


def topk_idx(buf):
    """Token t of rank r goes to ranks r + t and r + t + 1."""
    home = (buf.rank + torch.arange(NUM_TOKENS)[:, None]) % buf.num_ranks
    return 8 * torch.cat([home, (home + 1) % buf.num_ranks], dim=1)


def tokens(buf):
    return payload(buf.rank, NUM_TOKENS, HIDDEN)


def expected(buf, gone=()):
    """2x, and one less for every rank in `gone` that the token went to."""
    alive = torch.tensor([rank not in gone for rank in range(buf.num_ranks)])
    return alive[topk_idx(buf) // 8].sum(dim=1, keepdim=True) * tokens(buf)


def dispatch(buf, **options):
    return buf.dispatch(tokens(buf), topk_idx(buf), **options)


def round_trip(buf, gone=()):
    """One exact round trip; `gone` are the ranks whose part is missing."""
    sent = dispatch(buf)
    back = buf.combine(sent.x, sent.handle)
    assert torch.equal(back.x, expected(buf, gone))
    return back


def num_missing(buf, gone):
    return int(sum((topk_idx(buf) // 8 == rank).sum() for rank in gone))


def gather(group, value):
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def open_descriptors():
    """What this process has open, and how many windows it has mapped."""
    entries = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            entries.append(os.readlink(f"/proc/self/fd/{entry}"))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    with open("/proc/self/maps") as maps:
        windows = maps.read().count("memfd:expertwire")
    return len([e for e in entries if "memfd" in e or "pidfd" in e]), len(entries), windows


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def wait_until_stopped(pid):
    """Until the process has obeyed SIGSTOP."""
    while True:
        with open(f"/proc/{pid}/stat") as stat:
            if stat.read().rpartition(")")[2].split()[0] == "T":
                return
        os.sched_yield()


def shared_memory():
    """Named shared memory of this host that Python, torch or this package could have made."""
    return sorted(name for name in os.listdir("/dev/shm") if name.startswith(("expertwire", "psm_", "torch_")))

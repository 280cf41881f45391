"""Row totals of a GPU's Buffer, compared with what follows from everybody's ids. `buf` as in `device_checks`."""

import torch
from device_checks import COMPACT, EXPERTS, HIDDEN, MAJOR, SLOTS, TOPK, arrive

from expertwire.buffer import Statistics
from expertwire.testing import random_rows, repeated_routing

TOKENS = (8, 5, 0, 7)


def batch(rank, number):
    """x, topk_idx of a rank, with ids that are out of range and, in EXPERT_SLOTS, repeats."""
    tokens = TOKENS[rank % len(TOKENS)]
    ids = repeated_routing(7 * number + rank, tokens, TOPK, EXPERTS)
    ids[: tokens // 2, 0] = -1
    ids[tokens // 2 :, 1] = EXPERTS + number
    return random_rows(number, tokens, HIDDEN), ids


def dropped(ids, layout):
    illegal = int((ids >= EXPERTS).sum())
    if layout is not SLOTS:
        return illegal
    legal = [[i for i in row if 0 <= i < EXPERTS] for row in ids.tolist()]
    return illegal + sum(len(row) - len(set(row)) for row in legal)


def check_statistics(buf):
    """Planned, fused, repeated and deferred dispatches; a refused one counts nothing."""
    owners = torch.tensor(buf.settings.placement.expert_ranks)
    ranks, me, device = buf.num_ranks, buf.rank, buf.settings.device
    sent, received, gone = [0] * ranks, [0] * ranks, 0
    assert buf.statistics() == Statistics((0,) * ranks, (0,) * ranks, None, None, 0)
    for number, layout in enumerate((COMPACT, MAJOR, SLOTS, SLOTS)):
        batches = [batch(rank, number) for rank in range(ranks)]
        x, ids = (t.to(device) for t in batches[me])
        deferred = number == 3
        found = buf.dispatch(x, ids, layout=layout, counts="device", defer_receive=deferred)
        found = found.hook() if deferred else found
        times = 1
        if layout is not SLOTS:
            buf.dispatch(x, handle=found.handle)
            times = 2
        arrive(device)
        found.handle.release()
        for rank, (_, chosen) in enumerate(batches):
            legal = (chosen >= 0) & (chosen < EXPERTS)
            home = torch.where(legal, owners[chosen.clamp(0, EXPERTS - 1)], -1)
            rows = [times * int((home == peer).any(1).sum()) for peer in range(ranks)]
            received[rank] += rows[me]
            if rank == me:
                sent = [a + b for a, b in zip(sent, rows, strict=True)]
                gone += dropped(chosen, layout)
        totals = buf.statistics()
        assert totals.rows_sent == tuple(sent)
        assert totals.rows_received == tuple(received)
        assert totals.dropped_selections == gone

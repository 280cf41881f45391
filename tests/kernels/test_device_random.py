"""Random calls of a GPU's Buffer, of every kind one after the other, with kernels in the interpreter.

Kinds of calls share memory and compiled kernels. What they share wrongly shows only where calls of several kinds follow
each other, ranks have few or no experts, and experts more rows than usual.
"""

import importlib.util
import random

import pytest
import torch
from device_checks import COMPACT, MAJOR, SLOTS
from interpreted_buffer import interpreted_buffer

from expertwire import reference
from expertwire.formats import BF16, FP8Block, LogFMT10
from expertwire.testing import Processes, assert_equal, random_rows, random_weights
from expertwire.topology import Placement

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
WIRES = [BF16(), FP8Block(), FP8Block(scale="ue8m0"), FP8Block(decode=True)]
SEEDS = range(5)


def legal(ids, num_experts, layout):
    """What illegal ids and, in EXPERT_SLOTS, repeats count as."""
    ids = torch.where((ids >= 0) & (ids < num_experts), ids, -1)
    if layout is SLOTS:
        for slot in range(ids.shape[1]):
            repeats = (ids[:, :slot] == ids[:, slot : slot + 1]).any(dim=1)
            ids[:, slot] = torch.where(repeats, -1, ids[:, slot])
    return ids


def rows_of(x, num_rows):
    """As bytes, so that NaN is equal to itself."""
    return x.reshape(-1, x.shape[-1])[:num_rows].view(torch.uint8)


def trip(buf, chance, seed, over_rows):
    """A dispatch and a combine, and perhaps both again with the handle. All ranks draw the same numbers."""
    num_ranks, rank, settings = buf.num_ranks, buf.rank, buf.settings
    num_experts, hidden, topk = settings.num_experts, settings.hidden, settings.num_topk
    layout, wire, counts = (
        chance.choice([COMPACT, MAJOR, SLOTS]),
        chance.choice(WIRES),
        chance.choice(["host", "device"]),
    )
    options = {
        "layout": layout, "wire": wire, "counts": counts, "zero_copy": chance.random() < 0.4,
        "defer_receive": chance.random() < 0.3, "expert_alignment": chance.choice([1, 2, 8]) if layout is MAJOR else 1,
    }  # fmt: skip
    back_wire, reduce = chance.choice([None, None, LogFMT10()]), chance.choice(["token", "rank"])
    reduce = "token" if back_wire or layout is COMPACT else reduce
    weighted, num_biases, deferred = chance.random() < 0.7, chance.choice([0, 1, 2]), chance.random() < 0.3
    lowest, end = chance.choice([(-1, num_experts), (-1, 1), (0, 1), (-2, num_experts + 2)])
    tokens = [chance.choice([0, settings.num_max_tokens_per_rank, 1]) for _ in range(num_ranks)]
    numbers = [torch.Generator().manual_seed(seed + r) for r in range(num_ranks)]
    xs = [random_rows(seed + r, n, hidden, scale=3.0) for r, n in enumerate(tokens)]
    ids = [torch.randint(lowest, end, (n, topk), generator=g) for n, g in zip(tokens, numbers, strict=True)]
    weights = [random_weights(seed + r, n, topk) for r, n in enumerate(tokens)]
    biases = [[random_rows(seed + 9 * b + r, n, hidden) for r, n in enumerate(tokens)] for b in range(num_biases)]

    routing = reference.route(
        [legal(i, num_experts, layout) for i in ids], weights if weighted else None, placement=settings.placement,
        layout=layout, expert_alignment=options["expert_alignment"], capacity=settings.num_max_tokens_per_rank,
    )  # fmt: skip
    want = reference.dispatch(xs, routing, wire)
    mine, num_rows = want[rank], want[rank].x.numel() // want[rank].x.shape[-1]
    used = torch.ones(num_rows, dtype=torch.bool)
    sent = buf.dispatch(xs[rank], ids[rank], weights[rank] if weighted else None, **options)
    sent = sent.hook() if sent.hook else sent
    if layout is COMPACT:
        assert_equal(sent.topk_idx[:num_rows], mine.topk_idx)
    else:
        source = sent.row_source.view(-1, 3)
        assert_equal(source[:num_rows], mine.row_source.view(-1, 3))
        assert (source[num_rows:] == -1).all()
        used = mine.row_source.view(-1, 3)[:, 0] >= 0
    assert_equal(sent.num_tokens_per_expert, mine.num_tokens_per_expert)
    assert_equal(rows_of(sent.x, num_rows)[used], rows_of(mine.x, num_rows)[used])
    if mine.sf is not None:
        assert_equal(rows_of(sent.sf, num_rows)[used], rows_of(mine.sf, num_rows)[used])

    y = [
        random_rows(seed + 70 + r, part.x.numel() // part.x.shape[-1], hidden, scale=0.2) for r, part in enumerate(want)
    ]
    given = torch.full((*sent.x.shape[:-1], hidden), float("nan"), dtype=torch.bfloat16)
    given.view(-1, hidden)[:num_rows] = y[rank].view(-1, hidden)
    if chance.random() < 0.4 and (options["zero_copy"] or not over_rows):
        memory = buf.combine_input(sent.handle)
        if rank % 2:  # the others' rows are brought there, or pushed
            given = memory.copy_(given)
    summed = reference.combine(y, routing, bias=biases, reduce=reduce, wire=back_wire)[rank].x
    bias = {"bias": tuple(part[rank] for part in biases)} if biases else {}
    back = buf.combine(given, sent.handle, reduce=reduce, wire=back_wire, defer_receive=deferred, **bias)
    assert_equal((back.hook() if back.hook else back).x, summed)
    if chance.random() < 0.5:
        again = buf.dispatch(xs[rank], handle=sent.handle, wire=wire)
        assert_equal(rows_of(again.x, num_rows)[used], rows_of(mine.x, num_rows)[used])
    buf.synchronize()


def rank_work(group, seed):
    chance = random.Random(seed)
    num_ranks, num_experts = torch.distributed.get_world_size(group), chance.choice([1, 2, 3, 5, 13])
    uneven = Placement(tuple(chance.randrange(num_ranks) for _ in range(num_experts)))
    placement, over_rows = chance.choice([uneven, Placement.contiguous(num_experts, num_ranks)]), chance.random() < 0.3
    buf = interpreted_buffer(
        group, placement, capacity=chance.choice([1, 5, 17]),
        hidden=chance.choice([8, 136, 256]), num_topk=chance.choice([1, 2, 4]), num_sms=chance.choice([1, 2, 5]),
        over_rows=over_rows, strict_sms=chance.random() < 0.4, validate=False,
    )  # fmt: skip
    for number in range(4):
        trip(buf, chance, 1000 * seed + 100 * number, over_rows)
    torch.distributed.barrier(group)


@pytest.mark.parametrize("seed", SEEDS)
def test_calls(seed):
    num_ranks = 1 + seed % 3
    with Processes(num_ranks) as crew:
        crew.run(rank_work, seed, timeout_s=120)

"""What ranks see when others of a GPU's Buffer are killed, hang, or are late. `buf` has on_timeout="mask" or "end"."""

import contextlib
import os
import signal
import time

import pytest
import torch
from device_checks import (
    CAPACITY,
    COMPACT,
    EXPERTS,
    HIDDEN,
    MAJOR,
    SLOTS,
    TOKENS,
    TOPK,
    arrive,
    output_of_experts,
    same_dispatch,
)

import expertwire as ew
from expertwire import reference
from expertwire.formats import BF16, FP8Block, LogFMT10
from expertwire.testing import Processes, assert_equal, random_rows, random_weights, uniform_routing, with_holes


def inputs(rank, step):
    """x, ids and weights of any rank."""
    seed, tokens = 1000 + 100 * step + rank, TOKENS[rank]
    ids = with_holes(uniform_routing(seed, tokens, TOPK, EXPERTS), rank)
    return random_rows(seed, tokens, HIDDEN, scale=3.0), ids, random_weights(seed, tokens, TOPK)


def reached(buf, rank, step):
    """The same as the ranks that are left see them: masked ones have no tokens, and their experts are not there."""
    x, ids, weights = inputs(rank, step)
    owners = torch.tensor(buf.settings.placement.expert_ranks)
    served = torch.where(ids >= 0, owners[ids.clamp(min=0)], -1)
    missing = torch.isin(served, torch.tensor(buf.masked_ranks, dtype=torch.int64)) & (ids >= 0)
    left = slice(0, 0 if rank in buf.masked_ranks else None)
    return x[left], torch.where(missing, -1, ids)[left], weights[left], torch.where(missing, served, -1)


def check_step(buf, step, layout, wire=None, back_wire=None, reduce="token", **options):
    """A dispatch, its combine, and the same again with its handle, against the oracle without the masked ranks."""
    device, rank = buf.settings.device, buf.rank
    xs, ids, weights, _ = zip(*(reached(buf, peer, step) for peer in range(buf.num_ranks)), strict=True)
    routing = reference.route(ids, weights, placement=buf.settings.placement, layout=layout, capacity=CAPACITY)
    want = reference.dispatch(xs, routing, wire)
    y = [random_rows(500 + step + r, part.x.numel() // HIDDEN, HIDDEN, scale=0.2) for r, part in enumerate(want)]
    summed = reference.combine(y, routing, wire=back_wire, reduce=reduce)[rank].x
    x, all_ids, all_weights = (t.to(device) for t in inputs(rank, step))
    sent = buf.dispatch(x, all_ids, all_weights, layout=layout, wire=wire, **options)
    arrive(device)
    same_dispatch(sent, want[rank], layout, step)
    assert sent.missing_ranks == buf.masked_ranks
    given = output_of_experts(sent, y[rank])
    again = buf.dispatch(x, handle=sent.handle, wire=wire)
    arrive(device)
    same_dispatch(again, want[rank], layout, step)
    back = buf.combine(given, sent.handle, wire=back_wire, reduce=reduce)
    arrive(device)
    assert_equal(back.x.cpu(), summed)
    *_, missing = reached(buf, rank, step)
    pairs = [row[row >= 0].unique() if layout is COMPACT or reduce == "rank" else row[row >= 0] for row in missing]
    assert back.num_missing == sum(len(row) for row in pairs)
    buf.synchronize()


CASES = [
    # ranks, check, arguments of it: who is lost first; then on_timeout, if not "mask"
    (3, "check_all", ((1,), "dispatch")),
    (3, "check_all", ((0,), "dispatch of device counts")),
    (3, "check_all", ((2,), "combine")),
    (4, "check_all", ((1, 3), "first call of a kind")),
    (3, "check_gradients", ((1,),)),
    (4, "check_twice", ((1, 3),)),
    (3, "check_late", ((),)),
    (3, "check_all", ((1,), "combine"), "end"),
    (3, "check_all", ((2,), "dispatch"), "end"),
]


def run_case(rank_work, num_ranks, check, arguments, on_timeout="mask"):
    """`rank_work` returns who is masked, on ranks that are left."""
    with Processes(num_ranks) as crew:
        outcomes = crew.outcomes(rank_work, check, arguments, on_timeout, timeout_s=240)
    for rank, outcome in enumerate(outcomes):
        if rank in arguments[0]:
            assert outcome.exit_code == -signal.SIGKILL
        else:
            assert outcome.ok, outcome.error
            assert outcome.value == arguments[0]


def die(buf):
    """Be killed, or hang until that happens."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    os.kill(os.getpid(), signal.SIGSTOP if buf.settings.on_timeout == "end" else signal.SIGKILL)
    raise AssertionError("this rank goes on, and was to be ended")


def lose(buf, doomed, moment, patience_s):
    """`doomed` die at a moment; the ranks that are left learn of it once. Returns what they hold of that time."""
    x, ids, weights = (t.to(buf.settings.device) for t in inputs(buf.rank, 7))
    before = buf.masked_ranks
    check_step(buf, 1, COMPACT)
    counts = "device" if moment == "dispatch of device counts" else "host"
    layout, held, usual = SLOTS if moment == "first call of a kind" else COMPACT, None, buf.timeout_s

    def batch():
        nonlocal held
        held = buf.dispatch(x, ids, weights, layout=layout, counts=counts)
        if buf.rank in doomed:
            die(buf)
        buf.combine(held.x, held.handle)
        buf.synchronize()

    buf.timeout_s = patience_s
    if buf.rank in doomed and moment != "combine":
        die(buf)
    with pytest.raises(ew.PeerMasked, match=f"rank {buf.rank}: rank.s. {', '.join(map(str, doomed))} have") as caught:
        batch()
    assert caught.value.peers == doomed
    assert buf.masked_ranks == tuple(sorted({*before, *doomed}))
    assert (held is not None) == (moment not in ("dispatch", "first call of a kind"))
    buf.timeout_s = usual
    return held


def check_all(buf, doomed, moment, patience_s):
    held = lose(buf, doomed, moment, patience_s)
    check_step(buf, 2, COMPACT, FP8Block())
    if held is not None:
        for call in (lambda: buf.combine(held.x, held.handle), lambda: buf.dispatch(held.x[:0], handle=held.handle)):
            with pytest.raises(ew.HandleError, match="had not come in time; dispatch again"):
                call()
    check_step(buf, 3, COMPACT, counts="device", back_wire=LogFMT10())
    check_step(buf, 4, SLOTS, FP8Block(scale="ue8m0"), zero_copy=False)
    check_step(buf, 5, MAJOR, BF16(), reduce="rank")


def check_late(buf, doomed, patience_s):
    """A rank comes, but late: nobody is lost, and what was in flight is void on all ranks."""
    check_step(buf, 1, COMPACT)
    x, ids, weights = (t.to(buf.settings.device) for t in inputs(buf.rank, 7))
    usual, buf.timeout_s = buf.timeout_s, patience_s

    def steps():
        for _ in range(3):  # the late one may find its first step refused, or complete
            with contextlib.suppress(ew.PeerRefused):
                sent = buf.dispatch(x, ids, weights)
                buf.combine(sent.x, sent.handle)
                buf.synchronize()

    if buf.rank == 1:
        time.sleep(1.5 * patience_s)
    with pytest.raises(ew.PeerMasked, match="a rank was late, but has come: nobody is masked") as caught:
        steps()
    assert caught.value.peers == buf.masked_ranks == doomed == ()
    buf.timeout_s = usual
    check_step(buf, 2, COMPACT, FP8Block())
    check_step(buf, 3, SLOTS, counts="device")


def check_twice(buf, doomed, patience_s):
    """One after the other: who was left the first time may be lost the next time."""
    lose(buf, doomed[:1], "dispatch", patience_s)
    check_step(buf, 2, SLOTS, FP8Block())
    lose(buf, doomed[1:], "combine", patience_s)
    check_step(buf, 3, SLOTS, FP8Block(), counts="device")
    check_step(buf, 4, MAJOR)


def check_gradients(buf, doomed, patience_s):
    """A backward pass of what went before does not run; later ones do, without what is missing."""
    device = buf.settings.device

    def forward(step):
        x, ids, weights = (t.to(device) for t in inputs(buf.rank, step))
        x.requires_grad_(True)
        sent = buf.dispatch(x, ids, weights)
        return x, ids, buf.combine(sent.x * 2, sent.handle)

    *_, early = forward(1)
    lose(buf, doomed, "dispatch", patience_s)
    with pytest.raises(ew.HandleError, match="dispatch again"):
        early.x.sum().backward()
    x, ids, late = forward(2)
    late.x.sum().backward()
    arrive(device)
    owners = torch.tensor(buf.settings.placement.expert_ranks)
    served = [{*owners[row[row >= 0]].tolist()} - {*buf.masked_ranks} for row in ids.cpu()]
    times = torch.tensor([2.0 * len(ranks) for ranks in served])
    assert_equal(x.grad.cpu(), times[:, None].expand(-1, HIDDEN).bfloat16())

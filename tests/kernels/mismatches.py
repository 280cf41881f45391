"""What every rank of a GPU's Buffer sees when ranks make different calls. `buf` as in `device_checks`."""

import time

import pytest
import torch
from device_checks import COMPACT, MAJOR, SLOTS, arrive
from refusals import inputs, one_batch, received

import expertwire as ew
from expertwire.formats import FP8Block, LogFMT10
from expertwire.testing import assert_equal

KINDS = {
    "layout": ({"layout": SLOTS}, {"layout": COMPACT}, "layout="),
    "slots": ({"layout": SLOTS}, {"layout": MAJOR}, "layout=expert_slots.*layout=expert_major"),
    "wire": ({}, {"wire": FP8Block()}, "fp8_f32"),
    "scales": ({"wire": FP8Block(scale="ue8m0")}, {"wire": FP8Block()}, "fp8_f32.*ue8m0"),
    "alignment": ({"layout": MAJOR, "expert_alignment": 8}, {"layout": MAJOR}, "expert_alignment=8"),
}


def both(ours, theirs, rank, offender=1):
    return theirs if rank == offender else ours


def fetched(t):
    """On the host. A copy that waits behind a kernel would hold up the copies of peers."""
    arrive(t.device.type)
    return t.cpu()


def dispatch(buf, number, *, combine=True, **options):
    """A batch whose errors come now."""
    x, ids = inputs(buf, number)
    sent = received(buf.dispatch(x, ids, **options))
    if combine:
        buf.combine(sent.x if sent.x.dtype is torch.bfloat16 else sent.x.to(torch.bfloat16), sent.handle)
    buf.synchronize()


def combine(buf, sent, **options):
    buf.combine(sent.x, sent.handle, **options)
    buf.synchronize()


def check_dispatch(buf, kind, counts="host", **options):
    """Kinds that all ranks know, on one of them another: found before a row is read, and the next call works."""
    ours, theirs, words = KINDS[kind]
    for known in (ours, theirs):
        dispatch(buf, 0, counts=counts, **known, **options)
    for number in range(1, 4):
        offender = number % buf.num_ranks
        text = rf"(?s)rank {buf.rank}: .*ranks call dispatch differently: here \(.*{'|'.join(words.split('.*'))}"
        with pytest.raises(ew.GroupMismatch, match=text) as caught:
            dispatch(buf, number, counts=counts, **both(ours, theirs, buf.rank, offender), **options)
        others = [rank for rank in range(buf.num_ranks) if (rank == offender) != (buf.rank == offender)]
        assert all(f"on rank {rank} (" in str(caught.value) for rank in others), caught.value
        one_batch(buf, number, layout=ours.get("layout", COMPACT), counts=counts)


def check_weights(buf):
    x, ids = inputs(buf, 1)
    weights = torch.ones(ids.shape, device=x.device)
    buf.dispatch(x, ids).handle.release()
    buf.dispatch(x, ids, weights).handle.release()
    with pytest.raises(ew.GroupMismatch, match=r"weights=False.*weights=True|weights=True.*weights=False"):
        buf.dispatch(x, ids, weights if buf.rank == 1 else None)
    one_batch(buf, 2)


def check_repeats(buf):
    """One repeats its routing and the others do not; all do, but not the same one."""
    x, ids = inputs(buf, 3)
    first, second = buf.dispatch(x, ids), buf.dispatch(x, ids.flip(0).contiguous())
    for sent in (first, second):
        buf.combine(sent.x, sent.handle)
        buf.dispatch(x, handle=sent.handle)
    for offender in (0, 1):
        with pytest.raises(ew.GroupMismatch, match="routing of another dispatch"):
            buf.dispatch(x, **both({"topk_idx": ids}, {"handle": first.handle}, buf.rank, offender))
        with pytest.raises(ew.GroupMismatch, match=r"ranks call dispatch differently.*routing of another dispatch"):
            buf.dispatch(x, handle=(first if buf.rank == offender else second).handle)
        assert_equal(fetched(buf.dispatch(x, handle=first.handle).x), fetched(first.x))
        one_batch(buf, 4 + offender)


def check_combine(buf):
    """Handles of different dispatches, in one bank or two; and options of which one rank passes another."""
    x, ids = inputs(buf, 5)
    sent = [buf.dispatch(x, ids) for _ in range(2)]
    back = [buf.combine(one.x, one.handle).x for one in sent]
    sent.append(buf.dispatch(x, ids.flip(0).contiguous()))
    back.append(buf.combine(sent[2].x, sent[2].handle).x)
    buf.combine(sent[0].x, sent[0].handle, wire=LogFMT10())
    for mine, theirs in ((0, 1), (0, 2), (2, 1)):
        chosen = sent[both(mine, theirs, buf.rank)]
        buf.combine(chosen.x, chosen.handle)
        with pytest.raises(ew.GroupMismatch, match=r"ranks call combine differently.*routing of another dispatch"):
            buf.synchronize()
        buf.combine(sent[0].x, sent[0].handle, wire=LogFMT10() if buf.rank == 1 else None)
        with pytest.raises(ew.GroupMismatch, match=r"an earlier combine is void: .*logfmt"):
            buf.synchronize()
        for one, want in zip(sent, back, strict=True):
            assert_equal(fetched(buf.combine(one.x, one.handle).x), fetched(want))
    buf.synchronize()
    one_batch(buf, 6)


def check_deferred_combine(buf):
    x, ids = inputs(buf, 7)
    sent = [buf.dispatch(x, ids) for _ in range(2)]
    want = [fetched(buf.combine(one.x, one.handle).x) for one in sent]
    buf.combine(sent[0].x, sent[0].handle, defer_receive=True).hook()
    late = [buf.combine(sent[at].x, sent[at].handle, defer_receive=True) for at in both((0, 1), (1, 0), buf.rank)]
    for one in late[::-1]:
        one.hook()
    with pytest.raises(ew.GroupMismatch, match="routing of another dispatch"):
        buf.synchronize()
    late = [buf.combine(one.x, one.handle, defer_receive=True) for one in sent]
    for one in late[::-1]:
        one.hook()
    for one, back in zip(late, want, strict=True):
        assert_equal(fetched(one.x), back)
    buf.synchronize()


def check_turns(buf):
    """Combines take turns in the memory of their words: a third one needs that of the first, which is not received."""
    x, ids = inputs(buf, 8)
    first, second = buf.dispatch(x, ids), buf.dispatch(x, ids)
    late = buf.combine(first.x, first.handle, defer_receive=True)
    want = buf.combine(second.x, second.handle).x
    with pytest.raises(ew.InFlightError, match=r"combine \d+ is unfinished"):
        buf.combine(second.x, second.handle)
    assert_equal(fetched(late.hook().x), fetched(want))
    assert_equal(fetched(buf.combine(second.x, second.handle).x), fetched(want))


def check_new_kind(buf):
    """A kind of call that one rank alone begins with: nobody waits for the time-out."""
    one_batch(buf, 0)
    began = time.monotonic()
    for attempt in range(3):
        words = "first call of its kind here" if buf.rank == 1 else "first call of a kind that others do not prepare"
        with pytest.raises(ew.GroupMismatch, match=words):
            dispatch(buf, attempt, combine=False, zero_copy=buf.rank == 1)
        one_batch(buf, attempt)
    x, ids = inputs(buf, 9)
    sent = buf.dispatch(x, ids)
    with pytest.raises(ew.GroupMismatch, match="first call of"):
        combine(buf, sent, bias=torch.zeros_like(x) if buf.rank == 1 else None)
    sent.handle.release()
    assert time.monotonic() - began < 30
    one_batch(buf, 1, zero_copy=True)


def check_first_calls(buf):
    """Both are new: found where ranks meet, which names what differs."""
    with pytest.raises(ew.GroupMismatch, match=r"ranks call dispatch differently: here \(.*fp8.*prepared by all"):
        dispatch(buf, 0, wire=FP8Block() if buf.rank == 1 else None)
    x, ids = inputs(buf, 1)
    with pytest.raises(ew.GroupMismatch, match=r"cached=False, gradients=False, torch\.int32"):
        buf.dispatch(x, ids.int() if buf.rank == 1 else ids.long())
    one_batch(buf, 0)


def check_all(buf):
    check_first_calls(buf)
    for kind in KINDS:
        check_dispatch(buf, kind)
        check_dispatch(buf, kind, counts="device")
    check_dispatch(buf, "layout", defer_receive=True)
    check_weights(buf)
    check_repeats(buf)
    check_combine(buf)
    check_deferred_combine(buf)
    check_turns(buf)
    check_new_kind(buf)

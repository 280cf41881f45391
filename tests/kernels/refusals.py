"""What every rank of a GPU's Buffer sees when one of them passes illegal arguments. `buf` as in `device_checks`."""

import itertools

import pytest
import torch
from device_checks import CAPACITY, COMPACT, EXPERTS, HIDDEN, MAJOR, SLOTS, TOPK, arrive, check_rank

import expertwire as ew
from expertwire.formats import BF16
from expertwire.testing import assert_equal, random_rows, uniform_routing


def inputs(buf, number):
    """x [8, HIDDEN], topk_idx of this rank."""
    device = buf.settings.device
    x = random_rows(31 * number + buf.rank, 8, HIDDEN).to(device)
    return x, uniform_routing(31 * number + buf.rank, 8, TOPK, EXPERTS).to(device)


def one_batch(buf, number, **options):
    """Dispatch and combine rows as they came: every token gets back its row once for each rank or expert it chose."""
    x, ids = inputs(buf, number)
    sent = received(buf.dispatch(x, ids, **options))
    back = buf.combine(sent.x, sent.handle).x
    arrive(buf.settings.device)
    buf.synchronize()
    chosen = ids.cpu()
    if options.get("layout", COMPACT) is COMPACT:
        owner = torch.tensor(buf.settings.placement.expert_ranks)
        times = torch.tensor([len(set(row)) for row in owner[chosen].tolist()])
    else:
        times = torch.tensor([len(set(row)) for row in chosen.tolist()])
    assert_equal(back.cpu(), (times[:, None].float() * x.cpu().float()).bfloat16())


def received(sent):
    return sent.hook() if sent.hook else sent


def mistaken_dispatch(buf, offender, number, **options):
    """A dispatch that `offender` calls with too many tokens."""
    x, ids = inputs(buf, number)
    if buf.rank != offender:
        return buf.dispatch(x, ids, **options)
    wide = torch.zeros(CAPACITY + 1, HIDDEN, dtype=torch.bfloat16, device=buf.settings.device)
    with pytest.raises(ew.InvalidArgument, match="num_max_tokens_per_rank"):
        buf.dispatch(wide, ids, **options)
    return None


ILLEGAL = f"is no expert: ids must be in [0, {EXPERTS}), or -1 for no selection"
REPEATS = (
    "repeats an expert of the same token; EXPERT_SLOTS has room for distinct experts only (use EXPERT_MAJOR, or -1 in "
    "the later slot)"
)
MISTAKES = [
    # what a rank writes at (token, slot), which of these is named, and what is said of it
    ({(0, 0): -2}, (0, 0), ILLEGAL),
    ({(23, -1): EXPERTS}, (23, -1), ILLEGAL),
    ({(17, 2): 1 << 40}, (17, 2), ILLEGAL),
    ({(20, 0): 99, (9, 3): -(1 << 31), (9, -1): 99}, (9, 3), ILLEGAL),
    ({(1, 0): 2, (23, 2): 1 << 31}, (23, 2), ILLEGAL),
    ({(0, 1): 0}, (0, 1), REPEATS),
    ({(23, -1): 8, (12, 3): 12, (12, 2): 12}, (12, 2), REPEATS),
]


def check_ids(buf):
    """Ids that are none and, in EXPERT_SLOTS, repeats are named by each rank in turn. Then all goes on."""
    device, num_topk = buf.settings.device, buf.settings.num_topk
    x, legal = random_rows(buf.rank, CAPACITY, HIDDEN).to(device), torch.full((CAPACITY, num_topk), -1)
    legal[:, :4] = (torch.arange(CAPACITY)[:, None] + torch.arange(4)) % EXPERTS  # token 0 has experts 0, 1, 2, 3
    legal[3], legal[5, :2] = -1, -1
    cases = itertools.product(enumerate(MISTAKES), (True, False), (torch.int32, torch.int64))
    for (number, (changes, (token, slot), problem)), slots, dtype in cases:
        layout, offender = SLOTS if slots else (COMPACT, MAJOR)[number % 2], number % buf.num_ranks
        ids = legal.to(dtype, copy=True)
        if buf.rank == offender:
            for place, value in changes.items():
                ids[place] = min(value, torch.iinfo(dtype).max)
        named, ids = int(ids[token, slot]), ids.to(device)
        if problem is REPEATS and not slots:
            buf.dispatch(x, ids, layout=layout).handle.release()
        elif buf.rank == offender:
            with pytest.raises(ew.InvalidArgument) as caught:
                buf.dispatch(x, ids, layout=layout)
            where = f"topk_idx[{token}, {slot % num_topk}]"
            assert str(caught.value) == f"rank {buf.rank}: {where} = {named} {problem}"
        else:
            with pytest.raises(ew.PeerRefused) as caught:
                buf.dispatch(x, ids, layout=layout)
            assert caught.value.peers == (offender,)
        buf.dispatch(x[:0], ids[:0], layout=layout).handle.release()
    arrive(device)


def check_first_call(buf):
    """Refused where peers still prepare the kind of call, twice; then as usual."""
    for _ in range(2):
        if buf.rank == 0:
            mistaken_dispatch(buf, 0, 1)
        else:
            with pytest.raises(ew.PeerRefused) as caught:
                mistaken_dispatch(buf, 0, 1)
            assert caught.value.peers == (0,)
    x, ids = inputs(buf, 2)
    sent = buf.dispatch(x, ids)
    if buf.rank == 0:
        with pytest.raises(ew.InvalidArgument):
            buf.combine(sent.x[:, : HIDDEN // 2].contiguous(), sent.handle)
    else:
        with pytest.raises(ew.PeerRefused) as caught:
            buf.combine(sent.x, sent.handle)
        assert caught.value.peers == (0,)
    sent.handle.release()
    one_batch(buf, 2)


def check_host_counts(buf, **options):
    """Refused once the kind is known: every rank learns of it in that call, and the next one works, in every bank."""
    one_batch(buf, 0, **options)
    for number in range(1, 4):
        offender = number % buf.num_ranks
        if buf.rank == offender:
            mistaken_dispatch(buf, offender, number, **options)
        else:
            with pytest.raises(ew.PeerRefused) as caught:
                received(mistaken_dispatch(buf, offender, number, **options))
            assert caught.value.peers == (offender,)
        one_batch(buf, number, **options)


def check_device_counts(buf, **options):
    """Peers do not know when the call returns, nor at its combine, which does nothing on any rank."""
    options |= {"counts": "device"}
    one_batch(buf, 0, **options)
    for number in range(1, 4):
        offender = number % buf.num_ranks
        refused_by = None
        try:
            sent = mistaken_dispatch(buf, offender, number, **options)
            if sent is not None:
                buf.combine(sent.x, sent.handle)
            buf.synchronize()
        except ew.PeerRefused as error:
            refused_by = error.peers
        assert refused_by == (None if buf.rank == offender else (offender,))
        one_batch(buf, number, **options)


def check_cached(buf):
    """A repeated routing has no exchange of counts: peers have sent their rows already when they learn of it."""
    x, ids = inputs(buf, 3)
    sent = buf.dispatch(x, ids)
    want = sent.x.clone()
    buf.combine(sent.x, sent.handle)
    assert_equal(buf.dispatch(x, handle=sent.handle).x.cpu(), want.cpu())
    for _ in range(3):
        if buf.rank == 1:
            with pytest.raises(ew.InvalidArgument, match="its handle"):
                buf.dispatch(x[:3].contiguous(), handle=sent.handle)
        else:
            with pytest.raises(ew.PeerRefused):
                buf.dispatch(x, handle=sent.handle)
        assert_equal(buf.dispatch(x, handle=sent.handle).x.cpu(), want.cpu())
        buf.combine(sent.x, sent.handle)
    buf.synchronize()
    one_batch(buf, 4)


def check_cached_device_counts(buf):
    """A repeat that one rank refuses leaves the handle as it was, in whatever bank."""
    x, ids = inputs(buf, 3)
    sent = buf.dispatch(x, ids, counts="device")
    want = buf.combine(sent.x, sent.handle).x.clone()
    buf.dispatch(x, handle=sent.handle)
    for _ in range(3):
        buf.synchronize()
        if buf.rank == 1:
            with pytest.raises(ew.InvalidArgument, match="its handle"):
                buf.dispatch(x[:3].contiguous(), handle=sent.handle)
            buf.synchronize()
        else:
            refused = False
            try:
                buf.dispatch(x, handle=sent.handle)
                buf.synchronize()
            except ew.PeerRefused:
                refused = True
            assert refused
        assert_equal(buf.combine(sent.x, sent.handle).x.cpu(), want.cpu())
        buf.synchronize()
        again = buf.dispatch(x, handle=sent.handle)
        buf.synchronize()
        rows = int(again.num_tokens_per_rank.sum())
        assert_equal(again.x[:rows].cpu(), sent.x[:rows].cpu())
    one_batch(buf, 4)


def check_new_combine_of_a_void_dispatch(buf):
    """Whose refusal was raised before: there is nobody to prepare a new kind of combine with."""
    one_batch(buf, 0, counts="device")
    sent = mistaken_dispatch(buf, 1, 1, counts="device")
    if sent is None:
        buf.synchronize()
    else:
        with pytest.raises(ew.PeerRefused):
            buf.synchronize()
        bias = torch.zeros(8, HIDDEN, dtype=torch.bfloat16, device=buf.settings.device)
        with pytest.raises(ew.PeerRefused):
            buf.combine(sent.x, sent.handle, bias=bias)
        sent.handle.release()
    one_batch(buf, 2, counts="device")


def check_combine(buf):
    """A combine of which one rank gets the shape, or the handle, wrong."""
    one_batch(buf, 0)
    for wrong in ("shape", "handle"):
        x, ids = inputs(buf, 1)
        sent = buf.dispatch(x, ids)
        if buf.rank == 1:
            given = (sent.x, "no handle") if wrong == "handle" else (sent.x[:, : HIDDEN // 2].contiguous(), sent.handle)
            with pytest.raises((ew.InvalidArgument, ew.HandleError)):
                buf.combine(*given)
            buf.synchronize()
            sent.handle.release()
        else:
            buf.combine(sent.x, sent.handle)
            with pytest.raises(ew.PeerRefused) as caught:
                buf.synchronize()
            assert caught.value.peers == (1,)
        one_batch(buf, 2)


def check_zero_copy(buf):
    """The views of a void dispatch are given back, whether its combine was called or not."""
    one_batch(buf, 0, layout=SLOTS, counts="device", zero_copy=True)
    for number in range(1, 4):
        refused = False
        try:
            sent = mistaken_dispatch(buf, 0, number, layout=SLOTS, counts="device", zero_copy=True)
            if sent is not None and number % 2:
                buf.combine(sent.x, sent.handle)
            buf.synchronize()
        except ew.PeerRefused:
            refused = True
        assert refused == (buf.rank != 0)
    one_batch(buf, 7, layout=SLOTS, counts="device", zero_copy=True)


def check_all(buf):
    check_first_call(buf)
    check_host_counts(buf)
    check_host_counts(buf, layout=SLOTS)
    check_host_counts(buf, layout=SLOTS, defer_receive=True)
    check_device_counts(buf)
    check_device_counts(buf, layout=SLOTS)
    check_cached(buf)
    check_cached_device_counts(buf)
    check_combine(buf)
    check_zero_copy(buf)
    check_ids(buf)
    check_rank(buf, COMPACT, BF16(), steps=1)

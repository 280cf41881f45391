"""The eight invariants of expert-parallel communication, for random shapes, routings, placements and orders.

Expectations are computed here from the ids, naively, and not taken from the library's own oracle.
"""

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import expertwire as ew
from expertwire.testing import payload

COMPACT, EXPERT_MAJOR, EXPERT_SLOTS = ew.Layout

check = settings(
    max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)


@dataclass(frozen=True)
class Group:
    """Everything all ranks do: ids[r] are rank r's selections, -1 for none. `direct` ranks put their rows straight into
    their peers' outputs, as only large dispatches do otherwise."""

    num_ranks: int
    num_experts: int
    num_topk: int
    hidden: int
    capacity: int
    owners: tuple[int, ...]
    ids: tuple[tuple[tuple[int, ...], ...], ...]
    max_in_flight: int = 2
    direct: tuple[bool, ...] = ()

    def buffer(self, rank, **options):
        options = {"timeout_s": 60.0, "max_in_flight": self.max_in_flight, **options}
        buf = ew.Buffer(
            rank,
            num_experts=self.num_experts,
            hidden=self.hidden,
            num_topk=self.num_topk,
            num_max_tokens_per_rank=self.capacity,
            placement=ew.Placement(self.owners),
            **options,
        )
        if self.direct and self.direct[buf.rank]:
            buf._engine.announce_from_bytes = 0
        return buf

    def topk_idx(self, rank):
        return torch.tensor(self.ids[rank], dtype=torch.int64).view(len(self.ids[rank]), self.num_topk)

    def x(self, rank):
        return payload(rank, len(self.ids[rank]), self.hidden)

    def weights(self, rank):
        """Small powers of two: products and sums stay exact."""
        count = len(self.ids[rank]) * self.num_topk
        return torch.tensor([1.0, 0.5, 2.0, 0.25]).repeat(count // 4 + 1)[:count].view(-1, self.num_topk)

    def local(self, rank):
        return [expert for expert in range(self.num_experts) if self.owners[expert] == rank]

    def counts(self, rank):
        selected = Counter(expert for tokens in self.ids for token in tokens for expert in token)
        return [selected[expert] for expert in self.local(rank)]

    def compact_rows(self, rank):
        """(source rank, token) of every row that `rank` must receive."""
        return [
            (source, token)
            for source, tokens in enumerate(self.ids)
            for token, experts in enumerate(tokens)
            if any(expert >= 0 and self.owners[expert] == rank for expert in experts)
        ]

    def expert_rows(self, rank):
        """(source rank, token, slot) of every selection, by local expert."""
        return [
            [
                (source, token, slot)
                for source, tokens in enumerate(self.ids)
                for token, experts in enumerate(tokens)
                for slot, selected in enumerate(experts)
                if selected == expert
            ]
            for expert in self.local(rank)
        ]

    def num_served(self, rank):
        """Distinct destination ranks of every token."""
        return torch.tensor([[len({self.owners[e] for e in token if e >= 0})] for token in self.ids[rank]]).view(-1, 1)


@st.composite
def groups(draw, distinct=False):
    num_ranks = draw(st.integers(1, 4))
    num_experts = draw(st.integers(1, 9))
    num_topk = draw(st.integers(1, min(5, num_experts) if distinct else 5))
    capacity = draw(st.integers(1, 9))
    owners = tuple(draw(st.lists(st.integers(0, num_ranks - 1), min_size=num_experts, max_size=num_experts)))
    favourites = draw(st.sampled_from([num_experts, num_experts, 1, 2]))  # skew: only the first few experts
    expert = st.integers(-1, min(favourites, num_experts) - 1)
    token = st.lists(expert, min_size=num_topk, max_size=num_topk)
    if distinct:
        token = st.permutations([*range(num_experts), *[-1] * num_topk]).map(lambda p: p[:num_topk])
    tokens = st.one_of(
        st.just([]), st.lists(token, max_size=capacity), st.lists(token, min_size=capacity, max_size=capacity)
    )
    ids = tuple(tuple(tuple(t) for t in draw(tokens)) for _ in range(num_ranks))
    hidden = 8 * draw(st.integers(1, 5))
    direct = tuple(draw(st.lists(st.booleans(), min_size=num_ranks, max_size=num_ranks)))
    return Group(num_ranks, num_experts, num_topk, hidden, capacity, owners, ids, direct=direct)


def run(group, fn, *args):
    return ew.World(group.num_ranks).run(lambda rank: fn(rank, group, *args))


# -- 1. Counts seen by receivers = counts implied by ids ----------------------------------------------------------


def counts(rank, group):
    me = rank.rank
    with group.buffer(rank) as buf:
        sent = buf.dispatch(group.x(me), group.topk_idx(me))
        rows = group.compact_rows(me)
        assert sent.num_tokens_per_expert_list == group.counts(me) == sent.num_tokens_per_expert.tolist()
        assert len(sent.x) == len(rows)
        per_rank = Counter(source for source, _ in rows)
        assert sent.num_tokens_per_rank_list == [per_rank[r] for r in range(group.num_ranks)]
        assert torch.equal(
            torch.bincount(sent.topk_idx[sent.topk_idx >= 0], minlength=len(group.local(me))).int(),
            sent.num_tokens_per_expert,
        )
        buf.combine(sent.x, sent.handle)
        sent_rows = [
            len([1 for source, _ in group.compact_rows(peer) if source == me]) for peer in range(group.num_ranks)
        ]
        assert list(buf.statistics().rows_sent) == sent_rows
        assert list(buf.statistics().rows_received) == sent.num_tokens_per_rank_list


@check
@given(groups())
def test_1_counts_are_those_of_the_ids(group):
    run(group, counts)


# -- 2. An invalid slot costs nothing and appears nowhere ---------------------------------------------------------


def holes(rank, group):
    me = rank.rank
    with group.buffer(rank, debug_poison=True) as buf:
        sent = buf.dispatch(group.x(me), group.topk_idx(me), group.weights(me), layout=EXPERT_MAJOR)
        filled = [tuple(row) for row in sent.row_source.tolist() if row[0] >= 0]
        assert filled == [row for rows in group.expert_rows(me) for row in rows]
        assert all(group.ids[source][token][slot] >= 0 for source, token, slot in filled)
        back = buf.combine(sent.x, sent.handle)
        total = torch.where(group.topk_idx(me) >= 0, group.weights(me), 0).sum(dim=1, keepdim=True)
        assert torch.equal(back.x.float(), total * group.x(me).float())
        assert sum(buf.statistics().bytes_sent) == 0 or any(e >= 0 for tokens in group.ids for t in tokens for e in t)


@check
@given(groups())
def test_2_invalid_slots_appear_nowhere(group):
    run(group, holes)


# -- 3. Empty is normal --------------------------------------------------------------------------------------------


def empty(rank, group, talkers):
    """Only some ranks have tokens, in every layout, with gradients."""
    me = rank.rank
    ids = group.topk_idx(me) if me in talkers else torch.empty(0, group.num_topk, dtype=torch.int64)
    x = (group.x(me) if me in talkers else torch.empty(0, group.hidden, dtype=torch.bfloat16)).requires_grad_()
    with group.buffer(rank) as buf:
        for layout in (COMPACT, EXPERT_MAJOR):
            for counts in ("host", "device"):
                sent = buf.dispatch(x, ids, layout=layout, counts=counts)
                back = buf.combine(sent.x, sent.handle)
                assert back.x.shape == x.shape
                back.x.float().sum().backward()
                assert x.grad.shape == x.shape
                multiple = group.num_served(me) if layout is COMPACT else (ids >= 0).sum(dim=1, keepdim=True)
                if me in talkers:
                    assert torch.equal(x.grad, multiple.expand(x.shape).bfloat16())
                x.grad = None
        if me not in talkers:
            assert sum(buf.statistics().rows_sent) == 0


@check
@given(groups(), st.sets(st.integers(0, 3)))
def test_3_empty_is_normal(group, talkers):
    run(group, empty, talkers)


# -- 4. Nothing outside the valid region influences any result -----------------------------------------------------


def junk_outside(rank, group, layout):
    """Poisoned windows and tails; the experts fill every row that is not valid with NaN."""
    me = rank.rank
    with group.buffer(rank, debug_poison=True) as buf:
        for counts in ("host", "device"):
            for wire in (None, ew.FP8Block(decode=True)):
                sent = buf.dispatch(
                    group.x(me), group.topk_idx(me), group.weights(me), layout=layout, counts=counts, wire=wire,
                    expert_alignment=3,
                )  # fmt: skip
                if layout is COMPACT:
                    valid = (sent.topk_idx >= 0).any(dim=1)
                    multiple = group.num_served(me)
                else:
                    valid = sent.row_source[..., 0] >= 0
                    multiple = torch.where(group.topk_idx(me) >= 0, group.weights(me), 0).sum(dim=1, keepdim=True)
                assert sent.x[valid].isfinite().all()
                y = torch.where(valid[..., None], sent.x, torch.nan)
                back = buf.combine(y, sent.handle)
                assert back.x.isfinite().all()
                if wire is None:
                    assert torch.equal(back.x.float(), multiple * group.x(me).float())
        assert buf._engine.runtime.broken_guards() == []


@check
@given(groups(distinct=True), st.sampled_from(list(ew.Layout)))
def test_4_only_valid_rows_count(group, layout):
    run(group, junk_outside, layout)


# -- 5. A handle is self-contained; order of handles is free within the number in flight ---------------------------


def any_order(rank, group, order, deferred, layouts):
    me, depth = rank.rank, group.max_in_flight
    with group.buffer(rank, debug_poison=True) as buf:
        for _ in range(2):
            flight = []
            for i in range(depth):
                scaled = (i + 1) * group.x(me)
                sent = buf.dispatch(scaled, group.topk_idx(me).flip(0), layout=layouts[i], defer_receive=deferred)
                scaled.fill_(torch.nan) if deferred else None
                flight.append(sent)
            for i in order if deferred else ():
                flight[i].hook()
            if deferred:
                with pytest.raises(ew.InFlightError, match=f"rank {me}: {depth} handles are in flight"):
                    buf.dispatch(group.x(me), group.topk_idx(me))
            results = {}
            for i in reversed(order):
                results[i] = buf.combine(flight[i].x, flight[i].handle, defer_receive=deferred)
            for i in order:
                back = results[i].hook() if deferred else results[i]
                ids = group.topk_idx(me).flip(0)
                owners = torch.tensor([*group.owners, -1])[ids]
                ranks = torch.tensor([[len(set(row) - {-1})] for row in owners.tolist()]).view(-1, 1)
                multiple = ranks if layouts[i] is COMPACT else (ids >= 0).sum(dim=1, keepdim=True)
                assert torch.equal(back.x, multiple * (i + 1) * group.x(me))


@check
@given(
    groups(), st.permutations([0, 1, 2]), st.booleans(), st.lists(st.sampled_from([COMPACT, EXPERT_MAJOR]), min_size=3)
)
def test_5_handles_in_any_order(group, order, deferred, layouts):
    group = Group(**{**vars(group), "max_in_flight": 3})
    run(group, any_order, order, deferred, layouts)


# -- 6. Nothing waits for ever; nothing fails on one rank only ------------------------------------------------------


def one_rank_is_wrong(rank, group, culprit, phase):
    me, x, ids = rank.rank, group.x(rank.rank), group.topk_idx(rank.rank)
    with group.buffer(rank) as buf:
        for deferred in (False, True):
            expected = ew.InvalidArgument if me == culprit else ew.PeerRefused
            if phase == "dispatch":
                wrong = x.float() if me == culprit else x
                with pytest.raises(expected, match=f"rank {culprit}: x must have dtype bfloat16") as caught:
                    _hooked(buf.dispatch(wrong, ids, defer_receive=deferred))
            else:
                sent = buf.dispatch(x, ids)
                wrong = sent.x.float() if me == culprit else sent.x
                with pytest.raises(expected, match=f"rank {culprit}: x must have dtype bfloat16") as caught:
                    _hooked(buf.combine(wrong, sent.handle, defer_receive=deferred))
                assert torch.equal(buf.combine(sent.x, sent.handle).x, group.num_served(me) * x)
            if me != culprit:
                assert caught.value.peers == (culprit,)
            sent = buf.dispatch(x, ids)
            assert torch.equal(buf.combine(sent.x, sent.handle).x, group.num_served(me) * x)


def _hooked(record):
    return record.hook() if record.hook else record


@check
@given(groups(), st.integers(0, 3), st.sampled_from(["dispatch", "combine"]))
def test_6_one_wrong_rank_is_an_error_on_all(group, culprit, phase):
    run(group, one_rank_is_wrong, culprit % group.num_ranks, phase)


# -- 7. Order and sums are functions of inputs alone ----------------------------------------------------------------


def ordered(rank, group):
    """Rows by source rank, then token, then slot, in every layout; payload in its own place."""
    me = rank.rank
    everything = [group.x(source) for source in range(group.num_ranks)]
    with group.buffer(rank) as buf:
        sent = buf.dispatch(group.x(me), group.topk_idx(me), group.weights(me))
        rows = group.compact_rows(me)
        for i, (source, token) in enumerate(rows):
            assert torch.equal(sent.x[i], everything[source][token])
            experts = group.ids[source][token]
            local = [group.local(me).index(e) if e >= 0 and group.owners[e] == me else -1 for e in experts]
            assert sent.topk_idx[i].tolist() == local
            shares = [w if e >= 0 else 0.0 for w, e in zip(group.weights(source)[token].tolist(), local, strict=True)]
            assert sent.topk_weights[i].tolist() == shares
        buf.combine(sent.x, sent.handle)
        for alignment in (1, 4):
            major = buf.dispatch(group.x(me), group.topk_idx(me), layout=EXPERT_MAJOR, expert_alignment=alignment)
            at = 0
            for expert, selections in enumerate(group.expert_rows(me)):
                assert major.expert_offsets[expert] == at
                assert [tuple(r) for r in major.row_source[at : at + len(selections)].tolist()] == selections
                for i, (source, token, _) in enumerate(selections):
                    assert torch.equal(major.x[at + i], everything[source][token])
                padded = -(-len(selections) // alignment) * alignment
                assert (major.row_source[at + len(selections) : at + padded] == -1).all()
                at += padded
            assert major.expert_offsets[-1] == at == len(major.x)
            buf.combine(major.x, major.handle)
        return sent.x, sent.topk_idx, sent.topk_weights


@check
@given(groups())
def test_7_order_is_a_function_of_the_ids(group):
    for one, other in zip(run(group, ordered), run(group, ordered), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def slots(rank, group):
    me = rank.rank
    with group.buffer(rank, debug_poison=True) as buf:
        sent = buf.dispatch(group.x(me), group.topk_idx(me), group.weights(me), layout=EXPERT_SLOTS)
        room = group.num_ranks * group.capacity
        assert sent.x.shape == (len(group.local(me)), room, group.hidden)
        for expert, selections in enumerate(group.expert_rows(me)):
            seen = [tuple(row) for row in sent.row_source[expert].tolist()]
            assert seen == selections + [(-1, -1, -1)] * (room - len(selections))
        back = buf.combine(sent.x, sent.handle)
        total = torch.where(group.topk_idx(me) >= 0, group.weights(me), 0).sum(dim=1, keepdim=True)
        assert torch.equal(back.x.float(), total * group.x(me).float())


@check
@given(groups(distinct=True))
def test_7_expert_slots_are_in_order(group):
    run(group, slots)


# -- 8. What cannot be supported is refused at creation, on all ranks, before memory is taken ------------------------

ILLEGAL = [
    ("num_experts", 0),
    ("num_experts", (1 << 16) + 1),
    ("num_topk", 0),
    ("num_topk", 65),
    ("num_topk", 2.0),
    ("hidden", 0),
    ("hidden", 12),
    ("hidden", "64"),
    ("num_max_tokens_per_rank", 0),
    ("num_max_tokens_per_rank", 1 << 24),
    ("num_max_tokens_per_rank", True),
    ("max_in_flight", 0),
    ("max_in_flight", 65),
    ("timeout_s", 0),
    ("timeout_s", "soon"),
    ("on_timeout", "ignore"),
    ("engine", "cuda"),
    ("transport", "infiniband"),
    ("transport", "shm"),
    ("device", "cuda"),
    ("placement", (0,)),
    ("placement", ew.Placement((0,) * 200)),
    ("placement", ew.Placement((99,))),
    ("placement", torch.ones(3)),
]


def refused(rank, group, culprit, name, value):
    crew_before = len(rank.crew.running)
    options = {name: value} if rank.rank == culprit else {}
    shape = {
        "num_experts": group.num_experts,
        "hidden": group.hidden,
        "num_topk": group.num_topk,
        "num_max_tokens_per_rank": group.capacity,
    }
    with pytest.raises(Exception, match=rf"rank {culprit}\b") as caught:
        ew.Buffer(rank, **{**shape, **options})
    if rank.rank == culprit:
        assert isinstance(caught.value, (ew.InvalidArgument, ew.TransportUnavailable))
        assert name in str(caught.value)
    else:
        assert isinstance(caught.value, ew.PeerRefused)
        assert caught.value.peers == (culprit,)
    with group.buffer(rank) as buf:
        sent = buf.dispatch(group.x(rank.rank), group.topk_idx(rank.rank))
        buf.combine(sent.x, sent.handle)
    assert len(rank.crew.running) == crew_before


@pytest.mark.parametrize("illegal", ILLEGAL, ids=str)
@settings(check, max_examples=4)
@given(group=groups(), culprit=st.integers(0, 3))
def test_8_what_is_not_supported_is_refused_on_all_ranks(group, culprit, illegal):
    run(group, refused, culprit % group.num_ranks, *illegal)

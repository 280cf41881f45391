"""Rows that peers put straight into the output: when, into which memory, and what happens if a step goes wrong."""

import gc

import pytest
import torch
from small_buffer import make

import expertwire as ew
from expertwire.host.outputs import Outputs
from expertwire.layouts.window import LINE_BYTES, PAGE_BYTES, WindowLayout
from expertwire.testing import payload

COMPACT, EXPERT_MAJOR, EXPERT_SLOTS = ew.Layout


def world(num_ranks, fn, *args):
    return ew.World(num_ranks).run(lambda rank: fn(rank, *args))


def direct(rank, **options):
    buf = make(rank, **options)
    buf._engine.announce_from_bytes = 0
    return buf


def inputs(buf, num_tokens=8, shift=0):
    """Token t goes to all ranks in turn."""
    experts = buf.settings.num_experts
    ids = (torch.arange(num_tokens)[:, None] * (experts // buf.num_ranks) + torch.tensor([shift, shift + 1])) % experts
    return payload(buf.rank + 10 * shift, num_tokens, buf.settings.hidden), ids


def served(buf, ids):
    owners = torch.tensor(buf.settings.placement.expert_ranks)[ids]
    return 1 + (owners[:, :1] != owners[:, 1:]).int()


def is_shared(buf, tensor):
    """Whether a tensor lies where peers can write."""
    memory = buf._engine.runtime.transport.outputs[buf.rank]
    return memory.ctypes.data <= tensor.data_ptr() < memory.ctypes.data + memory.nbytes


def round_trip(buf, shared=None, **options):
    x, ids = inputs(buf)
    sent = buf.dispatch(x, ids, **options)
    assert shared is None or is_shared(buf, sent.x) == shared
    assert torch.equal(buf.combine(sent.x, sent.handle).x, served(buf, ids) * x)
    return sent


# -- when ------------------------------------------------------------------------------------------------------------


def only_large_ones(rank):
    with make(rank) as buf:
        assert buf._engine.announce_from_bytes >= 1 << 16
        round_trip(buf, shared=False)
        x, ids = inputs(buf)
        largest = max(buf.dispatch(x, ids).handle._routing.rows_per_peer) * buf._engine.dispatch_row(128, 0).data_bytes
        buf._engine.announce_from_bytes = largest + 1
        buf._handles.clear()
        round_trip(buf, shared=False)
        buf._engine.announce_from_bytes = 1
        round_trip(buf, shared=True)


def test_only_many_rows_go_directly():
    world(2, only_large_ones)


@pytest.mark.parametrize("layout", [EXPERT_MAJOR, EXPERT_SLOTS])
def test_rows_that_stand_more_than_once_take_the_window(layout):
    def body(rank):
        with direct(rank) as buf:
            x, ids = inputs(buf)
            sent = buf.dispatch(x, ids, layout=layout)
            assert not is_shared(buf, sent.x)
            assert torch.equal(buf.combine(sent.x, sent.handle).x, 2 * x)

    world(2, body)


def test_a_peer_with_another_layout_gets_its_rows_in_the_window():
    """Rank 0 wants COMPACT and announces; rank 1 wants EXPERT_MAJOR."""

    def body(rank):
        with direct(rank) as buf:
            x, ids = inputs(buf)
            sent = buf.dispatch(x, ids, layout=COMPACT if buf.rank == 0 else EXPERT_MAJOR)
            assert not is_shared(buf, sent.x)  # nobody has announced rows for rank 0
            rows = {tuple(row) for row in sent.x.tolist()}
            wanted = torch.cat([payload(r, 8, 64)[(ids // 4 == buf.rank).any(1)] for r in range(2)])
            assert rows == {tuple(row) for row in wanted.tolist()}

    world(2, body)


def test_nobody_writes_into_memory_of_others_where_ranks_may_be_masked():
    def body(rank):
        with direct(rank, on_timeout="mask") as buf:
            assert buf._engine.runtime.transport.outputs[buf.rank].nbytes == 0
            round_trip(buf, shared=False)

    world(2, body)


def test_the_simulated_fabric_stays_with_its_windows():
    def body(rank):
        with direct(rank) as buf:
            round_trip(buf, shared=False)

    ew.World(2, fabric="rc.ooo", signal="atomic").run(body)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_large_and_small_puts_in_one_step(num_ranks):
    """Each rank has another threshold: of the rows that arrive, some come directly, some through the window."""

    def body(rank):
        with direct(rank, num_experts=12) as buf:
            for least in (0, 300, 700, 1 << 30):
                buf._engine.announce_from_bytes = least if buf.rank % 2 else 0
                for shift in range(4):
                    x, ids = inputs(buf, num_tokens=8 - buf.rank, shift=shift)
                    sent = buf.dispatch(x, ids)
                    back = buf.combine(sent.x, sent.handle)
                    assert torch.equal(back.x, served(buf, ids) * x)

    world(num_ranks, body)


# -- deferring ranks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_deferring_rank_is_not_waited_for(num_ranks):
    """Rank 0 receives step 1 only after a whole step 2: whoever waited for its places would wait for ever."""

    def body(rank):
        with direct(rank, max_in_flight=3) as buf:
            for repeat in range(4):
                x, ids = inputs(buf, shift=repeat)
                first = buf.dispatch(x, ids, defer_receive=buf.rank == 0)
                second = buf.dispatch(2 * x, ids)
                assert torch.equal(buf.combine(second.x, second.handle).x, 2 * served(buf, ids) * x)
                if first.hook is not None:
                    first.hook()
                    assert not is_shared(buf, first.x)
                assert torch.equal(buf.combine(first.x, first.handle).x, served(buf, ids) * x)

    world(num_ranks, body)


def test_everybody_defers():
    def body(rank):
        with direct(rank) as buf:
            x, ids = inputs(buf)
            sent = buf.dispatch(x, ids, defer_receive=True)
            wanted = x.clone()
            x.zero_()
            sent.hook()
            assert torch.equal(buf.combine(sent.x, sent.handle).x, served(buf, ids) * wanted)

    world(3, body)


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_void_step_moves_nothing_and_the_next_one_works(num_ranks):
    def body(rank):
        with direct(rank, debug_poison=True) as buf:
            for repeat in range(5):
                x, ids = inputs(buf, shift=repeat)
                wrong = ids.clone()
                wrong[3, 1] = 99
                refuses = buf.rank == repeat % num_ranks
                kind = ew.InvalidArgument if refuses else ew.PeerRefused
                with pytest.raises(kind, match=r"topk_idx\[3, 1\] = 99"):
                    buf.dispatch(x, wrong if refuses else ids)
                weights = torch.ones(8, 2) if buf.rank == repeat % num_ranks else None
                with pytest.raises(ew.GroupMismatch, match="weights="):
                    buf.dispatch(x, ids, weights)
                round_trip(buf, shared=True)
            assert not buf._engine.runtime.outputs._kept
            assert buf._engine.runtime.broken_guards() == []

    world(num_ranks, body)


def test_memory_of_a_failed_step_is_never_lent_again():
    """Rank 1 sleeps between its announcement and its rows. Rank 0 gives up; the rows come later, into memory that
    nobody else has got meanwhile."""

    def body(rank):
        buf = direct(rank)
        round_trip(buf)
        rank.barrier()
        x, ids = inputs(buf)
        runtime = buf._engine.runtime
        if buf.rank == 1:
            publish = runtime.publish

            def late(peer, word, *args):
                if word.purpose == "dispatch_landing_ready":
                    rank.barrier()
                publish(peer, word, *args)

            runtime.publish = late
            buf.dispatch(x, ids)
            rank.barrier()
            return
        buf.timeout_s = 0.2
        with pytest.raises(ew.PeerTimeout, match=r"'dispatch receive' for rank\(s\) \[1\]"):
            buf.dispatch(x, ids)
        (kept,) = runtime.outputs._kept
        gc.collect()
        others = [runtime.outputs.empty((64,), torch.uint8) for _ in range(100)]
        first, last = kept.data_ptr(), kept.data_ptr() + kept.nbytes
        assert not [o for o in others if o is not None and first <= o.data_ptr() < last]
        rank.barrier()
        rank.barrier()
        buf.close()

    world(2, body)


# -- memory ----------------------------------------------------------------------------------------------------------


def hold_everything(rank):
    """What the caller keeps is never touched; when outputs are full, rows take the window, and come directly again when
    there is room."""
    with direct(rank, hidden=256, num_max_tokens_per_rank=64, max_in_flight=2) as buf:
        kept = []
        x, ids = inputs(buf, 64)
        for i in range(1, 13):
            sent = buf.dispatch(i * x, ids)
            kept.append((sent.x, sent.x.clone(), is_shared(buf, sent.x)))
            assert torch.equal(buf.combine(sent.x, sent.handle).x, i * served(buf, ids) * x)
            assert all(torch.equal(seen, copy) for seen, copy, _ in kept), i
        shared = [where for _, _, where in kept]
        assert shared == sorted(shared, reverse=True)
        assert 3 <= sum(shared) < 12
        row = kept[0][0][5]
        wanted = row.clone()
        del sent, kept
        gc.collect()
        for _ in range(3):
            assert is_shared(buf, buf.dispatch(x, ids).x)
            buf._handles.clear()
        assert torch.equal(row, wanted), "a view of a row keeps its block"
    assert torch.equal(row, wanted), "and outlives the buffer"


def test_what_was_returned_stays_and_outputs_run_full():
    world(2, hold_everything)


def test_without_pages_rows_take_the_window():
    def body(rank):
        with direct(rank) as buf:
            buf._engine.runtime.outputs._populate = lambda end: False
            round_trip(buf, shared=False)

    world(2, body)


@pytest.mark.parametrize("counts", ["host", "device"])
def test_zero_copy_views_lie_where_peers_write(counts):
    def body(rank):
        with direct(rank, debug_poison=True) as buf:
            places = set()
            for i in range(1, 7):
                x, ids = inputs(buf, shift=i % 3)
                sent = buf.dispatch(i * x, ids, zero_copy=True, counts=counts)
                assert is_shared(buf, sent.x)
                places.add(sent.x.data_ptr())
                valid = (sent.topk_idx >= 0).any(1)
                assert sent.x[valid].isfinite().all()
                assert sent.x[~valid].isnan().all()
                assert torch.equal(buf.combine(sent.x, sent.handle).x, i * served(buf, ids) * x)
            assert len(places) <= 2 * 2, "two banks, each with one place, or a larger one"

    world(2, body)


def outputs(num_bytes):
    return Outputs(torch.zeros(num_bytes, dtype=torch.uint8).numpy())


def test_blocks_are_lent_first_fit():
    memory = outputs(8 * PAGE_BYTES)
    memory._populate = lambda end: True
    a, b, c = (memory.empty((n, PAGE_BYTES), torch.uint8) for n in (2, 1, 3))
    assert [memory.place(block) // PAGE_BYTES for block in (a, b, c)] == [0, 2, 3]
    assert memory.empty((3, PAGE_BYTES), torch.uint8) is None
    view = b[0, 7:9]
    del a, b
    gc.collect()
    assert memory.empty((3, PAGE_BYTES), torch.uint8) is None, "a view keeps the block between"
    d = memory.empty((100,), torch.uint8)
    assert memory.place(d) == 0
    assert memory.place(memory.empty((PAGE_BYTES,), torch.bfloat16)) == 6 * PAGE_BYTES, "two pages"
    assert memory.place(memory.empty((5, 7), torch.bfloat16)) == PAGE_BYTES
    del view
    gc.collect()
    memory.keep([c])
    del c
    gc.collect()
    e = memory.empty((2, PAGE_BYTES), torch.uint8)
    assert memory.place(e) == PAGE_BYTES
    assert memory.empty((3, PAGE_BYTES), torch.uint8) is None, "what is kept is not lent"
    assert memory.empty((0, 4), torch.float32).shape == (0, 4)
    memory.close()
    assert memory.empty((1,), torch.uint8) is None
    e.fill_(1)


def test_every_page_is_asked_for_once():
    memory, asked = outputs(8 * PAGE_BYTES), []

    def populate(end):
        asked.append(end)
        memory._touched = end
        return True

    memory._populate = populate
    for num_bytes in (PAGE_BYTES, 2 * PAGE_BYTES, 10, 4 * PAGE_BYTES):
        memory.empty((num_bytes,), torch.uint8)
    assert asked == [PAGE_BYTES, 2 * PAGE_BYTES, 4 * PAGE_BYTES]


def test_places_are_told_behind_their_words():
    layout = WindowLayout(num_ranks=3, capacity=4, hidden=64, num_topk=2, num_banks=2)
    word = layout.word("dispatch_place_ready", 2, 1)
    assert word + 8 <= layout.place_record(1, 2) <= word + LINE_BYTES - 16
    assert layout.output_bytes == 3 * (PAGE_BYTES + PAGE_BYTES)
    assert WindowLayout(3, 4, 64, 2, 2, writers_apart=True).output_bytes == 0
    assert WindowLayout(1, 4, 64, 2, 2).output_bytes == 0

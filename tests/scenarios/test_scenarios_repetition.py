"""Cases C04, C19, C23, C24: the same again, many times, in other sizes, late, and bit for bit."""

import os
import random

import pytest
import torch

import expertwire as ew
from expertwire.testing import first_mismatch, payload, random_rows, random_weights, uniform_routing

EXPERT_MAJOR, EXPERT_SLOTS = ew.Layout.EXPERT_MAJOR, ew.Layout.EXPERT_SLOTS


def make(group, num_experts, num_topk, capacity, hidden=128, **options):
    options = {"timeout_s": 60.0, **options}
    return ew.Buffer(
        group, num_experts=num_experts, hidden=hidden, num_topk=num_topk, num_max_tokens_per_rank=capacity, **options
    )


# -- C04 ---------------------------------------------------------------------------------------------------------


def repeated_sum(group, num_tokens, hidden, rounds, everybody):
    """Integer payload, so that a wrong row cannot hide in a tolerance."""
    num_topk = 8 if everybody else 2
    generator = torch.Generator()
    with make(group, 256, num_topk, num_tokens, hidden) as buf:
        talks = everybody or buf.rank == 0
        ids = torch.arange(num_topk).expand(num_tokens, num_topk).contiguous() if talks else None
        ids = torch.full((num_tokens, num_topk), -1) if ids is None else ids
        weights = torch.ones(num_tokens, num_topk)
        for round_idx in range(rounds):
            generator.manual_seed(10 * round_idx + buf.rank)
            x = torch.randint(2, (num_tokens, hidden), generator=generator).bfloat16()
            sent = buf.dispatch(x, ids, weights, layout=EXPERT_MAJOR)
            back = buf.combine(sent.x, sent.handle)
            wrong = first_mismatch(back.x, num_topk * x if talks else torch.zeros_like(x))
            assert wrong is None, f"round {round_idx}: {wrong}"


@pytest.mark.parametrize("everybody", [False, True])
def test_c04_repeated_exact_sum(anywhere, everybody):
    anywhere(4, repeated_sum, 32, 7168, 8, everybody)


@pytest.mark.slow
def test_c04_one_talking_rank_1024_rounds(processes):
    processes.run(repeated_sum, 256, 128, 1024, False)


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [256, 1024])
def test_c04_wide_rows(processes, num_tokens):
    processes.run(repeated_sum, num_tokens, 7168, 4096 // num_tokens, False)


@pytest.mark.slow
def test_c04_everybody_talks(processes):
    processes.run(repeated_sum, 256, 7168, 2, True)


# -- C19 ---------------------------------------------------------------------------------------------------------

SIZES = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 256, 512, 1024, 2048, 4096, 8192, 16384]


def token_count_sweep(group, order, max_in_flight):
    sizes = {"ascending": SIZES, "descending": SIZES[::-1], "shuffled": random.Random(19).sample(SIZES, len(SIZES))}
    with make(group, 32, 2, SIZES[-1], hidden=16, max_in_flight=max_in_flight) as buf:
        for num_tokens in sizes[order]:
            home = (buf.rank + torch.arange(num_tokens)[:, None]) % 4
            x = payload(buf.rank, num_tokens, 16)
            sent = buf.dispatch(x, 8 * torch.cat([home, (home + 1) % 4], dim=1))
            if num_tokens % 4 == 0:
                assert len(sent.x) == 2 * num_tokens
            assert torch.equal(buf.combine(sent.x, sent.handle).x, 2 * x), num_tokens


@pytest.mark.parametrize("order", ["ascending", "descending", "shuffled"])
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_c19_token_counts_in_any_order_on_one_buffer(inproc, order, max_in_flight):
    inproc(4, token_count_sweep, order, max_in_flight)


def test_c19_on_processes(processes):
    processes.run(token_count_sweep, "shuffled", 1)


# -- C23 ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def uninitialised_memory_is_nan():
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def late_inputs(group, rounds, deferred):
    """Inputs changed just before the call and dropped or overwritten right after it."""
    num_tokens, hidden = 4096, 16
    with make(group, 64, 8, num_tokens, hidden, debug_poison=True) as buf:
        expected = 8 * payload(buf.rank, num_tokens, hidden)
        expected[1::2] = 0
        for _ in range(rounds):
            x, ids = payload(buf.rank, num_tokens, hidden), torch.empty(num_tokens, 8, dtype=torch.int64)
            torch.add(torch.arange(num_tokens)[:, None], torch.arange(8), out=ids).remainder_(64)
            weights = torch.ones(num_tokens, 8)
            ids[1::2] = -1
            x[1::2] = torch.nan
            sent = buf.dispatch(x, ids, weights, layout=EXPERT_MAJOR, defer_receive=deferred)
            if deferred:
                x.fill_(torch.nan)
            ids.fill_(63)
            weights.fill_(torch.nan)
            del x, ids, weights
            sent = sent.hook() if deferred else sent
            assert sent.num_tokens_per_expert_list == [2 * 256] * 32
            y, handle = sent.x, sent.handle
            del sent
            back = buf.combine(y, handle, defer_receive=deferred)
            if deferred:
                y.fill_(torch.nan)
            del y
            back = back.hook() if deferred else back
            assert torch.equal(back.x, expected)
            del back, handle


@pytest.mark.usefixtures("uninitialised_memory_is_nan")
@pytest.mark.parametrize("deferred", [False, True])
def test_c23_inputs_are_read_at_the_call_and_kept_alive(inproc, deferred):
    inproc(2, late_inputs, 6, deferred)


# -- C24 ---------------------------------------------------------------------------------------------------------


def delay(generator):
    """Give the processor away a random number of times."""
    for _ in range(int(generator.expovariate(0.05))):
        os.sched_yield()


def normal_rows(group, seed, rounds, options):
    """Everything a rank sees, for random normal rows with random delays between the phases."""
    generator = random.Random()
    seen = None
    with make(group, 32, 8, 128, hidden=64, **options) as buf:
        x = random_rows(seed + buf.rank, 128, 64)
        ids = uniform_routing(seed + buf.rank, 128, 8, 32)
        weights = random_weights(seed + buf.rank, 128, 8)
        for _ in range(rounds):
            outputs = []
            for layout in ew.Layout:
                delay(generator)
                sent = buf.dispatch(x, ids, weights, layout=layout, defer_receive=True)
                delay(generator)
                sent.hook()
                delay(generator)
                reduce = "rank" if layout is EXPERT_SLOTS else "token"
                y = (sent.x.float() * 1.25).bfloat16()
                back = buf.combine(y, sent.handle, reduce=reduce, defer_receive=True)
                delay(generator)
                back.hook()
                valid = slice(None) if layout is ew.Layout.COMPACT else sent.row_source[..., 0] >= 0
                outputs += [sent.x[valid], sent.num_tokens_per_expert, sent.num_tokens_per_rank, back.x]
                outputs.append(sent.topk_idx if layout is ew.Layout.COMPACT else sent.row_source)
            if seen is None:
                seen = outputs
            assert all(torch.equal(a, b) for a, b in zip(seen, outputs, strict=True))
    return seen


def equal(one, other):
    return all(
        torch.equal(a, b) for mine, yours in zip(one, other, strict=True) for a, b in zip(mine, yours, strict=True)
    )


def test_c24i_results_do_not_depend_on_delays(inproc, processes):
    first = inproc(4, normal_rows, 24, 40, {})
    assert equal(first, processes.run(normal_rows, 24, 60, {}))


@pytest.mark.parametrize("options", [{"max_in_flight": 1}, {"max_in_flight": 5, "debug_poison": True}])
def test_c24iii_results_do_not_depend_on_settings(inproc, options):
    assert equal(inproc(4, normal_rows, 24, 1, {}), inproc(4, normal_rows, 24, 1, options))


def one_fixed_rank(group, seed):
    """Rank 0 always sends the same; what the others send depends on the seed."""
    with make(group, 32, 8, 128, hidden=64) as buf:
        seed = 0 if buf.rank == 0 else seed + buf.rank
        num_tokens = 100 if buf.rank == 0 else seed * 37 % 129
        x, ids = random_rows(seed, num_tokens, 64), uniform_routing(seed, num_tokens, 8, 32)
        results = []
        for layout in ew.Layout:
            sent = buf.dispatch(x, ids, random_weights(seed, num_tokens, 8), layout=layout)
            results.append(buf.combine((sent.x.float().sin() * 3).bfloat16(), sent.handle).x)
        return results


def test_c24ii_a_rank_does_not_see_what_the_others_send(inproc):
    answers = [inproc(4, one_fixed_rank, seed)[0] for seed in (1, 2, 30)]
    assert equal([answers[0]] * 2, answers[1:])

"""Row work in numba: routing, moving rows, placing them into a layout, reducing them.

Rows are named by address tables: `move_rows(source, destination, num_bytes)` copies row i from `source[i]` to
`destination[i]`. So one kernel serves send and receive, windows and ordinary tensors, every layout.
"""

# ruff: noqa: ANN001, ANN201, ANN202
# mypy: ignore-errors
from __future__ import annotations

import numpy as np
from numba import njit

from expertwire.host.cache import KEEP
from expertwire.host.memory import bits_float, copy_bytes, float_bits, store_fence, stream_bytes, view

_BLOCK = 2048


@njit(nogil=True, cache=KEEP)
def route(topk_idx, weights, num_tokens, num_topk, expert_rank, expert_local, num_ranks, distinct):
    """Where each selection goes, and which tokens each rank gets.

    topk_idx and weights are addresses of [T, K] int64 and float32 (0 = all ones) -> slots [3, T, K] int32, which are
    the rank and local expert of each slot (-1 = no selection) and whether it is the highest slot of its token that its
    rank serves; offsets [R + 1] int64, tokens [offsets[R]] int32: rank r gets tokens[offsets[r]:offsets[r + 1]],
    ascending, each once; and shares [T, K], a copy of the weights.
    With `distinct`, a later slot that repeats an expert of the same token counts as -1, and so does an id that is none;
    `repeats` and `illegal` say how many did.

    Worked example, 2 ranks with experts (0, 1) and (2, 3): topk_idx = [[0, 2], [1, 0], [-1, 3]] gives
    slots = [[[0, 1], [0, 0], [-1, 1]], [[0, 0], [1, 0], [-1, 1]], [[1, 1], [0, 1], [0, 1]]], offsets = [0, 2, 4],
    tokens = [0, 1, 0, 2].
    """
    ids = view(topk_idx, num_tokens * num_topk, np.int64).reshape((num_tokens, num_topk))
    shares = np.ones((num_tokens, num_topk), np.float32)
    if weights != 0:
        copy_bytes(shares.ctypes.data, weights, shares.nbytes)
    slots = np.empty((3, num_tokens, num_topk), np.int32)
    slot_rank, slot_local, is_last = slots[0], slots[1], slots[2]
    last_slot = np.empty(num_ranks, np.int64)
    offsets = np.zeros(num_ranks + 1, np.int64)
    last_token = np.full(num_ranks, -1, np.int64)
    repeats = illegal = 0
    for t in range(num_tokens):
        for k in range(num_topk):
            expert = ids[t, k]
            if expert < -1 or expert >= expert_rank.size:
                illegal += 1
            if distinct and 0 <= expert < expert_rank.size:
                for earlier in range(k):
                    if ids[t, earlier] == expert:
                        expert = -1
                        repeats += 1
                        break
            if expert < 0 or expert >= expert_rank.size:
                slot_rank[t, k] = -1
                slot_local[t, k] = -1
                is_last[t, k] = 0
                continue
            rank = expert_rank[expert]
            slot_rank[t, k] = rank
            slot_local[t, k] = expert_local[expert]
            if last_token[rank] == t:
                is_last[t, last_slot[rank]] = 0
            else:
                last_token[rank] = t
                offsets[rank + 1] += 1
            is_last[t, k] = 1
            last_slot[rank] = k
    for rank in range(num_ranks):
        offsets[rank + 1] += offsets[rank]
    tokens = np.empty(offsets[num_ranks], np.int32)
    cursor = offsets[:num_ranks].copy()
    last_token[:] = -1
    for t in range(num_tokens):
        for k in range(num_topk):
            rank = slot_rank[t, k]
            if rank >= 0 and last_token[rank] != t:
                last_token[rank] = t
                tokens[cursor[rank]] = t
                cursor[rank] += 1
    return slots, offsets, tokens, shares, repeats, illegal


@njit(nogil=True, cache=KEEP)
def first_illegal(topk_idx, num_experts):
    """(token, slot) of the first id outside [-1, num_experts), or (-1, -1)."""
    for t in range(topk_idx.shape[0]):
        for k in range(topk_idx.shape[1]):
            if topk_idx[t, k] < -1 or topk_idx[t, k] >= num_experts:
                return t, k
    return -1, -1


@njit(nogil=True, cache=KEEP)
def first_repeat(topk_idx):
    """(token, slot) of the first id that its token already named, or (-1, -1)."""
    for t in range(topk_idx.shape[0]):
        for k in range(topk_idx.shape[1]):
            for earlier in range(k):
                if topk_idx[t, k] >= 0 and topk_idx[t, earlier] == topk_idx[t, k]:
                    return t, k
    return -1, -1


@njit(nogil=True, cache=KEEP)
def move_rows(source, destination, num_bytes, stream=False):
    """Copy `num_bytes` from every source[i] to destination[i] (int64 addresses). Bytes moved: 2 * rows * num_bytes.

    `stream` bypasses the caches: without it a store first reads the line that it overwrites, which makes 3 * rows *
    num_bytes. It pays when the rows are too many to be found in a cache afterwards.
    """
    if stream:
        for i in range(source.size):
            stream_bytes(destination[i], source[i], num_bytes)
        store_fence()
    else:
        for i in range(source.size):
            copy_bytes(destination[i], source[i], num_bytes)


@njit(nogil=True, cache=KEEP)
def gather_rows(source, tokens, out, stride, num_bytes, stream=False):
    """Copy row tokens[i] of `source`, rows of `num_bytes`, to address out + i * stride.

    `stream` as in move_rows. Bytes moved: 2 * rows * num_bytes.
    Worked example: tokens = [3, 5] copies rows 3 and 5 to `out` and `out + stride`.
    """
    for i in range(tokens.size):
        if stream:
            stream_bytes(out + i * stride, source + tokens[i] * num_bytes, num_bytes)
        else:
            copy_bytes(out + i * stride, source + tokens[i] * num_bytes, num_bytes)
    store_fence()


@njit(nogil=True, cache=KEEP)
def place_rows(first, stride, offsets, own, tokens, rows, out, num_bytes, stream=False):
    """Copy arrival i to row rows[i, k] of `out`, wherever that is >= 0.

    first [R] int64, offsets [R + 1], rows [m, K] int64: arrivals offsets[r]:offsets[r + 1] lie `stride` apart from
    first[r] on, 0 = not here. Those of rank `own` (-1 = none) are rows tokens[i] of the caller's input at first[own].
    `out` is the address of row 0; rows of `num_bytes`. Bytes moved: 2 * num_bytes per filled row.
    Worked example: first = [1000, 5000], stride = 100, offsets = [0, 2, 3], own = 1, tokens = [0, 1, 7] and num_bytes =
    10 read from 1000, 1100 and 5070; rows = [[0, 2], [1, -1], [-1, 3]] copy them to rows 0 and 2, to row 1, to row 3.
    """
    for rank in range(first.size):
        if first[rank] == 0:
            continue
        for i in range(offsets[rank], offsets[rank + 1]):
            at = tokens[i] * num_bytes if rank == own else (i - offsets[rank]) * stride
            for k in range(rows.shape[1]):
                if rows[i, k] >= 0:
                    if stream:
                        stream_bytes(out + rows[i, k] * num_bytes, first[rank] + at, num_bytes)
                    else:
                        copy_bytes(out + rows[i, k] * num_bytes, first[rank] + at, num_bytes)
    store_fence()


@njit(nogil=True, cache=KEEP)
def scatter_rows(source, tokens, records, stride, num_bytes, stream=False):
    """Copy source[i, k] (address, 0 = none) to the record of (token tokens[i], slot k), `stride` apart from `records`.

    source [m, K] int64, tokens [m] int32. Bytes moved: 2 * num_bytes per row.
    Worked example, K = 2: tokens = [3], source = [[0, a]] copies from a to records + (3 * 2 + 1) * stride.
    """
    num_topk = source.shape[1]
    for i in range(tokens.size):
        for k in range(num_topk):
            if source[i, k] != 0:
                place = records + (np.int64(tokens[i]) * num_topk + k) * stride
                if stream:
                    stream_bytes(place, source[i, k], num_bytes)
                else:
                    copy_bytes(place, source[i, k], num_bytes)
    store_fence()


@njit(nogil=True, cache=KEEP)
def outgoing_rows(rows, y, num_bytes, offsets):
    """The address of every row to send back, and how many go to each rank: table [m, K] int64 (0 = none), counts [R].

    rows [m, K] are rows of `num_bytes` at address `y`, -1 = none; arrivals offsets[r]:offsets[r + 1] came from rank r.
    """
    table = np.zeros(rows.shape, np.int64)
    counts = np.zeros(offsets.size - 1, np.int64)
    for rank in range(counts.size):
        for i in range(offsets[rank], offsets[rank + 1]):
            for k in range(rows.shape[1]):
                if rows[i, k] >= 0:
                    table[i, k] = y + rows[i, k] * num_bytes
                    counts[rank] += 1
    return table, counts


@njit(nogil=True, cache=KEEP)
def expected_rows(slots, per_token, brought, records, apart, stride):
    """Where the rows that combine brings lie, how many never come, and whether each rank brought what it had to.

    slots as of `route`; a row per slot if `per_token`, else one per (token, rank), at its last slot.
    brought [R] int64: rows, negative = a masked rank; rank r's records begin at records + r * apart, `stride` apart.
    -> table [T, K] int64 addresses (0 = no row), missing, agrees.
    """
    slot_rank, is_last = slots[0], slots[2]
    num_topk = slot_rank.shape[1]
    table = np.zeros(slot_rank.shape, np.int64)
    outstanding = brought.copy()
    missing = 0
    for t in range(slot_rank.shape[0]):
        for k in range(num_topk):
            rank = slot_rank[t, k]
            if rank < 0 or not (per_token or is_last[t, k] != 0):
                continue
            if brought[rank] >= 0:
                table[t, k] = records + rank * apart + (t * num_topk + k) * stride
                outstanding[rank] -= 1
            else:
                missing += 1
    agrees = True
    for rank in range(brought.size):
        agrees = agrees and (outstanding[rank] == 0 or brought[rank] < 0)
    return table, missing, agrees


@njit(nogil=True, cache=KEEP)
def overlay_rows(table, tokens, rows, first, end):
    """table[tokens[i], k] = rows[i, k] wherever that is an address, for i from `first` to before `end`.

    table [T, K], rows [m, K] int64, tokens [m] int32.
    Worked example: table = [[1, 2], [3, 4]], tokens = [0, 1], rows = [[8, 8], [0, 9]], first = 1, end = 2 makes table
    [[1, 2], [3, 9]].
    """
    for i in range(first, end):
        for k in range(table.shape[1]):
            if rows[i, k] != 0:
                table[tokens[i], k] = rows[i, k]


@njit(nogil=True, cache=KEEP)
def write_routing(at, tokens, rank, slots, weights):
    """Write the routing of rows for `rank` to address `at`: for every token its local ids, weights and index, int32
    and float32 [2 * K + 1] each. `slots` as of `route`.

    Worked example, K = 2: token 5 with ranks [1, 0], local experts [3, 4] and weights [0.5, 2.0] is, for rank 1,
    3, -1, 0.5, 0.0, 5.
    """
    slot_rank, slot_local = slots[0], slots[1]
    num_topk = slot_rank.shape[1]
    width = 2 * num_topk + 1
    ints, floats = view(at, tokens.size * width, np.int32), view(at, tokens.size * width, np.float32)
    for i in range(tokens.size):
        t, first = tokens[i], i * width
        for k in range(num_topk):
            here = slot_rank[t, k] == rank
            ints[first + k] = slot_local[t, k] if here else np.int32(-1)
            floats[first + num_topk + k] = weights[t, k] if here else np.float32(0)
        ints[first + 2 * num_topk] = t


@njit(nogil=True, cache=KEEP)
def read_routing(at, apart, offsets, num_topk):
    """What `write_routing` wrote on every rank: rows offsets[r]:offsets[r + 1] begin at address at + r * apart.

    -> topk_idx [m, K] int32, weights [m, K] float32, tokens [m] int32.
    """
    width = 2 * num_topk + 1
    num_rows = offsets[-1]
    topk_idx = np.empty((num_rows, num_topk), np.int32)
    weights = np.empty((num_rows, num_topk), np.float32)
    tokens = np.empty(num_rows, np.int32)
    for rank in range(offsets.size - 1):
        count = (offsets[rank + 1] - offsets[rank]) * width
        ints, floats = view(at + rank * apart, count, np.int32), view(at + rank * apart, count, np.float32)
        for i in range(offsets[rank], offsets[rank + 1]):
            first = (i - offsets[rank]) * width
            for k in range(num_topk):
                topk_idx[i, k] = ints[first + k]
                weights[i, k] = floats[first + num_topk + k]
            tokens[i] = ints[first + 2 * num_topk]
    return topk_idx, weights, tokens


@njit(nogil=True, cache=KEEP)
def arrange(topk_idx, num_local_experts, alignment, room, compact):
    """The output row of every received selection, before any row has moved.

    topk_idx [m, K] int32 local ids, -1 = none -> rows [m, K] int64 (-1 = none) and groups int64 [3, L + 1], one column
    per expert and a last one: selections per expert; rows of its group (`room`, or, if that is 0, the selections
    rounded up to `alignment`); where the group begins, and last where they end.

    With `compact` row i is arrival i, at its highest slot; else rows of one expert follow in the order of arrivals,
    which is (source rank, source token), then slot.

    Worked example: topk_idx = [[0, 1], [1, -1], [0, 0]], L = 2, alignment = 4 gives groups = [[3, 2, 0], [4, 4, 0],
    [0, 4, 8]] and rows = [[0, 4], [5, -1], [1, 2]]; with `compact` rows = [[-1, 0], [1, -1], [-1, 2]].
    """
    num_rows, num_topk = topk_idx.shape
    groups = np.zeros((3, num_local_experts + 1), np.int64)
    counts, padded, offsets = groups[0], groups[1], groups[2]
    for i in range(num_rows):
        for k in range(num_topk):
            if topk_idx[i, k] >= 0:
                counts[topk_idx[i, k]] += 1
    for expert in range(num_local_experts):
        padded[expert] = room if room > 0 else (counts[expert] + alignment - 1) // alignment * alignment
        offsets[expert + 1] = offsets[expert] + padded[expert]
    rows = np.full((num_rows, num_topk), -1, np.int64)
    cursor = offsets[:num_local_experts].copy()
    for i in range(num_rows):
        last = -1
        for k in range(num_topk):
            expert = topk_idx[i, k]
            if expert >= 0:
                last = k
                if not compact:
                    rows[i, k] = cursor[expert]
                    cursor[expert] += 1
        if compact and last >= 0:
            rows[i, last] = i
    return rows, groups


@njit(nogil=True, cache=KEEP, error_model="numpy")
def _add_bf16(total, row):
    for h in range(row.size):
        total[h] += bits_float(np.uint32(row[h]) << np.uint32(16))


@njit(nogil=True, cache=KEEP, error_model="numpy")
def _add_weighted_bf16(total, row, weight):
    for h in range(row.size):
        total[h] += weight * bits_float(np.uint32(row[h]) << np.uint32(16))


@njit(nogil=True, inline="always")
def _plus_four(found, rows, weights, h):
    """Four weighted values, added one after the other. A weight of 1 changes no bit."""
    found += weights[0] * bits_float(np.uint32(rows[0][h]) << np.uint32(16))
    found += weights[1] * bits_float(np.uint32(rows[1][h]) << np.uint32(16))
    found += weights[2] * bits_float(np.uint32(rows[2][h]) << np.uint32(16))
    found += weights[3] * bits_float(np.uint32(rows[3][h]) << np.uint32(16))
    return found


@njit(nogil=True, cache=KEEP, error_model="numpy")
def _add_four_bf16(total, rows, weights):
    for h in range(total.size):
        total[h] = _plus_four(total[h], rows, weights, h)


@njit(nogil=True, cache=KEEP, error_model="numpy")
def _add_eight_bf16(total, rows, weights, more, shares):
    for h in range(total.size):
        total[h] = _plus_four(_plus_four(total[h], rows, weights, h), more, shares, h)


@njit(nogil=True, inline="always")
def _four(operands, weights, slots, weighted, offset, width):
    """Four rows of `width` from byte `offset` on, and their weights."""
    a, b, c, d = slots[0], slots[1], slots[2], slots[3]
    rows = (
        view(operands[a] + offset, width, np.uint16),
        view(operands[b] + offset, width, np.uint16),
        view(operands[c] + offset, width, np.uint16),
        view(operands[d] + offset, width, np.uint16),
    )
    one = np.float32(1)
    return rows, (weights[a], weights[b], weights[c], weights[d]) if weighted else (one, one, one, one)


@njit(nogil=True, cache=KEEP, error_model="numpy")
def _add_float32(total, row, weight, weighted):
    for h in range(row.size):
        total[h] += weight * row[h] if weighted else row[h]


@njit(nogil=True, cache=KEEP, error_model="numpy")
def _only_bf16(row, out):
    """bfloat16(0 + row): the row itself, but for -0, which becomes +0, and NaN, which becomes 0x7fc0."""
    for h in range(out.size):
        bits = np.uint16(row[h])
        magnitude = np.uint16(bits & np.uint16(0x7FFF))
        kept = np.uint16(0x7FC0) if magnitude > np.uint16(0x7F80) else bits
        out[h] = np.uint16(0) if magnitude == np.uint16(0) else kept


@njit(nogil=True, cache=KEEP, error_model="numpy")
def _round_bf16(total, out):
    """Round to nearest even; NaN becomes the quiet NaN 0x7fc0 as torch's cast does."""
    for h in range(out.size):
        bits = float_bits(total[h])
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        out[h] = np.uint16(0x7FC0) if is_nan else np.uint16(rounded)


@njit(nogil=True, cache=KEEP, error_model="numpy")
def reduce_rows(operands, is_float32, weights, weighted, biases, out, hidden, stream=False):
    """out[i] = bfloat16(0 + biases + sum over k of weights[i, k] * row at operands[i, k]), in float32, k ascending.

    operands [n, K] int64 addresses of rows of `hidden` bfloat16 (or float32) values, 0 = no row; weights [n, K] float32
    used if `weighted`; biases int64 addresses of [n, hidden] bfloat16; out the address of such. Products and sums are
    not fused. `stream` as in move_rows. Bytes moved: 2 * hidden * (rows + n) for bfloat16.

    Worked example, hidden 1: rows 1.0 and 3.0 with weights 0.5 and 2.0 and bias 1.0 give 0 + 1 + 0.5 + 6 = 7.5.
    """
    total = np.empty(_BLOCK, np.float32)
    rounded = np.empty(_BLOCK, np.uint16)
    slots = np.empty(operands.shape[1], np.int64)
    for i in range(operands.shape[0]):
        begin = 2 * hidden * i
        count = 0
        for k in range(operands.shape[1]):
            if operands[i, k] != 0:
                slots[count] = k
                count += 1
        alone = count == 1 and not (weighted or is_float32 or biases.size > 0)
        for first in range(0, hidden, _BLOCK):
            width = min(_BLOCK, hidden - first)
            part = rounded[:width]
            if alone:
                _only_bf16(view(operands[i, slots[0]] + 2 * first, width, np.uint16), part)
            else:
                total[:] = np.float32(0)
                for bias in biases:
                    _add_bf16(total, view(bias + begin + 2 * first, width, np.uint16))
                at = 0
                if not is_float32:
                    while at + 4 <= count:
                        rows, shares = _four(operands[i], weights[i], slots[at:], weighted, 2 * first, width)
                        at += 4
                        if at + 4 <= count:
                            more, others = _four(operands[i], weights[i], slots[at:], weighted, 2 * first, width)
                            _add_eight_bf16(total[:width], rows, shares, more, others)
                            at += 4
                        else:
                            _add_four_bf16(total[:width], rows, shares)
                for k in slots[at:count]:
                    address = operands[i, k]
                    if is_float32:
                        _add_float32(total, view(address + 4 * first, width, np.float32), weights[i, k], weighted)
                    elif weighted:
                        _add_weighted_bf16(total, view(address + 2 * first, width, np.uint16), weights[i, k])
                    else:
                        _add_bf16(total, view(address + 2 * first, width, np.uint16))
                _round_bf16(total, part)
            if stream:
                stream_bytes(out + begin + 2 * first, rounded.ctypes.data, 2 * width)
            else:
                copy_bytes(out + begin + 2 * first, rounded.ctypes.data, 2 * width)
    store_fence()

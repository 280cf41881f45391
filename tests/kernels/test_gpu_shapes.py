"""Shapes at the ends of what `Buffer` takes, and between: on a GPU, bit for bit against the oracle."""

import on_gpu
import pytest
from device_checks import COMPACT, MAJOR, SLOTS, arrive, output_of_experts, same_dispatch

import expertwire as ew
from expertwire import reference
from expertwire.formats import BF16, FP8Block, LogFMT10
from expertwire.testing import assert_equal, random_rows, random_weights, run_processes, uniform_routing, with_holes

pytestmark = on_gpu.MARKS

# ranks, hidden, top-k, experts, tokens of rank 0 (others have fewer, one of them none)
SHAPES = [
    (1, 8, 1, 1, 5),
    (2, 24, 64, 64, 7),
    (3, 7168, 64, 4096, 9),
    (5, 1032, 9, 37, 33),
    (1, 32768, 2, 3, 17),
    (16, 256, 6, 160, 5),
    (1, 2880, 4, 128, 130),
    (4, 5120, 17, 333, 65),
    (2, 16, 4, 24, 4200),  # a plan of many blocks
]
WIRES = [BF16(), FP8Block(), FP8Block(scale="ue8m0")]


def check_shape(rank, hidden, topk, experts, most, layout, wire, back_wire):
    tokens = [most if r == 0 else (most * (r + 3) // (r + 4) if r != 1 else 0) for r in range(rank.num_ranks)]
    xs = [random_rows(r, n, hidden, scale=3.0) for r, n in enumerate(tokens)]
    ids = [with_holes(uniform_routing(r, n, topk, experts), r) for r, n in enumerate(tokens)]
    weights = [random_weights(r, n, topk) for r, n in enumerate(tokens)]
    options = {"num_experts": experts, "hidden": hidden, "num_topk": topk, "num_max_tokens_per_rank": most}
    mine = rank.rank
    with ew.Buffer(rank, device="cuda", timeout_s=20.0, **options) as buf:
        routing = reference.route(ids, weights, placement=buf.settings.placement, layout=layout, capacity=most)
        want = reference.dispatch(xs, routing, wire)
        y = [random_rows(50 + r, part.x.numel() // hidden, hidden, scale=0.2) for r, part in enumerate(want)]
        summed = reference.combine(y, routing, wire=back_wire)[mine].x
        x, on_device, values = xs[mine].cuda(), ids[mine].cuda(), weights[mine].cuda()
        for counts in ("host", "device"):
            sent = buf.dispatch(x, on_device, values, layout=layout, wire=wire, counts=counts)
            arrive("cuda")
            same_dispatch(sent, want[mine], layout, counts)
            back = buf.combine(output_of_experts(sent, y[mine]), sent.handle, wire=back_wire)
            arrive("cuda")
            assert_equal(back.x.cpu(), summed)


def run_world(group, num_ranks, *arguments):
    ew.World(num_ranks, device="cuda").run(lambda rank: check_shape(rank, *arguments))


@pytest.mark.parametrize("layout", [SLOTS, MAJOR, COMPACT], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "{}r-{}h-{}k-{}e-{}t".format(*shape))
def test_shapes(monkeypatch, shape, layout):
    num_ranks, *sizes = shape
    nth = SHAPES.index(shape) + [SLOTS, MAJOR, COMPACT].index(layout)
    arguments = (*sizes, layout, WIRES[nth % len(WIRES)], LogFMT10() if nth % 4 == 0 else None)
    if num_ranks > 8:  # in a process of its own, which finds that many hardware queues when it begins
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        run_processes(1, run_world, num_ranks, *arguments)
    else:
        ew.World(num_ranks, device="cuda").run(lambda rank: check_shape(rank, *arguments))

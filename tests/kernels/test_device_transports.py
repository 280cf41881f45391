"""Which transport joins GPUs, and what is said where none does: everything that needs no GPU."""

import inspect
import os
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

import expertwire as ew
from expertwire.engines import device_memory, device_transport_name
from expertwire.transports import gpus
from expertwire.transports.device import CudaIpc, InprocDevice, SymmMem
from expertwire.transports.gpus import Seat
from expertwire.transports.inproc import Crew, Rank
from expertwire.world import device_unavailable

THREADS, PROCESSES = Rank(Crew(2), 0), SimpleNamespace(rank=0, num_ranks=2)
HERE, BESIDE = (Seat("a", f"uuid{i}", i, "H200", 132) for i in range(2))


def test_names(monkeypatch):
    chosen = []
    monkeypatch.setattr("torch.distributed._symmetric_memory.set_backend", chosen.append)
    assert device_transport_name("auto", THREADS) == "inproc"
    assert device_transport_name("auto", PROCESSES) == "cuda_ipc"
    for name in ("cuda_ipc", "symm_mem"):
        assert device_transport_name(name, PROCESSES) == name
    assert chosen == ["CUDA"]


@pytest.mark.parametrize(
    ("name", "group", "message"),
    [
        ("cuda_ipc", THREADS, "threads of one ew.World; use 'inproc'"),
        ("symm_mem", THREADS, "threads of one ew.World; use 'inproc'"),
        ("inproc", PROCESSES, "processes; use 'cuda_ipc' or 'symm_mem'"),
        ("nvshmem", PROCESSES, "does not exist yet.*within one host 'cuda_ipc'"),
        ("nvshmem", THREADS, "does not exist yet"),
    ],
)
def test_what_does_not_fit_the_group(name, group, message):
    with pytest.raises(ew.TransportUnavailable, match=message):
        device_transport_name(name, group)


def test_a_name_that_nobody_knows():
    with pytest.raises(ew.InvalidArgument, match=r"'inproc', 'cuda_ipc', 'symm_mem', got 'nvlink'"):
        device_transport_name("nvlink", PROCESSES)


def test_torch_without_symmetric_memory(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ew.TransportUnavailable, match=r"install torch >= 2.10, or use 'cuda_ipc'"):
        device_transport_name("symm_mem", PROCESSES)


def test_what_joins_the_ranks():
    assert gpus.cuda_ipc_problem([HERE, HERE]) is None
    for seats in ([HERE], [HERE, BESIDE]):
        assert gpus.cuda_ipc_problem(seats) is None
        assert gpus.symm_mem_problem(seats) is None
    assert gpus.symm_mem_problem([HERE, replace(HERE, host="b", uuid="other")]) is None


FAR = replace(BESIDE, unreachable=("uuid0",))


@pytest.mark.parametrize(
    ("transport", "seats", "message"),
    [
        ("symm_mem", [BESIDE, HERE, HERE], "ranks 1 and 2 share cuda:0 of a .H200..*or use 'cuda_ipc'"),
        ("symm_mem", [HERE, replace(HERE, uuid="other")], "both call theirs cuda:0.*CUDA_VISIBLE_DEVICES"),
        ("symm_mem", [HERE, FAR], "rank 0 on cuda:0 of a .H200. and rank 1 on cuda:1 of a .H200. have no peer access"),
        ("cuda_ipc", [HERE, BESIDE, FAR], "rank 0 .* and rank 2 .* have no peer access.*nvidia-smi topo"),
        ("cuda_ipc", [HERE, replace(BESIDE, host="b")], "rank 0 is on a and rank 1 on b; use 'symm_mem'"),
    ],
)
def test_what_does_not_join_them(transport, seats, message):
    """Said before memory is taken, and, since all ranks know all seats, on all of them."""
    for rank in range(2):
        group = SimpleNamespace(rank=rank, num_ranks=len(seats))
        with pytest.raises(ew.TransportUnavailable, match=f"rank {rank}: .*{message}"):
            device_memory(group, transport, torch.device("cuda", 0), seats)


def test_a_seat_lists_gpus_that_it_cannot_reach(monkeypatch):
    facts = [SimpleNamespace(uuid=f"uuid{i}", name="T4", multi_processor_count=40) for i in range(3)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: facts[getattr(d, "index", d)])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: {a, b} == {0, 1})
    assert gpus.seat(torch.device("cuda", 0)).unreachable == ("uuid2",)
    assert gpus.seat(torch.device("cuda", 2)).unreachable == ("uuid0", "uuid1")


def test_a_peers_memory_is_mapped_for_the_own_gpu():
    """By the names of the parameters of torch's own function, which this test pins."""
    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    given = [f"theirs {name}" for name in names]
    seen = {}

    def rebuild(*args):
        seen.update(zip(names, args, strict=True))

    rebuild.__signature__ = inspect.signature(rebuild_cuda_tensor)
    CudaIpc(PROCESSES, torch.device("cuda", 3))._map(rebuild, tuple(given))
    changed = {name: value for name, value in seen.items() if value != f"theirs {name}"}
    assert changed == {"storage_device": 3, "event_sync_required": False}


def test_symmetric_memory_never_uses_multicast(monkeypatch):
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0")
    SymmMem(SimpleNamespace(rank=0, num_ranks=1, process_group=None), torch.device("cuda", 0))
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"


def test_another_backend_in_use_is_said(monkeypatch):
    """Before memory is taken, so that the peers hear of it."""

    def refuse(name):
        raise RuntimeError("Backend can not be changed after use.\nframes")

    monkeypatch.setattr("torch.distributed._symmetric_memory.set_backend", refuse)
    with pytest.raises(
        ew.TransportUnavailable, match=r"\(Backend can not be changed after use\.\); unset TORCH_SYMMMEM"
    ):
        device_transport_name("symm_mem", PROCESSES)


def test_only_the_current_gpu_is_taken(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert device_unavailable("cuda") is None
    assert device_unavailable("cuda:1") is None
    assert "current GPU of this process is cuda:1" in device_unavailable("cuda:0")


def test_without_memory_on_one_rank_all_raise(monkeypatch):
    """And the next kind of call works."""
    empty, lacking = torch.empty, [1]

    def limited(*size, **options):
        if lacking and options.get("dtype") is torch.uint8 and limited.rank.number in lacking:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty(*size, **options)

    limited.rank = threading.local()

    def work(rank):
        limited.rank.number = rank.rank
        memory = InprocDevice(rank, torch.device("cpu"))
        with pytest.raises(ew.TransportUnavailable, match=r"rank\(s\) 1 have no memory left .* 64 bytes"):
            memory.allocate(64)
        rank.barrier()
        lacking.clear()
        rank.barrier()
        return memory.allocate(64)[0].tolist()

    monkeypatch.setattr(torch, "empty", limited)
    assert ew.World(2).run(work) == [[0] * 64] * 2


def test_memory_is_new_and_its_addresses_are_everybodys(monkeypatch):
    """With torch's calls replaced: what is asked of them, and that memory is kept until close."""
    made, met = [], []

    def empty(size, stride, dtype, device):
        made.append(torch.full(size, 7, dtype=dtype))
        return made[-1]

    def rendezvous(tensor, group):
        met.append((tensor.data_ptr(), tensor.numel(), group, int(tensor.sum())))
        return SimpleNamespace(buffer_ptrs=[tensor.data_ptr(), 4096])

    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    monkeypatch.setattr("torch.distributed._symmetric_memory.rendezvous", rendezvous)
    monkeypatch.setattr("torch._C._distributed_c10d._SymmetricMemory", SimpleNamespace(empty_strided_p2p=empty))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    group = SimpleNamespace(rank=0, num_ranks=2, process_group="group", all_gather=lambda size: [size, size + 32])
    memory = SymmMem(group, torch.device("cuda", 0))
    own, addresses = memory.allocate(64)
    assert own.numel() == 64
    assert addresses == [own.data_ptr(), 4096]
    assert met == [(own.data_ptr(), 96, "group", 0)]  # zeroed before peers see it; as much as the peer takes
    assert len(memory._kept) == 1
    memory.close()
    assert memory._kept == []


@pytest.mark.parametrize(
    ("num_ranks", "queues", "message"),
    [
        (8, None, None),
        (9, None, r"9 ranks need a hardware queue each, .* allows 8 .*set CUDA_DEVICE_MAX_CONNECTIONS=9 before"),
        (32, "32", None),
        (2, "1", "set CUDA_DEVICE_MAX_CONNECTIONS=2"),
        (33, "32", "use processes, or fewer ranks"),
    ],
)
def test_virtual_ranks_have_a_hardware_queue_each(monkeypatch, num_ranks, queues, message):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setattr("expertwire.world.device_unavailable", lambda device: None)
    if queues:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    if message is None:
        assert ew.World(num_ranks, device="cuda").num_ranks == num_ranks
    else:
        with pytest.raises(ew.TransportUnavailable, match=message):
            ew.World(num_ranks, device="cuda")

"""The host's side of a rank on a device: time-outs, failures, and kernels that are compiled before anybody waits."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch

from expertwire.errors import MissedSignal, PeerLost, PeerRefused, PeerTimeout, TransportUnavailable
from expertwire.kernels.engine import DeviceEngine
from expertwire.kernels.masking import newest_step, restart
from expertwire.kernels.meeting import Meeting
from expertwire.kernels.names import CallNames
from expertwire.kernels.part import Part
from expertwire.kernels.poison import broken_guards
from expertwire.kernels.state import DeviceMemory
from expertwire.layouts.receive import Layout
from expertwire.protocols.epoch_signal import REFUSED, unpack

PHASES = {1: "dispatch send", 2: "dispatch receive", 3: "dispatch send", 4: "combine receive", 5: "combine receive"}
LANES = ("dispatch", "combine")
_MOST_US = (1 << 31) - 1


class Said(NamedTuple):
    """What a peer said in a void step, REFUSED or the name of another call than the `own` one."""

    lane: str
    bank: int
    peer: int
    own: int
    theirs: int


class DeviceRuntime:
    """What `Buffer` needs of a device, under the names that `host.runtime.HostRuntime` has."""

    def __init__(
        self, engine: DeviceEngine, memory: DeviceMemory, timeout_s: float | None, *,
        meeting: Meeting | None = None, sharing: bool = True, mask_peers: bool = False, end_late: bool = False,
    ) -> None:  # fmt: skip
        """Collective. `sharing`: some ranks share a GPU. Without a `meeting`, a rank that refuses the first call of a
        kind keeps its peers waiting. `mask_peers`: ranks that have left may be left behind, `end_late`: and others that
        do not come, when they have been ended."""
        self.engine, self.memory, self.meeting, self.sharing = engine, memory, meeting, sharing
        self.masked_ranks: tuple[int, ...] = ()
        self.restarts = 0
        self._masking, self._end_late = meeting if mask_peers else None, end_late
        if self._masking is not None:
            memory.gather_by(self._masking.all_gather)
        self.closed = False
        self._known: set[Hashable] = set()
        self.names = CallNames()
        self.rehearsing = False
        self._records = engine.state.mirror.numpy()
        self._clean = self._records.tobytes()
        self._news = engine.state.news.numpy()
        self._told = self._news.copy()
        on_cuda = engine.state.device.type == "cuda"
        self._pinned = torch.zeros(
            max(engine.state.parts.size, 2 * engine.state.tally.numel()), dtype=torch.int32, pin_memory=on_cuda
        )
        self.timeout_s = timeout_s
        self.compile(self._always)

    def _always(self) -> None:
        """What a call may need whatever its kind, also one that is refused."""
        engine, state = self.engine, self.engine.state
        engine.refuse_dispatch(0)
        nothing = torch.empty(0, engine.num_topk, dtype=torch.int32, device=state.device)
        for step in (None, state.step(0, Layout.COMPACT, nothing, None)):
            engine.refuse_combine(step)
        engine.give_back(0)
        for values in (state.int32([0, 0]), state.int32([0] * state.parts.size), state.tally.view(torch.int32)):
            engine.export(values, self._pinned)
        for dtype in (torch.int32, torch.int64):
            ids = state.empty(dtype, 0, engine.num_topk)
            engine.export(engine.check_ids(ids, distinct=True), self._pinned)

    @property
    def timeout_s(self) -> float | None:
        """Kernels count microseconds in 32 bits: None, and all that is more, are 35 minutes."""
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float | None) -> None:
        self._timeout_s = value
        self.engine.state.timeout_us = _MOST_US if value is None else max(1, round(min(_MOST_US, value * 1e6)))

    def knows(self, kind: tuple[object, ...]) -> bool:
        """Whether a call of this kind may be launched as it is."""
        return kind in self._known

    def meet(self, kind: tuple[object, ...], call: int, what: str, prepare: Callable[[], None]) -> None:
        """Before the first call of a kind, `prepare` compiles and loads its kernels and shares memory on all ranks:
        loading waits for the GPU, where another rank's kernel may wait for this rank. Collective then, so a kind says
        only what is the same on all ranks, and begins with the lane; `what` says the same in words. Its last field says
        whether gradients are needed; a kind without them is known with it.

        PeerRefused if a peer refuses this call, GroupMismatch if it makes another one: nothing was launched here.
        """
        self._raise_if_capturing()
        self._arrive(call, 0)
        self.engine.state.meet(f"call {kind[0]}", what)
        self.compile(prepare)
        self._arrive(call, 1)
        self._known |= {kind, (*kind[:-1], False)}

    def pass_by(self, call: int) -> None:
        """Before a call of a known kind: ranks to which it is new do not wait for this one."""
        if self.meeting is not None and not self.engine.state.capturing:
            self.meeting.pass_by(call)

    def _arrive(self, call: int, stage: int) -> None:
        if self.meeting is not None:
            refused = self.meeting.arrive(call, stage, self.timeout_s if stage == 0 else None)  # compilers take long
            if refused:
                raise PeerRefused(refusal(self.engine.rank, refused, "this call"), refused)
        elif self.engine.num_ranks > 1:
            self.memory.all_gather(None)

    def launch(self, kind: tuple[object, ...], launches: Callable[[], None]) -> None:
        """Run `launches`; the first time for a kind compile and load first, where ranks share a GPU all together. For
        what follows on a call that all ranks have made: a rank that does not come would not be noticed."""
        if kind not in self._known:
            self._raise_if_capturing()
            self.compile(launches)
            if self.sharing and self.engine.num_ranks > 1:
                self.engine.state.meet("load kernels", str(kind[0]))
            self._known.add(kind)
        if not self.rehearsing:
            launches()

    def compile(self, prepare: Callable[[], None]) -> None:
        """What `prepare` launches is compiled and loaded, not run."""
        before, self.engine.launch.compiling = self.engine.launch.compiling, True
        try:
            prepare()
        finally:
            self.engine.launch.compiling = before

    def _raise_if_capturing(self) -> None:
        if self.engine.state.capturing:
            raise TransportUnavailable(
                f"rank {self.engine.rank}: this kind of call cannot be captured before it has run once, since its "
                "kernels must be compiled and its memory shared: call it once outside of the capture"
            )

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Inside, kernels are compiled, not started."""
        self.rehearsing = True
        try:
            yield
        finally:
            self.rehearsing = False

    def read(self, values: torch.Tensor | Part) -> list[int]:
        """int32 values of the device, once everything launched before is done. PeerTimeout if a kernel gave up."""
        size = values.numel()
        self.engine.export(values, self._pinned)
        self.synchronize()
        return [int(n) for n in self._pinned[:size].tolist()]

    def totals(self) -> tuple[list[int], list[int], int]:
        """Rows sent and rows received, per peer, and dropped selections. Waits for the device."""
        ranks = self.engine.num_ranks
        self.read(self.engine.state.tally.view(torch.int32))
        found = self._pinned.numpy()[: 4 * ranks + 2].view(np.int64).tolist()
        return found[:ranks], found[ranks : 2 * ranks], found[2 * ranks]

    def synchronize(self) -> None:
        """Wait until everything launched before is done. PeerTimeout if a kernel gave up."""
        if self.engine.state.device.type == "cuda":
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
            done.synchronize()
        self.raise_if_failed()

    # -- ranks that do not come ----------------------------------------------------------------------------------

    @property
    def masks(self) -> bool:
        """Whether ranks can be masked."""
        return self._masking is not None

    def must_agree(self) -> bool:
        """Whether a rank has left that is to be masked, or a peer wants to agree who has."""
        return self._masking is not None and (bool(self._masking.left()) or self._masking.summoned())

    def mask(self, epoch: int) -> tuple[list[int], int]:
        """Mask the ranks that have left, and void all that is in flight. Collective among the others, whose waits end
        in time, so that they come here too; returns who was masked, and the largest `epoch` of all ranks."""
        state, meeting = self.engine.state, self._masking
        assert meeting is not None
        before, restarted = set(meeting.masked), None
        timeout_s = None if self.timeout_s is None else 2 * self.timeout_s + 10.0
        self._drain()
        newest = newest_step(state)
        while True:
            newest, epoch = meeting.agree((newest, epoch), timeout_s, end_late=self._end_late)
            if meeting.masked == restarted:  # everybody has restarted
                break
            restarted = set(meeting.masked)
            restart(state, restarted, newest)
        self.masked_ranks = tuple(sorted(restarted))
        self.restarts += 1
        self._told = self._news.copy()
        return sorted(restarted - before), epoch

    def _drain(self) -> None:
        """No kernel of this rank is running."""
        if self.engine.state.device.type == "cuda":
            torch.cuda.synchronize(self.engine.state.device)

    def has_news(self) -> bool:
        """Whether `news` has something to tell."""
        return self._news.tobytes() != self._told.tobytes()

    def news(self) -> list[Said]:
        """What peers have said in void steps since this was asked last. Looks at host memory only; complete after a
        synchronisation."""
        changed = (self._news != self._told).any(axis=2).nonzero()
        return [said for bank, lane in zip(*changed, strict=True) for said in self.said(int(bank), LANES[lane])]

    def said(self, bank: int, lane: str) -> list[Said]:
        """What peers have said in the last void step of this bank; it is no news any more."""
        at = (bank, LANES.index(lane))
        words = self._news[at].copy()
        found = [unpack(word) for word in words.tolist()]
        newest, (step, own) = max(epoch for epoch, _ in found), found[self.engine.rank]
        if step != newest:  # the kernel is writing it
            return []
        self._told[at] = words
        return [
            Said(lane, bank, peer, own, theirs) for peer, (epoch, theirs) in enumerate(found)
            if epoch == newest and theirs != own and (theirs == REFUSED or own != REFUSED)
        ]  # fmt: skip

    def has_failed(self) -> bool:
        """Whether a kernel gave up waiting. Looks at host memory only; complete after a synchronisation."""
        return self._records.tobytes() != self._clean

    def raise_if_failed(self) -> None:
        """PeerTimeout if a kernel gave up waiting."""
        if not self.has_failed():
            return
        missed, phase, waited = [], "dispatch send", 0
        meeting = None if self.closed else self.meeting
        for peer, (code, wanted, seen, ns) in enumerate(self._records.tolist()):
            if code:
                step, count = unpack(seen)
                said = (peer, unpack(wanted)[0], step, min(count, 0))  # what else is there is a name
                missed.append(MissedSignal(*said, alive=None) if meeting is None else meeting.missed(*said))
                phase, waited = PHASES[code], ns
        hint = "If the ranks are only slow (compiling, loading), raise buf.timeout_s."
        if self.memory.any_address:  # they are threads of one process
            hint += (
                " The first use of a kernel of your own waits for the GPU, also for a rank that waits there for this "
                "one: use it once before the first dispatch, or set CUDA_MODULE_LOADING=EAGER."
            )
        error = PeerLost if any(m.closed or m.alive is False for m in missed) else PeerTimeout
        raise error(self.engine.rank, phase, missed, waited / 1e9, hint)

    def broken_guards(self) -> list[int]:
        """Byte offsets of guards that somebody wrote to, in all memory in the order in which it was taken (with
        debug_poison only). Waits for the device."""
        if not self.engine.state.debug_poison:
            return []
        self._drain()
        return broken_guards(self.engine.state.pieces)

    def close(self) -> None:
        """Forget the windows, once this rank's kernels are done with them."""
        if not self.closed:
            self.closed = True
            self._drain()
            self.memory.close()
            if self.meeting is not None:
                self.meeting.close()


def refusal(rank: int, peers: Sequence[int], what: str) -> str:
    """The message of PeerRefused."""
    names = ", ".join(map(str, peers))
    return f"rank {rank}: {what} is void, since rank(s) {names} refused it; the error raised there says why."

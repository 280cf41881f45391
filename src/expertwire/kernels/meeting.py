"""Where ranks meet on the host: before the first call of a kind, whose kernels are compiled and whose memory is shared,
and to agree which of them have left, that is, ended or closed their buffer.

A rank that refuses a call does not come, and says so: it is not waited for, then or later. Every rank has eight words
in host memory that all of them see: how far it has come, the last call it refused, whether it has closed, the last call
of a known kind, and the last four that it refused. Calls are numbered in the same way on all ranks, and the numbers
grow. Behind the words are the pages of a `Board`.

Who makes a call of a kind that it knows meets nobody, but leaves the call's number too: a rank for which it is the
first of its kind would wait in vain.
"""

from __future__ import annotations

import time
from typing import Any

from expertwire.errors import GroupMismatch, MissedSignal, PeerLost, PeerTimeout
from expertwire.kernels.board import BOARD_BYTES, Board, HostWindows

_WORDS_BYTES = 64
MEETING_BYTES = _WORDS_BYTES + BOARD_BYTES
_AGREEING = "which ranks have left"
_PREPARING_S = 600.0  # compilers take long


class Meeting:
    """One rank's end of it. A call has two stages: 0 before anything is done, 1 when it is ready to go on."""

    def __init__(self, transport: HostWindows) -> None:
        self._transport = transport
        # 2 * call + stage, refused call, whether it has closed, call passed by, refused calls by turns
        self._words = [window[:_WORDS_BYTES].view("int64") for window in transport.windows]
        self._num_refused = 0
        self._board = Board(transport, _WORDS_BYTES, self.has_left)
        self._summoned = False  # a peer wants to agree
        self.masked: set[int] = set()

    def refuse(self, call: int) -> None:
        """This rank does not take part in the call. Waits for nobody."""
        mine = self._words[self._transport.rank]
        mine[4 + self._num_refused % 4] = mine[1] = call
        self._num_refused += 1

    def pass_by(self, call: int) -> None:
        """This rank makes the call without meeting the others."""
        self._words[self._transport.rank][3] = call

    def arrive(self, call: int, stage: int, timeout_s: float | None) -> list[int]:
        """Wait until every peer has come to this stage of this call, or refused it; returns those who did.
        GroupMismatch if some make this call without coming here."""
        transport, place = self._transport, 2 * call + stage
        self._words[transport.rank][0] = place
        words = [(peer, word) for peer, word in enumerate(self._words) if peer not in self.masked]
        began = time.monotonic()
        while True:
            missing = [peer for peer, (come, refused, *_) in words if come < place and refused < call]
            if not missing:
                break
            passed = [peer for peer in missing if self._words[peer][3] >= call]
            if passed:
                raise GroupMismatch(
                    f"rank {transport.rank}: this is the first call of its kind here, which ranks prepare together, "
                    f"but rank(s) {', '.join(map(str, passed))} make one of a kind that they know. All ranks must "
                    "pass the same settings, or prepare this kind of call with warmup()."
                )
            transport.raise_if_aborted()
            gone = [peer for peer in missing if self.has_left(peer)]
            waited = time.monotonic() - began
            if gone or (timeout_s is not None and waited > timeout_s):
                missed = [self.missed(peer, call >> 8) for peer in gone or missing]
                hint = "This was the first call of its kind, which all ranks prepare together."
                error = PeerLost if gone else PeerTimeout
                raise error(transport.rank, "meeting on the host", missed, waited, hint)
            time.sleep(min(0.001, waited / 8))
        # Nobody leaves stage 0 without this rank, unless the call is void: who is further has refused, or saw who did.
        void = [
            peer for peer, (come, refused, *_) in words
            if refused == call or come < place or (stage == 0 and come > place + 1)
        ]  # fmt: skip
        refusing = [peer for peer in void if call in self._words[peer][4:].tolist()]
        absent = [peer for peer in void if self._words[peer][0] < place]  # refused this call and a later one
        return refusing or absent or void

    def all_gather(self, value: object) -> list[Any]:
        """Every rank's value, None of masked ones. PeerLost if a rank leaves meanwhile, PeerTimeout if one has given up
        waiting and wants to agree. Collective."""
        rank, phase = self._transport.rank, "meeting on the host"
        values, left = self._board.exchange(
            ("", value), self.masked, _PREPARING_S, "sharing memory and kernels", "All ranks prepare a call together."
        )
        agreeing = {peer: said[1] for peer, said in enumerate(values) if said and said[0] == _AGREEING}
        left = left.union(*agreeing.values())
        if left:
            missed = [self.missed(peer) for peer in sorted(left)]
            raise PeerLost(rank, phase, missed, 0.0, "All ranks that are left know it.")
        if agreeing:
            self._summoned = True
            missed = [MissedSignal(peer, 0, 0, 0, True) for peer in agreeing]
            raise PeerTimeout(rank, phase, missed, 0.0, "These ranks have given up waiting for another call.")
        return [said and said[1] for said in values]

    def left(self) -> set[int]:
        """Ranks that have left and are not masked yet."""
        return {peer for peer in self._others() if self.has_left(peer)}

    def summoned(self) -> bool:
        """Whether a peer wants to agree which ranks have left."""
        next_words = map(self._board.next_of, self._others())
        return self._summoned or any(isinstance(said, tuple) and said[0] == _AGREEING for said in next_words)

    def _others(self) -> set[int]:
        return set(range(self._transport.num_ranks)) - self.masked - {self._transport.rank}

    def agree(self, numbers: tuple[int, ...], timeout_s: float | None, *, end_late: bool = False) -> tuple[int, ...]:
        """Mask the ranks that have left, the same ones on all others; returns the largest of everybody's `numbers`.
        Who does not come in time is ended, if `end_late`. Collective among those that are left; some may come from an
        `all_gather`, which they leave then."""
        self._summoned = False
        left: set[int] = set()
        while True:
            message = (_AGREEING, self.left() | left, numbers)
            values, silent = self._board.exchange(
                message, self.masked, timeout_s, "agreeing which ranks have left",
                "Only ranks that have left are masked on a GPU; on_timeout='end' ends the process of one that is late.",
                end_late=end_late,
            )  # fmt: skip
            said = [value for value in values if value is not None]
            found = silent.union(*(value[1] for value in said if value[0] == _AGREEING))
            if all(value[0] == _AGREEING and value[1] == found for value in said):
                self.masked |= found
                return tuple(map(max, *(value[2] for value in said))) if len(said) > 1 else numbers
            left = found

    def has_left(self, peer: int) -> bool:
        """Whether a peer can no longer act: its process has ended, or it has closed its buffer."""
        return self._transport.alive(peer) is False or bool(self._words[peer][2])

    def missed(self, peer: int, expected_epoch: int = 0, seen_epoch: int = 0, seen_count: int = 0) -> MissedSignal:
        """What is said of a peer that has not come."""
        alive, closed = self._transport.alive(peer), bool(self._words[peer][2])
        return MissedSignal(peer, expected_epoch, seen_epoch, seen_count, alive, closed)

    def close(self) -> None:
        """Say that this rank will not act any more. Its kernels are done."""
        if self._words:
            self._words[self._transport.rank][2] = 1
        self._words = []
        self._transport.close()

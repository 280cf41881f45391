"""Ranks as real processes of this host, with a gloo process group over the loopback interface.

`run_processes` starts them for one call. `Processes` keeps them: a process takes a second or two to start, most of it
to import torch, while a further call costs a message.
"""

from __future__ import annotations

import io
import multiprocessing
import multiprocessing.resource_tracker
import os
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from expertwire.errors import ExpertWireError


class RankError(ExpertWireError, RuntimeError):
    """A rank's process ended without an answer or gave none in time, or its error or result cannot be carried over."""


@dataclass(frozen=True)
class Outcome:
    """How a call ended on one rank: with a value, with an error, or with the process (`exit_code`, -9 = SIGKILL)."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    exit_code: int | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and self.exit_code is None


def run_processes(num_ranks: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Call `fn(group, *args)` in `num_ranks` fresh processes and return the results in rank order.

    `fn` must be importable (a function at the top of a module); arguments and results must be picklable. The first
    failure is raised here with a note that names its rank; then, and after `timeout_s`, the others are killed. No
    process is left when this returns.
    """
    with Processes(num_ranks) as processes:
        return processes.run(fn, *args, timeout_s=timeout_s)


class Processes:
    """`max_ranks` processes that serve many calls, on all of them or on the first few.

        with Processes(4) as processes:
            processes.run(fn, 1, 2)                     # fn(group, 1, 2) on ranks 0..3
            processes.run(fn, 1, 2, num_ranks=2)        # on ranks 0 and 1, with a group of two

    They start with the first call. After a failure they are killed, and the next call starts new ones. They end with
    this process, however it ends.
    """

    def __init__(self, max_ranks: int, *, start_timeout_s: float = 120.0) -> None:
        self.max_ranks = max_ranks
        self._start_timeout_s = start_timeout_s
        self._processes: list[SpawnProcess] = []
        self._pipes: list[Connection] = []
        self._groups: set[int] = set()  # sizes of the process groups that exist
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order; empty before the first call and after a failure."""
        return [process.pid for process in self._processes if process.pid is not None]

    def run(
        self, fn: Callable[..., Any], *args: Any, num_ranks: int | None = None, timeout_s: float = 120.0
    ) -> list[Any]:
        """Results of `fn(group, *args)` in rank order, or the first failure, raised."""
        outcomes = self._call(fn, args, num_ranks, timeout_s, stop_at_failure=True)
        for outcome in outcomes:  # in the order in which they came
            if not outcome.ok:
                error = outcome.error or RankError(f"the process of rank {outcome.rank} ended ({outcome.exit_code})")
                error.add_note(f"raised on rank {outcome.rank} of {num_ranks or self.max_ranks}")
                raise error
        return [outcome.value for outcome in sorted(outcomes, key=lambda o: o.rank)]

    def outcomes(
        self, fn: Callable[..., Any], *args: Any, num_ranks: int | None = None, timeout_s: float = 120.0
    ) -> list[Outcome]:
        """How `fn(group, *args)` ended on each rank, in rank order, when all have ended. For fault tests."""
        outcomes = self._call(fn, args, num_ranks, timeout_s, stop_at_failure=False)
        return sorted(outcomes, key=lambda o: o.rank)

    def _call(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        num_ranks: int | None,
        timeout_s: float,
        *,
        stop_at_failure: bool,
    ) -> list[Outcome]:
        """Outcomes in the order in which they came. After a failure no process is left."""
        num_ranks = num_ranks or self.max_ranks
        if not 1 <= num_ranks <= self.max_ranks:
            raise ValueError(f"num_ranks must be 1..{self.max_ranks}, got {num_ranks}")
        message = _dumps((num_ranks, fn, args))
        if not self._processes:
            self._start()
        if num_ranks not in self._groups:  # made by all processes together, also by those outside
            self._send(_dumps((num_ranks, None, ())), self.max_ranks)
            self._expect_all("make a group")
            self._groups.add(num_ranks)
        self._send(message, num_ranks)
        outcomes: list[Outcome] = []
        try:
            for outcome in self._answers(num_ranks, timeout_s):
                outcomes.append(outcome)
                if stop_at_failure and not outcome.ok:
                    break
        except BaseException:
            self.close(grace_s=0)
            raise
        if not all(outcome.ok for outcome in outcomes):
            self.close(grace_s=0)
        return outcomes

    def _answers(self, num_ranks: int, timeout_s: float) -> Any:
        """Yield one Outcome per rank, as they come."""
        deadline = time.monotonic() + timeout_s
        ranks = {pipe: rank for rank, pipe in enumerate(self._pipes[:num_ranks])}
        while ranks:
            ready = wait(list(ranks), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankError(f"rank(s) {sorted(ranks.values())} did not end within {timeout_s} s; killed")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = ranks.pop(pipe)
                try:
                    value, error = _loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):  # the process has ended
                    self._processes[rank].join()
                    yield Outcome(rank, exit_code=self._processes[rank].exitcode)
                else:
                    yield Outcome(rank, value, None if error is None else _rebuild(*error))

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="expertwire-ranks-")
        store = os.path.join(self._folder.name, "store")
        try:
            with _interrupts_held():
                for rank in range(self.max_ranks):
                    ours, theirs = context.Pipe()
                    name, args = f"expertwire-rank-{rank}", (theirs, rank, self.max_ranks, store)
                    process = context.Process(target=_serve, args=args, name=name, daemon=True)
                    process.start()
                    theirs.close()
                    self._processes.append(process)
                    self._pipes.append(ours)
        except BaseException:
            self.close(grace_s=0)
            raise
        self._expect_all("start")
        self._groups = {self.max_ranks}

    def _send(self, message: bytes, num_ranks: int) -> None:
        for pipe in self._pipes[:num_ranks]:
            with suppress(ConnectionError):  # a process that has ended shows when its answer is read
                pipe.send_bytes(message)

    def _expect_all(self, what: str) -> None:
        """Every process answers that it could do `what`; otherwise none is left and RankError says why."""
        try:
            answers = self._answers(self.max_ranks, self._start_timeout_s)
            problem = next((outcome for outcome in answers if not outcome.ok), None)  # the others may wait for this one
        except BaseException:
            self.close(grace_s=0)
            raise
        if problem is not None:
            self.close(grace_s=0)
            reason = repr(problem.error) if problem.error else f"exit code {problem.exit_code}"
            raise RankError(f"the process of rank {problem.rank} did not {what}: {reason}")

    def close(self, grace_s: float = 5.0) -> None:
        """End all processes: idle ones leave by themselves; SIGKILL for what is left after `grace_s`. Idempotent."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + grace_s
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            process.kill()
            process.join()
            process.close()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C waits until the end of this block; processes started inside never see it, the parent decides for them."""
    multiprocessing.resource_tracker.ensure_running()  # starting it would lift the block
    pressed: list[int] = []
    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number)) if in_main else None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited by what is started
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if in_main:
            signal.signal(signal.SIGINT, handler)
            if pressed:
                signal.raise_signal(signal.SIGINT)


def _serve(pipe: Connection, rank: int, max_ranks: int, store_path: str) -> None:
    """Body of a rank's process: answer calls until the pipe is closed."""
    with suppress(EOFError, ConnectionError):
        _serve_calls(pipe, rank, max_ranks, store_path)


def _serve_calls(pipe: Connection, rank: int, max_ranks: int, store_path: str) -> None:
    threading.Thread(target=_end_with_parent, args=(os.path.dirname(store_path),), daemon=True).start()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(store_path, max_ranks)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=max_ranks, timeout=timedelta(seconds=120))
        groups = {max_ranks: dist.group.WORLD}
    except BaseException as error:  # noqa: BLE001  # carried over to the parent
        pipe.send_bytes(_answer(rank, None, error))
        return
    pipe.send_bytes(_answer(rank, None, None))
    while True:
        message = pipe.recv_bytes()
        value, failure = None, None
        try:
            num_ranks, fn, args = _loads(message)
            if fn is None:
                groups[num_ranks] = dist.new_group(range(num_ranks))
            else:
                value = fn(groups[num_ranks], *args)
        except BaseException as error:  # noqa: BLE001  # carried over to the parent
            failure = error
        pipe.send_bytes(_answer(rank, value, failure))


def _end_with_parent(folder: str) -> None:
    """The parent removes its folder, unless it was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _dumps(value: Any) -> bytes:
    """Pickle, with tensors by value and of every dtype."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _loads(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def _answer(rank: int, value: Any, error: BaseException | None) -> bytes:
    """(value, error in parts); an error is taken apart since many exceptions cannot be pickled whole."""
    if error is None:
        try:
            return _dumps((value, None))
        except Exception as problem:  # noqa: BLE001  # whatever pickling meets
            error = RankError(f"the result of rank {rank} cannot be carried over: {problem!r}")
    report = "".join(traceback.format_exception(error))
    try:
        whole = _dumps((None, (type(error), error.args, error.__dict__, report)))
        _loads(whole)
    except Exception:  # noqa: BLE001  # whatever pickling meets
        return _dumps((None, (RankError, (repr(error),), {}, report)))
    return whole


def _rebuild(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any], report: str) -> BaseException:
    builtin = kind
    while builtin.__module__ != "builtins":  # the base that decides the memory layout has the right __new__
        assert builtin.__base__ is not None
        builtin = builtin.__base__
    error: BaseException = builtin.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    error.add_note(f"in its process:\n{report}")
    return error

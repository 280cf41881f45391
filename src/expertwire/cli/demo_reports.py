"""Progress records from the processes of ranks to the one that shows them, over a local datagram socket."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

_MAX_BYTES = 1 << 16


class Reporter:
    """The sending side; without a path it sends nothing."""

    def __init__(self, path: str | None) -> None:
        self._socket = None
        if path is not None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.connect(path)

    def send(self, **record: Any) -> None:
        if self._socket is not None:
            self._socket.send(json.dumps(record).encode())

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._socket is not None:
            self._socket.close()


class Inbox:
    """The receiving side: `on_record` is called with every record, in a thread of its own, until the end of `with`."""

    def __init__(self, on_record: Callable[[dict[str, Any]], None]) -> None:
        self._on_record = on_record

    def __enter__(self) -> str:
        """Returns the path that `Reporter` needs."""
        self._folder = tempfile.TemporaryDirectory(prefix="expertwire-reports-")
        path = os.path.join(self._folder.name, "socket")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(path)
        self._thread = threading.Thread(target=self._receive, name="expertwire-reports", daemon=True)
        self._thread.start()
        self._path = path
        return path

    def _receive(self) -> None:
        while record := self._socket.recv(_MAX_BYTES):
            self._on_record(json.loads(record))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Records that were sent before are still delivered: an empty one, behind them, ends the thread."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", self._path)
        self._thread.join()
        self._socket.close()
        self._folder.cleanup()

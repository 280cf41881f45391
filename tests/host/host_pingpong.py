"""The other process of the ping-pong in test_host_memory: `python host_pingpong.py FILE ROUNDS ENGINE ...`."""

import mmap
import sys
import time

import numpy as np

from expertwire.host import kernels

PING, PONG, PING_ROW, PONG_ROW, SIZE = 0, 64, 4096, 8192, 12288
ROW_BYTES = 4000


def shared(path):
    """uint8 over a file that other processes map too."""
    with open(path, "r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), SIZE), np.uint8)


def expect(engine, address, word, still_there):
    """Wait for the word, a minute at most."""
    deadline = time.monotonic() + 60
    while engine.wait_word(address, word, 50, 50, 20) < word:
        assert time.monotonic() < deadline, f"{word} did not arrive, seen {engine.read_word(address)}"
        assert still_there(), "the other process has ended"


def send(engine, memory, row_at, word_at, word):
    """The row, every byte of it word % 251, then the word."""
    row = np.full(ROW_BYTES, word % 251, np.uint8)
    base = memory.ctypes.data
    engine.move_rows(np.array([row.ctypes.data]), np.array([base + row_at]), ROW_BYTES, word % 2 == 0)
    engine.publish(base + word_at, word)


def received(engine, memory, row_at, word):
    row = np.zeros(ROW_BYTES, np.uint8)
    engine.move_rows(np.array([memory.ctypes.data + row_at]), np.array([row.ctypes.data]), ROW_BYTES, False)
    return bool((row == word % 251).all())


def main(path, rounds, *engines):
    memory, word = shared(path), 0
    for name in engines:
        engine = kernels.load(name)
        for _ in range(int(rounds)):
            word += 1
            expect(engine, memory.ctypes.data + PING, word, lambda: True)
            assert received(engine, memory, PING_ROW, word), f"the row of word {word} was not there"
            send(engine, memory, PONG_ROW, PONG, word)


if __name__ == "__main__":
    main(*sys.argv[1:])

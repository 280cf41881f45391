"""Words that vouch for data, between two processes, and the patience of a wait."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import host_pingpong as pingpong
import numpy as np
import pytest
from host_calls import ENGINES

from expertwire.host import kernels

ROUNDS = 200


@pytest.fixture(params=ENGINES)
def engine(request):
    return kernels.load(request.param)


def words(count=1):
    return np.zeros(count, np.int64)


def test_words_hold_64_bits(engine):
    memory = words(3)
    address = memory.ctypes.data + 8
    assert engine.read_word(address) == 0
    for word in (1, (1 << 63) - 1, (1 << 40) - 1 << 24 >> 1, -1):
        engine.publish(address, word)
        assert engine.read_word(address) == word
    assert memory.tolist() == [0, -1, 0]


@pytest.mark.parametrize("patience", [(0, 0, 0), (100, 0, 0), (0, 100, 0), (0, 0, 3), (5, 5, 2)])
def test_a_wait_ends_with_what_it_saw(engine, patience):
    memory = words()
    memory[0] = 6
    assert engine.wait_word(memory.ctypes.data, 7, *patience) == 6
    assert engine.wait_word(memory.ctypes.data, 6, *patience) == 6
    assert engine.wait_word(memory.ctypes.data, 5, *patience) == 6


def test_a_waiting_thread_lets_others_run(engine):
    """Ranks may be threads of one process: the wait must not keep the interpreter to itself."""
    memory = words()
    deadline = time.monotonic() + 60
    seen = []

    def wait():
        while not seen and time.monotonic() < deadline:
            word = engine.wait_word(memory.ctypes.data, 1, 1000, 1000, 10)
            if word:
                seen.append(word)

    waiting = threading.Thread(target=wait)
    waiting.start()
    engine.publish(memory.ctypes.data, 9)
    waiting.join()
    assert seen == [9]


def test_data_is_there_when_the_word_is(tmp_path):
    """Ping-pong of rows between two processes, each engine against each; even words send past the caches."""
    names = ["torch"] if kernels.numba_missing() else ["torch", "numba"]
    path = tmp_path / "window"
    path.write_bytes(bytes(pingpong.SIZE))
    memory = pingpong.shared(path)
    command = [sys.executable, pingpong.__file__, str(path), str(ROUNDS), *names, *names]
    source = str(Path(kernels.__file__).parents[2])
    child = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": source})
    try:
        word = 0
        for mine in [*names, *names[::-1]]:
            engine = kernels.load(mine)
            for _ in range(ROUNDS):
                word += 1
                pingpong.send(engine, memory, pingpong.PING_ROW, pingpong.PING, word)
                pingpong.expect(engine, memory.ctypes.data + pingpong.PONG, word, lambda: child.poll() in (None, 0))
                assert pingpong.received(engine, memory, pingpong.PONG_ROW, word), f"no row with word {word}"
        assert child.wait(60) == 0
    finally:
        child.kill()
        child.wait()

"""One process that compares mathematical answers with math-verify: what `math_pool` starts, and talks to over its standard input.

A model's answer is arbitrary text that SymPy parses and evaluates: `9^{9^{9^{9}}}` never ends, a long expression takes all memory, deep
nesting overflows the C stack. So each process limits itself: CPU time per answer (SIGPROF, whose default action ends the process even
inside a loop of C code) and address space. Whoever asked sees it end, and starts another.

math-verify's own time limit is off: it raises an exception out of a SIGALRM handler, which works in a main thread only, does not reach C
code, may be caught by SymPy's `except Exception`, and counts wall time, so that verdicts would depend on the machine's load.

Only the standard library and math-verify are imported: torch, Megatron and vLLM stay out of these processes.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
import socket
import struct
import sys

READY = b"ready"
_LENGTH = struct.Struct("<I")
# Writings after which math-verify 0.9 takes an answer for text, which then equals itself alone: what to put for them.
_TIDY = (
    (
        re.compile(r"(?<=\d)(?:,\\!|\{,\})(?=\d{3}(?!\d))"),
        "",
    ),  # 29,\!322,\!216 inside a fraction: thousands, not a list
    (re.compile(r"\.(?=\s*\})"), ""),  # \boxed{30^\circ.}
    (re.compile(r"(?<=\S) \+ (?=\S)"), "+"),  # a + b + c, of which it keeps "a +"
)


def tidy(text: str) -> str:
    """The text in writings that math-verify reads; its meaning is the same."""
    for pattern, instead in _TIDY:
        text = pattern.sub(instead, text)
    return text


def equal(completion: str, answer: str) -> bool:
    r"""Whether the completion's last mathematical answer equals `answer`, the dataset's. No time limit.

    The answer is put into \boxed{}, as the prompt asks the model to do. Of a completion that thinks first, only what follows the last
    </think> is looked at. math-verify takes boxes that follow each other closely for one set: `\boxed{7} or \boxed{8}` is not 7.
    False when nothing can be parsed.
    """
    from math_verify import parse, verify

    limits = {"raise_on_error": False}
    gold = parse(tidy(f"\\boxed{{{answer}}}"), parsing_timeout=None, **limits)
    found = parse(tidy(completion.rpartition("</think>")[2]), parsing_timeout=None, **limits)
    return bool(gold) and bool(found) and bool(verify(gold, found, timeout_seconds=None, **limits))


def send(connection: socket.socket, message: bytes) -> None:
    """A message of any length, preceded by it."""
    connection.sendall(_LENGTH.pack(len(message)) + message)


def receive(connection: socket.socket) -> bytes:
    """The next message. Raises EOFError when the other side is gone."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    return _exactly(connection, length)


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise EOFError("the other side is gone")
        data += piece
    return bytes(data)


def main() -> None:
    """Answer requests [completion, answer, CPU seconds] with b"1" or b"0" until the other side is gone. sys.argv[1]: MiB of memory."""
    connection = socket.socket(fileno=sys.stdin.fileno())
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import math_verify  # noqa: F401  before the limit starts, and before anyone waits for a verdict

    memory = int(sys.argv[1]) << 20
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    logging.disable(logging.CRITICAL)  # math-verify warns once that its time limit is off
    os.dup2(
        os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno()
    )  # the LaTeX parser prints; nobody reads it from here on
    send(connection, READY)
    while True:
        try:
            completion, answer, seconds = json.loads(receive(connection))
        except (EOFError, ConnectionError):
            return
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            verdict = equal(completion, answer)
        except Exception:  # MemoryError and RecursionError too: the process is whole, the answer is not comparable
            verdict = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(connection, b"1" if verdict else b"0")


if __name__ == "__main__":
    main()

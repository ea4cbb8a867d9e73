"""A process that decodes images, each in a child process that may die.

Start it with `python -m weft.server.api.media.decode_child`. Its stdin is a Unix socket: each message carries one end
of a socket pair, and a child is forked to serve that pair. A child sees one file: it reads `Open`, answers with the
size, reads `Cut`, answers with pixels and ends. It cannot open files, and its memory and time are limited. So a file
that takes over a decoder gets neither other files nor other clients' images.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
from contextlib import suppress

import msgspec

from weft.engine.wire.child import end_with_parent
from weft.server.api.media.decode_messages import HEADER, Cut, Open, Size, Tiles
from weft.server.api.media.prepare import Unreadable, cut, open_image, size_of, to_rgb, warm_up

_PAGE = resource.getpagesize()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel removes ended children
    end_with_parent()
    requests = socket.socket(fileno=os.dup(0))
    warm_up()
    gc.freeze()  # keeps the pages that children share
    while True:
        data, fds, _, _ = socket.recv_fds(requests, 1, 1)
        if not data:
            return
        for fd in fds:
            if os.fork():
                os.close(fd)
                continue
            try:
                _confine(fd, requests)
                _serve(socket.socket(fileno=fd))
            finally:
                os._exit(0)


def _confine(fd: int, requests: socket.socket) -> None:
    end_with_parent()
    requests.close()
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.closerange(3, fd)
    os.closerange(fd + 1, max(fd + 1, 256))
    os.nice(5)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    for number in (signal.SIGCHLD, signal.SIGALRM, signal.SIGPROF):  # the daemon ignores some, which children inherit
        signal.signal(number, signal.SIG_DFL)
    for limit, value in (("CORE", 0), ("FSIZE", 0), ("NOFILE", 0), ("NPROC", 0)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{limit}"), (value, value))


def _limit(job: Open, virtual: int) -> None:
    most = virtual + job.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.setitimer(signal.ITIMER_REAL, job.seconds)  # its signal ends the process, as that of the next does
    signal.setitimer(signal.ITIMER_PROF, job.cpu_seconds)


def _serve(stream: socket.socket) -> None:
    job = msgspec.msgpack.decode(_receive(stream), type=Open)
    _limit(job, int(_VIRTUAL.split()[0]) * _PAGE + len(job.data))
    try:
        image = open_image(job.data)
        width, height = size_of(image)
    except Unreadable as error:
        _send(stream, Size(error=str(error)))
        return
    _send(stream, Size(width, height, image.format or ""))
    plan = msgspec.msgpack.decode(_receive(stream), type=Cut)
    try:
        tiles = cut(to_rgb(image), plan.canvas, plan.tiles, plan.resample, plan.background)
    except Unreadable as error:
        _send(stream, Tiles(error=str(error)))
    except MemoryError:
        _send(stream, Tiles(error="it needs too much memory"))
    else:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        _send(stream, Tiles(b"".join(tiles), usage.ru_utime + usage.ru_stime))


def _send(stream: socket.socket, message: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(message)
    stream.sendall(HEADER.pack(len(data)))
    stream.sendall(data)


def _receive(stream: socket.socket) -> bytearray:
    (size,) = HEADER.unpack(_exactly(stream, HEADER.size))
    return _exactly(stream, size)


def _exactly(stream: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        count = stream.recv_into(view[at:])
        if not count:
            os._exit(0)  # nobody waits for the answer
        at += count
    return data


def _statm() -> str:
    with open("/proc/self/statm") as file:
        return file.read()


_VIRTUAL = _statm()  # read while files can be opened

if __name__ == "__main__":
    main()

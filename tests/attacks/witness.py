"""An honest client, in a process of its own: while others attack, it asks for health and for answers, and times both.

    python witness.py PORT PICTURE TOKEN

It says "ready", goes on until its input ends, and prints what it saw as one line of JSON. Only the standard library: it
must be there at once, and take little from the machine it measures.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time

LEAST = 5  # times that each is asked


def ask(port: int, request: bytes, seconds: float = 30.0) -> int:
    """The status of one request on a connection of its own; 0: none came."""
    try:
        with socket.create_connection(("127.0.0.1", port), seconds) as connection:
            connection.settimeout(seconds)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(request)
            head = b""
            while b"\r\n" not in head and (got := connection.recv(65536)):
                head += got
            return int(head.split(b" ", 2)[1]) if head else 0
    except OSError:
        return 0


def watch(port: int, request: bytes, pause: float, over: threading.Event, seen: list[tuple[float, int]]) -> None:
    while not over.wait(pause) or len(seen) < LEAST:
        begin = time.perf_counter()
        status = ask(port, request)
        seen.append((time.perf_counter() - begin, status))


def main() -> None:
    port, picture, token = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    with open(picture, "rb") as file:
        body = file.read()
    common = b"Host: localhost\r\nConnection: close\r\nAuthorization: Bearer " + token.encode() + b"\r\n"
    health = b"GET /healthz HTTP/1.1\r\n" + common + b"\r\n"
    image = b"POST /v1/classify HTTP/1.1\r\n" + common + b"Content-Length: %d\r\n\r\n" % len(body) + body
    over = threading.Event()
    seen: dict[str, list[tuple[float, int]]] = {"health": [], "image": []}
    threads = [
        threading.Thread(target=watch, args=(port, request, pause, over, seen[name]))
        for name, request, pause in (("health", health, 0.02), ("image", image, 0.1))
    ]
    for thread in threads:
        thread.start()
    print("ready", flush=True)
    sys.stdin.read()
    over.set()
    for thread in threads:
        thread.join()
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main()

"""Commands from rank 0 to the other processes of a trainer, their answers, and who is still there.

One TCP connection a process, lines of JSON. Tensors never come here. A connection that ends without a good-bye is how a
dead process is found: the kernel closes it the moment the process is gone, whatever it was doing, and keep-alive finds
a machine that vanished. A process that is stopped or hangs as a whole keeps its connection: it is found because a
thread of its own answers pings, however long a step takes. Whoever learns of a loss first ends everything: collectives
that wait for a dead neighbour would otherwise wait for their time-out.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from sprawl.errors import SprawlError

Message = dict[str, Any]

CONNECT_S = 120.0
HELLO_S = 5.0
"""How long whoever connects may take to say who it is."""
GRACE_S = 20.0
"""How long rank 0 may take to unwind after a loss, and how long others wait to be told about one."""
PINGS = 8
"""Pings without an answer after which a process is lost."""


class StageLost(SprawlError):
    """A process of the trainer is gone or failed; what it was doing has not been committed."""


class _Line:
    """One connection: whole JSON lines in both directions."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._reader = connection.makefile("rb")
        self._lock = threading.Lock()
        self.silent = False
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def send(self, message: Message) -> bool:
        """False when the other side is gone."""
        try:
            with self._lock:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
            return True
        except OSError:
            return False

    def receive(self) -> Message | None:
        """The next message; None when the connection ended."""
        try:
            line = self._reader.readline()
            return json.loads(line) if line.endswith(b"\n") else None
        except TimeoutError:
            self.silent = True
            return None
        except (OSError, ValueError):
            return None

    def settle(self, limit_s: float | None = None) -> None:
        """From now on waits for a message without a limit, or so long: then `receive` gives None and sets `silent`."""
        self._socket.settimeout(limit_s)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Driver:
    """Rank 0's side. `explain(rank)` may say why a process ended (its exit code); `end_others` makes sure they do."""

    def __init__(self, host: str, world: int, describe: Callable[[int], str]) -> None:
        self._world = world
        self._describe = describe
        self._lines: dict[int, _Line] = {}
        self._answers: queue.Queue[tuple[int, Message]] = queue.Queue()
        self._heard: set[int] = set()  # who said something since the last ping
        self._doing = "starting"
        self._lost: str | None = None
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self.explain: Callable[[int], str | None] = lambda rank: None
        self.end_others: Callable[[], None] = lambda: None
        self._token = secrets.token_hex(16)
        self._server = socket.create_server((host, 0), backlog=world)
        self.address: Message = {"host": host, "port": self._server.getsockname()[1], "token": self._token}

    def accept(self) -> None:
        """Until all others are connected. Raises StageLost when they do not come."""
        self._server.settimeout(1.0)
        deadline = time.monotonic() + CONNECT_S
        while len(self._lines) < self._world - 1:
            try:
                connection = self._server.accept()[0]
                connection.settimeout(HELLO_S)
                line = _Line(connection)
                hello = line.receive()
                if hello is None or hello.get("token") != self._token:
                    line.close()
                    continue
                line.settle()
                rank = int(hello["rank"])
                self._lines[rank] = line
                threading.Thread(target=self._listen, args=(rank, line), name=f"control-{rank}", daemon=True).start()
            except TimeoutError:
                for rank in sorted(set(range(1, self._world)) - self._lines.keys()):
                    if (reason := self.explain(rank)) is not None:
                        raise StageLost(f"{self._describe(rank)} {reason} while starting") from None
                if time.monotonic() > deadline:
                    missing = sorted(set(range(1, self._world)) - self._lines.keys())
                    raise StageLost(f"trainer processes {missing} did not come within {CONNECT_S:.0f} s") from None

    def watch(self, limit_s: float) -> None:
        """From now on a process that says nothing for so long is lost, whatever it is doing; it takes rank 0 for lost
        after the same time. Its main thread may be busy for longer."""
        threading.Thread(target=self._watch, args=(limit_s,), name="control-watch", daemon=True).start()

    def send(self, message: Message, doing: str) -> None:
        """A command to all others. `doing` is for people, should one of them be lost meanwhile."""
        self.check()
        self._doing = doing
        for line in self._lines.values():
            line.send(message)

    def collect(self) -> list[Message]:
        """Everybody's answer to the last command, in the order of ranks. Raises StageLost."""
        answers: dict[int, Message] = {}
        while len(answers) < len(self._lines):
            self.check()
            try:
                rank, message = self._answers.get(timeout=0.2)
            except queue.Empty:
                continue
            answers[rank] = message
        self._doing = "waiting"
        return [answers[rank] for rank in sorted(answers)]

    def check(self) -> None:
        """Raises StageLost when a process is known to be lost."""
        if self._lost is not None:
            raise StageLost(self._lost)

    def cause(self, error: RuntimeError) -> StageLost | None:
        """The loss that a failed operation came from, known a moment later at the latest. None: it failed by itself."""
        broken = "gloo" in str(error).lower()  # a collective or a send that its other side did not finish
        deadline = time.monotonic() + (GRACE_S / 2 if broken else 1.0)
        while self._lost is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if self._lost is None and broken:
            why = str(error).strip().splitlines()[0]
            self._lose(f"{self._describe(0)} lost its neighbours during {self._doing}: {why}")
        return None if self._lost is None else StageLost(self._lost)

    def close(self) -> None:
        """Send everybody home. Idempotent."""
        if self._ending.is_set():
            return
        self._ending.set()
        for line in self._lines.values():
            line.send({"do": "stop"})
        self._server.close()

    def _listen(self, rank: int, line: _Line) -> None:
        while (message := line.receive()) is not None:
            self._heard.add(rank)
            if message.get("bye"):
                return
            if "pong" in message:
                continue
            if "failed" in message:
                self._lose(f"{self._describe(rank)} failed during {self._doing}: {message['failed']}")
                return
            self._answers.put((rank, message))
        if not self._ending.is_set():
            reason = self.explain(rank) or "is gone (its connection ended)"
            self._lose(f"{self._describe(rank)} {reason} during {self._doing}")

    def _watch(self, limit_s: float) -> None:
        unanswered = dict.fromkeys(self._lines, 0)
        # Counted in pings, not by a clock: when this very process was stopped for a while, nobody else was silent.
        while self._lost is None and not self._ending.wait(limit_s / PINGS):
            heard, self._heard = self._heard, set()
            for rank, line in self._lines.items():
                unanswered[rank] = 0 if rank in heard else unanswered[rank] + 1
                if unanswered[rank] > PINGS:
                    how = f"has not answered for {limit_s:g} s (it is stopped, or hangs)"
                    self._lose(f"{self._describe(rank)} {how} during {self._doing}")
                    return
                line.send({"ping": limit_s})

    def _lose(self, message: str) -> None:
        with self._lock:
            if self._lost is not None or self._ending.is_set():
                return
            self._lost = message
        for line in self._lines.values():
            line.send({"lost": message})
        self.end_others()
        # The main thread may sit in a collective that nobody answers any more: neighbours that end break it, and
        # should they not, this process does not outlive the grace period.
        threading.Thread(target=self._force, args=(message,), name="control-force", daemon=True).start()

    def _force(self, message: str) -> None:
        if not self._ending.wait(GRACE_S):
            os.write(2, f"sprawl: {message}\n".encode())
            os._exit(1)


class Follower:
    """Any other rank's side: `next` gives commands until rank 0 stops or is lost."""

    def __init__(self, rank: int, address: Mapping[str, Any]) -> None:
        self._rank = rank
        self._line = _Line(socket.create_connection((address["host"], address["port"]), timeout=CONNECT_S))
        self._line.settle()
        self._commands: queue.Queue[Message] = queue.Queue()
        self._stopped = False
        self._line.send({"rank": rank, "token": address["token"]})
        threading.Thread(target=self._listen, name="control", daemon=True).start()

    def next(self) -> Message:
        return self._commands.get()

    def answer(self, message: Message) -> None:
        self._line.send(message)

    def fail(self, reason: str) -> None:
        """Tell rank 0 why this process ends. A loss elsewhere is usually the reason, and is told by rank 0 first."""
        self._line.send({"failed": reason})

    def wait_for_end(self) -> None:
        """After a collective failed: rank 0 knows of the loss that broke it, or will be told."""
        time.sleep(GRACE_S)

    def bye(self) -> None:
        self._stopped = True
        self._line.send({"bye": True})
        self._line.close()

    def _listen(self) -> None:
        while (message := self._line.receive()) is not None:
            if "lost" in message:
                os._exit(1)
            if "ping" in message:
                self._line.settle(message["ping"])
                self._line.send({"pong": True})
                continue
            self._stopped = self._stopped or message.get("do") == "stop"
            self._commands.put(message)
        if self._stopped:
            # An orderly end, unless the main thread sits in a collective that rank 0 left half-way.
            time.sleep(GRACE_S)
            os._exit(1)
        if self._rank == 1:  # one of the others speaks for all
            how = "was not heard of for too long" if self._line.silent else "is gone"
            text = f"sprawl: trainer process 0, which drives the run, {how}: trainer process 1 ends, like all\n"
            os.write(2, text.encode())
        os._exit(1)

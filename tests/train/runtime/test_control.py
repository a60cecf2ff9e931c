"""Who is there, who is lost, and what is said about it; sockets without pipelines."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sprawl.train.runtime import control
from sprawl.train.runtime.control import Driver, StageLost


@pytest.fixture
def driver() -> Iterator[Driver]:
    found = Driver("127.0.0.1", 3, lambda rank: f"trainer process {rank}")
    yield found
    found.close()


class Other:
    """A process's side of the line, byte by byte."""

    def __init__(self, driver: Driver, rank: int, token: str | None = None) -> None:
        self.socket = socket.create_connection((driver.address["host"], driver.address["port"]))
        self.lines = self.socket.makefile("rb")
        self.say({"rank": rank, "token": driver.address["token"] if token is None else token})

    def say(self, message: dict[str, Any]) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def hear(self) -> dict[str, Any]:
        return json.loads(self.lines.readline())

    def die(self) -> None:
        self.lines.close()
        self.socket.close()


def connected(driver: Driver) -> list[Other]:
    others = [Other(driver, rank) for rank in (1, 2)]
    driver.accept()
    return others


def test_commands_reach_all_and_answers_come_in_the_order_of_ranks(driver: Driver) -> None:
    one, two = connected(driver)
    driver.send({"do": "x"}, "x")
    assert one.hear() == two.hear() == {"do": "x"}
    two.say({"from": 2})
    one.say({"from": 1})
    assert driver.collect() == [{"from": 1}, {"from": 2}]
    driver.close()
    assert one.hear() == {"do": "stop"}


def test_a_dead_process_is_named_and_the_others_are_told(driver: Driver) -> None:
    one, two = connected(driver)
    ended = threading.Event()
    driver.end_others = ended.set
    driver.send({"do": "train"}, "train step 7")
    one.say({})
    two.die()
    with pytest.raises(StageLost, match=r"^trainer process 2 is gone .* during train step 7$") as caught:
        driver.collect()
    assert one.hear() == {"do": "train"}
    assert one.hear() == {"lost": caught.value.message}
    assert ended.wait(5)
    one.die()  # what breaks because of it does not change the story
    time.sleep(0.1)
    with pytest.raises(StageLost, match="trainer process 2"):
        driver.send({"do": "train"}, "train step 8")
    assert str(driver.cause(RuntimeError("gloo: connection closed by peer"))) == caught.value.message


def test_a_process_that_fails_says_why(driver: Driver) -> None:
    one, _ = connected(driver)
    driver.explain = lambda rank: "ended with code 2"
    driver.send({"do": "restore"}, "restore 4")
    one.say({"failed": "checkpoint 4/masters-1of3: digest"})
    with pytest.raises(StageLost, match="trainer process 1 failed during restore 4: checkpoint 4/masters-1of3: digest"):
        driver.collect()


def test_how_a_process_ended_is_said_where_it_is_known(driver: Driver) -> None:
    one, _ = connected(driver)
    driver.explain = lambda rank: "was killed by SIGKILL (log: x)"
    one.die()
    with pytest.raises(StageLost, match="trainer process 1 was killed by SIGKILL"):
        driver.collect()


def test_strangers_and_goodbyes_are_no_losses(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "HELLO_S", 0.2)
    stranger = Other(driver, 1, token="guess")
    silent = socket.create_connection((driver.address["host"], driver.address["port"]))
    one, _ = connected(driver)
    assert stranger.lines.readline() == b""
    assert silent.recv(1) == b""
    one.say({"bye": True})
    one.die()
    time.sleep(0.1)
    driver.check()


def test_an_error_that_is_nobodys_loss_stays_what_it_is(driver: Driver) -> None:
    others = connected(driver)
    assert driver.cause(RuntimeError("shape mismatch")) is None
    assert len(others) == 2


def test_processes_that_do_not_come(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "CONNECT_S", 0.1)
    Other(driver, 2)
    with pytest.raises(StageLost, match=r"processes \[1\] did not come"):
        driver.accept()
    driver.explain = lambda rank: "ended with code 1"
    with pytest.raises(StageLost, match="trainer process 1 ended with code 1 while starting"):
        driver.accept()


def answer_pings(other: Other) -> None:
    """Until the connection ends."""
    for line in other.lines:
        if "ping" in json.loads(line):
            other.say({"pong": True})


def test_a_process_that_keeps_its_connection_and_says_nothing_is_lost(driver: Driver) -> None:
    one, two = connected(driver)
    threading.Thread(target=answer_pings, args=(one,), daemon=True).start()
    driver.send({"do": "train"}, "train step 7")
    driver.watch(0.2)
    began = time.monotonic()
    with pytest.raises(StageLost, match=r"^trainer process 2 has not answered for 0.2 s .* during train step 7$"):
        driver.collect()
    assert time.monotonic() - began >= 0.2
    assert two.hear() == {"do": "train"}


def test_a_process_whose_step_takes_long_is_not_lost_while_it_answers_pings(driver: Driver) -> None:
    others = connected(driver)
    driver.send({"do": "train"}, "train step 7")
    for other in others:
        assert other.hear() == {"do": "train"}
        threading.Thread(target=answer_pings, args=(other,), daemon=True).start()
    driver.watch(1.0)
    time.sleep(1.5)
    for other in others:
        other.say({"done": True})
    assert driver.collect() == [{"done": True}] * 2


STOPPED_DRIVER = """
import json, sys
from sprawl.train.runtime.control import Follower
follower = Follower(1, json.loads(sys.argv[1]))
follower.next()
"""


def test_a_driver_that_says_nothing_any_more_is_taken_for_gone() -> None:
    """A process of its own, because that is what ends."""
    server = socket.create_server(("127.0.0.1", 0))
    address = {"host": "127.0.0.1", "port": server.getsockname()[1], "token": "t"}
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED_DRIVER, json.dumps(address)], stderr=subprocess.PIPE, text=True
    )
    connection, _ = server.accept()
    lines = connection.makefile("rb")
    assert json.loads(lines.readline()) == {"rank": 1, "token": "t"}
    connection.sendall(b'{"ping": 0.3}\n')
    assert json.loads(lines.readline()) == {"pong": True}
    _, said = process.communicate(timeout=30)
    assert process.returncode == 1
    assert said.endswith("drives the run, was not heard of for too long: trainer process 1 ends, like all\n")
    server.close()

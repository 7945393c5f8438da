"""What processes of a job tell one another, with a dictionary in place of JAX's runtime."""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import toys
from jax.experimental import multihost_utils
from support.groups import groups, together
from support.processes import free_port

import kvjax
from kvjax import device_memory, request
from kvjax.errors import UsageError
from kvjax.runtime import distributed
from kvjax.runtime.distributed import Cluster, PeerFailed, local_mesh
from kvjax.sharding.mesh import Mesh


def test_gather_waits_for_all_and_keeps_their_order(monkeypatch):
    monkeypatch.setattr(distributed, "_POLL", 0.001)
    made, found = groups(12), {}

    def tell(group):
        found[group.process] = group.gather("numbers", str(group.process))

    threads = [threading.Thread(target=tell, args=(group,)) for group in reversed(made)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(found[i] == {j: str(j) for j in range(12)} for i in range(12))


def test_what_a_lost_process_had_told_is_gathered_and_nobody_waits_for_it(monkeypatch):
    monkeypatch.setattr(distributed, "_POLL", 0.001)
    (first, second, third), found = groups(3), {}

    def tell(group):
        found[group.process] = group.gather("n", str(group.process))

    threads = [threading.Thread(target=tell, args=(group,)) for group in (first, third)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(0.05)
    assert not found, "the second lives and has told nothing"
    first._client.words[f"{first._name}/n/1"] = "its last"
    first._client.lose(second.process)
    for thread in threads:
        thread.join(30)
    assert found == {0: {0: "0", 1: "its last", 2: "2"}, 2: {0: "0", 1: "its last", 2: "2"}}


@pytest.mark.parametrize("counts", [(3, 2, 3), (2, 3, 3), (3, 3, 3)])
def test_processes_must_have_been_told_of_the_same_number(counts, monkeypatch):
    monkeypatch.setattr(distributed, "_POLL", 0.001)
    made = groups(3)
    for group, count in zip(made, counts, strict=True):
        group.processes = count
    raised = together([functools.partial(group.check_count, 30) for group in made])
    for number, error in enumerate(raised):
        if 2 in counts:
            assert f"and process {number} of {counts[number]}; give all the same --num-processes" in str(error)
        else:
            assert error is None


def test_one_that_tells_nothing_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(distributed, "_POLL", 0.001)
    groups(2)[0].check_count(0.01)


def test_claims_are_taken_once():
    made = groups(3)
    taken = [made[turn % 3].claims("shards", 7) for turn in range(3)]
    claimed = [next(taken[i]) for i in (0, 0, 2, 1, 2)]
    assert sorted(claimed + [number for claims in taken for number in claims]) == list(range(7))
    assert list(distributed.group().claims("shards", 3)) == [0, 1, 2]


def test_words_told_again_replace_the_former():
    first, second = groups(2)
    first.tell("at", "1")
    first.tell("at", "2")
    assert second.told("at") == {0: "2"} and distributed.group().told("at") == {}


def test_the_last_waits_until_the_others_have_left(monkeypatch):
    first, second = groups(2)
    waiting = threading.Thread(target=first.wait_for_others_to_leave, daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    first._client.lose(second.process)
    waiting.join(30)
    assert not waiting.is_alive()


def test_a_failure_is_told_to_all(monkeypatch):
    monkeypatch.setattr(distributed, "_CHECK", 0.0)
    first, second = groups(2)
    first.check()
    with pytest.raises(ValueError), second.together(), second.together():
        raise ValueError("the disk is full\nand more")
    with pytest.raises(PeerFailed, match=r"^Process 1 of 2 \(.*\) failed: the disk is full$"):
        first.check()
    with pytest.raises(PeerFailed), first.together():
        first.gather("anything", "")
    assert list(first._client.words) == ["kvjax/failed/1", f"{first._name}/anything/0"], "an echo is not told"


def test_an_interrupt_is_told_as_one(monkeypatch):
    monkeypatch.setattr(distributed, "_CHECK", 0.0)
    first, second = groups(2)
    with pytest.raises(KeyboardInterrupt), second.together():
        raise KeyboardInterrupt
    with pytest.raises(PeerFailed, match="was interrupted"):
        first.check()


def test_a_single_process_asks_nobody():
    alone = distributed.group()
    assert (alone.process, alone.processes) == (0, 1) and alone.gather("x", "y") == {0: "y"}
    with pytest.raises(ValueError), alone.together():
        raise ValueError
    alone.check()


@pytest.mark.parametrize(
    "given, sentence",
    [
        ({"coordinator": "host:1"}, "give all three"),
        ({"num_processes": 2, "process_id": 0}, "give all three"),
        ({"coordinator": "host", "num_processes": 2, "process_id": 0}, "give HOST:PORT"),
        ({"coordinator": "host:1", "num_processes": 2, "process_id": 2}, "--process-id is 2; give a whole number"),
        ({"coordinator": "host:1", "num_processes": 0, "process_id": 0}, "--num-processes is 0"),
        ({"heartbeat": 0}, "--heartbeat-timeout is 0"),
    ],
)
def test_what_makes_no_cluster_is_refused(given, sentence):
    with pytest.raises(UsageError, match=sentence):
        Cluster(**given)


def test_a_job_of_one_joins_nobody(monkeypatch):
    def initialize(*where, **timeouts):
        calls.append(where)
        raise ValueError("coordinator_address should be defined.")

    calls: list[tuple] = []
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: calls.append("shutdown"))
    with Cluster(num_processes=1).joined():
        assert calls == []
    with Cluster().joined():  # no cluster is recognised
        assert calls == [(None, None, None)]
    with pytest.raises(ValueError), Cluster("host:1", 2, 0).joined():
        raise AssertionError("it was told of a cluster and did not join it")
    monkeypatch.setattr(jax.distributed, "initialize", lambda *where, **timeouts: calls.append(where))
    with pytest.raises(KeyError), Cluster("host:1", 2, 1).joined():
        raise KeyError
    assert calls[-2:] == [("host:1", 2, 1), "shutdown"]


#: A process that joins another, and waits: their address and its number are given.
_WAITS = """
import sys, time
from kvjax.runtime.distributed import Cluster
with Cluster(sys.argv[1], 2, int(sys.argv[2])).joined():
    print("joined", flush=True)
    time.sleep(100)
"""


def test_sigterm_ends_a_process_that_has_joined_others():
    """JAX's preemption service would take it for a notice: ``kill`` and schedulers would end nothing."""
    address = f"127.0.0.1:{free_port()}"
    home = Path(distributed.__file__).parents[2]
    pair = [
        subprocess.Popen([sys.executable, "-c", _WAITS, address, str(i)], stdout=subprocess.PIPE, cwd=home)
        for i in range(2)
    ]
    try:
        for process in pair:
            assert process.stdout is not None and process.stdout.readline() == b"joined\n"
        pair[1].send_signal(signal.SIGTERM)
        assert pair[1].wait(20) == -signal.SIGTERM
        assert pair[0].poll() is None
    finally:
        for process in pair:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(("mine", "others", "agreed"), [(7, 5, 5), (5, 7, 5), (None, 5, 5), (None, None, None)])
def test_processes_of_one_mesh_choose_sizes_by_the_least_memory_of_any(monkeypatch, mine, others, agreed):
    """By limits of their own one would take rows of padding and another none, and they would wait for each other."""
    gibibytes, unknown = 2**30, np.iinfo(np.int32).max
    said = np.int32(unknown if others is None else others << 10)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(device_memory, "device_limit", lambda _: mine and mine * gibibytes)
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda x: np.stack([x, said]))
    pair = [SimpleNamespace(process_index=i) for i in range(2)]
    assert device_memory.agreed_limit(pair) == (agreed and agreed * gibibytes)
    assert device_memory.agreed_limit(pair[:1]) is None


def test_a_request_asks_for_the_agreed_memory(monkeypatch):
    lm = toys.tiny_model().on("data=1")
    monkeypatch.setattr(request, "agreed_limit", lambda devices: 1 if devices == jax.devices()[:1] else None)
    with pytest.raises(kvjax.DoesNotFit):
        kvjax.generate(lm, "a", max_new_tokens=1)


def test_a_mesh_is_divided_among_processes(monkeypatch):
    devices = jax.local_devices()[:1] * 8
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    assert str(local_mesh(Mesh(8, 1))) == "data=2,model=1"
    assert str(local_mesh(Mesh(4, 8))) == "data=1,model=8"
    with pytest.raises(UsageError, match="data=6, which 4 processes do not divide"):
        local_mesh(Mesh(6, 1))
    with pytest.raises(UsageError, match="needs 16 devices a process and this one has 8"):
        local_mesh(Mesh(8, 8))

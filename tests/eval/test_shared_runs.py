"""Runs that several processes share, as threads that answer without a model: some are killed, some are not alike."""

from __future__ import annotations

import collections
import dataclasses
import json
import random
import threading

import pytest
import toys
from support.groups import groups, together
from support.suite_runs import CACHES, ITEMS, SETTINGS, QuickAsker, answer, journal_at, question, without_times

from kvjax.errors import KvjaxError, UsageError
from kvjax.eval.entries import Entry
from kvjax.eval.suites import runner as module
from kvjax.eval.suites.hosts import agree
from kvjax.eval.suites.journal import Journal
from kvjax.eval.suites.runner import Runner
from kvjax.runtime import distributed
from kvjax.runtime.distributed import PeerFailed

MANY = [*ITEMS, *(dataclasses.replace(question(n, "c"), shares=f"{n % 3}") for n in range(5, 14))]


class Killed(BaseException):
    """The process is no more."""


@pytest.fixture(scope="module")
def lm():
    return toys.tiny_model()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("jax.clear_caches", lambda: None)
    monkeypatch.setattr(module, "Asker", QuickAsker)
    monkeypatch.setattr(distributed, "_CHECK", 0.0)
    monkeypatch.setattr(distributed, "_POLL", 0.005)


class Shared:
    """Starts of one run by threads.

    Attributes:
      kept: how often each answer was made to last. refused: process 0's.
    """

    def __init__(self, lm, path, caches=CACHES):
        self._lm, self._path, self._caches = lm, path, caches
        self.kept, self.refused = collections.Counter(), {}

    def start(self, count, ends=None, how=Killed):
        """Start so many processes; ``ends`` says after how many answers each ends, and it ends in its next line.

        Returns what each of them raised, or None.
        """
        raised, made = {}, groups(count)
        threads = [
            threading.Thread(target=self._run, args=(group, (ends or {}).get(group.process), how, raised))
            for group in made
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "it waits for ever"
        return [raised.get(process) for process in range(count)]

    def _run(self, group, after, how, raised):
        journal = Journal(self._path, SETTINGS, group.process)
        keep, mine = journal.add, []

        def add(one):
            if len(mine) == after:
                journal._file.write(json.dumps(dataclasses.asdict(one))[:30].encode())
                journal._file.flush()
                raise how
            new = one.key not in journal.answers
            keep(one)
            if new:
                mine.append(one.key)
                self.kept[one.key] += 1

        journal.add = add
        try:
            with group.together() if how is not Killed else group._client.alive_while(group):
                runner = Runner(self._lm, MANY, journal, everyone=group)
                runner.begin(self._caches)
                runner.run(self._caches)
                if group.process == 0:
                    self.refused = runner.refused
        except BaseException as error:  # noqa: BLE001  looked at by the test
            raised[group.process] = error
        finally:
            journal.close()
            if how is not Killed:
                journal.drop_empty()


@pytest.fixture(scope="module")
def alone(lm, tmp_path_factory):
    path = tmp_path_factory.mktemp("alone") / "answers.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Asker", QuickAsker)
        patch.setattr("jax.clear_caches", lambda: None)
        assert Shared(lm, path).start(1) == [None]
    return without_times(path)


def names(path):
    return sorted(one.name for one in path.parent.iterdir())


@pytest.mark.parametrize("count", [2, 5])
def test_many_write_what_one_does(lm, alone, tmp_path, count):
    path = tmp_path / "answers.jsonl"
    shared = Shared(lm, path)
    assert shared.start(count) == [None] * count
    assert without_times(path) == alone and names(path) == ["answers.jsonl"]
    assert set(shared.kept.values()) == {1} and len(shared.kept) == len(MANY) * len(CACHES)
    assert shared.start(count) == [None] * count and set(shared.kept.values()) == {1}, "all was there"


@pytest.mark.parametrize("seed", range(12))
def test_a_run_whose_processes_are_killed_ends_as_one_that_was_not(lm, alone, tmp_path, seed):
    """None lost and none twice: what a killed process had written others do not ask again, at once or next time."""
    rng, path = random.Random(seed), tmp_path / "answers.jsonl"
    shared = Shared(lm, path)
    for _ in range(3):
        count = rng.randint(1, 4)
        shared.start(count, {process: rng.randrange(8) for process in rng.sample(range(count), rng.randint(0, count))})
    assert shared.start(2) == [None, None]
    assert without_times(path) == alone and names(path) == ["answers.jsonl"]
    assert set(shared.kept.values()) == {1}


def test_others_answer_what_a_killed_process_had_claimed(lm, alone, tmp_path):
    path = tmp_path / "answers.jsonl"
    first, second, third = Shared(lm, path).start(3, {1: 2})
    assert (first, third) == (None, None) and isinstance(second, Killed)
    assert without_times(path) == alone and names(path) == ["answers.jsonl"]


def test_ctrl_c_in_one_ends_all_and_keeps_what_is_answered(lm, alone, tmp_path):
    path = tmp_path / "answers.jsonl"
    shared = Shared(lm, path)
    first, second = shared.start(2, {1: 3}, KeyboardInterrupt)
    assert isinstance(second, KeyboardInterrupt) and isinstance(first, PeerFailed)
    assert "Process 1 of 2" in str(first) and "was interrupted" in str(first)
    left = Journal(path, SETTINGS)
    assert sum(shared.kept.values()) == len(left.answers) >= 3
    assert len(left.answers) < len(MANY) * len(CACHES) - 4, "the first does not go on to the end"
    assert shared.start(1) == [None] and set(shared.kept.values()) == {1}
    assert sorted(map(str, without_times(path))) == sorted(map(str, alone)), "what was left comes first"


def test_ctrl_c_before_any_answer_leaves_nothing(lm, tmp_path):
    path = tmp_path / "out" / "answers.jsonl"
    raised = Shared(lm, path).start(2, {0: 0, 1: 0}, KeyboardInterrupt)
    assert any(isinstance(error, KeyboardInterrupt) for error in raised) and not path.parent.exists()


def test_a_cache_that_is_refused_stands_in_the_report_of_all(lm, tmp_path):
    caches = [*CACHES, Entry("alisa:ratio=0.5,layers=3")]
    shared = Shared(lm, tmp_path / "answers.jsonl", caches)
    assert shared.start(3) == [None] * 3
    assert list(shared.refused) == [("alisa:ratio=0.5,layers=3", None)] and len(shared.kept) == 2 * len(MANY)


def test_processes_that_were_not_started_alike_are_refused():
    first, second = groups(2)
    same, other = ({"seed": seed, "policies": [("full", None, "")]} for seed in (1, 2))
    raised = together([lambda: agree(first, "command", same), lambda: agree(second, "command", other)])
    assert raised[0] is None and isinstance(raised[1], UsageError)
    assert str(raised[1]).startswith("Process 1 was started with seed 2, and process 0 with 1; ")
    assert together([lambda: agree(first, "again", same), lambda: agree(second, "again", dict(same))]) == [None] * 2


@pytest.mark.parametrize("held", [False, True])
def test_folders_of_two_hosts_that_are_not_the_same_are_refused(lm, tmp_path, held):
    """``held``: the second host's folder has a file of an earlier run, with the same settings."""
    paths = [tmp_path / name / "answers.jsonl" for name in ("one", "two")]
    journals = [Journal(path, SETTINGS, process) for process, path in enumerate(paths)]
    made = groups(2)
    runners = [Runner(lm, MANY, *pair, everyone=group) for pair, group in zip(zip(journals), made, strict=True)]
    if held:
        earlier = Runner(lm, MANY, Journal(paths[1], SETTINGS))
        earlier.begin(CACHES)
        earlier._journal.close()

    def begin(place):
        with made[place].together():
            runners[place].begin(CACHES)
            made[place].gather("asked", "")

    first, second = together([lambda: begin(0), lambda: begin(1)])
    assert all("--out must name one folder that all hosts share" in str(error) for error in (first, second))
    for journal in journals:
        journal.close()


def test_what_a_killed_process_left_is_taken_over_by_the_next_run(tmp_path):
    path = tmp_path / "answers.jsonl"
    first = journal_at(path)
    second = Journal(path, SETTINGS, 1)
    second.begin("digest")
    first.add(answer(ITEMS[0]))
    second.add(answer(ITEMS[1]))
    second._file.write(b'{"policy": "fu')
    for journal in (first, second):
        journal.close()
    assert names(path) == ["answers-process-1.jsonl", "answers.jsonl"]
    with pytest.raises(UsageError, match="seed 42, and 3 is asked for"):
        Journal(path, dataclasses.replace(SETTINGS, seed=3))
    again = journal_at(path)
    assert [key[2] for key in again.answers] == ["a/0", "a/1"] and names(path) == ["answers.jsonl"]
    again.add(answer(ITEMS[2]))
    again.close()
    assert [row["item"] for row in without_times(path)[1:]] == ["a/0", "a/1", "a/2"]


def test_a_full_disk_is_one_sentence_and_loses_no_earlier_answer(tmp_path):
    path = tmp_path / "answers.jsonl"
    journal = journal_at(path)
    journal.add(answer(ITEMS[0]))
    journal._file.close()
    journal._file = open("/dev/full", "wb")  # noqa: SIM115  the journal closes it
    for act in (lambda: journal.add(answer(ITEMS[1])), journal.close):
        with pytest.raises(KvjaxError, match=r"answers\.jsonl cannot be written: No space left on device\.$"):
            act()
    journal.close()
    assert [key[2] for key in Journal(path, SETTINGS).answers] == ["a/0"]

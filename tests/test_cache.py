"""What is kept ready, and what has to go."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from conftest import Learned

from etcl_deploy.errors import CacheError, UnknownTaskError
from etcl_deploy.runtime.cache import Cache
from etcl_deploy.runtime.predictor import Predictor


@dataclass(eq=False)
class Thing:
    name: str
    nbytes: int = 10


class Maker:
    """Counts what is made and dropped."""

    def __init__(self, limit: int) -> None:
        self.made: list[str] = []
        self.dropped: list[str] = []
        self.cache = Cache(limit, self.make, lambda thing: self.dropped.append(thing.name))

    def make(self, name: str) -> Thing:
        self.made.append(name)
        if name == "bad":
            raise RuntimeError("cannot be made")
        return Thing(name)

    def use(self, *names: str) -> None:
        for name in names:
            with self.cache.use(name) as thing:
                assert thing.name == name


def test_the_least_recently_used_goes_first() -> None:
    """And what has to go is handed back before something new is made."""
    maker = Maker(30)
    maker.use("a", "b", "c", "a", "d")
    assert maker.dropped == ["b"]
    state = maker.cache.state()
    assert list(state.tasks) == ["c", "a", "d"]
    assert (state.hits, state.misses, state.evictions) == (1, 4, 1)


def test_what_is_in_use_stays() -> None:
    """The limit is passed while it has to be, and kept afterwards."""
    maker = Maker(10)
    with maker.cache.use("a"), maker.cache.use("b"):
        assert maker.dropped == []
        assert sum(maker.cache.held().values()) == 20
    assert len(maker.cache.held()) == 1


def test_pinned_ones_stay_and_cannot_take_more_than_there_is() -> None:
    """One too many is refused with the figures; let go, it goes like all others."""
    maker = Maker(25)
    maker.cache.pin("a")
    maker.cache.pin("a")
    maker.use("b", "c", "d")
    assert "a" in maker.cache.held()
    maker.cache.pin("b")
    with pytest.raises(CacheError, match="'c' cannot be kept ready: it takes 10 bytes, the 2 kept already 20"):
        maker.cache.pin("c")
    assert maker.cache.state().pinned == ["a", "b"]
    maker.cache.unpin("a")
    maker.use("c", "d")
    assert "a" not in maker.cache.held()


def test_prefetching_pushes_nothing_out() -> None:
    """As many as fit, in order; what is ready already counts."""
    maker = Maker(35)
    maker.use("z")
    assert maker.cache.prefetch(["a", "z", "b", "c"]) == ["a", "z", "b"]
    assert maker.dropped == []


def test_what_cannot_be_made_leaves_nothing_behind() -> None:
    """The next try is a new one, and others are not affected."""
    maker = Maker(30)
    for _ in range(2):
        with pytest.raises(RuntimeError), maker.cache.use("bad"):
            pass
    maker.use("a")
    assert maker.made == ["bad", "bad", "a"]
    assert list(maker.cache.held()) == ["a"]


def test_threads_that_want_the_same_make_it_once() -> None:
    """And those that want something else do not wait for it."""
    entered, go = threading.Event(), threading.Event()
    made: list[str] = []

    def make(name: str) -> Thing:
        made.append(name)
        if name == "slow":
            entered.set()
            assert go.wait(30)
        return Thing(name)

    cache = Cache(100, make, lambda thing: None)

    def use(name: str) -> str:
        with cache.use(name) as thing:
            return str(thing.name)

    with ThreadPoolExecutor(4) as pool:
        slow = [pool.submit(use, "slow") for _ in range(2)]
        assert entered.wait(30)
        assert pool.submit(use, "quick").result(30) == "quick"
        go.set()
        assert [found.result(30) for found in slow] == ["slow", "slow"]
    assert made == ["slow", "quick"]


def test_many_threads_never_see_what_was_taken_back() -> None:
    """A thing that was dropped is nobody's any more."""
    alive: set[int] = set()
    lock = threading.Lock()

    def make(name: str) -> Thing:
        thing = Thing(name)
        with lock:
            alive.add(id(thing))
        return thing

    def drop(thing: Thing) -> None:
        with lock:
            alive.discard(id(thing))

    cache = Cache(30, make, drop)

    def work(seed: int) -> None:
        for turn in range(300):
            name = "abcdefg"[(turn * (seed + 3)) % 7]
            with cache.use(name) as thing:
                assert thing.name == name
                assert id(thing) in alive

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert sum(cache.held().values()) <= 30
    assert len(alive) == len(cache.held())


def test_a_predictor_pins_and_prefetches_tasks(learned: Learned) -> None:
    """By name; names there are not are refused."""
    predictor = Predictor(learned.bundle)
    assert predictor.prefetch(["turned", "parity"]) == ["turned", "parity"]
    predictor.pin("negative")
    state = predictor.cache()
    assert (list(state.tasks), state.pinned) == (["turned", "parity", "negative"], ["negative"])
    predictor.unpin("negative")
    assert predictor.cache().pinned == []
    for call in (predictor.pin, lambda name: predictor.prefetch([name])):
        with pytest.raises(UnknownTaskError):
            call("nobody")
    with pytest.raises(CacheError):
        Predictor(learned.bundle, cache_bytes=1000).pin("parity")

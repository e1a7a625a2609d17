"""Sequences of tasks as tables of settings: one key says what is made of which data set.

    permute = "mnist"                 every task the same items, their pixels in another order
    split = "cifar100"                every task some of the classes: drawn at random, or by = "superclass"
    owners = "femnist1"               every task the items of one writer or person
    each = ["mnist", "svhn"]          every task a whole data set
    mix = [{...}, {...}]              the tasks of several such tables, shuffled

`tasks` is the number of tasks; `items` and `test_items` limit the items of each. `seed` decides all that is random
here. It is not the seed of learning, so tasks stay the same however they are learned. Tasks made by code have a name
instead of a table: "digits".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import chain, count
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from etcl_deploy.config import AtLeastOne, AtLeastTwo, ConfigSection, Seed
from etcl_deploy.data.digits import digits
from etcl_deploy.data.source import Part, Source
from etcl_deploy.errors import ConfigError, DataError

Find = Callable[[str], Source]  # a data set by its name


@dataclass(frozen=True)
class Sequence(ConfigSection):
    """Tasks made from data sets; `seed` decides what is random about them."""

    word: ClassVar[str]  # the key of a table that says what is made of what
    seed: Seed = 0

    @property
    def data(self) -> tuple[str, ...]:
        """The names of the data sets it is made from: here the one its word names."""
        return (getattr(self, self.word),)

    @property
    def count(self) -> int | None:
        """How many tasks it has; None where the data decides."""
        return getattr(self, "tasks", None)

    def make(self, find: Find) -> Iterator[Source]:
        """The tasks, one after another."""
        raise NotImplementedError

    def draws(self, number: int) -> torch.Generator:
        """Random numbers for the task of that number, from 0."""
        return torch.Generator().manual_seed(self.seed * 100_003 + number)


@dataclass(frozen=True)
class Sampled(Sequence):
    """A sequence whose tasks can be made smaller."""

    items: AtLeastTwo | None = None  # a task's training items at most, drawn at random
    test_items: AtLeastOne | None = None

    def sample(self, source: Source, draws: torch.Generator) -> Source:
        """The source with no more items than a task may have."""
        return source.sampled(self.items, self.test_items, draws)


@dataclass(frozen=True)
class Permute(Sampled):
    """Every task the same items, their pixels in another order."""

    word = "permute"
    permute: str = ""
    tasks: AtLeastOne = 10

    def make(self, find: Find) -> Iterator[Source]:
        """The same permutations every time."""
        source = find(self.permute)
        pixels = source.train.images
        if not isinstance(pixels, np.ndarray):
            raise DataError(f"{source.name} comes as image files; only arrays of one size can be permuted")
        for number in range(self.tasks):
            draws = self.draws(number)
            order = torch.randperm(pixels.shape[1] * pixels.shape[2], generator=draws).numpy()
            chosen = self.sample(source, draws)
            train, test = (replace(part, images=permuted(part, order)) for part in (chosen.train, chosen.test))
            yield Source(f"permutation-{number + 1:02d}", source.classes, train, test)


@dataclass(frozen=True)
class Split(Sampled):
    """Every task some of the classes."""

    word = "split"
    split: str = ""
    tasks: AtLeastOne | None = None  # None: as many as there are superclasses, or pairs of classes
    by: Literal["class", "superclass"] = "class"

    def make(self, find: Find) -> Iterator[Source]:
        """Classes are numbered anew in every task."""
        source = find(self.split)
        for number, (name, classes) in enumerate(self._shares(source)):
            yield self.sample(source.of_classes(classes, name), self.draws(number))

    def _shares(self, source: Source) -> list[tuple[str, list[int]]]:
        """Names of the tasks, each with its classes."""
        if self.by == "superclass":
            if source.groups is None:
                raise ConfigError(f"{source.name} has no superclasses; split it by class")
            groups = dict.fromkeys(sorted(source.groups))
            shares = [(group, [c for c, g in enumerate(source.groups) if g == group]) for group in groups]
            if self.tasks and self.tasks > len(shares):
                raise ConfigError(f"{source.name} has {len(shares)} superclasses, not {self.tasks}")
            return shares[: self.tasks]
        count, classes = self.tasks or len(source.classes) // 2, len(source.classes)
        if count > classes // 2:
            raise ConfigError(f"{classes} classes of {source.name} make at most {classes // 2} tasks, not {count}")
        order = torch.randperm(classes, generator=self.draws(0)).numpy()
        parts = np.array_split(order, count)
        return [(f"classes-{n + 1:02d}", sorted(part.tolist())) for n, part in enumerate(parts)]


@dataclass(frozen=True)
class ByOwner(Sampled):
    """Every task the items of one writer or person. With more of them than tasks, they are drawn at random; with fewer,
    there are fewer tasks."""

    word = "owners"
    owners: str = ""
    tasks: AtLeastOne | None = None  # None: everyone's

    def make(self, find: Find) -> Iterator[Source]:
        """All classes in every task, so that heads mean the same."""
        source = find(self.owners)
        if source.train.owners is None or source.test.owners is None:
            raise ConfigError(f"{source.name} does not say whose its items are")
        tested = set(source.test.owners.tolist())
        people = [owner for owner in dict.fromkeys(source.train.owners.tolist()) if owner in tested]
        if not people:
            raise DataError(f"{source.name} has training and test items of nobody")
        if self.tasks and self.tasks < len(people):
            chosen = torch.randperm(len(people), generator=self.draws(0))[: self.tasks].tolist()
            people = [people[place] for place in chosen]
        for number, owner in enumerate(people):
            yield self.sample(source.of_owner(owner), self.draws(number))


@dataclass(frozen=True)
class Each(Sampled):
    """Every task a whole data set."""

    word = "each"
    each: tuple[str, ...] = ()

    @property
    def data(self) -> tuple[str, ...]:
        """All of them."""
        return self.each

    @property
    def count(self) -> int:
        """A task each."""
        return len(self.each)

    def make(self, find: Find) -> Iterator[Source]:
        """In the order they are named."""
        for number, name in enumerate(self.each):
            yield self.sample(find(name), self.draws(number))


@dataclass(frozen=True)
class Mix(Sequence):
    """The tasks of several sequences, shuffled."""

    word = "mix"
    mix: tuple[Sequence, ...] = ()

    @property
    def data(self) -> tuple[str, ...]:
        """Those of all the sequences."""
        return tuple(dict.fromkeys(name for part in self.mix for name in part.data))

    @property
    def count(self) -> int | None:
        """Those of all the sequences."""
        counts = [part.count for part in self.mix]
        return None if None in counts else sum(count or 0 for count in counts)

    def make(self, find: Find) -> Iterator[Source]:
        """The name of a task begins with its data set; a number follows where two would be equal."""
        tasks: dict[str, Source] = {}
        for part in self.mix:
            for task in part.make(find):
                plain = isinstance(part, Mix) or task.name in part.data
                name = task.name if plain else f"{'-'.join(part.data)}-{task.name}"
                numbered = (f"{name}-{number}" for number in count(2))
                name = next(unused for unused in chain([name], numbered) if unused not in tasks)
                tasks[name] = replace(task, name=name)
        for place in torch.randperm(len(tasks), generator=self.draws(0)).tolist():
            yield list(tasks.values())[place]


@dataclass(frozen=True)
class ByCode(Sequence):
    """Tasks that a function makes, without a data set."""

    name: str = ""

    @property
    def data(self) -> tuple[str, ...]:
        """None."""
        return ()

    @property
    def count(self) -> int:
        """As many as the function makes."""
        return len(MADE_BY_CODE[self.name]())

    def make(self, find: Find) -> Iterator[Source]:
        """In the order of the function."""
        return iter(MADE_BY_CODE[self.name]())


KINDS: dict[str, type[Sequence]] = {kind.word: kind for kind in (Permute, Split, ByOwner, Each, Mix)}
MADE_BY_CODE: dict[str, Callable[[], list[Source]]] = {"digits": digits}


def sequence_of(table: Any) -> Sequence:
    """The sequence of that name, or that a table describes; whatever is not one is refused."""
    if isinstance(table, str):
        if table not in MADE_BY_CODE:
            known = ", ".join(MADE_BY_CODE)
            raise ConfigError(f'unknown sequence {table!r}; a table such as {{permute = "mnist"}}, or: {known}')
        return ByCode(name=table)
    words = [word for word in KINDS if isinstance(table, Mapping) and word in table]
    if len(words) != 1:
        raise ConfigError(f"a sequence is a table with one of {', '.join(KINDS)}, not {table!r}")
    kind, values = KINDS[words[0]], dict(table)
    settings = [f.name for f in fields(kind)]
    unknown = [key for key in values if key not in settings]
    if unknown:
        raise ConfigError(f"unknown key {unknown[0]!r} in a sequence that has {words[0]}; known: {', '.join(settings)}")
    for word in ("each", "mix"):
        if word in values:
            kind_of_item = str if word == "each" else Mapping
            listed = values[word] if isinstance(values[word], list | tuple) else []
            if not listed or not all(isinstance(item, kind_of_item) for item in listed):
                what = "names of data sets" if word == "each" else "sequences"
                raise ConfigError(f"{word} must be a list of {what}, not {values[word]!r}")
            values[word] = tuple(map(sequence_of, values[word]) if word == "mix" else values[word])
    return kind(**values)


def permuted(part: Part, order: np.ndarray) -> np.ndarray:
    """The images with their pixels in another order."""
    images = np.asarray(part.images)
    return images.reshape(len(images), len(order), -1)[:, order].reshape(images.shape)

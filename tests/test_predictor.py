from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from conftest import Learned

from etcl_deploy.bundle.layout import split
from etcl_deploy.core.prediction import Prediction
from etcl_deploy.errors import BadImageError, BundleError, UnknownTaskError
from etcl_deploy.learn.trainer import predict
from etcl_deploy.runtime.predictor import Predictor
from etcl_deploy.runtime.subnet import materialize


def test_a_subnet_answers_like_the_learned_network(learned: Learned) -> None:
    """Baked weights and folded normalization give the same class and logits within 1e-5."""
    for task in learned.tasks:
        expected = predict(learned.run.network, task.name, task.test_x)
        with torch.inference_mode():
            found = materialize(learned.bundle, task.name)(task.test_x)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(found.argmax(1), expected.argmax(1))


def test_a_subnet_holds_no_weight_outside_its_mask(learned: Learned) -> None:
    """One task's weights never leak into another's."""
    bundle = learned.bundle
    subnet = materialize(bundle, "turned")
    for step, mask in split(bundle.mask("turned"), bundle.layout.weights).items():
        assert not subnet.weights[f"{step}.weight"][~mask].any()
    assert not subnet.plan.norms, "every normalization was folded"


def test_a_mixed_batch_gives_each_item_its_own_answer(learned: Learned) -> None:
    """Alone, with its task, or mixed with all others: same class, scores within 1e-5, in order."""
    predictor = Predictor(learned.bundle)
    names = [task.name for task in learned.tasks] * 6
    items = [task.test_x[turn] for turn in range(6) for task in learned.tasks]
    mixed = predictor.predict(items, names)
    for item, name, answer in zip(items, names, mixed, strict=True):
        alone = predictor.predict([item], [name])[0]
        assert (answer.task, answer.label, answer.index) == (name, alone.label, alone.index)
        assert answer.scores == pytest.approx(alone.scores, abs=1e-5)
        assert sum(answer.scores.values()) == pytest.approx(1, abs=1e-5)
        assert answer.label == max(answer.scores, key=lambda label: answer.scores[label])


def test_nothing_in_nothing_out(learned: Learned) -> None:
    """An empty batch is a batch."""
    assert Predictor(learned.bundle).predict([], []) == []


def test_bad_items_are_refused(learned: Learned) -> None:
    """An unknown task, a bad image, lists that do not match."""
    predictor, good = Predictor(learned.bundle), learned.tasks[0].test_x[0]
    with pytest.raises(UnknownTaskError):
        predictor.predict([good], ["nobody"])
    with pytest.raises(BadImageError):
        predictor.predict([b"no image"], ["parity"])
    with pytest.raises(ValueError, match="1 inputs and 0 tasks"):
        predictor.predict([good], [])


def test_an_answer_that_is_no_number_is_an_error(learned: Learned) -> None:
    """Finite numbers, whose products are not: NaN is nothing JSON could hold, or a person could use."""
    bundle = learned.bundle
    task = bundle.task("parity")
    huge = replace(task, head={**task.head, "weight": torch.full_like(task.head_values()["weight"], 3e38)})
    predictor = Predictor(replace(bundle, tasks={**bundle.tasks, "parity": huge}))
    with pytest.raises(BundleError, match="'parity' has no answer"):
        predictor.predict([learned.tasks[0].test_x[0]], ["parity"])


def test_threads_share_one_predictor(learned: Learned) -> None:
    """Many threads, a cache of one: every answer is right."""
    predictor = Predictor(learned.bundle, cache_bytes=0)
    wanted = [(task.name, image) for image in range(8) for task in learned.tasks]
    images = {task.name: task.test_x for task in learned.tasks}

    def ask(item: tuple[str, int]) -> Prediction:
        name, position = item
        return predictor.predict([images[name][position]], [name])[0]

    expected = [ask(item) for item in wanted]
    with ThreadPoolExecutor(8) as pool:
        assert [a.label for a in pool.map(ask, wanted)] == [a.label for a in expected]

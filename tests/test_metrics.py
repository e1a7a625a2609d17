from __future__ import annotations

import pytest
import torch

from etcl_deploy.core.task import percent_right
from etcl_deploy.learn import metrics


def test_accuracy_is_of_all_items() -> None:
    """The sizes of the batches do not matter; the last may be smaller."""
    logits, labels = torch.tensor([[2.0, 1.0], [0.0, 3.0], [1.0, 0.0]]), torch.tensor([0, 1, 1])
    assert percent_right([(logits, labels)]) == 100 * 2 / 3
    assert percent_right(zip(logits.split(2), labels.split(2), strict=True)) == 100 * 2 / 3


def test_acc_and_bwt_of_a_known_matrix() -> None:
    """ACC is the mean of the last row; BWT the mean change of earlier tasks, as a fraction."""
    matrix = [[90.0], [80.0, 70.0], [85.0, 76.0, 60.0]]
    assert metrics.average_accuracy(matrix) == pytest.approx((85 + 76 + 60) / 3)
    assert metrics.backward_transfer(matrix) == pytest.approx(((85 - 90) + (76 - 70)) / 2 / 100)


def test_one_task_has_no_backward_transfer() -> None:
    """With a single task there is nothing to transfer back to."""
    assert metrics.backward_transfer([[90.0]]) is None


def test_of_what_is_not_known_there_is_no_mean() -> None:
    """Leaving out a task that cannot be measured would make it look like the others."""
    assert metrics.average_accuracy([[90.0], [None, 70.0]]) is None
    assert metrics.backward_transfer([[90.0], [85.0, 70.0], [None, 71.0, 60.0]]) is None
    assert metrics.forward_transfer([[90.0], [85.0, None]], [50.0, 60.0]) is None

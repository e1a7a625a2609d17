"""learn -> bundle -> handler -> ONNX: four answers, all equal."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import Learned

from etcl_deploy.export.parity import session
from etcl_deploy.export.to_mar import archive
from etcl_deploy.export.to_onnx import export_task
from etcl_deploy.learn.trainer import predict
from etcl_deploy.runtime.images import png
from etcl_deploy.runtime.predictor import Predictor
from etcl_deploy.serve.process import serving
from etcl_deploy.serve.properties import any_free_port


@pytest.mark.torchserve
def test_the_same_image_gets_the_same_answer_everywhere(learned: Learned, tmp_path: Path) -> None:
    """Network, Predictor, TorchServe and onnxruntime: same class, scores within 1e-5, for every task."""
    archive(learned.path, "digits", tmp_path)
    predictor = Predictor(learned.bundle)
    with serving("digits", tmp_path, any_free_port()) as server:
        for task in learned.tasks:
            images = task.test_x[:10]
            learned_scores = predict(learned.run.network, task.name, images).softmax(1).numpy()
            export_task(learned.bundle, task.name, tmp_path / "task.onnx", images)
            onnx_scores, _ = session(tmp_path / "task.onnx").run(None, {"image": images.numpy()})
            answers = predictor.predict(list(images), [task.name] * 10)
            bundle_scores = np.array([list(answer.scores.values()) for answer in answers])
            with server.client() as client:
                http_scores = [list(client.predict(png(image), task.name).scores.values()) for image in images]
            for scores in (bundle_scores, np.array(http_scores), onnx_scores):
                np.testing.assert_allclose(scores, learned_scores, atol=1e-5)
                assert (scores.argmax(1) == learned_scores.argmax(1)).all()

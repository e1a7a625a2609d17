"""learn -> bundle -> handler -> ONNX: four answers, all equal."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import Learned

from etcl_deploy.demo import png
from etcl_deploy.export.parity import session
from etcl_deploy.export.to_mar import archive
from etcl_deploy.export.to_onnx import export_task
from etcl_deploy.learn.trainer import predict
from etcl_deploy.runtime.predictor import Predictor
from etcl_deploy.serve.properties import any_free_port
from etcl_deploy.serve.server import serving


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
            http_scores = []
            for image in images:
                answer = server.ask(
                    server.inference_url, body=png(image), X_ETCL_Task=task.name, Content_Type="image/png"
                )
                http_scores.append(list(answer["scores"].values()))
            for scores in (bundle_scores, np.array(http_scores), onnx_scores):
                np.testing.assert_allclose(scores, learned_scores, atol=1e-5)
                assert (scores.argmax(1) == learned_scores.argmax(1)).all()

"""Bundles made up from random numbers, where nothing is learned and everything is there; servers made up as well."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from etcl_deploy.bundle.bundle import Bundle, BundledTask
from etcl_deploy.bundle.layout import Layout
from etcl_deploy.bundle.precision import reduced_head, reduced_weights
from etcl_deploy.core.prediction import Prediction
from etcl_deploy.core.preprocessing import Preprocessing
from etcl_deploy.network.backbones import BACKBONES


def made_bundle(
    tasks: int,
    backbone: str = "fcn3",
    width: int = 5,
    side: int = 4,
    density: float = 0.4,
    precision: str = "fp32",
    seed: int = 0,
) -> Bundle:
    """Tasks whose masks each differ a little from the one before; fewer of them are the first of more."""
    chance = torch.Generator().manual_seed(seed)
    preprocessing = Preprocessing(side, side, 1)
    plan = BACKBONES[backbone]((1, side, side), width)
    plan = plan.without(plan.dropouts)
    layout = Layout(plan)
    weights = torch.randn(layout.weight_count, generator=chance) / 4
    masks: list[torch.Tensor] = []
    made = {}
    for number in range(tasks):
        mask = torch.rand(layout.weight_count, generator=chance) < density
        if masks:
            mask = torch.where(torch.rand(layout.weight_count, generator=chance) < 0.2, mask, masks[-1])
        masks.append(mask)
        name, classes = f"täsk {number}", tuple(f"class {n}" for n in range(2 + number % 3))
        head = {key: torch.randn(shape, generator=chance) for key, shape in plan.head_shapes(len(classes)).items()}
        norm = torch.rand(layout.norm_count, generator=chance)
        share = float(mask.float().mean())
        reduced = reduced_head(head, precision)
        made[name] = BundledTask(name, classes, share, 50.0 + number % 49, 51.0 + number % 49, norm, reduced)
    stored, scale = reduced_weights(torch.where(torch.stack(masks).any(0), weights, 0), precision, masks, layout)
    return Bundle(backbone, plan, preprocessing, stored, scale, made, masks, {"recipe": "made up"})


@contextmanager
def loopback(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server that answers as the handler does, for the time of a `with` block."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def expect(answer: dict[str, Any], expected: Prediction) -> None:
    """The JSON of an answer holds a prediction, but for rounding."""
    wanted = {**expected.as_json(), "scores": pytest.approx(expected.scores, abs=1e-5)}
    assert {key: answer.get(key) for key in wanted} == wanted, answer

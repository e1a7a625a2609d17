"""TorchServe handler: translates between TorchServe's calls and a `Service`.

TorchServe imports this file by its base name from the extracted archive and expects exactly one class in it.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from ts.metrics.metric_type_enum import MetricTypes

from etcl_deploy.runtime.counters import COUNTERS, GAUGES, Update, report_forever
from etcl_deploy.runtime.service import Received, Service, open_service

BATCH_ANSWER_BYTES = 6_000_000  # of a batch; TorchServe's own limit is 6,553,500


class EtclHandler:
    """All tasks of one bundle behind one model name."""

    def __init__(self) -> None:
        self.service: Service | None = None

    def initialize(self, context: Any) -> None:
        """Open the bundle of the extracted archive, and start to report metrics."""
        directory = Path(context.system_properties["model_dir"])
        settings = (context.model_yaml_config or {}).get("etcl", {})
        self.service = open_service(directory / context.manifest["model"]["serializedFile"], directory, settings)
        if context.metrics is not None:
            threading.Thread(target=self._report, args=(context.metrics,), daemon=True).start()

    def handle(self, data: list[dict[str, Any]], context: Any) -> list[str]:
        """One answer per request, in order."""
        assert self.service is not None
        batch = [Received(fields, context.get_all_request_header(index)) for index, fields in enumerate(data)]
        replies = self.service.reply(batch, context.model_name, BATCH_ANSWER_BYTES)
        for index, reply in enumerate(replies):
            context.set_response_content_type(index, "application/json")
            if reply.status != 200:
                context.set_response_status(reply.status, reply.phrase, index)
        return [reply.body for reply in replies]

    def _report(self, metrics: Any) -> None:
        assert self.service is not None
        report_forever(self.service.meter, self.service.predictor, _updates(metrics))


def _updates(metrics: Any) -> Update:
    """Updates of TorchServe's metrics, each added to its cache where metrics.yaml was not read."""
    kinds = {MetricTypes.COUNTER: COUNTERS, MetricTypes.GAUGE: GAUGES}
    known = {
        name: metrics.cache.get(kind, {}).get(name) or metrics.add_metric_to_cache(name, unit, labels, kind)
        for kind, declared in kinds.items()
        for name, (unit, labels) in declared.items()
    }
    return lambda name, value, labels: known[name].add_or_update(value, list(labels))

"""The server's configuration: TorchServe's secure defaults, stated, and values that suit one small machine."""

from __future__ import annotations

import re
import socket

from etcl_deploy.errors import ServeError

HOST = "127.0.0.1"
PORTS = 5  # in a row: inference, management, metrics, and two for gRPC
DEFAULT_PORT = 8080


def render(model: str, store: str, port: int, metrics: str, *, pushes: bool = False) -> str:
    """The text of `config.properties` for one model in `store`; workers and batches are in its archive.

    `metrics` is the file that declares them. With `pushes`, models can be registered by those who have the token of the
    management API, from the store.
    """
    lines = {
        "inference_address": f"http://{HOST}:{port}",
        "management_address": f"http://{HOST}:{port + 1}",
        "metrics_address": f"http://{HOST}:{port + 2}",
        "grpc_inference_address": HOST,
        "grpc_inference_port": port + 3,
        "grpc_management_address": HOST,
        "grpc_management_port": port + 4,
        "model_store": store,
        "load_models": f"{model}.mar",
        "allowed_urls": f"file://{re.escape(store)}/.*",
        "disable_token_authorization": "false",
        "enable_model_api": str(pushes).lower(),
        "enable_envvars_config": "false",
        "install_py_dep_per_model": "false",
        "max_request_size": 6_553_500,
        "max_response_size": 6_553_500,
        "job_queue_size": 1000,
        "disable_system_metrics": "true",
        "metrics_mode": "prometheus",
        "metrics_config": metrics,
    }
    return "".join(f"{key}={_escaped(str(value))}\n" for key, value in lines.items())


def _escaped(value: str) -> str:
    """A value as Java reads it from a properties file, which is Latin-1 with escapes."""
    units = value.encode("utf-16-be")
    codes = [int.from_bytes(units[i : i + 2], "big") for i in range(0, len(units), 2)]
    return "".join(chr(code) if 32 <= code < 127 and code != ord("\\") else f"\\u{code:04x}" for code in codes)


def cores() -> int:
    """How many cores this process may use; a container's limit counts."""
    from joblib import cpu_count  # takes a quarter of a second

    return int(cpu_count())


def check_ports(first: int) -> None:
    """Refuse a port that is taken, or followed by one of the next four that is."""
    for port in range(first, first + PORTS):
        if not _is_free(port):
            raise ServeError(f"port {port} is taken; name another with --port (it uses {PORTS} in a row)")


def any_free_port() -> int:
    """A port with four free ones after it, for servers nobody needs to find by number."""
    for _ in range(100):
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            first: int = probe.getsockname()[1]
        if first + PORTS < 65536 and all(_is_free(port) for port in range(first, first + PORTS)):
            return first
    raise ServeError(f"found no {PORTS} free ports in a row")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True

"""A server of our own, and what this machine can do."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from etcl_deploy.commands.console import Json, Store, err, show
from etcl_deploy.errors import ServeError
from etcl_deploy.render import plain


def serve(
    path: Annotated[Path | None, typer.Argument(metavar="BUNDLE", help="x.etcl.")] = None,
    name: Annotated[str | None, typer.Option(help="The model's name; else the file's.")] = None,
    model_store: Store = Path("model_store"),
    port: Annotated[int, typer.Option(min=1, max=65531, help="First of five in a row.")] = 8080,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Processes that answer.")] = 1,
    stop: Annotated[bool, typer.Option("--stop", help="Stop the server.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Say whether it runs.")] = False,
    as_json: Json = False,
) -> None:
    """Start TorchServe on loopback with tokens on, and wait until it answers."""
    from etcl_deploy.bundle.bundle import load_bundle
    from etcl_deploy.deploy import serve_bundle
    from etcl_deploy.render import server_report
    from etcl_deploy.serve import server as servers

    if stop and status:
        raise typer.BadParameter("--stop or --status, not both")
    if path is None and not (stop or status):
        raise typer.BadParameter("name a bundle to serve, or use --status or --stop")
    chosen = name or (path.stem if path else _only_server(model_store))
    if stop:
        found = servers.find(chosen, model_store)
        if found is None:
            raise ServeError(f"no server named {chosen!r} was started from {model_store}")
        servers.stop(found)
    if stop or status:
        info = servers.status(chosen, model_store)
        show(info, as_json=as_json, picture=server_report(info))
    elif path:
        started = serve_bundle(path, chosen, model_store, port, workers)
        show(started.as_json(), as_json=as_json, picture=server_report(started.as_json()))
        line = started.example(next(iter(load_bundle(path).tasks)))
        err.print("[bold]try it:[/]", plain(line, "cyan"), soft_wrap=True, highlight=False)


def _only_server(model_store: Path) -> str:
    from etcl_deploy.serve.server import names

    found = names(model_store)
    if len(found) != 1:
        known = f"; there are: {', '.join(found)}" if found else f" in {model_store}"
        raise ServeError(f"name the server with --name{known}" if found else f"no server{known}")
    return found[0]


def doctor(as_json: Json = False) -> None:
    """What works on this machine, what is missing, how to get it."""
    from etcl_deploy.doctor import examine
    from etcl_deploy.render import doctor_report

    checks = examine()
    show([asdict(c) for c in checks], as_json=as_json, picture=doctor_report(checks))
    if not all(check.ok or not check.needed for check in checks):
        raise typer.Exit(1)

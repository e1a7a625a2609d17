"""The server, and the checks of this machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from etcl_deploy.cli.commands.console import Json, Store, err, note, show
from etcl_deploy.errors import ServeError


def serve(
    path: Annotated[Path | None, typer.Argument(metavar="BUNDLE", help="A bundle file (x.etcl).")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the model; default: that of the file.")] = None,
    model_store: Store = Path("model_store"),
    port: Annotated[int, typer.Option(min=1, max=65531, help="The first of five ports in a row.")] = 8080,
    workers: Annotated[
        int | None, typer.Option(min=1, max=64, help="Number of worker processes; default: one per core.")
    ] = None,
    cache_mb: Annotated[
        int | None, typer.Option(min=0, help="Memory of each worker for tasks that are ready, in MB.")
    ] = None,
    pin: Annotated[
        list[str] | None, typer.Option(metavar="TASK", help="Keep this task ready; may be repeated.")
    ] = None,
    prefetch: Annotated[bool, typer.Option("--prefetch", help="Make tasks ready before the first request.")] = False,
    allow_push: Annotated[bool, typer.Option("--allow-push", help="Let `etcl push` replace the bundle.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="Stop the server and its workers.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Show whether the server runs.")] = False,
    as_json: Json = False,
) -> None:
    """Start TorchServe on loopback, with tokens, and wait until it answers."""
    from etcl_deploy.report.tables import server_report
    from etcl_deploy.serve import process, server

    if stop and status:
        raise typer.BadParameter("--stop or --status, not both")
    if path is None and not (stop or status):
        raise typer.BadParameter("name a bundle to serve, or use --status or --stop")
    chosen = name or (path.stem if path else _only_server(model_store))
    if stop:
        process.stop(server.known(chosen, model_store))
    if stop or status or path is None:
        info = server.status(chosen, model_store)
    else:
        from etcl_deploy.serve.start import ServeOptions, serve_bundle

        cache_bytes = None if cache_mb is None else cache_mb * 1_000_000
        options = ServeOptions(port, workers, cache_bytes, tuple(pin or ()), prefetch, allow_push)
        info = serve_bundle(path, chosen, model_store, options).as_json()
    show(info, as_json=as_json, picture=server_report(info))
    if info["running"]:
        _show_examples(chosen, model_store)


def _show_examples(name: str, model_store: Path) -> None:
    """Print how to ask the server, with its current token."""
    from etcl_deploy.serve.server import known
    from etcl_deploy.serve.token_renewer import renewer_of

    server = known(name, model_store)
    try:
        tasks = server.describe(customized=True)["customizedMetadata"]["tasks"]
    except ServeError as error:
        note(f"it does not answer yet: {error}", "yellow")
        return
    task = tasks[0]["name"] if isinstance(tasks, list) else "TASK"
    if renewer_of(Path(server.directory)) is None:
        note(
            "its tokens are no longer renewed and expire within the hour: stop the server and start it again", "yellow"
        )
    for title, text in zip(("try it:", "or in Python:"), server.examples(task), strict=True):
        err.print(f"[bold]{title}[/]")
        for line in text.splitlines():
            note(line, "cyan")


def push(
    path: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A bundle, or a delta to the one being served.")],
    to: Annotated[str, typer.Option(metavar="URL", help="Address of the server, as `etcl serve` printed it.")],
    model_store: Store = Path("model_store"),
    as_json: Json = False,
) -> None:
    """Replace the bundle of a running server with no failed request; on any failure the old one stays."""
    from etcl_deploy.serve.push import find_server, push_bundle

    server = find_server(to, model_store)
    bundle, version = push_bundle(path, server)
    result = {"name": server.name, "version": version, "digest": bundle.digest, "tasks": list(bundle.tasks)}
    show(result, as_json=as_json, picture=f"{server.name} {version} is served: {len(bundle.tasks)} tasks of {path}")


def _only_server(model_store: Path) -> str:
    from etcl_deploy.serve.server import names

    servers = names(model_store)
    if not servers:
        raise ServeError(f"no server in {model_store}")
    if len(servers) > 1:
        raise ServeError(f"name the server with --name; there are: {', '.join(servers)}")
    return servers[0]


def doctor(as_json: Json = False) -> None:
    """Check what works on this machine, and show how to get what is missing."""
    from etcl_deploy.cli.doctor import examine
    from etcl_deploy.report.tables import doctor_report

    checks = [asdict(check) for check in examine()]
    show(checks, as_json=as_json, picture=doctor_report(checks))
    if not all(check["ok"] or not check["needed"] for check in checks):
        raise typer.Exit(1)

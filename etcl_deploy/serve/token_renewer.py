"""Renews the tokens of a server as long as it runs: `python -m etcl_deploy.serve.token_renewer DIRECTORY`.

TorchServe makes its tokens for an hour and then refuses everybody: it makes new ones only when asked to, with the API
key of its key file. `etcl serve` starts one beside each server; it ends with the server.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

import httpx
import psutil

from etcl_deploy.client.protocol import KEY_FILE, read_keys, read_token

EARLY_SECONDS = 600  # before they expire
CHECK_SECONDS = 5
PID_FILE = "token_renewer.pid"
KINDS = ("management", "inference")


def renewer_of(directory: Path) -> psutil.Process | None:
    """The process that keeps the tokens of the server of a directory, if it runs."""
    with suppress(OSError, ValueError, psutil.Error):
        process = psutil.Process(int((directory / PID_FILE).read_text()))
        if str(directory) in process.cmdline():  # and not somebody who has its number now
            return process
    return None


def seconds_left(key_file: Path) -> float:
    """Seconds until the first token expires."""
    keys = read_keys(key_file)
    ends = [datetime.fromisoformat(_iso(keys[kind]["expiration time"])) for kind in KINDS]
    return (min(ends) - datetime.now(timezone.utc)).total_seconds()


def renew(key_file: Path, management: str) -> None:
    """Have both tokens made anew; TorchServe writes them to the file."""
    for kind in KINDS:
        headers = {"Authorization": f"Bearer {read_token(key_file, 'API')}"}
        url = f"{management}/token?type={kind}"
        httpx.get(url, headers=headers, timeout=30, trust_env=False).raise_for_status()  # no proxy should see a key


def run(directory: Path, early: float = EARLY_SECONDS) -> None:
    """Renew the tokens of the server of a directory whenever they are about to expire, until it is gone."""
    from etcl_deploy.serve.server import recorded

    key_file = directory / KEY_FILE
    while (server := recorded(directory)) and server.process():
        try:
            if seconds_left(key_file) < early:
                renew(key_file, server.management_address)
        except Exception as error:  # a file that is being written, a server that is busy: there is time to try again
            sys.stderr.write(f"{datetime.now(timezone.utc):%F %T} {type(error).__name__}: {error}\n")
        time.sleep(CHECK_SECONDS)


def _iso(text: str) -> str:
    """A time as Java writes it, with as many digits as Python reads."""
    whole, point, rest = text.rstrip("Z").partition(".")
    return f"{whole}{point}{rest[:6].ljust(6, '0')}+00:00" if point else f"{whole}+00:00"


if __name__ == "__main__":
    run(Path(sys.argv[1]))

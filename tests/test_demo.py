"""The demo, interrupted. test_readme.py runs it whole."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from etcl_deploy import demo

# The demo with a network so small that learning takes seconds.
SMALL_DEMO = """
import sys
from pathlib import Path
from etcl_deploy import demo
from etcl_deploy.settings import load_recipe
demo.load_recipe = lambda name: load_recipe(name).with_values({"width": 4, "epochs": 1})
demo.run_demo(Path(sys.argv[1]), lambda event: None, lambda what: print(what, flush=True))
"""


def running(workdir: Path) -> set[psutil.Process]:
    """The server of the demo in `workdir`, and its workers."""
    family = set()
    for process in psutil.process_iter():
        try:
            if str(workdir) in " ".join(process.cmdline()) and "ModelServer" in " ".join(process.cmdline()):
                family |= {process, *process.children(recursive=True)}
        except psutil.Error:
            continue
    return family


def alive(processes: set[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_a_demo_may_run_in_any_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the main thread can handle signals; the demo starts in the others too."""

    class StartedError(Exception):
        pass

    def load_recipe(name: str) -> None:
        raise StartedError

    monkeypatch.setattr(demo, "load_recipe", load_recipe)
    with ThreadPoolExecutor(1) as threads, pytest.raises(StartedError):
        threads.submit(demo.run_demo, tmp_path, lambda event: None, lambda what: None).result()


@pytest.mark.torchserve
@pytest.mark.parametrize(
    ("number", "stage"), [(signal.SIGINT, "starting TorchServe"), (signal.SIGTERM, "asking TorchServe")]
)
def test_an_interrupted_demo_leaves_no_process(tmp_path: Path, number: signal.Signals, stage: str) -> None:
    """Neither SIGINT nor SIGTERM does, neither while TorchServe starts nor while it answers."""
    process = subprocess.Popen(
        [sys.executable, "-c", SMALL_DEMO, tmp_path],
        stdout=subprocess.PIPE,
        text=True,
        # A shell starts background jobs, such as a whole test run, with SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    for line in process.stdout:
        if stage in line:
            break
    # A server that is starting has no worker yet; one that answers has.
    least = 1 if stage == "starting TorchServe" else 2
    deadline = time.monotonic() + 60
    while len(family := running(tmp_path)) < least and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(family) >= least, "the server is there before the interruption"
    process.send_signal(number)
    assert process.wait(timeout=60) != 0
    process.stdout.close()
    assert not alive(family)
    assert not running(tmp_path)

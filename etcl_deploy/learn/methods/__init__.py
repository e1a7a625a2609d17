"""Ways to learn a sequence of tasks, by name: the same budget, data and reporting for each."""

from __future__ import annotations

from etcl_deploy.learn.methods.dense import Ewc, Naive, One
from etcl_deploy.learn.methods.etcl import Etcl, Wsn
from etcl_deploy.learn.methods.frozen import Piggyback, Supsup
from etcl_deploy.learn.methods.gpm import Gpm
from etcl_deploy.learn.methods.hat import Hat
from etcl_deploy.learn.methods.method import HeldBack, Method, TaskContext

METHODS: dict[str, type[Method]] = {
    "etcl": Etcl,
    "wsn": Wsn,
    "supsup": Supsup,
    "piggyback": Piggyback,
    "hat": Hat,
    "gpm": Gpm,
    "ewc": Ewc,
    "naive": Naive,
    "one": One,
}

__all__ = ["METHODS", "HeldBack", "Method", "TaskContext"]

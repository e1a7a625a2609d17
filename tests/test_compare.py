"""Methods side by side, and the page that shows them."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest
from conftest import Learned
from factories import PHOTO_SETTINGS, stop_at
from test_cli import answer, etcl, fails

from etcl_deploy.config import Config
from etcl_deploy.errors import ConfigError, EtclError, RunError
from etcl_deploy.learn.events import TaskStarted
from etcl_deploy.report.write import write_report
from etcl_deploy.runs.compare import MethodComparison, compare
from etcl_deploy.runs.session import Session
from etcl_deploy.runs.statistics import needed_bytes, overlap, used_over_time
from etcl_deploy.runs.store import load_run
from etcl_deploy.settings import load_recipe


def config(**values: object) -> Config:
    return Config().with_values({**PHOTO_SETTINGS, **values})


def run(data: Path, directory: Path, methods: list[str], seeds: int = 1, **values: object) -> MethodComparison:
    """A comparison of methods that have the same settings."""
    configs = dict.fromkeys(methods, config(**values))
    return compare(configs, directory, data=data, seeds=seeds, session=Session("cpu"))


def interrupt(data: Path, directory: Path) -> None:
    """A comparison that was left when its first task was learned."""
    with pytest.raises(KeyboardInterrupt):
        compare({"wsn": config()}, directory, data=data, session=Session("cpu", report=stop_at(TaskStarted, "b")))


def test_every_method_gets_the_same(photos: Path, tmp_path: Path) -> None:
    """Tasks, order, epochs; the table is there in three forms, and forward transfer where `one` is."""
    made = run(photos, tmp_path / "c", ["one", "wsn", "naive"], seeds=2)
    assert [(row.method, row.seeds) for row in made.rows] == [("one", (0, 1)), ("wsn", (0, 1)), ("naive", (0, 1))]
    assert {tuple(summary["tasks"]) for summary in made.runs} == {("a", "b", "c")}
    one, wsn, _ = made.rows
    assert one.fwt.mean is None and wsn.fwt.mean is not None and wsn.bwt.mean == 0
    assert wsn.acc.deviation is not None
    record = json.loads((tmp_path / "c" / "compare.json").read_text())
    assert record == json.loads(json.dumps(made.as_json()))
    rows = list(csv.DictReader((tmp_path / "c" / "compare.csv").read_text().splitlines()))
    assert [row["method"] for row in rows] == ["one", "wsn", "naive"] and float(rows[1]["bwt_mean"]) == 0
    assert rows[0]["fwt_mean"] == ""
    assert float(rows[0]["bytes_mean"]) > 2 * float(rows[2]["bytes_mean"])  # three networks against one


def test_it_goes_on_where_it_stopped(photos: Path, tmp_path: Path) -> None:
    """No run is learned twice; other settings are refused, other items too, and names that are no method."""
    interrupt(photos, tmp_path / "c")
    assert load_run(tmp_path / "c" / "runs" / "wsn-0").waiting == ["b", "c"]
    first = run(photos, tmp_path / "c", ["wsn"])
    again = run(photos, tmp_path / "c", ["naive", "wsn"])
    assert again.runs[1] == first.runs[0]
    with pytest.raises(RunError, match="was learned with other settings"):
        run(photos, tmp_path / "c", ["wsn"], epochs=3)
    with pytest.raises(RunError, match="was learned with other settings"):
        run(photos, tmp_path / "c", ["etcl"], epochs=3)  # another budget than that of the others there
    (photos / "b" / "class-0" / "0.png").unlink()
    with pytest.raises(RunError, match="was learned from other tasks or items"):
        run(photos, tmp_path / "c", ["wsn", "etcl"])
    assert not (tmp_path / "c" / "runs" / "etcl-0").exists()
    for wrong in ("wsn,magic", ""):
        words = fails("compare", "--data", photos, "--methods", wrong, "--output", tmp_path / "d")
        assert "method must be one of etcl, wsn" in words
    assert not (tmp_path / "d").exists()


def test_the_table_is_of_all_that_is_there(photos: Path, tmp_path: Path) -> None:
    """Methods learned by another call, or another process, are in it, and forward transfer is measured against them.

    Every method and seed is in it once, also where somebody made a copy of a run.
    """
    run(photos, tmp_path / "c", ["one"])
    made = run(photos, tmp_path / "c", ["wsn"])
    assert [row.method for row in made.rows] == ["wsn", "one"] and made.rows[0].fwt.mean is not None
    record = json.loads((tmp_path / "c" / "compare.json").read_text())
    assert [row["method"] for row in record["methods"]] == ["wsn", "one"]
    shutil.copytree(tmp_path / "c" / "runs" / "wsn-0", tmp_path / "c" / "runs" / "wsn-0-old")
    assert run(photos, tmp_path / "c", ["wsn"]) == made


def test_a_method_that_fails_stops_no_other(photos: Path, tmp_path: Path) -> None:
    """The record and the page name it, and the command fails."""
    configs = {"naive": config(learning_rate=1e30, optimizer="sgd"), "wsn": config()}
    made = compare(configs, tmp_path / "c", data=photos, session=Session("cpu"))
    assert [row.method for row in made.rows] == ["wsn"]
    assert len(made.failed) == 1 and made.failed[0].startswith("naive, seed 0: task 'a' could not be learned")
    write_report(tmp_path / "c", tmp_path / "page.html")
    assert "could not be learned" in (tmp_path / "page.html").read_text("utf-8")
    wild = [f"--set={value}" for value in ("size=8", "width=4", "learning_rate=1e30", "optimizer=sgd")]
    words = ("--methods", "naive", "--seeds", "1", *wild, "-o", tmp_path / "d", "--json")
    result = etcl("compare", "--data", photos, *words)
    assert result.returncode == 1 and json.loads(result.stdout)["failed"]


def test_a_method_may_have_settings_of_its_own(photos: Path, tmp_path: Path) -> None:
    """A recipe says which; `--set` goes before it, and the record tells what each was learned with."""
    recipe = tmp_path / "mine.toml"
    table = "images.size = 8\nimages.channels = 1\nnetwork.backbone = 'fcn3'\nnetwork.width = 8\nlearning.epochs = 1\n"
    own = "[methods.naive]\nlearning_rate = 0.01\nweight_decay = 0.1\n"
    recipe.write_text(f"sequence = 'digits'\ntasks = 2\n{table}{own}")
    assert load_recipe(str(recipe)).learning.weight_decay == 0
    assert load_recipe(str(recipe), "naive").learning.weight_decay == 0.1
    words = ("--methods", "wsn,naive", "--seeds", "1", "--set", "learning_rate=0.02", "-o", tmp_path / "c")
    configs = answer("compare", recipe, *words)["configs"]
    assert [c["learning"]["weight_decay"] for c in configs.values()] == [0, 0.1]
    assert {c["learning"]["learning_rate"] for c in configs.values()} == {0.02}
    write_report(tmp_path / "c", tmp_path / "compare.html")
    text = (tmp_path / "compare.html").read_text("utf-8")
    assert '<th scope="col">weight_decay</th>' in text and "<td>0.1</td>" in text and "learning_rate&#34;: 0.02" in text
    for wrong, why in (
        ("[methods.magic]\n", "method must be one of"),
        ("[methods.hat]\nx = 1\n", "unknown setting 'x'"),
        ("[methods.hat]\nepochs = 1\n", r"\[methods.hat\] can say how it learns, not another network, epochs"),
        ("[methods.hat]\nweights = 'x'\n", r"\[methods.hat\] can say how it learns, not another network, epochs"),
    ):
        recipe.write_text(f"sequence = 'digits'\n{wrong}")
        with pytest.raises(ConfigError, match=why):
            load_recipe(str(recipe))
    recipe.write_text("sequence = 'digits'\nmethods = 3\n")
    with pytest.raises(ConfigError, match="must be a table of settings, not 3"):
        load_recipe(str(recipe))


def test_forward_transfer_of_a_run(photos: Path, tmp_path: Path) -> None:
    """`etcl eval` finds the run of `one` beside it, or is told one: of the same items, or it is refused."""
    made = run(photos, tmp_path / "c", ["one", "wsn"])
    runs = tmp_path / "c" / "runs"
    gain = made.runs[1]["fwt"]
    assert gain == load_run(runs / "wsn-0").summary(load_run(runs / "one-0")).fwt
    assert answer("eval", runs / "wsn-0")["fwt"] == gain
    assert f"FWT {gain:+.4f}" in etcl("eval", runs / "wsn-0").stdout
    assert answer("eval", runs / "one-0")["fwt"] is None
    shutil.copytree(runs / "wsn-0", tmp_path / "alone")
    assert answer("eval", tmp_path / "alone")["fwt"] is None
    assert answer("eval", tmp_path / "alone", "--one", runs / "one-0")["fwt"] == gain
    assert "against a run of one, not of wsn" in fails("eval", runs / "one-0", "--one", runs / "wsn-0")
    (photos / "b" / "class-0" / "extra.png").write_bytes((photos / "a" / "class-0" / "0.png").read_bytes())
    run(photos, tmp_path / "d", ["one"])
    other = tmp_path / "d" / "runs" / "one-0"
    assert "has not learned 'b' from the same items" in fails("eval", runs / "wsn-0", "--one", other)
    (photos / "b" / "class-0" / "extra.png").unlink()
    run(photos, tmp_path / "e", ["one"], epochs=3)
    wrong = fails("eval", runs / "wsn-0", "--one", tmp_path / "e" / "runs" / "one-0")
    assert "another number of epochs" in wrong
    shutil.rmtree(runs / "one-0")
    shutil.copytree(other, runs / "one-0")  # one that does not fit is passed over
    assert answer("eval", runs / "wsn-0")["fwt"] is None


def test_statistics_of_masks(learned: Learned) -> None:
    """A mask overlaps itself wholly; the share in use only grows; sizes count the weights in use."""
    network = learned.run.network
    states = list(network.finished.values())
    shared = overlap(states)
    assert shared.diagonal().tolist() == [1] * 5 and bool((shared == shared.T).all())
    used = used_over_time(states)
    assert used == sorted(used) and used[-1] == pytest.approx(network.claimed())
    sizes = needed_bytes(network)
    weights = sum(layer.weight.numel() for layer in network.masked_layers.values())
    assert sizes["backbone"] == pytest.approx(4 * weights * network.claimed())
    assert 5 * weights / 8 <= sizes["masks"] <= 5 * weights / 8 + 5 * len(states[0].masks)


def test_a_page_of_each(photos: Path, tmp_path: Path) -> None:
    """One file that names every task and method and asks nothing of the network; names are shown as they are."""
    odd = photos / "a <b> & $x$"
    (photos / "a").rename(odd)
    run(photos, tmp_path / "c", ["one", "etcl"])
    write_report(tmp_path / "c", tmp_path / "compare.html")
    write_report(tmp_path / "c" / "runs" / "etcl-0", tmp_path / "run.html")
    for page in (tmp_path / "compare.html", tmp_path / "run.html"):
        text = page.read_text("utf-8")
        assert "http://" not in text.replace("http://www.w3.org/", "") and "https://" not in text
        assert "<script" not in text and "currentColor" in text and "prefers-color-scheme: dark" in text
    text = (tmp_path / "run.html").read_text("utf-8")
    assert "a &lt;b&gt; &amp; $x$" in text and "<b>" not in text
    for heading in ("Accuracy over time", "Similar tasks", "Masks", "Sizes", "Learning", "Settings and versions"):
        assert f"<h2>{heading}</h2>" in text
    with pytest.raises(EtclError, match="is a directory; name a file"):
        write_report(tmp_path / "c", tmp_path)
    with pytest.raises(RunError, match="holds no run"):
        write_report(tmp_path / "none", tmp_path / "x.html")
    (tmp_path / "c" / "compare.json").write_text("{}")
    with pytest.raises(RunError, match="is damaged: KeyError"):
        write_report(tmp_path / "c", tmp_path / "x.html")


def test_pages_of_short_and_unfinished_runs(photos: Path, tmp_path: Path) -> None:
    """One task alone has no transfer to show; what is left to learn is said, with how to go on."""
    run(photos, tmp_path / "c", ["wsn"], tasks=1)
    directory = tmp_path / "c" / "runs" / "wsn-0"
    write_report(directory, tmp_path / "one.html")
    text = (tmp_path / "one.html").read_text("utf-8")
    assert "Accuracy over time" not in text and "<h2>Accuracy</h2>" in text

    interrupt(photos, tmp_path / "d")
    write_report(tmp_path / "d" / "runs" / "wsn-0", tmp_path / "half.html")
    assert "1 of 3 tasks are learned; go on with: etcl train --run" in (tmp_path / "half.html").read_text("utf-8")

"""What recorded results say of the targets: a reader for every benchmark, the same for new results and for those here.

    python benchmarks/figures.py benchmarks/results

prints them as JSON. The readers are here and not in the scripts, which need torch and more: reading takes no time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

from etcl_deploy.bench.targets import Figure

Record = Mapping[str, Any]  # what record.write_result wrote


def over_seeds(target: str, label: str, values: Mapping[str, Any], seeds: int, unit: str, **more: Any) -> Figure:
    """A mean with its deviation."""
    mean, deviation = values["mean"], values["deviation"]
    low, high = (None, None) if deviation is None else (mean - deviation, mean + deviation)
    return Figure(target, label, mean, unit, repeats=seeds, low=low, high=high, **more)


def over_rounds(target: str, label: str, ratio: float, ratios: Sequence[float], unit: str, **more: Any) -> Figure:
    """A figure with the smallest and the largest of several."""
    low, high = (min(ratios), max(ratios)) if len(ratios) > 1 else (None, None)
    return Figure(target, label, ratio, unit, low=low, high=high, **more)


def femnist1(record: Record) -> list[Figure]:
    table = record["result"]
    full = table["full"]
    seeds, paper = len(full["seeds"]), full["paper"]
    acc = full["acc"]["mean"]
    found = [over_seeds("L1", "", full["acc"], seeds, "% ACC", ours=acc, other=paper["acc"], note="other: the paper's")]
    for name in ("fwt", "bwt"):
        if name in full:
            more = {"ours": full[name]["mean"], "other": paper[name], "note": "other: the paper's"}
            found.append(over_seeds("L2", name.upper(), full[name], seeds, "share", **more))
    for name in ("similarity", "alignment", "bi-objective"):
        row = table.get(f"without-{name}")
        if row:
            without, gain = row["acc"]["mean"], row["full_minus_this"]
            more = {
                "ours": without + gain["mean"],
                "other": without,
                "note": "" if row["seeds"][1:] else "one seed only",
            }
            found.append(over_seeds("L5", name, gain, len(row["seeds"]), "points of ACC", **more))
    return found


def pmnist(record: Record) -> list[Figure]:
    result = record["result"]
    acc, changed = result["acc"], result["layers_changed_after_being_claimed"]
    more = {"ours": acc["mean"], "other": result["paper"]["acc"], "note": "other: the paper's"}
    return [
        over_seeds("L3", "ACC", acc, len(changed), "% ACC", **more),
        over_rounds("L3", "layers with a claimed bit changed", max(changed), changed, "layers", repeats=len(changed)),
    ]


def similarity(record: Record) -> list[Figure]:
    found = []
    for seeds, row in record["result"].items():
        note = f"{row['found']} pairs found, {row['missed']} missed, {row['wrongly']} taken for similar wrongly"
        found.append(Figure("L4", seeds, row["f1"], "F1", note=note))
    return found


def epoch_cost(record: Record) -> list[Figure]:
    return [_timed("L6", "", record["result"])]


def step_cost(record: Record) -> list[Figure]:
    labels = {"resnet18": "resnet18, batch 64", "fcn3": "fcn3, h = 1000, batch 10"}
    return [_timed("L7", label, record["result"][case]) for case, label in labels.items()]


def _timed(target: str, label: str, row: Record) -> Figure:
    more = {key: row[key] for key in ("ours", "other", "repeats")}
    return over_rounds(target, label, row["ratio"], row["ratios"], row["unit"], **more)


def two_hundred(record: Record) -> list[Figure]:
    row = record["result"]["runs"].get("recipe")
    if row is None:
        return []
    first, last = row["acc_first_20"], row["acc_last_20"]
    times = [row.get(f"seconds_task_{number}") for number in (20, 200)]
    note = f"task 20 took {times[0]:.1f} s, task 200 {times[1]:.1f} s" if all(times) else ""
    count = row.get("tasks", 200)
    return [Figure("L8", "", first - last, "points of ACC", last, first, 1, count=count, note=note)]


def bundle_size(record: Record) -> list[Figure]:
    runs = record["result"]["runs"]
    worst = max(runs.values(), key=lambda row: row["B1"])
    sizes, all_of_them = worst["masks"], [row["B1"] for row in runs.values()]
    more = {"ours": sizes["coded"], "other": sizes["entropy"], "repeats": len(runs)}
    found = [over_rounds("B1", "", worst["B1"], all_of_them, "bytes", **more)]
    # The recipe's own run, or that of a quick one; and the run of PMNIST that has the target's density.
    for network, names in (("resnet18", ("femnist1", "quick")), ("fcn3", ("pmnist-0.4",))):
        for row in (runs[name] for name in names if name in runs):
            total = row["bundles"]["coded-fp32"]["bytes"]["total"]
            sequence = {"resnet18": "F-EMNIST-1", "fcn3": "PMNIST"}[network]
            found.append(Figure("B2", f"{sequence}, {network}", row["B2"], "bytes", total, total / row["B2"]))
            for encoding, ratio in row["B3"].items():
                times = {"ours": row["decode_ms"][encoding], "other": row["forward_ms"]}
                found.append(Figure("B3", f"{encoding}, {network}", ratio, "ms", repeats=15, **times))
    return found


def memory(record: Record) -> list[Figure]:
    result, starts = record["result"], record["settings"]["starts"]
    row, second = result["S1"], result["S2"]
    counts = [float(count) for count in row["pss"]]
    each = [linear_regression(counts, found).slope / row["dense"] for found in zip(*row["pss"].values(), strict=True)]
    kept = result.get("S1, default cache")
    note = f"1/{1 / row['ratio']:.1f}, in a worker whose cache holds one task" if row["ratio"] > 0 else ""
    if kept:
        note += f"; with the default cache, which fills up, {kept['ratio']:.2f}"
    more = {"ours": row["bytes_each"], "other": row["dense"], "repeats": starts, "note": note}
    return [
        over_rounds("S1", "", row["ratio"], [*each, row["ratio"]], "bytes", **more),
        Figure("S2", "", second["ratio"], "bytes", second["two"] - second["one"], second["one"], 1),
    ]


def serving(record: Record) -> list[Figure]:
    found = []
    for target, mix in (("S3", "zipf"), ("S4", "uniform")):
        row, dense = (record["result"]["mixes"][mix][side] for side in ("cache 512 MB", "dense"))
        more = {"ours": row["throughput"], "other": dense["throughput"], "repeats": len(row["ratios"])}
        found.append(over_rounds(target, "", row["ratio"], row["ratios"], "requests a second", **more))
    return found


def cold_task(record: Record) -> list[Figure]:
    result = record["result"]
    ours, rounds = result["ms"]["cold task, onnxruntime"], record["settings"]["rounds"]
    note = f"{result['ratio_to_torch']:.2f} if the forward pass is torch's"
    more = {"ours": ours, "other": ours / result["ratio"], "repeats": rounds, "note": note}
    return [over_rounds("S5", "", result["ratio"], result.get("ratios", [result["ratio"]]), "ms", **more)]


def hostile(record: Record) -> list[Figure]:
    result, requests = record["result"], record["settings"]["requests"]
    right, ratios, counts = result["S6"]["right"], result["ratios"], result["counts"]
    apart = f"at most {result['S7']['to_plain_network']:.1e} from a plain masked network computed apart"
    answered = {"ours": requests - counts["wrong"], "other": requests}
    same = {"ours": counts["same bytes"], "other": counts["good"], "note": apart}
    label = "good answers a second / a clean run"
    return [
        Figure("S6", "share answered as it must be", right, "requests", **answered),
        over_rounds("S6", label, result["S6"]["ratio"], ratios, "requests a second", repeats=len(ratios)),
        Figure("S7", "", result["S7"]["same_bytes"], "answers", **same),
    ]


def many_tasks(record: Record) -> list[Figure]:
    """Of the counts that were tried, the largest that holds 1.2; where none does, the smallest."""
    found = []
    for mix, label in (("zipf", "Zipf(1)"), ("distinct", "all in turn")):
        rows = {int(count): row["mixes"][mix]["p99_ms"] for count, row in record["result"].items()}
        held = [count for count, row in rows.items() if row["ratio"] <= 1.2]
        count = max(held) if held else min(rows)
        row = rows[count]
        more = {"ours": row["many"], "other": row["few"], "repeats": len(row["ratios"]), "count": count}
        found.append(over_rounds("S8", label, row["ratio"], row["ratios"], "ms", note=f"{count:,} tasks", **more))
    return found


def devices(record: Record) -> list[Figure]:
    networks = {tuple(name.rsplit(" ", 1)): row for name, row in record["result"]["networks"].items()}
    parities = [row["D1"] for row in networks.values()]
    items, same = (sum(parity[key] for parity in parities) for key in ("items", "same_class"))
    apart = [parity["max_rel_diff"] for parity in parities]
    found = [
        Figure("D1", "share with the same class", same / items, "images", same, items),
        over_rounds("D1", "largest relative difference", max(apart), apart, "of the largest logit"),
    ]
    for density in ("0.4", "0.1"):
        rows = {network: row for (network, dense), row in networks.items() if dense == density}
        if not rows:
            continue
        found.append(_of_networks("D2", f"density {density}", {n: row["D2"] for n, row in rows.items()}, median))
        if density == "0.4":
            times = {network: row["D3"]["latency"] for network, row in rows.items()}
            lost = {network: row["D3"]["points_lost"] for network, row in rows.items()}
            found.append(_of_networks("D3", "latency, median network", times, median))
            found.append(_of_networks("D3", "points of accuracy lost, worst network", lost, max))
        for form, label in (("compact", ""), ("compact int8", ", int8")):
            sizes = {network: row["D4"][form] for network, row in rows.items()}
            found.append(_of_networks("D4", f"density {density}{label}", sizes, max))
    return found


def _of_networks(target: str, label: str, values: Mapping[str, float], pick: Callable[[list[float]], float]) -> Figure:
    """One figure for several networks, and each of them in the note."""
    found = list(values.values())
    note = ", ".join(f"{network.rpartition(':')[2]} {value:.3g}" for network, value in values.items())
    unit = {"D2": "latency", "D3": "latency" if "latency" in label else "points", "D4": "bytes"}[target]
    return over_rounds(target, label, pick(found), found, unit, repeats=len(found), note=note)


def kill_resume(record: Record) -> list[Figure]:
    result = record["result"]
    same, runs, kills = result["same"], result["runs"], result["kills"]
    return [Figure("R1", "", same / runs, "runs", same, runs, count=kills, note=f"{kills} kills in {runs} runs")]


def fuzz_bundle(record: Record) -> list[Figure]:
    result, settings = record["result"], record["settings"]
    cases, flips, wrong = settings["cases"], settings["flips"], [w for w in result["wrong"] if "(flip," not in w]
    found = result["counts"].get("flip: refused", 0)
    unchanged = sum(count for kind, count in result["counts"].items() if kind.endswith(("changed", "to be written")))
    about = (
        f"{cases:,} files, of which {unchanged:,} came out as they were; the slowest took {result['longest_seconds']} s"
    )
    return [
        Figure("R2", "", len(wrong), "files", len(wrong), cases, count=cases, note=about),
        Figure("R3", "", found / flips, "files", found, flips, count=flips, note=f"{flips:,} flipped bits"),
    ]


def own_data(record: Record) -> list[Figure]:
    result = record["result"]
    right = f"{result['answers']['right']} of {result['answers']['of']} answers right"
    commands = ", ".join(step for step in result["seconds"] if step not in ("answers", "total"))
    return [
        Figure("P1", "commands", result["commands"], "commands", repeats=1, note=f"{commands}; then a request"),
        Figure("P1", "seconds", result["seconds"]["total"], "seconds", repeats=1, note=right),
    ]


READERS: dict[str, Callable[[Record], list[Figure]]] = {
    reader.__name__: reader
    for reader in (
        *(femnist1, pmnist, similarity, epoch_cost, step_cost, two_hundred, bundle_size, memory, serving, cold_task),
        *(hostile, many_tasks, devices, kill_resume, fuzz_bundle, own_data),
    )
}


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """For every result in a folder its figures, and the command, versions and machine that gave them."""
    found = {}
    for name, reader in READERS.items():
        path = folder / f"{name}.json"
        if path.exists():
            record = json.loads(path.read_text("utf-8"))
            about = {key: record[key] for key in ("settings", "command", "versions", "machine")}
            found[name] = {"figures": [figure.as_json() for figure in reader(record)], **about}
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(read_results(Path(sys.argv[1]))))

"""Writes every table of the pages from benchmarks/results, so that no number is typed by hand.

    python benchmarks/tables.py            # write the pages
    python benchmarks/tables.py --check    # say which are out of date, and fail

A page says where a table goes, and what lies between the two marks is replaced:

    <!-- table: NAME -->
    <!-- end -->

NAME is a function here (@table), or a file results/measured/NAME.json, which holds its columns and rows as they are.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MARK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
TABLES: dict[str, Callable[[], str]] = {}


def table(make: Callable[[], str]) -> Callable[[], str]:
    TABLES[make.__name__] = make
    return make


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(text: str) -> str:
    """The page with each of its tables as the results have it."""
    return MARK.sub(lambda found: f"{found[1]}\n{made(found[2])}\n\n{found[3]}", text)


def made(name: str) -> str:
    if name in TABLES:
        return TABLES[name]()
    path = RESULTS / "measured" / f"{name}.json"
    if not path.exists():
        raise SystemExit(f"no table '{name}': neither a function of {Path(__file__).name} nor {path}")
    result = read(path)
    return markdown(result["columns"], result["rows"]) + told(result)


def read(path: str | Path) -> Any:
    return json.loads((RESULTS / path).read_text())


def lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / path).read_text().splitlines()]


def folder(name: str) -> list[dict[str, Any]]:
    return [read(path) for path in sorted((RESULTS / name).glob("*.json"))]


def markdown(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    out = [columns, ["---"] * len(columns), *([str(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in out)


def told(about: dict[str, Any]) -> str:
    """The line below a table: what it shows, on what machine, and the command that makes it again."""
    facts = [about.get("hardware"), about.get("dtype")]
    facts += [f"batch {about['batch']}"] if about.get("batch") else []
    facts += [f"commit {about['commit']}"] if about.get("commit") else []
    facts += [about["date"]] if about.get("date") else []
    text = f"{about['what']}. {', '.join(str(fact) for fact in facts if fact)}."
    if about.get("note"):
        text += f" {about['note'][0].upper()}{about['note'][1:]}."
    if about.get("command"):
        text += f" `{about['command']}`"
    return f"\n\n*{text}*" if "*" not in text else f"\n\n{text}"


def brief(value: float) -> str:
    """Three digits, as many as a timing is worth."""
    return f"{value:#.3g}" if value < 100 else f"{value:.0f}"


def times(value: float) -> str:
    return f"{value:.2f}x"


def best_static(row: dict[str, Any]) -> tuple[str, float]:
    return min(row["static_ms"].items(), key=lambda item: item[1])


# What you gain


@table
def gains() -> str:
    """The README's table: one fact a cell."""
    gpu, processor = read("h200.json")["rows"], read("cpu_epyc.json")
    rows = [static_row(), shipped_row(), *(untrained_row(cost) for cost in (0.83, 0.67))]
    rows += [engine_row(0.52, batch) for batch in (32, 512)]
    rows += [forced_row("DINOv2-B", 0.52, 32, gpu)]
    rows += [cpu_row(row, processor) for row in processor["rows"]]
    return markdown(["model", "method", "cost", "top-1", "on", "batch", "ms", "speed-up"], rows)


def static_row() -> list[Any]:
    row, (_, static) = read("shipped.json")["rows"][0], best_static(shipped_on_gpu(128))
    return ["DeiT-T, ImageNet", "none (static)", "1.00", row["static_top1"], "H200", 128, brief(static), times(1)]


def shipped_row() -> list[Any]:
    row, timed = read("shipped.json")["rows"][0], shipped_on_gpu(128)
    cost = f"{row['gmacs'] / row['gmacs_static']:.2f}"
    spent = brief(timed["adaptive_ms"])
    return ["DeiT-T, ImageNet", "AHT (shipped)", cost, row["top1"], "H200", 128, spent, gain(timed)]


def shipped_on_gpu(batch: int) -> dict[str, Any]:
    """The last run of the shipped ImageNet checkpoint at this batch."""
    runs = [run for run in lines("engine_h200.jsonl") if "bench aht_deit_tiny_imagenet" in run.get("command", "")]
    return next(row for row in runs[-1]["rows"] if row["batch"] == batch)


def gain(row: dict[str, Any]) -> str:
    return times(best_static(row)[1] / row["adaptive_ms"])


def untrained_row(cost: float) -> list[Any]:
    found = read(f"imagenet_deit_tiny/ToMe_no_training_-{cost:.2f}-s0.json")
    return ["DeiT-T, ImageNet", "ToMe (no training)", f"{found['cost']:.2f}", found["top1"], "–", "–", "–", "–"]


def forced_row(model: str, cost: float, batch: int, rows: list[dict[str, Any]]) -> list[Any]:
    """Speed alone, which depends on how many tokens are left and not on the weights."""
    row, key = next(row for row in rows if row["model"] == model and row["batch"] == batch), f"{cost:.2f}"
    against = row["against_graph"][key]
    return [
        f"{model}, {row['pixels']} px",
        "AHT",
        key,
        "–",
        "H200",
        batch,
        brief(row["static_ms"] / against),
        times(against),
    ]


def engine_row(cost: float, batch: int) -> list[Any]:
    row = engine_runs()[batch, cost]
    return ["DeiT-S, 224 px", "AHT", f"{cost:.2f}", "–", "H200", batch, brief(row["adaptive_ms"]), gain(row)]


def cpu_row(row: dict[str, Any], about: dict[str, Any]) -> list[Any]:
    name, cost, spent = f"{row['model']}, {row['pixels']} px", f"{about['cost']:.2f}", brief(row["adaptive_ms"])
    return [name, about["method"], cost, "–", "CPU", row["batch"], spent, gain(row)]


@table
def smaller_images_cifar100() -> str:
    about = read("smaller_images.json")
    static = about["cifar100"][0]["gmacs"]
    rows: list[list[Any]] = [
        [f"static, {row['pixels']} px", f"{row['gmacs'] / static:.2f}", f"{row['top1']:.2f}", 1]
        for row in about["cifar100"]
    ]
    for asked in (0.83, 0.67, 0.52):
        found = of("cifar100_deit_tiny", "AHT", asked)
        rows.append([f"AHT, budget {asked}", mean(found, "cost"), mean(found, "top1", 2), len(found)])
    return markdown(["CIFAR-100, DeiT-T", "cost", "top-1", "seeds"], rows)


@table
def smaller_images_imagenet() -> str:
    about = read("smaller_images.json")["imagenet"]
    rows = [[f"{row['pixels']} px", f"{row['cost']:.2f}", f"{row['top1']:.2f}"] for row in about["rows"]]
    what = f"Static DeiT-T, not trained at that size, {about['images']:,} ImageNet images"
    return markdown(["image", "cost", "top-1"], rows) + told(read("smaller_images.json") | {"what": what})


@table
def smaller_images_methods() -> str:
    about = read("smaller_images.json")
    rows = [[row["model"], f"{row['cost']:.2f}", f"{row['top1']:.2f}"] for row in about["imagenet_4000"]]
    return markdown(["DeiT-T", "cost", "top-1"], rows) + told(about | {"what": "4,000 ImageNet images"})


@table
def smaller_images_speed() -> str:
    about = read("smaller_images.json")
    rows = [[row["variant"], times(row["batch_32"]), times(row["batch_512"])] for row in about["speed"]]
    what = "Static DeiT-S against its own CUDA graph at 224 px"
    return markdown(["static variant", "batch 32", "batch 512"], rows) + told(about | {"what": what})


# On a GPU and on a CPU


@table
def h200() -> str:
    about, rows = read("h200.json"), []
    for row in about["rows"]:
        graph, compiled = row["against_graph"], row.get("against_best", {})
        gains = [times(graph[cost]) if cost in graph else "–" for cost in ("1.00", "0.67", "0.52")]
        other = [times(compiled[cost]) if cost in compiled else "–" for cost in ("1.00", "0.67", "0.52")]
        rows.append([row["model"], row["pixels"], row["batch"], row["static_ms"], *gains, *other])
    columns = ["model", "px", "batch", "static graph, ms", "1.00", "0.67", "0.52"]
    return markdown([*columns, "1.00, best", "0.67, best", "0.52, best"], rows) + told(about)


def engine_runs() -> dict[tuple[int, float], dict[str, Any]]:
    """DeiT-S on the H200: the last run of each batch and cost, that of a slow host left out."""
    last: dict[tuple[int, float], dict[str, Any]] = {}
    for run in lines("engine_h200.jsonl"):
        if "bench deit_small_patch16_224" in run.get("command", ""):
            last |= {(row["batch"], row["fraction"]): row for row in run["rows"] if "spread" in row}
    return last


@table
def engine() -> str:
    rows = []
    for (batch, fraction), row in sorted(engine_runs().items(), key=lambda item: (-item[0][0], -item[0][1])):
        static = [brief(row["static_ms"][kind]) if kind in row["static_ms"] else "–" for kind in GPU_STATIC]
        rows.append([batch, f"{fraction:.2f}", *static, brief(row["adaptive_ms"]), gain(row)])
    what = "DeiT-S, 224 px, forced depths, against the best static variant timed in the same run"
    command = "dwindle bench deit_small_patch16_224 --device cuda --dtype bf16 --fraction 1.0,0.83,0.67,0.52"
    about = {"what": what, "hardware": "NVIDIA H200", "dtype": "bf16", "commit": "472d476 to 57f15eb"}
    columns = ["batch", "cost", "eager, ms", "graph, ms", "compile, ms", "ours, ms", "speed-up"]
    return markdown(columns, rows) + told(about | {"command": command})


GPU_STATIC = ("eager", "graph", "compile")


@table
def engine_other_models() -> str:
    rows, model = [], ""
    for run in lines("engine_h200.jsonl"):
        named = re.search(r"(deit_tiny|deit_base|vit_large)_patch16_(\d+)", run.get("command", ""))
        if named and "023fe73" in run.get("note", ""):
            model = f"{named[1]}, {named[2]} px"
            for row in run["rows"]:
                cost, spent = f"{row['fraction']:.2f}", row["adaptive_ms"]
                rows.append([model, row["batch"], cost, brief(best_static(row)[1]), brief(spent), gain(row)])
    about = {"what": "Other models, against static eager and CUDA graph", "hardware": "NVIDIA H200", "dtype": "bf16"}
    about |= {"commit": "023fe73", "command": "dwindle bench MODEL --device cuda --dtype bf16 --static eager,graph"}
    return markdown(["model", "batch", "cost", "static, ms", "ours, ms", "speed-up"], rows) + told(about)


@table
def engine_trained() -> str:
    rows = []
    for batch in (8, 32, 128, 512):
        row = shipped_on_gpu(batch)
        rows.append([batch, f"{row['fraction']:.2f}", brief(best_static(row)[1]), brief(row["adaptive_ms"]), gain(row)])
    about = {"what": "`aht_deit_tiny_imagenet` deciding by itself on the shipped photographs, repeated"}
    about |= {"hardware": "NVIDIA H200", "dtype": "bf16", "commit": "023fe73"}
    command = "dwindle bench aht_deit_tiny_imagenet --device cuda --dtype bf16"
    return markdown(["batch", "cost", "static, ms", "ours, ms", "speed-up"], rows) + told(about | {"command": command})


@table
def cpu() -> str:
    about, rows = read("cpu_epyc.json"), []
    for row in about["rows"]:
        static = [row["static_ms"][name] for name in ("eager", "onnxruntime", "OpenVINO")]
        ours = [row["whole_ms"], row["adaptive_ms"], gain(row), row["openvino_ms"]]
        rows.append([f"{row['model']}, {row['pixels']} px", row["batch"], *static, *ours])
    columns = ["model", "batch", "eager", "onnxruntime", "OpenVINO", "ours at 1.00", "ours at 0.52", "speed-up"]
    return markdown([*columns, "ours in OpenVINO"], rows) + told(about)


# Training


@table
def throughput() -> str:
    about = read("throughput.json")
    rows = [[row["model"], f"{row['images_per_s']:,}"] for row in about["rows"]]
    return markdown(["what trains", "images/s"], rows) + told(about)


@table
def throughput_cpu() -> str:
    about = read("throughput.json")["cpu"]
    rows = [[row["model"], row["fp32"], row["bf16"], row["compiled"]] for row in about["rows"]]
    return markdown(["what trains", "fp32", "`cpu_amp=true`", "and `compile=true`"], rows) + told(about)


# Comparisons of methods


def of(comparison: str, name: str, asked: float | None = None) -> list[dict[str, Any]]:
    """A method's results, one per seed."""
    rows = [row for row in folder(comparison) if row["name"] == name]
    return [row for row in rows if asked is None or row["asked"] == asked]


def mean(rows: Sequence[dict[str, Any]], key: str, digits: int = 3) -> str:
    return f"{statistics.mean(row[key] for row in rows):.{digits}f}"


FIRST, SECOND = "cifar100_deit_tiny", "cifar100_deit_tiny_second"
COMPARED = [
    (FIRST, "AHT", "[AHT](../methods/aht.md), merging"),
    (FIRST, "TopK", "[TopK](../methods/topk.md)"),
    (SECOND, "TopK fused", "[TopK](../methods/topk.md), fused token"),
    (FIRST, "DynamicViT", "[DynamicViT](../methods/dynamicvit.md)"),
    (FIRST, "ToMe", "[ToMe](../methods/tome.md), no training"),
    (FIRST, "A-ViT", "[A-ViT](../methods/avit.md)"),
    (FIRST, "Confidence", "[confidence](../methods/confidence.md)"),
    (FIRST, "PonderNet beta_kl = 1", "[PonderNet](../methods/pondernet.md), beta_kl = 1"),
    (FIRST, "PonderNet", "[PonderNet](../methods/pondernet.md), beta_kl = 0.01"),
    (FIRST, "ACT", "[ACT](../methods/act.md), no budget in training"),
    (FIRST, "Similarity", "[similarity](../methods/similarity.md)"),
    (FIRST, "Shallow", "[fewer blocks](../methods/shallow.md)"),
    (SECOND, "Shallow", "[fewer blocks](../methods/shallow.md)"),
]


def compared(pages: Sequence[str] = ()) -> list[list[Any]]:
    """Rows of every method at every budget; of those only whose page is named."""
    rows: list[list[Any]] = []
    chosen = [entry for entry in COMPARED if not pages or any(f"/{page}.md" in entry[2] for page in pages)]
    for asked in (0.83, 0.67, 0.52):
        found = []
        for comparison, name, shown in chosen:
            if results := of(comparison, name, asked):
                found.append([shown, asked, mean(results, "cost"), *against_static(comparison, results)])
        rows += sorted(found, key=lambda row: -float(row[3]))
    return rows


COLUMNS = ["method", "budget", "cost", "top-1", "seeds", "to static"]


@table
def cifar100() -> str:
    """Every method at every budget, and how far it is from the static model trained as long (the same seeds)."""
    about = read("cifar100_deit_tiny/AHT-0.67-s0.json")["machine"]
    what = "CIFAR-100 test set, DeiT-T at 224 px; distances are to the static model trained as long, same seeds"
    about = {"what": what, "hardware": about["device"], "dtype": "bf16", "batch": 512, "commit": about["commit"]}
    command = "dwindle compare cifar100_deit_tiny --data DATA/cifar100 --out runs/cifar100"
    return markdown(COLUMNS, compared()) + told(about | {"command": command})


def method_on_cifar100(page: str) -> str:
    """A method's own rows beside AHT's, which are nearest to static."""
    rows = [[re.sub(r"\[(.*?)\]\(.*?\)", r"\1", row[0]), *row[1:]] for row in compared([page, "aht"])]
    what = "CIFAR-100, DeiT-T at 224 px, beside AHT; distances to the static model trained as long, same seeds"
    return markdown(COLUMNS, rows) + told({"what": what, "hardware": "NVIDIA H200", "dtype": "bf16", "batch": 512})


for _page in ("act", "avit", "dynamicvit", "topk", "tome", "confidence", "similarity", "pondernet", "shallow"):
    TABLES[f"{_page}_cifar100"] = partial(method_on_cifar100, _page)


def against_static(comparison: str, results: list[dict[str, Any]]) -> list[Any]:
    """Mean top-1, seeds, and the mean distance to "static again" of the same seeds."""
    again = {row["seed"]: row["top1"] for row in of(comparison, "static again")}
    gaps = [row["top1"] - again[row["seed"]] for row in results]
    return [mean(results, "top1", 2), len(results), f"{statistics.mean(gaps):+.2f}"]


@table
def cifar100_static() -> str:
    rows = []
    for name in ("static", "static again"):
        results = of(FIRST, name)
        seeds = ", ".join(f"{row['top1']:.2f}" for row in results)
        rows.append([name, f"{results[0]['gmacs']:.3f}", mean(results, "top1", 2), seeds])
    return markdown(["model", "GMACs", "top-1", "its seeds"], rows)


ABLATIONS = {
    "AHT": "the recipe: lambda_t 0.05, T 0.5, sigma 1, planners at 4, 6, 8, merging",
    "lambda_t = 0": "lambda_t = 0: no KL between plan and execution",
    "T = 1": "T = 1",
    "sigma = 0.5": "sigma = 0.5",
    "sigma = 2": "sigma = 2",
    "stages 3-6-9": "planners at 3, 6, 9",
    "stages 2-4-6-8-10": "planners at 2, 4, 6, 8, 10",
    "class token may halt": "the class token may halt",
    "no heirs": 'halted tokens are gone (`merge="none"`)',
}


@table
def aht_ablations() -> str:
    rows = []
    for name, shown in ABLATIONS.items():
        results = [row for row in of(FIRST, name, 0.67) if row["seed"] == 0]
        rows.append([shown, *against_static(FIRST, results)[::2]])
    about = read("cifar100_deit_tiny/T_1-0.67-s0.json")["machine"]
    about = {"what": "CIFAR-100, budget 0.67, seed 0", "hardware": about["device"], "commit": about["commit"]}
    about |= {"dtype": "bf16", "batch": 512}
    return markdown(["change", "top-1", "to static"], rows) + told(about)


@table
def imagenet() -> str:
    shipped = read("shipped.json")["rows"][0]
    rows: list[list[Any]] = []
    for name in ("static", "ToMe (no training)", "TopK (no training)"):
        for row in sorted(of("imagenet_deit_tiny", name), key=lambda row: -row["cost"]):
            rows.append([name, f"{row['cost']:.2f}", f"{row['gmacs']:.3f}", row["top1"], row["top5"]])
    cost = f"{shipped['gmacs'] / shipped['gmacs_static']:.2f}"
    rows.insert(1, ["AHT, trained on 1,000 images (shipped)", cost, f"{shipped['gmacs']:.3f}", shipped["top1"], 90.3])
    about = {"what": "1,000 images of ImageNet's validation set (±1.4), DeiT-T", "dtype": "fp32", "batch": 64}
    about |= {"hardware": "CPU", "command": shipped["command"]}
    return markdown(["method", "cost", "GMACs", "top-1", "top-5"], rows) + told(about)


# Language models

TSA_NAMES = {
    "static": "static",
    "TSA 0": "TSA, lambda = 0",
    "TSA 0.02": "TSA, lambda = 0.02",
    "MoD as TSA 0": "MoD, matched to lambda = 0",
    "MoD as TSA 0.02": "MoD, matched to lambda = 0.02",
    "early exit as TSA 0": "early exit, matched to lambda = 0",
    "early exit as TSA 0.02": "early exit, matched to lambda = 0.02",
    "random as TSA 0": "random, lambda = 0's rates",
    "random as TSA 0.02": "random, lambda = 0.02's rates",
}


def tsa(comparison: str, what: str, command: str) -> str:
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for result in folder(comparison):
        found[result["name"]].append(result)
    static = statistics.mean(row["loss"] for row in found["static"])
    rows = []
    for name, shown in TSA_NAMES.items():
        results = found[name]
        loss = statistics.mean(row["loss"] for row in results)
        saved = [f"{100 * statistics.mean(row[key] for row in results):.1f}%" for key in ("tlops_saved", "macs_saved")]
        tau = f"{statistics.mean(row['tau'] for row in results):.2f}" if "tau" in results[0] else "–"
        worse = "–" if name == "static" else f"{100 * (loss / static - 1):+.2f}%"
        rows.append([shown, f"{loss:.4f}", worse, *saved, tau, len(results)])
    machine, trained = found["static"][0]["machine"], found["static"][0]["conditions"]
    about = {"what": what, "hardware": machine["device"], "dtype": "bf16", "batch": trained["batch"]}
    columns = ["router", "loss (nats)", "to static", "TLOps saved", "MACs saved", "tau", "seeds"]
    return markdown(columns, rows) + told(about | {"commit": machine["commit"], "command": command})


@table
def tsa_shakespeare() -> str:
    what = "Tiny-Shakespeare, characters, 10.7M parameters, 900 steps, all of the validation text"
    return tsa("tsa_shakespeare_compare", what, "dwindle compare tsa_shakespeare_compare --out runs/tsa")


@table
def tsa_enwik8() -> str:
    what = "enwik8, bytes, 10.7M parameters, 1,350 steps, 2,048 validation windows"
    command = "dwindle compare tsa_enwik8_compare --data DATA/enwik8 --out runs/tsa"
    return tsa("tsa_enwik8_compare", what, command)


@table
def tsa_speed_h200() -> str:
    about = read("tsa_h200_timing.json")
    rows = []
    for row in about["rows"]:
        if row["decisions"] != "forced":
            continue
        graph = brief(row["static_graph_ms"])
        rows.append([row["batch"], f"{1 - row['fraction']:.0%}", brief(row["static_ms"]), graph, times(row["speedup"])])
    columns = ["batch", "TLOps saved", "static compiled, ms", "static graph, ms", "speed-up against compiled"]
    told_of = {"what": f"{about['context']} characters, forced decisions", "hardware": about["device"]}
    return markdown(columns, rows) + told(told_of | {"dtype": about["dtype"]})


# AdaPerceiver


def grid(path: str, about: dict[str, Any]) -> str:
    """Top-1 of every trained setting: a row per depth, a column per width and number of tokens."""
    found = {(row["width"], row["tokens"], row["depth"]): row for row in read(path)["rows"]}
    widths = sorted({key[0] for key in found}, reverse=True)
    tokens, depths = sorted({key[1] for key in found}), sorted({key[2] for key in found})
    columns = ["depth"] + [f"{n} × {w}" for w in widths for n in tokens]
    rows: list[list[Any]] = [
        [depth] + [f"{found[w, n, depth]['top1']:.2f}" for w in widths for n in tokens] for depth in depths
    ]
    rows.append(
        [f"GMACs at {depths[-1]}", *(f"{found[w, n, depths[-1]]['gmacs']:.3f}" for w in widths for n in tokens)]
    )
    return markdown(columns, rows) + told(about | {"note": "columns: tokens × width"})


@table
def ada_grid() -> str:
    setup = read("ada_cifar100/setup.json")
    about = {
        "what": f"CIFAR-100 at {setup['image']} px, top-1 on 10,000 test images, {setup['epochs']} epochs, one seed"
    }
    about |= {"hardware": setup["gpu"], "dtype": "bf16", "batch": setup["batch"]}
    command = "dwindle train ada_cifar100 --data DATA/cifar100 --out runs/ada"
    return grid("ada_cifar100/grid.json", about | {"command": command})


@table
def ada_small_grid() -> str:
    about = {"what": "The shipped network, CIFAR-100, top-1 on 10,000 test images", "dtype": "fp32"}
    about |= {
        "hardware": "AMD EPYC (Zen 5), 2 cores",
        "command": "dwindle grid ada_small_cifar100 --data DATA/cifar100",
    }
    return grid("ada_small_cifar100/grid.json", about)


@table
def ada_latency_h200() -> str:
    about, rows = read("ada_cifar100/latency_recorded.json"), []
    sizes = {"paper": "published (256 tokens, 21 blocks)", "small": "small (96 tokens, 12 blocks)"}
    for named, timed in about["rows"].items():
        size, batch, dtype = named.split()
        whole = timed[0]["ms"]
        dtype = {"torch.bfloat16": "bf16", "torch.float32": "fp32"}[dtype]
        rows.append([sizes[size], batch, dtype, brief(whole), *(times(row["speedup"]) for row in timed[1:])])
    rows.sort(key=lambda row: (row[0], row[2], -int(row[1])))
    columns = ["network", "batch", "dtype", "whole, ms", "half the tokens", "half the depth", "both", "half the width"]
    told_of = {"what": "Untrained, as CUDA graphs, timed turn about; times faster than the whole network"}
    told_of |= {"hardware": "NVIDIA H200", "commit": about["commit"]}
    command = "dwindle bench adaperceiver_small --device cuda --dtype bf16"
    return markdown(columns, rows) + told(told_of | {"command": command})


@table
def ada_latency_cpu() -> str:
    rows = []
    sizes = {
        "adaperceiver_paper": "published (256 tokens, 21 blocks)",
        "adaperceiver_small": "small (96 tokens, 12 blocks)",
    }
    for run in lines("bench.jsonl"):
        timed: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for row in run.get("rows", []) if run.get("model") in sizes else []:
            timed[row["batch"]].append(row)
        for batch, (whole, *others) in timed.items():
            rows.append([sizes[run["model"]], batch, brief(whole["ms"]), *(times(row["speedup"]) for row in others)])
    columns = ["network", "batch", "whole, ms", "half the tokens", "half the depth", "both", "half the width"]
    about = {"what": "Untrained, times faster than the whole network", "hardware": "Intel Xeon 2.80GHz, 2 cores"}
    return markdown(columns, rows) + told(about | {"dtype": "fp32", "command": "dwindle bench adaperceiver_small"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is out of date")
    check = parser.parse_args().check
    stale = []
    for page in pages():
        text = page.read_text()
        if (new := filled(text)) != text:
            stale.append(str(page.relative_to(ROOT)))
            if not check:
                page.write_text(new)
    print(f"{'out of date' if check else 'written'}: {', '.join(stale) or 'nothing'}")
    sys.exit(bool(check and stale))


if __name__ == "__main__":
    main()

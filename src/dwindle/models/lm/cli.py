"""What the commands do for language models. cli.py sends them here when the recipe or the checkpoint is one."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...core.method import require
from ...errors import DwindleError
from ...files import write_text
from ...io.checkpoint import LANGUAGE, family_of, find, read_config
from ...settings import Share, fitted
from ...show.drawing import file_stems, save_figure
from ...show.terminal import (
    aside,
    console,
    device_for,
    finish,
    plain,
    progress_bar,
    resumes,
    shared,
    show_table,
    ticking,
)
from .compare import LMCompare, LMComparison, markdown, summarised
from .execute import AdaptiveLM
from .figures import figures
from .load import is_language, load_lm, own_text, vocabulary_of
from .text import Vocabulary, open_text
from .train import LMRecipe, LMRun

TOLD = ("name", "seed", "loss", "loss_soft", "tau", "tlops_saved", "macs_saved", "controls", "train_tokens_per_s")
PASSAGE = 2000  # characters of the model's own data that `view` shows when it is given nothing


def is_recipe(settings: Any) -> bool:
    return isinstance(settings, LMRecipe)


def is_checkpoint(name: str) -> bool:
    """Whether the folder, shipped name or Hub id of that name holds one. Names of vision models are none of these."""
    return family_of(name) in LANGUAGE


def _only_for_images(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise DwindleError(f"--{name.replace('_', '-')} {value} is for images; leave it out for a language model.")


def _opened(checkpoint: str, tau: float | None) -> tuple[AdaptiveLM, Vocabulary]:
    model = load_lm(checkpoint)
    if tau is not None:
        fitted(tau, Share, "--tau", "a router")
        require(
            hasattr(model.method, "tau"),
            f"--tau {tau}",
            f"{type(model.method).__name__} has none to turn, so leave it out",
        )
        model.method.tau = tau  # type: ignore[assignment]
    return model, vocabulary_of(model)


def train(
    name: str, recipe: LMRecipe, data: str | None, out: Path | None, resume: bool, device: str | None, **images: Any
) -> None:
    _only_for_images(**images)
    recipe = recipe if data is None else dataclasses.replace(recipe, data=data)
    out = out or Path("runs") / name
    run = LMRun(recipe, out, device=device_for(device), resume=resumes(resume, out))
    with progress_bar() as bar:
        task = bar.add_task("training", total=recipe.steps, completed=run.step)

        def tick(step: int, terms: dict[str, Any]) -> None:
            if step % 20 == 0:  # reading a number off the GPU waits for it
                bar.update(task, description=f"loss {float(terms['task']):.3f}", completed=step)

        for numbers in run.rounds(tick):
            shown = "  ".join(f"{k} {v:.4g}" for k, v in numbers.items() if k not in ("step", "total"))
            aside.print(f"step {int(numbers['step'])}  {shown}")
    finish({"out": str(out), **(run.history[-1] if run.history else {})})


def compare(
    name: str,
    plan: LMComparison,
    data: str | None,
    out: Path | None,
    results: Path,
    only: Sequence[str] | None,
    until: float | None,
    device: str | None,
    eval_data: str | None,
    limit: int | None,
) -> None:
    _only_for_images(eval_data=eval_data, limit=limit)
    base = plan.base if data is None else dataclasses.replace(plan.base, data=data)
    plan, out = dataclasses.replace(plan, base=base), out or Path("runs") / name
    rows = []
    with progress_bar() as bar:
        seconds = None if until is None else 60 * until
        work = LMCompare(
            name, plan, out, results, device=device_for(device), only=only, tick=ticking(bar), until=seconds
        )
        for row in work.results():
            rows.append(row)
            finish({key: row[key] for key in TOLD if key in row})
    summary = summarised(rows)
    columns = ["name", "seeds", "loss", "gap", "tlops_saved", "macs_saved", "loss_soft", "tau"]
    show_table(name, columns, [["" if row.get(c) is None else row[c] for c in columns] for row in summary])
    table = work.folder / "table.md"
    write_text(table, markdown(summary))
    drawn = figures(rows, plan.allowed, name.removesuffix("_compare")) if rows else {}
    paths = [str(save_figure(figure, work.folder / f"{stem}.png")) for stem, figure in drawn.items()]
    finish({"results": summary, "table": str(table), "figures": paths})


def evaluate(
    checkpoint: str,
    data: str | None,
    layout: str,
    threshold: float | None,
    tau: float | None,
    batch: int,
    limit: int | None,
    device: str | None,
) -> None:
    from .evaluate import evaluate as measure

    _only_for_images(threshold=threshold)
    model, vocabulary = _opened(checkpoint, tau)
    name = data or own_text(model)
    text = open_text(name, vocabulary)
    ask = partial(measure, model, text.test, layout=layout, batch=batch, limit=limit, name=name)
    total = limit or (len(text.test) - 1) // model.backbone.shape.context
    found = shared(lambda place, progress: ask(device=place, progress=progress), total, device)
    if found is None:
        return
    result = {key: round(found[key], 6) for key in ("loss", "bpc", "tlops_saved", "macs_saved")}
    result["tau"] = getattr(model.method, "tau", None)
    columns = [*result, "tokens_per_s"]
    show_table(f"{checkpoint} on {name} ({layout})", columns, [[*result.values(), found["tokens_per_s"]]])
    finish(result)


def bench(
    checkpoint: str,
    batches: list[int],
    fractions: list[float],
    dtype: str,
    seconds: float,
    device: str | None,
    data: str | None,
    **for_images: Any,
) -> None:
    """data: a text for the router's own decisions, by itself the model's, where it is there."""
    from .bench import bench_lm, compilable

    _only_for_images(**for_images)
    model, vocabulary = _opened(checkpoint, None)
    place, ids = device_for(device), None
    try:
        ids = open_text(data or own_text(model), vocabulary).val
    except DwindleError as error:
        if data is not None:
            raise
        aside.print(plain(f"Only forced decisions are timed: {error} Or name a text: --data."), soft_wrap=True)
    with progress_bar() as bar:
        task = bar.add_task("timing", total=len(batches) * (len(fractions) + (ids is not None)))
        result = bench_lm(
            model,
            batches,
            fractions,
            place,
            dtype,
            seconds,
            ids=ids,
            compiled=compilable(place),
            progress=lambda row: bar.advance(task),
        )
    columns = ["batch", "decisions", "fraction", "static_ms", "adaptive_ms", "speedup", "spread", "promised", "reached"]
    columns += ["promised_macs", "reached_macs"]
    rows = [[row[c] for c in columns] for row in result["rows"]]
    show_table(f"{checkpoint} on {result['device']}, {dtype}, {result['context']} characters", columns, rows)
    finish(result)


def view(
    checkpoint: str,
    files: list[Path] | None,
    out: Path,
    threshold: float | None,
    tau: float | None,
    device: str | None,
) -> None:
    from .view import page

    _only_for_images(threshold=threshold)
    model, vocabulary = _opened(checkpoint, tau)
    pages = []
    names = file_stems([path.stem for path in files or []])
    for i, path in enumerate(files or [None]):  # type: ignore[list-item]
        if path is None:
            name = own_text(model)
            ids, folder = open_text(name, vocabulary).val[:PASSAGE], out
        else:
            name, folder = path.name, out if len(names) == 1 else out / names[i]
            ids = vocabulary.encode(_read(path), f"'{path}'")
        pages.append(page(model, ids, folder, f"{checkpoint} on {name}", device_for(device)))
    columns = ["page", "characters", "depth", "tlops_saved"]
    show_table(checkpoint, columns, [[row[c] for c in columns] for row in pages])
    finish({"pages": pages})


def _read(path: Path) -> str:
    if not path.is_file():
        raise DwindleError(f"There is no file '{path}'; check the path.")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DwindleError(f"'{path}' is not UTF-8 text (byte {error.start}); convert it first.") from error
    if not text:
        raise DwindleError(f"'{path}' is empty; give a file with some text.")
    return text


def generate(
    checkpoint: str,
    prompt: str,
    length: int,
    temperature: float,
    top_k: int | None,
    seed: int | None,
    tau: float | None,
    device: str | None,
) -> None:
    from .generate import generate as write

    if not is_language(read_config(find(checkpoint))):
        raise DwindleError(f"{checkpoint} is a vision model; dwindle generate needs a language model.")
    model, vocabulary = _opened(checkpoint, tau)
    place = device_for(device)
    ids = vocabulary.encode(prompt, "The prompt").long()[None].to(place)
    begin = time.perf_counter()
    made = write(model.to(place), ids, length, temperature=temperature, top_k=top_k, seed=seed)
    seconds = time.perf_counter() - begin
    text = vocabulary.decode(made.ids[0])
    console.print(text, markup=False, soft_wrap=True)
    saved = 1 - made.live.double().mean().item()
    result: dict[str, Any] = {"text": text, "characters": length, "tlops_saved": round(saved, 4)}
    result |= {"tau": getattr(model.method, "tau", None), "tokens_per_s": round(length / seconds, 1)}
    if place.startswith("cuda"):
        result["device"] = torch.cuda.get_device_name(torch.device(place))
    finish(result)

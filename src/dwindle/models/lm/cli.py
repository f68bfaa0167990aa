"""The commands of language models: parse, call, print a table and one line of JSON."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ...core.method import require
from ...errors import DwindleError, unknown
from ...io.checkpoint import save
from ...io.text import Text, Vocabulary, open_text
from ...io.tokenizer import Tokenizer
from ...settings import Share, checked_value
from ...show.drawing import file_stems
from ...show.running import shared
from ...show.terminal import (
    Batch,
    BatchSizes,
    Checkpoint,
    Device,
    FigureFolder,
    Layout,
    Limit,
    Seconds,
    Tau,
    aside,
    at_least,
    check_loading,
    console,
    device_and_dtype,
    device_for,
    finish,
    numbers,
    plain,
    progress_bar,
    show_rows,
    show_table,
)
from .bench import bench_generation, bench_lm, compilable
from .difficulty import difficulty
from .evaluate import affordable, rivals
from .evaluate import evaluate as measure
from .execute import LAYOUTS, AdaptiveLM
from .generate import generate as write
from .load import load_lm, own_context, own_text, vocabulary_of
from .view import page

PASSAGE = 2000  # tokens of the model's own text that `view` shows where no file is given
Data = Annotated[str | None, typer.Option(help="shakespeare, enwik8 or a text file; by itself its own.")]
Context = Annotated[int | None, typer.Option(help="Tokens of a window; by itself as many as it learnt from.")]


def _opened(checkpoint: str, tau: float | None) -> tuple[AdaptiveLM, Vocabulary | Tokenizer]:
    """The model of a checkpoint, with its router's tau set if one is given, and its vocabulary or tokenizer."""
    model = load_lm(checkpoint)
    if tau is not None:
        checked_value(tau, Share, "--tau", "a router")
        require(
            hasattr(model.method, "tau"),
            f"--tau {tau}",
            f"{type(model.method).__name__} has none to turn, so leave it out",
        )
        model.method.tau = tau  # type: ignore[assignment]
    return model, vocabulary_of(model)


def _text(
    model: AdaptiveLM, vocabulary: Vocabulary | Tokenizer, data: str | None, context: int | None
) -> tuple[Text, dict[str, Any]]:
    """The text of --data, or the model's own, and options of `evaluate` for it."""
    most = model.backbone.shape.context
    fits = context is None or 1 <= context <= most
    require(fits, f"--context {context}", f"the model's windows have from 1 to {most} tokens")
    text = open_text(data or own_text(model), vocabulary)
    options = {"name": text.name, "context": context or own_context(model), "per_token": text.per_token}
    return text, options


def evaluate(
    checkpoint: Checkpoint,
    data: Data = None,
    layout: Layout = "packed",
    tau: Tau = None,
    batch: Batch = 64,
    limit: Limit = None,
    context: Context = None,
    others: Annotated[
        bool,
        typer.Option("--rivals", help="Beside it the same model without a router, and with as many skips by chance."),
    ] = False,
    device: Device = None,
) -> None:
    """Loss, and what was saved."""
    if layout not in LAYOUTS:
        raise unknown("layout", layout, LAYOUTS)
    check_loading(batch, limit)
    model, vocabulary = _opened(checkpoint, tau)
    text, options = _text(model, vocabulary, data, context)
    options |= {"layout": layout, "batch": batch, "limit": limit}

    def run(place: Any, progress: Any) -> dict[str, Any]:
        found = measure(model, text.test, device=place, progress=progress, **options)
        beside = rivals(model, found, text.test, device=place, progress=progress, **options) if others else {}
        return found | {"rivals": beside}

    total = (limit or (len(text.test) - 1) // options["context"]) * (4 if others else 1)
    found = shared(run, total, device)
    if found is None:
        return
    shown = ("loss", "bpc", "tlops_saved", "macs_saved")
    result: dict[str, Any] = {key: round(found[key], 6) for key in shown}
    result["tau"] = getattr(model.method, "tau", None)
    rows = [{"router": type(model.method).__name__, **result, "tokens_per_s": found["tokens_per_s"]}]
    for name, rival in found["rivals"].items():
        result[name] = {key: round(rival[key], 6) for key in shown}
        rows.append({"router": name, **result[name], "tau": "", "tokens_per_s": rival["tokens_per_s"]})
    show_rows(f"{checkpoint} on {text.name} ({layout})", [*rows[0]], rows)
    finish(result)


def bench(
    model: Annotated[str, typer.Argument(help="A checkpoint.")],
    batch: BatchSizes = "1,8,32",
    fraction: Annotated[str, typer.Option(help="Shares of token-blocks computed, drawn at random.")] = "1.0,0.67,0.52",
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    seconds: Seconds = 4.0,
    data: Annotated[
        str | None, typer.Option(help="A text for the router's own decisions; by itself the model's.")
    ] = None,
    generate: Annotated[
        int | None, typer.Option(help="Time writing so many tokens instead, with skipping and without.")
    ] = None,
    context: Context = None,
    device: Device = None,
) -> None:
    """Static against adaptive. The router's own decisions are timed where there is a text for them."""
    place = device_and_dtype(device, dtype)
    at_least(seconds=(seconds, 0))
    batches, fractions = numbers("--batch", batch, int), numbers("--fraction", fraction, float)
    opened, vocabulary = _opened(model, None)
    if generate is not None:
        made = bench_generation(opened, batches, generate, place, dtype, seconds)
        columns = ["batch", "static_ms", "all_ms", "skipping_ms", "speedup", "against_static", "spread", "tlops_saved"]
        show_rows(f"{model} writing {generate} on {made['device']}", columns, made["rows"])
        return finish(made)
    ids = None
    try:
        ids = _text(opened, vocabulary, data, context)[0].val
    except DwindleError as error:
        if data is not None:
            raise
        aside.print(plain(f"Only forced decisions are timed: {error} Or name a text: --data."), soft_wrap=True)
    with progress_bar() as bar:
        task = bar.add_task("timing", total=len(batches) * (len(fractions) + (ids is not None)))
        result = bench_lm(
            opened,
            batches,
            fractions,
            place,
            dtype,
            seconds,
            ids=ids,
            context=context or own_context(opened),
            compiled=compilable(place),
            progress=lambda row: bar.advance(task),
        )
    columns = ["batch", "decisions", "fraction", "static_ms", "adaptive_ms", "speedup", "spread", "promised", "reached"]
    columns += ["promised_macs", "reached_macs"]
    show_rows(f"{model} on {result['device']}, {dtype}, {result['context']} tokens", columns, result["rows"])
    finish(result)


def routing(
    checkpoint: Checkpoint,
    data: Data = None,
    tau: Tau = None,
    batch: Batch = 64,
    limit: Limit = None,
    context: Context = None,
    device: Device = None,
) -> None:
    """On the validation text: Spearman's correlations, quarters of difficulty, kinds of character."""
    check_loading(batch, limit)
    model, vocabulary = _opened(checkpoint, tau)
    text, options = _text(model, vocabulary, data, context)
    with progress_bar() as bar:
        task = bar.add_task("asking", total=limit or (len(text.val) - 1) // options["context"])
        found = difficulty(
            model,
            text.val,
            vocabulary,
            batch=batch,
            limit=limit,
            device=device_for(device),
            name=text.name,
            context=options["context"],
            progress=lambda count: bar.advance(task, count),
        )
    found = _rounded(found) | {"tau": getattr(model.method, "tau", None)}
    rows = [
        [by, i + 1, q["difficulty"], q["blocks"]] for by, qs in found["quartiles"].items() for i, q in enumerate(qs)
    ]
    show_table(f"{checkpoint} on {text.name}, from easy to hard", ["by", "quarter", "difficulty", "blocks"], rows)
    columns = ["kind", "share", "blocks", "loss", "entropy", "spearman"]
    show_rows("By the character read", columns, found["kinds"])
    both = {"blocks": found["spearman"], "mean p": found["spearman_p"]}
    show_table("Spearman", ["of", "loss", "entropy"], [[of, *values.values()] for of, values in both.items()])
    finish(found)


def _rounded(found: Any) -> Any:
    """`found` with all its numbers, also nested ones, rounded to four decimals."""
    if isinstance(found, dict):
        return {name: _rounded(value) for name, value in found.items()}
    if isinstance(found, list):
        return [_rounded(value) for value in found]
    return round(found, 4) if isinstance(found, float) else found


def calibrate(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Option(help="Folder of the checkpoint to write.")],
    loss: Annotated[float, typer.Option(help="Percent that the loss may rise over that with nothing skipped.")] = 0.5,
    data: Data = None,
    batch: Batch = 64,
    limit: Limit = None,
    context: Context = None,
    device: Device = None,
) -> None:
    """On training text, as much as there is to validate."""
    check_loading(batch, limit)
    model, vocabulary = _opened(checkpoint, None)
    text, options = _text(model, vocabulary, data, context)
    known = text.train[: len(text.val)]
    found = affordable(model, known, loss / 100, batch=batch, limit=limit, device=device_for(device), **options)
    save(model, out, extra={"calibrated": {"loss_allowed": loss / 100, "data": Path(text.name).name, **found}})
    show_table(f"{checkpoint} on training text of {text.name}", [*found], [[*found.values()]])
    finish(found | {"out": str(out)})


def view(
    checkpoint: Checkpoint,
    images: Annotated[list[Path] | None, typer.Argument(help="Text files; by itself a passage of its own.")] = None,
    out: FigureFolder = Path("dwindle-view"),
    tau: Tau = None,
    device: Device = None,
) -> None:
    """A page for each text."""
    files = images or []
    model, vocabulary = _opened(checkpoint, tau)
    pages = []
    names = file_stems([path.stem for path in files])
    for i, path in enumerate(files or [None]):  # type: ignore[list-item]
        if path is None:
            name = own_text(model)
            ids, folder = open_text(name, vocabulary).val[:PASSAGE], out
        else:
            name, folder = path.name, out if len(names) == 1 else out / names[i]
            ids = vocabulary.encode(_read(path), f"'{path}'")
        pages.append(page(model, ids, folder, f"{checkpoint} on {name}", device_for(device)))
    show_rows(checkpoint, ["page", "characters", "depth", "tlops_saved"], pages)
    finish({"pages": pages})


def _read(path: Path) -> str:
    """The text of a UTF-8 file, which must not be empty."""
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
    checkpoint: Checkpoint,
    prompt: Annotated[str, typer.Option(help="What the text begins with.")] = "\n",
    length: Annotated[int, typer.Option(help="Tokens to write.")] = 500,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Only among the K likeliest tokens.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same text every time.")] = None,
    tau: Tau = None,
    device: Device = None,
) -> None:
    """A text, and what was saved."""
    model, vocabulary = _opened(checkpoint, tau)
    place = device_for(device)
    ids = vocabulary.encode_prompt(prompt).long()[None].to(place)
    begin = time.perf_counter()
    made = write(model.to(place), ids, length, temperature=temperature, top_k=top_k, seed=seed)
    seconds = time.perf_counter() - begin
    text = vocabulary.decode(made.ids[0])
    console.print(text, markup=False, soft_wrap=True)
    saved = 1 - made.live.double().mean().item()
    result: dict[str, Any] = {"text": text, vocabulary.unit: length, "tlops_saved": round(saved, 4)}
    result |= {"tau": getattr(model.method, "tau", None), "tokens_per_s": round(length / seconds, 1)}
    if place.startswith("cuda"):
        result["device"] = torch.cuda.get_device_name(torch.device(place))
    finish(result)

"""Export of a model as one graph that drops halted tokens: to ONNX, a torch.export program, or compiled code.

A file gets its name only after it was compared with the model: it must give the same decisions and logits.
"""

from __future__ import annotations

import glob
import io
import json
import os
import shutil
import statistics
from collections.abc import Callable, Collection
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.model import AdaptiveViT
from ..errors import DwindleError, unknown
from ..files import photographs, write_errors
from ..io.images import load_image, preprocess_of
from ..ops.int8 import is_int8
from ..ops.timing import milliseconds
from .onnx_graph import OPSET, Call, check, check_installed, onnx_model, open_onnx, program, quiet
from .padded import Padded, depth_of

FORMS = {"onnx": ".onnx", "torch-export": ".pt2", "aoti": ".pt2"}
MOVE = 4e6  # multiply-accumulates that take as long as moving rows together
EMBEDDED = 1 << 30  # bytes; larger weights lie in a file beside the ONNX file, as protobuf is limited to 2 GiB


class Graph(nn.Module):
    """The module that is exported: images (B, C, height, width) in; logits (B, classes) and depth (B, N) out."""

    def __init__(self, model: AdaptiveViT, moves: Collection[int] | None = None) -> None:
        """moves: blocks after which live rows are moved together; None: each at which tokens may stop."""
        super().__init__()
        self.model = model
        self.start = partial(
            Padded.start, front=model.backbone.front, moves=moves, prefix_stays=model.method.keeps_prefix
        )

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        out = self.model.run(images, self.start)
        return out.logits, depth_of(out.trace)


@torch.inference_mode()
def worthwhile_moves(model: AdaptiveViT, images: Tensor) -> tuple[int, ...]:
    """The blocks after which moving live rows together saves more than it costs, on average over these images."""
    live = model(images, layout="packed").trace.counts.float().mean(1).tolist()
    shape, moves, rows = model.backbone.shape, [], live[0]
    for block, count in enumerate(live[1:], 1):
        if (rows - count) * shape.block_macs > MOVE:
            moves.append(block)
            rows = count
    return tuple(moves)


def export(model: AdaptiveViT, to: str, out: str | os.PathLike, *, seconds: float = 0.0) -> dict[str, Any]:
    """Write the file. Returns the largest difference of logits, the share of equal decisions, and speeds.

    to: a key of `FORMS`. seconds: time for each comparison with the static model exported the same way (batches of 1
        and 8, on one thread and on all); 0: no comparison.
    """
    if to not in FORMS:
        raise unknown("form to export to", to, FORMS)
    path = Path(out)
    if path.is_dir() or path.suffix != FORMS[to]:
        raise DwindleError(f"--out {path}: {to} is written to a file that ends in {FORMS[to]}; name one.")
    _check_tools(to)
    model = model.eval().cpu().float()
    if is_int8(model):
        raise DwindleError(
            "An int8 model is not exported; export the one it was made from, then quantise the file with onnxruntime."
        )
    photos = check_images(model)
    with write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.stem}.draft{path.suffix}")
    write, open_ = {
        "onnx": (_write_onnx, open_onnx),
        "torch-export": (_write_program, open_program),
        "aoti": (_write_compiled, open_compiled),
    }[to]
    try:
        recorded = program(Graph(model, worthwhile_moves(model, photos)), photos)
        with write_errors(path):
            write(recorded, draft, _metadata(model))
        result = {"out": str(path), "form": to, **check(model, open_(draft), photos)}
        if to == "onnx":
            result["opset"] = OPSET
        if seconds:
            static = draft.with_name(f".static{draft.name}")
            result["speed"] = _race(model, draft, photos, write, open_, static, seconds)
        os.replace(draft, path)
    finally:
        for left in path.parent.glob(f"*{glob.escape(draft.name)}"):
            left.unlink()
    return result | {"bytes": path.stat().st_size}


def check_images(model: AdaptiveViT) -> Tensor:
    """The shipped photographs, transformed for the model; noise for a model whose images are not square in RGB."""
    shape = model.backbone.shape
    transform = preprocess_of(model).eval_transform()
    photos = torch.stack([transform(load_image(path)) for path in photographs()])
    if tuple(photos.shape[1:]) == (shape.channels, *shape.image):
        return photos
    return torch.randn(len(photos), shape.channels, *shape.image, generator=torch.Generator().manual_seed(0))


def _race(
    model: AdaptiveViT, adaptive: Path, photos: Tensor, write: Callable, open_: Callable, path: Path, seconds: float
) -> list[dict[str, Any]]:
    """Time the exported static and adaptive models in turns in one process. Returns a row per thread count and batch.

    They run on one thread, as on a server with many processes, and on all threads: the operations that decide are too
    small to gain from threads.
    """
    write(program(model.vit, photos), path, {})
    rows, every = [], torch.get_num_threads()
    with torch.inference_mode():
        share = float(model.cost(model(photos, layout="packed").trace))
    try:
        runs: dict[int, list[Call]] = {}  # by threads: static, adaptive
        for threads, batch in product(sorted({1, every}), (1, 8)):
            torch.set_num_threads(threads)
            runs[threads] = runs.get(threads) or [open_(which) for which in (path, adaptive)]
            # As many batches as photographs, so that every photograph counts equally.
            batches = photos[torch.arange(batch * len(photos)) % len(photos)].split(batch)

            def run_all(run: Call, batches: tuple[Tensor, ...] = batches) -> None:
                for images in batches:
                    run(images)

            with torch.inference_mode():
                calls = [partial(run_all, run) for run in runs[threads]]
                spent = milliseconds(calls, seconds, torch.device("cpu"))
            rows.append(
                {
                    "batch": batch,
                    "cost": round(share, 4),
                    "static_ms": round(statistics.median(spent[0]) / len(batches), 2),
                    "adaptive_ms": round(statistics.median(spent[1]) / len(batches), 2),
                    "speedup": round(statistics.median(s / a for s, a in zip(*spent)), 3),
                    "rounds": len(spent[0]),
                    "threads": threads,
                }
            )
    finally:
        torch.set_num_threads(every)
    return rows


def _metadata(model: AdaptiveViT) -> dict[str, str]:
    """The metadata in the file: preprocessing, method and class names, as JSON."""
    return {
        "dwindle.preprocess": json.dumps(preprocess_of(model).to_dict()),
        "dwindle.method": json.dumps({"name": type(model.method).__name__, "options": model.method.config}),
        "dwindle.classes": json.dumps(getattr(model, "extra", {}).get("classes")),
    }


def _write_program(recorded: torch.export.ExportedProgram, path: Path, about: dict[str, str]) -> None:
    buffer = io.BytesIO()  # on a full disk torch's own file writer ends the process
    torch.export.save(recorded, buffer, extra_files=about)
    path.write_bytes(buffer.getbuffer())


def open_program(path: str | os.PathLike) -> Call:
    """A .pt2 file as a function of images."""
    module: Any = torch.export.load(os.fspath(path)).module()
    return module


def _write_compiled(recorded: torch.export.ExportedProgram, path: Path, about: dict[str, str]) -> None:
    with quiet(), torch.no_grad():
        torch._inductor.aoti_compile_and_package(
            recorded, package_path=str(path), inductor_configs={"aot_inductor.metadata": about}
        )


def open_compiled(path: str | os.PathLike) -> Call:
    """A program compiled by AOTInductor as a function of images."""
    module: Any = torch._inductor.aoti_load_package(os.fspath(path))
    return module


def _write_onnx(recorded: torch.export.ExportedProgram, path: Path, about: dict[str, str]) -> None:
    import onnx
    import onnx_ir

    made = onnx_model(recorded, ["images"], ["logits", "depth"])
    made.metadata_props.update(about)
    size = sum(p.numel() * p.element_size() for p in recorded.parameters())
    onnx_ir.save(made, path, external_data=f"{path.name}.data" if size > EMBEDDED else None)
    # The exporter transposes weights and leaves their old shapes in value_info, where quantisers fail on them.
    saved = onnx.load(path, load_external_data=False)
    del saved.graph.value_info[:]
    onnx.save(saved, path)


def _check_tools(to: str) -> None:
    """Refuse a form whose tools are missing, before anything is recorded."""
    if to == "onnx":
        check_installed()
    if to == "aoti" and not (shutil.which("g++") or shutil.which("clang++") or "CXX" in os.environ):
        raise DwindleError("AOTInductor needs a C++ compiler, and there is none here; install g++, or export to onnx.")

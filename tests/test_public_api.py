"""Names and lean imports, frozen."""

from __future__ import annotations

import subprocess
import sys

import dwindle

NAMES = [
    *["AHT", "AViT", "AdaPerceiver", "AdaptiveViT", "DwindleError", "Method", "Output", "Static", "Tokens"],
    *["Trace", "Verdict", "adapt", "calibrate", "load", "save"],
]


def test_public_names():
    assert sorted(dwindle.__all__) == sorted(NAMES)
    assert all(hasattr(dwindle, name) for name in NAMES)


def test_import_is_lean():
    heavy = ("matplotlib", "transformers", "typer", "rich", "pyarrow", "tensorboard", "huggingface_hub", "pandas")
    code = f"import sys, dwindle; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_version():
    from importlib.metadata import version

    assert version("dwindle") == dwindle.__version__


def test_a_method_is_one_file(tmp_path):
    """docs/add_a_method.md's example, as written there."""
    import re
    from pathlib import Path

    import torch

    from conftest import build, images_for

    page = (Path(__file__).parents[1] / "docs" / "add_a_method.md").read_text()
    code = re.search(r"```python\n(from __future__.*?)```", page, re.DOTALL).group(1)
    code = code.replace("from ..", "from dwindle.").replace("from .base", "from dwindle.methods.base")
    scope: dict = {"__name__": "example"}
    exec(compile(code, "example.py", "exec"), scope)
    try:
        model = build("vit", scope["Norm"](share=0.9))
        images = images_for(model)
        with torch.no_grad():
            packed, masked = model(images, layout="packed"), model(images, layout="masked")
        assert torch.equal(packed.trace.depth, masked.trace.depth) and packed.trace.depth.min() < 4
        torch.testing.assert_close(packed.logits, masked.logits, atol=1e-5, rtol=1e-4)
    finally:
        dwindle.Method.registry.pop("Norm")

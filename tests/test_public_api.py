"""Names and lean imports, frozen."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import dwindle

NAMES = [
    *["AHT", "AViT", "AdaPerceiver", "AdaptiveViT", "DwindleError", "Method", "Output", "Static", "Tokens"],
    *["Trace", "Verdict", "adapt", "adaptive_part", "calibrate", "load", "save", "speedup", "unwrap"],
]


def test_public_names():
    assert sorted(dwindle.__all__) == sorted(NAMES)
    assert all(hasattr(dwindle, name) for name in NAMES)


LEAN = """
import sys
from importlib.machinery import PathFinder

REFUSED = {
    "datasets", "fastapi", "huggingface_hub", "matplotlib", "onnx", "onnxruntime", "onnxscript", "optuna", "pandas",
    "prometheus_client", "pyarrow", "ray", "rich", "scipy", "starlette", "tensorboard", "transformers", "typer",
    "uvicorn",
}

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in REFUSED else super().find_spec(name, path, target)

sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]

import torch
from timm.models.vision_transformer import VisionTransformer

import dwindle

vit = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=4, num_heads=2, num_classes=5)
model = dwindle.adapt(vit, dwindle.AHT(stages=(1, 2), budget=0.6))
images = torch.randn(3, 3, 32, 32)
model.train()
model.loss(model(images), torch.tensor([0, 1, 2]))["total"].backward()
model.eval()
again = dwindle.load(dwindle.save(model, sys.argv[1] + "/tiny"))
with torch.no_grad():
    wanted = model(images)
    assert torch.equal(again(images).logits, wanted.logits)
    assert torch.equal(model(images, layout="masked").trace.depth, wanted.trace.depth)
try:
    import rich
except ModuleNotFoundError:
    print("held")
"""


def test_the_library_needs_only_torch_timm_numpy_safetensors_and_pillow(tmp_path):
    """Adapted, trained, saved, loaded and run, where everything else that Dwindle uses cannot be imported."""
    ended = subprocess.run([sys.executable, "-c", LEAN, str(tmp_path)], capture_output=True, text=True)
    assert ended.stdout.strip() == "held", ended.stderr[-2000:]


def test_every_dependency_says_from_which_version_on():
    """.ci/floors tests with these."""
    with (Path(__file__).parents[1] / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    named = [line for group in (project["dependencies"], *project["optional-dependencies"].values()) for line in group]
    assert all(line.startswith("dwindle[") for line in named if ">=" not in line)


def test_version():
    from importlib.metadata import version

    assert version("dwindle") == dwindle.__version__


def test_a_method_is_one_file(tmp_path):
    """docs/add_a_method.md's example, as written there."""
    import re

    import torch

    from shared.tiny import build, images_for

    page = (Path(__file__).parents[1] / "docs" / "add_a_method.md").read_text()
    code = re.search(r"```python\n(from __future__.*?)```", page, re.DOTALL).group(1)
    code = code.replace("from ..", "from dwindle.")
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

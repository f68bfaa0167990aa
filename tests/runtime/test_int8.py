"""int8: the product against its definition, the first law, what a checkpoint keeps, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

import dwindle
from dwindle.evaluate.bench import bench, forced_depths
from dwindle.ops.int8 import Int8Linear, int8_linear, int8_linear_ref, is_int8, quantize_rows
from dwindle.runtime.export import check_images, export
from dwindle.runtime.int8 import likeness, quantize
from shared.checkpoint import edit
from shared.tiny import BACKBONES, METHODS, build, cover, images_for


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 32), (7, 33), (2, 5, 1536), (197, 384), (0, 16)])
@torch.no_grad()
def test_the_product_is_its_definition(shape, bias):
    layer = nn.Linear(shape[-1], 24, bias=bias)
    weight, scale = quantize_rows(layer.weight)
    x = torch.randn(shape) * torch.logspace(-6, 6, shape[-2])[:, None] if shape[-2] else torch.randn(shape)
    ours = int8_linear(x, weight, scale[:, 0], layer.bias)
    assert ours.shape == (*shape[:-1], 24)
    torch.testing.assert_close(ours, int8_linear_ref(x, weight, scale[:, 0], layer.bias), atol=1e-6, rtol=1e-5)
    if x.numel():
        error = (ours - F.linear(x, layer.weight, layer.bias)).abs().amax(-1)
        assert (error <= 0.02 * x.abs().amax(-1)).all()  # of each row by its own size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision_does_not_turn_the_largest_around(dtype):
    x = (torch.randn(1000, 64) * torch.logspace(-3, 1, 1000)[:, None]).to(dtype)
    whole, _ = quantize_rows(x)
    assert whole.abs().max() == 127 and (whole.long() * x.sign().long() >= 0).all()
    weight, scale = quantize_rows(torch.randn(8, 64))
    ours = int8_linear(x, weight, scale[:, 0], None)
    exact = x.double() @ (weight.double() * scale).T
    assert ours.dtype == dtype and ((ours - exact).norm(dim=1) <= 0.03 * exact.norm(dim=1) + 1e-6).float().mean() > 0.98


@torch.no_grad()
def test_rows_that_are_zero_or_not_numbers():
    weight, scale = quantize_rows(torch.randn(4, 8))
    x = torch.tensor([0.0, torch.nan, 1.0])[:, None].expand(3, 8)
    out = int8_linear(x, weight, scale[:, 0], None)
    assert (out[0] == 0).all() and out[1].isnan().all() and out[2].isfinite().all()


@pytest.mark.parametrize("backbone, method", cover(turn=2, kinds_each=2))
@torch.no_grad()
def test_first_law(backbone, method):
    """Lean is packed, and an image alone is the image in company. Masked is packed as far as int8 lets it: attention
    over a mask adds up in another order, and where that moves a value over the edge between two int8 numbers, a step of
    1/127 follows. So the decisions are given."""
    model = quantize(build(backbone, METHODS[method]()))
    images = images_for(model, 3)
    together, packed = model(images), model(images, layout="packed")
    assert torch.equal(together.trace.depth, packed.trace.depth)
    torch.testing.assert_close(together.logits, packed.logits, atol=1e-4, rtol=1e-3)
    for i in range(3):
        alone = model(images[i : i + 1])
        assert torch.equal(alone.trace.depth[0], together.trace.depth[i])
        # A convolution rounds by the size of its batch, and where that moves a value over an edge int8 makes a step.
        close = {"atol": 0.05, "rtol": 0.1} if backbone == "stem" else {"atol": 1e-4, "rtol": 1e-3}
        torch.testing.assert_close(alone.logits[0], together.logits[i], **close)
    depths = forced_depths(3, model.backbone.shape, 0.6)
    packed, masked = model(images, depths=depths), model(images, depths=depths, layout="masked")
    assert torch.equal(packed.trace.depth, masked.trace.depth)
    scale = masked.logits.abs().max()
    assert (packed.logits - masked.logits).abs().max() <= 0.1 * scale


@pytest.mark.parametrize("backbone", BACKBONES)
@torch.no_grad()
def test_a_checkpoint_keeps_it(backbone, tmp_path):
    model = build(backbone, METHODS["AHT_merge"]())
    small = quantize(model)
    assert is_int8(small) and not is_int8(model)
    images = images_for(model, 2)
    told = model.backbone.describe() is not None  # else a checkpoint asks for the model it belongs to
    kept = model
    for name in ("once", "twice"):
        dwindle.save(small if kept is model else kept, tmp_path / name)
        kept = dwindle.load(tmp_path / name, vit=None if told else BACKBONES[backbone]())
        assert is_int8(kept) and torch.equal(kept(images).logits, small(images).logits)
    assert small.static_macs() == model.static_macs()


@pytest.mark.parametrize("backbone", BACKBONES)
@torch.no_grad()
def test_it_is_near_what_it_was_made_from(backbone):
    model = build(backbone, dwindle.Static())
    images = images_for(model)
    exact = model(images).logits
    assert (quantize(model)(images).logits - exact).norm() <= 0.2 * exact.norm()


def test_the_shipped_model_answers_as_before():
    model = dwindle.load("aht_deit_tiny_imagenet")
    alike = likeness(model, quantize(model), check_images(model))
    assert alike["same_answers"] == 1 and abs(alike["cost"] - alike["cost_float"]) < 0.02


def test_what_is_refused(tmp_path):
    model = build("vit", METHODS["AHT"]())
    small = quantize(model)
    with pytest.raises(dwindle.DwindleError, match="already"):
        quantize(small)
    with pytest.raises(dwindle.DwindleError, match="cannot be trained"):
        small.train()(images_for(model, 1))
    with pytest.raises(dwindle.DwindleError, match="fp32"):
        bench(small.eval(), [1], [1.0], dtype="bf16")
    with pytest.raises(dwindle.DwindleError, match="int8"):
        export(small, "torch-export", tmp_path / "x.pt2")
    folder = dwindle.save(small, tmp_path / "small")
    edit(folder, lambda config: config.update(weights="int3"))
    with pytest.raises(dwindle.DwindleError, match="int3"):
        dwindle.load(folder)
    edit(folder, lambda config: (config.update(weights="int8"), config.pop("weights_sha256")))
    weights = load_file(folder / "model.safetensors")
    save_file({n: w.float() for n, w in weights.items()}, folder / "model.safetensors")
    with pytest.raises(dwindle.DwindleError, match=r"not .* int8"):
        dwindle.load(folder)


def test_bench_times_both_sides_in_int8():
    result = bench(build("vit", METHODS["AHT"]()), [2], [0.6], dtype="int8", seconds=0.0)
    assert result["dtype"] == "int8" and result["rows"][0]["speedup"] > 0
    again = bench(quantize(build("vit", METHODS["AHT"]())), [1], [0.6], seconds=0.0)
    assert again["dtype"] == "int8"


def test_a_layer_alone():
    layer = nn.Linear(16, 4).eval()
    made = Int8Linear.of(layer)
    assert made.weight.dtype == torch.int8 and made.state_dict().keys() == {"weight", "bias", "scale"}
    x = torch.randn(3, 16, requires_grad=True)
    assert not made(x).requires_grad
    torch.testing.assert_close(made(x), layer(x), atol=0.05, rtol=0.05)

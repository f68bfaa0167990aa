"""The first law, for every method on every backbone: masked and packed give the same decisions and the same logits;
nothing halted gives exactly the wrapped model; an image's result does not depend on its batch."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch

import dwindle
from dwindle.evaluate.bench import forced_depths
from dwindle.methods import Method
from shared.tally import SLOW
from shared.tiny import BACKBONES, FEWEST, KINDS, METHODS, OFF, build, cover, images_for

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def plain(vit: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
    out = vit(images)
    if isinstance(out, torch.Tensor):
        return out
    return out.pooler_output if "pooler_output" in out else out.logits


def test_every_method_is_in_the_battery():
    covered = {type(make()).__name__ for make in METHODS.values()}
    ours = {name for name, kind in Method.registry.items() if kind.__module__.startswith("dwindle.")}
    assert covered == ours == set(OFF)


def test_the_cover_meets_every_backbone_with_every_kind_and_every_method():
    for turn in range(5):
        pairs = cover(turn=turn)
        assert {method for _, method in pairs} == set(METHODS)
        for kind in KINDS:
            assert {backbone for backbone, method in pairs if method in kind} == set(BACKBONES)
    every = {pair for turn in range(5) for pair in cover(turn=turn)}
    assert every == set(product(BACKBONES, METHODS))  # five tests with different turns meet them all


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backbone, method", cover())
@torch.no_grad()
def test_masked_is_packed(backbone, method, device):
    model = build(backbone, METHODS[method]()).to(device)
    images = images_for(model).to(device)
    packed, masked = model(images, layout="packed"), model(images, layout="masked")
    assert torch.equal(packed.trace.depth, masked.trace.depth)
    torch.testing.assert_close(packed.logits, masked.logits, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(packed.features, masked.features, atol=1e-4, rtol=1e-4)
    assert packed.trace.depth.min() >= 1 and packed.trace.depth.max() <= model.backbone.shape.blocks
    assert len(packed.trace.depth.unique()) >= FEWEST.get(method, 3)  # where nothing halts, nothing is proven
    for value in {key for values in masked.trace.values for key in values}:
        torch.testing.assert_close(packed.trace.stack(value), masked.trace.stack(value), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backbone", ["vit", "average", "eva02", "beit", "hf_dinov2"])
@torch.no_grad()
def test_masked_is_packed_tighter_in_double(backbone, method):
    model = build(backbone, METHODS[method](), torch.float64)
    images = images_for(model, dtype=torch.float64)
    packed, masked = model(images, layout="packed"), model(images, layout="masked")
    assert torch.equal(packed.trace.depth, masked.trace.depth)
    torch.testing.assert_close(packed.logits, masked.logits, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("layout", ["packed", "masked"])
@pytest.mark.parametrize("backbone, method", cover(OFF, turn=1))
@torch.no_grad()
def test_nothing_halted_is_the_wrapped_model(backbone, method, layout):
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        model = build(backbone, OFF[method](), dtype)
        images = images_for(model, dtype=dtype)
        vit = copy.deepcopy(model).unwrap()
        out = model(images, layout=layout)
        assert (out.trace.depth == model.backbone.shape.blocks).all()
        expected = plain(vit, images)
        torch.testing.assert_close(out.logits, expected, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(plain(model.vit, images), expected, atol=0, rtol=0)  # wrapped, but not run by us


@pytest.mark.parametrize("layout", ["packed", "masked"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "backbone", ["registers", "average", "beit", *(["vit", "dinov3", "hf_deit_teacher"] if SLOW else [])]
)
@torch.no_grad()
def test_an_image_does_not_depend_on_its_batch(backbone, method, layout):
    model = build(backbone, METHODS[method]())
    images = images_for(model)
    together = model(images, layout=layout)
    for i in range(len(images)):
        alone = model(images[i : i + 1], layout=layout)
        assert torch.equal(alone.trace.depth[0], together.trace.depth[i])
        torch.testing.assert_close(alone.logits[0], together.logits[i], atol=1e-5, rtol=1e-4)
    other = images.flip(0)
    torch.testing.assert_close(model(other, layout=layout).logits.flip(0), together.logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("backbone, method", cover(turn=2))
@torch.no_grad()
def test_forced_depths_are_executed(backbone, method):
    model = build(backbone, METHODS[method]())
    shape = model.backbone.shape
    images = images_for(model, 3)
    depths = forced_depths(3, shape, 0.6)
    packed, masked = model(images, depths=depths, layout="packed"), model(images, depths=depths, layout="masked")
    assert torch.equal(packed.trace.depth, depths) and torch.equal(masked.trace.depth, depths)
    torch.testing.assert_close(packed.logits, masked.logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("backbone, method", cover(turn=3))
@torch.no_grad()
def test_images_whose_tokens_have_all_halted(backbone, method):
    """One image is done after the first block, one after the second, one never; then a batch where all are."""
    model = build(backbone, METHODS[method]())
    images, blocks = images_for(model, 3), model.backbone.shape.blocks
    for ends in ([1, 2, blocks], [1, 2, 2], [1, 1, 1]):
        depths = torch.tensor(ends)[:, None].expand(3, model.backbone.shape.tokens())
        packed, masked = model(images, depths=depths, layout="packed"), model(images, depths=depths, layout="masked")
        assert torch.equal(packed.trace.depth, depths) and torch.equal(masked.trace.depth, depths)
        assert packed.logits.isfinite().all()
        torch.testing.assert_close(packed.logits, masked.logits, atol=1e-5, rtol=1e-4)
        assert packed.trace.live.shape == masked.trace.live.shape == (blocks, *depths.shape)


@pytest.mark.parametrize("method", METHODS)
def test_gradients_of_masked_and_packed_agree(method):
    """Packed training: the same loss and the same gradients where decisions are hard."""
    model = build("vit", METHODS[method]())
    for name, value in {"straight_through": False, "ramp": 0.0, "gumbel": False}.items():
        if hasattr(model.method, name):  # soft gradients and noise are the masked layout's
            setattr(model.method, name, value)
    model.train()
    images, labels = images_for(model), torch.arange(5)
    gradients = []
    for layout in ("masked", "packed"):
        model.zero_grad()
        twin = copy.deepcopy(model)  # running moments and the bar move in training
        twin.loss(twin(images, layout=layout), labels)["total"].backward()
        # A block that nobody reached has no gradient in a pack, and zeros under a mask.
        gradients.append({n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in twin.named_parameters()})
    for name in gradients[0]:
        torch.testing.assert_close(gradients[0][name], gradients[1][name], atol=1e-5, rtol=1e-3, msg=name)


@torch.no_grad()
def test_other_image_sizes_where_the_backbone_takes_them():
    for backbone in ("dynamic", "dinov3", "naflex", "hf_vit", "hf_dinov2"):
        model = build(backbone, METHODS["AHT"]())
        images = torch.randn(2, 3, 48, 64)
        packed, masked = model(images, layout="packed"), model(images, layout="masked")
        assert packed.trace.grid == (6, 8)
        torch.testing.assert_close(packed.logits, masked.logits, atol=1e-5, rtol=1e-4)
        off = build(backbone, OFF["AHT"]())
        options = {} if backbone != "hf_vit" else {"interpolate_pos_encoding": True}
        expected = off.vit(images, **options)
        expected = expected if isinstance(expected, torch.Tensor) else expected.logits
        torch.testing.assert_close(off(images).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision_on_a_gpu(dtype):
    """Given equal decisions, packed is at most twice as far from float32 as the plain model is in that precision."""
    model = build("vit", METHODS["AHT"]()).cuda()
    images = images_for(model).cuda()
    depths = forced_depths(5, model.backbone.shape, 0.6).cuda()
    exact = model(images, depths=depths).logits
    static_exact = model.vit(images)
    model.to(dtype)
    error = (model(images.to(dtype), depths=depths).logits - exact).abs().max()
    static_error = (model.vit(images.to(dtype)) - static_exact).abs().max()
    assert error <= 2 * static_error + 1e-3


def test_one_model_in_several_threads():
    from concurrent.futures import ThreadPoolExecutor

    model = build("vit", METHODS["AHT"]())
    images = images_for(model, 8)

    def run(i: int) -> torch.Tensor:
        with torch.no_grad():
            return model(images[i : i + 1], layout="packed" if i % 2 else "masked").logits[0]

    with torch.no_grad():
        expected = model(images).logits
    with ThreadPoolExecutor(4) as pool:
        torch.testing.assert_close(torch.stack(list(pool.map(run, range(8)))), expected, atol=1e-5, rtol=1e-4)


def test_unwrapping_leaves_nothing_behind():
    for name, make in BACKBONES.items():
        vit = make().eval()
        keys, modules = list(vit.state_dict()), {n: set(vars(m)) for n, m in vit.named_modules()}
        model = dwindle.adapt(vit, dwindle.Static())
        assert list(vit.state_dict()) == keys, name
        assert model.unwrap() is vit
        assert list(vit.state_dict()) == keys
        assert {n: set(vars(m)) for n, m in vit.named_modules()} == modules
        assert not any(m._forward_hooks for m in vit.modules())
        dwindle.adapt(vit, dwindle.AHT(stages=(1,))).unwrap()


@pytest.mark.parametrize("method", [name for name in METHODS if not name.startswith(("AViT", "ACT"))])
@torch.no_grad()
def test_forced_to_the_end_is_the_wrapped_model(method):
    """Where the last state counts. A mean over states (A-ViT, ACT) stays one."""
    model = build("vit", METHODS[method](), torch.float64)
    images, shape = images_for(model, dtype=torch.float64), model.backbone.shape
    full = torch.full((len(images), shape.tokens()), shape.blocks)
    vit = copy.deepcopy(model).unwrap()
    for layout in ("packed", "masked"):
        torch.testing.assert_close(
            model(images, layout=layout, depths=full).logits, vit(images), atol=1e-10, rtol=1e-10
        )

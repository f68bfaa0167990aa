"""The lean layout, what a prepared model runs on a CPU, against the packed path, its definition; and its ops."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import dwindle
from dwindle.core.packed import Packed
from dwindle.evaluate.bench import forced_depths
from dwindle.ops.linear import MKL, OneDNN, Packs, _works, available, library, linear_ref, maker, room
from dwindle.ops.patches import cut_by_matmul, cutting, embed_patches
from dwindle.runtime.cpu import CpuPacked
from shared.tiny import BACKBONES, METHODS, build, cover, images_for

packs = pytest.mark.skipif(not available(), reason="this torch has neither MKL nor oneDNN")


@pytest.fixture(autouse=True)
def however_small(monkeypatch):
    """Products of test models are packed too."""
    monkeypatch.setattr("dwindle.ops.linear.WORTH", 0)


@pytest.fixture
def by(monkeypatch):
    """by(library): from here on linear layers run by it."""

    def choose(wanted):
        if not wanted.here():
            pytest.skip(f"this torch has no {wanted.__name__}")
        monkeypatch.setattr("dwindle.ops.linear.library", lambda *dtype: wanted)

    return choose


def same(ours, theirs, tolerance=1e-5):
    assert torch.equal(ours.trace.depth, theirs.trace.depth)
    torch.testing.assert_close(ours.logits, theirs.logits, atol=tolerance, rtol=1e-4)
    torch.testing.assert_close(ours.features, theirs.features, atol=10 * tolerance, rtol=1e-4)
    for mine, its in zip(ours.trace.values, theirs.trace.values, strict=True):
        assert mine.keys() == its.keys()
        for name in its:
            torch.testing.assert_close(mine[name], its[name], atol=10 * tolerance, rtol=1e-4)


@pytest.mark.parametrize("backbone, method", cover())
@torch.no_grad()
def test_lean_is_packed(backbone, method):
    model = build(backbone, METHODS[method]())
    images, fast = images_for(model, 3), model.prepare()
    same(fast(images), model(images, layout="packed"))
    same(fast(images[:1]), model(images[:1], layout="packed"))
    depths = forced_depths(3, model.backbone.shape, 0.6)
    same(fast(images, depths=depths), model(images, layout="packed", depths=depths))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@torch.no_grad()
def test_other_precisions(dtype):
    model = build("layerscale", METHODS["AHT_merge"](), dtype)
    images = images_for(model, 3, dtype)
    same(model.prepare()(images), model(images, layout="packed"), 1e-12 if dtype == torch.float64 else 0.1)


@pytest.mark.usefixtures("bf16_on_cpu")
@pytest.mark.parametrize("method", ["AHT", "AHT_rest", "AViT", "DynamicViT", "TopK_fused"])
@pytest.mark.parametrize("backbone", BACKBONES)
@torch.no_grad()
def test_bf16_errs_no_more_than_twice_as_far_as_plain_torch(backbone, method, monkeypatch):
    """Given equal decisions (who inherits, or merges, is one): lean, over packed weights and by products, against the
    family's own blocks. An image alone is as in its batch, up to the rounding of the family's own read-out."""
    monkeypatch.setattr("dwindle.ops.half.FEW", 4)
    exact = build(backbone, METHODS[method]())
    images = images_for(exact, 4)
    depths = forced_depths(4, exact.backbone.shape, 0.6)
    wanted = exact(images, depths=depths).logits
    rough, images = copy.deepcopy(exact).bfloat16(), images.bfloat16()
    plain, fast = rough(images, layout="masked", depths=depths).logits.float(), rough.prepare()
    ours = fast(images, depths=depths).logits.float()
    assert (ours - wanted).abs().mean() <= 2 * (plain - wanted).abs().mean()
    alone = fast(images[:1], depths=depths[:1]).logits.float()
    tolerance = 2**-4 if backbone == "attention_pool" else 0.0
    torch.testing.assert_close(alone, ours[:1], rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("bf16_on_cpu")
@pytest.mark.parametrize("merge", ["none", "nearest"])
@torch.no_grad()
def test_in_bf16_an_image_alone_decides_as_in_its_batch(merge):
    torch.manual_seed(0)
    vit = VisionTransformer(img_size=64, patch_size=8, embed_dim=192, depth=6, num_heads=3, num_classes=10)
    model = dwindle.adapt(vit, dwindle.AHT(stages=(1, 2, 3), gamma=2.0, follow=0.7, merge=merge)).eval().bfloat16()
    images = torch.randn(12, 3, 64, 64).bfloat16()
    fast = model.prepare()
    together = fast(images)
    assert together.trace.depth.unique().numel() > 2
    for i in range(12):
        alone = fast(images[i, None])
        assert torch.equal(alone.trace.depth[0], together.trace.depth[i])
        torch.testing.assert_close(alone.logits[0], together.logits[i], rtol=2**-6, atol=2**-6)  # timm's own head


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_mean_of_an_image_is_rounded_as_if_it_were_alone(dtype):
    x = torch.randn(3, 150, 192, generator=torch.Generator().manual_seed(0)).to(dtype)
    together = Packed.start(x, 0).image_mean(x.flatten(0, 1))
    alone = [Packed.start(one[None], 0).image_mean(one) for one in x]
    assert torch.equal(together, torch.cat(alone))
    nobody = Packed.start(x[:2], 0).changed(lengths=[0, 150])
    assert torch.equal(nobody.image_mean(x[1]), torch.stack([torch.zeros(192, dtype=dtype), together[1]]))


@pytest.mark.usefixtures("bf16_on_cpu")
@torch.no_grad()
def test_layers_in_bf16_meet_few_numbers_of_rows(monkeypatch):
    """And round as plain ones do, to the bit."""
    layer, met, product, packs = nn.Linear(64, 48).bfloat16(), set(), OneDNN.product, Packs()
    lean = CpuPacked.begin(torch.zeros(1, 2, 64), 0, {}, packs)
    monkeypatch.setattr(OneDNN, "product", lambda x, *rest: met.add(len(x)) or product(x, *rest))
    for rows in (*range(1, 40), 100, 101, 333):
        x = torch.randn(rows, 64).bfloat16()
        for ask in (packs, lean.linear):
            torch.testing.assert_close(ask(layer, x), linear_ref(layer, x), rtol=2**-7, atol=2**-8)
    assert met == {8, 16, 24, 32, 40, 104, 336}


@torch.no_grad()
def test_lean_runs_where_a_model_is_prepared(monkeypatch):
    model = build("vit", METHODS["AHT"]())
    images, fast = images_for(model, 2), model.prepare()
    ran = []
    monkeypatch.setattr(
        CpuPacked, "update", lambda self, *given: ran.append(given[1]) or super(CpuPacked, self).update(*given)
    )
    fast(images)
    assert len(ran) == len(model.backbone.blocks) and fast.path(images) == "cpu"
    ran.clear()
    model(images)
    with torch.autocast("cpu", torch.bfloat16):
        fast(images)
    assert not ran


@pytest.mark.parametrize("kind", [MKL, OneDNN])
@pytest.mark.parametrize("wide,out", [(32, 96), (384, 1152), (1536, 384), (33, 7), (192, 1)])
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_packed_weights_serve_any_number_of_rows(by, kind, wide, out, bias):
    by(kind)
    layer, linear = nn.Linear(wide, out, bias=bias), Packs()
    for rows in (1, 2, 3, 7, 8, 15, 16, 17, 31, 64, 127, 128, 129, 197, 500, 1201, 2051):
        x = torch.randn(rows, wide)
        torch.testing.assert_close(linear(layer, x), linear_ref(layer, x), atol=1e-5, rtol=1e-4)
    x = torch.randn(2, 5, wide)
    torch.testing.assert_close(linear(layer, x), linear_ref(layer, x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", [MKL, OneDNN])
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_a_corner_of_a_layer_is_packed_apart(by, kind, bias):
    """The first outputs and inputs, as if there were no others."""
    by(kind)
    layer, linear = nn.Linear(64, 48, bias=bias), Packs()
    for corner in (None, (24, 64), (48, 32), (7, 33), (24, 64)):
        x = torch.randn(3, 5, corner[1] if corner else 64)
        ours, theirs = linear(layer, x, corner), linear_ref(layer, x, corner)
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
        if corner:
            small = nn.Linear(corner[1], corner[0], bias=bias)
            small.weight.copy_(layer.weight[: corner[0], : corner[1]])
            if bias:
                small.bias.copy_(layer.bias[: corner[0]])
            torch.testing.assert_close(theirs, small(x))
    assert len(linear._made) == 4
    wide = torch.randn(5, 33, dtype=torch.float64)
    torch.testing.assert_close(Packs()(layer.double(), wide, (7, 33)), linear_ref(layer, wide, (7, 33)))


@pytest.mark.parametrize("kind", [MKL, OneDNN])
@pytest.mark.parametrize("method", ["AHT", "AHT_merge", "DynamicViT", "ToMe"])
@pytest.mark.parametrize("backbone", ["vit", "qk_norm", "hf_vit"])
@torch.no_grad()
def test_lean_is_packed_by_either_library(by, kind, backbone, method):
    by(kind)
    model = build(backbone, METHODS[method]())
    images, fast = images_for(model, 5), model.prepare()
    same(fast(images), model(images, layout="packed"))
    same(fast(images[:1]), model(images[:1], layout="packed"))


@packs
def test_a_library_is_chosen_by_the_maker_of_the_cpu(monkeypatch):
    chosen = library()
    assert chosen is {"AuthenticAMD": OneDNN, "GenuineIntel": MKL}[maker()]
    layer, x = nn.Linear(24, 40), torch.randn(5, 24)
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"), torch.no_grad():
            _works.cache_clear()
            assert library() is chosen
            torch.testing.assert_close(Packs()(layer, x), linear_ref(layer, x), atol=1e-5, rtol=1e-4)
    finally:
        torch.set_default_dtype(torch.float32)
    monkeypatch.setattr("dwindle.ops.linear.maker", lambda: "ARM")
    assert library() is None and not available()


@packs
def test_a_library_that_is_not_there_is_not_taken(monkeypatch):
    def broken(*_):
        raise RuntimeError("could not create a primitive descriptor")

    chosen = library()
    monkeypatch.setattr("dwindle.ops.linear._works", _works.__wrapped__)
    layer, x = nn.Linear(24, 40), torch.randn(5, 24)
    for product in (broken, lambda x, packed, weight, bias: F.linear(x, weight) + 1):
        monkeypatch.setattr(chosen, "product", staticmethod(product))
        assert library() is None
        assert torch.equal(Packs()(layer, x), linear_ref(layer, x))


@torch.no_grad()
def test_compiled_and_traced_calls_are_plain(by):
    by(OneDNN)
    layer, x, linear = nn.Linear(64, 48).requires_grad_(False), torch.randn(9, 64), Packs()
    linear(layer, x)
    compiled, traced = torch.compile(lambda x: linear(layer, x)), torch.jit.trace(lambda x: linear(layer, x), x)
    for call in (compiled, traced):
        torch.testing.assert_close(call(x), linear_ref(layer, x), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_small_products_are_not_packed(by, monkeypatch):
    by(OneDNN)
    monkeypatch.setattr("dwindle.ops.linear.WORTH", 64 * 48 * 10)
    layer, linear = nn.Linear(64, 48), Packs()
    for rows, corner in ((9, None), (19, (24, 64)), (19, (48, 32))):
        x = torch.randn(rows, corner[1] if corner else 64)
        assert torch.equal(linear(layer, x, corner), linear_ref(layer, x, corner)) and not linear._made
    for rows, corner in ((10, None), (20, (24, 64)), (20, (48, 32))):
        linear(layer, torch.randn(2, rows // 2, corner[1] if corner else 64), corner)
        assert (layer, corner) in linear._made


@torch.no_grad()
def test_layers_of_ones_own_see_live_rows_only(by):
    by(OneDNN)
    seen = []

    class Own(nn.Linear):
        def forward(self, x):
            seen.append(x.numel() // x.shape[-1])
            return super().forward(x)

    model = build("vit", METHODS["AHT"]())
    images = images_for(model, 2)
    fc2 = model.vit.blocks[0].mlp.fc2
    model.vit.blocks[0].mlp.fc2 = Own(fc2.in_features, fc2.out_features)
    same(model.prepare()(images), model(images, layout="packed"))
    assert seen[0] == seen[1]


@packs
def test_few_numbers_of_rows_and_little_filling(by):
    assert library() in (MKL, OneDNN) and library() is library()
    by(OneDNN)
    numbers = [room(rows) for rows in range(1, 16 * 1024)]
    assert len(set(numbers)) < 256  # for four layers of different sizes, as many as oneDNN keeps
    assert all(rows <= number <= rows + max(7, rows / 32) for rows, number in enumerate(numbers, 1))
    by(MKL)
    assert room(197) == 197


@pytest.mark.parametrize("by", ["call", "module"])
@pytest.mark.parametrize("size", [(32, 32), (37, 50)])
@torch.no_grad()
def test_patches_by_a_matrix_product(size, by):
    conv, images = nn.Conv2d(3, 12, (8, 16), (8, 16)), torch.randn(2, 3, *size)
    others = nn.ModuleList([nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 8, 8, padding=1), nn.Conv2d(3, 6, 8, 8, groups=3)])
    torch.testing.assert_close(embed_patches(images, conv.weight, conv.bias), conv(images), atol=1e-5, rtol=1e-5)
    with cutting(images) if by == "call" else cut_by_matmul(nn.ModuleList([conv, others])):
        assert conv(images).stride() == embed_patches(images, conv.weight, conv.bias).stride()
        for other in others:
            inside = other(images)
            assert torch.equal(
                inside, F.conv2d(images, other.weight, other.bias, other.stride, other.padding, 1, other.groups)
            )
    assert "forward" not in conv.__dict__


@torch.no_grad()
def test_static_on_a_cpu_is_the_wrapped_model():
    model = build("vit", dwindle.Static())
    images = images_for(model, 3)
    torch.testing.assert_close(model.prepare()(images).logits, model.vit(images), atol=1e-5, rtol=1e-5)

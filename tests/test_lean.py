"""The lean layout, what a CPU runs by itself, against the eager packed path, its definition; and its ops."""

from __future__ import annotations

import copy
import pickle
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import dwindle
from conftest import BACKBONES, METHODS, build, images_for
from dwindle.bench import forced_depths
from dwindle.lean import Lean
from dwindle.ops import linear as linear_module
from dwindle.ops.heirs import hand_over, heirs, inherit
from dwindle.ops.linear import MKL, OneDNN, _fastest, available, library, linear, linear_ref, narrow, room
from dwindle.ops.patches import cut_by_matmul, cutting, embed_patches
from dwindle.tokens import Packed

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
        monkeypatch.setattr("dwindle.ops.linear._packed", WeakKeyDictionary())

    return choose


def same(ours, theirs, tolerance=1e-5):
    assert torch.equal(ours.trace.depth, theirs.trace.depth)
    torch.testing.assert_close(ours.logits, theirs.logits, atol=tolerance, rtol=1e-4)
    torch.testing.assert_close(ours.features, theirs.features, atol=10 * tolerance, rtol=1e-4)
    for mine, its in zip(ours.trace.values, theirs.trace.values, strict=True):
        assert mine.keys() == its.keys()
        for name in its:
            torch.testing.assert_close(mine[name], its[name], atol=10 * tolerance, rtol=1e-4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backbone", BACKBONES)
@torch.no_grad()
def test_lean_is_packed(backbone, method):
    model = build(backbone, METHODS[method]())
    images = images_for(model, 3)
    same(model(images), model(images, layout="packed"))
    same(model(images[:1]), model(images[:1], layout="packed"))
    depths = forced_depths(3, model.backbone.shape, 0.6)
    same(model(images, depths=depths), model(images, layout="packed", depths=depths))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@torch.no_grad()
def test_other_precisions(dtype):
    model = build("layerscale", METHODS["AHT_heirs"](), dtype)
    images = images_for(model, 3, dtype)
    same(model(images), model(images, layout="packed"), 1e-12 if dtype == torch.float64 else 0.1)


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
    plain = rough(images, layout="masked", depths=depths).logits.float()
    ours = rough(images, depths=depths).logits.float()
    assert (ours - wanted).abs().mean() <= 2 * (plain - wanted).abs().mean()
    alone = rough(images[:1], depths=depths[:1]).logits.float()
    tolerance = 2**-4 if backbone == "attention_pool" else 0.0
    torch.testing.assert_close(alone, ours[:1], rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("bf16_on_cpu")
@pytest.mark.parametrize("heirs", ["none", "nearest"])
@torch.no_grad()
def test_in_bf16_an_image_alone_decides_as_in_its_batch(heirs):
    torch.manual_seed(0)
    vit = VisionTransformer(img_size=64, patch_size=8, embed_dim=192, depth=6, num_heads=3, num_classes=10)
    model = dwindle.adapt(vit, dwindle.AHT(stages=(1, 2, 3), gamma=2.0, follow=0.7, heirs=heirs)).eval().bfloat16()
    images = torch.randn(12, 3, 64, 64).bfloat16()
    together = model(images)
    assert together.trace.depth.unique().numel() > 2
    for i in range(12):
        alone = model(images[i, None])
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
    layer, met, product = nn.Linear(64, 48).bfloat16(), set(), OneDNN.product
    monkeypatch.setattr(OneDNN, "product", lambda x, *rest: met.add(len(x)) or product(x, *rest))
    for rows in (*range(1, 40), 100, 101, 333):
        x = torch.randn(rows, 64).bfloat16()
        for ask in (linear, narrow):
            torch.testing.assert_close(ask(layer, x), linear_ref(layer, x), rtol=2**-7, atol=2**-8)
    assert met == {8, 16, 24, 32, 40, 104, 336}
    met.clear()
    with torch.enable_grad():
        narrow(layer, x)
    assert not met


@torch.no_grad()
def test_lean_runs_only_where_nobody_watches_the_block(monkeypatch):
    model = build("vit", METHODS["AHT"]())
    images = images_for(model, 2)
    ran = []
    monkeypatch.setattr(
        Lean, "update", lambda self, call, block: ran.append(block) or super(Lean, self).update(call, block)
    )
    model(images)
    assert len(ran) == len(model.backbone.blocks)
    ran.clear()
    model(images, layout="packed")
    with torch.enable_grad():
        model(images)
    with torch.autocast("cpu", torch.bfloat16):
        model(images)
    assert not ran


@torch.no_grad()
def test_it_follows_its_weights_and_modules():
    model = build("layerscale", METHODS["AHT"]())
    images = images_for(model, 3)
    block = model.vit.blocks[1]

    def exchange(owner: nn.Module, name: str, new: nn.Module | nn.Parameter) -> None:
        setattr(owner, name, new)
        model.backbone.remove()
        model.backbone.install()  # hooks and all, on whatever hangs there now

    for change in (
        lambda: block.mlp.fc1.weight.mul_(1.5),
        lambda: setattr(block.attn.proj.weight, "data", block.attn.proj.weight * 0.5),
        lambda: exchange(block.mlp, "fc1", nn.Linear(32, 128)),
        lambda: exchange(block.mlp, "act", nn.ReLU()),
        lambda: setattr(block.ls1, "gamma", nn.Parameter(torch.rand(32))),
        lambda: model.load_state_dict({k: v * 1.1 for k, v in model.state_dict().items()}),
        lambda: model.double().float(),
    ):
        model(images)
        change()
        same(model(images), model(images, layout="packed"))
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model.vit.blocks[0].mlp.fc2)))  # packed weights do not travel
    assert torch.equal(twin.weight, model.vit.blocks[0].mlp.fc2.weight)


@torch.no_grad()
def test_a_layer_derived_from_linear_runs_its_own():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = build("vit", METHODS["AHT"]())
    images = images_for(model, 2)
    plain = model.vit.blocks[0].attn.proj
    model.vit.blocks[0].attn.proj = Doubled(32, 32)
    model.vit.blocks[0].attn.proj.load_state_dict(plain.state_dict())
    same(model(images), model(images, layout="packed"))


@pytest.mark.parametrize("kind", [MKL, OneDNN])
@pytest.mark.parametrize("wide,out", [(32, 96), (384, 1152), (1536, 384), (33, 7), (192, 1)])
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_packed_weights_serve_any_number_of_rows(by, kind, wide, out, bias):
    by(kind)
    layer = nn.Linear(wide, out, bias=bias)
    for rows in (1, 2, 3, 7, 8, 15, 16, 17, 31, 64, 127, 128, 129, 197, 500, 1201, 2051):
        x = torch.randn(rows, wide)
        torch.testing.assert_close(linear(layer, x), linear_ref(layer, x), atol=1e-5, rtol=1e-4)
    x = torch.randn(2, 5, wide)
    torch.testing.assert_close(linear(layer, x), linear_ref(layer, x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", [MKL, OneDNN])
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_a_corner_of_a_layer_is_packed_apart(by, kind, bias):
    """The first outputs and inputs, as if there were no others; all forms follow the weight, and none outlives it."""
    by(kind)
    layer, corners = nn.Linear(64, 48, bias=bias), [None, (24, 64), (48, 32), (7, 33), (24, 64)]
    for _ in range(2):
        for corner in corners:
            x = torch.randn(3, 5, corner[1] if corner else 64)
            ours, theirs = linear(layer, x, corner), linear_ref(layer, x, corner)
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
            if corner:
                small = nn.Linear(corner[1], corner[0], bias=bias)
                small.weight.copy_(layer.weight[: corner[0], : corner[1]])
                if bias:
                    small.bias.copy_(layer.bias[: corner[0]])
                torch.testing.assert_close(theirs, small(x))
        assert len(linear_module._packed[layer]) == 4
        layer.weight.add_(1.0)
    linear(layer, x, (24, 64))
    assert list(linear_module._packed[layer]) == [(24, 64)]
    wide = torch.randn(5, 33, dtype=torch.float64)
    torch.testing.assert_close(linear(layer.double(), wide, (7, 33)), linear_ref(layer, wide, (7, 33)))


@pytest.mark.parametrize("kind", [MKL, OneDNN])
@pytest.mark.parametrize("method", ["AHT", "AHT_heirs", "DynamicViT", "ToMe"])
@pytest.mark.parametrize("backbone", ["vit", "qk_norm", "hf_vit"])
@torch.no_grad()
def test_lean_is_packed_by_either_library(by, kind, backbone, method):
    by(kind)
    model = build(backbone, METHODS[method]())
    images = images_for(model, 5)
    same(model(images), model(images, layout="packed"))
    same(model(images[:1]), model(images[:1], layout="packed"))


@packs
def test_a_library_is_chosen_whatever_the_defaults_are():
    chosen = library()
    assert chosen in (MKL, OneDNN)
    layer, x = nn.Linear(24, 40), torch.randn(5, 24)
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"), torch.no_grad():
            _fastest.cache_clear()
            assert library() in (MKL, OneDNN)
            torch.testing.assert_close(linear(layer, x), linear_ref(layer, x), atol=1e-5, rtol=1e-4)
    finally:
        torch.set_default_dtype(torch.float32)


@packs
def test_a_library_that_is_not_there_is_not_taken(monkeypatch):
    def broken(*_):
        raise RuntimeError("could not create a primitive descriptor")

    monkeypatch.setattr("dwindle.ops.linear._fastest", _fastest.__wrapped__)
    monkeypatch.setattr(OneDNN, "product", staticmethod(broken))
    assert library() is not OneDNN
    monkeypatch.setattr(MKL, "product", staticmethod(lambda x, packed, weight, bias: F.linear(x, weight) + 1))
    assert library() is None
    layer, x = nn.Linear(24, 40), torch.randn(5, 24)
    assert torch.equal(linear(layer, x), linear_ref(layer, x))


@packs
def test_a_layer_keeps_the_library_it_was_packed_by(by):
    layer, x = nn.Linear(24, 40), torch.randn(5, 24)
    for kind in (MKL, OneDNN):
        if not kind.here():
            pytest.skip(f"this torch has no {kind.__name__}")
    with torch.no_grad():
        by(OneDNN)
        linear(layer, x)
        packed = linear_module._packed
        by(MKL)
        linear_module._packed = packed
        torch.testing.assert_close(linear(layer, x), linear_ref(layer, x), atol=1e-5, rtol=1e-4)


@torch.inference_mode()
def test_weights_that_do_not_tell_when_they_are_written_to_are_not_packed(by):
    by(OneDNN)
    layer, x = nn.Linear(64, 48), torch.randn(9, 64)
    for _ in range(2):
        assert torch.equal(linear(layer, x), linear_ref(layer, x)) and layer not in linear_module._packed
        layer.weight.mul_(2.0)


@torch.no_grad()
def test_compiled_and_traced_calls_are_plain(by):
    by(OneDNN)
    layer, x = nn.Linear(64, 48).requires_grad_(False), torch.randn(9, 64)
    linear(layer, x)
    compiled, traced = torch.compile(lambda x: linear(layer, x)), torch.jit.trace(lambda x: linear(layer, x), x)
    for call in (compiled, traced):
        torch.testing.assert_close(call(x), linear_ref(layer, x), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_small_products_are_not_packed(by, monkeypatch):
    by(OneDNN)
    monkeypatch.setattr("dwindle.ops.linear.WORTH", 64 * 48 * 10)
    layer, packed = nn.Linear(64, 48), linear_module._packed
    for rows, corner in ((9, None), (19, (24, 64)), (19, (48, 32))):
        x = torch.randn(rows, corner[1] if corner else 64)
        assert torch.equal(linear(layer, x, corner), linear_ref(layer, x, corner)) and layer not in packed
    for rows, corner in ((10, None), (20, (24, 64)), (20, (48, 32))):
        linear(layer, torch.randn(2, rows // 2, corner[1] if corner else 64), corner)
        assert corner in packed[layer]


@packs
@torch.no_grad()
def test_a_weight_where_another_lay_is_another():
    layer, x = nn.Linear(256, 64), torch.randn(5, 256)
    for _ in range(20):
        linear(layer, x)
        for _ in range(2):  # the second may come to lie where the one before the first was
            layer.weight = nn.Parameter(torch.randn(64, 256))
        torch.testing.assert_close(linear(layer, x), linear_ref(layer, x), atol=1e-4, rtol=1e-4)


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
    fall = model.vit.blocks[0].mlp.fc2
    model.vit.blocks[0].mlp.fc2 = Own(fall.in_features, fall.out_features)
    same(model(images), model(images, layout="packed"))
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


@pytest.mark.parametrize("stay", [[5], [1], [5, 1, 9, 4, 3], [0, 6]])
def test_heirs_of_parted_rows(stay):
    """Against the definition on padded images: some without a patch that stays, or with nobody at all."""
    torch.manual_seed(0)
    total, prefix = 9, 1
    x, keys = torch.randn(len(stay), total, 16), torch.randn(len(stay), total, 4)
    size = torch.randint(1, 4, (len(stay), total)).float()
    keep = torch.arange(total) < torch.tensor(stay)[:, None]
    patch = torch.arange(total) >= prefix
    wanted, sizes = inherit(x, size, keys, keep & patch, ~keep & patch)
    given = size.masked_fill(~patch, 0)  # no prefix token leaves here but where an image is gone
    heir = heirs(keys[~keep], keys[keep], [total - n for n in stay], stay, prefix)
    ours, its = hand_over(x[~keep], given[~keep], heir, x[keep], size[keep])
    torch.testing.assert_close(ours, torch.where((keep & patch)[..., None], wanted, x)[keep])
    assert torch.equal(its, torch.where(keep & patch, sizes, size)[keep])


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
    torch.testing.assert_close(model(images).logits, model.vit(images), atol=1e-5, rtol=1e-5)

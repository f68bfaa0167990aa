"""What a prepared model runs on a CPU, a graph in onnxruntime, against the packed layout, its definition."""

from __future__ import annotations

import logging

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

import dwindle
from dwindle.core.packed import Packed
from dwindle.evaluate.bench import forced_depths
from dwindle.methods.topk import TopK
from dwindle.ops.patches import cut_by_matmul, cutting, embed_patches
from dwindle.runtime import cpu, graph_cache, onnx_graph
from shared.tally import SLOW
from shared.tiny import METHODS, build, cover, images_for

graphs = pytest.mark.graphs
# Each pair records two graphs, which takes seconds: the others with DWINDLE_SLOW=1.
PAIRS = [("hf_dinov2", "AHT_merge"), ("average", "ToMe")]


def same(ours, theirs, tolerance=1e-5):
    assert torch.equal(ours.trace.depth, theirs.trace.depth)
    torch.testing.assert_close(ours.logits, theirs.logits, atol=tolerance, rtol=1e-4)


def same_details(ours, theirs):
    same(ours, theirs)
    torch.testing.assert_close(ours.features, theirs.features, atol=1e-4, rtol=1e-4)
    for name in {name for values in theirs.trace.values for name in values}:
        mine, its = ours.trace.stack(name, torch.nan), theirs.trace.stack(name, torch.nan)
        torch.testing.assert_close(mine, its.float(), atol=1e-4, rtol=1e-4, equal_nan=True)
    for mine, its in zip(ours.trace.exits, theirs.trace.exits, strict=True):
        torch.testing.assert_close(mine, its, atol=1e-4, rtol=1e-4)


@graphs
@pytest.mark.parametrize("backbone, method", cover() if SLOW else PAIRS)
@torch.no_grad()
def test_the_graph_is_packed(backbone, method):
    """Of batches of any size, with the depths forced, and for each image its own operating point."""
    model = build(backbone, METHODS[method]())
    images, fast = images_for(model, 5), model.prepare(details=True)
    assert fast.path(images) == "graph"
    for batch in (images, images[:1], images[:2]):
        same_details(fast(batch), model(batch, layout="packed"))
    depths = forced_depths(5, model.backbone.shape, 0.6)
    same(fast(images, depths=depths), model(images, layout="packed", depths=depths))
    if model.method.per_image_point:
        _, cheap, dear = model.method.operating_point
        points = torch.linspace(cheap, dear, 5)
        same(fast(images, operating_point=points), model(images, layout="packed", operating_point=points))


@graphs
@pytest.mark.parametrize("side", [160, 192])
@torch.no_grad()
def test_position_embeddings_resampled(side):
    """timm's models of any image size resample theirs at every call, also to the size they have."""
    model = dwindle.adapt(timm.create_model("test_vit", num_classes=2, dynamic_img_size=True), TopK(stages=(2,)))
    images, fast = torch.randn(2, 3, side, side), model.eval().prepare()
    assert fast.path(images) == "graph"
    same(fast(images), model(images), 1e-4)


@graphs
@torch.no_grad()
def test_resampling_is_left_to_the_runtime(monkeypatch):
    """onnx's reference in Python, by which constants are folded, takes minutes for position embeddings."""
    called = []
    monkeypatch.setattr("onnx.reference.ops.op_resize.Resize._run", lambda *given, **how: called.append(how))
    vit = timm.create_model("test_vit", num_classes=2, dynamic_img_size=True).eval()
    images = torch.randn(2, 3, 192, 192)
    torch.testing.assert_close(onnx_graph.static(vit, images)(images), vit(images), atol=1e-4, rtol=1e-4)
    assert not called


@graphs
def test_no_session_spins():
    """Threads that spin after a call take a core from all others: on two cores torch took 1.6 times as long."""
    options = onnx_graph.opened(onnx_graph._static_graph(nn.Flatten(), torch.zeros(1, 4, 4))).get_session_options()
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"


@graphs
@torch.no_grad()
def test_openvino_answers_as_the_model():
    pytest.importorskip("openvino", reason="extra `openvino` is not installed")
    vit, images = build("vit", METHODS["ToMe"]()).unwrap(), torch.randn(2, 3, 32, 32)
    found = onnx_graph.static_in_openvino(vit, images)(images)
    torch.testing.assert_close(found, vit(images), atol=1e-4, rtol=1e-4)


@graphs
@torch.no_grad()
def test_an_answer_says_what_it_leaves_out():
    model = build("vit", METHODS["AHT"]())
    images, fast = images_for(model), model.prepare()
    out, wanted = fast(images), model(images)
    same(out, wanted)
    assert torch.equal(model.macs(out.trace), model.macs(wanted.trace))
    assert torch.equal(out.trace.counts, wanted.trace.counts) and torch.equal(out.trace.patches, wanted.trace.patches)
    assert out["logits"] is out.logits and out[0] is out.logits and "logits=(5, 5)" in repr(out)
    for read in (lambda: out.features, lambda: out.trace.scores, lambda: out.trace.plans, lambda: out.trace.exits):
        with pytest.raises(dwindle.DwindleError, match="details=True"):
            read()


@graphs
@pytest.mark.parametrize("method", ["TopK", "ToMe"] if SLOW else ["TopK"])
@torch.no_grad()
def test_a_setting_that_is_turned_is_not_stale(method):
    """A tensor is an input of the graph; at another plain number the packed layout answers."""
    model = build("vit", METHODS[method]())
    images, fast = images_for(model), model.prepare()
    before = fast(images)
    name = model.method.operating_point[0]
    for owner in (model, fast):
        dwindle.evaluate.evaluate.set_operating_point(owner, 0.4 if method == "TopK" else 1.5, name)
    same(fast(images), model(images), 1e-4)
    assert not torch.equal(fast(images).trace.depth, before.trace.depth)
    assert fast.path(images) == ("graph" if method == "TopK" else "packed")


@graphs
@torch.no_grad()
def test_other_numbers_of_a_method_are_not_stale():
    model = build("vit", METHODS["AHT"]())
    images, fast = images_for(model), model.prepare()
    fast(images)
    model.method.threshold = fast.method.threshold = 0.9
    same(fast(images), model(images), 1e-4)
    assert fast.path(images) == "packed"
    fast.method.threshold = 0.5
    assert fast.path(images) == "graph"


@graphs
@torch.no_grad()
def test_what_is_not_float32_or_is_watched_runs_packed():
    images = images_for(build("vit", METHODS["AHT"]()), 2)
    for dtype in (torch.float64, torch.bfloat16):
        rough = build("layerscale", METHODS["AHT_merge"](), dtype)
        fast = rough.prepare()
        assert fast.path(images.to(dtype)) == "packed"
        same(fast(images.to(dtype)), rough(images.to(dtype)), 1e-12)
    model = build("vit", METHODS["AHT"]())
    fast = model.prepare()
    assert fast.path(images) == "graph"
    with torch.autocast("cpu", torch.bfloat16):
        assert fast.path(images) == "packed"
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert fast.path(images) == "packed"
    handle.remove()
    assert fast.path(images) == "graph"


@graphs
@torch.no_grad()
def test_layers_of_ones_own_see_live_rows_only():
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
    assert len(seen) == 2 and seen[0] == seen[1]


@graphs
@torch.no_grad()
def test_few_images_are_not_worth_a_recording(monkeypatch, tmp_path):
    """Unless the graph is there: then they are answered by it."""
    monkeypatch.setenv("DWINDLE_CACHE", str(tmp_path))
    model = build("vit", TopK(stages=(1,)))
    images = images_for(model)
    assert model.prepare(images=10).path(images) == "packed" and not list(tmp_path.iterdir())
    assert model.prepare().path(images) == "graph" and len(list(tmp_path.iterdir())) == 1
    assert model.prepare(images=10).path(images) == "graph"


@graphs
@torch.no_grad()
def test_a_kept_graph_holds_no_weights_and_is_verified(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("DWINDLE_CACHE", str(tmp_path))
    recorded, record = [], cpu.recording
    monkeypatch.setattr(cpu, "recording", lambda *given: recorded.append(1) or record(*given))
    model = build("vit", TopK(stages=(2,)))
    images = images_for(model)
    model.prepare()(images)
    (kept,) = tmp_path.iterdir()
    assert kept.read_bytes().count(model.vit.blocks[0].mlp.fc1.weight.detach().numpy().tobytes()) == 0
    for parameter in model.parameters():
        parameter.mul_(0.9)
    same(model.prepare()(images), model(images))  # other weights, the same graph
    assert len(recorded) == 1
    damaged = bytearray(kept.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    kept.write_bytes(damaged)
    with caplog.at_level(logging.WARNING, "dwindle"):
        same(model.prepare()(images), model(images))
    assert len(recorded) == 2 and "damaged" in caplog.text
    monkeypatch.setenv("DWINDLE_CACHE", "off")
    assert graph_cache.folder() is None
    assert model.prepare().path(images) == "graph" and len(recorded) == 3


def test_the_key_knows_what_a_forward_reads():
    """Another structure, another setting or another constant of a module is another graph; other weights are not."""
    model = build("layerscale", METHODS["AHT"]())
    key = graph_cache.key_of(model)
    assert key == graph_cache.key_of(build("layerscale", METHODS["AHT"](), seed=1)) and key is not None
    model.method.trained = True
    assert graph_cache.key_of(model) == key != graph_cache.key_of(model, size=(3, 64, 64))
    model.vit.blocks[1].attn.scale = 0.7
    scaled = graph_cache.key_of(model)
    model.method.threshold = 0.7
    assert len({key, scaled, graph_cache.key_of(model), graph_cache.key_of(build("vit", METHODS["AHT"]()))}) == 4
    model.vit.norm.own = object()  # nobody can tell what that is
    assert graph_cache.key_of(model) is None


@graphs
@torch.no_grad()
def test_a_graph_that_differs_is_not_used(monkeypatch, caplog):
    model = build("vit", METHODS["AHT"]())
    images = images_for(model)
    run = onnx_graph.run
    monkeypatch.setattr(onnx_graph, "run", lambda *given: (run(*given)[0] + 1, *run(*given)[1:]))
    with caplog.at_level(logging.WARNING, "dwindle"):
        same(model.prepare()(images), model(images))
    assert "runs packed" in caplog.text


@graphs
@torch.no_grad()
def test_without_the_packages_it_runs_packed(monkeypatch, caplog):
    """And says so once."""
    cpu._warn_missing.cache_clear()
    monkeypatch.setattr(onnx_graph, "missing", lambda: ["onnxruntime"])
    model = build("vit", METHODS["AHT"]())
    images = images_for(model)
    with caplog.at_level(logging.WARNING, "dwindle"):
        for _ in range(2):
            fast = model.prepare()
            same(fast(images), model(images), 1e-4)
            assert fast.path(images) == "packed"
    assert caplog.text.count("pip install") == 1


@graphs
@torch.no_grad()
def test_large_batches_run_in_parts(monkeypatch):
    monkeypatch.setattr(cpu, "SCORES", 4 * 2 * 17**2 * 2)  # two images of a tiny model
    model = build("vit", METHODS["AHT"]())
    images = images_for(model, 5)
    same(model.prepare()(images), model(images))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_mean_of_an_image_is_rounded_as_if_it_were_alone(dtype):
    x = torch.randn(3, 150, 192, generator=torch.Generator().manual_seed(0)).to(dtype)
    together = Packed.start(x, 0).image_mean(x.flatten(0, 1))
    alone = [Packed.start(one[None], 0).image_mean(one) for one in x]
    assert torch.equal(together, torch.cat(alone))
    nobody = Packed.start(x[:2], 0).changed(lengths=[0, 150])
    assert torch.equal(nobody.image_mean(x[1]), torch.stack([torch.zeros(192, dtype=dtype), together[1]]))


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


@graphs
@torch.no_grad()
def test_static_on_a_cpu_is_the_wrapped_model():
    model = build("vit", dwindle.Static())
    images = images_for(model, 3)
    torch.testing.assert_close(model.prepare()(images).logits, model.vit(images), atol=1e-5, rtol=1e-5)

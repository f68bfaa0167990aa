"""Exported graphs: the layout they record, torch.export programs and ONNX files, each against the model itself."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

import dwindle
from dwindle.runtime.export import Graph, export, open_compiled, open_program, worthwhile_moves
from dwindle.runtime.export import _write_onnx as write_onnx
from dwindle.runtime.onnx_graph import check, onnx_model, open_onnx, opened, program, run, serialized
from dwindle.runtime.padded import Padded
from shared.tally import SLOW
from shared.tiny import BACKBONES, METHODS, build, images_for


def needs_onnx():
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason="extra `onnx` is not installed")


@pytest.mark.parametrize("method", METHODS)
def test_the_recorded_layout_decides_as_the_packed_one(method):
    model = build("vit", METHODS[method]())
    images = images_for(model)
    with torch.no_grad():
        wanted, padded = model(images, layout="packed"), model.run(images, Padded.start)
    assert torch.equal(wanted.trace.depth, padded.trace.depth)
    torch.testing.assert_close(padded.logits, wanted.logits, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(padded.features, wanted.features, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(model.macs(padded.trace), model.macs(wanted.trace))


OF_EACH_KIND = ("distilled", "average", "registers", "parallel", "stem", "rope_mixed", "dinov3", "beit", "relative")


@pytest.mark.parametrize("backbone", [*OF_EACH_KIND, "naflex", "hf_vit"])
def test_every_kind_of_backbone(backbone):
    assert backbone in BACKBONES
    model = build(backbone, METHODS["AHT_merge"]())
    images = images_for(model)
    with torch.no_grad():
        wanted, padded = model(images, layout="packed"), model.run(images, Padded.start)
    assert torch.equal(wanted.trace.depth, padded.trace.depth)
    torch.testing.assert_close(padded.logits, wanted.logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("moves", [(), (2,), (1, 3)])
@pytest.mark.parametrize("method", ["AHT_merge", "AHT_rest", "AHT_class", "AViT", "TopK_fused", "ToMe"])
@pytest.mark.parametrize("backbone", ["distilled", "average", "dinov3", "beit"])
def test_when_rows_are_moved_changes_nothing(backbone, method, moves):
    model = build(backbone, METHODS[method]())
    images = images_for(model)
    with torch.no_grad():
        logits, depth = Graph(model, moves)(images)
        wanted = model(images, layout="packed")
    assert torch.equal(wanted.trace.depth, depth)
    torch.testing.assert_close(logits, wanted.logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("backbone", ["average_with_class", "dinov3"])
@torch.no_grad()
def test_patches_that_all_leave_at_once_keep_their_states(backbone):
    """There is none to join, and the average reads them all."""
    model = build(backbone, METHODS["AHT_merge"]())
    images, shape = images_for(model, 2), model.backbone.shape
    depths = torch.full((2, shape.tokens()), shape.blocks)
    depths[0, shape.prefix :] = 2
    depths[1, -3:] = 2
    start = partial(Padded.start, prefix_stays=model.method.keeps_prefix)
    ours, wanted = model.run(images, start, depths), model(images, layout="packed", depths=depths)
    torch.testing.assert_close(ours.logits, wanted.logits, atol=1e-5, rtol=1e-4)


def test_rows_are_moved_where_it_pays(monkeypatch):
    model = build("vit", METHODS["AHT_merge"]())
    assert worthwhile_moves(model, images_for(model)) == ()
    monkeypatch.setattr("dwindle.runtime.export.MOVE", 0)
    counts = model(images_for(model)).trace.counts.float().mean(1)
    falls = [block for block in (1, 2, 3) if counts[block] < counts[block - 1]]
    assert falls and worthwhile_moves(model, images_for(model)) == tuple(falls)


# A graph takes some seconds to trace and to write: those of the others, which decide in like ways, with DWINDLE_SLOW=1.
WRITTEN = [*METHODS] if SLOW else ["AHT_rest", "ToMe"]


@pytest.mark.parametrize("method", WRITTEN)
def test_one_graph_for_any_number_of_images(method, tmp_path):
    model = build("vit", METHODS[method]())
    # ToMe pairs rows by their place among the live ones: here those who left stand between them for a while.
    moves = (2,) if method == "ToMe" else None
    recorded = program(Graph(model, moves), images_for(model, 3))
    calls = [recorded.module()]
    assert len(sizes_recorded(recorded)) >= len(set(rows_expected(model, moves)))
    needs_onnx()
    write_onnx(recorded, tmp_path / "model.onnx", {})
    calls.append(open_onnx(tmp_path / "model.onnx", threads=1))
    assert rows_computed(tmp_path / "model.onnx", images_for(model)) == rows_expected(model, moves)
    for call in calls:
        for count in (1, 2, 5):
            told = check(model, call, images_for(model, count))
            assert told["decisions"] == 1.0 and told["difference"] < 1e-4


def sizes_recorded(made):
    """By a program's products: a number, or a symbol for each time rows are moved."""
    return {str(n.meta["val"].shape[1]) for n in made.graph.nodes if "linear" in n.name and n.meta["val"].dim() == 3}


def rows_computed(path, images):
    """By each block of a file, as its attention is shaped."""
    import onnx
    from onnxruntime import InferenceSession

    held = onnx.load(path)
    names = [node.output[0] for node in held.graph.node if node.op_type == "Softmax"]
    held.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in names)
    session = InferenceSession(held.SerializeToString(), providers=["CPUExecutionProvider"])
    shapes = [value.shape for value in session.run(names, {"images": images.numpy()})]
    return [shape[-1] for shape in shapes if len(shape) == 4 and shape[-1] == shape[-2]]


def rows_expected(model, moves):
    """As many as the image with the most live tokens has, since they were last moved; never fewer than two."""
    with torch.no_grad():
        longest = model(images_for(model), layout="packed").trace.counts.amax(1).tolist()
    rows = longest[:1]
    for block, count in enumerate(longest[1:], 1):
        rows.append(max(count, 2) if moves is None or block in moves else rows[-1])
    return rows


def test_equals_keep_their_order_in_onnx(tmp_path):
    """What is ranked by score has ties: of equals the first is first, in the packed layout and in the file."""
    needs_onnx()

    class Ranked(torch.nn.Module):
        def forward(self, scores):
            down = scores.argsort(dim=-1, descending=True, stable=True)
            return torch.cat([down, down.argsort(-1), scores.argsort(dim=-1, stable=True)], -1)

    def scores(count):
        drawn = torch.randint(0, 4, (count, 197), generator=torch.Generator().manual_seed(count)).float()
        return torch.where(drawn == 3, -torch.inf, drawn)

    write_onnx(program(Ranked(), scores(3)), tmp_path / "ranked.onnx", {})
    call = open_onnx(tmp_path / "ranked.onnx", threads=1)
    for count in (1, 2, 9):
        assert torch.equal(call(scores(count))[0], Ranked()(scores(count)))


def test_norms_and_cosines_in_onnx(tmp_path):
    """ONNX's exporter knows neither; both have lengths of 0 to divide by."""
    needs_onnx()

    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.plain = torch.nn.RMSNorm(8), torch.nn.RMSNorm(8, eps=1e-3, elementwise_affine=False)

        def forward(self, x):
            y = self.norm(x)
            return torch.nn.functional.cosine_similarity(x, y + 1, dim=-1), y, self.plain(x)

    module, x = Both(), torch.randn(3, 5, 8)
    torch.nn.init.normal_(module.norm.weight)
    x[0, 0] = 0
    graph = onnx_model(program(module.eval(), x), ["x"], ["cosine", "norm", "plain"])
    session = opened(serialized(graph))
    for found, wanted in zip(run(session, {"x": x}), module(x), strict=True):
        torch.testing.assert_close(found, wanted.detach())


def test_what_onnx_has_no_form_of_is_named(tmp_path):
    needs_onnx()

    class Odd(torch.nn.Module):
        def forward(self, images):
            return torch.linalg.eigvalsh(images[:, 0])

    with pytest.raises(dwindle.DwindleError, match=r"ONNX has no aten.*eigh.*export to torch-export"):
        write_onnx(program(Odd(), torch.rand(3, 3, 8, 8)), tmp_path / "odd.onnx", {})


@torch.no_grad()
@pytest.mark.parametrize("moves", [(), None])
def test_who_halts_before_the_first_merge_is_gone(moves):
    """Free plans may stop a token before the first stage: nobody inherits from it, then or later."""
    for threshold in (0.55, 0.9):
        free = dwindle.AHT(
            stages=(2, 3), budget=None, merge="nearest", follow=0.0, gamma=1.0, beta=0.0, threshold=threshold
        )
        model = build("vit", free)
        images = images_for(model, 6)
        wanted, (logits, depth) = model(images, layout="packed"), Graph(model, moves)(images)
        assert (wanted.trace.depth == 1).any() and torch.equal(depth, wanted.trace.depth)
        torch.testing.assert_close(logits, wanted.logits, atol=1e-4, rtol=1e-4)


def test_a_program_on_disk(tmp_path):
    model = build("vit", METHODS["AHT_merge"]())
    told = export(model, "torch-export", tmp_path / "deep" / "model.pt2", seconds=0.01)
    threads = sorted({1, torch.get_num_threads()})
    assert told["decisions"] == 1.0
    assert [(row["threads"], row["batch"]) for row in told["speed"]] == [(t, b) for t in threads for b in (1, 8)]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["model.pt2"]
    check(model, open_program(tmp_path / "deep" / "model.pt2"), images_for(model))


@pytest.mark.skipif(not SLOW, reason="compiling takes minutes; set DWINDLE_SLOW=1")
@pytest.mark.parametrize("method", ["AHT_merge", "TopK_fused", "ToMe", "DynamicViT"])
def test_compiled(method, tmp_path, monkeypatch):
    monkeypatch.setattr("dwindle.runtime.export.MOVE", 0)
    model = build("vit", METHODS[method]())
    told = export(model, "aoti", tmp_path / "model.pt2")
    assert told["decisions"] == 1.0 and [path.name for path in tmp_path.iterdir()] == ["model.pt2"]
    for count in (1, 2, 5):
        check(model, open_compiled(tmp_path / "model.pt2"), images_for(model, count))


def test_onnx(tmp_path, monkeypatch):
    needs_onnx()
    import onnx

    monkeypatch.setattr("dwindle.runtime.export.MOVE", 0)  # a tiny model's rows are not worth moving
    model = build("vit", METHODS["AHT_merge"]())
    told = export(model, "onnx", tmp_path / "model.onnx")
    assert told["decisions"] == 1.0 and told["difference"] < 1e-4
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    call = open_onnx(tmp_path / "model.onnx", threads=1)
    assert torch.full((), 1e-39) * 0.5 != 0  # only the file's own numbers are flushed to 0
    for count in (1, 4):
        check(model, call, images_for(model, count))
    held = onnx.load(tmp_path / "model.onnx")
    onnx.checker.check_model(held)
    assert "TopK" in {node.op_type for node in held.graph.node}
    about = {entry.key: json.loads(entry.value) for entry in held.metadata_props if entry.key.startswith("dwindle.")}
    assert about.keys() == {"dwindle.preprocess", "dwindle.method", "dwindle.classes"}
    assert about["dwindle.method"]["name"] == "AHT" and about["dwindle.preprocess"]["size"] == 32


def test_onnx_quantises_to_int8(tmp_path):
    needs_onnx()
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = build("vit", METHODS["AHT"]())
    export(model, "onnx", tmp_path / "model.onnx")
    quantize_dynamic(tmp_path / "model.onnx", tmp_path / "int8.onnx", weight_type=QuantType.QInt8)
    assert (tmp_path / "int8.onnx").stat().st_size < (tmp_path / "model.onnx").stat().st_size
    logits, depth = open_onnx(tmp_path / "int8.onnx", threads=1)(images_for(model))
    assert logits.isfinite().all() and depth.min() >= 1 and depth.float().std() > 0


def test_a_graph_that_differs_gets_no_name(tmp_path, monkeypatch):
    model = build("vit", METHODS["AHT"]())
    monkeypatch.setattr(
        "dwindle.runtime.export.open_program", lambda path: lambda x: (torch.zeros(len(x), 5), model(x).trace.depth)
    )
    with pytest.raises(dwindle.DwindleError, match="differs from the model"):
        export(model, "torch-export", tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


def test_bad_requests(tmp_path):
    model = build("vit", METHODS["AHT"]())
    with pytest.raises(dwindle.DwindleError, match="Unknown form"):
        export(model, "onx", tmp_path / "model.onnx")
    with pytest.raises(dwindle.DwindleError, match=r"ends in \.onnx"):
        export(model, "onnx", tmp_path / "model.pt2")


def test_each_image_its_own_operating_point():
    """A batch of images with different settings: each is treated as if alone."""
    for name in ("AHT", "AHT_printed", "AViT", "ACT", "PonderNet", "Confidence", "Similarity"):
        model = build("vit", METHODS[name]())
        images, (operating_point, cheap, dear) = images_for(model, 4), model.method.operating_point
        own, images[2] = float(getattr(model.method, operating_point)), images[1]
        given = torch.tensor([own, cheap, dear, own * 0.9])
        with torch.no_grad():
            together = [model(images, layout=layout, operating_point=given) for layout in ("packed", "masked")]
            alone = [model(image[None], operating_point=value[None]) for image, value in zip(images, given)]
            plain = model(images)
        depth = torch.cat([one.trace.depth for one in alone])
        assert all(torch.equal(depth, out.trace.depth) for out in together)
        assert torch.equal(depth[0], plain.trace.depth[0]) and depth[1].sum() < depth[2].sum()
        logits = torch.cat([one.logits for one in alone])
        torch.testing.assert_close(together[0].logits, logits, atol=1e-5, rtol=1e-4)
    with pytest.raises(dwindle.DwindleError, match="whole batch"):
        build("vit", METHODS["ToMe"]())(images, operating_point=given)


@pytest.mark.parametrize("method", ["AHT_merge", "AViT"])
def test_masked_compiles_without_graph_breaks(method):
    model = build("vit", METHODS[method]())
    model.checks = False
    images = images_for(model)
    made = torch.compile(lambda x: model(x, layout="masked").logits, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(made(images), model(images, layout="masked").logits, atol=1e-5, rtol=1e-4)

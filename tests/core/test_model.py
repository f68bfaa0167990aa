"""adapt() and the loop: what is refused, and what the user hears."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import dwindle
from dwindle.errors import DwindleError
from dwindle.evaluate.evaluate import set_operating_point
from shared.tally import SLOW
from shared.tiny import BACKBONES, METHODS, build, images_for


def test_readme_example():
    vit = timm.create_model("deit_tiny_patch16_224", img_size=32, num_classes=7)
    model = dwindle.adapt(vit, dwindle.AHT(stages=(3, 6, 9)))
    out = model(torch.randn(2, 3, 32, 32))
    terms = model.loss(out, torch.tensor([0, 6]))
    assert set(terms) == {"task", "ponder", "target_depth", "total"}
    model.hold_budget(out)
    terms["total"].backward()
    model.eval()
    out = model(torch.randn(2, 3, 32, 32))
    assert out.logits.shape == (2, 7) and out.trace.depth.shape == (2, 5)


@pytest.mark.parametrize(
    "name",
    ["swin_tiny_patch4_window7_224", "resnet18", "mobilevitv2_050", "levit_128s"],
)
def test_models_that_cannot_be_wrapped(name):
    with pytest.raises(dwindle.DwindleError, match="cannot be adapted"), torch.device("meta"):
        dwindle.adapt(timm.create_model(name), dwindle.AHT())


def test_blocks_of_ones_own_are_refused():
    class Bare(torch.nn.Module):
        def __init__(self, dim, **options):
            super().__init__()
            self.token_mixer = torch.nn.Linear(dim, dim)

    vit = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, block_fn=Bare)
    with pytest.raises(dwindle.DwindleError, match="its Bare has no separate attention"):
        dwindle.adapt(vit, dwindle.Static())


def test_what_is_not_a_method_or_adapted_twice():
    model = build("vit", dwindle.Static())
    with pytest.raises(dwindle.DwindleError, match="adaptive already"):
        dwindle.adapt(model, dwindle.Static())
    with pytest.raises(dwindle.DwindleError, match="is no method"):
        dwindle.adapt(model.unwrap(), dwindle.AHT)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.randn(2, 3, 48, 48), r"\(2, 3, 48, 48\).*32 x 32"),
        (torch.randn(2, 1, 32, 32), "batch, 3"),
        (torch.randn(3, 32, 32), "do not fit"),
        (torch.zeros(2, 3, 32, 32, dtype=torch.uint8), "uint8"),
        (torch.full((2, 3, 32, 32), torch.nan), "NaN"),
        (torch.randn(0, 3, 32, 32), r"\(0, 3, 32, 32\)"),
        (torch.randn(2, 3, 32, 32).half(), r"float16.*images\.to"),
    ],
)
def test_bad_images(images, message):
    for method in METHODS.values():
        model = build("vit", method())
        for layout in ("packed", "masked"):
            with pytest.raises(dwindle.DwindleError, match=message):
                model(images, layout=layout)


def test_bad_labels_and_layout():
    model = build("vit", METHODS["AHT"]()).train()
    out = model(images_for(model, 2))
    for labels in ([0, 5], [-1, 0]):
        with pytest.raises(dwindle.DwindleError, match="5 classes"):
            model.loss(out, torch.tensor(labels))
    for labels in (torch.tensor([0]), torch.tensor([0.0, 1.0]), torch.rand(2, 6)):
        with pytest.raises(dwindle.DwindleError, match="do not fit 2 images"):
            model.loss(out, labels)
    for labels in ([0, 1], torch.tensor([True, False]), torch.ones(2, dtype=torch.complex64)):
        with pytest.raises(dwindle.DwindleError, match="whole numbers"):
            model.loss(out, labels)
    whole = model.loss(out, torch.tensor([0, 1]))["total"]
    assert torch.equal(model.loss(out, torch.tensor([0, 1], dtype=torch.int32))["total"], whole)
    with pytest.raises(dwindle.DwindleError, match="did you mean 'packed'"):
        model(images_for(model), layout="paked")
    for layout in ("packed", "masked"):
        with pytest.raises(dwindle.DwindleError, match="one per image and token"):
            model(images_for(model, 2), layout=layout, depths=torch.ones(2, 3))


def test_unfused_attention_is_switched_and_restored():
    model = build("vit", METHODS["AHT"]())
    vit = model.unwrap()
    for block in vit.blocks:
        block.attn.fused_attn = False
    expected = vit(images_for(model, 2))
    wrapped = dwindle.adapt(vit, dwindle.Static()).eval()
    torch.testing.assert_close(wrapped(images_for(model, 2)).logits, expected, atol=1e-5, rtol=1e-5)
    wrapped.unwrap()
    assert not vit.blocks[0].attn.fused_attn


def test_what_fused_attention_would_not_compute_is_refused():
    vit = BACKBONES["vit"]()
    vit.blocks[1].attn.fused_attn, vit.blocks[1].attn.scale = False, 2.0
    with pytest.raises(DwindleError, match="scale is 2"):
        dwindle.adapt(vit, dwindle.Static())
    vit = BACKBONES["vit"]()
    vit.blocks[1].attn.fused_attn, vit.blocks[1].attn.attn_drop = False, nn.Tanh()
    with pytest.raises(DwindleError, match="attn_drop"):
        dwindle.adapt(vit, dwindle.Static())


def test_a_forward_that_would_not_run_is_refused_and_a_later_one_stays():
    for name in ("", "blocks.1.attn"):
        vit = BACKBONES["vit"]()
        module = vit.get_submodule(name)
        module.forward = lambda x, *rest, forward=module.forward, **options: 2 * forward(x, *rest, **options)
        with pytest.raises(DwindleError, match="has a forward of its own"):
            dwindle.adapt(vit, dwindle.Static())
    model = dwindle.adapt(BACKBONES["vit"](), dwindle.Static()).eval()
    attention = model.vit.blocks[1].attn
    attention.forward = lambda x, *rest, forward=attention.forward, **options: 2 * forward(x, *rest, **options)
    images = images_for(model, 2)
    with torch.no_grad():
        expected = model(images).logits
        assert torch.allclose(model.unwrap()(images), expected, atol=1e-5)


@pytest.mark.parametrize("backbone", ["vit", "hf_vit"])
def test_what_would_not_be_called_is_refused(backbone):
    """The wrapped model is run block by block: hooks around the blocks would never hear of it."""
    model = build(backbone, dwindle.Static()).eval()
    images, heard = images_for(model, 2), []
    for _, module in model.backbone.around:
        hook = module.register_forward_hook(lambda *given: heard.append(given))
        for call in (model, model.prepare()):
            with torch.no_grad(), pytest.raises(DwindleError, match=f"{type(module).__name__}.*hook"):
                call(images)
        hook.remove()
        module.forward_features = print
        with torch.no_grad(), pytest.raises(DwindleError, match="forward_features"):
            model(images)
        del module.forward_features
    model.register_forward_hook(lambda *given: heard.append(given))
    with torch.no_grad():
        model(images)
    assert len(heard) == 1


def test_a_copy_is_independent():
    """EMA and teachers deep-copy a wrapped model: the copy must run its own weights."""
    model = build("vit", METHODS["AHT"]())
    images = images_for(model)
    with torch.no_grad():
        before = model(images).logits
        twin = copy.deepcopy(model)
        for parameter in model.parameters():
            parameter.mul_(1.5)
        torch.testing.assert_close(twin(images).logits, before)
        assert not torch.allclose(model(images).logits, before)


def test_stochastic_depth_drops_whole_images_in_a_pack():
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    vit = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, drop_path_rate=0.9)
    model = dwindle.adapt(vit, dwindle.Static()).train()
    images = torch.randn(64, 3, 32, 32)
    with torch.no_grad():
        start, block = model.backbone.embed(images), vit.blocks[1]
        from dwindle.core.packed import Packed

        after = model.backbone.run(block, Packed.start(start, 1)).x.unflatten(0, (64, -1))
    changed = (after - start).abs().amax(-1) > 0  # (B, N)
    whole = changed.all(-1) | ~changed.any(-1)
    assert whole.all() and 0 < changed.any(-1).sum() < 64


def test_masked_compiles_without_graph_breaks():
    model = build("vit", METHODS["AHT"]())
    images = images_for(model, 2)
    compiled = torch.compile(lambda x: model(x, layout="masked").logits, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(images), model(images, layout="masked").logits)


def test_sizes_that_are_no_multiple_of_the_patch():
    for backbone in ("dynamic", "hf_vit"):
        model = build(backbone, dwindle.Static())
        with pytest.raises(dwindle.DwindleError, match="multiples of"):
            model(torch.randn(1, 3, 36, 36))


def test_a_wrapped_model_is_not_wrapped_again():
    model = build("hf_vit", METHODS["AHT"]())
    with pytest.raises(dwindle.DwindleError, match="unwrap"):
        dwindle.adapt(model.vit, dwindle.Static())
    with pytest.raises(dwindle.DwindleError, match=r"torch\.compile.*after"):
        dwindle.adapt(torch.compile(BACKBONES["vit"]()), dwindle.Static())


@pytest.mark.parametrize(
    "backbone, method, layout",
    [
        ("vit", "AHT_merge", "masked"),
        ("layerscale", "ToMe", "packed"),
        ("vit", "TopK_fused", "packed"),
        ("vit", "DynamicViT", "masked"),
        ("hf_vit", "AHT_merge", "masked"),
        ("hf_dinov2", "ToMe", "packed"),
    ],
)
def test_gradient_checkpointing(backbone, method, layout):
    """As the wrapped model was told, before or after; fewer values wait for the backward pass, and it is the same."""
    plain = build(backbone, METHODS[method](), torch.float64).train()
    images, labels, twin = images_for(plain, dtype=torch.float64), torch.arange(5), copy.deepcopy(plain)
    enable = getattr(twin.vit, "set_grad_checkpointing", None) or twin.vit.gradient_checkpointing_enable
    enable()
    kept, logits = [], []
    for model in (plain, twin):
        torch.manual_seed(0)
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, to=sizes: to.append(t.numel()) or t, lambda t: t):
            out = model(images, layout=layout)
        model.loss(out, labels)["total"].backward()
        kept.append(sum(sizes))
        logits.append(out.logits.detach())
    assert torch.equal(*logits) and kept[1] < kept[0] / 2
    for (name, parameter), other in zip(plain.named_parameters(), twin.parameters()):
        assert (parameter.grad is None) == (other.grad is None), name
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, other.grad, msg=name)


@pytest.mark.parametrize("method", METHODS)
def test_pickled_and_back(method):
    model = build("vit", METHODS[method]())
    images, held = images_for(model), io.BytesIO()
    torch.save(model, held)
    held.seek(0)
    with torch.no_grad():
        before = model(images)
        for twin in (torch.load(held, weights_only=False), pickle.loads(pickle.dumps(model))):
            after = twin(images)
            assert torch.equal(after.logits, before.logits) and torch.equal(after.trace.depth, before.trace.depth)
            twin.vit.head.weight.zero_()
            assert torch.equal(model(images).logits, before.logits)
            twin.unwrap()(images)


def _answer(model, images, to):
    torch.set_num_threads(1)
    with torch.no_grad():
        to.put(model(images).logits.numpy())


def test_a_model_goes_to_another_process():
    model, spawn = build("hf_vit", METHODS["AHT"]()), multiprocessing.get_context("spawn")
    images, answers = images_for(model, 2), spawn.Queue()
    other = spawn.Process(target=_answer, args=(model, images, answers))
    other.start()
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(answers.get(timeout=60)), model(images).logits)
    other.join()


@pytest.mark.parametrize("method", ["AHT_merge", "AViT"] if SLOW else ["AHT_merge"])
def test_training_compiled_is_training(method):
    model = build("vit", METHODS[method]()).train()
    images, labels, twin = images_for(model), torch.arange(5), copy.deepcopy(model)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        for called, owner in ((model, model), (compiled, twin)):
            owner.zero_grad()
            out = called(images)
            owner.loss(out, labels)["total"].backward()
            owner.hold_budget(out)
            with torch.no_grad():
                for parameter in owner.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(1e-3 * parameter.grad)
    for (name, value), other in zip(model.state_dict().items(), twin.state_dict().values()):
        torch.testing.assert_close(value, other, msg=name)


def test_checkpointing_of_some_blocks_is_refused():
    model = build("vit", METHODS["AHT"]())
    with pytest.raises(dwindle.DwindleError, match="every_n_layers = 2"):
        model.activation_checkpointing_enable(every_n_layers=2)
    with pytest.raises(dwindle.DwindleError, match="use_reentrant = True"):
        model.gradient_checkpointing_enable({"use_reentrant": True})
    assert not model.backbone.checkpoints
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert model.backbone.checkpoints


@pytest.mark.parametrize("recompute", [False, True])
def test_hugging_faces_trainer(tmp_path, recompute):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="Trainer needs it")
    model = build("hf_vit", dwindle.AHT(stages=(1, 2), budget=0.6))
    bar, weight = model.method.bar.clone(), model.method.planners["1"].token.weight.detach().clone()
    images = images_for(model, 8)
    rows = [{"pixel_values": image, "labels": i % 5} for i, image in enumerate(images)]
    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=4, use_cpu=True, report_to=[], save_steps=3,
        gradient_checkpointing=recompute,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=settings, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    assert model.backbone.checkpoints == recompute
    assert model.method.bar != bar and not model.method.planners["1"].token.weight.equal(weight)
    said = trainer.predict(rows)
    model.eval()
    with torch.no_grad():
        out = model(pixel_values=images, labels=torch.arange(8) % 5)
    torch.testing.assert_close(torch.from_numpy(said.predictions), out.logits)
    assert said.metrics["test_loss"] == pytest.approx(float(out.loss), rel=1e-4)
    assert out["loss"] is out[0] is out.loss and out[1] is out["logits"] is out.logits


def test_an_answer_is_told_in_few_lines():
    model = build("vit", METHODS["AHT"]())
    with torch.no_grad():
        out = model(images_for(model, 12))
    assert len(repr(out)) < 400 and "\n" not in repr(out) and "logits=(12, 5)" in repr(out)


def test_what_is_no_image_tensor():
    model = build("vit", METHODS["AHT"]())
    for given, told in ((np.zeros((1, 3, 32, 32), np.float32), r"numpy\.ndarray of shape \(1, 3"), (None, "missing")):
        for called in (model, model.prepare(), lambda images: dwindle.calibrate(model, images, 0.5)):
            with pytest.raises(dwindle.DwindleError, match=told):
                called(given)


def test_numbers_that_cannot_be_computed_with():
    model = build("vit", METHODS["AHT"]())
    with pytest.raises(dwindle.DwindleError, match=r"values up to 3e\+38.*normalise"):
        model(torch.full((1, 3, 32, 32), 3e38))
    with pytest.raises(dwindle.DwindleError, match="operating_point holds NaN"):
        model(images_for(model, 2), operating_point=torch.tensor([0.5, torch.nan]))
    with torch.no_grad():
        model.vit.blocks[1].mlp.fc1.weight[0, 0] = torch.nan
    with pytest.raises(dwindle.DwindleError, match=r"weight 'vit\.blocks\.1\.mlp\.fc1\.weight'"):
        model(images_for(model, 2))


@pytest.mark.parametrize("name", METHODS)
def test_a_setting_turned_to_nan(name):
    """In no order with anything: all tokens would stop at it in silence."""
    model = build("vit", METHODS[name]())
    images, fast = images_for(model, 2), model.prepare()
    for method, called in ((model.method, model), (fast.method, fast)):
        if method.operating_point is None:
            continue
        set_operating_point(SimpleNamespace(method=method), float("nan"))
        with pytest.raises(dwindle.DwindleError, match=f"{method.operating_point[0]} = nan"):
            called(images)
    with pytest.raises(dwindle.DwindleError, match="budget = True"):
        dwindle.calibrate(build("vit", METHODS["AHT"]()), images, True)


def test_an_embedding_has_no_loss():
    vit = BACKBONES["vit"]()
    vit.reset_classifier(0)
    model = dwindle.adapt(vit, dwindle.Static())
    out = model(images_for(model, 2))
    with pytest.raises(dwindle.DwindleError, match="no head"):
        model.loss(out, torch.tensor([0, 1]))

"""Training AdaPerceiver: stages, sampling, distillation, freezing, resume."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image

import dwindle
from dwindle.core.losses import feature_loss
from dwindle.models.adaperceiver.blocks import Angles, SelfAttention, rope_angles, rotate
from dwindle.models.adaperceiver.start import _scanning_pairs
from dwindle.recipes.vision import ada_tiny_test
from dwindle.train.loop import Run
from dwindle.train.recipe import changed
from dwindle.train.teacher import Teacher, TeacherCache


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Three classes that a glance tells apart: bright in red, green or blue."""
    root, draw = tmp_path_factory.mktemp("ada"), np.random.default_rng(0)
    for split, count in (("train", 24), ("val", 8)):
        for c in range(3):
            (root / split / "rgb"[c]).mkdir(parents=True)
            for i in range(count):
                pixels = draw.integers(0, 120, (32, 32, 3))
                pixels[..., c] += 100
                Image.fromarray(pixels.astype(np.uint8)).save(root / split / "rgb"[c] / f"{i}.png")
    return root


def run(data, out, *settings, **options) -> Run:
    return Run(changed(ada_tiny_test(), settings), str(data), out, device="cpu", **options)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    torch.manual_seed(0)
    vit = timm.create_model("test_vit", num_classes=3, img_size=32)
    return dwindle.save(dwindle.adapt(vit, dwindle.Static()), tmp_path_factory.mktemp("teacher") / "vit")


def test_learns_at_every_setting(data, tmp_path):
    work = run(data, tmp_path / "run", "epochs=12", "lr=0.004", "augment=none", "batch=6")
    numbers = list(work.epochs())
    assert [row["stage"] for row in numbers] == [1.0] * 4 + [2.0] * 4 + [3.0] * 4
    assert "depths" not in numbers[0] and "depths" in numbers[-1]
    assert numbers[-1]["top1"] > 90 and numbers[-1]["top1_fewest_tokens"] > 90
    model = dwindle.load(tmp_path / "run")
    assert isinstance(model, dwindle.AdaPerceiver) and model.extra["results"]["top1"] == numbers[-1]["top1"]
    assert (tmp_path / "run" / "README.md").read_text().count("chosen at run time") == 1


@pytest.mark.parametrize("mask", ["blocks", "open"])
def test_resume_is_the_same_run(data, tmp_path, mask):
    given = ("ema=0.9", f"method.mask={mask}")
    list(run(data, tmp_path / "whole", *given).epochs())
    broken = run(data, tmp_path / "parts", *given)
    for _ in zip(range(1), broken.epochs()):
        pass
    again = run(data, tmp_path / "parts", *given, resume=True)
    list(again.epochs())
    one, two = dwindle.load(tmp_path / "whole").state_dict(), dwindle.load(tmp_path / "parts").state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.usefixtures("bf16_on_cpu")
@pytest.mark.parametrize("mask", ["blocks", "open"])
def test_bf16_on_a_cpu_teaches_what_float32_does(data, teacher, tmp_path, mask):
    given = (f"teacher={teacher}", f"method.mask={mask}", "resident=true", "method.readouts=own", "epochs=1")
    exact, rough = (run(data, tmp_path / amp, *given, f"cpu_amp={amp}") for amp in ("false", "true"))
    (x, y), (x_half, _) = (next(iter(work.task.batches(train=True))) for work in (exact, rough))
    assert (x.dtype, x_half.dtype) == (torch.float32, torch.bfloat16)
    said = exact.learner.teacher.ask(x)["logits"]
    roughly = rough.learner.teacher.ask(x_half)["logits"].float()
    torch.testing.assert_close(roughly, said, rtol=0.05, atol=0.05 * float(said.abs().max()))
    gradients = []
    for work, seen in ((exact, x), (rough, x_half)):
        work.model.train()
        work.learner.epoch = 1
        inputs = work.learner.inputs(seen, y, 0, 0) | {"teacher_answers": said}
        work.learn.bare.names = tuple(inputs)
        work.learn.backward(*inputs.values())
        gradients.append({name: p.grad for name, p in work.model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    flat = [torch.cat([g.flatten() for g in found.values()]) for found in gradients]
    assert F.cosine_similarity(*flat, dim=0) > 0.99


def test_samples_by_stage(data, tmp_path):
    work = run(data, tmp_path / "run")
    for epoch, sampled in enumerate([False, True, True]):
        work.learner.epoch = epoch
        found = work.learner.drawn(60, 0)
        assert ("sampled" in found) == sampled
        assert set(found["widths"].tolist()) == ({16, 24, 32} if epoch == 2 else {32})
    assert set(found["sampled"].tolist()) <= {4, 8, 16} and len(found["sampled"]) == 4


def test_steps_of_an_open_mask_are_drawn(data, tmp_path):
    work = run(data, tmp_path / "run", "stages=(0,1,1)", "method.mask=open", "mask_steps=0.3", "depth_weight=0")
    shares, tokens = torch.zeros(3).double(), torch.tensor([4, 8, 16])
    for step in range(400):
        found = work.learner.drawn(8, step)
        shares += found["drawn"].double() / 400
        assert set(found["sampled"].tolist()) <= set(tokens[found["drawn"]].tolist())
    assert torch.allclose(shares, torch.tensor([0.3, 0.3, 1.0]).double(), atol=0.08)
    x, y = next(iter(work.task.batches(train=False)))
    drawn = torch.tensor([True, False, True])
    said = work.model.answers(x, drawn=drawn)
    losses = work.learner.loss(said.tokens, y, None)
    torch.testing.assert_close(work.learner.loss_terms(said, y, drawn=drawn)["total"], losses[[0, 2]].mean())


def test_learns_with_an_open_mask(data, tmp_path):
    numbers = list(run(data, tmp_path / "run", "epochs=12", "method.mask=open", "stages=(0,0,1)").epochs())
    assert numbers[-1]["top1"] > 90 and numbers[-1]["top1_fewest_tokens"] > 90
    assert dwindle.load(tmp_path / "run").mask == "open"


def test_the_largest_setting_once_more(data, tmp_path):
    work = run(data, tmp_path / "run", "largest_weight=0.5", "depth_weight=0")
    x, y = next(iter(work.task.batches(train=False)))
    said = work.model.answers(x)
    losses = work.learner.loss(said.tokens, y, None)
    torch.testing.assert_close(work.learner.loss_terms(said, y)["total"], losses.mean() + 0.5 * losses[-1])


def test_full_width_for_a_share(data, tmp_path):
    work = run(data, tmp_path / "run", "stages=(0,0,1)", "full_width=0.5")
    full = work.learner.drawn(3000, 0)["widths"].eq(32).float().mean()
    assert abs(full - (0.5 + 0.5 / 3)) < 0.03
    assert run(data, tmp_path / "all", "stages=(0,0,1)", "full_width=1").learner.drawn(99, 0)["widths"].eq(32).all()


def test_blocks_learn_at_a_rate_of_their_own(data, tmp_path):
    work = run(data, tmp_path / "run", "block_lr=0.25", "epochs=3")
    kept = run(data, tmp_path / "kept", "block_lr=0", "epochs=3")
    before = {name: value.clone() for name, value in kept.model.state_dict().items()}
    numbers = list(work.epochs())
    rates = {id(p): group["lr"] for group in work.optimizer.param_groups for p in group["params"]}
    blocks = {rates[id(p)] for p in work.model.blocks.parameters()}
    rest = {rates[id(p)] for n, p in work.model.named_parameters() if not n.startswith("blocks.")}
    assert len(rest) == 1 and blocks == {0.25 * rate for rate in rest} and rest == {numbers[-1]["lr"]}
    list(kept.epochs())
    for name, value in kept.model.state_dict().items():
        assert torch.equal(value, before[name]) == name.startswith("blocks."), name


def test_read_outs_of_their_own_begin_from_one_and_end_in_one(data, tmp_path):
    """One read-out for all depths begins each depth's; of these the last begins one for all."""
    list(run(data, tmp_path / "one", "epochs=1").epochs())
    one = dwindle.load(tmp_path / "one")
    work = run(data, tmp_path / "own", f"weights={tmp_path / 'one'}", "method.readouts=own", "epochs=1")
    x = torch.randn(3, 3, 32, 32)
    torch.testing.assert_close(work.model.eval().every(x), one.every(x))
    assert len({id(readout) for readout in work.model.readouts}) == 4
    list(work.epochs())
    own = dwindle.load(tmp_path / "own")
    weights = [readout.head.weight for readout in own.readouts]
    assert not any(torch.equal(weights[0], other) for other in weights[1:])
    for depth in (4, 2):
        given = (f"weights={tmp_path / 'own'}", f"method.depth={depth}", "epochs=1")
        again = run(data, tmp_path / f"again_{depth}", *given).model.eval()
        torch.testing.assert_close(again(x).logits, own(x, depth=depth).logits)


def test_a_frozen_network_keeps_its_tokens(data, tmp_path):
    list(run(data, tmp_path / "first", "epochs=1").epochs())
    given = (f"weights={tmp_path / 'first'}", "epochs=1", "method.tokens=(8,16)")
    run(data, tmp_path / "free", *given)
    with pytest.raises(dwindle.DwindleError, match=r"tokens = \(4, 8, 16\).*learning \(8, 16\)"):
        run(data, tmp_path / "frozen", *given, "freeze_backbone=true")
    with pytest.raises(dwindle.DwindleError, match=r"mask = blocks.*learning open; give --set"):
        run(data, tmp_path / "open", given[0], "method.mask=open", "freeze_backbone=true")


def test_another_mask_than_the_weights_had_is_told(data, tmp_path, caplog):
    list(run(data, tmp_path / "first", "epochs=1", "method.mask=open").epochs())
    given = (f"weights={tmp_path / 'first'}", "epochs=1")
    assert run(data, tmp_path / "second", *given).model.mask == "blocks"
    assert "trained with mask = open and goes on with blocks; method.mask=open keeps it" in caplog.text
    caplog.clear()
    run(data, tmp_path / "third", *given, "method.mask=open")
    # With one granularity no mask hides anything.
    list(run(data, tmp_path / "one", "epochs=1", "method.mask=open", "method.tokens=(8,)").epochs())
    run(data, tmp_path / "frozen", f"weights={tmp_path / 'one'}", "method.tokens=(8,)", "freeze_backbone=true")
    assert not caplog.text


def test_a_run_from_before_a_setting_goes_on(data, tmp_path):
    """What was not there yet counts as its default."""
    out = tmp_path / "run"
    list(run(data, out, "epochs=1").epochs())
    state = torch.load(out / "state.pt", weights_only=True)
    given = json.loads(state["given"])
    for name in ("mask_steps", "block_lr"):
        del given[name]
    torch.save(state | {"given": json.dumps(given)}, out / "state.pt")
    assert run(data, out, "epochs=1", resume=True).epoch == 1
    with pytest.raises(dwindle.DwindleError, match=r"other settings: block_lr=1.0 \(now 0.5\)"):
        run(data, out, "epochs=1", "block_lr=0.5", resume=True)
    torch.save(state | {"given": json.dumps(given | {"colour": 3})}, out / "state.pt")
    with pytest.raises(dwindle.DwindleError, match=r"colour=3 \(now None\)"):
        run(data, out, "epochs=1", resume=True)


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_distils(data, teacher, tmp_path, kind):
    work = run(data, tmp_path / "run", f"teacher={teacher}", f"distill={kind}", "label_weight=0", "epochs=2")
    numbers = list(work.epochs())
    assert np.isfinite(numbers[-1]["total"])
    if kind == "soft":  # nothing to learn from itself
        x = torch.randn(4, 3, 32, 32)
        answers = work.learner.teacher(x, 0)["logits"][None].expand(3, -1, -1)
        assert float(work.learner.loss(answers, torch.zeros(4, dtype=torch.long), answers[0]).abs().max()) < 1e-5


def test_a_teacher_is_asked_once_where_batches_come_again(data, teacher, tmp_path, monkeypatch):
    """Answers kept, asked for again, or lost by a kill: the same weights."""
    given = (f"teacher={teacher}", "mixup=0.2", "epochs=4", "views=2", "resident=true", "stages=(0,0,1)")
    asked, ask = [], Teacher.ask
    monkeypatch.setattr(Teacher, "ask", lambda self, x: asked.append(len(x)) or ask(self, x))
    kept = run(data, tmp_path / "kept", *given)
    list(kept.epochs())
    assert len(asked) == 2 * kept.steps_per_epoch
    killed = run(data, tmp_path / "killed", *given)
    for _ in zip(range(3), killed.epochs()):
        pass
    asked.clear()
    list(run(data, tmp_path / "killed", *given, resume=True).epochs())
    assert len(asked) == kept.steps_per_epoch
    monkeypatch.setattr(TeacherCache, "keep", lambda *_: None)
    list(run(data, tmp_path / "asked", *given).epochs())
    found = [dwindle.load(tmp_path / name).state_dict() for name in ("kept", "killed", "asked")]
    assert all(torch.equal(found[0][name], other[name]) for other in found[1:] for name in found[0])


def test_feature_distillation(data, teacher, tmp_path):
    work = run(data, tmp_path / "run", f"teacher={teacher}", "task=features", "epochs=4", "lr=0.003")
    numbers = list(work.epochs())
    assert numbers[-1]["tokens"] < numbers[0]["tokens"]
    assert dwindle.load(tmp_path / "run").config["head"] == "mlp"
    same = torch.randn(2, 3, 4, 8)
    assert float(feature_loss(same, same[0])[0].abs().max()) < 1e-6
    finer = run(data, tmp_path / "next", f"weights={tmp_path / 'run'}", "freeze_backbone=true", "epochs=1")
    assert torch.equal(finer.model.blocks[0].ffn.fc1.weight, dwindle.load(tmp_path / "run").blocks[0].ffn.fc1.weight)


def test_frozen_parts(data, tmp_path):
    """D.2: the write head, the output token and the classifier learn; nothing else moves."""
    list(run(data, tmp_path / "first", "epochs=1").epochs())
    work = run(data, tmp_path / "second", "epochs=1", f"weights={tmp_path / 'first'}", "freeze_backbone=true")
    before = {name: value.clone() for name, value in work.model.state_dict().items()}
    list(work.epochs())
    moved = {name for name, value in work.model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved and all(name.startswith("readouts.") for name in moved)


def test_a_read_out_is_renewed(data, teacher, tmp_path):
    """It begins as another depth's, and nothing else moves."""
    kind = ("epochs=1", "method.readouts=own", "stages=(0,0,1)")
    list(run(data, tmp_path / "first", *kind).epochs())
    given = (*kind, f"weights={tmp_path / 'first'}", "freeze_backbone=true")
    work = run(data, tmp_path / "second", *given, "reinit_from={3: 2, 2: 3}")
    old, new = dwindle.load(tmp_path / "first").readouts, work.model.readouts
    for depth, source in ((1, 1), (2, 3), (3, 2), (4, 4)):
        for one, other in zip(new[depth - 1].parameters(), old[source - 1].parameters()):
            assert torch.equal(one, other)
    before = {name: value.clone() for name, value in work.model.state_dict().items()}
    list(work.epochs())
    moved = {name for name, value in work.model.state_dict().items() if not torch.equal(value, before[name])}
    assert {name.split(".head")[0].split(".write")[0] for name in moved} >= {"readouts.1", "readouts.2"}
    assert all(name.startswith(("readouts.1.", "readouts.2.")) for name in moved)
    assert run(data, tmp_path / "second", *given, "reinit_from={3: 2, 2: 3}", resume=True).epoch == 1
    with pytest.raises(dwindle.DwindleError, match="read-outs for depths 1 to 4"):
        run(data, tmp_path / "third", *given, "reinit_from={5: 4}")
    for change, said in (
        ("freeze_backbone=false", "needs weights=RUN freeze_backbone=true"),
        ("weights=none", "needs weights=RUN freeze_backbone=true"),
        ("method.readouts=shared", "needs method.readouts=own"),
        ("stages=(1,1,1)", r"needs stages=\(0,0,1\)"),
        ("reinit_from={}", "name depths by whole numbers"),
        ("reinit_from={'3': 2}", "name depths by whole numbers"),
        ("depth_weight=0", "needs depth_weight above 0"),
        ("method.classes=4", "no read-outs that reinit_from could keep"),
        (f"weights={teacher}", "no read-outs that reinit_from could keep"),
    ):
        with pytest.raises(dwindle.DwindleError, match=said):
            run(data, tmp_path / "third", *given, "reinit_from={3: 2}", change)


@pytest.mark.parametrize(
    "setting, said",
    [
        ("stages=(1,2)", "a list of 3, each a number"),
        ("stages=(0,0,0)", "three shares"),
        ("optimizer=sgd", "unknown optimizer"),
        ("full_width=2", r"full_width = 2: it must lie in \[0, 1\]"),
        ("mask_steps=1", "mask_steps = 1: it must lie between 0 and 1"),
        ("mask_steps=0.3", "for an open mask; give method.mask=open"),
        (("method.mask=open", "attention=steps"), "trains by 'mask'"),
        ("method.mask=none", "mask = None"),
        ("block_lr=-1", "block_lr = -1: it must be at least 0"),
        ("attention=ring", "unknown attention"),
        ("distill=token", "no distillation token"),
        ("layout=packed", "no effect on an AdaPerceiver"),
        ("parallel=fsdp", "no effect on an AdaPerceiver"),
        ("freeze_backbone=true", "nothing to keep; give the trained network"),
        (("ema=0.9", "stage_ema=(0.9,0.9,0.9)"), "stage_ema says it for each stage"),
        ("stage_ema=(0.9,1.0,0.9)", "lie between 0 and 1"),
        ("schedule=(cosine,cosine)", "unknown schedule"),
        ("schedule=step", "unknown schedule"),
        ("task=features", "learnt from a teacher"),
        ("method.colour=3", "Unknown option of AdaPerceiver 'colour'"),
        ("method.tokens=3", "tokens = 3: it must be a list, each a whole number"),
        ("model=huge", "unknown preset"),
        ("weights=nowhere", "unknown checkpoint"),
        ("teacher=nowhere", "teacher = nowhere"),
        ("method.tokens=(8,4)", "rise"),
    ],
)
def test_bad_recipes(data, tmp_path, setting, said):
    with pytest.raises(dwindle.DwindleError, match=f"(?i){said}"):
        run(data, tmp_path / "run", *([setting] if isinstance(setting, str) else setting))
    assert not (tmp_path / "run").exists()


def test_no_teacher_for_a_transformer(data, tmp_path):
    """A run of another kind that is taught by an AdaPerceiver says so."""
    from dwindle.recipes.vision import tiny_test

    dwindle.save(dwindle.AdaPerceiver.preset("tiny", classes=3), tmp_path / "ada")
    with pytest.raises(dwindle.DwindleError, match="is an AdaPerceiver"):
        Run(changed(tiny_test(), [f"teacher={tmp_path / 'ada'}"]), str(data), tmp_path / "run", device="cpu")


@pytest.mark.parametrize("kind", ["steps", "mask"])
def test_taught_by_an_adaperceiver(data, tmp_path, kind):
    dwindle.save(dwindle.AdaPerceiver.preset("tiny", classes=3), tmp_path / "ada")
    work = run(data, tmp_path / "run", f"teacher={tmp_path / 'ada'}", "epochs=1", f"attention={kind}", "stages=(0,0,1)")
    (numbers,) = work.epochs()
    assert np.isfinite(numbers["total"]) and numbers["stage"] == 3


def test_given_settings_are_json(data, tmp_path):
    work = run(data, tmp_path / "run")
    json.dumps(work.given)
    assert dataclasses.asdict(work.recipe)["method"] == "AdaPerceiver"


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    """One whose blocks fit a tiny AdaPerceiver with four neurons a channel."""
    torch.manual_seed(0)
    options = {"patch_size": 8, "embed_dim": 32, "depth": 5, "num_heads": 2, "num_classes": 3}
    vit = timm.create_model("vit_tiny_patch16_224", img_size=48, **options)
    torch.nn.init.normal_(vit.pos_embed)
    return dwindle.save(dwindle.adapt(vit, dwindle.Static()), tmp_path_factory.mktemp("begin") / "vit")


def test_begins_from_a_vit(data, vit, tmp_path):
    """Its blocks, which without RoPE do as they did, the heaviest neurons first; input tokens normalised but else as
    they were."""
    work = run(data, tmp_path / "run", f"weights={vit}", f"teacher={vit}", "method.ffn_ratio=4.0", "epochs=1")
    model, theirs = work.model, dwindle.load(vit).vit
    still = Angles(torch.ones(3, model.width // model.heads // 2), torch.zeros(3, model.width // model.heads // 2))
    for block, other in zip(model.blocks, theirs.blocks):
        x = torch.randn(2, 3, 32)
        ours = block.attn(x, still, F.scaled_dot_product_attention)
        torch.testing.assert_close(ours, other.attn(x), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(block.ffn(x), other.mlp(x), atol=1e-5, rtol=1e-4)
        sizes = block.ffn.fc1.weight.norm(dim=1) * block.ffn.fc2.weight.norm(dim=0)
        assert torch.equal(sizes, sizes.sort(descending=True).values) and block.scale1.eq(1).all()
    x = work.task.some(8, 8)
    patches = model.patch_embed(x).flatten(2).mT + model.position
    torch.testing.assert_close(model.embed(x), model.embed_norm(patches), atol=1e-5, rtol=1e-4)
    list(work.epochs())
    own = run(data, tmp_path / "own", f"weights={vit}", "method.ffn_ratio=4.0", "method.readouts=own").model
    for readout in own.readouts:
        assert torch.equal(readout.head.weight, theirs.head.weight)
        assert torch.equal(readout.write.norm_source.weight, theirs.norm.weight)


@pytest.mark.parametrize("rope", ["halves", "pairs"])
@torch.no_grad()
def test_latents_begin_as_patches(data, vit, tmp_path, rope):
    """Each at its place, as the ViT's first block would meet it but for the four directions of the code of places."""
    work = run(data, tmp_path / "run", f"weights={vit}", "method.ffn_ratio=4.0", f"method.rope={rope}")
    model, x = work.model, work.task.some(8, 8)
    place = _places(model)  # (N,)
    sizes, patches = (model.heads, model.width // model.heads), model.embed(x)
    turn = rope_angles(len(place), sizes[1], model.rope_theta, x, rope == "pairs")
    q = rotate(model.read.queries(model.latent).expand(-1, len(place), -1), turn)
    k = model.read.kv(model.read.norm_source(patches))[..., : model.width].unflatten(-1, sizes).transpose(1, 2)
    sees = (q @ k.mT * sizes[1] ** -0.5).softmax(-1)  # (B, H, N, P)
    assert sees.argmax(-1).eq(place).float().mean() > 0.9 and sees.amax(-1).mean() > 0.6
    assert len(set(place.tolist())) >= 12  # of 16 patches
    theirs = dwindle.load(vit).vit
    square = theirs.pos_embed[:, 1:].unflatten(1, (6, 6)).permute(0, 3, 1, 2)
    position = F.interpolate(square, size=(4, 4), mode="bicubic", antialias=True).flatten(2).mT
    before = (theirs.patch_embed.proj(x).flatten(2).mT + position)[:, place]
    before = before - before.mean(-1, keepdim=True)
    alike = F.cosine_similarity(model.read.latents(model.latent, patches, turn), before, -1)
    assert alike.median() > 0.9


def _places(model):
    """The patch that each latent begins at."""
    side, pairs = model.image // model.patch, model.width // model.heads // 2
    at = torch.arange(model.tokens[-1])[:, None] * model.rope_theta ** (-torch.tensor(_scanning_pairs(model)) / pairs)
    columns, rows = (((at / (2 * torch.pi) + 0.5 / side) % 1) * side).long().T
    return rows * side + columns


@pytest.mark.parametrize("rope", ["halves", "pairs"])
@torch.no_grad()
def test_rope_turns_what_matters_least(data, vit, tmp_path, rope):
    """Scores of queries and keys that have a few strong directions: RoPE leaves the blocks' nearly as the ViT's are."""
    changed, other = tmp_path / "low rank", dwindle.load(vit)
    generator = torch.Generator().manual_seed(0)
    for block in other.vit.blocks:
        for head in range(2):
            few = torch.randn(16, 4, generator=generator) @ torch.randn(4, 32, generator=generator)
            block.attn.qkv.weight[16 * head : 16 * head + 16] += 0.3 * few
            block.attn.qkv.weight[32 + 16 * head : 48 + 16 * head] += 0.3 * few
    dwindle.save(other, changed)
    work = run(data, tmp_path / "run", f"weights={changed}", "method.ffn_ratio=4.0", f"method.rope={rope}")
    model = work.model
    patches = model.embed(work.task.some(32, 32))
    turn, attend = model._angles_and_attention(model.tokens[-1], patches)
    z = model.read.latents(model.latent, patches, turn)
    for block, theirs in zip(model.blocks, other.vit.blocks):
        x = block.norm1(z)
        wanted = theirs.attn(x)
        plain = SelfAttention(32, 2)
        plain.load_state_dict(theirs.attn.state_dict())
        ours, turned_as_it_was = (a(x, turn, F.scaled_dot_product_attention) for a in (block.attn, plain))
        assert (ours - wanted).norm() < 0.5 * (turned_as_it_was - wanted).norm()
        z = block(z, turn, attend)


@pytest.mark.parametrize(
    "setting, said",
    [
        ("method.width=64", "has width 32, the network 64"),
        ("method.depth=6", "depth 6; it must be from 1 to 5"),
        ("method.ffn_ratio=5.0", "ffn_ratio 5.0; it must be from 2 to 4"),
        ("method.ffn_ratio=1.5", "ffn_ratio 1.5; it must be from 2 to 4"),
        ("method.patch=4", "has patch"),
    ],
)
def test_a_vit_that_does_not_fit(data, vit, tmp_path, setting, said):
    widths = () if "width=64" not in setting else ("method.widths=(64,)",)
    given = ("method.ffn_ratio=4.0", f"weights={vit}", setting, *widths)
    with pytest.raises(dwindle.DwindleError, match=said):
        run(data, tmp_path / "run", *given)


def test_teacher_sees_its_own_size(data, vit, tmp_path):
    """48 pixels, where the student has 32: answers, and features on the student's grid."""
    work = run(data, tmp_path / "run", f"teacher={vit}", "epochs=1")
    x = torch.randn(2, 3, 32, 32)
    large = torch.nn.functional.interpolate(x, size=(48, 48), mode="bicubic", antialias=True)
    said = work.learner.teacher(x, 0)["logits"]
    torch.testing.assert_close(said, dwindle.load(vit)(large).logits, atol=1e-5, rtol=1e-4)
    work = run(data, tmp_path / "next", f"teacher={vit}", "epochs=1", "task=features")
    assert work.learner.teacher(x, 0)["states"].shape == (2, 16, 32)
    list(work.epochs())


def test_one_schedule_over_all_stages(data, tmp_path):
    numbers = list(run(data, tmp_path / "run", "restart=false", "epochs=6", "ema=0.9").epochs())
    rates = [row["lr"] for row in numbers]
    assert rates == sorted(rates, reverse=True) and [row["stage"] for row in numbers] == [1, 1, 2, 2, 3, 3]


@pytest.mark.cuda
@pytest.mark.parametrize("mask", ["blocks", "open"])
def test_a_recorded_step_is_the_eager_one(data, vit, tmp_path, mask):
    losses = []
    for compiled in ("false", "true"):
        given = ("resident=true", "amp=false", f"teacher={vit}", f"compile={compiled}", "epochs=6")
        given += (f"method.mask={mask}",)
        work = Run(changed(ada_tiny_test(), given), str(data), tmp_path / compiled, device="cuda")
        losses.append([numbers["total"] for numbers in work.epochs()])
        assert (work.learn.recorded is not None) == (compiled == "true")
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-3)

"""AdaPerceiver: the published configuration, what its settings promise, cost, trace, checkpoints, bad input."""

from __future__ import annotations

import copy
import json
from itertools import product

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import dwindle
from dwindle.models.adaperceiver.blocks import attend_mask, attend_steps, block_mask, drawn_mask, steps
from dwindle.models.adaperceiver.cost import embed_macs, nested_macs, setting_macs
from shared.checkpoint import edit
from shared.flops import flop_counter
from shared.perceiver import images, tiny

TABLE_5 = {32: 16.2, 64: 28.3, 96: 40.4, 128: 52.5, 224: 88.7, 256: 100.8}
TABLE_6 = {32: 16.2, 64: 28.3, 96: 40.4, 128: 52.5, 192: 76.7, 256: 100.8}


@pytest.fixture(scope="module")
def paper():
    with torch.device("meta"):
        return dwindle.AdaPerceiver.preset("paper")


def test_paper_parameters(paper):
    assert round(sum(p.numel() for p in paper.parameters()) / 1e6, 1) == 143.8
    assert (paper.width, paper.depth, paper.heads, paper.widths) == (832, 21, 13, (416, 624, 832))


def test_papers_gflops(paper):
    """Its counter is reproduced to the last digit printed; Table 5's row of 192 tokens is that of 224."""
    for table in (TABLE_5, TABLE_6):
        for tokens, gflops in table.items():
            assert nested_macs(paper, tokens) / 1e9 == pytest.approx(gflops, abs=0.051)


@pytest.mark.parametrize("tokens, depth, width", [(4, 4, 32), (8, 2, 16), (13, 3, 24), (16, 4, 32)])
@pytest.mark.parametrize("outputs, mask", [("class", "blocks"), ("class", "open"), ("dense", "blocks")])
def test_macs_against_torchs_counter(tokens, depth, width, outputs, mask):
    """Per image, in a batch: what is made once for all images is left out of both."""
    model = tiny(torch.float32, outputs=outputs, mask=mask)

    def flops(count: int) -> float:
        with flop_counter() as counter:
            out = model(images(count, torch.float32), tokens, depth, width)
        assert float(model.macs(out.trace)[0]) == setting_macs(model, tokens, depth, width)
        return counter.get_total_flops() / 2

    assert flops(5) - flops(4) == setting_macs(model, tokens, depth, width)


def test_first_tokens_do_not_see_those_that_follow():
    """C.4: the first t latents are the same at every block, whether or not more follow."""
    model, found = tiny(), {}
    for tokens in (4, 8, 16, 24):
        seen: list[torch.Tensor] = []
        hooks = [block.register_forward_hook(lambda m, i, o, seen=seen: seen.append(o)) for block in model.blocks]
        model(images(), tokens=tokens)
        [hook.remove() for hook in hooks]
        found[tokens] = seen
    for fewer in (4, 8, 16):
        for short, long in zip(found[fewer], found[24]):
            torch.testing.assert_close(short, long[:, :fewer], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("readouts", ["shared", "own"])
@pytest.mark.parametrize("mask", ["blocks", "open"])
def test_every_granularity_and_depth(readouts, mask):
    model = tiny(readouts=readouts, mask=mask)
    for width in model.widths:
        every = model.every(images(), width)
        for depths in ([2, 4], [4, 2], [3, 3]):
            some = model.every(images(), width, depths=depths)
            torch.testing.assert_close(some, every[[depth - 1 for depth in depths]])
        for g, tokens in enumerate(model.tokens):
            for depth in range(1, model.depth + 1):
                alone = model(images(), tokens, depth, width).logits
                torch.testing.assert_close(every[depth - 1, g], alone, atol=1e-11, rtol=1e-11)
    with pytest.raises(dwindle.DwindleError, match="depth = 9: this network takes"):
        model.every(images(), depths=[2, 9])
    with pytest.raises(dwindle.DwindleError, match="name at least one"):
        model.every(images(), depths=[])


@pytest.mark.parametrize("readouts", ["shared", "own"])
@pytest.mark.parametrize("outputs", ["class", "dense"])
def test_training_pass_is_what_runs(outputs, readouts):
    """Masked widths and read-outs of Algorithm 3 equal the sliced ones."""
    model = tiny(outputs=outputs, readouts=readouts)
    widths, sampled = torch.tensor([16, 32, 24, 16]), torch.tensor([8, 4, 16, 8])
    answers = model.answers(images(), widths, sampled)
    for g, tokens in enumerate(model.tokens):
        torch.testing.assert_close(answers.tokens[g], model(images(), tokens, width=widths).logits)
    for depth in range(1, 5):
        alone = model(images(), int(sampled[depth - 1]), depth, widths).logits
        torch.testing.assert_close(answers.depths[depth - 1], alone)


def test_an_open_mask_lets_all_see_each_other():
    """Of t latents, as in a network of t only; with one granularity there is nothing to open."""
    model, x = tiny(mask="open"), images()
    for tokens in (4, 7, 16, 24):
        alone = tiny(tokens=(tokens,))
        alone.load_state_dict(model.state_dict())
        torch.testing.assert_close(model(x, tokens).logits, alone(x).logits, atol=1e-12, rtol=1e-12)
    assert not torch.allclose(model(x).logits, tiny()(x).logits)
    before, twin = model(x).trace, copy.copy(model)
    model.mask = "blocks"
    torch.testing.assert_close(model(x).logits, tiny()(x).logits)
    assert twin.mask == "open" and json.loads(json.dumps(model.config))["mask"] == "blocks"
    full = (16, 4, 32)
    for trace, network in ((before, twin), (model(x).trace, model)):  # a trace costs what its own mask did
        assert model.macs(trace).tolist() == [setting_macs(network, *full)] * len(x)
    assert setting_macs(model, *full) < setting_macs(twin, *full)
    with pytest.raises(dwindle.DwindleError, match=r"Unknown mask 'shut'.*blocks.*open"):
        model.mask = "shut"


@pytest.mark.parametrize("drawn", [d for d in product((False, True), repeat=3) if d[-1]])
def test_a_drawn_mask(drawn):
    """What each drawn granularity answers is what runs: the first of them as if it was alone; all drawn, blocks."""
    ends = tuple(t for t, is_drawn in zip((4, 8, 16), drawn) if is_drawn)
    assert torch.equal(drawn_mask(torch.tensor(drawn), (4, 8, 16)), block_mask(ends, torch.device("cpu")))
    model, x, widths = tiny(mask="open"), images(), torch.tensor([16, 32, 24, 16])
    sampled = torch.full((4,), ends[0])
    for _ in range(2):  # the second time over another mask
        answers = model.answers(x, widths, sampled, torch.tensor(drawn))
        nested = tiny(tokens=ends)
        nested.load_state_dict(model.state_dict())
        for tokens in ends:
            torch.testing.assert_close(answers.tokens[(4, 8, 16).index(tokens)], nested(x, tokens, width=widths).logits)
        torch.testing.assert_close(answers.tokens[(4, 8, 16).index(ends[0])], model(x, ends[0], width=widths).logits)
        for depth in range(1, 5):
            torch.testing.assert_close(answers.depths[depth - 1], model(x, ends[0], depth, widths).logits)
        model.answers(x, widths, sampled, torch.tensor([not drawn[0], True, True]))


@pytest.mark.parametrize("readouts", ["shared", "own"])
@pytest.mark.parametrize("mask", ["blocks", "open"])
def test_a_setting_per_image(readouts, mask):
    model, x = tiny(readouts=readouts, mask=mask), images(6)
    tokens, depth, width = [4, 8, 5, 16, 4, 40], [1, 4, 2, 4, 3, 4], [16, 32, 24, 16, 16, 32]
    together = model(x, tokens, depth, torch.tensor(width))
    for i in range(6):
        alone = model(x[i : i + 1], tokens[i], depth[i], width[i])
        torch.testing.assert_close(together.logits[i : i + 1], alone.logits, atol=1e-12, rtol=1e-12)
        assert float(model.macs(together.trace)[i]) == float(model.macs(alone.trace)[0])
    assert together.trace.counts.tolist() == [[t if d > at else 0 for t, d in zip(tokens, depth)] for at in range(4)]


@pytest.mark.parametrize("mask", ["blocks", "open"])
def test_exit_is_the_images_own(mask):
    model, x = tiny(mask=mask), images(8)
    every = model.every(x)[:, -1].softmax(-1).amax(-1)  # (L, B)
    threshold = float(every[:-1].median())
    out = model(x, exit=threshold)
    depths = [next((d for d in range(1, 4) if every[d - 1, i] >= threshold), 4) for i in range(8)]
    assert out.trace.depth[:, 0].tolist() == depths and len(set(depths)) > 1
    for i in range(8):
        alone = model(x[i : i + 1], exit=threshold)
        torch.testing.assert_close(alone.logits, out.logits[i : i + 1], atol=1e-12, rtol=1e-12)
        reads = setting_macs(model, 16, depths[i], 32, reads=depths[i])
        assert float(model.macs(out.trace)[i]) == float(model.macs(alone.trace)[0]) == reads


@pytest.mark.parametrize("readouts", ["shared", "own"])
@torch.no_grad()
def test_a_prepared_network_keeps_its_tables(readouts):
    """For more numbers of latents than are kept, and whatever happens to the network it was made of."""
    model, x = tiny(readouts=readouts).eval(), images(3)
    fast, counts = model.prepare(), (*range(3, 16), 3)
    before = [model(x, tokens=tokens, exit=1.0).logits for tokens in counts]
    for _ in range(2):
        for tokens, wanted in zip(counts, before):
            torch.testing.assert_close(fast(x, tokens=tokens, exit=1.0).logits, wanted, atol=1e-10, rtol=1e-10)
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter))
    assert not torch.allclose(model(x).logits, fast(x).logits)
    torch.testing.assert_close(model.prepare()(x).logits, model(x).logits, atol=1e-10, rtol=1e-10)
    with torch.enable_grad():
        model.requires_grad_()(x).logits.sum().backward()
    assert model.readout(model.depth).output.grad is not None


def test_attention_is_the_same_every_way():
    q, k, v = torch.randn(3, 2, 2, 13, 8, dtype=torch.float64)
    ends = steps(13, (4, 8, 16))
    assert ends == (4, 8, 13) and steps(8, (4, 8, 16)) == (4, 8) and steps(20, (4, 8, 16)) == (4, 8, 16, 20)
    mask = block_mask(ends, q.device)
    assert mask.sum(-1).tolist() == [4] * 4 + [8] * 4 + [13] * 5
    torch.testing.assert_close(attend_steps(q, k, v, ends), attend_mask(q, k, v, mask))


def test_bfloat16():
    fine, coarse = tiny(torch.float32), tiny(torch.bfloat16)
    x = images(dtype=torch.float32)
    torch.testing.assert_close(coarse(x.bfloat16()).logits.float(), fine(x).logits, atol=0.4, rtol=0.1)


def test_other_image_sizes():
    model = tiny(outputs="dense")
    out = model(images(2, size=48), tokens=8)
    assert out.logits.shape == (2, 36, 5) and float(model.macs(out.trace)[0]) == setting_macs(
        model, 8, 4, 32, patches=36
    )


def test_checkpoint(tmp_path):
    model = tiny(torch.float32)
    dwindle.save(model, tmp_path / "ada", extra={"note": "x"})
    again = dwindle.load(tmp_path / "ada")
    assert isinstance(again, dwindle.AdaPerceiver) and again.extra["note"] == "x" and again.config == model.config
    x = images(dtype=torch.float32)
    assert torch.equal(model(x, 8, 3, 16).logits, again(x, 8, 3, 16).logits)


@pytest.mark.parametrize("outputs", ["class", "dense"])
def test_a_checkpoint_of_when_the_read_out_had_no_name(outputs, tmp_path):
    model = tiny(torch.float32, outputs=outputs)
    folder = dwindle.save(model, tmp_path / "ada")
    weights = load_file(folder / "model.safetensors")
    edit(folder, lambda config: (config["backbone"]["options"].pop("readouts"), config.pop("weights_sha256")))
    save_file({n.removeprefix("readouts.0."): w for n, w in weights.items()}, folder / "model.safetensors")
    x = images(2, torch.float32)
    assert torch.equal(dwindle.load(folder)(x).logits, model(x).logits)


@pytest.mark.parametrize(
    "given, said",
    [
        ({"tokens": 0}, "from 1 to 64"),
        ({"tokens": 65}, "from 1 to 64"),
        ({"tokens": 2.5}, "whole number"),
        ({"depth": 5}, "from 1 to 4"),
        ({"depth": 0}, "from 1 to 4"),
        ({"width": 33}, "from 1 to 32"),
        ({"tokens": [4, 8]}, "2 values for 4 images"),
        ({"exit": 1.5}, "confidence"),
        ({"exit": "0.5"}, "confidence"),
        ({"exit": float("nan")}, "confidence"),
    ],
)
def test_bad_settings(given, said):
    with pytest.raises(dwindle.DwindleError, match=said):
        tiny()(images(), **given)


@pytest.mark.parametrize("shape", [(2, 3, 33, 32), (2, 1, 32, 32), (3, 32, 32), (0, 3, 32, 32)])
def test_bad_images(shape):
    with pytest.raises(dwindle.DwindleError, match="multiples of 8"):
        tiny()(torch.zeros(shape, dtype=torch.float64))


def test_what_is_no_image_tensor():
    model = tiny()
    for called in (model, model.prepare()):
        for given, told in ((np.zeros((1, 3, 32, 32)), r"numpy\.ndarray of shape \(1, 3"), (None, "missing")):
            with pytest.raises(dwindle.DwindleError, match=told):
                called(given)


def test_images_of_another_type():
    with pytest.raises(dwindle.DwindleError, match=r"uint8.*float32"):
        dwindle.AdaPerceiver.preset("tiny").eval()(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))


def test_images_with_nan():
    model, x = tiny(), images()
    x[1, 0, 0, 0] = torch.nan
    with pytest.raises(dwindle.DwindleError, match="images hold NaN"):
        model(x)
    model.readouts[-1].head.weight.data.fill_(torch.inf)
    with pytest.raises(dwindle.DwindleError, match="model gives NaN"):
        model(images())


def test_it_compiles():
    model, x = dwindle.AdaPerceiver.preset("tiny").eval(), images(2, torch.float32)
    compiled = torch.compile(lambda x: model(x, tokens=8).logits, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x, tokens=8).logits)


def test_settings_from_numpy():
    model, x = tiny(), images()
    for given in (np.array([4, 8, 8, 4]), np.int64(8)):
        torch.testing.assert_close(model(x, tokens=given).logits, model(x, tokens=given.tolist()).logits)


@pytest.mark.parametrize(
    "given",
    [
        {"heads": 3},
        {"image": 30},
        {"tokens": (8, 4)},
        {"tokens": ()},
        {"widths": (16, 24)},
        {"depth": 0},
        {"outputs": "words"},
        {"readouts": "none"},
        {"features": 8},
        {"outputs": "both"},
        {"norm_eps": 0.0},
    ],
)
def test_bad_networks(given):
    with pytest.raises(dwindle.DwindleError):
        dwindle.AdaPerceiver.preset("tiny", **given)


def test_a_checkpoint_with_settings_of_another_version(tmp_path):
    dwindle.save(tiny(torch.float32), tmp_path / "ada")
    edit(tmp_path / "ada", lambda config: config["backbone"]["options"].update(mask="shut"))
    with pytest.raises(dwindle.DwindleError, match=r"config.json has settings .*Unknown mask 'shut'.*; "):
        dwindle.load(tmp_path / "ada")


@pytest.mark.parametrize("mask", ["blocks", "open"])
def test_input_tokens_asked_for_before(mask):
    model, x = tiny(mask=mask), images(4)
    patches = model.embed(x)
    for setting in ({}, {"tokens": [4, 16, 8, 4]}, {"exit": 0.5}):
        torch.testing.assert_close(model(x, **setting, patches=patches).logits, model(x, **setting).logits)
    with pytest.raises(dwindle.DwindleError, match=r"patches of shape \(2, 16, 32\).*\(4, 16, 32\)"):
        model(x, patches=patches[:2])
    with flop_counter() as counter:
        model(x, patches=patches)
    less = counter.get_total_flops()
    with flop_counter() as counter:
        model(x)
    assert counter.get_total_flops() - less == 2 * 4 * embed_macs(model, model.patches())


@pytest.mark.usefixtures("bf16_on_cpu")
@pytest.mark.parametrize("mask", ["blocks", "open"])
@torch.no_grad()
def test_bf16_on_a_cpu(mask, monkeypatch):
    """At every size of image and with settings for each: no more than twice as far from float32 as plain torch."""
    torch.manual_seed(0)
    exact = tiny(torch.float32, mask=mask).eval()
    rough = copy.deepcopy(exact).bfloat16()
    for size in (32, 64):
        x = images(8, torch.float32, size)
        for setting in ({}, {"tokens": [4, 16, 8, 16] * 2, "depth": [1, 4, 2, 3] * 2}, {"width": 16}):
            wanted, plain = exact(x, **setting), rough.run(x.bfloat16(), **setting)
            with monkeypatch.context() as patch:
                patch.setattr("dwindle.ops.half.FEW", 4)
                ours = rough(x.bfloat16(), **setting)
            errors = [(said.logits.float() - wanted.logits).abs().mean() for said in (ours, plain)]
            assert errors[0] <= 2 * errors[1]
            assert torch.equal(rough.macs(ours.trace), exact.macs(wanted.trace))
        assert rough(x.bfloat16(), exit=0.3).logits.shape == (8, exact.classes)

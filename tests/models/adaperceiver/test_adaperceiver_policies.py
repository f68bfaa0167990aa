"""Policies on AdaPerceiver, the commands that print them, and figures."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

import dwindle
from dwindle.models.adaperceiver import figures
from dwindle.models.adaperceiver import grid as measure
from dwindle.models.adaperceiver import policies as rules
from dwindle.models.adaperceiver import policy_network as network
from dwindle.models.adaperceiver.cost import setting_macs
from shared.command import refused, run
from shared.perceiver import images, tiny


@pytest.fixture(scope="module", params=["blocks", "open"])
def seen(request):
    """A random network, 48 images, and labels it gets right now and then."""
    model, x = tiny(torch.float32, mask=request.param), images(48, torch.float32)
    y = model(x, tokens=8, depth=3).logits.argmax(-1)
    y[::3] = (y[::3] + 1) % 5
    batches = list(zip(x.split(16), y.split(16)))
    return model, x, y, batches, measure.grid(model, batches)


def test_grid(seen):
    model, x, y, _, found = seen
    assert found.correct.shape == (3, 4, 3, 48)
    out = model(x, 8, 3, 24)
    assert torch.equal(found.correct[1, 2, 1], out.logits.argmax(-1) == y)
    torch.testing.assert_close(found.confidence[1, 2, 1], out.logits.softmax(-1).amax(-1))
    rows = measure.rows(model, found)
    assert len(rows) == 36 and rows[-1]["gmacs"] == round(model.static_macs() / 1e9, 4)
    assert set(measure.falls(found)) == {"width", "depth", "tokens"}


def test_depths_that_lag():
    right = torch.tensor([50, 60, 30, 70])[None, :, None].expand(3, 4, 3).clone()  # of a hundred images
    right[1, 1, 1] = 40  # a depth that is worse at one setting only does not lag

    def found() -> measure.Grid:
        correct = torch.arange(100) < right[..., None]
        return measure.Grid(correct, correct.float())

    assert measure.lagging(found()) == [3]
    right[:, 2] = right[:, 1] - 2  # two images are noise
    assert measure.lagging(found()) == []
    right[:, 2] = 30
    right[2, 2, 0] = 60
    assert measure.lagging(found()) == []


def test_between(seen):
    model, x, y, batches, _ = seen
    rows = measure.between(model, batches, [2, 4, 6, 16, 32])
    assert [r["trained"] for r in rows] == [False, True, False, True, False]
    right = (model(x, tokens=6).logits.argmax(-1) == y).float().mean()
    assert rows[2]["top1"] == pytest.approx(100 * float(right), abs=1e-3)


def test_exit_of_the_grid_is_the_models(seen):
    """The table of policies and the network that runs agree on answers, depths and cost, read-outs counted."""
    model, x, y, _, found = seen
    threshold = float(found.confidence[-1, :-1].median())
    picked = torch.arange(48) % 3
    tokens = torch.tensor(model.tokens)[picked]
    out = model(x, tokens=tokens, exit=threshold)
    correct, macs = rules.early_exit(model, found, threshold, picked)
    assert torch.equal(correct, out.logits.argmax(-1) == y)
    assert torch.equal(macs, model.macs(out.trace))
    depths = rules.exits(found, threshold, picked)
    assert torch.equal(depths, out.trace.depth.amax(-1)) and len(depths.unique()) > 1


@pytest.mark.parametrize("readouts", ["shared", "own"])
@pytest.mark.parametrize("outputs", ["class", "dense"])
def test_images_that_are_done_leave(outputs, readouts, monkeypatch):
    """A block computes only those that go on; the host waits once a depth, where confidences decide, and else never."""
    model, x = tiny(outputs=outputs, readouts=readouts), images(12)
    model.checks = False  # they look at the answers
    batches, waits, tolist = [], [], torch.Tensor.tolist
    for block in model.blocks:
        block.register_forward_hook(lambda module, given, out: batches.append(len(out)))
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: (waits.append(0), tolist(self))[1])
    depth = [1, 3, 2, 4] * 3
    with Sizes() as sizes:
        out = model(x, depth=depth)
    assert batches == [12, 9, 6, 3] and not waits and not sizes.found
    for i in range(12):
        torch.testing.assert_close(out.logits[i], model.run(x[i : i + 1], depth=depth[i]).logits[0])
        torch.testing.assert_close(out.features[i], model.run(x[i : i + 1], depth=depth[i]).features[0])
    if outputs == "class":
        sure = model.every(x)[:, -1].softmax(-1).amax(-1)  # (L, B)
        # One at which images leave at as many depths as can be.
        threshold = max(sure[:-1].flatten().tolist(), key=lambda t: len((sure >= t).int().argmax(0).unique()))
        waits.clear()
        batches.clear()
        with Sizes() as sizes:
            out = model(x, exit=threshold)
        assert batches == out.trace.counts.count_nonzero(-1).numpy().tolist() and len(set(batches)) > 2
        assert len(waits) == 3 and not sizes.found


class Sizes(TorchDispatchMode):
    """Finds operations that read their output's size, or a number, off the device."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in ("aten::nonzero", "aten::_local_scalar_dense", "aten::masked_select"):
            self.found.append(func)
        return func(*args, **kwargs or {})


def test_oracle_is_the_bound(seen):
    model, _, _, _, found = seen
    best = rules.oracle(model, found)
    assert best["top1"] == pytest.approx(100 * float(found.correct.flatten(0, 2).any(0).float().mean()), abs=1e-3)
    assert best["top1"] >= float(found.top1.max())
    everything_right = measure.Grid(torch.ones_like(found.correct), found.confidence)
    assert rules.oracle(model, everything_right)["gmacs"] == round(setting_macs(model, 4, 1, 16) / 1e9, 4)


def test_policy_learns_who_needs_more():
    """Half the images are right with few tokens, half only with many: REINFORCE tells them apart by their looks."""
    model = tiny(torch.float32)
    x = 0.1 * images(64, torch.float32)
    hard = torch.arange(64) % 2 == 1
    x[hard] += 1.0
    y = torch.where(hard, 1, 0)

    class Known(dwindle.AdaPerceiver):
        def every(self, x, width=None, depths=None, patches=None, linear=None):
            assert depths == [2, 4]
            said = torch.zeros(3, len(x), 5)
            needs = x.mean((1, 2, 3)) > 0.5
            said[:, ~needs, 0], said[:2, needs, 0], said[2, needs, 1] = 4.0, 4.0, 4.0
            return torch.stack([torch.zeros_like(said), said])  # with two blocks it knows nothing

    known = Known(**model.config)
    known.load_state_dict(model.state_dict())
    known.requires_grad_(False)
    epochs = ([(x, y)] for _ in range(150))
    settings = [(4, 4), (8, 2), (16, 4)]
    wanted = [(0.2, network.token_choices(known)), (0.2, settings), (0.2, network.token_choices(known))]
    policy, other, again = network.train_policies(known, epochs, wanted, lr=3e-3)
    picked = policy(known.embed(x)).argmax(-1)
    assert (picked[hard] == 2).float().mean() > 0.9 and (picked[~hard] == 0).float().mean() > 0.9
    tokens, depth = other.choose(known.embed(x))
    assert (tokens[hard] == 16).float().mean() > 0.9 and (depth == 4).float().mean() > 0.9
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), again.parameters()))
    tokens, depth = policy.choose(known.embed(x))
    assert torch.equal(tokens, torch.tensor(model.tokens)[picked]) and depth.eq(4).all()


def test_choices_worth_having(seen):
    """Fewest blocks within half a point of all, and the largest setting."""
    model = seen[0]
    correct = torch.zeros(3, 4, 3, 1000, dtype=torch.bool)
    for g, hits in enumerate(((500, 600, 700, 700), (300, 696, 699, 700), (100, 800, 796, 800))):
        for depth, count in enumerate(hits):
            correct[-1, depth, g, :count] = True
    some = measure.Grid(correct, torch.zeros(correct.shape))
    assert network.setting_choices(model, some) == [(4, 3), (8, 2), (16, 2), (16, 4)]
    assert network.setting_choices(model, some, within=0)[-1] == (16, 4)
    assert network.token_choices(model) == [(4, 4), (8, 4), (16, 4)]


def test_a_learned_choice_in_the_table_is_what_runs(seen):
    """Answers and cost of tokens and depths per image, and with early exit on top."""
    model, x, y, _, found = seen
    policy = network.PolicyNetwork(model, [(4, 2), (8, 3), (16, 4)])
    policy.forward = lambda patches: torch.eye(3)[torch.arange(len(patches)) % 3]
    patches, picked = model.embed(x), torch.arange(48) % 3
    threshold = float(found.confidence[-1, :-1].median())
    for tau in (None, threshold):
        out = model(x, *policy.choose(patches), exit=tau)
        row = rules.learned(model, found, policy, picked, 0.1, tau)
        assert row["top1"] == pytest.approx(100 * float((out.logits.argmax(-1) == y).float().mean()), abs=1e-3)
        cost = float((model.macs(out.trace) + policy.macs).mean()) / 1e9
        assert row["gmacs"] == pytest.approx(cost, abs=1e-4) and row["policy"].startswith("RL (settings, lambda = 0.1")


@pytest.mark.parametrize("exit_depths", [None, [2], [1, 3], [3, 1, 3], [4], [1, 2, 3, 4]])
def test_early_exit_after_some_blocks(seen, exit_depths):
    """The table and the network agree on answers, depths, read-outs and cost; none leaves elsewhere."""
    model, x, y, _, found = seen
    threshold, picked = float(found.confidence[-1, :-1].median()), torch.arange(48) % 3
    most = torch.tensor([4, 3, 4, 2])[torch.arange(48) % 4]
    tokens = torch.tensor(model.tokens)[picked]
    for limit in (None, most):
        out = model(x, tokens, limit, exit=threshold, exits=exit_depths)
        correct, macs = rules.early_exit(model, found, threshold, picked, limit, exit_depths)
        assert torch.equal(correct, out.logits.argmax(-1) == y)
        torch.testing.assert_close(macs, model.macs(out.trace))
        depths = out.trace.depth.amax(-1)
        assert torch.equal(depths, rules.exits(found, threshold, picked, limit, exit_depths))
        early = depths < (4 if limit is None else limit)
        assert set(depths[early].tolist()) <= set(exit_depths or (1, 2, 3)) and (early.any() or exit_depths == [4])
        looked = out.trace.stack("read").amax(-1).sum(0)  # (B,)
        expected = [1 + len({at for at in exit_depths or (1, 2, 3, 4) if at < depth}) for depth in depths.tolist()]
        assert looked.tolist() == expected


def test_bad_exits(seen):
    model, x = seen[0], seen[1]
    for given in ([], [0], [5], [2.5]):
        with pytest.raises(dwindle.DwindleError, match=r"exits = .*from 1 to 4"):
            model(x, exit=0.5, exits=given)
    with pytest.raises(dwindle.DwindleError, match="give exit, the confidence"):
        model(x, exits=[2])


def test_a_policy_is_kept(seen, tmp_path):
    model, x = seen[0], seen[1]
    for choices in (network.token_choices(model), [(4, 2), (16, 3), (16, 4)]):
        policy = network.PolicyNetwork(model, choices)
        again = network.load_policy(model, network.save_policy(policy, tmp_path / "policy.safetensors"))
        assert again.choices == policy.choices == choices and not again.training
        torch.testing.assert_close(again(model.embed(x)), policy(model.embed(x)))
        picked = torch.zeros(48, dtype=torch.long)
        one, other = (rules.learned(model, seen[4], p, picked, 0.1) for p in (policy, again))
        assert one == other
    with pytest.raises(dwindle.DwindleError, match=r"\(16, 3\).*this network has tokens \(4, 8\) and 4 blocks"):
        network.load_policy(tiny(torch.float32, tokens=(4, 8)), tmp_path / "policy.safetensors")
    for said in ("nonsense", "[]", "[4, 8]", "{}", '[["a", 2]]'):
        weights = {name: value.contiguous() for name, value in policy.state_dict().items()}
        save_file(weights, tmp_path / "bent.safetensors", {"choices": said})
        with pytest.raises(dwindle.DwindleError, match="holds no learned policy"):
            network.load_policy(model, tmp_path / "bent.safetensors")
    with pytest.raises(dwindle.DwindleError, match="does not fit this PolicyNetwork"):
        network.load_policy(tiny(torch.float32, width=64, widths=(64,)), tmp_path / "policy.safetensors")


def test_policy_network_cost(seen):
    from torch.utils.flop_counter import FlopCounterMode

    model, x = seen[0], seen[1]
    policy, patches = network.PolicyNetwork(model), model.embed(x[:1])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        policy(patches)
    assert counter.get_total_flops() / 2 == policy.macs


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    root, draw = tmp_path_factory.mktemp("policies"), np.random.default_rng(0)
    for split, count in (("train", 4), ("val", 3)):
        for c in "abcde":
            (root / "data" / split / c).mkdir(parents=True)
            for i in range(count):
                pixels = draw.integers(0, 255, (32, 32, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(root / "data" / split / c / f"{i}.png")
    dwindle.save(tiny(torch.float32), root / "ada")
    dwindle.save(tiny(torch.float32, outputs="dense"), root / "dense")
    return {"data": root / "data", "ada": root / "ada", "dense": root / "dense", "root": root}


def test_policies_command(places):
    line = "policies {ada} --data {data} --epochs 1 --prices 0.1 --batch 4 --out {root}/table --device cpu"
    line += " --thresholds 0.5,0.9,0.95 --exits 2,3"
    done = run(line, **places)
    rows = done.json["rows"]
    assert len(rows) == 3 + 2 * 9 + 2 * 4 + 1 and done.json["images"] == 15
    (row,) = (r for r in rows if r["policy"] == "exit (t = 16, tau = 0.5, after 2-3)")
    found = run("eval {ada} --data {data} --exit 0.5 --exits 2,3 --device cpu", **places).json
    assert found["top1"] == pytest.approx(row["top1"], abs=1e-2) and found["exits"] == [2, 3]
    assert found["gmacs"] == pytest.approx(row["gmacs"], abs=1e-4)
    assert all({"policy", "top1", "gmacs", "fixed_top1", "best_fixed_top1"} <= set(row) for row in rows)
    assert json.loads((places["root"] / "table" / "policies.json").read_text()) == rows
    for kind in ("tokens", "settings"):
        with safe_open(places["root"] / "table" / f"policy_{kind}_0.1.safetensors", "pt") as file:
            choices = json.loads(file.metadata()["choices"])
            assert len(choices) == len(file.get_tensor("head.weight")) and choices[-1] == [16, 4]
    for kind, tau in (("tokens", None), ("settings", "0.5")):
        leave = f" --exit {tau}" if tau else ""
        found = run(
            f"eval {{ada}} --data {{data}} --device cpu --policy {{root}}/table/policy_{kind}_0.1.safetensors{leave}",
            **places,
        ).json
        (row,) = (r for r in rows if r["policy"] == f"RL ({kind}, lambda = 0.1" + (f", tau = {tau})" if tau else ")"))
        assert found["top1"] == pytest.approx(row["top1"], abs=1e-2)
        assert found["gmacs"] == pytest.approx(row["gmacs"], abs=2e-4) and "policy" in found


def test_grid_command(places):
    line = "grid {ada} --data {data} --out {root}/grid --between 2,6,20 --seconds 0.1 --batch 4 --device cpu"
    done = run(line, **places)
    assert done.json["images"] == 15 and len(done.json["between"]) == 6
    names = {p.name for p in (places["root"] / "grid").iterdir()}
    assert names == {"grid.json", "tradeoff.png", "latency.png", "interpolation.png"}
    assert len(json.loads((places["root"] / "grid" / "grid.json").read_text())["rows"]) == 36


def test_grid_tells_what_mends_a_read_out(places, monkeypatch):
    monkeypatch.setattr(measure, "lagging", lambda found: [2, 4])
    own = dwindle.AdaPerceiver.preset("tiny", classes=5, readouts="own")
    dwindle.save(own, places["root"] / "own")
    for name, told in (("own", True), ("ada", False)):
        done = run(f"grid {{root}}/{name} --data {{data}} --out {{root}}/lag --seconds 0.1 --device cpu", **places)
        said = f'--set weights={places["root"]}/{name} --set freeze_backbone=true --set "reinit_from={{2: 1, 4: 3}}"'
        assert done.json["lagging"] == [2, 4] and (said in done.err) == told


def test_grid_of_a_dense_network(places):
    """Fig. 15-17, an image each."""
    done = run("grid {dense} --data {data} --out {root}/pca --limit 2 --device cpu", **places)
    assert done.json["images"] == 2 and len(list((places["root"] / "pca").glob("components_*.png"))) == 2


@pytest.mark.parametrize(
    "line, said",
    [
        ("policies {dense} --data {data}", "no AdaPerceiver that classifies"),
        ("policies aht_deit_tiny_imagenet --data {data}", "takes AdaPerceivers"),
        ("policies {ada} --data {data} --thresholds none", "--thresholds none"),
        ("policies {ada} --data {data} --thresholds 0.5,1.5", "confidences"),
        ("policies {ada} --data {data} --epochs -1", "--epochs -1"),
        ("policies {ada} --data {data} --thresholds nan", "--thresholds nan"),
        ("policies {ada} --data {data} --prices 0.1,inf", "--prices 0.1,inf"),
        ("policies {ada} --data {data} --out {ada}/config.json", "is a file; choose another"),
        ("eval {ada} --data {data} --exits 2", "give exit, the confidence"),
        ("eval {ada} --data {data} --exit 0.5 --exits 2,9", "from 1 to 4"),
        ("eval {ada} --data {data} --exit 0.5 --exits two", "--exits two"),
        ("eval aht_deit_tiny_imagenet --data {data} --exits 2", "--exits 2 is for AdaPerceivers"),
        ("policies {ada} --data {data} --exits 7", "exits = 7"),
        ("eval {ada} --data {data} --policy nowhere.safetensors", "nowhere.safetensors is missing"),
        ("eval {ada} --data {data} --policy {ada}/config.json", "truncated or no safetensors file"),
        ("eval {ada} --data {data} --policy {ada}/model.safetensors", "holds no learned policy"),
        ("eval {ada} --data {data} --policy p --tokens 4", "--tokens 4: --policy chooses it"),
        ("eval aht_deit_tiny_imagenet --data {data} --policy p", "--policy p is for AdaPerceivers"),
        ("grid {ada} --data {data} --out {ada}/config.json", "is a file; choose another"),
        ("grid {ada} --data {data} --seconds nan --out {root}/x", "--seconds nan"),
        ("policies {ada} --data {data} --batch 0", "--batch 0"),
        ("grid {ada} --data {data} --batch 0 --out {root}/x", "--batch 0"),
        ("grid {ada} --data {data} --between 8,65 --out {root}/x", "from 1 to 64"),
        ("grid {ada} --data {data} --limit 0 --out {root}/x", "--limit 0"),
        ("grid {ada} --data {root}/nowhere --out {root}/x", "nowhere"),
        ("eval {ada} --data {data} --tokens 99", "99"),
        ("eval {ada} --data {data} --exit 2", "2"),
        ("eval {ada} --data {data} --threshold 0.5", "is for vision transformers"),
        ("eval aht_deit_tiny_imagenet --data {data} --depth 3", "AdaPerceivers"),
        ("eval {dense} --data {data}", "features of patches, no maps"),
        ("view {ada} {root}/x.png", "x.png"),
        ("bench {ada} --data {data}", "both or none of them"),
        ("bench {ada} --exit 0.9", "both or none of them"),
        ("bench {ada} --exits 2", "both or none of them"),
        ("bench {ada} --data {data} --exit 1.5", "confidence at which an image leaves"),
        ("bench {ada} --data {data} --exit often", "--exit often"),
        ("bench {ada} --data {data} --exit 0.5 --exits 9", "from 1 to 4"),
        ("bench {ada} --data {root}/nowhere --exit 0.5", "nowhere"),
        ("bench {dense} --data {data} --exit 0.5", "a dense network"),
        ("bench {ada} --static graph", "is for vision transformers"),
        ("bench aht_deit_tiny_imagenet --exit 0.9", "--exit 0.9 is for AdaPerceivers"),
        ("bench adaperceiver_huge", "huge"),
        ("predict {ada} --data {data} --out {root}/x.parquet", "is an AdaPerceiver"),
        ("report {ada} --data {data} --out {root}/x", "is an AdaPerceiver"),
    ],
)
def test_bad_commands(places, line, said):
    refused(run(line + " --device cpu", **places), said)


def test_eval_bench_and_view(places):
    def last(line):
        return run(line + " --device cpu", **places).json

    full = last("eval {ada} --data {data} --batch 4 --workers 0")
    less = last("eval {ada} --data {data} --tokens 4 --depth 2 --width 16 --workers 0")
    early = last("eval {ada} --data {data} --exit 0.01 --workers 0")
    assert full["images"] == 15 and full["gmacs"] == full["gmacs_static"] > less["gmacs"]
    assert early["gmacs"] < full["gmacs"] and (less["tokens"], early["exit"]) == (4, 0.01)
    rows = last("bench {ada} --batch 1,2 --seconds 0.05")["rows"]
    assert [r["batch"] for r in rows] == [1] * 5 + [2] * 5 and rows[0]["speedup"] == 1
    assert rows[0]["gmacs"] > rows[1]["gmacs"] and rows[1]["tokens"] == rows[0]["tokens"] // 2
    rows = last("bench {ada} --data {data} --batch 1,4 --exit 0.01,0.999 --exits 2 --seconds 0")["rows"]
    assert [(r["batch"], r["exit"], r["exits"]) for r in rows] == [
        (batch, *asked)
        for batch in (1, 4)
        for asked in [(None, None), (0.01, None), (0.01, [2]), (0.999, None), (0.999, [2])]
    ]
    assert rows[0]["gmacs"] == full["gmacs"] and rows[0]["promised"] == rows[0]["speedup"] == 1
    assert rows[1]["gmacs"] == rows[6]["gmacs"] == early["gmacs"] < rows[2]["gmacs"] < rows[0]["gmacs"]
    assert rows[1]["promised"] > rows[2]["promised"] > 1
    later = last("eval {ada} --data {data} --exit 0.999 --exits 2 --workers 0")
    assert rows[4]["gmacs"] == rows[9]["gmacs"] == later["gmacs"]
    seen = last("view {ada} {data}/val/a/0.png {data}/val/b/0.png --out {root}/seen")
    assert [row["image"] for row in seen["images"]] == ["0.png", "0.png"]
    assert all(1 <= row["depth"] <= 4 for row in seen["images"])
    assert len(list((places["root"] / "seen").glob("*.png"))) == len(seen["figures"]) == 2


def test_the_same_pictures_of_a_trace():
    from dwindle.show.view import summary

    out = tiny(torch.float32)(images(4, torch.float32), tokens=[4, 8, 16, 16], depth=[1, 2, 3, 4])
    assert summary(out.trace).axes and out.trace.mean_depth.tolist() == [1, 2, 3, 4]


def test_components(tmp_path):
    model = tiny(torch.float32, outputs="dense")
    path = figures.components(model, images(1, torch.float32), tmp_path / "pca.png")
    assert path.stat().st_size > 1000
    picture, basis = figures.principal(torch.randn(16, 32), (4, 4))
    assert picture.shape == (4, 4, 3) and picture.min() >= 0 and picture.max() <= 1 and basis.shape == (32, 3)
    with pytest.raises(dwindle.DwindleError, match="dense network"):
        figures.components(tiny(torch.float32), images(1, torch.float32), tmp_path / "no.png")

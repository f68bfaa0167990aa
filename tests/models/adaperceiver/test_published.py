"""Checkpoints in the authors' layout, beside a plain reading of the paper and of what their public code adds to it."""

from __future__ import annotations

import cmath
import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import dwindle
from dwindle.models.adaperceiver.blocks import rope_angles, rotate
from dwindle.models.adaperceiver.model import Answers
from dwindle.models.adaperceiver.recipe import AdaRecipe
from dwindle.models.adaperceiver.train import AdaLearner
from shared.perceiver import images

WIDTH, HEADS, DEPTH, MOST, GRAINS, RATIO = 32, 2, 3, 16, (4, 8, 16), 2.57
CONFIG = {
    **{"embed_dim": WIDTH, "num_heads": HEADS, "depth": DEPTH, "max_latent_tokens": MOST, "rope_theta": 10000},
    **{"ffn_ratio": RATIO, "qkv_bias": True, "proj_bias": True, "ls_init_values": 1e-5, "proj_drop": 0.0},
    **{"attn_drop": 0.0, "drop_path": 0.0, "head_drop": 0.0, "act_layer": "gelu", "norm_layer": "layernorm"},
    **{"ffn_layer": "mlp", "attn_layer": "flex", "process_token_init": "learned", "block_mask": "block"},
    **{"mask_token_grans": [*GRAINS], "mat_dims": [16, 24, 32], "img_size": 28, "in_channels": 3, "patch_size": 14},
    **{"num_classes": 5, "use_embed_ffn": True, "use_output_ffn": False},
}


class Plain:
    """The network by its weights' published names, token by token of the text, with nothing shared or made faster."""

    def __init__(self, weights: dict[str, torch.Tensor], config: dict) -> None:
        self.w, self.config = weights, config

    def linear(self, name, x, outputs=None, inputs=None):
        return x[..., :inputs] @ self.w[f"{name}.weight"][:outputs, :inputs].T + self.w[f"{name}.bias"][:outputs]

    def norm(self, name, x):
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
        return x * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def ffn(self, name, x, hidden=None):
        x = F.gelu(self.linear(f"{name}.fc1", x, outputs=hidden))
        return self.linear(f"{name}.fc2", x, inputs=hidden)

    def rope(self, x):
        """(B, N, D): each pair of neighbouring channels as a complex number, turned; beyond MOST tokens by less."""
        count, size = x.shape[1], WIDTH // HEADS
        slower = max(1.0, count / MOST)
        out = x.clone()
        for n in range(count):
            for c in range(0, WIDTH, 2):
                angle = n / slower / 10000 ** ((c % size) / size)
                z = torch.complex(x[:, n, c], x[:, n, c + 1]) * cmath.exp(1j * angle)
                out[:, n, c], out[:, n, c + 1] = z.real, z.imag
        return out

    def attend(self, name, sink, source, turn_sink, turn_source, allowed=None):
        q, k, v = (self.linear(f"{name}.{part}", x) for part, x in zip("qkv", (sink, source, source)))
        q, k = (self.rope(x) if turn else x for x, turn in ((q, turn_sink), (k, turn_source)))
        found = []
        for head in zip(*(x.chunk(HEADS, -1) for x in (q, k, v))):
            scores = head[0] @ head[1].mT / (WIDTH // HEADS) ** 0.5
            scores = scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)
            found.append(scores.softmax(-1) @ head[2])
        return self.linear(f"{name}.proj", torch.cat(found, -1))

    def cross(self, name, sink, source, turn_sink=False, turn_source=False):
        sink_n, source_n = self.norm(f"{name}.snk_norm", sink), self.norm(f"{name}.src_norm", source)
        return sink + self.attend(f"{name}.cattn", sink_n, source_n, turn_sink, turn_source)

    def __call__(self, x, tokens, depth, width):
        patch = self.config["patch_size"]
        cells = F.unfold(x, patch, stride=patch).mT  # (B, P, C patch patch)
        conv = self.w["patch_embed.embed.proj.weight"].flatten(1)
        patches = cells @ conv.T + self.w["patch_embed.embed.proj.bias"] + self.w["patch_embed.pos_embed"]
        patches = self.ffn("patch_embed.ffn", self.norm("patch_embed.norm", patches))
        z = self.cross("read_head", self.w["process_latents.token"].expand(len(x), tokens, -1), patches, turn_sink=True)
        ends = [end for end in self.config["mask_token_grans"] if end < tokens] + [tokens]
        sees = torch.tensor([next(end for end in ends if n < end) for n in range(tokens)])
        allowed = torch.arange(tokens) < sees[:, None] if self.config["block_mask"] == "block" else None
        for at in range(depth):
            name = f"blocks.{at}"
            rows = self.norm(f"{name}.norm1", z)
            z = z + self.w[f"{name}.ls1.gamma"] * self.attend(f"{name}.attn", rows, rows, True, True, allowed)
            rows = self.norm(f"{name}.norm2", z)
            z = z + self.w[f"{name}.ls2.gamma"] * self.ffn(f"{name}.ffn", rows, int(width * RATIO))
        out = self.cross("write_head", self.w["output_latents.token"].expand(len(x), 1, -1), z, turn_source=True)
        if self.config["use_output_ffn"]:
            answers = self.ffn("output_adapter.ffn", self.norm("output_adapter.norm", out))
        else:
            answers = self.linear("output_adapter.ffn", out)
        if "output_feat_dim" not in self.config:
            return answers[:, 0], None
        start = self.linear("output_latents_feat.proj", patches)
        out = self.cross("write_head_feat", start, z, turn_source=True)
        return answers[:, 0], self.ffn("output_adapter_feat.ffn", self.norm("output_adapter_feat.norm", out))


def weights_of(config):
    """Their names and shapes, with numbers large enough that every part counts."""
    hidden, shapes = int(WIDTH * RATIO), {"process_latents.token": (WIDTH,), "output_latents.token": (1, WIDTH)}

    def add(name, *shape):
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = shape, shape[:1]

    def ffn(name, outputs=WIDTH):
        add(f"{name}.fc1", hidden, WIDTH)
        add(f"{name}.fc2", outputs, hidden)

    def attention(name):
        for part in ("q", "k", "v", "proj"):
            add(f"{name}.{part}", WIDTH, WIDTH)

    patch, cells = config["patch_size"], (config["img_size"] // config["patch_size"]) ** 2
    add("patch_embed.embed.proj", WIDTH, 3, patch, patch)
    shapes["patch_embed.pos_embed"] = (1, cells, WIDTH)
    add("patch_embed.norm", WIDTH)
    ffn("patch_embed.ffn")
    for at in range(DEPTH):
        for part in ("1", "2"):
            add(f"blocks.{at}.norm{part}", WIDTH)
            shapes[f"blocks.{at}.ls{part}.gamma"] = (WIDTH,)
        attention(f"blocks.{at}.attn")
        ffn(f"blocks.{at}.ffn")
    features = config.get("output_feat_dim")
    for head in ("read_head", "write_head", *(["write_head_feat"] if features else [])):
        add(f"{head}.src_norm", WIDTH)
        add(f"{head}.snk_norm", WIDTH)
        attention(f"{head}.cattn")
    if config["use_output_ffn"]:
        add("output_adapter.norm", WIDTH)
        ffn("output_adapter.ffn", config["num_classes"])
    else:
        add("output_adapter.ffn", config["num_classes"], WIDTH)
    if features:
        add("output_latents_feat.proj", WIDTH, WIDTH)
        add("output_adapter_feat.norm", WIDTH)
        ffn("output_adapter_feat.ffn", features)
    draw = torch.Generator().manual_seed(0)
    return {name: 0.3 * torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def written(folder, **changes):
    folder.mkdir()
    config = CONFIG | changes
    (folder / "config.json").write_text(json.dumps(config))
    weights = weights_of(config)
    save_file(weights, folder / "model.safetensors")
    return Plain({name: value.double() for name, value in weights.items()}, config)


@pytest.mark.parametrize(
    "changes", [{}, {"use_output_ffn": True, "block_mask": "none"}, {"output_feat_dim": 20}], ids=str
)
def test_the_published_network(tmp_path, changes):
    """Trained and untrained numbers of tokens, more tokens than trained, depths, trained and untrained widths."""
    plain, x = written(tmp_path / "theirs", **changes), images(2, size=28)
    model = dwindle.load(tmp_path / "theirs").double()
    for tokens, depth, width in ((16, 3, 32), (4, 1, 16), (5, 2, 20), (24, 3, 7)):
        answers, features = plain(x, tokens, depth, width)
        out = model(x, tokens, depth, width)
        torch.testing.assert_close(out.logits, answers, atol=1e-12, rtol=1e-12)
        if features is not None:
            torch.testing.assert_close(out.features, features, atol=1e-12, rtol=1e-12)
    assert dwindle.io.images.preprocess_of(model).mean[0] == 0.48145466


def test_it_is_saved_as_any_other(tmp_path):
    written(tmp_path / "theirs", output_feat_dim=20)
    model, x = dwindle.load(tmp_path / "theirs"), images(3, torch.float32, size=28)
    dwindle.save(model, tmp_path / "ours")
    again = dwindle.load(tmp_path / "ours")
    out, expected = again(x, [4, 16, 16], exit=0.3), model(x, [4, 16, 16], exit=0.3)
    assert torch.equal(out.logits, expected.logits) and torch.equal(out.features, expected.features)
    answers = model.answers(x, torch.tensor([16, 32, 20]), torch.tensor([4, 16, 8]))
    assert answers.features.tokens.shape == (3, 3, 4, 20) and answers.features.depths.shape == (3, 3, 4, 20)
    torch.testing.assert_close(answers.features.tokens[0], model(x, 4, width=[16, 32, 20]).features)
    torch.testing.assert_close(answers.features.depths[1], model(x, 16, 2, [16, 32, 20]).features)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"block_mask": "causal"}, "causal"),
        ({"ffn_layer": "swiglu"}, "swiglu"),
        ({"qkv_bias": False}, "qkv_bias"),
        ({"attn_drop": 0.1}, "attn_drop"),
        ({"conv_adapter": "x"}, "conv_adapter"),
        ({"num_classes": 7, "weights": 5}, "weights"),
    ],
)
def test_what_has_no_counterpart_is_refused(tmp_path, changes, said):
    written(tmp_path / "theirs", **changes)
    with pytest.raises(dwindle.DwindleError, match=said):
        dwindle.load(tmp_path / "theirs")


def test_weights_that_do_not_fit_are_refused(tmp_path):
    plain = written(tmp_path / "theirs")
    path, weights = tmp_path / "theirs" / "model.safetensors", {n: v.float() for n, v in plain.w.items()}
    save_file({n: v for n, v in weights.items() if n != "blocks.1.attn.k.bias"}, path)
    with pytest.raises(dwindle.DwindleError, match=r"lacks the weight 'blocks.1.attn.k.bias'"):
        dwindle.load(tmp_path / "theirs")
    save_file(weights | {"more": torch.zeros(1)}, path)
    with pytest.raises(dwindle.DwindleError, match=r"more.* is not part of it"):
        dwindle.load(tmp_path / "theirs")
    config = tmp_path / "theirs" / "config.json"
    config.write_text(json.dumps({name: value for name, value in CONFIG.items() if name != "depth"}))
    with pytest.raises(dwindle.DwindleError, match="lacks depth"):
        dwindle.load(tmp_path / "theirs")


def test_rotary_pairs_are_halves_in_another_order():
    """A permutation of a head's channels: scores of queries and keys are the same."""
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    order = torch.arange(8).view(4, 2).T.flatten()  # the first of each pair, then the second
    halves, pairs = (rope_angles(5, 8, 100.0, x, pairs=named) for named in (False, True))
    torch.testing.assert_close(rotate(x, pairs)[..., order], rotate(x[..., order], halves))
    torch.testing.assert_close(rotate(rotate(x, pairs), pairs, back=True), x)
    beyond, at = rope_angles(10, 8, 100.0, x, most=5), torch.arange(10)[:, None] / 2
    torch.testing.assert_close(beyond.cos, (at * 100.0 ** (-torch.arange(0, 8, 2).double() / 8)).cos())


def test_the_papers_presets():
    with torch.device("meta"):
        paper, distill = (dwindle.AdaPerceiver.preset(name) for name in ("paper", "paper_distill"))
        dense = dwindle.AdaPerceiver.preset("paper_dense")
    assert (paper.patch, distill.patch, dense.patch) == (16, 14, 14) and distill.patches() == 256
    assert {module.eps for module in paper.modules() if isinstance(module, torch.nn.LayerNorm)} == {1e-6}
    assert distill.readouts[0].dense.head[3].out_features == 1280 and dense.outputs == "dense"


@pytest.mark.parametrize("mean, count", [("blocks", 4.0), ("weights", 2.5)])
def test_depth_losses_are_divided(mean, count):
    learner = AdaLearner.__new__(AdaLearner)
    learner.recipe = AdaRecipe(depth_mean=mean)
    learner.loss = lambda answers, y, taught: answers
    answers = Answers(torch.zeros(3), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    terms = learner.loss_terms(answers, torch.zeros(2))
    assert float(terms["depths"]) == pytest.approx((1 + 4 + 9 + 16) / 4 / count)

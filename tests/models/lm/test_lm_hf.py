"""TSA on Hugging Face's own GPT-2 and Llama: the models stay what they are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import dwindle
from dwindle.errors import DwindleError
from dwindle.models.lm import TSA, MoD, Static, adapt_lm
from dwindle.models.lm.execute import Cache, tlops_saved
from dwindle.models.lm.generate import generate
from shared.routers import ROUTERS, ids_for
from shared.routers import build as build_own

transformers = pytest.importorskip("transformers", reason="extra `hf` is not installed")


def gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=20, n_positions=24, n_embd=32, n_layer=4, n_head=2)
    )


def llama(kv_heads: int = 2):
    config = transformers.LlamaConfig(
        vocab_size=20,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=24,
    )
    return transformers.LlamaForCausalLM(config)


def like_llama(kind: str, **changes):
    """The families that have Llama's parts under Llama's names."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"vocab_size": 20, "num_key_value_heads": 2, "max_position_embeddings": 24, **changes}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


FAMILIES = {
    "mistral": lambda: like_llama("Mistral"),
    "qwen2": lambda: like_llama("Qwen2"),
    "qwen3": lambda: like_llama("Qwen3", head_dim=16),
}
MODELS = {"gpt2": gpt2, "llama": llama, "llama_mha": lambda: llama(4), **FAMILIES}


def build(name, router, dtype=torch.float64):
    torch.manual_seed(0)
    model = adapt_lm(MODELS[name](), router).to(dtype).eval()
    for key, value in model.named_parameters():
        if value.dim() > 1 and "gates" not in key:
            torch.nn.init.normal_(value, std=0.3)
        elif value.dim() > 1:
            torch.nn.init.normal_(value, std=0.5)
    return model


IDS = torch.randint(0, 20, (3, 17), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("layout", ["masked", "packed"])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_nothing_skipped_is_the_wrapped_model(name, layout):
    model = build(name, Static())
    keys = set(MODELS[name]().state_dict())
    torch.testing.assert_close(model(IDS, layout).logits, model.lm(IDS).logits, atol=1e-10, rtol=1e-8)
    assert set(model.lm.state_dict()) == keys
    opened = build(name, TSA(open=60.0))
    torch.testing.assert_close(opened(IDS, layout).logits, opened.lm(IDS).logits, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("keys", ["offered", "withheld"])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_masked_packed_and_cached_are_one(name, keys):
    model = build(name, TSA(tau=0.5, open=0.0, keys=keys))
    masked, packed, cache = model(IDS, "masked"), model(IDS, "packed"), Cache()
    assert torch.equal(masked.trace.live, packed.trace.live) and 0.1 < tlops_saved(packed.trace).mean() < 0.7
    torch.testing.assert_close(masked.logits, packed.logits, atol=1e-12, rtol=1e-11)
    parts = [model(part, cache=cache).logits for part in IDS.split([6, 1, 1, 5, 4], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), packed.logits, atol=1e-11, rtol=1e-10)
    made = generate(model, IDS[:, :4], 8, temperature=0).ids
    assert torch.equal(model(made[:, :-1]).logits[:, 3:].argmax(-1), made[:, 4:])


SIDES = {
    "left": torch.tensor([[0] * 6 + [1] * 11, [1] * 17, [0] * 2 + [1] * 15]),
    "right": torch.tensor([[1] * 11 + [0] * 6, [1] * 17, [1] * 3 + [0] * 14]),
    "both": torch.tensor([[0] * 3 + [1] * 11 + [0] * 3, [1] * 17, [0] * 16 + [1]]),
}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_padding_is_as_the_wrapped_model_has_it(name, side):
    model, mask = build(name, Static()), SIDES[side]
    places = (mask.cumsum(1) - 1).clamp_min(0)
    wanted = model.lm(IDS, attention_mask=mask, position_ids=places).logits
    for layout in ("masked", "packed"):
        out = model(IDS, layout, attention_mask=mask)
        torch.testing.assert_close(out.logits[mask.bool()], wanted[mask.bool()], atol=1e-10, rtol=1e-8)
        assert tlops_saved(out.trace, out.real).abs().max() < 1e-12


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("router", [name for name in ROUTERS if not name.startswith("Random")])
@torch.no_grad()
def test_a_padded_sequence_is_what_it_is_alone(router, side):
    """Its decisions, its answers, what it writes; and padding runs nothing."""
    model, mask, ids = build_own(ROUTERS[router](), torch.float64), SIDES[side].bool(), ids_for(3, 17)
    out = model(ids, attention_mask=mask)
    made = generate(model, ids, 4, temperature=0, attention_mask=mask)
    assert not out.trace.live[:, ~mask].any() and not made.live[:, F.pad(~mask, (0, 3))].any()
    for i in range(3):
        alone, own = model(ids[i][mask[i]][None]), mask[i]
        assert torch.equal(out.trace.live[:, i, own], alone.trace.live[:, 0])
        torch.testing.assert_close(out.logits[i, own], alone.logits[0], atol=1e-11, rtol=1e-10)
        written = generate(model, ids[i][own][None], 4, temperature=0)
        assert torch.equal(made.ids[i, 17:], written.ids[0, -4:])
        assert torch.equal(made.live[:, i, F.pad(own, (0, 3), value=True)], written.live[:, 0])
        saved = tlops_saved(out.trace, out.real)[i]
        torch.testing.assert_close(saved, tlops_saved(alone.trace)[0], atol=1e-12, rtol=0)


def test_padding_teaches_nothing():
    """The loss and its gradients are those of the sequences alone; targets of padding are -100."""
    model, mask = build_own(TSA(penalty=0.5, open=0.0), torch.float64).train(), SIDES["right"]
    ids = ids_for(3, 18)
    x, y = ids[:, :-1], ids[:, 1:].masked_fill(mask == 0, -100)
    padded = model.terms(model(x, attention_mask=mask), y)
    lengths = mask.sum(1).tolist()
    alone = [model.terms(model(x[i : i + 1, :n]), y[i : i + 1, :n]) for i, n in enumerate(lengths)]
    for name in ("task", "depth", "total"):
        mean = sum(n * terms[name] for n, terms in zip(lengths, alone)) / sum(lengths)
        torch.testing.assert_close(padded[name], mean)
    grads = [torch.autograd.grad(total, model.method.gates[0][0].weight)[0] for total in (padded["total"], mean)]
    torch.testing.assert_close(*grads)
    with pytest.raises(DwindleError, match="MoD chooses among all tokens"):
        build_own(MoD()).train()(x, attention_mask=mask)


@pytest.mark.parametrize(
    "mask, said", [([[1, 0, 1]], "padding inside"), ([[0, 0, 0]], "without tokens"), ([[1, 1]], "attention_mask of")]
)
def test_masks_that_cannot_be(mask, said):
    with pytest.raises(DwindleError, match=said):
        build_own(TSA())(IDS[:1, :3], attention_mask=torch.tensor(mask))


@pytest.mark.parametrize("name", MODELS)
def test_it_trains_and_comes_back_from_a_checkpoint(name, tmp_path):
    model = build(name, TSA(penalty=0.1), torch.float32).train()
    model.terms(model(IDS[:, :-1]), IDS[:, 1:])["total"].backward()
    assert all(p.grad is not None for p in model.parameters())
    dwindle.save(model.eval(), tmp_path / "whole")
    again = dwindle.load(tmp_path / "whole")
    with torch.no_grad():
        torch.testing.assert_close(again(IDS).logits, model(IDS).logits, atol=0, rtol=0)
    dwindle.save(model, tmp_path / "gates", what="method")
    with pytest.raises(DwindleError, match="lm="):
        dwindle.load(tmp_path / "gates")


def test_cost_is_that_of_the_family():
    assert build("gpt2", Static()).backbone.shape.row_macs == 12 * 32 * 32
    shape = build("llama", Static()).backbone.shape
    assert shape.row_macs == 32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 48 and shape.key_macs == 2 * 32 * 16


@pytest.mark.parametrize("kind, named", [("Mistral", {}), ("Qwen2", {"use_sliding_window": True})])
@torch.no_grad()
def test_a_sliding_window_bounds_the_context(kind, named):
    """As far as it does not slide, nothing skipped is the wrapped model; more is refused."""
    model = adapt_lm(like_llama(kind, sliding_window=10, **named), Static()).eval()
    assert model.backbone.shape.context == 10
    torch.testing.assert_close(model(IDS[:, :10]).logits, model.lm(IDS[:, :10]).logits, atol=1e-6, rtol=1e-5)
    with pytest.raises(DwindleError, match="context of 10"):
        model(IDS[:, :11])


def test_others_are_refused():
    with pytest.raises(DwindleError, match=r"GPT2LMHeadModel.*MistralForCausalLM.*Qwen3ForCausalLM"):
        adapt_lm(torch.nn.Linear(2, 2), MoD())
    config = transformers.GPT2Config(vocab_size=5, n_embd=8, n_layer=1, n_head=2, scale_attn_by_inverse_layer_idx=True)
    with pytest.raises(DwindleError, match="usual attention"):
        adapt_lm(transformers.GPT2LMHeadModel(config), TSA())

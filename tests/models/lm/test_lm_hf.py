"""TSA on Hugging Face's own GPT-2 and Llama: the models stay what they are."""

from __future__ import annotations

import pytest
import torch

import dwindle
from dwindle.errors import DwindleError
from dwindle.models.lm import TSA, MoD, Static, adapt_lm
from dwindle.models.lm.execute import Cache, tlops_saved
from dwindle.models.lm.generate import generate

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


MODELS = {"gpt2": gpt2, "llama": llama, "llama_mha": lambda: llama(4)}


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


def test_others_are_refused():
    with pytest.raises(DwindleError, match="GPT2LMHeadModel or LlamaForCausalLM"):
        adapt_lm(torch.nn.Linear(2, 2), MoD())
    config = transformers.GPT2Config(vocab_size=5, n_embd=8, n_layer=1, n_head=2, scale_attn_by_inverse_layer_idx=True)
    with pytest.raises(DwindleError, match="usual attention"):
        adapt_lm(transformers.GPT2LMHeadModel(config), TSA())

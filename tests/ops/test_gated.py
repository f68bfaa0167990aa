"""Attention with gated keys: the kernels against the definition, under Triton's interpreter, or on a GPU."""

import pytest
import torch

from dwindle.ops import gated
from dwindle.ops.attention import attend_gated, attend_ref
from shared.kernels import CUDA, DEVICE, kernels


def problem(images, heads, tokens, size, share, seed, dtype=torch.float32):
    """q, k, v as views of one tensor, as a block makes them; gates of 0, of 1, and of as many as a row stands for."""
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(images, tokens, 3, heads, size, generator=generator)
    live = torch.rand(images, tokens, generator=generator) < share
    live[:, 0] = True
    gate = live * torch.randint(1, 5, live.shape, generator=generator)
    weight = torch.randn(images, tokens, heads, size, generator=generator).transpose(1, 2)
    return qkv.to(DEVICE, dtype), gate.float().to(DEVICE), weight.to(DEVICE, dtype)


def plainly(q, k, v, gate, scale):
    """`attend_ref` where nothing can overflow; it has the gradient of gates at 0 as well."""
    weights = (q @ k.mT * scale).exp() * gate[:, None, None, :].to(q.dtype)
    return weights / weights.sum(-1, keepdim=True) @ v


def derived(attend, qkv, gate, weight):
    """What comes out, and the gradients of all that goes in."""
    qkv, gate = qkv.detach().requires_grad_(), gate.detach().requires_grad_()
    out = attend(*qkv.permute(2, 0, 3, 1, 4).unbind(0), gate, 0.3)
    return out, *torch.autograd.grad((out * weight).sum(), (qkv, gate))


@kernels
@pytest.mark.parametrize("seed", range(0, 6, 1 if CUDA else 2))
@pytest.mark.parametrize("images, heads, tokens, size", [(2, 3, 37, 64), (1, 1, 1, 8), (3, 2, 16, 48), (1, 2, 33, 32)])
def test_the_kernels_are_the_definition(images, heads, tokens, size, seed):
    given = problem(images, heads, tokens, size, seed / 5, seed)
    for ours, exact in zip(derived(gated.attend, *given), derived(plainly, *(x.double() for x in given))):
        torch.testing.assert_close(
            ours.double(), exact, atol=1e-5 * max(1.0, float(exact.detach().abs().max())), rtol=1e-4
        )


if CUDA:

    @pytest.mark.parametrize("tokens, size", [(197, 64), (577, 64), (50, 32), (256, 80), (65, 128)])
    def test_bf16_by_the_rule_of_two(tokens, size):
        given = problem(4, 3, tokens, size, 0.6, 0, torch.bfloat16)
        exact, plain = derived(plainly, *(x.double() for x in given)), derived(plainly, *given)
        for ours, theirs, truth in zip(derived(gated.attend, *given), plain, exact):
            error, allowed = ((x.double() - truth).abs().max() for x in (ours, theirs))
            assert error <= 2 * allowed + 1e-5, (float(error), float(allowed))


@kernels
def test_a_key_that_is_out_may_stand_above_all():
    """Its score is 2^500 times that of those who are in: no infinity, and nothing of it in what comes out."""
    q, k, v = (torch.ones(1, 1, 3, 16, device=DEVICE, requires_grad=True) for _ in range(3))
    raised = k + torch.tensor([0.0, 90.0, 0.0], device=DEVICE).view(1, 1, 3, 1)
    gate = torch.tensor([[1.0, 0.0, 2.0]], device=DEVICE, requires_grad=True)
    out = gated.attend(q, raised, v, gate)
    torch.testing.assert_close(out, torch.ones_like(out))
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.square().sum(), (q, k, v, gate)))


@kernels
def test_an_image_with_nobody_left_is_zero():
    qkv, gate, weight = problem(2, 2, 20, 16, 0.5, 0)
    gate[1] = 0
    out, dqkv, dgate = derived(gated.attend, qkv, gate, weight)
    assert all((x[1] == 0).all() for x in (out, dqkv, dgate)) and out[0].abs().min() > 0


@kernels
def test_the_operator_keeps_torchs_promises():
    qkv, gate, _ = problem(2, 2, 5, 16, 0.7, 0)
    given = (*(x.detach().requires_grad_() for x in qkv.permute(2, 0, 3, 1, 4)), gate.requires_grad_(), 0.25)
    torch.library.opcheck(torch.ops.dwindle.attend_gated.default, given)


@kernels
def test_it_compiles_as_one_graph():
    """Blocks of a model in training are compiled; the operator must be a node of their graph."""
    qkv, gate, weight = problem(2, 2, 9, 16, 0.7, 0, torch.bfloat16)
    compiled = torch.compile(attend_gated, fullgraph=True, backend="inductor" if CUDA else "aot_eager")
    ours = derived(lambda q, k, v, g, s: compiled(q, k, v, g, scale=s), qkv, gate, weight)
    alone = derived(lambda q, k, v, g, s: attend_gated(q, k, v, g, scale=s), qkv, gate, weight)
    for one, other in zip(ours, alone):
        torch.testing.assert_close(one, other)


def test_plain_torch_where_the_kernels_do_not_serve():
    q, gate = torch.randn(1, 2, 6, 24), torch.tensor([[1.0, 0.0, 1.0, 1.0, 0.0, 1.0]])
    assert not gated.covers(q, q, q)
    torch.testing.assert_close(attend_gated(q, q, q, gate), attend_ref(q, q, q, gate))

"""Blocks against difficulty, and the operating point that costs no more than a given loss."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dwindle.errors import DwindleError
from dwindle.io.text import Vocabulary
from dwindle.models.lm.difficulty import KINDS, difficulty, kind_of, ranks, spearman, unskipped
from dwindle.models.lm.evaluate import affordable, evaluate
from dwindle.models.lm.routing import Gate
from shared.routers import ROUTERS, SIZE, build


def text(count=24 * 40 + 1):
    return torch.randint(0, SIZE.vocabulary, (count,), generator=torch.Generator().manual_seed(2)).byte()


def test_ranks_share_the_mean_of_equal_values():
    assert ranks(torch.tensor([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1, 3.5, 2]


def test_spearman_by_its_definition():
    draw = torch.Generator().manual_seed(0)
    one, two = (torch.randint(0, 6, (200,), generator=draw).double() for _ in range(2))
    two = two + one
    expected = torch.corrcoef(torch.stack([ranks(one), ranks(two)]))[0, 1]
    assert spearman(one, two) == pytest.approx(float(expected), abs=1e-12) and expected > 0.4
    assert spearman(one, one.exp()) == pytest.approx(1) and spearman(one, -one) == pytest.approx(-1)
    assert spearman(one, torch.ones(200)) is None


@pytest.mark.parametrize("router", ["TSA", "EarlyExit", "MoD"])
def test_what_is_told_is_what_ran(router):
    """Blocks as the trace has them; loss and entropy of the model with nothing skipped, whatever is skipped."""
    model, ids = build(ROUTERS[router](), torch.float64), text()
    vocabulary = Vocabulary("".join(chr(97 + i) for i in range(SIZE.vocabulary)))
    found = difficulty(model, ids, vocabulary, batch=7)
    x, y = ids[:-1].view(-1, 24).long(), ids[1:].view(-1, 24).long()
    with torch.no_grad():
        blocks = model(x).trace.live.sum(0).flatten().double()
        name, _, dear = model.method.operating_point
        held = getattr(model.method, name)
        setattr(model.method, name, dear)
        logits = model(x).logits.log_softmax(-1)
        setattr(model.method, name, held)
    loss = F.nll_loss(logits.flatten(0, 1), y.flatten(), reduction="none")
    assert found["characters"] == len(loss) and found["blocks"] == pytest.approx(float(blocks.mean()))
    assert found["spearman"]["loss"] == pytest.approx(spearman(blocks, loss), abs=1e-9)
    hardest = loss.argsort()[-len(loss) // 4 :]
    assert found["quartiles"]["loss"][3]["blocks"] == pytest.approx(float(blocks[hardest].mean()), abs=1e-9)
    assert [row["difficulty"] for row in found["quartiles"]["loss"]] == sorted(
        row["difficulty"] for row in found["quartiles"]["loss"]
    )
    assert [row["kind"] for row in found["kinds"]] == ["lower case"]
    assert found["kinds"][0]["entropy"] == pytest.approx(float(-(logits.exp() * logits).sum(-1).mean()))


@pytest.mark.parametrize("sign", [1, -1])
def test_a_router_by_difficulty_correlates(monkeypatch, sign):
    """What is told turns with the sign of what was done: gates that follow the entropy, and their opposite."""
    model, ids = build(ROUTERS["TSA"]()), text(25)
    vocabulary = Vocabulary("".join(chr(97 + i) for i in range(SIZE.vocabulary)))
    with torch.no_grad():
        logits = model.lm(ids[None, :-1].long()).log_softmax(-1)
        doubt = -(logits.exp() * logits).sum(-1)  # (1, N)
    wanted = sign * (doubt - doubt.median()) > 0

    def gate(now):
        return Gate(torch.ones_like(doubt), wanted | (model.method.tau == 0), record={"p": wanted.float()})

    monkeypatch.setattr(model.method, "gate", gate)
    found = difficulty(model, ids, vocabulary)
    assert sign * found["spearman"]["entropy"] > 0.8 and sign * found["spearman_p"]["entropy"] > 0.8


def test_kinds_of_characters():
    pieces = {"newline": "\n", "space": " ", "lower case": "b", "upper case": "B", "digit": "7", "punctuation": ";"}
    assert {kind: kind_of(piece) for kind, piece in pieces.items()} == {kind: kind for kind in pieces}
    assert kind_of("\ufffd") == kind_of("\t") == KINDS[-1] == "other"


def test_the_operating_point_comes_back():
    model = build(ROUTERS["TSA"]())
    with pytest.raises(KeyError), unskipped(model):
        assert model.method.tau == 0
        raise KeyError
    assert model.method.tau == 0.5
    with pytest.raises(DwindleError, match="Static has no operating point"), unskipped(build(ROUTERS["Static"]())):
        pass


@pytest.mark.parametrize("router", ["TSA", "EarlyExit", "MoD"])
@pytest.mark.parametrize("allowed", [0.02, 0.2])
def test_an_affordable_operating_point(router, allowed):
    """The loss is within what is allowed; a step further it would not be, or there is nothing left to save."""
    model, ids = build(ROUTERS[router]()), text()
    found = affordable(model, ids, allowed, steps=6)
    name, cheap, dear = model.method.operating_point
    assert found[name] == getattr(model.method, name)
    limit, told = found["loss_full"] * (1 + allowed), evaluate(model, ids)
    assert told["loss"] == pytest.approx(found["loss"]) and told["loss"] <= limit
    further = found[name] + (cheap - dear) / 2**6
    setattr(model.method, name, further)
    assert evaluate(model, ids)["loss"] > limit or further == cheap
    with pytest.raises(DwindleError, match="share of the loss"):
        affordable(model, ids, -0.1)

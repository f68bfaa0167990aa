"""Which setting for which image (I.1-I.4): fixed, early exit, a learned choice (policy_network.py), and the oracle.

G granularities, L depths, W widths, C choices, n images. Policies are evaluated on a `Grid`, which holds the result of
every setting on every image; `AdaPerceiver.forward` with the same settings gives the same answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...errors import DwindleError
from .cost import setting_macs
from .grid import Batches, Grid, grid
from .grid import rows as settings
from .model import AdaPerceiver
from .policy_network import PolicyNetwork, choices, setting_choices, token_choices, train_policies
from .settings import Exits

COLUMNS = ["policy", "top1", "gmacs", "fixed_top1", "best_fixed_top1"]  # of Table 6 as it is printed
CALIBRATION_IMAGES = 4096  # training images that decide how few blocks each number of tokens needs


class Learned(NamedTuple):
    """A learned policy and its choices for the test images."""

    kind: str  # what it chooses: 'tokens', or 'settings' (tokens and depth)
    price: float  # lambda of Eq. 14
    policy: PolicyNetwork
    picked: Tensor  # (n,) index of the choice for each test image

    @property
    def file(self) -> str:
        """The name of the policy's file."""
        return f"policy_{self.kind}_{self.price}.safetensors"


def result(policy: str, correct: Tensor, macs: Tensor, **more: Any) -> dict[str, Any]:
    """A row of Table 6, from which images were right (n,) and what they cost (n,)."""
    top1, gmacs = 100 * correct.double().mean(), macs.double().mean() / 1e9
    return {"policy": policy, "top1": round(float(top1), 3), "gmacs": round(float(gmacs), 4), **more}


def fixed(model: AdaPerceiver, found: Grid) -> list[dict[str, Any]]:
    """I.1: a row for each number of tokens, the same for all images, at full depth and width."""
    count = found.correct.shape[-1]
    return [
        result(
            f"fixed (t = {tokens})",
            found.correct[-1, -1, g],
            torch.full((count,), float(setting_macs(model, tokens, model.depth, model.width))),
        )
        for g, tokens in enumerate(model.tokens)
    ]


def exits(
    found: Grid, threshold: float, tokens: Tensor, most: Tensor | None = None, exit_depths: Exits = None
) -> Tensor:
    """(n,) the depth, from 1, after which each image leaves: the first at which its confidence reaches the threshold.

    tokens (n,): index of each image's granularity. most (n,): the depth after which it leaves in any case; None: the
    last. exit_depths: the depths after which images may leave before that; None: all.
    """
    at = torch.arange(len(tokens))
    sure = found.confidence[-1][:, tokens, at] >= threshold  # (L, n)
    if exit_depths is not None:
        sure[[depth - 1 for depth in range(1, len(sure) + 1) if depth not in exit_depths]] = False
    sure[-1] = True
    depths = sure.int().argmax(0) + 1
    return depths if most is None else depths.minimum(most)


def early_exit(
    model: AdaPerceiver,
    found: Grid,
    threshold: float,
    tokens: Tensor,
    most: Tensor | None = None,
    exit_depths: Exits = None,
) -> tuple[Tensor, Tensor]:
    """I.2: which images are right (n,), and their MACs (n,) with a read-out at every exit reached. Arguments: as for
    `exits`."""
    at, depths = torch.arange(len(tokens)), exits(found, threshold, tokens, most, exit_depths)
    every = range(1, model.depth + 1)
    may_exit = every if exit_depths is None else set(exit_depths)
    reads = {d: 1 + len([depth for depth in may_exit if depth < d]) for d in every}
    price = torch.tensor(
        [[float(setting_macs(model, t, d, model.width, reads=reads[d])) for d in every] for t in model.tokens],
        dtype=torch.float64,
    )
    return found.correct[-1][depths - 1, tokens, at], price[tokens, depths - 1]


def oracle(model: AdaPerceiver, found: Grid) -> dict[str, Any]:
    """I.4's row: for each image the cheapest setting that is right, and where none is, the cheapest of all."""
    prices = torch.tensor(
        [
            [[float(setting_macs(model, t, d, w)) for t in model.tokens] for d in range(1, model.depth + 1)]
            for w in model.widths
        ],
        dtype=torch.float64,
    ).flatten()
    order = prices.argsort(stable=True)
    right = found.correct.flatten(0, 2)[order]  # (W L G, n), cheapest first
    chosen = right.int().argmax(0)
    return result("optimal", right.any(0), prices[order][chosen])


def learned(
    model: AdaPerceiver,
    found: Grid,
    policy: PolicyNetwork,
    picked: Tensor,
    price: float,
    threshold: float | None = None,
) -> dict[str, Any]:
    """I.3's row, with the policy network's cost. picked (n,): index of each image's choice. price: lambda of Eq. 14.
    threshold: the confidence of early exit within the chosen depth; None: no early exit."""
    kind = "tokens" if policy.choices == token_choices(model) else "settings"
    tokens = torch.tensor([model.tokens.index(t) for t, _ in policy.choices])[picked]
    depths = torch.tensor([depth for _, depth in policy.choices])[picked]
    if threshold is not None:
        correct, macs = early_exit(model, found, threshold, tokens, depths)
        return result(f"RL ({kind}, lambda = {price}, tau = {threshold})", correct, macs + policy.macs)
    prices = torch.tensor([float(setting_macs(model, t, d, model.width)) for t, d in policy.choices])
    correct = found.correct[-1][depths - 1, tokens, torch.arange(len(picked))]
    shares = torch.bincount(picked, minlength=len(policy.choices)).double() / len(picked)
    more = {"choices": policy.choices, "shares": [round(float(s), 3) for s in shares]}
    return result(f"RL ({kind}, lambda = {price})", correct, prices[picked] + policy.macs, **more)


def evaluate_policies(
    model: AdaPerceiver,
    test: Callable[[], Batches],
    training: Callable[[int], Batches],
    thresholds: Sequence[float],
    prices: Sequence[float],
    epochs: int,
    *,
    exit_depths: Exits = None,
    amp: bool = True,
    device: str | torch.device = "cpu",
    progress: Callable[[str, int], None] = lambda what, images: None,
) -> tuple[list[dict[str, Any]], list[Learned]]:
    """Table 6 and the learned policies: one of either kind for each price, trained for `epochs`; 0: none.

    test(): the batches that policies are evaluated on. training(epoch): the batches they are trained on. progress:
    called with the step's name and the number of images it has processed.
    """
    found = grid(model, test(), device=device, amp=amp, progress=lambda n: progress("every setting", n))
    policies: list[Learned] = []
    if epochs > 0 and prices:
        calibration = grid(
            model, _first(training(0), CALIBRATION_IMAGES), device=device, amp=amp, widths=model.widths[-1:]
        )
        kinds = {"tokens": token_choices(model), "settings": setting_choices(model, calibration)}
        if kinds["settings"] == kinds["tokens"]:  # every number of tokens needs all blocks
            del kinds["settings"]
        wanted = [(kind, price) for kind in kinds for price in prices]
        networks = train_policies(
            model,
            map(training, range(epochs)),
            [(price, kinds[kind]) for kind, price in wanted],
            device=device,
            progress=lambda n: progress("learned policies", n),
        )
        picks = choices(model, networks, test(), device)
        policies = [Learned(*what, network, picked) for what, network, picked in zip(wanted, networks, picks)]
    rows = [(one.price, one.policy, one.picked) for one in policies]
    return table_6(model, found, rows, thresholds, exit_depths), policies


def _first(batches: Batches, images: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The first batches, until they hold so many images."""
    for x, y in batches:
        yield x, y
        images -= len(y)
        if images <= 0:
            return


def table_6(
    model: AdaPerceiver,
    found: Grid,
    policies: Sequence[tuple[float, PolicyNetwork, Tensor]] = (),
    thresholds: Sequence[float] = (0.8, 0.9, 0.95),
    exit_depths: Exits = None,
) -> list[dict[str, Any]]:
    """A row for every policy. policies: (price, network, choices). exit_depths: add early exit after only these.

    Each row has `fixed_top1`: what the trained numbers of tokens reach at its cost, linearly interpolated; and
    `best_fixed_top1`: the best of all fixed settings (tokens, depth, width) that cost no more.
    """
    if model.outputs != "class":
        raise DwindleError(
            "Policies choose by the answer to a whole image, and this network is dense; give one that classifies."
        )
    plain = fixed(model, found)
    rows = list(plain)
    count = found.correct.shape[-1]
    for threshold in thresholds:
        for g, tokens in enumerate(model.tokens):
            for some in (None, exit_depths) if exit_depths else (None,):
                correct, macs = early_exit(model, found, threshold, torch.full((count,), g), exit_depths=some)
                after = f", after {'-'.join(map(str, some))}" if some else ""
                rows.append(result(f"exit (t = {tokens}, tau = {threshold}{after})", correct, macs))
    for price, policy, picked in policies:
        rows.append(learned(model, found, policy, picked, price))
        rows += [learned(model, found, policy, picked, price, threshold) for threshold in thresholds]
    rows.append(oracle(model, found))
    cost, top1 = [row["gmacs"] for row in plain], [row["top1"] for row in plain]
    every = settings(model, found)
    return [
        row
        | {
            "fixed_top1": round(float(np.interp(row["gmacs"], cost, top1)), 3),
            "best_fixed_top1": max((r["top1"] for r in every if r["gmacs"] <= row["gmacs"]), default=0.0),
        }
        for row in rows
    ]

"""A prepared AdaPerceiver: a copy with fixed weights, on a GPU run as CUDA graphs, on a CPU as the network itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core.checks import check_tensor
from ...core.model import Output
from ...runtime.prepared import Prepared
from .recorded import Recorder, records
from .settings import Choice, Exits, check, settings

if TYPE_CHECKING:
    from .model import AdaPerceiver


class PreparedPerceiver(Prepared):
    """What `AdaPerceiver.prepare` returns; it is called like the network."""

    def __init__(
        self, network: AdaPerceiver, images: int | None = None, details: bool = False, recordings: int | None = None
    ) -> None:
        """recordings: how many CUDA graphs are kept at once. images, details: as `AdaptiveViT.prepare` takes them;
        nothing depends on them here."""
        super().__init__(network)
        self._network: AdaPerceiver = self._model
        self._recorder = Recorder(self._network)
        self._recorder.most = recordings or self._recorder.most

    @torch.no_grad()
    def __call__(
        self,
        images: Tensor,
        tokens: Choice = None,
        depth: Choice = None,
        width: Choice = None,
        exit: float | None = None,
        exits: Exits = None,
        patches: Tensor | None = None,
    ) -> Output:
        network = self._network
        self._check_place(check_tensor(images))
        same = all(choice is None or isinstance(choice, int) for choice in (tokens, depth, width))  # for all images
        if same and patches is None and records(images):
            (t,), (d,), (w,) = settings(network, tokens, depth, width, 1)
            if exit is not None or exits is not None:  # a recording does not check the confidence
                check(network, images, exit, exits)
            return self._recorder(images, t, d, w, exit, exits)
        return network(images, tokens, depth, width, exit, exits, patches)

    @torch.no_grad()
    def embed(self, images: Tensor) -> Tensor:
        self._check_place(images)
        return self._network.embed(images)

    def every(
        self,
        images: Tensor,
        width: int | None = None,
        depths: Sequence[int] | None = None,
        patches: Tensor | None = None,
    ) -> Tensor:
        self._check_place(images)
        return self._network.every(images, width, depths, patches)

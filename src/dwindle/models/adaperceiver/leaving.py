"""Early exit on a GPU: a CUDA graph for each stretch of blocks and batch size; between graphs the batch shrinks."""

from __future__ import annotations

import logging
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...core.model import Output
from ...runtime.cuda import recording
from ...runtime.cuda.keep import Keeper, capture_errors
from .settings import Exits, Setting, trace_of

if TYPE_CHECKING:
    from .model import AdaPerceiver

log = logging.getLogger("dwindle")
SIZES = 8  # how many batch sizes graphs are recorded for, in equal steps


class Leaving:
    """`model.run(images, *setting, exit, exit_depths)` as recordings, for images of one shape.

    A graph runs the blocks up to the next exit, reads out all images, stores the answers of those that leave and moves
    those that stay to the front. The host waits for their number and goes on with the smallest graph that holds them;
    the other rows are computed and ignored. A graph is recorded when a call first needs it. Recording runs it several
    times; as it reads from one buffer and writes to another, every run gives the same. A graph holds the model as it
    was when recorded: a changed model needs a new `Leaving`.
    """

    def __init__(
        self,
        keeper: Keeper[AdaPerceiver],
        images: Tensor,
        setting: Setting,
        exit_depths: Exits = None,
    ) -> None:
        """keeper: holds the model, and the memory that all its recordings share, one at a time.
        exit_depths: depths after which images may leave; None: all.
        """
        self.keeper, self.setting, last = keeper, setting, setting[1]
        ends = [depth for depth in range(1, last) if exit_depths is None or depth in exit_depths]
        self.stretches = list(zip([0, *ends], [*ends, last]))  # (blocks run before, blocks run after) each
        self.held, self.autocast = recording.held(keeper.model), recording.autocast_as_now()
        count, place = len(images), images.device
        self.sizes = sorted({-(-count * share // SIZES) for share in range(1, SIZES + 1)})
        with torch.inference_mode(False), torch.no_grad():
            self.images = images.clone()
            self.at = torch.arange(count, device=place)
            self.rows = [self.at.clone() for _ in range(2)]  # the image in each row
            self.staying = [torch.full((), count, device=place) for _ in range(2)]
            self.left = torch.zeros(count, dtype=torch.long, device=place)  # the depth at which each image left
            self.sure = torch.ones((), device=place)
            with self.autocast():
                z = self._latents()
                answer, feature = self._read_out(self.stretches[0][1], z)
            self.z = [torch.empty_like(z) for _ in range(2)]
            self.logits, self.features = torch.empty_like(answer), torch.empty_like(feature)
            self.start = recording.captured(self._start, keeper.pool)
        self.graphs: dict[tuple[int, int], Any] = {}
        self._graph(0, count)  # a model that cannot be captured raises here

    def _latents(self) -> Tensor:
        """(B, N, D): the latents after they have read the images. Also sets the angles, the attention and the
        read-outs' tables, which every replay computes again."""
        model = self.keeper.model
        patches = model.embed(self.images)
        self.angles, self.attend = model._angles_and_attention(self.setting[0], patches)
        used = dict.fromkeys(model.readout(end) for _, end in self.stretches)
        self.tables = {readout: readout.table(self.angles) for readout in used}
        return model.read.latents(model.latent, patches, self.angles)

    def _read_out(self, depth: int, z: Tensor) -> tuple[Tensor, Tensor]:
        readout = self.keeper.model.readout(depth)
        return readout(z, z, self.angles, self.tables[readout])  # a learned output token reads no patches

    def _start(self) -> None:
        """The work before the first block: fills the first buffers with all images."""
        with self.autocast():
            self.z[0].copy_(self._latents())
        self.rows[0].copy_(self.at)
        self.staying[0].fill_(len(self.at))

    def _stretch(self, at: int, size: int) -> None:
        """The stretch `at` for `size` rows: blocks, read-out, and the rows that stay moved to the other buffers."""
        source, target, model = at % 2, (at + 1) % 2, self.keeper.model
        done, depth = self.stretches[at]
        with self.autocast():
            z = self.z[source][:size]
            for block in model.blocks[done:depth]:
                z = block(z, self.angles, self.attend, model.hidden(self.setting[2]))
            answer, feature = self._read_out(depth, z)
        leaves = present = self.at[:size] < self.staying[source]
        if depth < self.setting[1]:
            leaves = present & (answer.float().softmax(-1).amax(-1) >= self.sure)
        rows = self.rows[source][:size]
        for kept, new in ((self.logits, answer), (self.features, feature), (self.left, torch.full_like(rows, depth))):
            chosen = leaves.view(-1, *[1] * (kept.dim() - 1))
            kept.index_copy_(0, rows, torch.where(chosen, new.to(kept.dtype), kept.index_select(0, rows)))
        stays = present & ~leaves
        order = (~stays).int().argsort(stable=True)
        self.z[target][:size].copy_(z.index_select(0, order))
        self.rows[target][:size].copy_(rows.index_select(0, order))
        self.staying[target].copy_(stays.sum())

    def __call__(self, images: Tensor, exit: float) -> Output:
        tokens, _, width = self.setting
        size = count = len(images)
        with self.keeper.lock:
            self.images.copy_(images)
            self.sure.fill_(exit)
            self.start.replay()
            for at in range(len(self.stretches)):
                self._graph(at, size).replay()
                staying = int(self.staying[(at + 1) % 2])  # waits for the GPU
                if not staying:
                    break
                size = next(s for s in self.sizes if s >= staying)
            stopped, logits, features = self.left.tolist(), self.logits.clone(), self.features.clone()
        model = self.keeper.model
        exits = torch.zeros(model.depth, 1, dtype=torch.bool)
        exits[[end - 1 for _, end in self.stretches]] = True
        reads = exits & (torch.arange(model.depth)[:, None] < torch.tensor(stopped))  # until it left
        trace = trace_of(model, images, [tokens] * count, stopped, [width] * count, reads)
        return Output(logits, trace, features)

    def _graph(self, at: int, size: int) -> Any:
        """The recording of `_stretch`, made when first needed; it is eager where capturing fails."""
        if (at, size) not in self.graphs:
            call = partial(self._stretch, at, size)
            try:
                with torch.inference_mode(False), torch.no_grad():
                    self.graphs[at, size] = recording.captured(call, self.keeper.pool)
            except capture_errors() as error:
                if not self.graphs:
                    raise
                log.warning("block %d of %d images cannot be recorded (%s); eager", self.stretches[at][1], size, error)
                self.graphs[at, size] = SimpleNamespace(replay=torch.inference_mode(False)(torch.no_grad()(call)))
        return self.graphs[at, size]

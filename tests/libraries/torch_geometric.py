"""torch-geometric: GraphGym's module, and modules made of its layers as in its examples, on its batches of graphs."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.data.lightning import LightningDataset
from torch_geometric.graphgym import cfg, create_model, set_cfg
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GIN, MLP, AttentionalAggregation, GATv2Conv, TransformerConv, global_add_pool

from tests.libraries.base import order, rows_of

GRAPHS, FEATURES, EDGES, CLASSES, WIDTH = 24, 8, 4, 3, 16
CONVOLUTIONS = {"transformer": TransformerConv, "gat": GATv2Conv}


@cache
def graphs() -> list[Data]:
    """Rings of 4 to 9 nodes with random chords; a class of each."""
    generator = torch.Generator().manual_seed(11)
    found = []
    for number in range(GRAPHS):
        nodes = 4 + number % 6
        ring = torch.arange(nodes)
        chords = torch.randint(nodes, (2, 3), generator=generator)
        pairs = torch.cat([torch.stack([ring, ring.roll(1)]), chords], dim=1)
        found.append(
            Data(
                x=torch.randn(nodes, FEATURES, generator=generator),
                edge_index=torch.cat([pairs, pairs.flip(0)], dim=1),
                edge_attr=torch.randn(2 * pairs.shape[1], EDGES, generator=generator),
                y=torch.randint(CLASSES, (1,), generator=generator),
            )
        )
    return found


def loader(batch: int, shuffled: bool) -> DataLoader:
    return DataLoader(graphs(), batch_size=batch, sampler=order(graphs(), shuffled))


def data_module(batch: int, shuffled: bool) -> LightningDataset:
    """The library's data module, whose batches are those of :func:`loader`."""
    sampler = order(graphs(), shuffled)
    return LightningDataset(
        graphs(), graphs(), pred_dataset=graphs(), batch_size=batch, sampler=sampler, pin_memory=False
    )


class Classifier(pl.LightningModule):
    """Classifies graphs; ``forward(batch)`` returns logits of shape ``(graphs, CLASSES)``."""

    def _loss(self, batch: Data) -> Tensor:
        return F.cross_entropy(self(batch), batch.y)

    def training_step(self, batch: Data, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, batch_size=batch.num_graphs)
        return loss

    def validation_step(self, batch: Data, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), batch_size=batch.num_graphs)

    def configure_optimizers(self) -> Any:
        # Not Adam: biases of keys and before batch statistics have gradients of rounding only, which it would enlarge.
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Isomorphism(Classifier):
    """GIN with the sum of each graph's nodes."""

    def __init__(self, norm: str | None = None, act: str = "relu") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.gnn = GIN(FEATURES, WIDTH, num_layers=3, norm=norm, act=act, jk="cat")
        self.classifier = MLP([WIDTH, WIDTH, CLASSES], norm=None)

    def forward(self, batch: Data) -> Tensor:
        x = self.gnn(batch.x, batch.edge_index)
        return self.classifier(global_add_pool(x, batch.batch, batch.num_graphs))


class Attention(Classifier):
    """Attention along edges with features, in blocks of one kind, and over the nodes of a graph."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.save_hyperparameters()
        layer = CONVOLUTIONS[kind]
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList(layer(WIDTH, WIDTH // 2, heads=2, edge_dim=EDGES) for _ in range(4))
        self.pool = AttentionalAggregation(MLP([WIDTH, WIDTH, 1], norm=None))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, batch: Data) -> Tensor:
        x = self.embed(batch.x)
        for layer in self.layers:
            x = x + layer(x, batch.edge_index, batch.edge_attr).relu()
        return self.head(self.pool(x, batch.batch, dim_size=batch.num_graphs))


def graph_gym() -> pl.LightningModule:
    """GraphGym's module, as its configuration describes it."""
    set_cfg(cfg)
    cfg.dataset.task, cfg.gnn.head = "graph", "graph"
    cfg.gnn.layers_pre_mp, cfg.gnn.layers_mp, cfg.gnn.layers_post_mp = 1, 4, 2
    cfg.gnn.dim_inner, cfg.gnn.batchnorm = WIDTH, False
    cfg.model.loss_fun = "cross_entropy"
    return create_model(to_device=False, dim_in=FEATURES, dim_out=CLASSES)


built = partial(rows_of, make_loader=loader)
ROWS = [
    # Its validation returns a dictionary without logging, its predictions are pairs of logits and classes.
    *built("GraphGymModule", graph_gym, loads=lambda: {"dim_in": FEATURES, "dim_out": CLASSES, "cfg": cfg}),
    *built("GIN", Isomorphism),
    # Normalized values lie about zero, where rounding alone would switch a ReLU.
    *built("GIN, BatchNorm", partial(Isomorphism, "BatchNorm", "gelu"), batch_norm=True),
    *built("TransformerConv", partial(Attention, "transformer")),
    *built("GATv2Conv", partial(Attention, "gat")),
    *rows_of("GIN, LightningDataset", Isomorphism, data_module, validates=False),
]

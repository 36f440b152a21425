"""Ordinary models of many fields, which must stay as they are."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.zoo.base import (
    CLASSES,
    DIM,
    LENGTH,
    VOCABULARY,
    Attention,
    Blocks,
    Classifier,
    Gpt,
    LanguageModel,
    Layer,
    Mlp,
    Stack,
    adamw,
    alike,
    images,
    loader,
    net,
    noisy,
    sequences,
    stack,
    tokens,
    vectors,
)
from tests.zoo.cells import Row
from trainwright import register_batch


def cnn() -> nn.Module:
    """A small convolutional network."""
    body = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))


class Residual(nn.Module):
    """A block of a ResNet with group norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.conv1(F.relu(self.norm1(x)))
        return x + self.conv2(F.relu(self.norm2(x)))


class ResNet(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, 8, 3, padding=1), nn.ModuleList(Residual() for _ in range(4))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run(self.stem(x)).mean((2, 3)))


class Vit(Blocks):
    """Patches, a class token, bidirectional attention."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.cls = nn.Conv2d(3, DIM, 4, 4), nn.Parameter(torch.zeros(1, 1, DIM))
        self.positions = nn.Parameter(0.1 * torch.randn(5, DIM))
        self.blocks = nn.ModuleList(Layer(lambda: Attention(causal=False)) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        x = torch.cat((self.cls.expand(len(x), -1, -1), x), 1) + self.positions
        return self.head(self.norm(self.run(x))[:, 0])


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, 2, padding=1)
        self.up, self.out = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.down1(x))
        b = F.relu(self.up(F.relu(self.down2(a))))
        return self.out(torch.cat((a, b), 1)).mean((2, 3))


class Recurrent(nn.Module):
    """An LSTM over features."""

    def __init__(self, kind: Any = nn.LSTM) -> None:
        super().__init__()
        self.rnn, self.head = kind(DIM, DIM, 2, batch_first=True), nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        self.rnn.flatten_parameters()  # moves them on a GPU
        return self.head(self.rnn(x)[0])


class Autoencoder(Classifier):
    """Lightning's first example."""

    network = staticmethod(nn.Identity)

    def __init__(self) -> None:
        super().__init__(optimizer=adamw)
        self.encoder = nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, DIM))

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.decoder(self.encoder(batch[0])), batch[0])


class Vae(Autoencoder):
    """The draw comes with the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.log_var = nn.Linear(3, 3)

    def loss(self, batch: Any) -> Tensor:
        mean = self.encoder(batch[0])
        log_var = self.log_var(mean)
        out = self.decoder(mean + (0.5 * log_var).exp() * batch[1][:, :3])
        kl = 0.5 * (log_var.exp() + mean.square() - 1 - log_var).sum(-1).mean()
        return F.mse_loss(out, batch[0]) + 0.1 * kl


class Gan(pl.LightningModule):
    """Two networks, two optimizers, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, DIM))
        self.discriminator = nn.Sequential(nn.Linear(DIM, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def configure_optimizers(self) -> Any:
        networks = (self.generator, self.discriminator)
        return [torch.optim.Adam(network.parameters(), lr=1e-2, eps=1e-4) for network in networks]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (real, noise, _), (opt_g, opt_d) = batch, self.optimizers()  # type: ignore[misc]
        self.toggle_optimizer(opt_g)
        loss_g = F.softplus(-self.discriminator(self.generator(noise))).mean()
        opt_g.zero_grad()
        self.manual_backward(loss_g)
        opt_g.step()
        self.untoggle_optimizer(opt_g)
        self.toggle_optimizer(opt_d)
        fake = self.generator(noise).detach()
        loss_d = F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(fake)).mean()
        opt_d.zero_grad()
        self.manual_backward(loss_d)
        opt_d.step()
        self.untoggle_optimizer(opt_d)
        self.log_dict({"g": loss_g, "d": loss_d}, sync_dist=True)


class Accumulates(Classifier):
    """Accumulates by hand, with a schedule stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch) / 2
        self.manual_backward(loss)
        if batch_idx % 2 == 1:
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()  # type: ignore[union-attr, call-arg]


class Siamese(Classifier):
    """Two views through one network."""

    def loss(self, batch: Any) -> Tensor:
        a, b = self(batch[0]), self(batch[0].roll(1, -1))
        return (F.normalize(a, dim=-1) - F.normalize(b, dim=-1)).square().sum(-1).mean()


class Triplet(Siamese):
    def loss(self, batch: Any) -> Tensor:
        x = batch[0]
        return F.triplet_margin_loss(self(x), self(x + 0.1), self(x.flip(-1)))


class Byol(Classifier):
    """A predictor against a detached target."""

    def __init__(self) -> None:
        super().__init__()
        self.predictor = nn.Linear(CLASSES, CLASSES)

    def loss(self, batch: Any) -> Tensor:
        a, b = self(batch[0]), self(batch[0].flip(-1))
        return 1 - F.cosine_similarity(self.predictor(a), b.detach()).mean()


class Distilled(Classifier):
    """A frozen teacher without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(DIM, 32), nn.Tanh(), nn.Linear(32, CLASSES)).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            target = self.teacher(batch[0]).softmax(-1)
        return super().loss(batch) + F.cross_entropy(self(batch[0]), target)


class Diffusion(Classifier):
    """Predicts noise; time and noise come with the sample."""

    def __init__(self) -> None:
        super().__init__(lambda: Stack(stem=nn.Linear(DIM + 1, DIM)), adamw)
        self.net.head = nn.Linear(DIM, DIM)

    def loss(self, batch: Any) -> Tensor:
        x, noise, t = batch
        return F.mse_loss(self(torch.cat((x * (1 - t) + noise * t, t), -1)), noise - x)


class Flow(nn.Module):
    """A coupling layer of a normalizing flow."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(DIM // 2, 32), nn.Tanh(), nn.Linear(32, DIM))

    def forward(self, x: Tensor, log_det: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, -1)
        scale, shift = self.net(a).chunk(2, -1)
        scale = scale.tanh()
        return torch.cat((b * scale.exp() + shift, a), -1), log_det + scale.sum(-1)


class Flows(Classifier):
    network = staticmethod(lambda: nn.ModuleList(Flow() for _ in range(4)))

    def loss(self, batch: Any) -> Tensor:
        x, log_det = batch[0], torch.zeros(len(batch[0]), device=batch[0].device)
        for flow in self.net:
            x, log_det = flow(x, log_det)
        return (0.5 * x.square().sum(-1) - log_det).mean()


class Graph(nn.Module):
    """A layer over a graph of 8 nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        nodes = torch.eye(LENGTH, device=x.device)
        ring = (nodes.roll(1, 0) + nodes.roll(-1, 0)) / 2
        return x + F.relu(self.own(x) + self.others(ring @ x))


class Graphs:
    """Graphs of several sizes in one object.

    Args:
        x: ``(nodes, features)``, of all graphs.
        of: ``(nodes,)``, the index of each one's graph.
        y: ``(graphs,)``
    """

    def __init__(self, x: Tensor, of: Tensor, y: Tensor) -> None:
        self.x, self.of, self.y = x, of, y

    def to(self, *args: Any, **kwargs: Any) -> Graphs:
        return Graphs(*(each.to(*args, **kwargs) for each in vars(self).values()))

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, piece: slice) -> Graphs:
        chosen = (self.of >= piece.start) & (self.of < piece.stop)
        return Graphs(self.x[chosen], self.of[chosen] - piece.start, self.y[piece])


register_batch(Graphs)


def graphs(batch: int) -> DataLoader:
    """Graphs of 1 to 4 nodes."""
    rows = [(x.repeat(1 + int(y) % 4, 1) * torch.arange(1, 2 + int(y) % 4)[:, None], y) for x, y in vectors(1).dataset]

    def collate(some: list[Any]) -> Graphs:
        of = torch.repeat_interleave(torch.tensor([len(x) for x, _ in some]))
        return Graphs(torch.cat([x for x, _ in some]), of, torch.stack([y for _, y in some]))

    return DataLoader(rows, batch_size=batch, collate_fn=collate)  # type: ignore[arg-type]


class OfGraphs(Classifier):
    """Classifies graphs by the sum over their nodes."""

    def loss(self, batch: Graphs) -> Tensor:
        out = torch.zeros(len(batch), CLASSES, device=self.device).index_add(0, batch.of, self(batch.x))
        return F.cross_entropy(out, batch.y)


class Recommender(Classifier):
    """Tables of embeddings and their products."""

    network = staticmethod(nn.Identity)

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(VOCABULARY, 8), nn.Embedding(VOCABULARY, 8)
        self.top = nn.Sequential(nn.Linear(17, 16), nn.ReLU(), nn.Linear(16, 1))

    def loss(self, batch: Tensor) -> Tensor:
        u, i = self.users(batch[:, 0]), self.items(batch[:, 1])
        out = self.top(torch.cat((u, i, (u * i).sum(-1, keepdim=True)), -1)).squeeze(-1)
        return F.binary_cross_entropy_with_logits(out, (batch[:, 2] % 2).float())


class Nerf(Classifier):
    """A function of coordinates, with its input again in the middle."""

    network = staticmethod(nn.Identity)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(2 * DIM, 32), nn.ReLU(), nn.Linear(32, 32))
        self.second, self.out = nn.Linear(32 + 2 * DIM, 32), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat((x.sin(), x.cos()), -1)
        return self.out(F.relu(self.second(torch.cat((self.first(x), x), -1))))


class EncoderDecoder(LanguageModel):
    """torch's Transformer on one text."""

    network = staticmethod(lambda: nn.Transformer(DIM, 4, 2, 2, 32, 0.0, batch_first=True))

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY)

    def loss(self, batch: Tensor) -> Tensor:
        source, target = self.embedding(batch.flip(1)), self.embedding(batch[:, :-1])
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return F.cross_entropy(self.head(self.net(source, target, tgt_mask=mask)).mT, batch[:, 1:])


class MaskedLanguage(LanguageModel):
    """BERT's loss on some positions."""

    network = staticmethod(lambda: Gpt(lambda: Layer(lambda: Attention(causal=False))))

    def loss(self, batch: Tensor) -> Tensor:
        ids = batch[:, :-1]
        hidden = torch.arange(ids.shape[1], device=ids.device) % 3 == 0
        logits = self(ids.masked_fill(hidden, 0))
        return F.cross_entropy(logits[:, hidden].flatten(0, 1), ids[:, hidden].flatten())


class Ctc(Classifier):
    """CTC on the positions of a sequence."""

    def loss(self, batch: Any) -> Tensor:
        logs, target = self(batch[0]).log_softmax(-1).transpose(0, 1), batch[1][:, :3].clamp_min(1)
        full, short = torch.full((logs.shape[1],), LENGTH), torch.full((logs.shape[1],), 3)
        return F.ctc_loss(logs, target, full, short, reduction="none").mean()


class Experts(nn.Module):
    """Each token to its best expert, computed for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(DIM), nn.Linear(DIM, 4)
        self.w1, self.w2 = nn.Parameter(0.2 * torch.randn(4, DIM, 32)), nn.Parameter(0.2 * torch.randn(4, 32, DIM))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        weight, best = self.gate(h).softmax(-1).max(-1, keepdim=True)
        out = torch.einsum("...eh,ehd->...ed", F.gelu(torch.einsum("...d,edh->...eh", h, self.w1)), self.w2)
        return x + weight * out.gather(-2, best.unsqueeze(-1).expand(*best.shape, DIM)).squeeze(-2)


class ExpertList(nn.Module):
    """A list of experts, of which each gets its tokens; some may get none."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(DIM), nn.Linear(DIM, 2)
        self.experts = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).flatten(0, -2)
        weight, best = self.gate(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            where = (best == index).nonzero().squeeze(-1)
            out = out.index_add(0, where, weight[where, None] * expert(flat[where]))
        return x + out.view_as(x)


class Policy(Classifier):
    """REINFORCE with rewards from the batch."""

    def loss(self, batch: Any) -> Tensor:
        chosen = self(batch[0]).log_softmax(-1).gather(-1, batch[1][:, None]).squeeze(-1)
        return -(chosen * batch[0].mean(-1)).mean()


class Tasks(Classifier):
    """Two heads with trained weights of their losses."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.weights = nn.Linear(DIM, 1), nn.Parameter(torch.zeros(2))

    def loss(self, batch: Any) -> Tensor:
        hidden = self.net.run(self.net.stem(batch[0]))
        first = F.cross_entropy(self.net.head(hidden), batch[1])
        second = F.mse_loss(self.second(hidden).squeeze(-1), batch[0].mean(-1))
        return (torch.stack((first, second)) * (-self.weights).exp() + self.weights).sum()


class Hyper(nn.Module):
    """Weights that a network computes from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.head = nn.Linear(DIM, DIM * DIM), nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.maker(x).view(-1, DIM, DIM) / DIM
        return self.head(torch.einsum("bij,bj->bi", weight, x).tanh())


def pairs(batch: int) -> Any:
    """Images with the same label twice."""
    return loader(batch, *images(batch).dataset.tensors)


ACCUMULATED = partial(dict, accumulate_grad_batches=2, max_steps=2)
CLIPPED = partial(dict, gradient_clip_val=0.01, gradient_clip_algorithm="value")
ROWS = [
    Row(
        "GPT",
        LanguageModel,
        tokens,
        equal="ddp, zero2, zero3, tensor, pipeline, zero1, sequence, interleaved, context, gather",
    ),
    Row("GPT, AdamW", lambda: LanguageModel(optimizer=adamw), tokens, equal="zero3, pipeline"),
    Row("GPT, accumulation", LanguageModel, tokens, trainer=ACCUMULATED, equal="zero3, pipeline"),
    Row("GPT, clipping", LanguageModel, tokens, trainer=lambda: {"gradient_clip_val": 0.1}, equal="zero3, pipeline"),
    Row("GPT, clipping by value", LanguageModel, tokens, trainer=CLIPPED, equal="zero3, pipeline"),
    Row("masked language model", MaskedLanguage, tokens, equal="zero3, pipeline"),
    Row("encoder and decoder", EncoderDecoder, tokens, equal="zero3", either="pipeline"),
    Row("CNN", net(cnn), images, equal="ddp, zero3"),
    Row("ResNet", net(ResNet), pairs, equal="zero3, pipeline"),
    Row("ViT", net(Vit), images, equal="zero3, pipeline"),
    Row("U-Net", net(UNet), images, equal="ddp, zero3"),
    Row("LSTM", net(Recurrent), sequences, equal="ddp, zero3"),
    Row("GRU", net(partial(Recurrent, nn.GRU)), sequences, equal="ddp, zero3"),
    Row("autoencoder", Autoencoder, vectors, equal="ddp, zero3"),
    Row("VAE", Vae, noisy, equal="ddp, zero3"),
    Row("GAN", Gan, noisy, equal="ddp", either="zero3"),
    Row("accumulation by hand", Accumulates, vectors, equal="zero3", either="pipeline"),
    Row("siamese", Siamese, vectors, equal="zero3", either="pipeline"),
    Row("triplets", Triplet, vectors, equal="zero3", either="pipeline"),
    Row("BYOL", Byol, vectors, equal="tensor", either="pipeline"),
    Row("distillation", Distilled, vectors, equal="zero3", either="pipeline"),
    Row("diffusion", Diffusion, noisy, equal="zero3, pipeline"),
    Row("normalizing flow", Flows, vectors, equal="zero3", either="pipeline"),
    Row("graph", stack(Graph), alike(sequences), equal="zero3, pipeline"),
    Row("graphs in an object", OfGraphs, graphs, equal="ddp, zero3, tensor, pipeline"),
    Row("recommender", Recommender, tokens, equal="ddp, zero3"),
    Row("NeRF", Nerf, vectors, equal="zero3", either="tensor"),
    Row("CTC", Ctc, alike(sequences), equal="tensor, pipeline"),
    Row("experts in stacks", stack(Experts), vectors, equal="zero3", either="pipeline"),
    Row("a list of experts", stack(ExpertList), vectors, either="pipeline, tensor"),
    Row("REINFORCE", Policy, vectors, equal="zero3, pipeline"),
    Row("two tasks", Tasks, vectors, equal="pipeline", either="zero3"),
    Row("hypernetwork", net(Hyper), vectors, equal="ddp, zero3"),
]

"""Modules in the style of well-known repositories, and modules that are made to fool a plan. None knows of a layout."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, LENGTH, VOCABULARY = 32, 4, 8, 24


class NanoAttention(nn.Module):
    """nanoGPT's: the width of what is split is read from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.n_head, self.n_embd, self.dropout = HEADS, WIDTH, 0.0

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=self.dropout, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


class VisionAttention(nn.Module):
    """timm's: queries, keys and values in one matrix, ``reshape(B, N, C)`` behind."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.scale = HEADS, (WIDTH // HEADS) ** -0.5
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        weights = ((q * self.scale) @ k.transpose(-2, -1)).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(B, N, C))


class PerHeadAttention(nn.Module):
    """GPT-NeoX's: queries, keys and values of one head stand together."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.joint, self.back = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.joint(x).unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(3, -1)
        return self.back(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Attention(nn.Module):
    """Four projections, and what its kind adds to them."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.kind, self.n_heads = kind, HEADS
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        if kind == "norm of heads":
            self.norm = nn.LayerNorm(WIDTH // HEADS)
        if kind == "norm of all":
            self.norm = nn.LayerNorm(WIDTH)
        if kind == "norm without weights":
            self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        if kind == "alibi":
            self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, HEADS + 1))
        if kind == "mixes heads":
            self.mix = nn.Parameter(torch.eye(HEADS) + 0.1 * torch.randn(HEADS, HEADS))
        if kind == "weight norm":
            self.wq = nn.utils.parametrizations.weight_norm(self.wq)
        if kind == "old weight norm":
            self.wo = nn.utils.weight_norm(self.wo)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        if self.kind in ("norm of all", "norm without weights"):
            q = self.norm(q)
        if self.kind == "rms of all":
            q = q * q.square().mean(-1, keepdim=True).rsqrt()
        q, k, v = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (q, k, v))
        if self.kind == "norm of heads":
            q = self.norm(q)
        if self.kind == "linear":
            q, k = F.elu(q) + 1, F.elu(k) + 1
            y = q @ (k.transpose(-2, -1) @ v) / (q * k.sum(-2, keepdim=True)).sum((1, 3), keepdim=True)
        elif self.kind == "alibi":
            distance = torch.arange(x.shape[1], device=x.device)
            bias = -(distance[:, None] - distance[None]).abs() * self.slopes[:, None, None]
            y = ((q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5 + bias).softmax(-1) @ v
        elif self.kind == "mixes heads":
            scores = torch.einsum("gh,bhst->bgst", self.mix, q @ k.transpose(-2, -1))
            y = scores.softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v)
        return self.wo(y.transpose(1, 2).flatten(2))


BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "softmax": lambda h: h.softmax(-1),
    "rms norm": lambda h: F.rms_norm(h, h.shape[-1:]),
    "normalize": lambda h: F.normalize(h, dim=-1),
    "top-k": lambda h: h * (h >= h.topk(8, -1).values[..., -1:]),
    "gate": lambda h: h * h.mean(-1, keepdim=True).sigmoid(),
    "cosine": lambda h: h * F.cosine_similarity(h, h.roll(1, -1), -1)[..., None],
    "glu": lambda h: F.glu(torch.cat([h, h], -1)),
    "shuffle": lambda h: h.roll(1, -1),
}


class FeedForward(nn.Module):
    def __init__(self, between: str = "gelu") -> None:
        super().__init__()
        self.between = between
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(BETWEEN[self.between](self.fc1(x)))


class Scaled(nn.Module):
    """timm's layer scale, which begins near zero."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(1e-5 * torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Block(nn.Module):
    def __init__(self, attention: nn.Module, feed_forward: nn.Module, scale: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = attention, feed_forward
        self.ls1, self.ls2 = scale(), scale()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.ln_1(x)))
        return x + self.ls2(self.mlp(self.ln_2(x)))


MIXES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "nothing": lambda self, x: x,
    "shift": lambda self, x: x.roll(1, 1),
    "cumsum": lambda self, x: x.cumsum(1),
    "mean": lambda self, x: x.mean(1, keepdim=True),
    "conv": lambda self, x: self.conv(x.transpose(1, 2)).transpose(1, 2),
    "gru": lambda self, x: self.gru(x)[0],
}


class Mixing(nn.Module):
    """A block that mixes positions in another way beside its attention."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.attention = how, Attention()
        self.conv, self.gru = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x) + MIXES[self.how](self, x)


class Model(pl.LightningModule):
    """A language model of one kind of attention and of feed-forward network."""

    def __init__(self, attention: str = "plain", between: str = "gelu", scaled: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        kinds: dict[str, Callable[[], nn.Module]] = {
            "nano": NanoAttention,
            "vision": VisionAttention,
            "per head": PerHeadAttention,
        }
        make = kinds.get(attention, lambda: Attention(attention))
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        scale = Scaled if scaled else nn.Identity
        self.h = nn.ModuleList(Block(make(), FeedForward(between), scale) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens = batch["tokens"]
        loss = F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Adapted(pl.LightningModule):
    """A model of transformers of which adapters alone are trained, as peft's documentation shows it."""

    def __init__(self, kind: str, modules: list[str]) -> None:
        super().__init__()
        import peft
        import transformers

        torch.manual_seed(3)
        sizes = {"vocab_size": VOCABULARY, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
        if kind == "llama":
            wide = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **wide, num_key_value_heads=2))
        else:
            model = transformers.MptForCausalLM(
                transformers.MptConfig(**sizes, d_model=32, n_heads=4, n_layers=2, expansion_ratio=2, max_seq_len=16)
            )
        config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=modules, init_lora_weights=False)
        self.model = peft.get_peft_model(model, config) if modules else model

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch["tokens"], labels=batch["tokens"]).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

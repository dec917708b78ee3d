"""Prompt tuning, IDPG, LPT and ID-SPAM on a frozen Hugging Face model, in one file to copy.

    python -m idp_tutorial.minimal --data train.csv --backbone roberta-base --method lpt-npg

A generator returns t prompt vectors of width d for each of B texts. It gets hidden states h [B,T,d]
of the texts, their mask [B,T], and one state z [B,d] each: at `<s>`, or at a decoder's last word.
"""

import argparse
import csv
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split
from transformers import AutoModel, AutoTokenizer, logging


class StaticPrompt(nn.Module):
    """p = P, the same for every text (prompt tuning, Lester et al. 2021; LPT, static)."""

    def __init__(self, d: int, t: int = 10, std: float = 0.02) -> None:
        super().__init__()
        self.p = nn.Parameter(std * torch.randn(t, d))

    def forward(self, h: Tensor, mask: Tensor, z: Tensor) -> Tensor:
        return self.p.expand(len(h), -1, -1)


class PHM(nn.Module):
    """y = x W, W = Σᵢ Aᵢ ⊗ Bᵢ: about 1/n of a linear layer's parameters (IDPG Eq. 4)."""

    def __init__(self, d_in: int, d_out: int, n: int) -> None:
        super().__init__()
        self.A = nn.Parameter(0.05 * torch.randn(n, n, n))
        self.B = nn.Parameter(0.05 * torch.randn(n, d_in // n, d_out // n))

    def forward(self, x: Tensor) -> Tensor:
        return x @ sum(torch.kron(a, b) for a, b in zip(self.A, self.B))


class IDPG(nn.Module):
    """p = W₂ Dropout(GELU(W₁ z + b₁)) + b₂, with PHM matrices W₁ and W₂ (IDPG §3.1, Eq. 4).

    M-IDPG adds a p in each later layer, from the z there; layers share all but b₂ (IDPG §3.2.2).
    """

    def __init__(self, d: int, t: int = 10, m: int = 256, n: int = 16, n_layers: int = 1) -> None:
        super().__init__()
        self.down, self.up = PHM(d, m, n), PHM(m, t * d, n)
        self.b1 = nn.Parameter(0.05 * torch.randn(m))
        self.b2 = nn.Parameter(0.02 * torch.randn(n_layers, t * d))

    def forward(self, h: Tensor, mask: Tensor, z: Tensor, layer: int = 0) -> Tensor:
        z = z if layer else F.dropout(z, 0.1, self.training)  # only M(x)
        p = self.up(F.dropout(F.gelu(self.down(z) + self.b1), 0.1, self.training))
        return (p + self.b2[layer]).view(len(z), -1, z.shape[-1])


class NPG(nn.Module):
    """p = Dropout(W₂ ReLU(W₁ z + b₁) + b₂), LPT's naive prompt generator (LPT Eq. 1 and 2)."""

    def __init__(self, d: int, t: int = 10, m: int = 128) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(d, m), nn.Linear(m, t * d)

    def forward(self, h: Tensor, mask: Tensor, z: Tensor) -> Tensor:
        p = F.dropout(self.up(self.down(z).relu()), 0.1, self.training)
        return p.view(len(z), -1, z.shape[-1])


class PPG(nn.Module):
    """p = Dropout(W₂ ReLU(Poolₜ(W₁ h + b₁)) + b₂): means are APPG, maxima MPPG (LPT Eq. 3, 4)."""

    def __init__(self, d: int, t: int = 10, m: int = 128, pool: str = "mean") -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool1d(t) if pool == "mean" else nn.AdaptiveMaxPool1d(t)
        self.down, self.up = nn.Linear(d, m), nn.Linear(m, d)

    def forward(self, h: Tensor, mask: Tensor, z: Tensor) -> Tensor:
        pooled = [self.pool(x[is_word].T).T for x, is_word in zip(self.down(h), mask.bool())]
        return F.dropout(self.up(torch.stack(pooled).relu()), 0.1, self.training)


class IDSPAM(nn.Module):
    """p = Dropout(W₂ ReLU(W₁ A)), A = mean(softmax(h W_Q (h W_K)ᵀ/√d) h W_V) (ID-SPAM Eq. 1, 2)."""

    def __init__(self, d: int, t: int = 10, m: int = 64) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(d, d, bias=False) for _ in range(3))
        self.down, self.up = nn.Linear(d, m, bias=False), nn.Linear(m, t * d, bias=False)

    def forward(self, h: Tensor, mask: Tensor, z: Tensor) -> Tensor:
        x = F.scaled_dot_product_attention(self.q(h), self.k(h), self.v(h), mask[:, None].bool())
        A = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        p = F.dropout(self.up(self.down(A).relu()), 0.1, self.training)
        return p.view(len(h), -1, h.shape[-1])


ENCODERS, DECODERS = ("bert", "camembert", "roberta", "xlm-roberta"), ("gpt2", "llama", "qwen3")
PROMPTS: dict[str, Any] = {  # method: generator, does its prompt enter half-way up?, learning rate
    "prompt-tuning": (lambda c: StaticPrompt(c.hidden_size), False, 3e-2),
    "s-idpg-phm": (lambda c: IDPG(c.hidden_size), False, 1e-2),
    "m-idpg-phm": (lambda c: IDPG(c.hidden_size, m=16, n_layers=c.num_hidden_layers), False, 3e-3),
    "lpt": (lambda c: StaticPrompt(c.hidden_size, std=1.0), True, 3e-2),
    "lpt-npg": (lambda c: NPG(c.hidden_size), True, 5e-3),
    "lpt-appg": (lambda c: PPG(c.hidden_size), True, 5e-3),
    "lpt-mppg": (lambda c: PPG(c.hidden_size, pool="max"), True, 5e-3),
    "id-spam": (lambda c: IDSPAM(c.hidden_size), True, 5e-3),
}


def run(lm: Any, ids: Tensor, mask: Tensor, generator: Any = None, layer: int = -1) -> Tensor:
    """Return z behind the last layer, with a prompt after `layer` layers (-1: among the words)."""
    is_encoder = lm.config.model_type in ENCODERS
    first = int(is_encoder)  # behind `<s>` (a late prompt may be anywhere), or in front
    blocks = next(module for module in lm.modules() if isinstance(module, nn.ModuleList))
    words = h = lm.get_input_embeddings()(ids)
    z = run(lm, ids, mask) if isinstance(generator, IDPG) else words[:, 0]  # IDPG's M(x)
    for k in range(-1, len(blocks)):
        if generator and k == layer:  # insert the prompt
            p = generator(words if isinstance(generator, IDSPAM) else h, mask, z)
            h = torch.cat([h[:, :first], p, h[:, first:]], 1)
            mask = torch.cat([mask.new_ones(p.shape[:2]), mask], 1)
        elif isinstance(generator, IDPG) and 0 < k < len(generator.b2):  # M-IDPG: add to it
            p = generator(h, mask, z, k)
            h = h + F.pad(p, (0, 0, first, h.shape[1] - first - p.shape[1]))
        if k >= 0:  # a layer, without attention to padding or, in a decoder, to later positions
            positions = torch.arange(h.shape[1], device=h.device)[None]
            visible = mask[:, None, None].bool() & (is_encoder | (positions <= positions.T))
            bias = h.new_zeros(visible.shape).masked_fill(~visible, torch.finfo(h.dtype).min)
            angles = lm.rotary_emb(h, positions) if hasattr(lm, "rotary_emb") else None
            blocks[k].train(bool(generator and generator.training and k >= layer))  # dropout
            h = blocks[k](h, attention_mask=bias, position_embeddings=angles)
        elif is_encoder:
            h = lm.embeddings(inputs_embeds=h)
        elif lm.config.model_type == "gpt2":
            h = h + lm.wpe.weight[: h.shape[1]]
        z = h[:, 0] if is_encoder else h[torch.arange(len(h)), mask.sum(1) - 1]
    return getattr(lm, "ln_f", getattr(lm, "norm", nn.Identity()))(z)


def train(lm: Any, data: Dataset, n_classes: int, method: str, epochs: int = 5) -> float:
    """Train a generator and a linear head on (ids, mask, class); return the validation accuracy."""
    make_generator, is_late, lr = PROMPTS[method]
    generator, head = make_generator(lm.config), nn.Linear(lm.config.hidden_size, n_classes)
    layer = lm.config.num_hidden_layers // 2 if is_late else -1
    optimizer = torch.optim.AdamW([*generator.parameters(), *head.parameters()], lr)
    training, validation = random_split(data, [0.8, 0.2])
    for _ in range(epochs):
        generator.train()
        losses = []
        for ids, mask, label in DataLoader(training, 16, shuffle=True):
            loss = F.cross_entropy(head(run(lm, ids, mask, generator, layer)), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        generator.eval()
        with torch.no_grad():
            batches = DataLoader(validation, 16)
            is_right = [head(run(lm, i, m, generator, layer)).argmax(1) == y for i, m, y in batches]
        accuracy = torch.cat(is_right).float().mean().item()
        print(f"loss {sum(losses) / len(losses):.3f}, validation accuracy {accuracy:.1%}")
    return accuracy


def train_from_csv(arguments: list[str] | None = None) -> None:
    """Train on a CSV file, and print the validation accuracy after each epoch."""
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS)
    parser.add_argument("--data", required=True, help="CSV file with the columns text and label")
    parser.add_argument("--backbone", default="roberta-base", help="name or folder of the model")
    parser.add_argument("--method", default="lpt-npg", choices=PROMPTS)
    parser.add_argument("--epochs", default=5, type=int)
    args = parser.parse_args(arguments)
    logging.set_verbosity_error()
    try:
        with open(args.data, newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file, restval=""))
        if len(rows) < 10 or not {"text", "label"} <= rows[0].keys():
            raise ValueError(f"{args.data} needs the columns text and label, and 10 rows or more")
        tokenizer = AutoTokenizer.from_pretrained(args.backbone, trust_remote_code=False)
        lm = AutoModel.from_pretrained(args.backbone, dtype=torch.float32, trust_remote_code=False)
        if lm.config.model_type not in ENCODERS + DECODERS:
            raise ValueError(f"{lm.config.model_type} is not one of {ENCODERS + DECODERS}")
    except (OSError, ValueError) as error:
        parser.error(str(error).splitlines()[0])
    texts, labels = [row["text"] for row in rows], [row["label"] for row in rows]
    classes = sorted(set(labels))
    targets = torch.tensor([classes.index(label) for label in labels])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.padding_side = "right"
    tokens = tokenizer(texts, padding=True, truncation=True, max_length=128, return_tensors="pt")
    data = TensorDataset(tokens["input_ids"], tokens["attention_mask"], targets)
    train(lm.requires_grad_(False), data, len(classes), args.method, args.epochs)


if __name__ == "__main__":
    train_from_csv()

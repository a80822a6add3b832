"""A train.py in the style of karpathy/autoresearch: own loop and clock, model(x, y, reduction=).

It knows nothing of Clock or of harness/, prints a summary and no METRIC lines, and must be scored.
"""

import time

import torch
import torch.nn as nn
import torch.nn.functional as F

from prepare import MAX_SEQ_LEN, TIME_BUDGET, Tokenizer, evaluate_bpb, make_dataloader

DEVICE_BATCH_SIZE = 8
STEPS = 3


class Bigram(nn.Module):
    """Logits of the next token from the present one."""

    def __init__(self, vocab_size, width=16):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, width)
        self.lm_head = nn.Linear(width, vocab_size, bias=False)

    def forward(self, idx, targets=None, reduction="mean"):
        logits = self.lm_head(self.wte(idx)).float()
        if targets is None:
            return logits
        flat, wanted = logits.view(-1, logits.size(-1)), targets.view(-1)
        return F.cross_entropy(flat, wanted, reduction=reduction)


t_start = time.time()
torch.manual_seed(42)
tokenizer = Tokenizer.from_directory()
model = Bigram(tokenizer.get_vocab_size())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
train_loader = make_dataloader(tokenizer, DEVICE_BATCH_SIZE, MAX_SEQ_LEN, "train")
total_training_time = 0.0
for _ in range(STEPS):
    t0 = time.time()
    x, y, epoch = next(train_loader)
    loss = model(x, y)
    loss.backward()
    optimizer.step()
    model.zero_grad(set_to_none=True)
    total_training_time += time.time() - t0
    if total_training_time > TIME_BUDGET:
        break
model.eval()
val_bpb = evaluate_bpb(model, tokenizer, DEVICE_BATCH_SIZE)
print("---")
print(f"val_bpb:          {val_bpb:.6f}")
print(f"training_seconds: {total_training_time:.1f}")
print(f"total_seconds:    {time.time() - t_start:.1f}")
print(f"num_steps:        {STEPS}")

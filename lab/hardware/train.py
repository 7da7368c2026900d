"""A language model's training on one GPU, as a job of Wattshift: checkpoints, progress, and a stop that loses nothing.

It needs PyTorch with CUDA. GPT-2's shape (124M) on made-up tokens, in bfloat16. `$WATTSHIFT_CHECKPOINT_DIR` keeps
checkpoint.pt, written when the job is told to stop and at the end; `$WATTSHIFT_PROGRESS_FILE` gets a line a second.
The last line that it prints is JSON: steps, and seconds per step once warm.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]

VOCABULARY, WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 50_257, 768, 12, 12, 512, 32
WARM_STEPS = 20
STOPPED = 143

stop_asked = False


def on_sigterm(*_: object) -> None:
    """Record that the job should end; it looks after every step."""
    global stop_asked
    stop_asked = True


def model() -> Any:
    """Return the network: embeddings, causal layers, and the logits of the next token."""
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    return nn.ModuleDict(
        {
            "embedding": nn.Embedding(VOCABULARY, WIDTH),
            "layers": nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False),
            "logits": nn.Linear(WIDTH, VOCABULARY, bias=False),
        }
    ).cuda()


def main() -> int:
    """Train, or go on from the checkpoint."""
    signal.signal(signal.SIGTERM, on_sigterm)
    parser = argparse.ArgumentParser(description="Train GPT-2's shape on made-up tokens.")
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    kept = Path(os.environ.get("WATTSHIFT_CHECKPOINT_DIR", ".")) / "checkpoint.pt"
    progress = os.environ.get("WATTSHIFT_PROGRESS_FILE")
    torch.manual_seed(0)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    first = 0
    if kept.exists():
        found = torch.load(kept)
        net.load_state_dict(found["net"])
        first = found["step"]
    mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device="cuda", dtype=torch.bfloat16)
    told_s = began_s = time.monotonic()
    warm, step = 0, first
    while step < steps and not stop_asked:
        tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            hidden = net["layers"](net["embedding"](tokens[:, :-1]), mask=mask, is_causal=True)
            logits = net["logits"](hidden)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize()
        step += 1
        warm += 1
        if warm == WARM_STEPS:
            began_s = time.monotonic()
        if progress and time.monotonic() - told_s >= 1:
            told_s = time.monotonic()
            with open(progress, "a") as file:
                file.write(json.dumps({"done": step, "total": steps, "loss": float(loss)}) + "\n")
    seconds = (time.monotonic() - began_s) / max(warm - WARM_STEPS, 1)
    draft = kept.with_suffix(".tmp")
    torch.save({"net": net.state_dict(), "step": step}, draft)
    draft.replace(kept)
    if progress:
        with open(progress, "a") as file:
            file.write(json.dumps({"done": step, "total": steps}) + "\n")
    print(json.dumps({"first": first, "step": step, "seconds_per_step": seconds, "is_stopped": stop_asked}), flush=True)
    return STOPPED if stop_asked else 0


if __name__ == "__main__":
    sys.exit(main())

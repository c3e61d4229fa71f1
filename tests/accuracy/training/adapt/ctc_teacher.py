# pyright: basic, reportArgumentType=false
"""What line 4 needs beside the command line.

ctc_teacher.py check                       the GPU's CTC kernel against PyTorch's own loss, on shapes of training
ctc_teacher.py short OUT MAX MANIFEST…     manifests as one, without what is longer than MAX seconds
ctc_teacher.py head HYBRID OUT             a hybrid's encoder and CTC head as a model that writes quickly
ctc_teacher.py foreign DATA OUT.jsonl      speech in other languages, to hear what the teacher makes of it
ctc_teacher.py best RUN…                   the run with the lowest WER on dev
"""

import gzip
import json
import sys
from pathlib import Path


def check():
    import torch
    from torch.nn.functional import ctc_loss as torchs

    from stapes.models.ctc_loss import ctc_losses

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for rows, frames, size, longest in ((32, 300, 32, 70), (8, 1500, 32, 400)):
        logits = (3 * torch.randn(rows, frames, size, device=device)).requires_grad_()
        counts = torch.randint(longest // 3, longest, (rows,)).tolist()
        texts = [torch.randint(1, size, (count,)).tolist() for count in counts]
        real = torch.randint(2 * longest, frames + 1, (rows,)).tolist()
        ours = ctc_losses(logits.log_softmax(-1), real, texts, 0).losses
        (gradient,) = torch.autograd.grad(ours.sum(), logits)
        double = logits.detach().double().requires_grad_()
        joined = torch.tensor([id for text in texts for id in text], device=device)
        theirs = torchs(
            double.log_softmax(-1).transpose(0, 1), joined, torch.tensor(real), torch.tensor(counts), reduction="none"
        )
        (wanted,) = torch.autograd.grad(theirs.sum(), double)
        loss, grad = float((ours.detach() / theirs.detach() - 1).abs().max()), float((gradient - wanted).abs().max())
        print(f"{rows} × {frames}: loss off by {loss:.1e} of itself, gradient by {grad:.1e}", flush=True)
        assert loss < 1e-4, loss
        assert grad < 3e-2, grad  # sums of logarithms near a thousand, in float32


def short(out, most, *manifests):
    lines, seconds = [], 0.0
    for manifest in manifests:
        with gzip.open(manifest, "rt", encoding="utf-8") as source:
            for line in source:
                duration = json.loads(line)["duration"]
                if duration <= float(most):
                    lines.append(line)
                    seconds += duration
    with gzip.open(out, "wt", encoding="utf-8") as target:
        target.writelines(lines)
    print(f"{Path(out).name}: {len(lines)} utterances, {seconds / 3600:.2f} h")


def head(hybrid, out):
    import torch

    from stapes.checkpoints.spectrogram_models import (
        load_spectrogram_model,
        open_spectrogram_model,
        save_spectrogram_model,
    )
    from stapes.models.ctc_head import CTCConfig

    checkpoint = open_spectrogram_model(Path(hybrid))
    network = load_spectrogram_model(checkpoint, torch.float32, torch.device("cpu"))
    weights = {name: each for name, each in network.state_dict().items() if not name.startswith("decoder.")}
    config = CTCConfig(checkpoint.config.encoder, checkpoint.config.vocab_size)
    save_spectrogram_model(Path(out), config, weights, checkpoint.tokenizer)


def foreign(data, out):
    rows = []
    for name in ("commonvoice", "asterisk"):
        path = Path(data) / name / "manifest.jsonl"
        for line in path.open(encoding="utf-8") if path.exists() else ():
            row = json.loads(line)
            audio = path.parent / row["audio"]
            if row.get("lang") != "en" and 1.0 <= row["duration"] <= 20 and audio.exists():
                rows.append({"audio": str(audio), "text": "a", "duration": row["duration"], "split": "train"})
    Path(out).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    print(len(rows), "recordings,", round(sum(row["duration"] for row in rows) / 3600, 2), "h")


def best(*runs):
    found = {}
    for run in runs:
        path = Path(run) / "metrics.jsonl"
        for line in path.open(encoding="utf-8") if path.exists() else ():
            row = json.loads(line)
            if row["kind"] == "dev" and (Path(run) / "model" / "config.json").exists():
                found[run] = min(found.get(run, 9.0), row["wer"])
    print({Path(run).name: round(wer, 4) for run, wer in found.items()}, file=sys.stderr)
    print(min(found, key=found.get) if found else "")


if __name__ == "__main__":
    {"check": check, "short": short, "head": head, "foreign": foreign, "best": best}[sys.argv[1]](*sys.argv[2:])

"""How good the weights are: errors on the dev utterances."""

from __future__ import annotations

from stapes.data.batching import TrainingData
from stapes.training.config import RunOptions
from stapes.training.metrics import Scores
from stapes.training.objectives import Objective, prepare
from stapes.training.parallel import Processes


def score_dev(
    objective: Objective, dev: TrainingData, processes: Processes, run: RunOptions
) -> tuple[Scores, list[str]]:
    """Errors of greedy transcripts, summed over all processes, and a few transcripts of this one's."""
    tokenizer, scores, seen = objective.tokenizer, Scores(), 0
    samples: list[str] = []
    start = dev.state_dict()
    was_training = objective.training
    objective.eval()
    for batch in dev:
        found = objective.evaluate(prepare(batch, processes.device.torch))
        scores.loss += float(found.losses.total)
        scores.units += objective.units(batch)
        for row in batch.weights.nonzero()[:, 0].tolist():
            # Both as the vocabulary writes them, which may be in one case only.
            reference = tokenizer.decode(batch.targets[row, : int(batch.target_lengths[row])].tolist())
            hypothesis = tokenizer.decode(found.tokens[row])
            scores.add(reference, hypothesis)
            if len(samples) < run.sample_texts:
                samples.append(f"{batch.ids[row]}: {reference} → {hypothesis}")
        seen += len(batch) * processes.world_size
        if run.evaluate_limit is not None and seen >= run.evaluate_limit:
            dev.load_state_dict(start)
            break
    objective.train(was_training)
    summed = processes.sum(scores.tensor().to(processes.device.torch))
    return Scores.of(summed.cpu()), samples

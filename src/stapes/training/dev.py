"""How good the weights are, on the dev utterances."""

from __future__ import annotations

from stapes.data.batching import TrainingData
from stapes.training.config import RunOptions
from stapes.training.metrics import DevScores
from stapes.training.objectives import Objective, prepare
from stapes.training.parallel import Processes


def score_dev(
    objective: Objective, dev: TrainingData, processes: Processes, run: RunOptions
) -> tuple[DevScores, list[str]]:
    """What the objective finds, summed over all processes, and a few examples of this one's.

    Every call sees the same batches.
    """
    scores, seen = objective.scores(), 0
    samples: list[str] = []
    start = dev.state_dict()
    was_training = objective.training
    objective.eval()
    for batch in dev:
        found = objective.evaluate(prepare(batch, processes.device.torch))
        samples += objective.judge(scores, batch, found)[: run.sample_texts - len(samples)]
        seen += len(batch) * processes.data_size
        if run.evaluate_limit is not None and seen >= run.evaluate_limit:
            break
    dev.load_state_dict(start)
    objective.train(was_training)
    summed = processes.sum(scores.tensor().to(processes.device.torch))
    return scores.of(summed.cpu()), samples

"""The training loop: batches in, weights changed, figures and checkpoints out.

`Trainer.run` reads from top to bottom as what happens. Everything random in a step is drawn from the run's seed and the
step's number, so that going on from a checkpoint makes the same steps, bit for bit, as never having stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from stapes.data.batching import Batch, TrainingData
from stapes.data.seeds import mix
from stapes.errors import DeviceError, StapesError
from stapes.evaluation.training_cost import write_cost
from stapes.progress import Progress
from stapes.training.checkpoint import Checkpoints, average_weights
from stapes.training.config import TrainConfig
from stapes.training.cost import settings_of
from stapes.training.deepspeed import DeepSpeedOptimizer
from stapes.training.dev import score_dev
from stapes.training.metrics import MetricsLog, Window, rates, rounded
from stapes.training.networks import DTYPES, Source, save_model
from stapes.training.objectives import Losses, Objective, prepare
from stapes.training.optimizer import Optimizer
from stapes.training.parallel import Processes, gradient_sync, losses_and_gradients, lost_process
from stapes.training.plan import Costs
from stapes.training.settings import to_mapping

_SECONDS_BETWEEN_READINGS = 5.0
"""Of the GPU's load, power and clocks."""

_SECONDS_BETWEEN_NOTES = 10.0
"""Of the loss on the screen; the log has it more often."""

_MOST_NAMED = 8
"""Utterances that a message names."""


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    model: Path | None
    """The folder with the model; None where the run was interrupted before there was one."""
    steps: int
    wer: float | None
    """On dev, of the weights that were taken; None without dev manifests, or where nothing is written."""
    cer: float | None
    seconds: float
    """Of training and evaluation, in all sittings."""
    interrupted: bool
    loss: float | None = None
    """On dev."""
    accuracy: float | None = None
    """Of the contrastive task, on dev."""


@dataclass
class Running:
    """A step that has been sent to the device; its figures are read when the next one is on its way."""

    step: int
    figures: Tensor
    """Loss (sum), gradient norm, whether it was skipped, what the objective says besides: float64 on the host, valid
    when ``ready``."""
    ready: torch.cuda.Event | None
    rows: list[tuple[tuple[str, ...], Tensor]]
    """Ids and losses of each batch's utterances."""


class Trainer:
    """One run, in this process. ``wrapped`` is what stands in for the objective where there are several processes."""

    def __init__(
        self,
        config: TrainConfig,
        processes: Processes,
        objective: Objective,
        wrapped: torch.nn.Module,
        optimizer: Optimizer | DeepSpeedOptimizer,
        data: TrainingData,
        dev: TrainingData | None,
        source: Source | None,
        precision: str,
        progress: Progress,
    ) -> None:
        self.config, self.processes, self.progress = config, processes, progress
        self.objective, self.wrapped, self.optimizer = objective, wrapped, optimizer
        self.data, self.dev, self.source, self.precision = data, dev, source, precision
        self.device = processes.device.torch
        self.checkpoints = Checkpoints(config.folder, config.checkpoint)
        self.log: MetricsLog | None = None
        self.costs = Costs(objective.network)
        self.window = Window()
        self.bad_steps = 0
        """Skipped in a row."""
        self.worse = 0
        """Evaluations in a row without a better one."""
        self.seconds_before = 0.0
        """In earlier sittings."""
        self.audio_seconds = 0.0
        """Of all batches in all sittings, without padding."""
        self._running: Running | None = None
        self._reported: set[str] = set()
        self._norm = 0.0
        self._begun = self._window_begun = time.perf_counter()
        self._asked = self._noted = 0.0
        self._stopped = False
        self._evaluated = -1
        """The step that was evaluated last."""

    @property
    def seconds(self) -> float:
        """Of training and evaluation, in all sittings."""
        return self.seconds_before + time.perf_counter() - self._begun

    @property
    def step(self) -> int:
        """Steps made."""
        return self.optimizer.step_number

    def run(self, stop: Callable[[], bool] = lambda: False) -> Result:
        """Train until the steps are made, dev gets no better, time is over, or ``stop`` says so.

        Raises StapesError for what a user can mend: a full disk, losses that are never finite, a lost process.
        """
        config, total = self.config, self.optimizer.total_steps
        if self.processes.is_first:
            self.log = MetricsLog(config.folder, self.progress, tensorboard=config.run.tensorboard, from_step=self.step)
        self._begun = self._window_begun = time.perf_counter()
        ending = False
        try:
            steps = self._batches()
            while self.step < total and not ending:
                self._train(next(steps))
                ending = self._is_ending(stop)
                if self.step % config.run.evaluate_every == 0 or self.step == total:
                    ending = self._evaluate() or ending
                elif config.checkpoint.every and self.step % config.checkpoint.every == 0:
                    self._save()
            self._settle()
            if self.step < total:
                self._save()
            return self._finish()
        except RuntimeError as error:
            lost = lost_process(error, self.step) if self.processes.world_size > 1 else None
            if lost is None:
                raise
            raise lost from error
        finally:
            self.data.close()
            if self.dev is not None:
                self.dev.close()
            if self.log is not None:
                self.log.close()

    def _batches(self) -> Iterator[list[Batch]]:
        """The batches of each step, epoch after epoch."""
        group: list[Batch] = []
        while True:
            for batch in self.data:
                group.append(batch)
                if batch.ends_step:
                    yield group
                    group = []

    def _train(self, batches: list[Batch]) -> None:
        """One step."""
        step = self.step
        device = self.device
        # Filled, not copied: the host would wait for the step before.
        units = torch.full((), sum(map(self.objective.units, batches)), dtype=torch.float32, device=device)
        self.processes.sum(units)
        losses = self._gradients(batches, units)
        if losses is None:
            losses = self._in_halves(batches, units)
        norm, bad = self.optimizer.step()
        self._settle()
        total = torch.stack([each.total for each in losses]).sum()
        others = [torch.stack(column).sum() for column in zip(*(each.figures for each in losses), strict=True)]
        figures = torch.stack([each.double() for each in (total, norm, bad, *others)])
        ready = None
        if device.type == "cuda":
            # Into pinned memory, for the host waits for a copy into any other.
            figures = torch.empty_like(figures, device="cpu", pin_memory=True).copy_(figures, non_blocking=True)
            ready = torch.cuda.Event(blocking=True)  # the core that would wait is left to those who read audio
            ready.record()
        rows = [(batch.ids, each.rows) for batch, each in zip(batches, losses, strict=False)]
        self._running = Running(step, figures, ready, rows)
        self._count(batches, losses)

    def _gradients(self, batches: list[Batch], units: Tensor) -> list[Losses] | None:
        """Add up the gradients of a step's batches; None where memory ran out, once what it held is free again."""
        try:
            return self._backward(batches, units)
        except torch.OutOfMemoryError as error:
            if self.processes.world_size > 1:
                raise self._too_large(batches) from error
        self.optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return None

    def _backward(self, batches: list[Batch], units: Tensor) -> list[Losses]:
        """The loss is a mean over the target tokens of all processes."""
        objective, rank = self.objective, self.processes.chance_rank
        objective.train()
        objective.at_step(self.step)
        # Layers that are left out are drawn on the CPU, the same ones by all processes.
        torch.manual_seed(mix(self.config.seed, self.step) >> 1)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(mix(self.config.seed, self.step, rank) >> 1)
        elif not objective.drops_layers:
            torch.manual_seed(mix(self.config.seed, self.step, rank) >> 1)
        self.optimizer.zero_grad()
        scale = self.processes.data_size / units.clamp(min=1)
        loss_scale = getattr(self.optimizer, "scale", None)
        out = []
        for number, batch in enumerate(batches, 1):
            with gradient_sync(self.wrapped, number == len(batches)):
                prepared = prepare(batch, self.device)
                losses = losses_and_gradients(self.wrapped, prepared, scale, self.optimizer.backward, loss_scale)
            out.append(losses._replace(total=losses.total.detach()))
        return out

    def _in_halves(self, batches: list[Batch], units: Tensor) -> list[Losses]:
        """The same step in smaller batches, after memory ran out. DeviceError where one utterance is too much."""
        while max(map(len, batches)) > 1:
            self.progress.note(
                f"step {self.step}: out of memory with {max(map(len, batches))} utterances at once; trying half. "
                "A smaller data.batch_seconds is faster than this"
            )
            halves = [(batch, (len(batch) + 1) // 2) for batch in batches]
            parts = [(batch.rows(0, half), batch.rows(half, len(batch))) for batch, half in halves]
            batches[:] = [part for pair in parts for part in pair if len(part)]
            losses = self._gradients(batches, units)
            if losses is not None:
                return losses
        raise DeviceError(
            f"out of memory with one utterance of {batches[0].waveforms.shape[1] / 16_000:.0f} s: leave such out with "
            "`stapes prepare --max-seconds`, or set run.checkpoint_layers=true"
        )

    def _too_large(self, batches: list[Batch]) -> DeviceError:
        """Several processes cannot retry alone. All end, and torchrun starts them again with smaller batches."""
        path = self.config.folder / "out_of_memory"
        count = int(path.read_text(encoding="ascii")) if path.exists() else 0
        path.write_text(str(count + 1), encoding="ascii")
        return DeviceError(
            f"out of memory at step {self.step} with {len(batches[0])} utterances of "
            f"{batches[0].waveforms.shape[1] / 16_000:.0f} s: start again with --resume, and batches will be a quarter "
            "smaller (torchrun --max-restarts does it by itself)"
        )

    def _settle(self) -> None:
        """Read the figures of the step before, while the device works on the one after it."""
        running, self._running = self._running, None
        if running is None:
            return
        if running.ready is not None:
            running.ready.synchronize()
        loss, norm, bad, *others = running.figures.tolist()
        self._norm = norm
        if not bad:
            self.bad_steps = 0
            self.window.add(loss, others)
            return
        self.bad_steps += 1
        infinite = [
            name
            for ids, rows in running.rows
            for name, fine in zip(ids, rows.isfinite().tolist(), strict=True)
            if not fine
        ]
        gathered = sorted({name for names in self.processes.gather(infinite) for name in names})
        named = ", ".join(gathered[:_MOST_NAMED]) or "none alone: the gradient is at fault"
        message = f"step {running.step} is skipped: its loss or gradient is not finite; utterances: {named}"
        if self.processes.is_first:
            self.progress.note(message)
        if self.bad_steps >= self.config.run.max_bad_steps:
            raise StapesError(
                f"{self.bad_steps} steps in a row were not finite, the last for {named}: lower optimizer.peak_lr, or "
                "leave those utterances out; the last checkpoint is from before"
            )

    def _count(self, batches: list[Batch], losses: list[Losses]) -> None:
        """What the batches held, for the log; utterances that could not be used are named once."""
        window = self.window
        for batch in batches:
            window.units += self.objective.units(batch)
            window.seconds += batch.seconds
            self.audio_seconds += batch.seconds * self.processes.data_size
            window.padded_seconds += batch.padded_seconds
            window.rows += float(batch.weights.sum())
            window.flops += self.costs.of(len(batch), batch.samples, batch.targets.shape[1]).flops
            window.skipped += len(batch.skipped)
            self._report({each.id: each.reason for each in batch.skipped})
            self.progress.advance(batch.seconds * self.processes.data_size)
        for each in losses:
            window.skipped += len(each.impossible)
            self._report({text.partition(":")[0]: text for text in each.impossible})
        if self.step % self.config.run.log_every == 0:
            self._log()

    def _report(self, reasons: Mapping[str, str]) -> None:
        for name, reason in reasons.items():
            if name not in self._reported and len(self._reported) < 1000:
                self._reported.add(name)
                self.progress.note(reason)

    def _log(self) -> None:
        """A line of figures of all processes together."""
        self._settle()
        summed = Window.of(self.processes.sum(self.window.tensor().to(self.device)).cpu())
        now = time.perf_counter()
        elapsed, self._window_begun = now - self._window_begun, now
        self.window = Window()
        said = self.objective.figures(summed.figures)
        if self.log is not None:
            self._write_line(self.log, summed, said, now, elapsed)
        self.objective.watch(said)

    def _write_line(
        self, log: MetricsLog, summed: Window, said: Mapping[str, float], now: float, elapsed: float
    ) -> None:
        """Write a line of figures, and now and then the loss on the screen."""
        steps = max(1, self.data.steps(self.data.epoch))
        values = {
            "epoch": self.data.epoch,
            "learning_rate": self.optimizer.learning_rate,
            "gradient_norm": self._norm,
            **rates(
                summed,
                elapsed,
                self.processes.device,
                self.precision,
                self.processes.world_size,
                ask_driver=now - self._asked > _SECONDS_BETWEEN_READINGS,
            ),
            **said,
            "epoch_seconds": steps * elapsed / self.config.run.log_every,
        }
        self._asked = now if "gpu_utilisation" in values else self._asked
        log.write(self.step, "train", {name: rounded(value) for name, value in values.items()})
        if now - self._noted > _SECONDS_BETWEEN_NOTES:
            self._noted = now
            self.progress.note(f"step {self.step} of {self.optimizer.total_steps}: loss {values['loss']:.3f}")

    def _is_ending(self, stop: Callable[[], bool]) -> bool:
        """Whether the run is to end here. Several processes agree on it now and then."""
        limit = self.config.run.max_minutes
        late = limit is not None and self.seconds > 60 * limit
        if self.processes.world_size == 1:  # nobody to agree with, nor to wait for
            self._stopped = stop()
            return self._stopped or late
        if self.step % self.config.run.log_every:
            return False
        wants = torch.tensor([float(stop()), float(late)], device=self.device)
        self._stopped, late = (bool(each) for each in self.processes.sum_all(wants).tolist())
        return self._stopped or late

    def _evaluate(self) -> bool:
        """Judge by the dev utterances, keep what is good. Whether it is time to stop because it gets no better."""
        self._settle()
        if self.dev is None:
            self._save()
            return False
        begun = time.perf_counter()
        with self.optimizer.averaged():
            weights = self.optimizer.weights()
            scores, samples = score_dev(self.objective, self.dev, self.processes, self.config.run)
        self._evaluated = self.step
        before = self.checkpoints.best()
        self.worse = 0 if not before or scores.score < before[0].score else self.worse + 1
        self.processes.wait()
        if self.log is not None:
            self.checkpoints.save_weights(self.step, scores.score, scores.figures(), weights)
            if not self.worse:
                self._write_model(weights)
            values = {**scores.figures(), "seconds": time.perf_counter() - begun}
            self.log.write(self.step, "dev", {name: rounded(value) for name, value in values.items()}, samples)
            self.progress.note(f"step {self.step} of {self.optimizer.total_steps}: {scores.text()} on dev")
        self._save()
        self._window_begun += time.perf_counter() - begun
        patience = self.config.run.patience
        return patience is not None and self.worse >= patience

    def _write_model(self, weights: dict[str, Tensor]) -> None:
        """Write the run's result as it is now."""
        save_model(
            self.config.folder / "model",
            self.objective.network,
            self.source,
            weights,
            self.objective.tokenizer,
            DTYPES[self.config.checkpoint.dtype],
            self.config,
        )

    def _write_cost(self) -> None:
        """Write beside the result what it took."""
        on_gpu = self.device.type != "cpu"
        cost = {
            **settings_of(self.config),
            "corpus_hours": rounded(self.data.epoch_seconds / 3600),
            "steps": self.step,
            "hours": rounded(self.seconds / 3600),
            "audio_seconds_per_second": rounded(self.audio_seconds / self.seconds),
            "processes": self.processes.world_size,
            "device": self.processes.device.name,
            "peak_memory_bytes": torch.cuda.max_memory_allocated(self.device) if on_gpu else None,
        }
        write_cost(self.config.folder / "model", cost)

    def _save(self) -> None:
        """Keep everything that going on needs."""
        self._settle()
        if self.step in self.checkpoints.steps():
            return
        state = {
            "network": self.optimizer.weights(),
            "optimizer": self.optimizer.state_dict(),
            "data": self.data.state_dict(),
            "bad_steps": self.bad_steps,
            "worse": self.worse,
            "seconds": self.seconds,
            "audio_seconds": self.audio_seconds,
        }
        if self.log is not None:
            record = {"step": self.step, "config": to_mapping(self.config), "world_size": self.processes.world_size}
            self.checkpoints.save(self.step, state, record)
        self.processes.wait()

    def _finish(self) -> Result:
        """Choose the weights and write the model."""
        model = self.config.folder / "model"
        if self._stopped and self.step < self.optimizer.total_steps:
            return Result(model if model.exists() else None, self.step, None, None, self.seconds, True)
        with self.optimizer.averaged():
            weights = self.optimizer.weights()
        if self.dev is None:
            if self.log is not None:
                self._write_model(weights)
                self._write_cost()
            return Result(model, self.step, None, None, self.seconds, False)
        if self._evaluated != self.step:
            self._evaluate()
        kept = self.checkpoints.best()
        found = kept[0].figures
        count = min(self.config.checkpoint.average, len(kept))
        if count > 1:
            averaged = average_weights(kept[:count])
            self.optimizer.set_weights(averaged)
            with self.optimizer.averaged():
                scores, _ = score_dev(self.objective, self.dev, self.processes, self.config.run)
            self.progress.note(f"the mean of the best {count}: {scores.text()}; a score of {kept[0].score:.4f} alone")
            if scores.score < kept[0].score:
                found = scores.figures()
                if self.log is not None:
                    self._write_model(averaged)
        if self.log is not None:
            values = {name: rounded(value) for name, value in found.items()}
            self.log.write(self.step, "result", {**values, "seconds": self.seconds})
            self._write_cost()
        self.processes.wait()
        wer, cer = found.get("wer"), found.get("cer")
        return Result(model, self.step, wer, cer, self.seconds, False, found.get("loss"), found.get("accuracy"))

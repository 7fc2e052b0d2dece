"""One training run: makes batches, takes steps, logs progress, saves its state, and resumes from
it.

Owns the model, the optimizer and the run's directory:

    config.json, tokenizer, template, model.safetensors    the checkpoint that serves
    training.state                                         the state from which a run resumes
    log.jsonl                                              one line for each logged step
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mooncake.base import CheckpointError, ModelSpec
from mooncake.model.checkpoint.making.presets import preset_config, write_preset_files
from mooncake.model.checkpoint.weights import SPEC_DTYPES
from mooncake.tasks.mix import evaluation_samples
from mooncake.tasks.sample import WATCHED
from mooncake.train.ahead import Wanted
from mooncake.train.attention import Attention
from mooncake.train.batches import PADDED_TOKENS, Batch, Batches
from mooncake.train.checkpoint import (
    STATE_NAME,
    load_state,
    load_weights,
    save_state,
    write_weights,
)
from mooncake.train.config import TrainConfig
from mooncake.train.experts import Router
from mooncake.train.model import Losses, TrainedK2
from mooncake.train.muon_clip import Mapped, MuonClip, NormClip, Rates, clip_qk

LOG_NAME = "log.jsonl"
_PADDED_TOKENS_OF_GPU = 8192
"""A GPU wants few large groups."""
Log = Callable[[Mapping[str, Any]], None]
Computed = tuple[Losses, Sequence[torch.Tensor | None]]
"""What a batch gives: its losses, and the gradients of all weights."""


@dataclass(frozen=True)
class Measured:
    """What a step found, on the device that computed it."""

    loss: torch.Tensor
    mtp_loss: torch.Tensor | None
    max_logits: torch.Tensor
    gammas: torch.Tensor
    loads: list[torch.Tensor]
    norm: torch.Tensor | None
    rate: float

    def line(self) -> dict[str, Any]:
        """Return the values of a line of the log. This waits for the device."""
        return {
            "loss": float(self.loss),
            "mtp_loss": None if self.mtp_loss is None else float(self.mtp_loss),
            "max_logit": float(self.max_logits.max()), "max_logits": self.max_logits.tolist(),
            "clipped": int((self.gammas < 1).sum()),
            "load": max(map(float, self.loads), default=1.0),
            "norm": None if self.norm is None else float(self.norm), "rate": self.rate,
        }  # fmt: skip


class Run:
    """A training run at its present step."""

    def __init__(self, config: TrainConfig) -> None:
        """Begin in an empty directory, or resume from the state in it.

        Raises:
            ConfigError: there is no such preset, or it cannot be trained.
            CheckpointError: the state there, or the weights to start from, belong to another
                model, or the tasks have changed.
        """
        torch.set_num_threads(1)
        self._config = config
        self._out = Path(config.out)
        self._device = torch.device(config.device)
        if not (self._out / "config.json").exists():
            write_preset_files(config.preset, self._out)
        document = preset_config(config.preset)
        spec = ModelSpec.from_config(document)
        self._stored = SPEC_DTYPES[spec.dtype]
        self.model = TrainedK2(
            spec, document["num_nextn_predict_layers"], SPEC_DTYPES[config.dtype]
        )
        self.model.initialize(config.seed)
        self.model.to(self._device)
        self._map: Mapped = map
        if config.threads > 1 and self._device.type == "cpu":
            self._map = ThreadPoolExecutor(
                config.threads, initializer=torch.set_num_threads, initargs=(1,)
            ).map
        """Threads compute a step's batches, and the updates of matrices. Results come in the order
        of the batches, so that their sums are the same for any number of threads.
        """
        self._optimizer = MuonClip(
            self.model.named_parameters(),
            Rates(weight_decay=config.weight_decay, dtype=SPEC_DTYPES[config.dtype]),
            muon=config.optimizer != "adamw",
            mapped=self._map,
        )
        self._norms = NormClip() if config.clip_norms else None
        self._batches = Batches(
            self._out, config.seed, config.step_tokens, config.batch_tokens,
            padded_tokens=PADDED_TOKENS if self._device.type == "cpu" else _PADDED_TOKENS_OF_GPU,
            rounded=self._device.type == "cpu" and config.dtype != "float32",
            processes=config.data_processes,
        )  # fmt: skip
        self._watched: dict[str, list[Batch]] = {}
        self._attentions = [m for m in self.model.modules() if isinstance(m, Attention)]
        self._routers = [m for m in self.model.modules() if isinstance(m, Router)]
        self._tasks = dict.fromkeys(task for stage in config.parts() for task in stage.tasks)
        self._digests = self._batches.digests(self._tasks)
        self.step = 0
        self._tokens = 0
        if (self._out / STATE_NAME).exists():
            progress = load_state(self._out / STATE_NAME, self.model, self._optimizer, self._norms)
            self.step, self._tokens = progress["step"], progress["tokens"]
            self._check_tasks(progress.get("tasks", {}))
        elif config.start_from:
            load_weights(Path(config.start_from), self.model)
        self._forget_later_lines()

    def go(
        self, log: Log, until: int | None = None, stopping: Callable[[], bool] = lambda: False
    ) -> None:
        """Take steps until `until`, or all. Save now and then and at the end.

        stopping: is called before each step. When it returns true, the run is saved and stops.
        """
        config = self._config
        total = config.total_steps
        last = total if until is None else until
        with closing(self._batches.of_steps(self._wanted(last))) as drawn:
            started, tokens = time.monotonic(), self._tokens
            while self.step < last and not stopping():
                measured = self.take_step(next(drawn))
                scored = self.step % config.score_steps == 0 or self.step == total
                logged = scored or self.step % config.log_steps == 0
                saved = self.step % config.save_steps == 0
                if logged:
                    line = measured.line()
                    rate = (self._tokens - tokens) / (time.monotonic() - started)
                    line = {"step": self.step, "tokens": self._tokens, **line, "tokens_per_s": rate}
                    if scored:
                        line["scores"] = self.scores()
                    with (self._out / LOG_NAME).open("a") as file:
                        file.write(json.dumps(line) + "\n")
                    log(line)
                if saved:
                    self.save()
                if logged or saved:
                    started, tokens = time.monotonic(), self._tokens
        self.save()

    def _wanted(self, last: int) -> Iterator[Wanted]:
        for step in range(self.step, last):
            stage, _ = self._config.stage_of(step)
            yield step, stage.tasks, stage.max_tokens

    def save(self) -> None:
        """Write the state, then the checkpoint that serves."""
        progress = {"step": self.step, "tokens": self._tokens, "tasks": self._digests}
        save_state(self._out / STATE_NAME, self.model, self._optimizer, self._norms, progress)
        write_weights(self._out, self.model, self._stored)

    def take_step(self, drawn: list[Batch]) -> Measured:
        """Take a step over its batches. Nothing is read from the device, so that the host may queue
        the next steps while a GPU computes.
        """
        config = self._config
        stage, since = config.stage_of(self.step)
        with_mtp = bool(config.mtp_steps) and self.step % config.mtp_steps == 0
        self.model.train()
        counted = sum(int(batch.counts.sum()) for batch in drawn)
        main = mtp = torch.zeros((), device=self._device)
        weights = list(self.model.parameters())
        for weight in weights:
            weight.grad = None

        def computed(batch: Batch) -> Computed:
            losses = self.model.losses(batch.to(self._device), with_mtp)
            whole = (losses.main + config.mtp_weight * losses.mtp) / counted
            return losses, torch.autograd.grad(whole, weights, allow_unused=True)

        for losses, gradients in self._map(computed, drawn):
            main, mtp = main + losses.main.detach(), mtp + losses.mtp.detach()
            add_gradients(weights, gradients)
        norm = self._norms.clip(self.model.parameters()) if self._norms is not None else None
        rate = stage.rate_at(since)
        self._optimizer.step(rate)
        largest = torch.stack([attention.max_logits for attention in self._attentions])
        limit = config.max_logit if config.optimizer == "muonclip" else float("inf")
        gammas = torch.stack([clip_qk(attention, limit) for attention in self._attentions])
        loads = [router.balance(config.balance_rate) for router in self._routers]
        self.step += 1
        self._tokens += sum(batch.num_tokens for batch in drawn)
        return Measured(
            main / counted, mtp / counted if with_mtp else None, largest, gammas, loads, norm, rate
        )

    @torch.no_grad()
    def scores(self) -> dict[str, float]:
        """Return for each task the share of held-out samples whose answer the model would give word
        for word in greedy decoding: each token of it is the likeliest after those before.
        """
        self.model.eval()
        found = {}
        for task in self._tasks:
            if task not in self._watched:
                samples = evaluation_samples(
                    task, self._config.score_samples, self._config.seed, part=WATCHED
                )
                self._watched[task] = self._batches.of_answers(samples)
            right = sum(map(self.num_right, self._watched[task]))
            found[task] = right / self._config.score_samples
        return found

    @torch.no_grad()
    def num_right(self, drawn: Batch) -> int:
        """Return of how many sequences every token that counts is the likeliest."""
        batch = drawn.to(self._device)
        targets, _ = batch.answers
        likeliest = self.model.logits(self.model.hidden(batch, targets - 1)).argmax(-1)
        wrong = torch.zeros(batch.num_padded, dtype=torch.bool, device=self._device)
        wrong[batch.padded[targets]] = likeliest != batch.tokens[targets]
        sizes = [rows * longest for rows, longest in batch.groups]
        parts = zip(batch.groups, torch.split(wrong, sizes), strict=True)
        return len(drawn) - sum(int(part.view(group).any(dim=1).sum()) for group, part in parts)

    def _check_tasks(self, begun: Mapping[str, str]) -> None:
        own = self._digests
        if changed := [task for task in own if begun.get(task, own[task]) != own[task]]:
            raise CheckpointError(
                f"{self._out}: samples of {', '.join(changed)} are not those that the run began "
                "with, so it cannot go on as one run; train into another directory, or use the "
                "former code"
            )

    def _forget_later_lines(self) -> None:
        """Drop the log's lines about steps after the saved state, because these steps are taken
        again.
        """
        path = self._out / LOG_NAME
        if path.exists():
            lines = path.read_text().splitlines(keepends=True)
            path.write_text("".join(x for x in lines if json.loads(x)["step"] <= self.step))


def add_gradients(
    weights: Sequence[torch.nn.Parameter], gradients: Sequence[torch.Tensor | None]
) -> None:
    """Add gradients to those that the weights have."""
    for weight, gradient in zip(weights, gradients, strict=True):
        if weight.grad is None:
            weight.grad = gradient
        elif gradient is not None:
            weight.grad += gradient

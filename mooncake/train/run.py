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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from mooncake.base import CheckpointError, ModelSpec
from mooncake.model.checkpoint.making.presets import preset_config, write_preset_files
from mooncake.model.checkpoint.weights import SPEC_DTYPES
from mooncake.tasks.mix import evaluation_samples
from mooncake.tasks.sample import WATCHED
from mooncake.train.attention import Attention
from mooncake.train.batches import Batch, Batches
from mooncake.train.checkpoint import STATE_NAME, load_state, save_state, write_weights
from mooncake.train.config import TrainConfig
from mooncake.train.experts import Router
from mooncake.train.model import TrainedK2
from mooncake.train.muon_clip import MuonClip, NormClip, Rates, clip_qk

LOG_NAME = "log.jsonl"
Log = Callable[[Mapping[str, Any]], None]


class Run:
    """A training run at its present step."""

    def __init__(self, config: TrainConfig) -> None:
        """Begin in an empty directory, or resume from the state in it.

        Raises:
            ConfigError: there is no such preset, or it cannot be trained.
            CheckpointError: the state there belongs to another model, or the tasks have changed.
        """
        torch.set_num_threads(config.threads)
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
        self._optimizer = MuonClip(
            self.model.named_parameters(),
            Rates(weight_decay=config.weight_decay, dtype=SPEC_DTYPES[config.dtype]),
            muon=config.optimizer != "adamw",
        )
        self._norms = NormClip() if config.clip_norms else None
        self._batches = Batches(self._out, config.seed, config.step_tokens, config.batch_tokens)
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
        while self.step < last and not stopping():
            line = self._take_step()
            if self.step % config.score_steps == 0 or self.step == total:
                line["scores"] = self.scores()
            if self.step % config.log_steps == 0 or "scores" in line:
                with (self._out / LOG_NAME).open("a") as file:
                    file.write(json.dumps(line) + "\n")
                log(line)
            if self.step % config.save_steps == 0:
                self.save()
        self.save()

    def save(self) -> None:
        """Write the state, then the checkpoint that serves."""
        progress = {"step": self.step, "tokens": self._tokens, "tasks": self._digests}
        save_state(self._out / STATE_NAME, self.model, self._optimizer, self._norms, progress)
        write_weights(self._out, self.model, self._stored)

    def _take_step(self) -> dict[str, Any]:
        config, started = self._config, time.monotonic()
        stage, since = config.stage_of(self.step)
        drawn = self._batches.of_step(self.step, stage.tasks, stage.max_tokens)
        batches = [batch.to(self._device) for batch in drawn]
        with_mtp = bool(config.mtp_steps) and self.step % config.mtp_steps == 0
        for weight in self.model.parameters():
            weight.grad = None
        self.model.train()
        counted = sum(int(batch.counts.sum()) for batch in batches)
        main = mtp = 0.0
        for batch in batches:
            losses = self.model.losses(batch, with_mtp)
            whole = (losses.main + config.mtp_weight * losses.mtp) / counted
            torch.autograd.backward(whole)
            main += float(losses.main.detach()) / counted
            mtp += float(losses.mtp.detach()) / counted
        norm = self._norms.clip(self.model.parameters()) if self._norms is not None else None
        rate = stage.rate_at(since)
        self._optimizer.step(rate)
        largest = [attention.max_logits.tolist() for attention in self._attentions]
        clip = config.optimizer == "muonclip"
        limit = config.max_logit if clip else float("inf")
        clipped = sum(int((clip_qk(a, limit) < 1).sum()) for a in self._attentions)
        load = [router.balance(config.balance_rate) for router in self._routers]
        self.step += 1
        tokens = sum(len(batch.tokens) for batch in batches)
        self._tokens += tokens
        return {
            "step": self.step, "tokens": self._tokens, "loss": main,
            "mtp_loss": mtp if with_mtp else None,
            "max_logit": max(map(max, largest)), "max_logits": largest, "clipped": clipped,
            "load": max(load, default=1.0), "norm": norm, "rate": rate,
            "tokens_per_s": tokens / (time.monotonic() - started),
        }  # fmt: skip

    @torch.no_grad()
    def scores(self) -> dict[str, float]:
        """Return for each task the share of held-out samples whose answer the model would give word
        for word in greedy decoding: each token of it is the likeliest after those before.
        """
        self.model.eval()
        found = {}
        for task in self._tasks:
            samples = evaluation_samples(
                task, self._config.score_samples, self._config.seed, part=WATCHED
            )
            right = 0
            for batch in self._batches.of_answers(samples):
                right += self._num_right(batch.to(self._device))
            found[task] = right / len(samples)
        return found

    def _num_right(self, batch: Batch) -> int:
        targets = batch.counts.nonzero()[:, 0]
        likeliest = self.model.logits(self.model.hidden(batch)[targets - 1]).argmax(-1)
        wrong = torch.zeros_like(batch.counts)
        wrong[targets] = likeliest != batch.tokens[targets]
        return sum(
            int((~(wrong[group.clamp(min=0)] & (group >= 0)).any(dim=1)).sum())
            for group in batch.groups
        )

    def _check_tasks(self, begun: Mapping[str, str]) -> None:
        own = self._digests
        if changed := [task for task in own if begun.get(task, own[task]) != own[task]]:
            raise CheckpointError(
                f"{self._out}: samples of {', '.join(changed)} are not those that the run began "
                "with, so it cannot go on as one run; train into another directory, or use the "
                "code of then"
            )

    def _forget_later_lines(self) -> None:
        """Drop the log's lines about steps after the saved state, because these steps are taken
        again.
        """
        path = self._out / LOG_NAME
        if path.exists():
            lines = path.read_text().splitlines(keepends=True)
            path.write_text("".join(x for x in lines if json.loads(x)["step"] <= self.step))

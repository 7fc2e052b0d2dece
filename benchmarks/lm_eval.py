"""The tasks of `mooncake eval` under EleutherAI's harness: `python -m benchmarks lm-eval`.

Writes the samples that `configs/lm-eval` names, makes an environment for lm-eval where there is
none (build/lm-eval-venv), serves k2-demo and runs `lm_eval --model local-completions` over
generated answers and over likelihoods of given ones.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.support.servers import BUILD, ROOT, SERVED_NAME, load, machine, ours, running
from mooncake.api.text.chat_template import ChatTemplate, load_chat_template
from mooncake.api.text.tokenizer import load_tokenizer
from mooncake.base import ModelSpec
from mooncake.launch.config.shipped import DEMO, checkpoint
from mooncake.tasks.mix import TASKS, evaluation_samples
from mooncake.tasks.sample import Sample

ENVIRONMENT = BUILD / "lm-eval-venv"
DATA = BUILD / "lm-eval"
TASK_FILES = ROOT / "configs" / "lm-eval"
PACKAGE = "lm-eval[api]==0.4.13"
NUM_CHOICES = 4


def documents(
    samples: Sequence[Sample], template: ChatTemplate, random: Random
) -> list[dict[str, Any]]:
    """Return lm-eval's documents of one task: prompts, right answers, answers to choose from."""
    found = []
    texts = list(dict.fromkeys(sample.answer["content"] for sample in samples))
    for sample in samples:
        calls = [
            [call["function"]["name"], json.loads(call["function"]["arguments"])]
            for call in sample.answer.get("tool_calls") or ()
        ]
        right = sample.answer["content"]
        others = [text for text in texts if text != right]
        choices = [right, *random.sample(others, min(NUM_CHOICES - 1, len(others)))]
        random.shuffle(choices)
        messages = [
            {key: value for key, value in message.items() if key != "reasoning"}
            for message in sample.messages
        ]
        found.append(
            {
                "prompt": template.render(
                    messages, tools=list(sample.tools) or None, add_generation_prompt=True
                ),
                "right": [json.dumps(calls)] if calls else [right, *sample.also_right],
                "calls": bool(calls),
                "is_json": sample.task == "object",
                "choices": choices,
                "gold": choices.index(right),
            }
        )
    return found


def write_documents(model: Path, tasks: Sequence[str], num_samples: int, seed: int) -> None:
    """Write the file of each task to where `configs/lm-eval` looks for it."""
    template = load_chat_template(model, load_tokenizer(model))
    DATA.mkdir(parents=True, exist_ok=True)
    for task in tasks:
        samples = evaluation_samples(task, num_samples, seed)
        lines = documents(samples, template, Random(f"choices {seed} {task}"))
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (DATA / f"{task}.jsonl").write_text(text)


def harness() -> Path:
    """Return the harness's program, installed where it is not."""
    program = ENVIRONMENT / "bin" / "lm_eval"
    if not program.exists():
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
        pip = [str(ENVIRONMENT / "bin" / "pip"), "install", "--quiet", PACKAGE]
        subprocess.run(pip, check=True)
    return program


def evaluated(
    url: str, names: Sequence[str], max_model_len: int
) -> Mapping[str, Mapping[str, Any]]:
    """Run the harness over the tasks `names` against the server at `url`, whose prompts have up to
    `max_model_len` tokens; return its results.
    """
    out = DATA / "results"
    known = set(out.rglob("results_*.json"))
    arguments = f"base_url={url}/v1/completions,model={SERVED_NAME},num_concurrent=8"
    arguments += f",max_length={max_model_len}"  # of longer ones the harness keeps the end
    subprocess.run(
        [
            str(harness()), "run", "--model", "local-completions", "--model_args", arguments,
            "--include_path", str(TASK_FILES), "--tasks", ",".join(names),
            "--output_path", str(out),
        ],
        cwd=ROOT, check=True, stdout=sys.stderr,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
    )  # fmt: skip
    [written] = set(out.rglob("results_*.json")) - known
    results: dict[str, dict[str, Any]] = json.loads(written.read_text())["results"]
    return results


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks lm-eval", description=__doc__)
    parser.add_argument("--model", type=Path, default=checkpoint(DEMO))
    parser.add_argument("--num-samples", type=int, default=50, help="of each task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    args = parser.parse_args(argv)
    write_documents(args.model, args.tasks, args.num_samples, args.seed)
    names = [f"mooncake_{task}" for task in args.tasks]
    names += [
        f"mooncake_{task}_chosen"
        for task in args.tasks
        if (TASK_FILES / f"{task}_chosen.yaml").exists()
    ]
    config = json.loads((args.model / "config.json").read_text())
    longest = ModelSpec.from_config(config).max_position_embeddings
    with running(ours("lm-eval", args.model, "--colocated")) as server:
        results = evaluated(server.url, names, longest)
    print(f"{args.num_samples} samples of each task; {PACKAGE}; {machine()}; load {load()}\n")
    print("| task | right | standard error |\n|---|---|---|")
    for name in names:
        metric = "acc" if name.endswith("_chosen") else "right"
        share, error = (results[name][f"{key},none"] for key in (metric, f"{metric}_stderr"))
        print(f"| {name} | {share:.1%} | {float(error):.1%} |")
    return 0

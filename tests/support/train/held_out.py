"""Searches what a run trains on, as it reads it, for what is held out: `make hold-out`.

The text of a step is its batches' tokens, decoded. Spellings are made equal on both sides, so that
`book_room` and `bookRoom` are one, as are "3 + 4", "3 plus 4" and "add 3 and 4".
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from mooncake.api.text.tokenizer import load_tokenizer
from mooncake.launch.config.config import read_settings
from mooncake.launch.config.train_settings import Train
from mooncake.model.checkpoint.making.presets import write_preset_files
from mooncake.tasks.calls import NO_TOOL
from mooncake.tasks.mix import evaluation_samples
from mooncake.tasks.sample import EVALUATED, TRAINED, WATCHED, Sample, part_of
from mooncake.train.batches import Batches
from mooncake.train.config import TrainConfig

SHORTEST = 12
"""Letters of a copied text that is looked for: shorter answers are given by chance."""
_ASKED = re.compile(r"<\|im_user\|>user<\|im_middle\|>(.*?)<\|im_end\|>", re.DOTALL)
_ANSWERED = re.compile(r"<\|im_assistant\|>assistant<\|im_middle\|>(.*?)<\|im_end\|>", re.DOTALL)
_NAMED = re.compile(r'"name":"([^"]+)"')
_WANTED = re.compile(r"(?:<think>|\. )([^;]+);")
_SUM = re.compile(r"(?<![\w+*/.-])\d+[+-]\d+(?![\w+*/.-])")
_BY_ANSWER = ("copy", "object", "code", "memory")
_SPELLINGS = (
    (re.compile(r"(?i)(?:add|sum of) (\d+) and (\d+)"), r"\1+\2"),
    (re.compile(r"(?i)subtract (\d+) from (\d+)"), r"\2-\1"),
    (re.compile(r"(?<=\d) ?(?:\+|plus) ?(?=\d)"), "+"),
    (re.compile(r"(?<=\d) ?(?:-|minus) ?(?=\d)"), "-"),
    (re.compile(r"([a-z])([A-Z])"), r"\1 \2"),
    (re.compile(r"(?<=[a-z])-(?=[a-z])"), " "),
    (re.compile(r" ?([*/]) ?"), r"\1"),
    (re.compile(r"[^\w+*/-]+|_"), " "),
)


def spelled(text: str) -> str:
    """Return the text in the spelling that is compared: letters and digits, in small letters."""
    for found, put in _SPELLINGS:
        text = found.sub(put, text)
    return text.strip().lower()


class Sought:
    """What is held out, in the spelling that is compared."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self.asked: set[str] = set()
        self.answers: set[str] = set()
        self.pairs: set[str] = set()
        self.sums: set[str] = set()
        for sample in samples:
            held_out = {spelled(one) for one in sample.contents if part_of(one) != TRAINED}
            self.sums |= {one for one in held_out if _SUM.fullmatch(one)}
            if sample.task == "refusal" and sample.answer["content"] != NO_TOOL:
                continue  # another task's sample beside tools
            if sample.tools:
                self.pairs |= held_out - self.sums
            elif sample.task == "question":
                self.asked |= {*held_out, spelled(sample.messages[-1]["content"])}
            elif sample.task in _BY_ANSWER:
                self.answers.add(spelled(sample.answer["content"]))
            else:
                self.asked.add(spelled(sample.messages[-1]["content"]))
        self.answers = {one for one in self.answers if len(one) >= SHORTEST}

    def __len__(self) -> int:
        return sum(map(len, (self.asked, self.answers, self.pairs, self.sums)))

    def found_in(self, text: str) -> set[str]:
        """Return what a rendered text asks, answers, adds up or names as a tool and should not."""
        asked, answered = _ASKED.findall(text), _ANSWERED.findall(text)
        named = set(map(spelled, _NAMED.findall(text)))
        wanted = {spelled(one) for said in answered for one in _WANTED.findall(said)}
        added = [one for said in (*asked, *answered) for one in _SUM.findall(spelled(said))]
        return {
            *(self.asked.intersection(map(spelled, asked))),
            *(self.answers.intersection(map(spelled, answered))),
            *(self.pairs & named),
            *(pair for pair in self.pairs & wanted if " " in pair),
            *(self.sums.intersection(added)),
        }


def evaluated(tasks: Iterable[str], number: int, seeds: Iterable[int]) -> Iterator[Sample]:
    """Yield what evaluations of these seeds ask, and what is watched while training."""
    for task in tasks:
        for seed in seeds:
            for part in (EVALUATED, WATCHED):
                yield from evaluation_samples(task, number, seed, part)


def texts(config: TrainConfig, steps: Iterable[int]) -> Iterator[tuple[int, str]]:
    """Yield what the run reads in each of `steps`."""
    with TemporaryDirectory() as directory:
        files = Path(directory)
        write_preset_files(config.preset, files)
        tokenizer = load_tokenizer(files)
        batches = Batches(files, config.seed, config.step_tokens, config.batch_tokens)
    for step in steps:
        stage, _ = config.stage_of(step)
        for batch in batches.of_step(step, stage.tasks, stage.max_tokens):
            yield step, tokenizer.decode(batch.tokens.tolist())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.train.held_out")
    parser.add_argument("config", help="the run's YAML file")
    parser.add_argument("--samples", type=int, default=600, help="of each task and seed")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--every", type=int, default=1, help="look at one step of so many")
    args = parser.parse_args()
    config = read_settings(Train, {}, args.config, {}).run()
    tasks = {task for stage in config.parts() for task in stage.tasks}
    sought = Sought(evaluated(sorted(tasks), args.samples, range(args.seeds)))
    steps = range(0, config.total_steps, args.every)
    print(
        f"{len(sought)} questions, answers, tools and sums are looked for in {len(steps)} steps",
        flush=True,
    )
    num_characters, leaks = 0, 0
    for step, text in texts(config, steps):
        num_characters += len(text)
        for found in sorted(sought.found_in(text)):
            leaks += 1
            print(f"step {step}: {found!r} is held out", flush=True)
    print(f"{num_characters:,} characters, {leaks} leaks")
    return 1 if leaks else 0


if __name__ == "__main__":
    sys.exit(main())

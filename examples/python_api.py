"""Run a model in this program, without a server."""

from __future__ import annotations

import sys

from mooncake import LLM


def main(model: str) -> None:
    """Print the answer to one question."""
    with LLM(model) as llm:
        [answer] = llm.chat([{"role": "user", "content": "What is the pool?"}], max_tokens=128)
        print(answer.text)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "k2-demo")

"""Ask a server through the official openai client and show the answer while it grows."""

from __future__ import annotations

import sys

from openai import OpenAI


def main(url: str) -> None:
    """Print the answer to one question."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is Mooncake?"}],
        max_tokens=128,
        stream=True,
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")

"""Show a streamed answer that survives its gateway: a broken stream is asked for again, at the next
gateway and with the same `Idempotency-Key`, and goes on where it was.
"""

from __future__ import annotations

import contextlib
import sys
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from openai import APIConnectionError, OpenAI

MAX_TRIES = 6


def stream(urls: Sequence[str], key: str = "", **request: Any) -> Iterator[str]:
    """Yield the text of one answer. Each gateway samples the same tokens for the same key, so what
    has been shown already is passed over.
    """
    key = key or uuid.uuid4().hex
    num_shown = 0
    for number in range(MAX_TRIES):
        client = OpenAI(base_url=f"{urls[number % len(urls)]}/v1", api_key="none")
        num_got = 0
        try:
            chunks = client.chat.completions.create(
                stream=True, extra_headers={"Idempotency-Key": key}, **request
            )
            for chunk in chunks:
                text = chunk.choices[0].delta.content or ""
                num_got += len(text)
                if num_got > num_shown:
                    yield text[num_shown - num_got :]
                    num_shown = num_got
            return
        except APIConnectionError:
            if number == MAX_TRIES - 1:
                raise


def model_of(urls: Sequence[str]) -> str:
    """Return the first model that any of the gateways lists."""
    for url in urls:
        with contextlib.suppress(APIConnectionError):
            return OpenAI(base_url=f"{url}/v1", api_key="none").models.list().data[0].id
    raise SystemExit(f"no gateway answers: {' '.join(urls)}")


def main(*urls: str) -> None:
    """Print the answer to one question, of whichever gateways live."""
    question = {"role": "user", "content": "What is Mooncake?"}
    for text in stream(urls, model=model_of(urls), messages=[question], max_tokens=128):
        print(text, end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:] or ["http://127.0.0.1:8000"])

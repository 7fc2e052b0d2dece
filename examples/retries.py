"""Show a streamed answer that survives its gateway: a broken stream is asked for again, at the next
gateway and with the same `Idempotency-Key`, and goes on where it was.
"""

from __future__ import annotations

import contextlib
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from openai import APIConnectionError, APIError, APIStatusError, OpenAI

MAX_TRIES = 6
PAUSE_S = 1.0
"""Waited once all gateways have been asked, before they are asked again."""


class OtherAnswer(Exception):
    """The answer begins otherwise at another gateway, so it cannot go on where the first broke."""


def stream(urls: Sequence[str], key: str = "", **request: Any) -> Iterator[str]:
    """Yield the text of one answer. Each gateway samples the same tokens for the same key, so what
    has been shown already is passed over.

    Raises:
        OtherAnswer: a gateway's text differs from what was shown; this may happen in bfloat16.
        APIError: the request is wrong, or no gateway gives the whole answer.
    """
    key = key or uuid.uuid4().hex
    shown = ""
    for number in range(MAX_TRIES):
        if number and number % len(urls) == 0:
            time.sleep(PAUSE_S)
        url, num_got = f"{urls[number % len(urls)]}/v1", 0
        with OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            try:
                chunks = client.chat.completions.create(
                    stream=True, extra_headers={"Idempotency-Key": key}, **request
                )
                for chunk in chunks:
                    text = chunk.choices[0].delta.content or ""
                    known = shown[num_got : num_got + len(text)]
                    if not text.startswith(known):
                        raise OtherAnswer(f"after {num_got} characters: {known!r}, now {text!r}")
                    num_got += len(text)
                    if fresh := text[len(known) :]:
                        shown += fresh
                        yield fresh
                return
            except APIError as error:
                if number == MAX_TRIES - 1 or not another_may_answer(error):
                    raise


def another_may_answer(error: APIError) -> bool:
    """Return whether to ask another gateway: this one is gone, ends its streams, or takes no more
    requests now. An answer of another kind says that the request is wrong.
    """
    if isinstance(error, APIStatusError):
        return error.status_code in (409, 429) or error.status_code >= 500
    return True


def model_of(urls: Sequence[str]) -> str:
    """Return the first model that any of the gateways lists."""
    for url in urls:
        with (
            contextlib.suppress(APIConnectionError),
            OpenAI(base_url=f"{url}/v1", api_key="none") as client,
        ):
            return client.models.list().data[0].id
    raise SystemExit(f"no gateway answers: {' '.join(urls)}")


def main(*urls: str) -> None:
    """Print the answer to one question, of whichever gateways live."""
    question = {"role": "user", "content": "What is Mooncake?"}
    for text in stream(urls, model=model_of(urls), messages=[question], max_tokens=128):
        print(text, end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:] or ["http://127.0.0.1:8000"])

"""Send many requests at once, a bounded number of them open, and print the answers in order."""

from __future__ import annotations

import asyncio
import sys

from openai import AsyncOpenAI

QUESTIONS = [f"What is {number} + {number + 7}?" for number in range(11, 27)]
AT_ONCE = 8


async def main(url: str) -> None:
    """Print each question with its answer."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        model = (await client.models.list()).data[0].id
        places = asyncio.Semaphore(AT_ONCE)

        async def ask(question: str) -> str:
            async with places:
                answer = await client.chat.completions.create(
                    model=model, messages=[{"role": "user", "content": question}], max_tokens=128
                )
            return answer.choices[0].message.content or ""

        answers = await asyncio.gather(*map(ask, QUESTIONS))
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(f"{question} {answer}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"))

"""Let a model call tools: run what it calls, give it the results, until it answers in words."""

from __future__ import annotations

import json
import sys
from typing import Any

from openai import OpenAI

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
MAX_ROUNDS = 4


def get_weather(city: str) -> dict[str, Any]:
    """Stand in for a service that knows the weather."""
    return {"temperature": -3, "sky": "snowy"} if city == "Oslo" else {"temperature": 20}


def main(url: str) -> None:
    """Print the calls of the model, what they return, and its answer."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    for _ in range(MAX_ROUNDS):
        answer = client.chat.completions.create(
            model=model, messages=messages, tools=TOOLS, max_tokens=128
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            print(message.content)
            return
        for call in message.tool_calls:
            assert call.type == "function"
            result = get_weather(**json.loads(call.function.arguments))
            print(f"{call.function.name}({call.function.arguments}) -> {json.dumps(result)}")
            returned = {"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)}
            messages.append(returned)
    raise SystemExit(f"no answer after {MAX_ROUNDS} rounds of calls")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")

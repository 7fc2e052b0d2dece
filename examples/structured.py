"""Get an answer that fits a JSON schema, whatever the model would have said otherwise."""

from __future__ import annotations

import json
import sys
from typing import Any

from openai import OpenAI

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def main(url: str) -> None:
    """Print the fields of the answer."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Answer in JSON: name Ada, age 36"}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "person", "strict": True, "schema": SCHEMA},
        },
        max_tokens=128,
    )
    person = json.loads(answer.choices[0].message.content or "")
    print(f"name: {person['name']}\nage: {person['age']}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")

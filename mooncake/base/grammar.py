"""The grammar that an output must follow, as a plain value that travels with the request.

The API server composes and checks it (`api.constrained`), the workers apply it (`model.grammar`).
The position of a sequence in its grammar is never sent: it follows from this value and the output
tokens.
"""

from __future__ import annotations

import msgspec


class Grammar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A context-free grammar over the bytes and ids of the output tokens, and where it begins.

    Before it begins, tokens are free. It begins with the first token, unless `free` is set; in free
    text it begins with a trigger (which belongs to it) or after `think_end`.
    """

    text: str
    """llguidance's dialect of Lark: `<[ID]>` is a token, `%json {…}` fits a JSON schema."""
    end_ids: list[int]
    """Tokens that end the output. They are allowed only where the grammar is complete."""
    free: bool = False
    """The output begins with free text: a think block that the prompt opened, or prose that may
    lead to a tool call.
    """
    optional: bool = False
    """The output may end before the grammar has begun."""
    triggers: list[int] = []
    """These tokens end the free text; each is also the first token of the grammar."""
    think_begin: int | None = None
    """This token is allowed only as the first one. Free text up to `think_end` follows it."""
    think_end: int | None = None
    """This token ends free text. The grammar begins with the next token."""

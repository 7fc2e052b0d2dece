"""What an answer must look like, as a plain value that travels with a request.

The door composes and checks it (`api.grammar`), the workers follow it (`model.grammar`). Where a
sequence stands in its grammar is never sent: it follows from this value and the output tokens.
"""

from __future__ import annotations

import msgspec


class Grammar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A context-free grammar over the bytes and ids of an answer's tokens, and where it begins.

    Before it begins tokens are free. It begins with the first token, unless `free` says otherwise;
    in free text, with a trigger (which belongs to it) or after `think_end`.
    """

    text: str
    """In llguidance's dialect of Lark: `<[ID]>` is a token, `%json {…}` what fits a JSON schema."""
    end_ids: list[int]
    """Tokens that end the answer: allowed exactly where the grammar is complete."""
    free: bool = False
    """The answer begins with free text: a think block that the prompt opened, or prose that may
    lead to a tool call.
    """
    optional: bool = False
    """The answer may end without the grammar ever having begun."""
    triggers: list[int] = []
    """Begin the grammar in free text and are its first token."""
    think_begin: int | None = None
    """Allowed as the very first token: free text up to `think_end` follows."""
    think_end: int | None = None
    """Ends free text: the grammar begins with the next token."""

"""The roots of what clients send: any object, and a whole body."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class JsonObject(BaseModel):
    """An object in a request's body, with OpenAI's strict types ("5" is no integer).

    Fields that the class does not know are kept in `model_extra`. The request as a whole decides
    whether they are refused, logged or ignored (`SharedFields.refuse_unsupported`).
    """

    model_config = ConfigDict(extra="allow", strict=True)


class RequestBody(JsonObject):
    """A whole body."""

    model: str | None = None
    """The name of the model; None = the one that is served."""

    @property
    def json_texts(self) -> list[str]:
        """The strings in it that will be parsed as JSON. They cost as much as the body itself."""
        return []

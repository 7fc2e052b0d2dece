"""The JSON of the APIs: bodies (pydantic), replies (msgspec), the OpenAPI document."""

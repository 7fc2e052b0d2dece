"""The layers of the model, and sampling."""

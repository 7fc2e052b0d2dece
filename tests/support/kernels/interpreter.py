"""Triton's interpreter, which spends a third of its time on looking through its language.

It puts functions of its own into the language's modules when a kernel begins, and does so again at
each call of a device function. Here it does so once for a kernel; what is computed stays the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import pytest


@pytest.fixture(scope="session", autouse=True)
def looking_once() -> Iterator[None]:
    """Have a running kernel patch each module of the language once."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):  # another release
        yield
        return
    patch, restore = interpreter._patch_lang, interpreter._LangPatchScope.restore
    modules: dict[Callable[..., Any], frozenset[int]] = {}
    patched: set[int] = set()

    def patch_once(function: Callable[..., Any]) -> Any:
        if function not in modules:
            seen = function.__globals__.values()
            modules[function] = frozenset(id(each) for each in (tl, tl.core) if _is_in(each, seen))
        if modules[function] <= patched:
            return interpreter._LangPatchScope()
        patched.update(modules[function])
        return patch(function)

    def restore_all(scope: Any) -> None:
        patched.clear()
        restore(scope)

    with (
        mock.patch.object(interpreter, "_patch_lang", patch_once),
        mock.patch.object(interpreter._LangPatchScope, "restore", restore_all),
    ):
        yield


def _is_in(wanted: Any, values: Iterable[Any]) -> bool:
    return any(each is wanted for each in values)

"""All targets by name. What a target needs is imported when it is asked for."""

from __future__ import annotations

import importlib

from tests.support.fuzz.target import Target

_PLACES = {
    "rpc": ("messages", "Rpc"),
    "proofs": ("messages", "Proofs"),
    "handshake": ("messages", "Handshake"),
    "control": ("messages", "Control"),
    "engine-events": ("messages", "EngineEvents"),
    "tcp-owner": ("transfers", "TcpOwner"),
    "tcp-client": ("transfers", "TcpClient"),
    "ssd-records": ("storage", "SsdRecords"),
    "sealed-records": ("storage", "SealedRecords"),
    "sealed-weights": ("storage", "SealedWeights"),
    "safetensors": ("storage", "Safetensors"),
    "model-config": ("storage", "ModelConfig"),
    "lark": ("grammars", "Lark"),
    "regex": ("grammars", "Regex"),
    "schemas": ("grammars", "Schemas"),
    "http": ("http", "HttpConnection"),
    "bodies": ("http", "HttpBodies"),
    "forms": ("http", "Forms"),
    "pool-admin": ("http", "PoolAdminHttp"),
    "bench-answers": ("http", "BenchAnswers"),
}

NAMES = tuple(_PLACES)


def target_of(name: str) -> type[Target]:
    """Return the target of that name. Raises KeyError when there is none."""
    module, kind = _PLACES[name]
    found: type[Target] = getattr(
        importlib.import_module(f"tests.support.fuzz.targets.{module}"), kind
    )
    return found

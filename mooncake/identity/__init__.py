"""The identity of a process: credentials, the roles they give, and how they are proven."""

from mooncake.identity.credential import (
    Certificate,
    ClusterKeys,
    Credential,
    Issued,
    KeyAgreement,
    Keys,
    PublicKeys,
    Trust,
    certify,
    check_certificate,
    cluster_keys,
    issue,
    listening_seed,
    objection,
    own_credential,
)

__all__ = [
    "Certificate",
    "ClusterKeys",
    "Credential",
    "Issued",
    "KeyAgreement",
    "Keys",
    "PublicKeys",
    "Trust",
    "certify",
    "check_certificate",
    "cluster_keys",
    "issue",
    "listening_seed",
    "objection",
    "own_credential",
]

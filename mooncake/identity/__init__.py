"""Who a process is: credentials, the roles they give, and how they are proven."""

from mooncake.identity.credential import (
    Certificate,
    ClusterKeys,
    Credential,
    KeyAgreement,
    Trust,
    check_certificate,
    check_cluster_signature,
    cluster_keys,
    issue,
    own_credential,
)

__all__ = [
    "Certificate",
    "ClusterKeys",
    "Credential",
    "KeyAgreement",
    "Trust",
    "check_certificate",
    "check_cluster_signature",
    "cluster_keys",
    "issue",
    "own_credential",
]

"""Credentials: a certificate of name, roles and tenant, signed by the cluster's key, and the
private keys that belong to it.

The cluster's own keys are derived from the cluster secret, so whoever knows the secret can issue
any credential. The holder of a credential can prove that one and check all others, but cannot issue
any. A process that is given the secret issues itself a credential with fresh keys. While a secret
is being replaced it is given two: it proves the first, and accepts what either has signed.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import hmac
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from mooncake.base.errors import ConfigError, Forbidden, ProtocolError
from mooncake.base.ids import IdSource, SystemIds
from mooncake.base.rights import CredentialRole, Sender

PREFIX = "mooncake-credential-1:"
"""The beginning of a credential's text; no cluster secret may begin with it."""
KEY_BYTES = 32
SIGNATURE_BYTES = 64
MAX_SECRETS = 2


class Certificate(msgspec.Struct, frozen=True, array_like=True):
    """What the cluster certifies about the holder of two keys."""

    name: str
    roles: list[CredentialRole]
    tenant: str | None
    """The tenant whose blocks a pool client may name; None: all tenants."""
    expires_s: float
    """Seconds since 1970 from which it is not valid any more; 0: never."""
    channel_key: bytes
    """The public X25519 key of its control connections."""
    signing_key: bytes
    """Public Ed25519 key for the holder's signatures."""

    def sender(self) -> Sender:
        """Return what the certificate lets its holder send."""
        return Sender(
            name=self.name, roles=frozenset(self.roles), tenant=self.tenant,
            channel_key=self.channel_key.hex(),
        )  # fmt: skip

    def check_time(self, unix_s: float) -> None:
        """Raise Forbidden when the certificate has expired."""
        if self.expires_s and unix_s >= self.expires_s:
            raise Forbidden(
                f"the credential {self.name!r} has expired; make a new one with "
                "`mooncake credential`"
            )

    def check_signature(self, signature: bytes, data: bytes) -> None:
        """Raise Forbidden unless the holder has signed `data`."""
        _verify(self.signing_key, signature, data, f"the credential {self.name!r} did not sign it")


class PublicKeys(msgspec.Struct, frozen=True, array_like=True):
    """The two public keys in a certificate."""

    channel: bytes
    signing: bytes


class Trust(Protocol):
    """The clusters whose signatures are valid."""

    @property
    def clusters(self) -> Sequence[ClusterKeys]: ...


class ClusterKeys(msgspec.Struct, frozen=True, array_like=True):
    """The public keys of a cluster, which every credential carries."""

    signing_key: bytes
    """The key that checks certificates, and what the cluster itself has signed."""
    channel_key: bytes
    """The key of control sockets whose address people type, because such an address names no
    key.
    """

    @property
    def clusters(self) -> Sequence[ClusterKeys]:
        return (self,)


class _Written(msgspec.Struct, frozen=True, array_like=True):
    """The content of a credential's text."""

    seed: bytes
    signed: bytes
    cluster: ClusterKeys
    others: Sequence[ClusterKeys] = ()
    listening: bytes = b""


_ENCODER = msgspec.msgpack.Encoder()
_CERTIFICATE = msgspec.msgpack.Decoder(Certificate)
_WRITTEN = msgspec.msgpack.Decoder(_Written)


def _derive(seed: bytes, purpose: bytes) -> bytes:
    return hmac.digest(b"mooncake " + purpose, seed, hashlib.sha256)


def _public(key: Ed25519PrivateKey | X25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


class _Secret:
    """The cluster's private keys, derived from its secret."""

    def __init__(self, secret: str) -> None:
        self.channel_seed = _derive(secret.encode(), b"channel curve key v2")
        self.signing = Ed25519PrivateKey.from_private_bytes(
            _derive(secret.encode(), b"credential signing key v1")
        )
        channel = X25519PrivateKey.from_private_bytes(self.channel_seed)
        self.public = ClusterKeys(_public(self.signing), _public(channel))


def cluster_keys(secret: str) -> ClusterKeys:
    """Return the public keys of the cluster that has this secret; if there are two, of the
    first.
    """
    return _Secret(secrets_in(secret)[0]).public


def listening_seed(secret: str) -> bytes:
    """Return the private key of the cluster's sockets whose address people type."""
    return _Secret(secrets_in(secret)[0]).channel_seed


class Keys:
    """The private keys of one process, derived from a seed, which is a secret."""

    def __init__(self, seed: bytes) -> None:
        self.seed = seed
        self.channel_seed = _derive(seed, b"channel key")
        self.signing = Ed25519PrivateKey.from_private_bytes(_derive(seed, b"signing key"))

    @classmethod
    def drawn(cls, ids: IdSource | None = None) -> Keys:
        """Return new random keys."""
        return cls(bytes.fromhex((ids or SystemIds()).hex(KEY_BYTES)))

    def __repr__(self) -> str:
        """Return nothing about the keys."""
        return "Keys()"

    @property
    def public(self) -> PublicKeys:
        channel = X25519PrivateKey.from_private_bytes(self.channel_seed)
        return PublicKeys(_public(channel), _public(self.signing))


class Issued(msgspec.Struct, frozen=True, array_like=True):
    """What a holder of the cluster secret gives to the owner of keys. Nothing in it is secret."""

    signed: bytes
    """The certificate with its signature."""
    cluster: ClusterKeys
    others: Sequence[ClusterKeys] = ()
    """Clusters whose certificates are valid too, while the secret is being replaced."""


class Credential:
    """The identity that one process proves. `text` and the private keys are secrets."""

    def __init__(
        self,
        seed: bytes,
        signed: bytes,
        cluster: ClusterKeys,
        secret: _Secret | None = None,
        others: Sequence[ClusterKeys] = (),
        listening: bytes = b"",
    ) -> None:
        """`others`: further clusters whose certificates are valid. `listening`: see
        `listening_seed`. Raises ProtocolError when `signed` is not a certificate of this cluster.
        """
        self.certificate = check_certificate(signed, cluster)
        self.signed = signed
        """The certificate with its signature, as the process shows it to peers."""
        self.cluster = cluster
        self.clusters: Sequence[ClusterKeys] = (cluster, *others)
        """Clusters whose certificates are valid, its own first. It is a new object after each
        change.
        """
        self.keys = Keys(seed)
        self._secret = secret
        self._listening = listening

    def __repr__(self) -> str:
        """Return only the name: the rest is secret."""
        return f"Credential({self.certificate.name!r})"

    def renew(self, given: str) -> None:
        """Prove what `given` says from now on, with the same keys. If this credential was made from
        a secret, `given` holds secrets and the first one is used. Otherwise it holds a new
        certificate for these keys. Accept what any cluster in it has signed. Any thread may call
        this.

        Raises:
            ConfigError: `given` is of the other kind, is damaged, or has other keys.
        """
        if given.startswith(PREFIX) != (self._secret is None):
            raise ConfigError(
                "a running process cannot change between the cluster secret and a credential; "
                "give it the same kind again, or restart it"
            )
        if self._secret is None:
            new = _read(given)
            if new.keys.seed != self.keys.seed:
                raise ConfigError(
                    f"the credential {new.certificate.name!r} has other keys than this process "
                    "uses; restart the process to use it"
                )
            self.certificate, self.cluster, clusters = new.certificate, new.cluster, new.clusters
            signed, self._listening = new.signed, new.listening_seed or b""
        else:
            secret, *others = map(_Secret, secrets_in(given))
            self._secret, self.cluster = secret, secret.public
            clusters = (secret.public, *(other.public for other in others))
            signed = _sign(self.certificate, secret)
        if tuple(clusters) != tuple(self.clusters):
            self.clusters = clusters
        self.signed = signed

    @property
    def listening_seed(self) -> bytes | None:
        """The cluster's private X25519 key, for sockets whose address people type: peers need not
        be told their key. It is None if this credential was neither made from the secret nor given
        the key.
        """
        if self.certificate.sender().speaks_for_itself:
            return None
        return self._listening or (self._secret.channel_seed if self._secret else None)

    @property
    def channel_seed(self) -> bytes:
        """The private X25519 key of its control connections."""
        return self.keys.channel_seed

    def sign(self, data: bytes) -> bytes:
        """Return the holder's signature of `data`."""
        return self.keys.signing.sign(data)

    @property
    def text(self) -> str:
        """The credential as one line of text, for a private file."""
        written = _Written(
            self.keys.seed, self.signed, self.cluster, self.clusters[1:], self._listening
        )
        return PREFIX + base64.b64encode(_ENCODER.encode(written)).decode()


class KeyAgreement:
    """One side of a Diffie-Hellman exchange (X25519) with keys that are used once. So nobody who
    later learns a credential, or the cluster secret, can compute what was agreed.
    """

    def __init__(self, ids: IdSource) -> None:
        self._private = X25519PrivateKey.from_private_bytes(bytes.fromhex(ids.hex(KEY_BYTES)))
        self.public = _public(self._private)

    def agree(self, public: bytes) -> bytes:
        """Return the secret that only the two sides know. Raises ProtocolError when `public` is not
        a key.
        """
        try:
            return self._private.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError as error:
            raise ProtocolError(
                f"the peer's key for the exchange cannot be read: {error}"
            ) from error


def check_certificate(signed: bytes, trust: Trust) -> Certificate:
    """Return the certificate in `signed`. Raises ProtocolError unless a trusted cluster has signed
    it.
    """
    return _checked(signed, tuple(trust.clusters))


def objection(
    certificate: Certificate, unix_s: float, trust: Trust, signed: bytes = b""
) -> str | None:
    """Return why a certificate that a peer has proven is no longer valid, or None if it is still
    valid. Only its expiry is checked if `signed` is empty.
    """
    try:
        certificate.check_time(unix_s)
        if signed:
            check_certificate(signed, trust)
    except ProtocolError:
        return f"the secret that signed the credential {certificate.name!r} is no longer valid"
    except Forbidden as error:
        return error.message
    return None


@functools.lru_cache(maxsize=4096)  # connections are looked at every few seconds
def _checked(signed: bytes, clusters: Sequence[ClusterKeys]) -> Certificate:
    signature, encoded = signed[:SIGNATURE_BYTES], signed[SIGNATURE_BYTES:]
    problem = "it is of another cluster"
    for cluster in clusters:
        try:
            _verify(cluster.signing_key, signature, _certified(encoded), problem)
            return _CERTIFICATE.decode(encoded)
        except Forbidden:
            continue
        except ValueError as error:
            problem = str(error)
    raise ProtocolError(f"no certificate of this cluster: {problem}")


def secrets_in(given: str) -> list[str]:
    """Return the secrets in the text that a process is given: one on each line, the one to prove
    first.

    Raises:
        ConfigError: there is no secret, or there are more than two.
    """
    found = [line.strip() for line in given.splitlines() if line.strip()]
    if not found:
        raise ConfigError("the cluster secret is empty; set one, the same for all workers")
    if len(found) > MAX_SECRETS:
        raise ConfigError(
            f"the cluster secret has {len(found)} lines; give one line, or two while you replace it"
        )
    return found


def _sign(certificate: Certificate, secret: _Secret) -> bytes:
    encoded = _ENCODER.encode(certificate)
    return secret.signing.sign(_certified(encoded)) + encoded


def _certified(encoded: bytes) -> bytes:
    return b"mooncake certificate 1 " + encoded


def _verify(key: bytes, signature: bytes, data: bytes, problem: str) -> None:
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, data)
    except (InvalidSignature, ValueError) as error:
        raise Forbidden(problem) from error


def issue(
    secret: str,
    name: str,
    roles: Iterable[CredentialRole],
    *,
    tenant: str | None = None,
    expires_s: float = 0.0,
    listens: bool = False,
    keys: Keys | None = None,
    ids: IdSource | None = None,
) -> Credential:
    """Return a new credential, signed with the first line of `secret`. `listens`: others can join a
    gateway with it at its `--join-port`. `keys`: those of the credential that it replaces, so that
    a running process takes it; None: new ones. Raises ConfigError when there is no secret.
    """
    keys = keys or Keys.drawn(ids)
    issued = certify(secret, name, roles, keys.public, tenant=tenant, expires_s=expires_s)
    own = _Secret(secrets_in(secret)[0])
    listening = own.channel_seed if listens else b""
    return Credential(keys.seed, issued.signed, issued.cluster, own, issued.others, listening)


def certify(
    secret: str,
    name: str,
    roles: Iterable[CredentialRole],
    keys: PublicKeys,
    *,
    tenant: str | None = None,
    expires_s: float = 0.0,
) -> Issued:
    """Return a certificate for keys that another process has, signed with the first line of
    `secret`. Raises ConfigError when there is no secret.
    """
    own, *others = map(_Secret, secrets_in(secret))
    certificate = Certificate(
        name=name, roles=sorted(set(roles)), tenant=tenant, expires_s=expires_s,
        channel_key=keys.channel, signing_key=keys.signing,
    )  # fmt: skip
    return Issued(_sign(certificate, own), own.public, [other.public for other in others])


def own_credential(
    given: str, *roles: CredentialRole, name: str = "", ids: IdSource | None = None
) -> Credential:
    """Return the credential of a process that acts in `roles`: the one whose text is `given`, or
    one that the process issues itself if `given` is the cluster secret.

    Raises:
        ConfigError: `given` is empty, damaged, or a credential with none of the roles.
    """
    if not given.startswith(PREFIX):
        words = name or "-".join(role.value for role in roles)
        return issue(given, words, roles, ids=ids)
    credential = _read(given)
    certificate = credential.certificate
    if not {*roles} & {*certificate.roles}:
        has, wants = (
            " or ".join(role.value for role in each) for each in (certificate.roles, roles)
        )
        raise ConfigError(
            f"the credential {certificate.name!r} belongs to a {has}, and not to a {wants}; make "
            f"one with `mooncake credential --role {wants}`, or give the cluster secret"
        )
    return credential


def _read(text: str) -> Credential:
    """Return the credential in a text. Raises ConfigError when it is damaged."""
    try:
        written = _WRITTEN.decode(base64.b64decode(text.removeprefix(PREFIX), validate=True))
        return Credential(
            written.seed, written.signed, written.cluster, None, written.others, written.listening
        )
    except (binascii.Error, ValueError, ProtocolError) as error:
        raise ConfigError("the credential is damaged; copy its whole file again") from error


def keys_in(text: str) -> Keys:
    """Return the keys of the credential in a text. Raises ConfigError when it is damaged."""
    return _read(text).keys

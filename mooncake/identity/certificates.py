"""A small certificate authority for TLS within a cluster: its own certificate, and those of hosts.

It makes and reads PEM; the caller handles files. X.509 is for peers that cannot prove a credential:
Ray, probes, browsers.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence

import msgspec
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from mooncake.base import ConfigError

LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Names that every host has for itself: processes of one machine reach each other by them."""
SKEW = datetime.timedelta(hours=1)
"""Certificates are valid from this long ago, because clocks of other machines may be slow."""
MAX_NAME = 64
"""The longest common name in X.509, in characters."""

_SigningKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey
"""The key of an authority; RSA only if others made it."""
_USE = {
    "digital_signature": False,
    "content_commitment": False,
    "key_encipherment": False,
    "data_encipherment": False,
    "key_agreement": False,
    "key_cert_sign": False,
    "crl_sign": False,
    "encipher_only": False,
    "decipher_only": False,
}


class Pem(msgspec.Struct, frozen=True):
    """A certificate and its private key, both in PEM."""

    certificate: str
    key: str

    def __repr__(self) -> str:
        return "Pem()"  # one of the fields is a secret


def make_authority(name: str, days: float) -> Pem:
    """Return a new self-signed authority, valid for `days` from now."""
    key = ec.generate_private_key(ec.SECP256R1())
    named = _name(name)
    builder = (
        _builder(named, named, key.public_key(), _after(days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.KeyUsage(**{**_USE, "key_cert_sign": True, "crl_sign": True}), critical=True
        )
    )
    return Pem(_pem(builder.sign(key, hashes.SHA256())), _key_pem(key))


def make_host_certificate(authority: Pem, names: Sequence[str], days: float | None) -> Pem:
    """Return a certificate as `sign_host_key` makes it, with a fresh key. Raises the same."""
    key = HostKey()
    return Pem(sign_host_key(authority, names, days, key.public), key.pem)


class HostKey:
    """The private key of a host, made for one certificate."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())

    @property
    def public(self) -> bytes:
        """The public key, as X.509 encodes it (DER)."""
        return self._key.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )

    @property
    def pem(self) -> str:
        """The private key, which is a secret."""
        return _key_pem(self._key)


def sign_host_key(authority: Pem, names: Sequence[str], days: float | None, public: bytes) -> str:
    """Return a certificate in PEM by which a host proves itself at both ends of a connection, under
    its `names` and addresses, and under `LOOPBACK`. `days`: how long it is valid from now; None: as
    long as the authority's. `public`: the host's public elliptic-curve key, as X.509 encodes it
    (DER).

    Raises:
        ConfigError: `authority` is not an authority or would expire earlier, a certificate cannot
            hold a name, or `public` is not such a key.
    """
    own, own_key = _read_authority(authority)
    try:
        key = serialization.load_der_public_key(public)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"key: not a public key: {error}") from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ConfigError(
            "key: this is not an elliptic-curve key; `mooncake certificates` makes a host's key"
        )
    end = own.not_valid_after_utc if days is None else _after(days)
    if end > own.not_valid_after_utc:
        raise ConfigError(
            f"days: the authority itself is valid only until {own.not_valid_after_utc:%Y-%m-%d}; "
            "give fewer days"
        )
    builder = (
        _builder(_name(names[0]), own.subject, key, end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(**{**_USE, "digital_signature": True}), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage(
                [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
            ),
            critical=False,
        )
        .add_extension(
            x509.SubjectAlternativeName(
                [_general(each) for each in dict.fromkeys([*names, *LOOPBACK])]
            ),
            critical=False,
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(own_key.public_key()), critical=False
        )
    )
    return _pem(builder.sign(own_key, hashes.SHA256()))


def expiry(pem: Pem) -> datetime.datetime:
    """Return until when a certificate is valid, in UTC."""
    return x509.load_pem_x509_certificate(pem.certificate.encode()).not_valid_after_utc


def names_in(certificate: str) -> list[str]:
    """Return the addresses and host names for which a certificate in PEM is valid.

    Raises:
        ConfigError: it is not a certificate.
    """
    try:
        own = x509.load_pem_x509_certificate(certificate.encode())
        found = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound) as error:
        raise ConfigError(f"this is not the certificate of a host: {error}") from error
    return [str(name.value) for name in found]


def fingerprint(pem: Pem) -> str:
    """Return the SHA-256 of a certificate, as `openssl x509 -fingerprint` prints it."""
    own = x509.load_pem_x509_certificate(pem.certificate.encode())
    return own.fingerprint(hashes.SHA256()).hex(":").upper()


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:MAX_NAME])])


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        return x509.DNSName(name)
    except ValueError as error:
        raise ConfigError(
            f"name: {name!r} is neither an address nor a host name of ASCII letters"
        ) from error


def _after(days: float) -> datetime.datetime:
    try:
        return datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    except OverflowError as error:
        raise ConfigError(f"days: {days:g} is too large; give fewer days") from error


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, end: datetime.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime.now(datetime.UTC) - SKEW)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ).decode()


def _read_authority(pem: Pem) -> tuple[x509.Certificate, _SigningKey]:
    try:
        certificate = x509.load_pem_x509_certificate(pem.certificate.encode())
        key = serialization.load_pem_private_key(pem.key.encode(), password=None)
        limits = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.ExtensionNotFound) as error:
        raise ConfigError(
            f"authority: these are not a certificate and its unencrypted key in PEM form: {error}"
        ) from error
    if not isinstance(key, _SigningKey):
        raise ConfigError(
            "authority: its key is neither an elliptic-curve nor an RSA key; `mooncake "
            "certificates authority` makes one"
        )
    if not limits.ca or certificate.public_key() != key.public_key():
        raise ConfigError(
            "authority: the certificate does not belong to an authority, or the key does not "
            "belong to the certificate; give the two files of one authority"
        )
    return certificate, key

"""Credentials: only the cluster secret makes them, and each proves what it says and no more."""

from __future__ import annotations

import base64

import msgspec
import pytest
import zmq
from zmq.utils import z85

from mooncake.base import ConfigError, Forbidden, ProtocolError, SeededIds
from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import (
    PREFIX,
    SIGNATURE_BYTES,
    Credential,
    Keys,
    certify,
    check_certificate,
    cluster_keys,
    issue,
    own_credential,
)

SECRET = "the cluster secret"
CLIENT, WORKER = CredentialRole.POOL_CLIENT, CredentialRole.WORKER


def of_acme(expires_s: float = 0.0) -> Credential:
    return issue(SECRET, "etl", [CLIENT], tenant="acme", expires_s=expires_s, ids=SeededIds(1))


def test_a_credential_travels_as_text_without_the_secret() -> None:
    made = of_acme(expires_s=10.0)
    read = own_credential(made.text + "", CLIENT)
    assert read.certificate == made.certificate
    assert (read.certificate.name, read.certificate.tenant) == ("etl", "acme")
    assert read.cluster == made.cluster == cluster_keys(SECRET)
    assert (read.signed, read.channel_seed) == (made.signed, made.channel_seed)
    written = base64.b64decode(made.text.removeprefix(PREFIX))
    assert SECRET.encode() not in written
    assert made.text not in repr(made)
    assert "etl" in repr(made)


def test_who_knows_the_secret_makes_a_credential_of_its_own_each_time() -> None:
    first, second = (own_credential(SECRET, WORKER, name="decode-0") for _ in range(2))
    assert first.certificate.channel_key != second.certificate.channel_key
    assert (first.certificate.name, first.certificate.roles) == ("decode-0", [WORKER])
    assert check_certificate(first.signed, second.cluster) == first.certificate


def test_only_those_that_serve_listen_with_the_clusters_key() -> None:
    roles = {role: own_credential(SECRET, role).listening_seed for role in CredentialRole}
    assert roles[WORKER] == roles[CredentialRole.GATEWAY]
    assert roles[CLIENT] is roles[CredentialRole.OPERATOR] is None
    given = own_credential(issue(SECRET, "w", [WORKER]).text, WORKER)
    assert given.listening_seed is None, "it does not know the cluster's key"
    told = own_credential(issue(SECRET, "g", [CredentialRole.GATEWAY], listens=True).text,
                          CredentialRole.GATEWAY)  # fmt: skip
    assert told.listening_seed == roles[WORKER]
    assert own_credential(told.text, CredentialRole.GATEWAY).text == told.text


def test_while_a_secret_is_replaced_both_count_and_the_first_is_proven() -> None:
    old, new = own_credential("old", WORKER), own_credential("new", WORKER)
    first = own_credential("old\nnew\n", WORKER)
    then = own_credential("  new\n\nold", WORKER)
    for made in (old, new, first, then):
        for both in (first, then):
            assert check_certificate(made.signed, both) == made.certificate
    assert check_certificate(first.signed, old)
    assert check_certificate(then.signed, new)
    for made, by in ((new, old), (then, old), (first, new)):
        with pytest.raises(ProtocolError, match="of another cluster"):
            check_certificate(made.signed, by)


def test_a_credential_is_renewed_with_the_keys_that_it_has() -> None:
    credential, before = own_credential("old", WORKER), own_credential("old", WORKER)
    certificate, key = credential.certificate, credential.channel_seed
    credential.renew("new\nold")
    assert (credential.certificate, credential.channel_seed) == (certificate, key)
    assert check_certificate(credential.signed, cluster_keys("new")) == certificate
    assert check_certificate(before.signed, credential)
    credential.renew("new")
    with pytest.raises(ProtocolError, match="of another cluster"):
        check_certificate(before.signed, credential)
    for wrong, problem in (("", "is empty"), ("a\nb\nc", "3 lines"), (before.text, "restart")):
        with pytest.raises(ConfigError, match=problem):
            credential.renew(wrong)
    assert check_certificate(credential.signed, cluster_keys("new")), "it stays as it was"
    with pytest.raises(ConfigError, match="restart"):
        own_credential(before.text, WORKER).renew("new")


def test_a_credential_that_was_given_goes_on_with_a_new_certificate_of_its_keys() -> None:
    keys = Keys.drawn()

    def given(secret: str, expires_s: float) -> str:
        issued = certify(secret, "decode 1", [WORKER], keys.public, expires_s=expires_s)
        return Credential(keys.seed, issued.signed, issued.cluster, None, issued.others).text

    credential = own_credential(given("old", 10.0), WORKER)
    clusters, key = credential.clusters, credential.channel_seed
    credential.renew(given("old", 20.0))
    assert credential.certificate.expires_s == 20.0
    assert credential.clusters is clusters, "who remembers what it has checked need not forget"
    assert credential.channel_seed == key == keys.channel_seed
    credential.renew(given("new\nold", 30.0))
    assert check_certificate(credential.signed, cluster_keys("new")) == credential.certificate
    assert check_certificate(own_credential("old", WORKER).signed, credential)
    other = issue("new", "decode 2", [WORKER]).text
    for wrong, problem in ((other, "other keys"), (PREFIX + "!", "damaged"), ("new", "restart")):
        with pytest.raises(ConfigError, match=problem):
            credential.renew(wrong)
    assert credential.certificate.expires_s == 30.0, "it stays as it was"


def test_a_credential_made_of_two_secrets_trusts_both() -> None:
    read = own_credential(issue("new\nold", "etl", [CLIENT]).text, CLIENT)
    assert check_certificate(read.signed, cluster_keys("new"))
    assert check_certificate(own_credential("old", WORKER).signed, read)


def test_keys_are_those_that_zeromq_makes_of_the_seeds() -> None:
    made = own_credential(SECRET, WORKER)
    for seed, public in (
        (made.channel_seed, made.certificate.channel_key),
        (made.listening_seed, made.cluster.channel_key),
    ):
        assert seed is not None
        assert z85.decode(zmq.curve_public(z85.encode(seed))) == public


def test_an_altered_certificate_is_none() -> None:
    made = of_acme()
    raised = msgspec.structs.replace(made.certificate, roles=list(CredentialRole), tenant=None)
    signature = made.signed[:SIGNATURE_BYTES]
    for forged in (
        signature + msgspec.msgpack.encode(raised),
        made.sign(b"mooncake certificate 1 " + msgspec.msgpack.encode(raised))
        + msgspec.msgpack.encode(raised),
        made.signed[:-1] + b"x",
        made.signed[1:],
        signature,
        b"",
    ):
        with pytest.raises(ProtocolError, match="no certificate of this cluster"):
            check_certificate(forged, made.cluster)
    with pytest.raises(ProtocolError, match="no certificate of this cluster"):
        check_certificate(made.signed, cluster_keys("another secret"))


def test_a_certificate_counts_until_it_expires() -> None:
    of_acme(expires_s=0.0).certificate.check_time(1e12)
    certificate = of_acme(expires_s=100.0).certificate
    certificate.check_time(99.9)
    with pytest.raises(Forbidden, match="'etl' has expired; make a new one"):
        certificate.check_time(100.0)


def test_signatures_are_of_their_holder() -> None:
    made, other = own_credential(SECRET, WORKER), own_credential(SECRET, WORKER)
    made.certificate.check_signature(made.sign(b"this"), b"this")
    for signature, data in ((made.sign(b"this"), b"that"), (other.sign(b"this"), b"this")):
        with pytest.raises(Forbidden, match="did not sign it"):
            made.certificate.check_signature(signature, data)


def test_a_credential_of_another_role_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="'etl' belongs to a pool-client, and not to a"):
        own_credential(of_acme().text, WORKER)


@pytest.mark.parametrize("text", [PREFIX, PREFIX + "!", PREFIX + "AAAA"])
def test_a_damaged_credential_says_so(text: str) -> None:
    with pytest.raises(ConfigError, match="damaged; copy its whole file again"):
        own_credential(text, CLIENT)
    with pytest.raises(ConfigError, match="damaged"):
        own_credential(of_acme().text[:-8], CLIENT)


def test_the_secret_must_not_be_empty() -> None:
    with pytest.raises(ConfigError, match="secret is empty"):
        own_credential("", WORKER)

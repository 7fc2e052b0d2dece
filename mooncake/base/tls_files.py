"""The files with which a port speaks HTTPS."""

from __future__ import annotations

import ssl

import msgspec

from mooncake.base.errors import ConfigError


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Files for HTTPS, in PEM."""

    certfile: str
    keyfile: str | None = None
    """The file of the key; None: the key is in `certfile`."""
    ca_certs: str | None = None
    """Authorities of the clients that are let in; None: clients need no certificate."""
    cert_reqs: int | None = None
    """Client certificates: 0 = not asked for, 1 = checked if one is given, 2 = required; None:
    required if there are authorities.
    """

    @property
    def verify_mode(self) -> ssl.VerifyMode:
        """How certificates of clients are checked."""
        if self.cert_reqs is not None:
            return ssl.VerifyMode(self.cert_reqs)
        return ssl.CERT_NONE if self.ca_certs is None else ssl.CERT_REQUIRED

    def context(self) -> ssl.SSLContext:
        """Return the context with which a server wraps its connections.

        Raises:
            ConfigError: a file is missing or wrong.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # The password is for a key that needs one: reading it must fail rather than ask here.
            context.load_cert_chain(self.certfile, self.keyfile, password="")
            if self.ca_certs is not None:
                context.load_verify_locations(self.ca_certs)
                context.verify_mode = self.verify_mode
        except OSError as error:  # ssl.SSLError is one
            files = ", ".join(filter(None, (self.certfile, self.keyfile, self.ca_certs)))
            raise ConfigError(f"TLS cannot be set up with {files}: {error}") from error
        return context

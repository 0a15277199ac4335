"""TLS settings of both ends: the service's certificate, and the authorities accepted by clients.

Invariant: a client always verifies the certificate and the name of the service.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from outrider.errors import InvalidField

if TYPE_CHECKING:
    import ssl  # imported inside functions, because some programs that import Outrider cannot load OpenSSL


def presenting(certificate: Path, key: Path | None) -> ssl.SSLContext:
    """Return the TLS context of a server with a certificate and its key, both PEM files. If `key` is None, the key is
    in the certificate's file. Raises InvalidField if the files cannot be loaded."""
    import ssl

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # Without a password OpenSSL would prompt for the password of an encrypted key on the terminal.
        context.load_cert_chain(certificate, key, password="")
    except OSError as error:  # SSLError is an OSError
        raise InvalidField(
            f"cannot serve with {certificate} and {key or 'the key in it'}: {error.strerror or error}",
            field="tls.certificate",
            hint="give a certificate and its key as PEM files, the key without a password",
        ) from error
    return context


def trusting(ca: str | None) -> ssl.SSLContext | None:
    """Return the TLS context of a client that accepts only the authorities in the PEM file `ca`. Returns None if `ca`
    is None: the client accepts the authorities installed on this machine. Raises InvalidField if the file cannot be
    loaded."""
    if ca is None:
        return None
    import ssl

    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise InvalidField(
            f"cannot read {ca!r}: {error.strerror or error}", field="ca", hint="the file must have a certificate in PEM"
        ) from error


def trusting_this_machine() -> ssl.SSLContext:
    """Return the TLS context of a client that accepts the authorities installed on this machine."""
    import ssl

    return ssl.create_default_context()

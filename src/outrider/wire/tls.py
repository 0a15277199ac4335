"""TLS settings for both ends: the certificate of the service, and the certificate authorities that a client accepts.

Invariant: a client always verifies the service's certificate and name.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from outrider.errors import InvalidField

if TYPE_CHECKING:
    import ssl  # at run time, only functions import it, because some programs that import Outrider cannot load OpenSSL


def presenting(certificate: Path, key: Path | None) -> ssl.SSLContext:
    """Return the TLS context of a server. `certificate` and `key` are PEM files; if `key` is None, the first file also
    has the key. Raises InvalidField if the files cannot be loaded."""
    import ssl

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # An empty password is given, because otherwise OpenSSL would ask on the terminal for the password of an
        # encrypted key.
        context.load_cert_chain(certificate, key, password="")
    except OSError as error:  # includes SSLError
        raise InvalidField(
            f"cannot serve with {certificate} and {key or 'the key in it'}: {error.strerror or error}",
            field="tls.certificate",
            hint="give a certificate and its key as PEM files, the key without a password",
        ) from error
    return context


def trusting(ca: str | None) -> ssl.SSLContext | None:
    """Return the TLS context of a client that accepts only the certificate authorities in the PEM file `ca`. If `ca` is
    None, returns None, and the client accepts the authorities installed on this machine. Raises InvalidField if the
    file cannot be loaded."""
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
    """Return the TLS context of a client that accepts the certificate authorities installed on this machine."""
    import ssl

    return ssl.create_default_context()

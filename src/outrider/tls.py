"""TLS at both ends: what the service presents, and what clients trust.

Invariant: a client always verifies the certificate and the name of the service.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from outrider.errors import InvalidField

if TYPE_CHECKING:
    import ssl  # imported where it is used: every program that imports Outrider would load OpenSSL, and not all can


def presenting(certificate: Path, key: Path | None) -> ssl.SSLContext:
    """For a server: a certificate and its key, PEM files; without a key it is in the certificate's file. Raises
    InvalidField."""
    import ssl

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # Without a password OpenSSL would ask for that of an encrypted key on the terminal.
        context.load_cert_chain(certificate, key, password="")
    except OSError as error:  # an SSLError, too
        raise InvalidField(
            f"cannot serve with {certificate} and {key or 'the key in it'}: {error.strerror or error}",
            field="tls.certificate",
            hint="give a certificate and its key as PEM files, the key without a password",
        ) from error
    return context


def trusting(ca: str | None) -> ssl.SSLContext | bool:
    """For a client of aiohttp: the authority in a PEM file and no other; None stands for those that this machine knows.
    Raises InvalidField."""
    if ca is None:
        return True
    import ssl

    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise InvalidField(
            f"cannot read {ca!r}: {error.strerror or error}", field="ca", hint="it must be a certificate in PEM"
        ) from error

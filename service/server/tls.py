"""TLS: the certificate and its key, checked before anything is started."""

from __future__ import annotations

import ssl
from pathlib import Path

from engine.errors import ConfigError

CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"  # of TLS 1.2; those of 1.3 are all good


def check_tls(certificate: Path | None, key: Path | None) -> None:
    """Raises ConfigError for files that cannot serve TLS; None of both is plain HTTP."""
    if certificate is None:
        if key is not None:
            raise ConfigError("--tls-key is given without --tls-certificate; allowed: both")
        return
    for path in filter(None, (certificate, key)):
        try:
            path.open("rb").close()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # A passphrase would be asked for on the terminal.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except ssl.SSLError as error:
        raise ConfigError(
            f"no certificate with its key can be read from {certificate}"
            + (f" and {key}" if key else "")
            + f" ({error.reason or error}); allowed: PEM files, the key without passphrase"
        ) from error

"""Self-signed certificates: a client that should trust one is given its fingerprint.

A certificate and its key are one text, in PEM, so that a file of them is never written in part.
"""

import hashlib
import re
import ssl

_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


def new_certificate(name: str) -> str:
    from services.kit.authority import self_signed

    certificate, key = self_signed(name)
    return (key + certificate).decode()


def fingerprint(pem: str) -> str:
    """Return a certificate's SHA-256, in hexadecimal digits; ``ValueError`` if the text has no certificate."""
    found = _CERTIFICATE.search(pem)
    if found is None:
        raise ValueError("there is no certificate in it")
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(found[0])).hexdigest()

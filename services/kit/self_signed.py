"""Self-signed certificates: a client that should trust one is given its fingerprint.

A certificate and its key are one text, in PEM, so that a file of them is never written in part.
"""

import hashlib
import re
import ssl
from datetime import UTC, datetime, timedelta

_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_LASTS = timedelta(days=36_500)
"""Who compares fingerprints asks for no date: it is replaced when it is to be known no more."""


def new_certificate(name: str) -> str:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + _LASTS)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return (private + certificate.public_bytes(serialization.Encoding.PEM)).decode()


def fingerprint(pem: str) -> str:
    """Return the SHA-256 of a certificate, in hexadecimal digits.

    Raises:
        ValueError: There is no certificate in the text.
    """
    found = _CERTIFICATE.search(pem)
    if found is None:
        raise ValueError("there is no certificate in it")
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(found[0])).hexdigest()

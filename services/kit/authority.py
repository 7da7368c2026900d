"""X.509 certificates: of a site's own authority, and self-signed ones.

It needs the package ``cryptography``, so that who may do without imports it where a certificate is made.
"""

import ipaddress
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_LASTS = timedelta(days=36_500)
"""Who compares fingerprints asks for no date: a certificate is replaced when it is to be known no more."""
_EARLY = timedelta(days=1)  #: The clocks of hosts differ
_USES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)

Made = tuple[bytes, bytes]  #: A certificate and its key, in PEM


def self_signed(name: str) -> Made:
    subject, key = _named(name), ec.generate_private_key(ec.SECP256R1())
    return _signed(_begun(subject, subject, key, _LASTS), key, key)


def new_authority(days: int) -> Made:
    subject, key = _named("Wattshift CA"), ec.generate_private_key(ec.SECP256R1())
    made = _begun(subject, subject, key, timedelta(days=days))
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    made = made.add_extension(_usage("key_cert_sign", "crl_sign"), critical=True)
    made = made.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    return _signed(made, key, key)


class Authority:
    """An authority that was made before; ``ValueError`` if its certificate or key is not one."""

    def __init__(self, certificate: bytes, key: bytes) -> None:
        self._certificate = x509.load_pem_x509_certificate(certificate)
        loaded = load_pem_private_key(key, None)
        if not isinstance(loaded, ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey):
            raise ValueError("its key is neither one of an elliptic curve nor RSA")
        self._key = loaded

    def issued(self, name: str, hosts: Iterable[str], days: int) -> Made:
        """Return a certificate for who is reached by some names and addresses; ``ValueError``: one cannot be in it."""
        key = ec.generate_private_key(ec.SECP256R1())
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        names = x509.SubjectAlternativeName([_host(each) for each in hosts])
        made = _begun(_named(name), self._certificate.subject, key, timedelta(days=days))
        made = made.add_extension(names, critical=False)
        made = made.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        made = made.add_extension(_usage("digital_signature"), critical=True)
        made = made.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        return _signed(made.add_extension(issuer, critical=False), key, self._key)


def _named(common: str) -> x509.Name:
    try:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])
    except ValueError as error:
        raise ValueError(f"{common!r} cannot be a name: {error}") from error


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise ValueError(f"{host!r} cannot be the name of a host: {error}") from error


def _usage(*used: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{name: name in used for name in _USES})


def _begun(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, lasts: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    made = x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
    return made.not_valid_before(now - _EARLY).not_valid_after(now + lasts)


def _signed(
    made: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey, by: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey
) -> Made:
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return made.sign(by, SHA256()).public_bytes(Encoding.PEM), private

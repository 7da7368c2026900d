"""Clients of httpx in one process share what one of them has read of the authorities that are trusted.

To read them takes 30 ms of CPU time, also where no connection will be encrypted; tests make a client for each of
thousands of commands.
"""

import functools
import os
import ssl
from typing import Any

from httpx._transports import default

_read = default.create_ssl_context
_shared = functools.cache(_read)


def _context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
    is_usual = verify is True and cert is None and not {"SSL_CERT_FILE", "SSL_CERT_DIR"} & os.environ.keys()
    return (_shared if is_usual else _read)(verify=verify, cert=cert, trust_env=trust_env)


default.create_ssl_context = _context

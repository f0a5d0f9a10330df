"""The image's health check: exit code 0 if the server of this container answers /health with 200.

It asks where MINSERVE_PORT and MINSERVE_TLS_CERTIFICATE say that the server is; a port given as an
option of `minserve serve` it cannot know. The certificate is not verified: it names another host.
"""

from __future__ import annotations

import os
import ssl
import sys
import urllib.error
import urllib.request

TIMEOUT = 12.0  # seconds; the server itself gives its engine MINSERVE_PING_TIMEOUT (10)


def main() -> int:
    secure = bool(os.environ.get("MINSERVE_TLS_CERTIFICATE"))
    port = os.environ.get("MINSERVE_PORT") or "8000"
    url = f"{'https' if secure else 'http'}://127.0.0.1:{port}/health"
    context = ssl._create_unverified_context() if secure else None
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT, context=context) as answer:
            print(answer.read().decode())
            return 0
    except (OSError, urllib.error.HTTPError) as error:
        print(f"{url}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())

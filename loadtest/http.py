"""Load test of a running server over HTTP; the same program as `minserve bench`.

python -m loadtest.http --url http://127.0.0.1:8000 --rate 20 --requests 200
"""

from service.terminal.bench.command import main

if __name__ == "__main__":
    raise SystemExit(main())

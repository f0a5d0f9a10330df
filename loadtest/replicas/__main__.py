"""Run `python -m loadtest.replicas`."""

from loadtest.replicas.command import main

if __name__ == "__main__":
    raise SystemExit(main())

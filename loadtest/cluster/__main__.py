"""Run `python -m loadtest.cluster`."""

from loadtest.cluster.command import main

if __name__ == "__main__":
    raise SystemExit(main())

"""Run `python -m loadtest.watched`."""

from loadtest.watched.command import main

if __name__ == "__main__":
    raise SystemExit(main())

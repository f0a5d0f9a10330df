"""Run `python -m loadtest.chaos`."""

from loadtest.chaos.command import main

if __name__ == "__main__":
    raise SystemExit(main())

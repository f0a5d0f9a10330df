"""Run `python -m loadtest.fuzz`."""

from loadtest.fuzz.command import main

if __name__ == "__main__":
    raise SystemExit(main())

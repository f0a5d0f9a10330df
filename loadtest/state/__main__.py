"""Run `python -m loadtest.state`."""

from loadtest.state.command import main

if __name__ == "__main__":
    raise SystemExit(main())

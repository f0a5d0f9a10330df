"""Run `python -m loadtest.store`."""

from loadtest.store.command import main

if __name__ == "__main__":
    raise SystemExit(main())

"""Run `python -m loadtest.frontend`."""

from loadtest.frontend.command import main

if __name__ == "__main__":
    raise SystemExit(main())

"""python -m loadtest.http"""

from loadtest.http.command import main

if __name__ == "__main__":
    raise SystemExit(main())

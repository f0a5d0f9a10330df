"""httpx for the tools here; without it the program ends with the command that installs it."""

from loadtest.extra import exit_without

exit_without("httpx")

import httpx as httpx  # noqa: E402

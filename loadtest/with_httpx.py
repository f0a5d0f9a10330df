"""httpx for the tools here; if it is missing the program ends and names the package to install."""

from loadtest.extra import exit_without

exit_without("httpx")

import httpx as httpx  # noqa: E402

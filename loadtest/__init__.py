"""Load tests and measurements: each module that can be run is a tool, `python -m loadtest.NAME`.

loadtest/README.md lists the tools and says how to read a result; loadtest/results holds figures.
Packages that the tools need are the extra `loadtest`: pip install 'minserve[loadtest]'.
"""

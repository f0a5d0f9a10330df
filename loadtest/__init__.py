"""Load tests and measurements: every figure that the README claims comes from a script here.

Their packages are the extra `loadtest`: pip install 'minserve[loadtest]'.
"""

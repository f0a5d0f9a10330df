"""Servers on a shared store while servers, store and network fail: `loadtest.chaos --store`."""

"""What servers tell of their shared store: the counters and histograms of `/metrics`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families

from loadtest.with_httpx import httpx

FETCH, WRITE = "minserve_state_fetch_seconds", "minserve_state_store_write_seconds"
FOUND = ("memory", "store", "new")

Buckets = Counter[float]  # observations up to each bound


@dataclass
class Told:
    """Counts of all servers together since they were started."""

    fetches: dict[str, Buckets] = field(default_factory=dict)  # by result
    writes: Buckets = field(default_factory=Counter)

    def since(self, before: Told) -> Told:
        """Return what came after `before`."""
        fetches = {
            result: Counter({at: n - before.fetches[result][at] for at, n in found.items()})
            for result, found in self.fetches.items()
        }
        writes = Counter({at: n - before.writes[at] for at, n in self.writes.items()})
        return Told(fetches, writes)

    def share(self, result: str) -> float:
        """Return the share of this result among the turns whose session existed before."""
        found = {name: max(self.fetches[name].values()) for name in FOUND if name != "new"}
        return found[result] / max(sum(found.values()), 1)


async def told_by(urls: Iterable[str]) -> Told:
    """Read the metrics of all servers. Raises httpx.HTTPError."""
    told = Told()
    async with httpx.AsyncClient(timeout=30) as client:
        for url in urls:
            text = (await client.get(f"{url}/metrics")).text
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name == f"{FETCH}_bucket":
                        found = told.fetches.setdefault(sample.labels["result"], Counter())
                    elif sample.name == f"{WRITE}_bucket":
                        found = told.writes
                    else:
                        continue
                    found[float(sample.labels["le"])] += round(sample.value)
    return told


def quantile(buckets: Buckets, share: float) -> float:
    """Return a quantile in seconds, interpolated within its bucket as Prometheus does; NaN: none.

    In the last bucket, which has no end, it is the bucket's beginning.
    """
    bounds = sorted(buckets)
    if not bounds or not buckets[bounds[-1]]:
        return float("nan")
    rank = share * buckets[bounds[-1]]
    if rank <= buckets[bounds[0]]:
        return bounds[0] * rank / buckets[bounds[0]]
    for low, high in pairwise(bounds):
        if buckets[high] >= rank:
            if high == float("inf"):
                return low
            return low + (high - low) * (rank - buckets[low]) / (buckets[high] - buckets[low])
    raise AssertionError("the counts of a histogram do not rise")

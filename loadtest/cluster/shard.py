"""How long a shard of the store takes to answer, simulated by rounds of its event loop.

Redis has one thread for commands. In a round it carries out everything that has arrived, syncs its
log (appendfsync always), and then answers. What arrives meanwhile waits for the next round. So a
sync is shared by all that came together. Each command of a turn writes to the log: looking a state
up sets a lock and restarts a lifetime.

The number of arrivals in a round is Poisson, and each has the mean cost. Half of a sync's mean time
is fixed, the rest is exponential.
"""

from __future__ import annotations

import math

import numpy as np

from loadtest.cluster.workload import Floats

ROUNDS = 60_000  # that are simulated
WARM = 5_000  # that do not count
ANSWERS = 200_000  # sampled


def latencies(
    rate: float,
    seconds: float,
    sync: float,
    rng: np.random.Generator,
    rounds: int = ROUNDS,
) -> Floats:
    """Return a sample of the seconds from a command's arrival to its answer.

    Args:
        rate: commands per second.
        seconds: of the thread, a command's mean.
        sync: seconds of a sync, its mean; 0: none.
        rng: where random numbers come from.
        rounds: how many to simulate.

    Returns infinities if the shard cannot carry out so many commands.
    """
    if rate * seconds >= 1:
        return np.full(ANSWERS, np.inf)
    lengths, counts, first = np.empty(rounds), np.empty(rounds, np.int64), np.zeros(rounds, bool)
    syncs = sync * (0.5 + 0.5 * rng.standard_exponential(rounds))
    waiting = 1
    first[0] = True
    for n in range(rounds):
        counts[n] = waiting
        length = waiting * seconds + syncs[n]
        lengths[n] = length
        waiting = int(rng.poisson(rate * length))
        if not waiting and n + 1 < rounds:  # it sleeps until the next command arrives
            waiting, first[n + 1] = 1, True
    # Each arrival of round n waited for the rest of round n - 1, unless the shard slept.
    warm = max(min(WARM, rounds // 4), 1)
    counted = counts[warm:] / counts[warm:].sum()
    chosen = rng.choice(np.arange(warm, rounds), ANSWERS, p=counted)
    rest = np.where(first[chosen], 0.0, rng.random(ANSWERS) * lengths[chosen - 1])
    return np.asarray(rest + lengths[chosen], np.float64)


def erlang_c(slots: int, offered: float) -> float:
    """Return the probability that all slots are taken, in a queue M/M/c.

    Args:
        slots: servers of the queue.
        offered: arrivals per second times the mean seconds of one; 1.0 is returned from `slots` on.
    """
    if offered >= slots:
        return 1.0
    blocking = 1.0  # Erlang B, by its recursion
    for number in range(1, slots + 1):
        blocking = offered * blocking / (number + offered * blocking)
    return blocking / (1 - offered / slots * (1 - blocking))


def slot_wait(slots: int, rate: float, seconds: float, share: float) -> float:
    """Return the seconds that a share of the turns waits for a slot at most.

    A queue M/M/c: Poisson arrivals at `rate`, exponential times with the mean `seconds`. Infinite
    if there are too few slots.
    """
    offered = rate * seconds
    if offered >= slots:
        return math.inf
    waits = erlang_c(slots, offered)
    if waits <= 1 - share:
        return 0.0
    return seconds / (slots - offered) * math.log(waits / (1 - share))

"""A Ray cluster of several nodes on one machine, whose nodes can be killed and started again.

Each node is a `ray start` of its own: a raylet with its workers, the head also with Ray's table of
the cluster, which it keeps in a Redis. All share one machine and so one port: only the head's
HAProxy can listen, and while there is no head nobody is answered. On machines of their own every
node with a replica has one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

from loadtest.replicas.cluster import options
from loadtest.served import free_port
from loadtest.subject import descendants

START_SECONDS = 120.0
#: A raylet waits so long for a head that is gone, seconds.
WAIT_FOR_HEAD = "300"


class Node:
    """One `ray start --block` with all that it starts."""

    def __init__(self, command: list[str], variables: dict[str, str]) -> None:
        """Start it."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *command],
            env={**os.environ, **variables},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def alive(self) -> bool:
        """Return whether it runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End it and all that it has started at once, as the loss of its machine does."""
        for pid in [self._process.pid, *descendants(self._process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


class Nodes:
    """A head without CPUs for replicas, and nodes with one each; a context manager."""

    def __init__(self, redis: str, count: int) -> None:
        """Start them.

        Args:
            redis: URL of the Redis for Ray's own table.
            count: nodes beside the head.

        Raises RuntimeError if they do not come up.
        """
        from ray.util import get_node_ip_address

        from service.cluster.deployment import SESSION_HEADER, proxy_variables

        # Ray goes by the machine's own address even where it is told another.
        self.address = f"{get_node_ip_address()}:{free_port()}"
        self.variables = {
            **proxy_variables(SESSION_HEADER),
            "RAY_REDIS_ADDRESS": urlsplit(redis).netloc,
            "RAY_external_storage_namespace": f"loadtest{os.getpid()}",
            "RAY_gcs_rpc_server_reconnect_timeout_s": WAIT_FOR_HEAD,
            "RAY_AUTH_MODE": "disabled",  # `ray start` would ask for a token
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONPATH": os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")]),
        }
        self._head: Node | None = None
        self.workers: list[Node] = []
        with ExitStack() as stack:
            stack.callback(self.kill)
            self.start_head()
            for _ in range(count):
                self.add()
            stack.pop_all()

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start_head(self) -> None:
        """Start the head, and return when it answers. Raises RuntimeError if it never does."""
        port = self.address.rpartition(":")[2]
        self._head = Node(
            [
                "--head", "--port", port, "--num-cpus", "0", "--include-dashboard", "false",
                "--ray-client-server-port", str(free_port()), *self._own_ports(),
            ],
            self.variables,
        )  # fmt: skip
        self._wait_for(self._head)

    def kill_head(self) -> None:
        """End the head with its proxy; the nodes stay."""
        assert self._head is not None
        self._head.kill()

    def add(self) -> Node:
        """Start another node."""
        node = Node(
            ["--address", self.address, "--num-cpus", "1", *self._own_ports()], self.variables
        )
        self.workers.append(node)
        return node

    def kill(self) -> None:
        """End all of them."""
        for node in [*self.workers, self._head]:
            if node is not None:
                node.kill()

    def _own_ports(self) -> list[str]:
        return ["--dashboard-agent-listen-port", str(free_port()), "--disable-usage-stats"]

    def _wait_for(self, head: Node) -> None:
        until = time.monotonic() + START_SECONDS
        command = [
            sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", self.address,
        ]  # fmt: skip
        while subprocess.run(command, capture_output=True, check=False).returncode:
            if time.monotonic() > until or not head.alive():
                raise RuntimeError("the head of the Ray cluster did not start")
            time.sleep(0.5)


class NodeCluster:
    """Replicas of one model on two nodes of such a cluster; a context manager."""

    def __init__(self, redis: str, port: int, store: str, model: str, replicas: int) -> None:
        """Start it, with Ray's own table in one Redis and the states in another.

        Raises RuntimeError if it does not come up.
        """
        self.url = f"http://127.0.0.1:{port}"
        self._options = options(model, port, store)
        self.nodes = Nodes(redis, replicas)
        with ExitStack() as stack:
            stack.enter_context(self.nodes)
            self.scale(replicas)
            stack.pop_all()

    def __enter__(self) -> NodeCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.nodes.kill()

    def scale(self, replicas: int) -> None:
        """Deploy with this number of replicas. Raises RuntimeError if that fails."""
        command = ["--address", self.nodes.address, "--replicas", str(replicas), "--cpus", "1"]
        done = subprocess.run(
            [sys.executable, "-m", "service.cli", "cluster", *command, *self._options],
            env={**os.environ, **self.nodes.variables}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"the replicas were not deployed: {done.stderr[-2000:]}")

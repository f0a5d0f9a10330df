"""Every command of the pages, and the table of how each is tested.

A fenced `sh` block is cut into commands as a shell would cut it. RULES says for each command how it
is tested. A command without a rule fails the tests, and so does a rule without a command.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Literal, NamedTuple

from tests.docs.pages import Block, blocks, pages

# run: as it stands, against a server; whole: the same in .ci/full, for it takes minutes;
# options: the program takes them; apart: not by these tests, and why.
How = Literal["run", "whole", "options", "apart"]


class Rule(NamedTuple):
    """How commands that begin with `begins` are tested."""

    begins: str
    how: How
    why: str = ""


GPU = "its figures are a GPU's; on a CPU it takes hours or refuses"
DOCKER = "needs Docker; the image itself: docker/verify/run, the file: tests/docker"
ROUTERS = "tests/docker/test_routers.py run it"
SERVES = "it serves until it is told to stop"
RULES = (
    Rule(
        "curl --unix-socket", "apart", "tests/service/server/test_unix_socket.py ask servers there"
    ),
    Rule("curl -s", "run"),
    Rule("KEY=$(", "run"),
    Rule("KEYS=$(", "run"),
    Rule("ADMIN_KEY=$(", "run"),
    Rule("OLD=$(", "run"),
    Rule("mkdir -p docker/secrets", "run"),
    Rule("echo ", "run"),
    Rule("openssl ", "run"),
    Rule("chmod ", "run"),
    Rule("minserve generate", "whole"),
    Rule("minserve score FILE", "whole"),
    Rule("minserve score", "options", "scores texts that are not shipped"),
    Rule("redis-server ", "apart", "tests/e2e/test_state_store.py starts one, and the servers"),
    Rule("for port in 8001 8002; do minserve serve", "apart", "tests/e2e/test_state_store.py"),
    Rule("say", "apart", "tests/e2e/test_state_store.py has such a conversation"),
    Rule("pkill -9", "apart", "tests/e2e/test_state_store.py kills a server so"),
    Rule("minserve cluster", "options", "tests/service/cluster/test_ray.py runs one"),
    Rule("serve run", "apart", "needs a Ray cluster; tests/service/cluster"),
    Rule("minserve inspect", "run"),
    Rule("minserve train --data tinyshakespeare.txt --out my-model", "whole"),
    Rule("minserve convert my-model", "whole"),
    Rule("minserve train --data tinyshakespeare.txt --out tiny-model", "whole"),
    Rule("minserve convert tiny-model", "whole"),
    Rule("minserve convert", "options", "needs weights of another project"),
    Rule("minserve bench --rate", "run"),
    Rule("minserve serve --help", "run"),
    Rule("python docker/grafana/dashboard.py", "run"),
    Rule("minserve serve", "options", SERVES),
    Rule("minserve train", "options", "5,000 steps take hours on a CPU"),
    Rule("python -m loadtest.kernels", "options", GPU),
    Rule("python -m loadtest.layers", "options", GPU),
    Rule("python -m loadtest.share", "options", GPU),
    Rule(
        "python -m loadtest.engine", "options", "three models, one of 1.3 B; .ci/full runs a part"
    ),
    Rule("python -m loadtest.http --compare", "whole"),
    Rule(
        "python -m loadtest.http --sweep", "options", "searches for minutes; tests/loadtest do it"
    ),
    Rule("python -m loadtest.http", "whole"),
    Rule("python -m loadtest.cache", "whole"),
    Rule("python -m loadtest.slow_host", "whole"),
    Rule("python -m loadtest.cluster", "options", "tests/loadtest/test_cluster.py run it, smaller"),
    Rule("python -m loadtest.watched", "apart", ".ci/full runs it by itself"),
    Rule("docker/verify/run", "apart", ".ci/full runs it by itself, with its options"),
    Rule("pip install", "apart", ".ci/run installs a clean checkout in an environment of its own"),
    Rule("MINSERVE_DELAYS=ON", "apart", "builds CUDA kernels for race tests on a GPU"),
    Rule("pytest -q tests/csrc", "apart", ".ci/run runs these tests with all others"),
    Rule("pytest -q -m gpu", "apart", "needs a GPU"),
    Rule("compute-sanitizer", "apart", "needs a GPU and the CUDA toolkit"),
    Rule("MINSERVE_CUDA=ON", "apart", ".ci/run installs so where nvcc is, not optimised"),
    Rule("docker ", "apart", DOCKER),
    Rule("kubectl ", "apart", "needs a cluster; the manifests: tests/docker"),
    Rule("helm ", "apart", "needs a cluster; the values: tests/docker"),
    Rule("(cd docker/routers", "apart", ROUTERS),
    Rule("sh docker/routers/", "apart", ROUTERS),
)


class Command(NamedTuple):
    """A command of a page, its line, and its rule."""

    page: str
    line: int
    text: str
    rule: Rule


def cut(block: str) -> Iterator[tuple[int, str]]:
    """Yield the commands of a block, each with the index of its first line in the block.

    Raises ValueError for an incomplete command.
    """
    held, begun = "", 0
    for number, line in enumerate(block.splitlines()):
        if not held and not line.strip():
            continue
        begun = begun if held else number
        held += line + "\n"
        whole = subprocess.run(["bash", "-n"], input=held, text=True, capture_output=True)
        if whole.returncode == 0 and not whole.stderr and not held.endswith("\\\n"):
            yield begun, held.rstrip("\n")
            held = ""
    if held:
        raise ValueError(f"no whole command: {held}")


def rule(text: str) -> Rule:
    """Return the first rule for a command. Raises LookupError if there is none."""
    for one in RULES:
        if text.startswith(one.begins):
            return one
    raise LookupError(f"tests/docs/commands.py does not say how this is tried: {text}")


def commands() -> list[Command]:
    """Return every command of every page, in the order in which a reader meets them."""
    return [
        Command(page, block.line + line, command, rule(command))
        for page in pages()
        for block in blocks(page)
        if block.language == "sh"
        for line, command in cut(block.text)
    ]


def quick(page: str) -> list[Block]:
    """Return the programs of a page, and its shell commands whose rule is `run`."""
    found = []
    for block in blocks(page):
        if block.language == "python":
            found.append(block)
        elif block.language == "sh":
            kept = [command for _, command in cut(block.text) if rule(command).how == "run"]
            if kept:
                found.append(block._replace(text="\n".join(kept)))
    return found

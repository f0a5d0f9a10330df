"""Whether memory is flat: the growth of a server's processes while it reads one long prompt.

    python -m loadtest.memory --pid SERVER_PID --data tinyshakespeare.txt --bytes 1000000

Asks a running server of this machine for one token after the prompt, and samples the resident
memory of its processes meanwhile.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from loadtest.prompts import Prompts
from loadtest.report import command_line, print_environment, save_json
from loadtest.with_httpx import httpx


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process and all its descendants, in bytes (Linux)."""
    children: dict[int, list[int]] = {}
    resident: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = dict(
                line.split(":", 1) for line in (folder / "status").read_text().splitlines()
            )
        except OSError:  # it ended meanwhile
            continue
        children.setdefault(int(fields["PPid"]), []).append(int(folder.name))
        resident[int(folder.name)] = 1024 * int(fields.get("VmRSS", "0 kB").split()[0])
    total, todo = 0, [pid]
    while todo:
        current = todo.pop()
        total += resident.get(current, 0)
        todo += children.get(current, [])
    return total


def main(argv: list[str] | None = None) -> int:
    options = command_line("memory", __doc__)
    options.add_argument("--url", default="http://127.0.0.1:8000", help="URL of the server")
    options.add_argument(
        "--pid", type=int, required=True, help="process id of the server, on this machine"
    )
    options.add_argument("--data", type=Path, help="text file to cut the prompt from")
    options.add_argument("--bytes", type=int, default=1_000_000, help="length of the prompt, bytes")
    options.add_argument("--json", type=Path, help="write every figure to this file")
    args = options.parse_args(argv)
    text = Prompts(args.data, args.bytes, args.bytes, seed=0).draw()
    body = {"prompts": [text], "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    samples: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            samples.append(resident_bytes(args.pid))
            time.sleep(0.05)

    with httpx.Client(base_url=args.url, timeout=600.0) as client:
        short = {**body, "prompts": [text[:20000]]}
        client.post("/v1/generate", json=short).raise_for_status()  # first use fills the arenas
        before = resident_bytes(args.pid)
        watcher = threading.Thread(target=watch)
        watcher.start()
        start = time.perf_counter()
        try:
            response = client.post("/v1/generate", json=body)
        finally:
            done.set()
            watcher.join()
        response.raise_for_status()
        seconds = time.perf_counter() - start
    tokens = response.json()["usage"]["prompt_tokens"]
    figures = {
        "prompt_tokens": tokens,
        "seconds": seconds,
        "resident_before": before,
        "resident_peak": max(samples),
        "growth": max(samples) - before,
    }
    print_environment()
    print(
        f"{tokens} prompt tokens in {seconds:.1f} s; resident memory {before / 2**20:.0f} MiB "
        f"before, {max(samples) / 2**20:.0f} MiB at its peak "
        f"(+{figures['growth'] / 2**20:.1f} MiB)"
    )
    save_json(args.json, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

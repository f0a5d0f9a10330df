"""Runs an image with an OCI runtime and looks at what an operator relies on.

    python docker/verify/container.py IMAGE

As root, with buildah and crun (or another runtime, --runtime). The container is as strict as
compose.yaml makes it: the image's user, no capability, no new privileges, a root file system that
cannot be written, /tmp in memory. It shares the network of the host, on a port of its own. Prints
a line per check; exit code 1 if one fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

READY_SECONDS, STOP_SECONDS = 120.0, 60.0
UID = 10001
# crun refuses to start where both kinds of control groups are mounted and have controllers, though
# none is asked for: it is started where the newer kind is not seen. Nothing outside changes.
ALONE = ("unshare", "--mount", "sh", "-c", 'umount /sys/fs/cgroup/unified 2>&-; exec "$@"', "sh")
TOOLS = ("gcc", "g++", "cc", "c++", "clang", "nvcc", "cmake", "ninja", "make", "ld", "protoc")


def run(*command: str) -> str:
    """What it printed. Raises CalledProcessError."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


class Image:
    """A built image: its configuration and, within `mounted`, its files."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.config = json.loads(run("buildah", "inspect", "--type", "image", name))["Docker"][
            "config"
        ]

    @contextlib.contextmanager
    def mounted(self) -> Iterator[Path]:
        container = run("buildah", "from", self.name)
        try:
            yield Path(run("buildah", "mount", container))
        finally:
            run("buildah", "rm", container)


class Container:
    """The image's command under an OCI runtime, from `start` to `stop`."""

    def __init__(self, image: Image, root: Path, folder: Path, runtime: str, port: int) -> None:
        self._runtime, self._folder = (*ALONE, runtime, "--cgroup-manager=disabled"), folder
        self.id = f"minserve-verify-{os.getpid()}"
        self.url = f"http://127.0.0.1:{port}"
        run(runtime, "spec", "--bundle", str(folder))
        path = folder / "config.json"
        spec = json.loads(path.read_text())
        config = image.config
        user, group = map(int, config["User"].split(":"))
        process = spec["process"]
        process.update(
            terminal=False,
            user={"uid": user, "gid": group},
            args=[*config["Entrypoint"], *config["Cmd"]],
            env=[*config["Env"], f"MINSERVE_PORT={port}", "MINSERVE_DEVICE=cpu"],
            cwd=config["WorkingDir"],
            noNewPrivileges=True,
            capabilities={kind: [] for kind in process["capabilities"]},
        )
        process.pop("rlimits", None)  # those of whoever starts it
        spec["root"] = {"path": str(root), "readonly": True}
        spec["mounts"].append(
            {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["mode=1777"]}
        )
        for volume in config["Volumes"]:
            source = folder / volume.strip("/")
            source.mkdir()
            os.chown(source, user, group)
            mount = {"destination": volume, "type": "bind", "source": str(source)}
            spec["mounts"].append({**mount, "options": ["rbind", "rw"]})
        # No limits are tried, so no control group is needed: not every machine lends one.
        spec["mounts"] = [one for one in spec["mounts"] if one["type"] != "cgroup"]
        linux = spec["linux"]
        shared = ("network", "cgroup")
        linux["namespaces"] = [one for one in linux["namespaces"] if one["type"] not in shared]
        linux.pop("resources", None)
        path.write_text(json.dumps(spec))

    def start(self) -> None:
        self._log = (self._folder / "log").open("ab")
        command = [*self._runtime, "run", "--bundle", self._folder, self.id]
        self.process = subprocess.Popen(command, stdout=self._log, stderr=self._log)

    def log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")

    def execute(self, *command: str) -> tuple[int, str]:
        """Exit code and output of a command beside the server, as the server's user."""
        done = subprocess.run(
            [*self._runtime, "exec", f"--user={UID}:{UID}", self.id, *command],
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, (done.stdout + done.stderr).strip()

    def signal(self, number: int) -> None:
        run(*self._runtime, "kill", self.id, str(int(number)))

    def stop(self) -> None:
        """Idempotent."""
        if self.process.poll() is None:
            self.signal(signal.SIGKILL)
            self.process.wait(STOP_SECONDS)
        self._log.close()

    def ask(self, path: str, body: Any = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(answer.read().decode())

    def ready(self) -> None:
        """Raises RuntimeError with the log where it is not ready in time."""
        begun = time.monotonic()
        while time.monotonic() - begun < READY_SECONDS and self.process.poll() is None:
            with contextlib.suppress(OSError):
                self.ask("/ready")
                return
            time.sleep(0.1)
        raise RuntimeError(f"the container did not become ready:\n{self.log()}")


class Checks:
    """What was looked at, a printed line each."""

    def __init__(self) -> None:
        self.failed = 0

    def __call__(self, what: str, right: bool, seen: object = "") -> None:
        self.failed += not right
        print(f"{'pass' if right else 'FAIL'}  {what}" + (f": {seen}" if str(seen) else ""))


def check_files(image: Image, root: Path, check: Checks) -> None:
    """What is in the image, and what is not."""
    config = image.config
    check("user", config["User"] == f"{UID}:{UID}", config["User"])
    check("stop signal", config["StopSignal"] == "SIGTERM")
    check("health check", config["Healthcheck"]["Test"] == ["CMD", "python", "/opt/healthcheck.py"])
    check("volumes", set(config["Volumes"]) == {"/models", "/states"})
    labels = {name.rpartition(".")[2] for name in config["Labels"]}
    check("labels", {"title", "description", "licenses", "version", "revision"} <= labels)
    places = [root / part for part in ("bin", "usr/bin", "usr/local/bin", "opt/minserve/bin")]
    tools = [tool for tool in TOOLS if any((place / tool).exists() for place in places)]
    check("no compiler, linker or build tool", not tools, ", ".join(tools))
    (packages,) = (root / "opt/minserve/lib").glob("python3*/site-packages")
    sizes = {entry.name: size(entry) for entry in packages.iterdir()}
    check("extension", (packages / "engine/ops/libminserve.so").exists())
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:6]
    print(f"      size: {size(root)} MB, of which installed {sum(sizes.values())} MB:",
          ", ".join(f"{name} {sizes[name]}" for name in largest))  # fmt: skip


def size(path: Path) -> int:
    """Megabytes (10**6 bytes) of a file or of all files below."""
    files = [path] if not path.is_dir() else path.rglob("*")
    return round(sum(one.lstat().st_size for one in files if not one.is_dir()) / 1e6)


def check_service(container: Container, check: Checks) -> None:
    """That it serves, as whom, and that it can write only where it should."""
    generate = {"prompts": ["ROMEO:"], "max_tokens": 8, "temperature": 0}
    (result,) = json.loads(container.ask("/v1/generate", generate))["results"]
    check("generate", len(result["token_ids"]) == 8, repr(result["text"]))
    (score,) = json.loads(container.ask("/v1/score", {"texts": ["To be"]}))["results"]
    check("score", score["total_logprob"] < 0, score["total_logprob"])
    metrics = container.ask("/metrics")
    check("metrics", "minserve_generation_tokens_total 8.0" in metrics)
    state = json.loads(container.ask("/v1/states", {"prompt": "ROMEO:", "id": "verify"}))
    check("state", state["id"] == "verify")
    status = container.execute("cat", "/proc/1/status")[1]
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    check("user id of process 1", set(fields["Uid"].split()) == {str(UID)}, fields["Uid"])
    check("no capability", int(fields["CapEff"], 16) == 0 and fields["NoNewPrivs"] == "1")
    check("root file system cannot be written", container.execute("touch", "/x")[0] != 0)
    code, seen = container.execute("touch", "/states/x")
    check("state folder can", code == 0, seen)
    code, seen = container.execute("python", "/opt/healthcheck.py")
    check("health check", code == 0, seen)
    code, seen = container.execute("sh", "-c", "MINSERVE_PORT=1 python /opt/healthcheck.py")
    check("health check of a server that is not there", code == 1)


def check_drain(container: Container, check: Checks) -> None:
    """An answer in flight is whole, though the server was told to stop."""
    body = {"prompts": ["ROMEO:"], "max_tokens": 400, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(
        container.url + "/v1/generate",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    lines: list[bytes] = []
    begun = threading.Event()

    def read() -> None:
        with urllib.request.urlopen(request, timeout=STOP_SECONDS) as answer:
            for line in answer:
                lines.append(line.strip())
                begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    begun.wait(STOP_SECONDS)
    before = len(lines)
    container.signal(signal.SIGTERM)
    time.sleep(0.2)
    try:
        container.ask("/v1/generate", {"prompts": ["x"], "max_tokens": 1})
        refused = "it was taken"
    except urllib.error.HTTPError as error:
        refused = str(error.code)
    except OSError as error:
        refused = type(error).__name__
    reader.join(STOP_SECONDS)
    events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    reasons = [one["finish_reason"] for one in events if one.get("finish_reason")]
    check(
        "the answer in flight at SIGTERM was whole",
        reasons == ["length"] and lines[-2:].count(b"data: [DONE]") == 1 and before < len(lines),
        f"{before} lines before, {len(lines)} in all",
    )
    check("a new request meanwhile was not", refused != "it was taken", refused)
    check("exit code", container.process.wait(STOP_SECONDS) == 0, container.process.returncode)


def main() -> int:
    """The exit code."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("image")
    options.add_argument("--runtime", default="crun")
    options.add_argument("--port", type=int, default=8767)
    args = options.parse_args()
    for program in ("buildah", args.runtime):
        if shutil.which(program) is None or os.geteuid() != 0:
            print(f"{program} is not here, or this is not root", file=sys.stderr)
            return 1
    check = Checks()
    image = Image(args.image)
    with image.mounted() as root, tempfile.TemporaryDirectory() as folder:
        check_files(image, root, check)
        os.chmod(folder, 0o755)
        container = Container(image, root, Path(folder), args.runtime, args.port)
        container.start()
        try:
            container.ready()
            check_service(container, check)
            check_drain(container, check)
            container.stop()
            container.start()
            container.ready()
            kept = json.loads(container.ask("/v1/states/verify"))
            check("the state outlives the container", kept["id"] == "verify", kept)
        finally:
            container.stop()
        if check.failed:
            print(container.log())
    print(f"{args.image}: {'all passed' if not check.failed else f'{check.failed} failed'}")
    return 1 if check.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Runs the commands of the README, in order, as a reader would; the first that fails ends it.

Servers go on in the background until the end. What CI has done before this (clone, tests) is left out by name, and the smoke
profile stands in for the laptop's, which trains longer and does nothing else.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
DONE_BY_CI = {"git clone <this repository> klear && cd klear", "make test"}
SERVERS = {"klear ui": "Ctrl-C stops", "prefect worker start --pool klear --type process": "started!"}
IN_ITS_PLACE = ("configs/laptop", "configs/smoke")
START_TIMEOUT_S = 180
COMMAND = re.compile(r"^(git|make|klear|prefect|source|export) ")


def commands(readme: str) -> list[str]:
    """Lines of the code blocks without a language, their comments cut off."""
    found, fence = [], None
    for line in readme.splitlines():
        if line.startswith("```"):
            fence = line if fence is None else None
        elif fence == "```" and COMMAND.match(line):
            found.append(line.split("   #")[0].strip())
    return found


def start_server(command: str, env: dict[str, str]) -> subprocess.Popen[str]:
    log = ROOT / "runs" / f"{command.split(maxsplit=1)[0]}.log"
    with log.open("w") as out:
        server = subprocess.Popen(command, shell=True, cwd=ROOT, env=env, stdout=out, stderr=out, text=True, start_new_session=True)
    deadline = time.monotonic() + START_TIMEOUT_S
    while SERVERS[command] not in log.read_text():
        if server.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"{command!r} did not start:\n{log.read_text()}")
        time.sleep(0.5)
    return server


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a script in the background ignores it, and servers would inherit that
    env = os.environ | {"DEMO": IN_ITS_PLACE[1], "PATH": f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"}
    servers: dict[str, subprocess.Popen[str]] = {}
    try:
        for command in commands((ROOT / "README.md").read_text()):
            print(f"\n$ {command}", flush=True)
            if command in DONE_BY_CI or command in servers or command.startswith("source "):
                continue
            if command.startswith("export "):
                name, _, value = command.removeprefix("export ").partition("=")
                env[name] = value
            elif command in SERVERS:
                servers[command] = start_server(command, env)
            elif subprocess.run(command.replace(*IN_ITS_PLACE), shell=True, cwd=ROOT, env=env, check=False).returncode:
                sys.exit(f"the README's command failed: {command}")
    finally:
        for server in reversed(servers.values()):
            os.killpg(server.pid, signal.SIGINT)
            server.wait(timeout=60)


if __name__ == "__main__":
    main()

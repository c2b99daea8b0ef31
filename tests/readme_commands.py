"""Runs the commands and Python of the README and of the pages it leads to, in order; the first that fails ends it.

Servers go on in the background until the end. What CI has done before this (clone, tests) is left out by name. The smoke profile
stands in for the laptop's, which trains longer and does nothing else, and a question that its model was trained for.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/running.md", "docs/operations.md", "docs/benchmarks.md")
DONE_BY_CI = {"git clone <this repository> klear && cd klear", "make test"}
SERVERS = {
    "klear ui": "Ctrl-C stops",
    "prefect worker start --pool klear --type process": "started!",
    "klear sweep --pool klear": "sweeping klear",
}
IN_ITS_PLACE = {"configs/laptop": "configs/smoke", "mod 10: 3,+4,*7,-2=?": "mod 6: 3,+4,*5=?"}
ANSWERED = "\\boxed{"
"""Stands in what a model says that was asked something."""
START_TIMEOUT_S = 180
COMMAND = re.compile(r"^(git|make|klear|prefect|source|export) ")


def commands(readme: str) -> list[str]:
    """Lines of the code blocks without a language, their comments cut off, and whole blocks of Python."""
    found: list[str] = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL):
        if language == "python":
            found.append(f"python -c {shlex.quote(block)}")
        elif not language:
            found += [line.split("   #")[0].strip() for line in block.splitlines() if COMMAND.match(line)]
    return found


def run(command: str, env: dict[str, str]) -> None:
    """Run one command here and now. What asks a model something must also show its answer."""
    for laptops, smokes in IN_ITS_PLACE.items():
        command = command.replace(laptops, smokes)
    asks = command.startswith(("klear chat", "python -c"))
    ended = subprocess.run(
        command, shell=True, cwd=ROOT, env=env, check=False, stdout=subprocess.PIPE if asks else None, text=True
    )
    print(ended.stdout or "", end="", flush=True)
    if ended.returncode or (asks and ANSWERED not in ended.stdout):
        sys.exit(f"this documented command failed: {command}")


def start_server(command: str, env: dict[str, str]) -> subprocess.Popen[str]:
    log = ROOT / "runs" / f"{'-'.join(command.split()[:2])}.log"
    with log.open("w") as out:
        server = subprocess.Popen(
            command, shell=True, cwd=ROOT, env=env, stdout=out, stderr=out, text=True, start_new_session=True
        )
    deadline = time.monotonic() + START_TIMEOUT_S
    while SERVERS[command] not in log.read_text():
        if server.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"{command!r} did not start:\n{log.read_text()}")
        time.sleep(0.5)
    return server


def main() -> None:
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a script in the background ignores it, and servers would inherit that
    env = os.environ | {
        "DEMO": IN_ITS_PLACE["configs/laptop"],
        "PATH": f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}",
    }
    servers: dict[str, subprocess.Popen[str]] = {}
    try:
        for command in (c for page in PAGES for c in commands((ROOT / page).read_text())):
            print(f"\n$ {command}", flush=True)
            if command in DONE_BY_CI or command in servers or command.startswith("source "):
                continue
            if command.startswith("export "):
                name, _, value = command.removeprefix("export ").partition("=")
                env[name] = value
            elif command in SERVERS:
                servers[command] = start_server(command, env)
            else:
                run(command, env)
    finally:
        for server in reversed(servers.values()):
            os.killpg(server.pid, signal.SIGINT)
            server.wait(timeout=60)


if __name__ == "__main__":
    main()

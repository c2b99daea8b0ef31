#!/bin/sh
# Gives this machine what the code judge needs: firejail, numpy for the sandbox's interpreter (LiveCodeBench's harness has it), and
# (where root runs Klear) an ordinary user for untrusted programs.
# Root on Debian or Ubuntu; elsewhere install the packages `firejail` (or `bubblewrap`) and `python3-numpy` of your system.
set -eu
if [ "$(id -u)" != 0 ]; then
    echo "run this as root: sudo sh infra/firejail/setup.sh" >&2
    exit 1
fi
if ! command -v firejail >/dev/null; then
    command -v apt-get >/dev/null || { echo "no apt-get here: install firejail or bubblewrap by your package manager" >&2; exit 1; }
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends firejail
fi
if ! /usr/bin/python3 -I -c "import numpy" 2>/dev/null && command -v apt-get >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    # without it only programs that import it differ, and a note of the stage says so
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends python3-numpy; } || echo "numpy was not installed" >&2
fi
if ! id klear-sandbox >/dev/null 2>&1; then
    useradd --system --create-home --home-dir /var/lib/klear-sandbox --shell /usr/sbin/nologin klear-sandbox
fi

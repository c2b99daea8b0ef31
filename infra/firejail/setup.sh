#!/bin/sh
# Gives this machine what the code judge needs: firejail, and (where root runs Klear) an ordinary user for untrusted programs.
# Root on Debian or Ubuntu; elsewhere install the package `firejail` (or `bubblewrap`) of your system.
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
if ! id klear-sandbox >/dev/null 2>&1; then
    useradd --system --create-home --home-dir /var/lib/klear-sandbox --shell /usr/sbin/nologin klear-sandbox
fi

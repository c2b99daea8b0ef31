#!/bin/sh
# Sets up the code sandbox where that is possible without asking: as root on Debian or Ubuntu. Elsewhere says what is left out.
set -eu
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    if sh "$(dirname "$0")/firejail/setup.sh"; then exit; fi
    echo "firejail could not be set up" >&2
fi
if ! command -v firejail >/dev/null && ! command -v bwrap >/dev/null; then
    echo "no sandbox: the tests that judge code are left out. To have them: sudo sh infra/firejail/setup.sh" >&2
fi

#!/usr/bin/env bash
# Let this machine's island finish what it is doing and leave the board.
#
# Usage: bash sky/scripts/drain.sh      (a lifecycle hook of sky/rollout-worker.yaml; by hand before taking a machine)
# Returns when the island has ended, or after 50 seconds.
set -euo pipefail

file="${SPRAWL_HOME:-$HOME/.sprawl}/island.pid"
[ -s "$file" ] || exit 0
read -r pid <"$file"
# The number may be another process's by now: ask what it runs.
grep -qa 'infra.skypilot.island' "/proc/$pid/cmdline" 2>/dev/null || exit 0
kill -TERM "$pid" 2>/dev/null || exit 0
for _ in $(seq 100); do
  kill -0 "$pid" 2>/dev/null || exit 0
  sleep 0.5
done

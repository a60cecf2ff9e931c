#!/usr/bin/env bash
# One rollout island: `sprawl island`, found by others, drained when the machine is about to be taken.
#
# Usage: bash sky/scripts/island.sh      (`run:` of sky/rollout-worker.yaml, whose header says what the exit codes mean)
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

exec "$SPRAWL_BIN" -m infra.skypilot.island

#!/usr/bin/env bash
# The anchor circuit of a run, from before the run exists to its last fire.
#
# Usage: bash sky/scripts/anchor.sh      (`run:` of sky/anchor.yaml)
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

exec "$SPRAWL_BIN" -m sprawl.cli anchor --board "$SPRAWL_BOARD" --run-id "${SPRAWL_RUN_ID:-latest}" --wait 3600
